"""The plan of a run that was observed; what the changes that its findings name would give by it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from shardwise.errors import ConfigError, ShardwiseError
from shardwise.keys import check_keys
from shardwise.monitor.findings import Change, Diagnosis, Finding, Gain
from shardwise.monitor.record import folder_of

if TYPE_CHECKING:
    from shardwise.monitor.record import RunRecord
    from shardwise.plan.planned import Plan
    from shardwise.plan.request import PlanRequest

_KEYS_OF_AXES = {"replicate": "dp_replicate"} | {name: name for name in ("tp", "pp", "cp", "ep")}
_WORTH_SAYING = 0.01  # of the peak, or of the step


def config_of(record: RunRecord) -> Path | None:
    """Return the file of settings that `shardwise train` left beside a run; None without one."""
    config = folder_of(record.path).parent / "config.yaml"
    return config if config.exists() else None


def plan_of_run(config: Path, record: RunRecord, **changed: object) -> tuple[Plan, bool]:
    """Return the plan of what `shardwise train` ran; and whether its times are of the run's device.

    They are not of a device that the catalogue lacks, nor of the CPU, for which it has a
    place-holder.
    ``changed`` are keys that differ from the run's. **Raises** ConfigError for values that no plan
    can have.
    """
    from shardwise.plan.request import PlanRequest

    cluster = _cluster_of(record)
    try:
        request = PlanRequest.model_validate(cluster | changed)
    except ValidationError as error:
        raise ConfigError(f"no plan has {', '.join(changed)}: {error.errors()[0]['msg']}") from None
    return _plan_of(str(config), request), _is_in_catalogue(cluster)


def plan_of_loop(planned: str, record: RunRecord) -> tuple[Plan, bool]:
    """Return the plan of a loop of the user's own, as `plan_of_run` does.

    ``planned`` is what `shardwise plan` is given for it: a model and flags. Ranks, their devices,
    stage and degrees are the run's, unless flags name others. **Raises** ConfigError for what no
    plan can have, and for the plan of another model than the run's.
    """
    from shardwise.cli.flags import command_of
    from shardwise.cli.plan import plan
    from shardwise.plan.request import PlanRequest

    context = command_of(plan).make_context("flag --planned", shlex.split(planned))
    flags = {name: value for name, value in context.params.items() if value is not None}
    model = flags.pop("model", None)
    facts, cluster = record.facts, _cluster_of(record)
    degrees = {
        key: facts.degrees[axis] for axis, key in _KEYS_OF_AXES.items() if axis in facts.degrees
    }
    values = cluster | {"stage": facts.stage} | degrees
    request = check_keys(PlanRequest, values, flags, None, "flag --planned")
    found = _plan_of(model, request)
    ours = sum(unit.numel for unit in facts.units)
    if max(degrees.get(key, 1) for key in ("tp", "pp", "ep")) == 1 and found.num_params != ours:
        raise ConfigError(
            f"flag --planned: {found.model} has {found.num_params:,} parameters, the run {ours:,}"
        )
    return found, _is_in_catalogue(values | flags)


def _cluster_of(record: RunRecord) -> dict[str, object]:
    """Return the keys of a plan that say which ranks a run had, and of which device."""
    from shardwise.plan.machine.hardware import find_accelerator

    facts = record.facts
    found: dict[str, object] = {"ranks": facts.num_ranks}
    if facts.hosts:
        found["gpus_per_node"] = facts.hosts.count(facts.hosts[0])
    with suppress(ConfigError):
        found["gpu"] = find_accelerator(facts.device).name
    return found


def _is_in_catalogue(values: Mapping[str, object]) -> bool:
    return values.get("gpu", "cpu") != "cpu"


def _plan_of(model: str | None, request: PlanRequest) -> Plan:
    from shardwise.cli.plan_setup import set_up
    from shardwise.plan.planning import plan

    setup = set_up(model, request)
    prices = setup.prices_of(setup.candidate)
    return plan(setup.model, setup.cluster, setup.candidate, prices=prices)


def with_planned_gains(diagnosis: Diagnosis, record: RunRecord) -> Diagnosis:
    """Return a diagnosis whose findings tell what the plans of both settings differ by.

    Where the run has the settings of `shardwise train`, and a change is a key of a plan. Others
    keep the gain that their rule has read off the run. **Cost** a plan of the run, and one for each
    such finding: about a second each.
    """
    config = config_of(record)
    asked = [_planned_keys(finding) for finding in diagnosis.findings]
    if config is None or not any(asked):
        return diagnosis
    try:
        before, is_timed = plan_of_run(config, record)
    except (ShardwiseError, OSError):  # of a model that no plan knows
        return diagnosis
    found = []
    for finding, changed in zip(diagnosis.findings, asked, strict=True):
        gain = None
        if changed:
            try:
                gain = _gain(before, plan_of_run(config, record, **changed)[0], is_timed)
            except ShardwiseError:  # this model cannot be run so
                gain = None
        found.append(finding if gain is None else replace(finding, gain=gain))
    return replace(diagnosis, findings=tuple(found))


def _planned_keys(finding: Finding) -> dict[str, object]:
    """Return the changes of a finding that a plan can be made with, as keys and values."""
    from shardwise.plan.request import ModelRequest

    keys = {c.key: _planned_value(c) for c in finding.changes if c.key in ModelRequest.model_fields}
    return {key: value for key, value in keys.items() if value is not None}


def _planned_value(change: Change) -> object:
    """Return what a plan calls the new value; None where it is not said as one value."""
    if change.key == "activation_checkpointing":  # `shardwise train` knows yes and no
        return "full" if change.after else "none"
    is_word = isinstance(change.after, str) and " " not in change.after
    return change.after if is_word or isinstance(change.after, int) else None


def _gain(before: Plan, after: Plan, is_timed: bool) -> Gain | None:
    """Return memory that is saved or, with more of it, time; None where neither is."""
    held, holds = (each.memory.expected_bytes for each in (before, after))
    source = f"the plans of both settings; the device's peak, {held / 2**30:.3g} GiB"
    if held - holds > _WORTH_SAYING * held:
        return Gain(held - holds, "bytes", f"{source}, becomes {holds / 2**30:.3g} GiB")
    saved_s = before.step_s - after.step_s
    if is_timed and saved_s > _WORTH_SAYING * before.step_s:
        return Gain(saved_s, "s/step", f"{source}, becomes {holds / 2**30:.3g} GiB")
    return None
