"""`shardwise simulate`: one step or a sweep, failures, a timeline to write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import typer
from rich.console import Group

from shardwise.cli.flags import check_target, print_result, takes_keys, write_file
from shardwise.cli.plan import MODEL, list_names
from shardwise.cli.plan_setup import PlanSetup, at_ranks, set_up
from shardwise.cli.plan_tables import goodput_view, scaling_view, simulation_view
from shardwise.keys import check_keys
from shardwise.plan.facts import plan_facts, scaling_facts
from shardwise.plan.planning import Plan, plan
from shardwise.plan.request import SimulateRequest
from shardwise.plan.timing.goodput import Goodput, expected_goodput
from shardwise.plan.timing.timeline import simulated_trace
from shardwise.progress import step_bar

_DOES_NOT_FIT = 1


@takes_keys(SimulateRequest, "model", str, MODEL)
def simulate(_: typer.Context, model: str | None, flags: Mapping[str, object]) -> int:
    """Simulate a step on a cluster: slow devices and links, failures, scaling.

    The step is the one that `shardwise plan` shows. --sweep compares numbers of ranks; --trace
    writes a timeline that Perfetto opens.
    """
    request = check_keys(SimulateRequest, {}, flags, None, "simulate")
    return list_names() if request.list_ else _simulate_model(model, request)


def _simulate_model(name: str | None, request: SimulateRequest) -> int:
    check_target("trace", request.trace)
    setup = set_up(name, request)
    planned = _simulated(setup, request)
    goodput = _goodput(planned, request)
    counts = sorted({*(request.sweep or ())})
    rows = scaling_facts(_sweep(setup, request, counts) if counts else ())
    if request.trace is not None:
        trace = simulated_trace(planned.simulated, planned.candidate.accumulation)
        write_file("trace", request.trace, json.dumps(trace))
    facts: dict[str, object] = plan_facts(planned) | {"kind": "simulation"}
    facts |= {"scaling": rows, "goodput": goodput and asdict(goodput)}
    views = [simulation_view(planned)]
    if rows:
        views.append(scaling_view(rows))
    if goodput is not None:
        views.append(goodput_view(goodput, request.checkpoint_interval_s))
    print_result(lambda: facts, lambda: Group(*views), request.json_)
    return _DOES_NOT_FIT if planned.verdict == "will not fit" else 0


def _simulated(setup: PlanSetup, request: SimulateRequest) -> Plan:
    return plan(
        setup.model,
        setup.cluster,
        setup.candidate,
        prices=setup.prices_of(setup.candidate),
        straggler=request.straggler,
        slow_link=request.slow_link,
    )


def _goodput(planned: Plan, request: SimulateRequest) -> Goodput | None:
    """Return the goodput under failures; by default a save stalls for a copy of the state."""
    if request.mtbf_hours is None:
        return None
    stall_s = request.checkpoint_stall_s
    if stall_s is None:
        state, link = planned.played.device, planned.cluster.node.host.device_link
        stall_s = (state.param_shards + state.optimizer_state) / link.achieved_bytes_per_s
    return expected_goodput(
        planned.step_s,
        mtbf_s=request.mtbf_hours * 3600 / planned.candidate.world_size,
        back_s=request.restart_s,
        interval_s=request.checkpoint_interval_s,
        stall_s=stall_s,
    )


def _sweep(setup: PlanSetup, request: SimulateRequest, counts: Sequence[int]) -> list[Plan]:
    setups = [at_ranks(setup, count) for count in counts]
    plans = []
    with step_bar("simulating") as progress:
        for done, at_count in enumerate(setups, 1):
            plans.append(_simulated(at_count, request))
            progress(done, len(setups))
    return plans
