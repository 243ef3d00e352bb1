"""Plans, searches and simulations as tables for the terminal."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from shardwise.cli.tables import make_table
from shardwise.homes import Offload
from shardwise.interop.deepspeed.offload_blocks import offload_keys
from shardwise.keys import flag_of
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import accelerators, links, standard_nodes
from shardwise.plan.model.presets import find_preset, preset_names
from shardwise.plan.planned import time_rows
from shardwise.plan.planning import Plan
from shardwise.plan.request import PlanRequest
from shardwise.plan.searching import Rejected
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS
from shardwise.quantities import format_bytes, format_count, format_duration, format_gb

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardwise.plan.searching import SearchResult
    from shardwise.plan.timing.scaling import Goodput, ScalingRow

_VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "will not fit": "bold red"}
_WOULD_FAIL = "a run would fail for want of memory; what follows is of devices that had enough"
_MOST_PLANS = 5
_MOST_REASONS = 5


def plan_view(plan: Plan) -> RenderableType:
    """Show a plan: verdict, memory, time, assumptions."""
    return Group(
        _headline(plan),
        Text(),
        _verdict(plan),
        Text(),
        _memory_table(plan),
        Text(),
        _time_table(plan),
        *(_dim_line(note) for note in plan.notes),
        _dim_line(f"{len(plan.assumptions)} figures and their sources are in --json, --html"),
    )


def search_view(result: SearchResult) -> RenderableType:
    """Show the winner in short, the plans that nothing beats, and why most others lost."""
    summary = Text(
        f"{result.num_candidates:,} candidates, {result.num_played:,} of them played in full"
    )
    parts: list[RenderableType] = [summary, Text()]
    if result.winner is None:
        parts.append(Text("no candidate keeps the limits", style="bold red"))
    else:
        winner, flags = result.winner, " ".join(flags_of(result.winner.candidate))
        parts += [_headline(winner), Text(), _verdict(winner), Text()]
        parts += [_dim_line(f"in full, with these in place of --search: {flags}"), Text()]
        parts.append(_pareto_table(result.pareto))
    notes = result.notes if result.winner is None else (*result.winner.notes, *result.notes)
    return Group(*parts, Text(), _rejected_table(result), *map(_dim_line, notes))


def flags_of(candidate: Candidate) -> list[str]:
    """Return the flags of `shardwise plan` that make a candidate, without defaults."""
    found = []
    for field in fields(candidate):
        value = getattr(candidate, field.name)
        if value == field.default or field.name not in PlanRequest.model_fields:
            continue
        if isinstance(value, Offload):
            value = json.dumps(offload_keys(value))
            if value == "{}":
                continue
        elif isinstance(value, tuple):
            value = ",".join(value)
        text = [] if value is True else [shlex.quote(str(value))]
        found += [flag_of(field.name), *text]
    if candidate.num_replicas > 1:
        found += ["--dp-replicate", str(candidate.num_replicas)]
    return found


def simulation_view(plan: Plan) -> RenderableType:
    """Show a simulated step: how long, on which ranks, and what decides it."""
    parts: list[RenderableType] = [_headline(plan), Text()]
    parts.append(_speed(plan) if plan.verdict == "fits" else _verdict(plan))
    if plan.verdict == "will not fit":
        parts.append(Text(_WOULD_FAIL, style=_VERDICT_STYLES["will not fit"]))
    return Group(*parts, Text(), _ranks_view(plan))


def scaling_view(rows: Sequence[ScalingRow]) -> RenderableType:
    """Show a scaling curve as a table."""
    columns = ">ranks", ">step", ">tokens/s", ">efficiency", ">not hidden", ">memory a rank"
    table = make_table(*columns, title="scaling", boxed=False)
    for row in rows:
        table.add_row(
            f"{row.num_ranks:,}",
            f"{row.step_s:.3g} s",
            format_count(round(row.tokens_per_s)),
            f"{row.efficiency:.1%}",
            f"{row.exposed:.1%}",
            format_bytes(row.memory_bytes),
        )
    return table


def _ranks_view(plan: Plan) -> RenderableType:
    """Show how the ranks of a scenario differ, and what decides the step."""
    simulated = plan.simulated
    spread, steps = simulated.rank_s, simulated.step_spread
    ranks = simulated.scenario.num_ranks
    title = f"ranks, the slowest first{_of_micro_batches(plan)}"
    columns = ">rank", ">step", ">computing", ">waiting for others", ">communication not hidden"
    table = make_table(*columns, title=title, boxed=False)
    for run in simulated.ranks:
        times = (run.step_s, run.compute_s, run.skew_s, run.exposed_s)
        table.add_row(f"{run.rank:,}", *(f"{seconds:.3g} s" for seconds in times))
    lines = []
    if ranks > 1:
        lines.append(
            f"{ranks:,} ranks: {spread.minimum_s:.3g} to {spread.maximum_s:.3g} s, median "
            f"{spread.median_s:.3g} s"
        )
    if len(simulated.steps_s) > 1:
        lines.append(
            f"{len(simulated.steps_s):,} steps: {steps.minimum_s:.3g} to {steps.maximum_s:.3g} s, "
            f"median {steps.median_s:.3g} s, 95th percentile {steps.p95_s:.3g} s"
        )
    critical = sorted(simulated.critical_s.items(), key=lambda item: -item[1])
    total = sum(seconds for _, seconds in critical) or 1.0
    shares = ", ".join(f"{kind.replace('_', '-')} {s / total:.0%}" for kind, s in critical)
    lines.append(f"what decides the step: {shares}")
    return Group(table, Text("\n".join(lines)))


def goodput_view(goodput: Goodput, interval_s: float) -> RenderableType:
    """Show what failures leave, and checkpoints that are made every ``interval_s``."""
    title = "goodput: the share of time that is progress"
    table = make_table("", ">", title=title, boxed=False)
    table.add_row("progress that is kept", f"{goodput.fraction:.2%}")
    table.add_row("time between checkpoints", format_duration(interval_s))
    table.add_row("standing still for checkpoints", f"{goodput.checkpoint_fraction:.2%}")
    table.add_row("lost to failures", f"{goodput.failure_fraction:.2%}")
    table.add_row("time between failures of the job", format_duration(goodput.mtbf_s))
    table.add_row("best time between checkpoints", format_duration(goodput.best_interval_s))
    table.add_row("progress with it", f"{goodput.fraction_at_best:.2%}")
    return table


def _headline(plan: Plan) -> Text:
    node = plan.cluster.node
    return Text(
        f"{plan.model}: {format_count(plan.num_params)} parameters, sequences of {plan.seq:,}, on "
        f"{plan.cluster.num_ranks:,} x {node.accelerator.name} "
        f"({plan.cluster.num_nodes:,} x {node.name}, {node.intra.name} inside, {node.inter.name} "
        f"between)\n{plan.label}"
    )


def _verdict(plan: Plan) -> Text:
    text = Text()
    text.append(plan.verdict, style=_VERDICT_STYLES[plan.verdict])
    sizes = plan.memory.low_bytes, plan.memory.high_bytes, plan.capacity_bytes
    binary, decimal = (
        "{} to {} of {}".format(*map(form, sizes)) for form in (format_bytes, format_gb)
    )
    text.append(f": {binary} a rank ({decimal})\n")
    if plan.room.missing is not None:
        text.append(f"{plan.room.missing}\n")
    return text.append_text(_speed(plan)).append_text(_questions(plan))


def _questions(plan: Plan) -> Text:
    """Show settings that were not given, their possible values, and the consequences."""
    text, possible = Text(), plan.possible
    if possible is None:
        return text
    text.append("\nnot told: ", style="bold")
    text.append(
        f"{format_bytes(possible.low_bytes)} to {format_bytes(possible.high_bytes)} and "
        f"{possible.low_s:.3g} to {possible.high_s:.3g} s over all answers; above is the first of "
        "each"
    )
    for question in plan.questions:
        said = ", ".join(
            f"{each.value} up to {format_bytes(each.high_bytes)} in {each.step_s:.3g} s"
            for each in question.answers
        )
        text.append(f"\n  {flag_of(question.setting)}? {said}")
    return text


def _speed(plan: Plan) -> Text:
    text = Text()
    text.append(f"{plan.step_s:.3g} s a step", style="bold")
    text.append(f" of {plan.tokens_per_step:,} tokens: {format_count(round(plan.tokens_per_s))} ")
    text.append(f"tokens/s, {plan.tokens_per_s / plan.candidate.world_size:,.0f} a rank")
    if plan.mfu is not None:
        text.append(f", MFU {plan.mfu:.1%}")
    return text


def _memory_table(plan: Plan) -> RenderableType:
    """Lines of the ledger at the peak, and what each phase reaches."""
    peak = plan.played.peak
    title = f"memory at the peak, in {peak.phase} of {plan.unit_name(peak.unit)}"
    table = make_table("", ">", "-", title=title, boxed=False)
    total = max(peak.ledger.total, 1)
    for name, num_bytes in peak.ledger.lines().items():
        if num_bytes:
            share = num_bytes / total
            bar = "█" * round(30 * share)
            table.add_row(name.replace("_", " "), format_bytes(num_bytes), f"{share:5.1%} {bar}")
    table.add_row("all tensors", format_bytes(peak.ledger.total), style="bold")
    for name, num_bytes in plan.memory.margins.items():
        table.add_row(name, format_bytes(num_bytes), "beside the tensors")
    for place, away in (("on host", plan.played.host), ("in files", plan.played.files)):
        for name, num_bytes in away.lines().items():
            if num_bytes:
                said = f"{place}: {name.replace('_', ' ')}"
                table.add_row(said, format_bytes(num_bytes), "off the device")
    room = plan.room
    for where, num_bytes, capacity in (
        ("host", room.host_bytes, room.host_capacity_bytes),
        ("files", room.file_bytes, room.file_capacity_bytes),
    ):
        if num_bytes:
            of = "of a size not known" if capacity is None else f"of {format_bytes(capacity)}"
            name = f"{where} of a node, {room.num_ranks} ranks"
            table.add_row(name, format_bytes(num_bytes), of)
    others = ", ".join(
        f"{m.phase} {format_bytes(m.ledger.total)} ({plan.unit_name(m.unit)})"
        for m in plan.played.peaks
        if m.phase != peak.phase
    )
    return Group(table, Text(f"other phases: {others}", style="dim"))


def _time_table(plan: Plan) -> RenderableType:
    title = f"time of the slowest rank{_of_micro_batches(plan)}"
    table = make_table("", ">", title=title, boxed=False)
    for row in time_rows(plan):
        table.add_row(f"{'  ' * row.is_part}{row.name}", f"{row.seconds:.3g} s")
    hidden = f"communication: {plan.simulated.overlap:.0%} hidden"
    sent = ", ".join(f"{k} {format_bytes(b)}" for k, b in plan.played.program.sent_bytes.items())
    lines = [f"{hidden}; sent by a rank in a step: {sent or 'nothing'}"]
    if copied := plan.played.program.copied_bytes:
        parts = (f"{k.replace('_', ' ')} {format_bytes(b)}" for k, b in copied.items())
        lines.append(f"copied by a rank in a step: {', '.join(parts)}")
    return Group(table, Text("\n".join(lines), style="dim"))


def _of_micro_batches(plan: Plan) -> str:
    """Name the number of micro-batches behind the figures, if fewer than a step's."""
    shown, whole = plan.num_simulated, plan.candidate.accumulation
    return f", of {shown} of the {whole} micro-batches" if shown < whole else ""


def _pareto_table(plans: Sequence[Plan]) -> RenderableType:
    columns = "plan", ">tokens/s", ">memory, up to", ">verdict"
    title = "nothing is both faster and smaller than these"
    table = make_table(*columns, title=title, boxed=False)
    for plan in plans[:_MOST_PLANS]:
        table.add_row(
            plan.label,
            format_count(round(plan.tokens_per_s)),
            format_bytes(plan.memory.high_bytes),
            Text(plan.verdict, style=_VERDICT_STYLES[plan.verdict]),
        )
    return Group(table, _more(len(plans) - _MOST_PLANS))


def _more(count: int) -> Text:
    return Text(f"and {count:,} more, in --json" if count > 0 else "", style="dim")


def _rejected_table(result: SearchResult) -> RenderableType:
    """Show the reasons of most candidates, one for those with the same beginning."""
    alike: dict[str, list[Rejected]] = {}
    for rejected in result.rejected:
        begins = " ".join(re.sub(r"[\d.,]+", "", rejected.reason).split()[:3])
        alike.setdefault(begins, []).append(rejected)
    most = sorted(alike.values(), key=len, reverse=True)
    table = make_table("~candidate", "~reason", title="why others lost", boxed=False)
    for those in most[:_MOST_REASONS]:
        also = f" (and {len(those) - 1:,} more)" if len(those) > 1 else ""
        table.add_row(those[0].candidate.label + also, those[0].reason)
    return Group(table, _more(sum(map(len, most[_MOST_REASONS:]))))


def names_view() -> RenderableType:
    """Show everything that has a name: models, devices, nodes, links, precisions, optimizers."""
    models = [
        (preset.name, f"{format_count(preset.shape.num_params)} parameters, {preset.seq:,} tokens")
        for preset in map(find_preset, preset_names())
    ]
    devices = [
        (d.name, f"{format_bytes(d.memory_bytes)} ({format_gb(d.memory_bytes)})")
        for d in accelerators().values()
    ]
    shown = [(x.name, f"{x.bandwidth_bytes_per_s / 1e9:,.4g} GB/s") for x in links().values()]
    return Group(
        _names("models", models),
        _names("devices (--gpu)", devices),
        _names("links (--link, --network)", shown),
        _names("nodes", [(name, node["source"]) for name, node in standard_nodes().items()]),
        _names(
            "precisions", [(name, f"computes in {r.compute}") for name, r in PRECISIONS.items()]
        ),
        _names("optimizers", [(name, "") for name in OPTIMIZERS]),
    )


def _names(title: str, rows: Sequence[tuple[str, str]]) -> RenderableType:
    table = make_table("!", "-", title=title, boxed=False, title_style="bold", pad_edge=True)
    for row in rows:
        table.add_row(*row)
    return Group(table, Text())


def _dim_line(line: str) -> RenderableType:
    return Padding(Text(f"- {line}", style="dim"), (0, 0, 0, 2))
