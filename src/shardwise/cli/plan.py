"""`shardwise plan` and `shardwise simulate`: parse, call, print."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.flags import print_json, run_with_flags
from shardwise.errors import ConfigError
from shardwise.keys import check_keys
from shardwise.plan.request import PlanRequest, SimulateRequest
from shardwise.quantities import format_bytes, format_gb

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from shardwise.cli.plan_setup import Setup
    from shardwise.plan.accounting import Accounting
    from shardwise.plan.planning import Plan
    from shardwise.plan.searching import SearchResult
    from shardwise.train.config import TrainConfig

_NOTHING_FITS = 1
MODEL = inspect.Parameter(
    "model",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Argument(
            help="preset, config.json or its folder, file.py:factory, or a YAML of the train "
            "command",
            show_default=False,
        ),
    ],
)


def run_plan(arguments: Sequence[str]) -> int:
    """Run `shardwise plan` with its arguments; return the exit code."""
    return run_with_flags(PlanRequest, MODEL, arguments, "shardwise plan", _plan)


def run_simulate(arguments: Sequence[str]) -> int:
    """Run `shardwise simulate` with its arguments; return the exit code."""
    return run_with_flags(SimulateRequest, MODEL, arguments, "shardwise simulate", _simulate)


def _plan(model: str | None, flags: Mapping[str, Any]) -> int:
    """Tell what fits, how fast it will be and why, before a run and without a device.

    With --params alone: bytes of parameters, gradients and optimizer state. With a MODEL: memory by
    phase and line, and the time of a step. With --search: the best ways to run it. Code 1 where
    nothing fits.
    """
    request = check_keys(PlanRequest, {}, flags, None, "plan")
    if request.list_:
        return _list_names()
    if request.params is not None:
        return _account(model, request)
    return _search(model, request) if request.search else _plan_one(model, request)


def _account(model: str | None, request: PlanRequest) -> int:
    from shardwise.plan.accounting import account, accounting_facts
    from shardwise.plan.request import offload_asked

    if model is not None:
        raise ConfigError(f"params: leave it out beside a model, got {request.params} and {model}")
    found = account(
        params=int(request.params or 0),
        ranks=request.ranks or 8,
        stage=3 if request.stage is None else request.stage,
        precision=request.precision or "bf16",
        optimizer=request.optimizer or "adamw",
        offload=offload_asked(request.model_dump()),
        replicas=request.dp_replicate,
        accumulation=request.accumulation or 1,
        reduce_every=request.reduce_every,
        ranks_per_node=request.gpus_per_node or min(8, request.ranks or 8),
    )
    if request.json_:
        print_json(accounting_facts(found))
    else:
        from shardwise.terminal import open_console

        show_accounting(open_console(), found)
    return 0


def show_accounting(console: Console, chosen: Accounting) -> None:
    """Print an accounting of all stages, the chosen one marked, and what it leaves out."""
    from rich.padding import Padding
    from rich.text import Text

    setup, stages = chosen.setup, chosen.of_all_stages()
    ranks = f"{setup.ranks:,} rank{'s' if setup.ranks > 1 else ''}"
    if setup.replicas > 1:
        ranks = f"{setup.replicas:,} x {ranks}"
    title = f"{chosen.params:,} parameters, {ranks}, {setup.precision}, {setup.optimizer}"
    console.print(Text(title, "bold"), soft_wrap=True)
    console.print(_accounting_table(stages, setup.stage))
    decimal = ", ".join(format_gb(each.device_bytes) for each in stages)
    console.print(f"  device in GB, as papers count, by stage: {decimal}", soft_wrap=True)
    if chosen.host_bytes:
        node = f"host memory of a node ({min(setup.ranks_per_node, setup.world_size)} ranks)"
        console.print(f"  {node}: {format_bytes(chosen.host_bytes_per_node)}", soft_wrap=True)
    console.print("  per rank at the end of backward; resting: between steps; sent: in one step")
    console.print("  left out:")
    for sentence in chosen.left_out:
        console.print(Padding(Text(f"- {sentence}", "dim"), (0, 0, 0, 2)))


def _accounting_table(stages: Sequence[Accounting], chosen: int) -> Table:
    from shardwise.cli.tables import make_table

    columns = {
        "params": [a.parameters.device for a in stages],
        "master": [a.master_weights.device for a in stages],
        "grads": [a.gradients.device for a in stages],
        "optimizer": [a.optimizer_state.device for a in stages],
        "device": [a.device_bytes for a in stages],
        "resting": [a.between_steps.device for a in stages],
        "host": [a.host_bytes for a in stages],
        "disk": [a.nvme_bytes for a in stages],
        "sent": [a.traffic.shard_sent_bytes + a.traffic.replica_sent_bytes for a in stages],
    }
    shown = {name: sizes for name, sizes in columns.items() if any(sizes)}
    table = make_table("!stage", *(f">!{name}" for name in shown), padding=(0, 1, 0, 0))
    for number, accounting in enumerate(stages):
        is_chosen = accounting.setup.stage == chosen
        cells = [format_bytes(sizes[number]) for sizes in shown.values()]
        table.add_row(
            f"{'>' if is_chosen else ' '} {number}", *cells, style="bold" if is_chosen else ""
        )
    return table


def _plan_one(name: str | None, request: PlanRequest) -> int:
    from shardwise.cli.plan_setup import padding_notes
    from shardwise.plan.planning import plan

    setup = _set_up(name, request)
    made = plan(
        setup.model, setup.cluster, setup.candidate, prices=setup.prices_of(setup.candidate)
    )
    made = replace(made, notes=(*made.notes, *padding_notes(made), *setup.notes))
    if setup.config is None:  # `shardwise train` runs its decoder in one way
        from shardwise.plan.questions import asked_of

        made = asked_of(made, setup.model, setup.cluster, setup.given, setup.prices_of)
    _write_train_file(request.write, made, setup.config)
    if request.html is not None:
        from shardwise.plan.report.page import plans_html

        _write_page(request.html, plans_html([made]), made.model)
    if request.json_:
        from shardwise.plan.report.facts import plan_facts

        print_json(plan_facts(made))
    else:
        from shardwise.cli.plan_tables import plan_view
        from shardwise.terminal import open_console

        open_console().print(plan_view(made))
    return _NOTHING_FITS if made.verdict == "will not fit" else 0


def _search(name: str | None, request: PlanRequest) -> int:
    from shardwise.cli.plan_space import limits_of, space_of
    from shardwise.plan.searching import search
    from shardwise.progress import step_bar

    setup = _set_up(name, request)
    limits, notes = limits_of(setup, request), setup.notes
    if limits.tokens_per_step is not None and setup.tokens_per_step is None:
        tokens = f"{limits.tokens_per_step:,}"
        notes += (f"compared at {tokens} tokens a step; --tokens-per-step has those of your run",)
    with step_bar("plans") as progress:
        result = search(
            setup.model,
            setup.cluster,
            space_of(
                setup,
                to_train=request.write is not None,
                gathers=request.gathers,
                reduces=request.reduces,
            ),
            limits,
            prices_of=setup.prices_of,
            progress=progress,
        )
    result = replace(result, notes=notes)
    _write_train_file(request.write, result.winner, setup.config)
    _show_search(result, request)
    return 0 if result.winner is not None else _NOTHING_FITS


def _set_up(name: str | None, request: PlanRequest) -> Setup:
    """Resolve the request; what cannot be written is told before anything is planned."""
    from shardwise.cli.plan_setup import set_up
    from shardwise.cli.plan_write import check_target, check_trainable

    check_target("html", request.html)
    check_target("write", request.write)
    setup = set_up(name, request, to_train=request.write is not None)
    if request.write is not None:
        check_trainable(setup.model.name, setup.candidate, setup.config)
    return setup


def _show_search(result: SearchResult, request: PlanRequest) -> None:
    if request.html is not None:
        from shardwise.plan.report.page import plans_html

        _write_page(request.html, plans_html(result.pareto, result.reasons), "search")
    if request.json_:
        from shardwise.plan.report.facts import search_facts

        print_json(search_facts(result))
    else:
        from shardwise.cli.plan_tables import search_view
        from shardwise.terminal import open_console

        open_console().print(search_view(result))


def _write_train_file(path: Path | None, plan: Plan | None, config: TrainConfig | None) -> None:
    if path is None or plan is None or config is None:
        return
    from shardwise.cli.plan_write import train_file, write_file

    write_file("write", path, train_file(plan, config))


def _write_page(path: Path, body: str, title: str) -> None:
    from shardwise.cli.plan_write import write_file
    from shardwise.plan.report.page import full_page

    write_file("html", path, full_page(body, f"Shardwise: {title}"))


def _list_names() -> int:
    from shardwise.cli.plan_tables import names_view
    from shardwise.terminal import open_console

    open_console().print(names_view())
    return 0


def _simulate(model: str | None, flags: Mapping[str, Any]) -> int:
    """Play a step on all ranks of a cluster: stragglers, noise, slow links, failures, scaling.

    The step is the one that `shardwise plan` shows. --sweep compares numbers of ranks, --svg draws
    them; --trace writes a timeline that Perfetto opens.
    """
    request = check_keys(SimulateRequest, {}, flags, None, "simulate")
    if request.list_:
        return _list_names()
    from shardwise.cli.simulate import simulate_request

    return simulate_request(model, request)
