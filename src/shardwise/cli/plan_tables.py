"""Plans, searches and simulations as tables for the terminal."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from shardwise.cli.tables import make_table
from shardwise.homes import Offload
from shardwise.interop.deepspeed.offload_blocks import offload_keys
from shardwise.keys import flag_of
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import accelerators, links
from shardwise.plan.model.presets import find_preset, preset_names
from shardwise.plan.pareto import Rejected
from shardwise.plan.planning import Plan, time_rows
from shardwise.plan.request import PlanRequest
from shardwise.plan.sizes import OPTIMIZERS, PRECISIONS
from shardwise.quantities import ByteUnit, format_bytes, format_count, format_duration, format_gb

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shardwise.plan.searching import SearchResult
    from shardwise.plan.timing.goodput import Goodput

_VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "will not fit": "bold red"}
_WOULD_FAIL = "a run would fail for want of memory; what follows is of devices that had enough"
_MOST_PLANS = 5
_MOST_REASONS = 5
_CELLS = 30  # of bars


def plan_view(plan: Plan) -> RenderableType:
    """Show a plan: verdict, memory, time, assumptions."""
    sources = f"{len(plan.assumptions)} figures and their sources are in --json"
    parts = _headline(plan), Text(), _verdict(plan), _memory_table(plan), _time_table(plan)
    return Group(*parts, _list_of((*plan.notes, sources)))


def search_view(result: SearchResult) -> RenderableType:
    """Show the winner in short, the Pareto set, and the reasons why most other plans lost."""
    played = f"{result.num_candidates:,} candidates, {result.num_played:,} of them played in full"
    parts: list[RenderableType] = [Text(played), Text()]
    winner, notes = result.winner, result.notes
    if winner is None:
        parts.append(Text("no candidate keeps the limits", style="bold red"))
    else:
        flags = " ".join(flags_of(winner.candidate))
        parts += [_headline(winner), Text(), _verdict(winner), Text()]
        parts += [_list_of([f"in full, with these in place of --search: {flags}"]), Text()]
        rows = [
            (
                plan.candidate.label,
                format_count(round(plan.tokens_per_s)),
                format_bytes(plan.memory.high_bytes),
                Text(plan.verdict, style=_VERDICT_STYLES[plan.verdict]),
            )
            for plan in result.pareto[:_MOST_PLANS]
        ]
        columns = "nothing is both faster and smaller", ">tokens/s", ">memory, up to", ">verdict"
        parts += [make_table(columns, rows), _more(len(result.pareto) - _MOST_PLANS)]
        notes = (*winner.notes, *notes)
    by_reason: dict[str, list[Rejected]] = {}  # by the beginning of the reason
    for rejected in result.rejected:
        begins = " ".join(re.sub(r"[\d.,]+", "", rejected.reason).split()[:3])
        by_reason.setdefault(begins, []).append(rejected)
    groups = sorted(by_reason.values(), key=len, reverse=True)
    lost = []
    for first, *others in groups[:_MOST_REASONS]:
        more_like_it = f" (and {len(others):,} more)" if others else ""
        lost.append((first.candidate.label + more_like_it, first.reason))
    more = _more(sum(map(len, groups[_MOST_REASONS:])))
    return Group(*parts, make_table(("candidate", "why others lost"), lost), more, _list_of(notes))


def flags_of(candidate: Candidate) -> list[str]:
    """Return the flags of `shardwise plan` that make a candidate, without defaults."""
    flags = []
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
        flags += [flag_of(field.name), *text]
    if candidate.num_replicas > 1:
        flags += ["--dp-replicate", str(candidate.num_replicas)]
    return flags


def simulation_view(plan: Plan) -> RenderableType:
    """Show a simulated step: how long, and what decides it."""
    parts: list[RenderableType] = [_headline(plan), Text()]
    parts.append(_speed(plan) if plan.verdict == "fits" else _verdict(plan))
    if plan.verdict == "will not fit":
        parts.append(Text(_WOULD_FAIL, style=_VERDICT_STYLES["will not fit"]))
    critical = sorted(plan.simulated.critical_s.items(), key=lambda item: -item[1])
    total = sum(seconds for _, seconds in critical) or 1.0
    shares = ", ".join(f"{kind.replace('_', '-')} {s / total:.0%}" for kind, s in critical)
    return Group(*parts, _times(plan, False), Text(f"what decides the step: {shares}"))


def scaling_view(rows: Sequence[Mapping[str, float]]) -> RenderableType:
    """Show a scaling curve, as `scaling_facts` has it, as a table."""
    shown = [
        (
            f"{row['num_ranks']:,}",
            f"{row['step_s']:.3g} s",
            format_count(round(row["tokens_per_s"])),
            f"{row['efficiency_fraction']:.1%}",
            f"{row['exposed_fraction']:.1%}",
            format_bytes(int(row["memory_bytes"])),
        )
        for row in rows
    ]
    columns = ">ranks", ">step", ">tokens/s", ">efficiency", ">not hidden", ">memory a rank"
    return make_table(columns, shown)


def goodput_view(goodput: Goodput, interval_s: float) -> RenderableType:
    """Show the goodput under failures, with checkpoints every ``interval_s``."""
    rows = [
        ("progress that is kept", f"{goodput.kept_fraction:.2%}"),
        ("time between checkpoints", format_duration(interval_s)),
        ("standing still for checkpoints", f"{goodput.checkpoint_fraction:.2%}"),
        ("lost to failures", f"{goodput.failure_fraction:.2%}"),
        ("time between failures of the job", format_duration(goodput.mtbf_s)),
        ("best time between checkpoints", format_duration(goodput.best_interval_s)),
        ("progress with it", f"{goodput.kept_at_best_interval_fraction:.2%}"),
    ]
    return make_table(("goodput: the share of time that is progress", ">"), rows)


def names_view() -> RenderableType:
    """Show everything that has a name: models, devices, links, precisions, optimizers."""
    presets = map(find_preset, preset_names())
    sections = {
        "models": [
            (p.name, f"{format_count(p.shape.num_params)} parameters, {p.seq:,} tokens")
            for p in presets
        ],
        "devices (--gpu)": [
            (d.name, f"{format_bytes(d.memory_bytes)} ({format_gb(d.memory_bytes)})")
            for d in accelerators().values()
        ],
        "links (--link, --network)": [
            (x.name, f"{x.bandwidth_bytes_per_s / 1e9:,.4g} GB/s") for x in links().values()
        ],
        "precisions": [(name, f"computes in {r.compute}") for name, r in PRECISIONS.items()],
        "optimizers": [(name, "") for name in OPTIMIZERS],
    }
    return Group(*(make_table((title, ""), rows) for title, rows in sections.items()))


def _headline(plan: Plan) -> Text:
    node = plan.cluster.node
    return Text(
        f"{plan.model}: {format_count(plan.num_params)} parameters, sequences of {plan.seq:,}, on "
        f"{plan.cluster.num_ranks:,} x {node.accelerator.name} "
        f"({plan.cluster.num_nodes:,} x {node.name}, {node.intra.name} inside, {node.inter.name} "
        f"between)\n{plan.candidate.label}"
    )


def _verdict(plan: Plan) -> Text:
    """Show the verdict, and the speed."""
    text = Text(plan.verdict, style=_VERDICT_STYLES[plan.verdict])
    sizes = plan.memory.low_bytes, plan.memory.high_bytes, plan.capacity_bytes
    binary, decimal = (
        "{} to {} of {}".format(*map(form, sizes)) for form in (format_bytes, format_gb)
    )
    parts: list[str | Text] = [text, f": {binary} a rank ({decimal})\n", _speed(plan)]
    if plan.room.missing is not None:
        parts.insert(2, f"{plan.room.missing}\n")
    return Text.assemble(*parts)


def _speed(plan: Plan) -> Text:
    speed = format_count(round(plan.tokens_per_s))
    mfu = f", MFU {plan.mfu:.1%}" if plan.mfu is not None else ""
    return Text.assemble(
        (f"{plan.step_s:.3g} s a step", "bold"),
        f" of {plan.tokens_per_step:,} tokens: {speed} tokens/s, "
        f"{plan.tokens_per_s / plan.candidate.world_size:,.0f} a rank{mfu}",
    )


def _memory_table(plan: Plan) -> RenderableType:
    """Show the parts of the expected peak, the device, and the peak of each phase.

    Bars follow each other. The end of a device of more than twice the memory is not drawn.
    """
    peak, room, memory = plan.played.peak, plan.room, plan.memory
    unit = ByteUnit(peak.ledger.total)
    scale = _CELLS / max(memory.high_bytes, min(plan.capacity_bytes, 2 * memory.high_bytes))
    edge = round(scale * plan.capacity_bytes)

    def draw(sign: str, begin: float, end: float) -> str:
        cells = " " * round(scale * begin) + sign * (round(scale * end) - round(scale * begin))
        return f"{cells[:edge]:{edge}}│{cells[edge:]}" if edge <= _CELLS else cells

    rows, at = [], 0
    for name, num in (peak.ledger.lines() | memory.margins).items():
        rows.append((name.replace("_", " "), num, draw("█", at, at + num)))
        at += num
    ends = memory.low_bytes, memory.high_bytes
    rows.append(("all of it, low to high", memory.expected_bytes, draw("░", *ends)))
    rows.append(("the device", plan.capacity_bytes, draw("", 0, 0)))
    for place, off_device, num, capacity in (
        ("host", plan.played.host, room.host_bytes, room.host_capacity_bytes),
        ("files", plan.played.files, room.file_bytes, room.file_capacity_bytes),
    ):
        rows += [
            (f"{place}: {line.replace('_', ' ')}", num_bytes, "")
            for line, num_bytes in off_device.lines().items()
        ]
        of = "of a size not known" if capacity is None else f"of {format_bytes(capacity)}"
        rows.append((f"{place} of a node, {room.num_ranks} ranks", num, of))
    shown = [(name, unit.write(num), more) for name, num, more in rows if num]
    phase = f"in {peak.phase} of {plan.unit_name(peak.unit)}"
    others = ", ".join(
        f"{m.phase} {format_bytes(m.ledger.total)} in {plan.unit_name(m.unit)}"
        for m in plan.played.peaks
        if m.phase != peak.phase
    )
    table = make_table(("memory at the peak", f">{unit.name}", phase), shown)
    return Group(table, Text(f"other phases: {others}", style="dim"))


def _time_table(plan: Plan) -> RenderableType:
    program = plan.played.program
    sent = ", ".join(f"{k} {format_bytes(b)}" for k, b in program.sent_bytes.items())
    lines = [
        f"communication: {plan.simulated.overlap:.0%} hidden; sent by a rank in a step: "
        f"{sent or 'nothing'}"
    ]
    if copied := program.copied_bytes:
        parts = (f"{k.replace('_', ' ')} {format_bytes(b)}" for k, b in copied.items())
        lines.append(f"copied by a rank in a step: {', '.join(parts)}")
    return Group(_times(plan, True), Text("\n".join(lines), style="dim"))


def _times(plan: Plan, has_parts: bool) -> Table:
    """Show the time of a rank, and the number of micro-batches if they are fewer than a step's."""
    rows = [row for row in time_rows(plan) if has_parts or not row.is_part]
    shown, whole = plan.simulated.num_micro_batches, plan.candidate.accumulation
    of = f", of {shown} of the {whole} micro-batches" if shown < whole else ""
    texts = ((f"{'  ' * row.is_part}{row.name}", f"{1e3 * row.seconds:,.2f}") for row in rows)
    return make_table((f"time of a rank, ms{of}", ">"), texts)


def _more(count: int) -> Text:
    return Text(f"and {count:,} more, in --json" if count > 0 else "", style="dim")


def _list_of(lines: Iterable[str]) -> Text:
    return Text("\n".join(f"  - {line}" for line in lines), style="dim")
