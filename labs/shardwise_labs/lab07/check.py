"""The check of lab 7: units and buckets, then recorded steps with and without overlap."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise_labs.counting import Traffic
from shardwise_labs.given import LR, batch, loss_of, make_model, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.reader import load
from shardwise_labs.timeline import Timeline, draw
from shardwise_labs.words import count_difference, difference, sent_difference, times
from shardwise_labs.zero import train

NUM_UNITS = 6
WAYS = {"without": {"ahead": 0, "per_bucket": 1}, "with": {"ahead": 1, "per_bucket": 2}}


@dataclass
class _Recorded:
    """One step after a first one: its events, bytes sent, values and full units at the end."""

    timeline: Timeline
    sent: int
    values: list[Tensor]
    left_full: list[int]


def _record(trainer_of: Any, rank: int, folder: Path, **how: int) -> _Recorded:
    model, timeline = make_model(is_plain=True), Timeline()
    with Traffic(folder) as traffic:
        trainer = trainer_of(units_of(model), LR, **how)
        for step in range(2):
            traffic.clear()
            with timeline.recording(trainer):
                timeline.events.clear()
                trainer.backward(loss_of(model, batch(rank, step)))
            trainer.step()
        sent = traffic.sent
        left = [i for i, u in enumerate(trainer.units) if u.values.untyped_storage().nbytes()]
        shards = [unit.shard.detach().clone() for unit in trainer.units]
    return _Recorded(timeline, sent, shards, left)


@cache
def _lab5(rank: int, folder: Path) -> list[Tensor]:
    """Return the shards after two steps of lab 5's trainer."""
    model = make_model(is_plain=True)
    trainer = load(folder / "lab05_zero3.py").Zero3(units_of(model), LR)
    for step in range(2):
        trainer.backward(loss_of(model, batch(rank, step)))
        trainer.step()
    return [unit.shard.detach().clone() for unit in trainer.units]


def _peak(judge: Judge, **how: int) -> int:
    trainer: Any = judge.call("Overlapped")
    build = lambda model: trainer(units_of(model), LR, **how)  # noqa: E731
    return train(build, judge.rank, judge.folder, 2, is_plain=True).peak


def run(judge: Judge) -> None:
    """Record a step without overlap and one with it, and draw both."""
    trainer = judge.call("Overlapped")
    found = {way: _record(trainer, judge.rank, judge.folder, **how) for way, how in WAYS.items()}
    lines = [each.timeline for each in found.values()]

    def row(label: str, *values: int) -> None:
        judge.row(label, "".join(f"{value:>12,}" for value in values))

    judge.row("", "".join(f"{way:>12}" for way in WAYS))
    row("gathers", *(sum(n[0] == "g" for n in t.names("launch")) for t in lines))
    row("gathers beside compute", *(t.hidden("g") for t in lines))
    row("reductions", *(sum(n[0] == "r" for n in t.names("launch")) for t in lines))
    row("reductions beside compute", *(t.hidden("r") for t in lines))
    row("full units at once", *(t.full_at_once for t in lines))
    row("sent in a step", *(each.sent for each in found.values()))
    row("peak", *(_peak(judge, **how) for how in WAYS.values()))
    for way, line in zip(WAYS, lines, strict=True):
        judge.row(f"forward, {way}", f"  {line.order(15)}")
    if judge.rank == 0:
        draw(
            {f"{way} prefetch and buckets": line for way, line in zip(WAYS, lines, strict=True)},
            judge.folder / "lab07_timeline.svg",
        )


def check(judge: Judge) -> None:
    """Follow a unit and a bucket, then compare a recorded step with lab 5."""
    torch.manual_seed(7)
    for target, follow, good in (
        ("start", _judge_start, "memory, and a message in flight"),
        ("gather", _judge_gather, "waits once, and begins the next gather before it returns"),
        ("bucket", _judge_bucket, "one message for two units, in flight"),
        ("finish", _judge_finish, "the oldest first, means, added up"),
    ):
        with judge.judging(target):
            judge.judge(target, follow(judge), good=good)
        if not judge.has_met_all():
            return
    with judge.judging("order"):
        _judge_step(judge)


class _Pair:
    """A trainer of two linear modules, and the full values of the first."""

    def __init__(self, judge: Judge, **how: int) -> None:
        torch.manual_seed(3)
        modules = [nn.Linear(64, 32), nn.Linear(32, 8)]
        self.full = torch.cat([p.detach().flatten() for p in modules[0].parameters()])
        self.trainer: Any = judge.call("Overlapped")(modules, LR, **how)  # type: ignore[operator]
        self.unit = self.trainer.units[0]
        self.timeline = Timeline()

    def held(self) -> int:
        """Return the bytes behind the first unit's full values."""
        held: int = self.unit.values.untyped_storage().nbytes()
        return held


def _judge_start(judge: Judge) -> str | None:
    pair = _Pair(judge)
    unit, names = pair.unit, pair.timeline.names
    with pair.timeline.recording(pair.trainer), Traffic(judge.folder) as traffic:
        unit.start_gather()
        if not names("launch"):
            return "start_gather begins no all-gather"
        if names("wait"):
            return "the gather has ended when start_gather returns: async_op=True does not wait"
        if unit.work is None:
            return "`work` is None after start_gather: nothing can wait for the gather"
        if unit.is_full:
            return "the unit calls itself full, and its gather is in flight"
        unit.start_gather()
        if len(names("launch")) > 1:
            return "start_gather begins a second gather of a unit whose gather is in flight"
        unit.work.wait()
        problem = difference("the gathered values", unit.values, pair.full)
        unit.work, unit.is_full = None, True
        unit.start_gather()
        if len(names("launch")) > 1:
            return "start_gather gathers a unit that is full"
    return problem or sent_difference(traffic, pair.full.nbytes // 2, "one all-gather")


def _judge_gather(judge: Judge) -> str | None:
    pair = _Pair(judge, ahead=0)
    unit, asked = pair.unit, list[int]()
    pair.trainer.prefetch = asked.append
    with pair.timeline.recording(pair.trainer):
        del unit.gather  # only messages are recorded here
        for what in ("the first gather", "a gather after free", "a gather after start_gather"):
            waits = len(pair.timeline.names("wait"))
            if what.endswith("start_gather"):
                unit.start_gather()
            launches = len(pair.timeline.names("launch"))
            unit.gather()
            if what.endswith("start_gather") and len(pair.timeline.names("launch")) > launches:
                return f"{what} begins another message: wait for the one in flight"
            if len(pair.timeline.names("wait")) == waits:
                return f"{what} returns before its message has come: wait for it"
            if not unit.is_full:
                return f"after {what} the unit does not know that it is full"
            if unit.work is not None:
                return f"after {what} `work` is still set: the next one waits for an old message"
            if problem := difference("the gathered values", unit.values, pair.full):
                return problem
            if asked[-1:] != [0] or len(asked) != 1:
                return f"{what} calls trainer.prefetch with {asked or 'nothing'}, [0] expected"
            unit.gather()
            if len(pair.timeline.names("wait")) != waits + 1:
                return "a gather of a full unit sends again"
            if len(asked) != 2:
                return "a gather of a full unit begins no other: prefetch on every call"
            asked.clear()
            unit.free()
    return None


def _grads(num_ranks: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(20 + rank)
    return [torch.randn(size * num_ranks, generator=generator) for size in (40, 24, 8)]


def _judge_bucket(judge: Judge) -> str | None:
    n, rank, pair = judge.num_ranks, judge.rank, _Pair(judge)
    fulls = _grads(n, rank)
    with pair.timeline.recording(pair.trainer), Traffic(judge.folder) as traffic:
        found = pair.trainer.start_reduction(fulls)
        if pair.timeline.names("wait"):
            return "the reduction has ended when start_reduction returns: async_op=True"
        if not isinstance(found, tuple) or len(found) != 2 or not hasattr(found[0], "wait"):
            return "start_reduction does not return (work, output)"
        work, mine = found
        work.wait()
    sums = [sum(each) for each in zip(*(_grads(n, r) for r in range(n)), strict=True)]
    want = torch.cat([total.chunk(n)[rank] for total in sums])  # type: ignore[union-attr]
    known = {
        "is cut without regard to units: slice r of EACH unit goes to rank r": torch.cat(
            sums  # type: ignore[arg-type]
        ).chunk(n)[rank],
        "is the mean already; the sum is asked for, the mean comes later": want / n,
        "is another rank's": torch.cat([t.chunk(n)[1 - rank] for t in sums]),  # type: ignore[union-attr]
        "has the units in another order": torch.cat([t.chunk(n)[rank] for t in sums[::-1]]),  # type: ignore[union-attr]
        "has this rank's gradients alone": torch.cat([f.chunk(n)[rank] for f in fulls]),
    }
    if mine.shape != want.shape:
        return f"the output has {mine.numel()} elements, {want.numel()} expected"
    if len(traffic.calls) > 1:
        return f"{len(traffic.calls)} collectives for one bucket, 1 expected"
    return difference(f"the output on rank {rank}", mine, want, known) or sent_difference(
        traffic, (n - 1) * want.nbytes, "one reduce-scatter"
    )


class _Sum:
    """Work whose output has its value after `wait`."""

    def __init__(self, mine: Tensor, value: float, waited: list[float]) -> None:
        self._mine, self._value, self._waited = mine, value, waited

    def wait(self) -> None:
        """Let the output have its value."""
        self._waited.append(self._value)
        self._mine.fill_(self._value)


def _judge_finish(judge: Judge) -> str | None:
    n, pair = judge.num_ranks, _Pair(judge)
    trainer, units, waited = pair.trainer, pair.trainer.units, list[float]()
    sizes = [unit.shard.numel() for unit in units]

    def push(value: float, which: list[Any]) -> None:
        mine = torch.zeros(sum(unit.shard.numel() for unit in which))
        trainer.in_flight.append((_Sum(mine, value, waited), mine, which))

    push(6.0, [units[0]])
    push(10.0, [units[1], units[0]])
    push(2.0, [units[1]])
    ages = {6.0: "oldest", 10.0: "second", 2.0: "newest"}
    trainer.finish_reductions(allowed=1)
    left = len(trainer.in_flight)
    if left != 1:
        return f"3 in flight, 1 allowed: {left} are left" + ("; nothing overlaps" * (left == 0))
    if waited != [6.0, 10.0]:
        said = ", ".join(ages[value] for value in waited) or "none"
        return f"reductions that were waited for: {said}; the oldest, then the second expected"
    for unit, size, want in zip(units, sizes, (16.0, 10.0), strict=True):
        got = unit.shard.grad
        if got is None:
            return f"`shard.grad` of unit {unit.index} is None"
        if tuple(got.shape) != (size,):
            return f"`shard.grad` of unit {unit.index} has {got.numel()} elements, {size} expected"
        known = {
            f"is the sum, the mean was asked for: exactly {times(n)}": torch.full((size,), want),
            "is that of the last reduction alone: add to it": torch.full((size,), 10.0 / n),
            "is read before the message has come": torch.zeros(size),
        }
        problem = difference(
            f"`shard.grad` of unit {unit.index}", got, torch.full((size,), want / n), known
        )
        if problem:
            return problem
    trainer.finish_reductions(allowed=0)
    return "allowed=0 leaves one in flight" if trainer.in_flight else None


def _judge_step(judge: Judge) -> None:
    trainer = judge.call("Overlapped")
    found = {way: _record(trainer, judge.rank, judge.folder, **how) for way, how in WAYS.items()}
    plain, overlap = found["without"], found["with"]
    line = overlap.timeline
    gathers = [name for name in line.names("launch") if name[0] == "g"]
    with judge.judging("order"):
        judge.judge("order", _order_problem(plain, overlap, gathers), good=line.order(9) + " ...")
    with judge.judging("bits"):
        want = torch.cat(_lab5(judge.rank, judge.solutions))
        got = torch.cat(overlap.values)
        problem = difference(f"after two steps rank {judge.rank}'s part of the model", got, want)
        judge.judge("bits", problem, good="shards of lab 5, to the bit")
    with judge.judging("sent"):
        needed = sum(3 * shard.nbytes for shard in overlap.values)
        known = {"units are gathered that nothing needs": overlap.sent} if overlap.left_full else {}
        problem = count_difference("bytes sent in a step", overlap.sent, needed, known)
        judge.judge("sent", problem, good=f"{needed:,} bytes, as without overlap")
    with judge.judging("full"):
        most, reductions = line.full_at_once, line.reductions_at_once
        problem = count_difference("units full at once", most, 2)
        problem = problem or (
            f"{reductions} reductions in flight, 2 allowed" if reductions > 2 else None
        )
        judge.judge("full", problem, good=f"{most} full units, {reductions} reductions in flight")
    if judge.has_met_all():
        judge.facts = {
            "sent": f"{overlap.sent:,}",
            "plain_sent": f"{plain.sent:,}",
            "peak": f"{_peak(judge, **WAYS['with']):,}",
            "plain_peak": f"{_peak(judge, **WAYS['without']):,}",
            "gathers": f"{len(gathers)}",
            "exposed": f"{len(gathers) - line.hidden('g')}",
            "gathers of 12 that run beside compute": f"{line.hidden('g')}",
        }


def _order_problem(plain: _Recorded, overlap: _Recorded, gathers: list[str]) -> str | None:
    line = overlap.timeline
    if overlap.left_full:
        return f"after the step unit {overlap.left_full[0]} is full: nothing needed its last gather"
    if plain.timeline.hidden("g"):
        return f"with ahead=0 {plain.timeline.hidden('g')} gathers begin early, 0 expected"
    if len(gathers) != 2 * NUM_UNITS:
        return f"{len(gathers)} gathers in a step, {2 * NUM_UNITS} expected"
    hidden, want = line.hidden("g"), 2 * NUM_UNITS - 2
    if hidden != want:
        forward = f"the step begins {line.order(9)} ..."
        return f"{hidden} of {len(gathers)} gathers run beside compute, {want} expected; {forward}"
    reductions = sum(name[0] == "r" for name in line.names("launch"))
    if reductions != NUM_UNITS // 2:
        return f"{reductions} reductions of buckets of two units, {NUM_UNITS // 2} expected"
    return None
