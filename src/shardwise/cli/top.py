"""`shardwise top`: a live view of an observed run in the terminal; `--json` for other tools."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise import terminal

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shardwise.monitor.live_run import Snapshot

_BARS = "▁▂▃▄▅▆▇█"
_CURVE, _SHARE = 32, 30  # characters
_MOST_VALUES, _MOST_FINDINGS = 6, 4
_TWO_COLUMNS = 150  # characters

_Run = Annotated[Path, typer.Argument(help="output of an observed run", show_default=False)]
_Once = Annotated[bool, typer.Option("--once", help="print what there is now, and end")]
_AsJson = Annotated[bool, typer.Option("--json", help="the same as JSON for programs, once")]
_Every = Annotated[float, typer.Option(min=0.1, help="seconds between two looks")]


def top(run: _Run, once: _Once = False, as_json: _AsJson = False, every: _Every = 1.0) -> int:
    """Show an observed run live: figures over all ranks, time, memory.

    Reads the files of RUN as they grow, so it works on every machine that sees them. Ctrl-C
    ends it without effect on the run.
    """
    from shardwise.monitor.live_run import LiveRun
    from shardwise.terminal import open_console

    live, console = LiveRun(run), open_console()
    if as_json:
        terminal.say(json.dumps(live.look().to_json()) + "\n")
    elif once:
        console.print(view(live.look(), console.width))
    else:
        from rich.live import Live

        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as shown:
            while True:
                shown.update(view(live.look(), console.width), refresh=True)
                time.sleep(every)
    return 0


def view(now: Snapshot, width: int) -> RenderableType:
    """Return the view of a run at one moment, in two columns if the terminal is wide enough."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from shardwise.cli.tables import printable
    from shardwise.quantities import format_bytes, format_duration

    facts = now.record.facts
    head = Text(printable(now.record.path), "bold")
    head.append(
        f"  {facts.num_ranks} x {printable(facts.device)}, stage {facts.stage}, "
        f"{format_bytes(facts.full_bytes)} of parameters, {len(facts.units)} units",
        "dim",
    )
    if not now.lines:
        return Group(head, Text(f"no step is over yet, {format_duration(now.quiet_s)} so far"))
    latest = now.lines[-1]
    said = Text(f"step {latest.step:,}", "bold")
    said.append(f"  after {format_duration(latest.at_s)}")
    said.append(f"  newest figures {format_duration(now.quiet_s)} ago", "dim")
    if now.is_late and now.gap_s is not None:
        usual = format_duration(now.gap_s)
        said.append(f", usually every {usual}: it was killed, or it hangs", "bold yellow")
    elif now.ending is not None:
        said.append(f"  {printable(now.ending)}", "bold")
    findings = _findings(now)
    left, right = (_figures(now), *_curves(now)), (_phases(now), *_memory(now))
    if width < _TWO_COLUMNS:
        return Group(head, said, *findings, *left, *right)
    columns = Table.grid(padding=(0, 4))
    columns.add_row(Group(*left), Group(*right))
    return Group(head, said, *findings, columns)


def _findings(now: Snapshot) -> list[RenderableType]:
    from rich.text import Text

    from shardwise.cli.tables import printable
    from shardwise.monitor.doctor import diagnose

    found = diagnose(now.record).findings
    rows: list[RenderableType] = []
    for finding in found[:_MOST_FINDINGS]:
        colour = "red" if finding.severity == "critical" else "yellow"
        row = Text(f"{finding.code} {finding.title}: ", colour)
        rows.append(row.append(printable(finding.verdict), "default"))
    if len(found) > _MOST_FINDINGS:
        rows.append(Text(f"and {len(found) - _MOST_FINDINGS} more: `shardwise doctor`", "dim"))
    return rows


def _figures(now: Snapshot) -> Table:
    from shardwise.cli.tables import make_table
    from shardwise.monitor.summary import FIGURES, write_figure

    table = make_table("", ">!median", ">!lowest", ">!rank", ">!highest", ">!rank ")
    latest = now.lines[-1].metrics
    for shown in FIGURES:
        value = latest.get(shown.metric)
        if value is not None and shown.is_shown(value):
            row = [shown.title, write_figure(value.median)]
            if value.min != value.max:
                row += [write_figure(value.min), str(value.min_rank)]
                row += [write_figure(value.max), str(value.max_rank)]
            table.add_row(*row)
    return table


def _curves(now: Snapshot) -> list[RenderableType]:
    """Return logged values and the step time as lines of blocks."""
    from rich.text import Text

    from shardwise.cli.tables import printable
    from shardwise.monitor.metrics import STEP_S
    from shardwise.monitor.summary import metric_curve, value_curve

    names = list(now.lines[-1].values)[:_MOST_VALUES]
    curves = {name: value_curve(now.lines, name, _CURVE) for name in names}
    curves["step time, s"] = metric_curve(now.lines, STEP_S, _CURVE)
    width = max(len(name) for name in curves)
    rows: list[RenderableType] = []
    for name, columns in curves.items():
        value = now.lines[-1].values.get(name, columns[-1].middle if columns else None)
        newest = "not a number" if value is None else f"{value:.4g}"
        if columns:
            newest += f"  {min(c.low for c in columns):.4g} to {max(c.high for c in columns):.4g}"
        blocks = sparkline([column.middle for column in columns])
        rows.append(Text(f"{printable(name):<{width}}  {blocks:<{_CURVE}}  {newest}"))
    return rows


def sparkline(values: Sequence[float]) -> str:
    """Write values as blocks of eight heights."""
    if not values:
        return ""
    low, high = min(values), max(values)
    reach = high - low or 1.0
    return "".join(_BARS[round((value - low) / reach * (len(_BARS) - 1))] for value in values)


def _phases(now: Snapshot) -> Table:
    from shardwise.cli.tables import make_table
    from shardwise.monitor.summary import phase_seconds

    table = make_table("where a step's time goes", ">!seconds", ">!share", "!")
    phases = phase_seconds(now.lines)
    whole = sum(phases.values()) or 1.0
    for phase, seconds in phases.items():
        share = seconds / whole
        table.add_row(phase, f"{seconds:.3g}", f"{share:.1%}", "█" * round(share * _SHARE))
    return table


def _memory(now: Snapshot) -> list[RenderableType]:
    """Return the memory of the rank that had the most in its newest sampled step."""
    from shardwise.monitor.pictures import largest_memory, name_of_kind

    most = largest_memory(now.record)
    if most is None:
        return []
    from rich.text import Text

    from shardwise.cli.tables import make_table, printable
    from shardwise.quantities import format_bytes

    kinds = most.moments[most.peak][2]
    whole = most.peak_bytes or 1
    title = f"memory of rank {most.rank}, step {most.step:,}, at its peak"
    table = make_table(title, ">!bytes", ">!share", "!")
    for kind, num_bytes in kinds.items():
        share = num_bytes / whole
        blocks = "█" * round(share * _SHARE)
        table.add_row(
            Text(printable(name_of_kind(kind))), format_bytes(num_bytes), f"{share:.1%}", blocks
        )
    table.add_row("all of it", format_bytes(whole), "", "")
    return [table]
