"""`shardwise report`: observed runs as one HTML file, their timelines as a Chrome trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from shardwise import terminal
from shardwise.cli.flags import check_target, write_file
from shardwise.cli.planned_run import config_of, plan_of_loop, plan_of_run
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.page import ShownRun, report_html
from shardwise.monitor.record import RunRecord, folder_of, read_run
from shardwise.monitor.timeline import recorded_trace
from shardwise.quantities import format_bytes

_Runs = Annotated[
    list[Path],
    typer.Argument(help="outputs of observed runs, side by side on one page", show_default=False),
]
_Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="the page (default: report.html in RUN)")
]
_Trace = Annotated[
    Path | None,
    typer.Option(help="write timelines of a run here too: Chrome trace JSON, for Perfetto"),
]
_Steps = Annotated[int, typer.Option(min=1, help="how many of the newest timelines a trace has")]
_WithPlan = Annotated[
    bool, typer.Option("--plan/--no-plan", help="plan what `shardwise train` ran, and compare")
]
_Planned = Annotated[
    str | None,
    typer.Option(
        metavar="'MODEL [FLAGS]'", help="what `shardwise plan` is given for a loop of your own"
    ),
]


def report(
    runs: _Runs,
    output: _Output = None,
    trace: _Trace = None,
    trace_steps: _Steps = 10,
    plan: _WithPlan = True,
    planned: _Planned = None,
) -> int:
    """Draw observed runs as one HTML file without other files.

    A run under way can be drawn too. If RUN has the config.yaml of `shardwise train`, the plan
    of the same settings is shown beside the measurements. For other loops give the arguments of
    `shardwise plan` with --planned; ranks, stage and degrees are the run's.
    """
    page = output if output is not None else folder_of(runs[0]).parent / "report.html"
    if trace is not None and len(runs) > 1:
        raise ConfigError(f"flag --trace: one run at a time, got {len(runs)}")
    records = [read_run(path, newest=trace_steps if trace else 2) for path in runs]
    check_target("output", page)
    check_target("trace", trace)
    # Names that tell runs apart: their last parts, else their paths.
    names = [folder_of(path).resolve().parent.name for path in runs]
    names = names if len(set(names)) == len(names) else [str(path) for path in runs]
    shown = [_shown(*each, plan, planned) for each in zip(names, records, strict=True)]
    _write("output", page, report_html(shown))
    if trace is not None:
        _write("trace", trace, json.dumps(recorded_trace(records[0])))
    return 0


def _write(flag: str, path: Path, text: str) -> None:
    write_file(flag, path, text)
    opens = ": open it in Perfetto (ui.perfetto.dev)" if flag == "trace" else ""
    terminal.say(f"wrote {path}, {format_bytes(path.stat().st_size)}{opens}\n")


def _shown(name: str, record: RunRecord, with_plan: bool, planned: str | None) -> ShownRun:
    config, run = config_of(record), ShownRun(name, record, diagnose(record))
    if planned is not None:
        plan, is_of_device = plan_of_loop(planned, record)
    elif not with_plan or config is None:
        return run
    else:
        try:
            plan, is_of_device = plan_of_run(config, record)
        except (ShardwiseError, OSError) as error:
            return replace(run, notes=[f"no plan beside it: {error}"])
    return replace(run, plan=plan, is_planned_device=is_of_device)
