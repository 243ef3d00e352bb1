"""`shardwise top`: a live view of an observed run in the terminal; `--json` for other tools."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shardwise import terminal
from shardwise.cli.tables import make_table
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.metrics import FIGURES, STEP_S
from shardwise.monitor.record import RunRecord, gap_of, is_late, read_ends
from shardwise.monitor.summary import (
    kinds_shown,
    largest_memory,
    metric_curve,
    phase_seconds,
    value_curve,
    write_figure,
)
from shardwise.quantities import format_bytes, format_duration
from shardwise.svg import name_of_kind
from shardwise.terminal import printable

_BARS = "▁▂▃▄▅▆▇█"
_CURVE, _SHARE = 32, 30  # characters
_MOST_VALUES, _MOST_FINDINGS = 6, 4


_Run = Annotated[Path, typer.Argument(help="output of an observed run", show_default=False)]
_Once = Annotated[bool, typer.Option("--once", help="print what there is now, and end")]
_AsJson = Annotated[bool, typer.Option("--json", help="the same as JSON for programs, once")]
_Every = Annotated[float, typer.Option(min=0.1, help="seconds between two looks")]


def top(run: _Run, once: _Once = False, as_json: _AsJson = False, every: _Every = 1.0) -> int:
    """Show an observed run live: figures over all ranks, time, memory.

    Reads the files of RUN as they grow, so it works on every machine that sees them. Ctrl-C
    ends it without effect on the run.
    """
    console = terminal.open_console()
    if as_json:
        terminal.say(json.dumps(snapshot_of(read_ends(run))) + "\n")
    elif once:
        console.print(view(read_ends(run)))
    else:
        with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as shown:
            while True:
                shown.update(view(read_ends(run)), refresh=True)
                time.sleep(every)
    return 0


def snapshot_of(run: RunRecord) -> dict[str, object]:
    """Return a run at one moment as values of JSON; figures are those of the newest line."""
    latest = run.steps[-1] if run.steps else None
    values = asdict(latest) if latest else {}
    return {
        "run": str(run.path),
        "num_ranks": run.facts.num_ranks,
        "device": run.facts.device,
        "stage": run.facts.stage,
        "step": latest.step if latest else 0,
        "at_s": latest.at_s if latest else 0.0,
        "quiet_s": round(run.idle_s or 0.0, 3),
        "is_late": is_late(run),
        "ending": run.ending,
        **{name: values.get(name, {}) for name in ("metrics", "values", "values_over_steps")},
        "phases_s": phase_seconds(run.steps),
        **diagnose(run).to_json(),
    }


def view(run: RunRecord) -> RenderableType:
    """Return the view of a run at one moment, in two columns if the terminal is wide enough."""
    facts, quiet = run.facts, format_duration(run.idle_s or 0.0)
    head = Text(printable(run.path), "bold")
    head.append(
        f"  {facts.num_ranks} x {printable(facts.device)}, stage {facts.stage}, "
        f"{format_bytes(facts.full_bytes)} of parameters, {len(facts.units)} units",
        "dim",
    )
    if not run.steps:
        return Group(head, Text(f"no step is over yet, {quiet} so far"))
    latest = run.steps[-1]
    status = Text(f"step {latest.step:,}", "bold")
    status.append(f"  after {format_duration(latest.at_s)}")
    status.append(f"  newest figures {quiet} ago", "dim")
    if is_late(run):
        usual = format_duration(gap_of(run) or 0.0)
        status.append(f", usually every {usual}: it was killed, or it hangs", "bold yellow")
    elif run.ending is not None:
        status.append(f"  {printable(run.ending)}", "bold")
    findings = _findings(run)
    left: list[RenderableType] = [_figures(run), *_curves(run)]
    phases = [(name, s, f"{s:.3g}") for name, s in phase_seconds(run.steps).items()]
    right: list[RenderableType] = [_shares("where a step's time goes", "seconds", phases)]
    right += _memory(run)
    return Group(head, status, *findings, Columns([Group(*left), Group(*right)], padding=(0, 4)))


def _findings(run: RunRecord) -> list[RenderableType]:
    findings = diagnose(run).findings
    rows: list[RenderableType] = []
    for finding in findings[:_MOST_FINDINGS]:
        colour = "red" if finding.severity == "critical" else "yellow"
        row = Text(f"{finding.code} {finding.title}: ", colour)
        rows.append(row.append(printable(finding.verdict), "default"))
    if len(findings) > _MOST_FINDINGS:
        rows.append(Text(f"and {len(findings) - _MOST_FINDINGS} more: `shardwise doctor`", "dim"))
    return rows


def _figures(run: RunRecord) -> Table:
    rows = []
    for shown in FIGURES:
        value = run.steps[-1].metrics.get(shown.metric)
        if value is not None and shown.is_shown(value):
            row = [shown.title, write_figure(value.median)]
            if value.min != value.max:
                row += [write_figure(value.min), str(value.min_rank)]
                row += [write_figure(value.max), str(value.max_rank)]
            rows.append(row)
    return make_table(("", ">median", ">lowest", ">rank", ">highest", ">rank"), rows)


def _curves(run: RunRecord) -> list[Text]:
    """Return logged values and the step time as lines of blocks."""
    latest = run.steps[-1].values
    curves = {name: value_curve(run.steps, name, _CURVE) for name in [*latest][:_MOST_VALUES]}
    curves["step time, s"] = metric_curve(run.steps, STEP_S, _CURVE)
    width, rows = max(map(len, curves)), []
    for name, points in curves.items():
        value = latest.get(name, points[-1].middle if points else None)
        newest = "not a number" if value is None else f"{value:.4g}"
        if points:
            newest += f"  {min(p.low for p in points):.4g} to {max(p.high for p in points):.4g}"
        blocks = sparkline([point.middle for point in points])
        rows.append(Text(f"{printable(name):<{width}}  {blocks:<{_CURVE}}  {newest}"))
    return rows


def sparkline(values: Sequence[float]) -> str:
    """Write values as blocks of eight heights."""
    low, reach = min(values, default=0.0), max(values, default=0.0) - min(values, default=0.0)
    heights = ((value - low) / (reach or 1.0) * (len(_BARS) - 1) for value in values)
    return "".join(_BARS[round(height)] for height in heights)


def _memory(run: RunRecord) -> list[RenderableType]:
    """Return the memory of the rank that had the most in its newest sampled step."""
    largest = largest_memory(run)
    if largest is None:
        return []
    rank, line = largest
    kinds = kinds_shown(line.moments[line.peak], run.facts)
    whole = format_bytes(sum(kinds.values()))
    title = f"memory of rank {rank}, step {line.step:,}, at its peak: {whole}"
    rows = [(name_of_kind(kind), float(size), format_bytes(size)) for kind, size in kinds.items()]
    return [Text(title), _shares("kind", "bytes", rows)]


def _shares(title: str, unit: str, rows: Sequence[tuple[str, float, str]]) -> Table:
    """Return a table of (name, value, value as text), with the share that each value has."""
    whole = sum(value for _, value, _ in rows) or 1.0
    texts = (
        (name, text, f"{value / whole:.1%}", "█" * round(value / whole * _SHARE))
        for name, value, text in rows
    )
    return make_table((title, f">{unit}", ">share", ""), texts)
