"""`shardwise plan`: an accounting, a plan or a search, printed and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import typer

from shardwise import terminal
from shardwise.cli.flags import check_target, print_result, takes_keys, write_file
from shardwise.errors import ConfigError
from shardwise.keys import check_keys
from shardwise.plan.request import PlanRequest
from shardwise.quantities import format_bytes, format_gb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.plan.accounting import Accounting

_NOTHING_FITS = 1
MODEL = "preset, config.json or its folder, file.py:factory, or a YAML of the train command"


@takes_keys(PlanRequest, "model", str, MODEL)
def plan(_: typer.Context, model: str | None, flags: Mapping[str, object]) -> int:
    """Tell what fits, how fast it will be and why, before a run and without a device.

    With --params alone: bytes of parameters, gradients and optimizer state. With a MODEL: memory by
    phase and line, and the time of a step. With --search: the best ways to run it. Code 1 where
    nothing fits.
    """
    request = check_keys(PlanRequest, {}, flags, None, "plan")
    if request.list_:
        return list_names()
    if request.params is not None:
        return _account(model, request)
    return _plan_model(model, request)


def list_names() -> int:
    """Print everything that has a name."""
    from shardwise.cli.plan_tables import names_view

    terminal.open_console().print(names_view())
    return 0


def _account(model: str | None, request: PlanRequest) -> int:
    from shardwise.plan.accounting import account, accounting_facts

    if model is not None:
        raise ConfigError(f"params: leave it out beside a model, got {request.params} and {model}")
    accounting = account(
        params=request.params or 0,
        ranks=request.ranks or 8,
        stage=request.stage,
        precision=request.precision,
        optimizer=request.optimizer,
        replicas=request.dp_replicate,
        accumulation=request.accumulation or 1,
        reduce_every=request.reduce_every,
    )
    view = partial(accounting_view, accounting)
    assumed = _assumed_ranks(accounting.ranks) if request.ranks is None else None
    _print_assumed(partial(accounting_facts, accounting), view, request.json_, assumed)
    return 0


def _assumed_ranks(ranks: int) -> str:
    return (
        f"assumed: {ranks:,} rank{'s' if ranks > 1 else ''}, as none are given; --ranks sets them"
    )


def _print_assumed(
    facts: Callable[[], Mapping[str, object]],
    view: Callable[[], RenderableType],
    as_json: bool,
    assumed: str | None,
) -> None:
    """Print facts or their view, with an assumption first."""
    from rich.console import Group
    from rich.text import Text

    def facts_with() -> Mapping[str, object]:
        result = facts()
        others = result.get("assumptions", ())
        assert isinstance(others, list | tuple)
        return {**result, "assumptions": [assumed, *others]}

    def view_with() -> RenderableType:
        return Group(Text(assumed or ""), view())

    if assumed is None:
        print_result(facts, view, as_json)
    else:
        print_result(facts_with, view_with, as_json)


def accounting_view(chosen: Accounting) -> RenderableType:
    """Show an accounting of all stages, the chosen one marked, and its omissions."""
    from rich.console import Group
    from rich.text import Text

    from shardwise.cli.tables import make_table

    stages = chosen.of_all_stages()
    ranks = f"{chosen.ranks:,} rank{'s' if chosen.ranks > 1 else ''}"
    if chosen.replicas > 1:
        ranks = f"{chosen.replicas:,} x {ranks}"
    columns = {
        "params": [a.lines["parameters"] for a in stages],
        "master": [a.lines["master_weights"] for a in stages],
        "grads": [a.lines["gradients"] for a in stages],
        "optimizer": [a.lines["optimizer_state"] for a in stages],
        "device": [a.device_bytes for a in stages],
        "resting": [a.between_steps for a in stages],
        "sent": [a.traffic.shard_sent_bytes + a.traffic.replica_sent_bytes for a in stages],
    }
    shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
    rows = [
        (
            f"{'>' if number == chosen.stage else ' '} {number}",
            *(format_bytes(sizes[number]) for sizes in shown.values()),
        )
        for number in range(len(stages))
    ]
    decimal = ", ".join(format_gb(row.device_bytes) for row in stages)
    title = f"{chosen.params:,} parameters, {ranks}, {chosen.precision}, {chosen.optimizer}"
    lines = (
        f"  device in GB, as papers count, by stage: {decimal}",
        "  per rank at the end of backward; resting: between steps; sent: in one step",
        "  left out:",
        *(f"  - {sentence}" for sentence in chosen.left_out),
    )
    table = make_table(("stage", *(f">{name}" for name in shown)), rows)
    return Group(Text(title, "bold"), table, Text("\n".join(lines)))


def _plan_model(name: str | None, request: PlanRequest) -> int:
    from shardwise.cli.plan_setup import assumed_notes, limits_of, padding_notes, set_up, space_of
    from shardwise.cli.plan_tables import plan_view, search_view
    from shardwise.cli.run_settings import check_writable, planned_yaml
    from shardwise.plan.facts import plan_facts, search_facts
    from shardwise.plan.planning import plan as make_plan
    from shardwise.plan.searching import search
    from shardwise.progress import step_bar

    check_target("write", request.write)
    setup = set_up(name, request)
    model, cluster, prices_of = setup.model, setup.cluster, setup.prices_of
    if request.write is not None:
        candidate = setup.candidate
        if request.search and "accumulation" not in setup.given:  # the search fills the pipeline
            candidate = replace(candidate, accumulation=candidate.pp)
        check_writable(model.name, candidate, setup.config)
    if request.search:
        limits, notes = limits_of(setup), setup.notes
        if limits.tokens_per_step is not None and setup.tokens_per_step is None:
            tokens = f"{limits.tokens_per_step:,} tokens a step"
            notes += (f"compared at {tokens}; --tokens-per-step has those of your run",)
        with step_bar("plans") as progress:
            result = search(model, cluster, space_of(setup), limits, prices_of, progress)
        result = replace(result, notes=notes)
        winner = result.winner
        fits = winner is not None
        facts = partial(search_facts, result)
        view = partial(search_view, result)
    else:
        winner = make_plan(model, cluster, setup.candidate, prices=prices_of(setup.candidate))
        notes = (*winner.notes, *padding_notes(winner), *setup.notes, *assumed_notes(setup))
        winner = replace(winner, notes=notes)
        fits = winner.verdict != "will not fit"
        facts = partial(plan_facts, winner)
        view = partial(plan_view, winner)
    if request.write is not None and winner is not None and setup.config is not None:
        write_file("write", request.write, planned_yaml(winner, setup.config))
    assumes = setup.request.ranks is None and not setup.request.calibration
    assumed = _assumed_ranks(cluster.num_ranks) if assumes else None
    _print_assumed(facts, view, request.json_, assumed)
    return 0 if fits else _NOTHING_FITS
