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


def run_preflight(context: typer.Context, file: Path | None, request: DoctorFlags) -> int:
    """Run the preflight as this rank, or launch local ranks for it; return the exit code."""
    place = read_place(os.environ)
    with report_errors_once(place):
        config = None if file is None else load_config(file, {})
        degrees = read_axes(request.axes) if request.axes or config is None else config.axes
        folder = request.folder or (config.output if config is not None else None)
        num_ranks = 1 if place is not None else request.ranks or (config and config.ranks) or 1
        degrees.over(num_ranks if place is None else place.world_size)
        if num_ranks > 1:
            return launch_local_ranks(["doctor", *context.meta["arguments"]], num_ranks)
        from shardwise.preflight.meeting import Meeting, open_store
        from shardwise.preflight.run import Request, preflight

        place, timeout_s = place or RankPlace(0, 1, 0, 1), request.timeout
        meeting = Meeting(open_store(os.environ, place, timeout_s), place, timeout_s)
        settings = Request(degrees, folder, timeout_s)
        with share_bar(place.rank == 0) as progress:
            verdict, result = preflight(meeting, settings, os.environ, progress)
        if result is not None and request.json_:
            print_json(result.to_json())
        elif result is not None:
            _show(result)
    return _CODES[verdict]


def read_axes(text: str | None) -> Axes:
    """Read degrees such as ``tp=8,pp=2``. **Raises** ConfigError with the known names."""
    degrees = Axes()
    for item in (text or "").split(",") if text else []:
        match = re.fullmatch(r"\s*(\w+)=([0-9]{1,9})\s*", item)
        names = [field.name for field in fields(Axes) if field.name != "device_type"]
        if match is None or match[1] not in names:
            raise ConfigError(
                f"flag --axes: expected degrees such as tp=8,pp=2 of {', '.join(names)}, "
                f"got {item!r}"
            )
        degrees = replace(degrees, **{match[1]: int(match[2])})  # type: ignore[arg-type]
    return degrees


def _show(result: Preflight) -> None:
    console = open_console()
    columns = "node", "ranks", "address", ">free", ">trip", ">clock", ">products", ">link"
    console.print(make_table(columns, [_cells(node) for node in result.nodes]))
    for check in result.checks:
        line = Text.assemble((f"{check.verdict:>6} ", _LOOKS[check.verdict]), f" {check.name}: ")
        console.print(line.append(printable(check.text)), soft_wrap=True)
    if result.not_reached:
        console.print(Text(f"not looked at after this: {', '.join(result.not_reached)}"))
    nodes = "one node" if len(result.nodes) == 1 else f"{len(result.nodes)} nodes"
    summary = {
        "ok": "nothing was result: the run can begin",
        "odd": "the run can begin; look at what is odd",
        "failed": "the run would fail",
    }[result.verdict]
    console.print(
        Text.assemble(
            (summary, _LOOKS[result.verdict]),
            f" ({result.num_ranks} ranks on {nodes}, {result.seconds:.1f} s)",
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
