"""`shardwise doctor --preflight`: a table of nodes and the verdicts, or JSON."""

from __future__ import annotations

import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from shardwise.axes import Axes
from shardwise.cli.flags import print_json
from shardwise.cli.tables import make_table
from shardwise.cli.train import read_place, report_errors_once
from shardwise.errors import ConfigError
from shardwise.progress import share_bar
from shardwise.quantities import format_bytes
from shardwise.terminal import open_console, printable
from shardwise.train.config import load_config
from shardwise.train.launch import RankPlace, launch_local_ranks

if TYPE_CHECKING:
    from shardwise.cli.doctor import DoctorFlags
    from shardwise.preflight.checks import NodeReport, Preflight

_CODES = {"ok": 0, "odd": 1, "failed": 2}
_LOOKS = {"ok": "green", "odd": "yellow", "failed": "bold red"}


def look_ahead(context: typer.Context, file: Path | None, asked: DoctorFlags) -> int:
    """Run the preflight as this rank, or launch local ranks for it; return the exit code."""
    place = read_place(os.environ)
    with report_errors_once(place):
        config = None if file is None else load_config(file, {})
        degrees = read_axes(asked.axes) if asked.axes or config is None else config.axes
        folder = asked.folder or (config.output if config is not None else None)
        num_ranks = 1 if place is not None else asked.ranks or (config and config.ranks) or 1
        degrees.over(num_ranks if place is None else place.world_size)
        if num_ranks > 1:
            return launch_local_ranks(["doctor", *context.meta["arguments"]], num_ranks)
        from shardwise.preflight.meeting import Meeting, open_store
        from shardwise.preflight.run import Request, preflight

        place, timeout_s = place or RankPlace(0, 1, 0, 1), asked.timeout
        meeting = Meeting(open_store(os.environ, place, timeout_s), place, timeout_s)
        request = Request(degrees, folder, timeout_s)
        with share_bar(place.rank == 0) as progress:
            verdict, found = preflight(meeting, request, os.environ, progress)
        if found is not None and asked.json_:
            print_json(found.to_json())
        elif found is not None:
            _show(found)
    return _CODES[verdict]


def read_axes(text: str | None) -> Axes:
    """Read degrees such as ``tp=8,pp=2``. **Raises** ConfigError with the known names."""
    degrees = Axes()
    for each in (text or "").split(",") if text else []:
        found = re.fullmatch(r"\s*(\w+)=([0-9]{1,9})\s*", each)
        names = [field.name for field in fields(Axes) if field.name != "device_type"]
        if found is None or found[1] not in names:
            raise ConfigError(
                f"flag --axes: expected degrees such as tp=8,pp=2 of {', '.join(names)}, "
                f"got {each!r}"
            )
        degrees = replace(degrees, **{found[1]: int(found[2])})  # type: ignore[arg-type]
    return degrees


def _show(found: Preflight) -> None:
    console = open_console()
    columns = "node", "ranks", "address", ">free", ">trip", ">clock", ">products", ">link"
    console.print(make_table(columns, [_cells(node) for node in found.nodes]))
    for check in found.checks:
        line = Text.assemble((f"{check.verdict:>6} ", _LOOKS[check.verdict]), f" {check.name}: ")
        console.print(line.append(printable(check.text)), soft_wrap=True)
    if found.not_reached:
        console.print(Text(f"not looked at after this: {', '.join(found.not_reached)}"))
    nodes = "one node" if len(found.nodes) == 1 else f"{len(found.nodes)} nodes"
    said = {
        "ok": "nothing was found: the run can begin",
        "odd": "the run can begin; look at what is odd",
        "failed": "the run would fail",
    }[found.verdict]
    console.print(
        Text.assemble(
            (f"{said}", _LOOKS[found.verdict]),
            f" ({found.num_ranks} ranks on {nodes}, {found.seconds:.1f} s)",
        )
    )


def _cells(node: NodeReport) -> list[str]:
    def shown(value: float | None, text: str, factor: float = 1.0) -> str:
        return "" if value is None else text.format(value * factor)

    first, last = node.ranks[0], node.ranks[-1]
    free = node.device_free_bytes or node.host_free_bytes
    rate = "" if node.link_bytes_per_s is None else f"{format_bytes(node.link_bytes_per_s)}/s"
    return [
        node.host,
        str(first) if first == last else f"{first}-{last}",
        f"{node.address} {node.interface}".rstrip(),
        format_bytes(free),
        shown(node.trip_s, "{:.2f} ms", 1e3),
        shown(node.offset_s, "{:+.3f} s"),
        shown(node.flops, "{:,.0f} GFLOP/s", 1e-9),
        rate,
    ]
