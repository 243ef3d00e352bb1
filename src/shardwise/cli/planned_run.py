"""The plan of a run that was observed."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.keys import check_keys
from shardwise.monitor.record import folder_of

if TYPE_CHECKING:
    from shardwise.monitor.record import RunRecord
    from shardwise.plan.planned import Plan
    from shardwise.plan.request import PlanRequest

_KEYS_OF_AXES = {"replicate": "dp_replicate"} | {name: name for name in ("tp", "pp", "cp", "ep")}


def config_of(record: RunRecord) -> Path | None:
    """Return the file of settings that `shardwise train` left beside a run; None without one."""
    config = folder_of(record.path).parent / "config.yaml"
    return config if config.exists() else None


def plan_of_run(config: Path, record: RunRecord) -> tuple[Plan, bool]:
    """Return the plan of what `shardwise train` ran; and whether its times are of the run's device.

    They are not of a device that the catalogue lacks, nor of the CPU, for which it has a
    place-holder. **Raises** ConfigError for values that no plan can have.
    """
    from shardwise.plan.request import PlanRequest

    cluster = _cluster_of(record)
    found = _plan_of(str(config), PlanRequest.model_validate(cluster))
    return found, _is_in_catalogue(cluster)


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
