"""`shardwise report`: observed runs as one HTML file, their timelines as a Chrome trace."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from pydantic import BaseModel

from shardwise import terminal
from shardwise.cli.flags import check_target, takes_keys, write_file
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.keys import check_keys, key
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.page import ShownRun, report_html
from shardwise.monitor.record import RunRecord, folder_of, read_run
from shardwise.monitor.summary import recorded_trace
from shardwise.quantities import format_bytes

if TYPE_CHECKING:
    from shardwise.plan.planning import Plan

_KEYS_OF_AXES = {"replicate": "dp_replicate"} | {name: name for name in ("tp", "pp", "cp", "ep")}


class ReportFlags(BaseModel):
    """The flags of `shardwise report`."""

    output: Path | None = key(None, "Output", "the page (default: report.html in RUN)")
    trace: Path | None = key(
        None, "Output", "write timelines of a run here too: Chrome trace JSON, for Perfetto"
    )
    trace_steps: int = key(10, "Output", "how many of the newest timelines a trace has", ge=1)
    plan: bool = key(True, "Plan", "plan what `shardwise train` ran, and compare")
    planned: str | None = key(
        None, "Plan", "'MODEL [FLAGS]': what `shardwise plan` is given for a loop of your own"
    )


@takes_keys(ReportFlags, "runs", list[Path], "outputs of observed runs, side by side on one page")
def report(_: typer.Context, runs: Sequence[Path] | None, flags: dict[str, object]) -> int:
    """Draw observed runs as one HTML file without other files.

    A run under way can be drawn too. If RUN has the config.yaml of `shardwise train`, the plan
    of the same settings is shown beside the measurements. For other loops give the arguments of
    `shardwise plan` with --planned; ranks, stage and degrees are the run's.
    """
    request = check_keys(ReportFlags, {}, flags, None, "report")
    if not runs:
        raise ConfigError("RUNS: name the output of an observed run, or of several")
    page = request.output or folder_of(runs[0]).parent / "report.html"
    trace = request.trace
    if trace is not None and len(runs) > 1:
        raise ConfigError(f"flag --trace: one run at a time, got {len(runs)}")
    records = [read_run(path, newest=request.trace_steps if trace else 2) for path in runs]
    check_target("output", page)
    check_target("trace", trace)
    # Runs are named by the last parts of their paths, or by their paths if these are equal.
    names = [folder_of(path).resolve().parent.name for path in runs]
    names = names if len(set(names)) == len(names) else [str(path) for path in runs]
    shown = [_shown(name, record, request) for name, record in zip(names, records, strict=True)]
    _write("output", page, report_html(shown))
    if trace is not None:
        _write("trace", trace, json.dumps(recorded_trace(records[0])))
    return 0


def _write(flag: str, path: Path, text: str) -> None:
    write_file(flag, path, text)
    opens = ": open it in Perfetto (ui.perfetto.dev)" if flag == "trace" else ""
    terminal.say(f"wrote {path}, {format_bytes(path.stat().st_size)}{opens}\n")


def _shown(name: str, record: RunRecord, request: ReportFlags) -> ShownRun:
    notes = [record.note] if record.note is not None else []
    run = ShownRun(name, record, diagnose(record), notes=notes)
    config = folder_of(record.path).parent / "config.yaml"  # `shardwise train` leaves it
    if request.planned is not None:
        plan, is_planned_device = plan_of_loop(request.planned, record)
    elif not request.plan or not config.exists():
        return run
    else:
        try:
            plan, is_planned_device = plan_of_run(config, record)
        except (ShardwiseError, OSError) as error:
            return replace(run, notes=[*notes, f"no plan beside it: {error}"])
    return replace(run, plan=plan, is_planned_device=is_planned_device)


def plan_of_run(config: Path, record: RunRecord) -> tuple[Plan, bool]:
    """Return the plan of a run of `shardwise train`, and True if its times are of the run's device.

    They are not of a device that the catalogue lacks, nor of the CPU, for which it has a
    place-holder. **Raises** ConfigError for values that no plan can have.
    """
    return _plan_of(str(config), _cluster_of(record), {})


def plan_of_loop(planned: str, record: RunRecord) -> tuple[Plan, bool]:
    """Return the plan of a loop of the user's own, as `plan_of_run` does.

    ``planned`` is what `shardwise plan` is given for it: a model and flags. Ranks, their devices,
    stage and degrees are the run's, unless flags name others. **Raises** ConfigError for what no
    plan can have, and for the plan of another model than the run's.
    """
    from shardwise.cli.flags import command_of
    from shardwise.cli.plan import plan

    context = command_of(plan).make_context("flag --planned", shlex.split(planned))
    flags = {name: value for name, value in context.params.items() if value is not None}
    model, facts = flags.pop("model", None), record.facts
    degrees = {
        key: facts.degrees[axis] for axis, key in _KEYS_OF_AXES.items() if axis in facts.degrees
    }
    values = _cluster_of(record) | {"stage": facts.stage} | degrees
    loop_plan, is_planned_device = _plan_of(model, values, flags)
    num_params = sum(unit.numel for unit in facts.units)
    is_split = max(degrees.get(key, 1) for key in ("tp", "pp", "ep")) > 1
    if not is_split and loop_plan.num_params != num_params:
        raise ConfigError(
            f"flag --planned: {loop_plan.model} has {loop_plan.num_params:,} parameters, the run "
            f"{num_params:,}"
        )
    return loop_plan, is_planned_device


def _cluster_of(record: RunRecord) -> dict[str, object]:
    """Return the keys of a plan for the ranks of a run and their device."""
    from shardwise.plan.machine.hardware import find_accelerator

    facts = record.facts
    keys: dict[str, object] = {"ranks": facts.num_ranks}
    if facts.hosts:
        keys["gpus_per_node"] = facts.hosts.count(facts.hosts[0])
    with suppress(ConfigError):
        keys["gpu"] = find_accelerator(facts.device).name
    return keys


def _plan_of(
    model: str | None, values: Mapping[str, object], flags: Mapping[str, object]
) -> tuple[Plan, bool]:
    from shardwise.cli.plan_setup import set_up
    from shardwise.plan.planning import plan
    from shardwise.plan.request import PlanRequest

    setup = set_up(model, check_keys(PlanRequest, values, flags, None, "flag --planned"))
    prices = setup.prices_of(setup.candidate)
    result = plan(setup.model, setup.cluster, setup.candidate, prices=prices)
    return result, {**values, **flags}.get("gpu", "cpu") != "cpu"
