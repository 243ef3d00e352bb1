"""The check of lab 5: one sharded unit step by step, then training on two ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from shardwise_labs.counting import Call, Traffic
from shardwise_labs.judge import Judge
from shardwise_labs.lab04.check import Zeros
from shardwise_labs.words import WrongAnswer, count_difference, difference, sent_difference, times
from shardwise_labs.zero import judge_bits


def run(judge: Judge) -> None:
    """Train, and show what a rank holds and sends."""
    Zeros(judge, "Zero3").show()


def check(judge: Judge) -> None:
    """Follow one unit through a step, and compare training with one process."""
    torch.manual_seed(5)
    for target, follow, good in (
        ("shard", _judge_shard, "a slice with memory of its own; the full values have none"),
        ("gather", _judge_gather, "the full values are back, and are gathered once"),
        ("free", _judge_free, "the values have no memory, and can be gathered again"),
        ("forward", _judge_forward, "freed after forward, and back for backward"),
        ("reduce", _judge_reduce, "the slice of the mean, and no full values after backward"),
    ):
        with judge.judging(target):
            judge.judge(target, *follow(judge), good=good)
        if not judge.has_met_all():
            return
    with judge.judging("gradient"):
        _judge_training(judge)


class _Watched:
    """A module of 2,080 parameters as a unit, with its full values and this rank's slice."""

    def __init__(self, judge: Judge) -> None:
        self.module = nn.Linear(64, 32)
        parts = [p.detach().flatten() for p in self.module.parameters()]
        self.full = torch.cat(parts)
        self.mine = self.full.chunk(judge.num_ranks)[judge.rank].clone()
        self.slice_bytes = self.mine.nbytes
        unit: Any = judge.call("ShardedUnit")
        self.unit = unit(self.module)

    def held(self) -> int:
        """Return the bytes behind the full values."""
        values = self.unit.values
        if not isinstance(values, Tensor) or values.numel() != self.full.numel():
            raise WrongAnswer("`self.values` is not the flat tensor any more: free its memory only")
        if values.untyped_storage()._cdata != self.module.weight.untyped_storage()._cdata:
            raise WrongAnswer(
                "the module's parameters are not views of `self.values` any more: "
                "free and fill the memory of the same tensor"
            )
        return values.untyped_storage().nbytes()


_Problems = tuple[str | None, ...]


def _judge_shard(judge: Judge) -> _Problems:
    watched = _Watched(judge)
    shard, held = watched.unit.shard, watched.held()
    if shard.numel() != watched.mine.numel():
        return (f"the shard has {shard.numel():,} elements, {watched.mine.numel():,} expected",)
    if shard.untyped_storage()._cdata == watched.unit.values.untyped_storage()._cdata:
        return ("the shard is still a view of the full values, and loses its memory with them",)
    known = {f"is rank {r}'s slice": s for r, s in enumerate(watched.full.chunk(judge.num_ranks))}
    del known[f"is rank {judge.rank}'s slice"]
    size, memory = watched.slice_bytes, shard.untyped_storage().nbytes()
    return (
        f"the unit holds {held:,} bytes of full values after __init__" if held else None,
        difference(f"the shard on rank {judge.rank}", shard.detach(), watched.mine, known),
        count_difference("bytes of memory behind the shard", memory, size),
    )


def _judge_gather(judge: Judge) -> _Problems:
    watched, n = _Watched(judge), judge.num_ranks
    with Traffic(judge.folder) as traffic:
        watched.unit.gather()
        if watched.held() < watched.full.nbytes:
            return (f"after gather the values have {watched.held():,} bytes of memory",)
        full = watched.unit.values
        needed = (n - 1) * watched.slice_bytes
        problem = difference("the gathered values", full, watched.full)
        problem = problem or sent_difference(traffic, needed, "one all-gather")
        watched.unit.gather()
    again = None
    if traffic.sent > needed:
        again = f"a second gather sends {traffic.sent - needed:,} bytes, but the values are there"
    return problem, again


def _judge_free(judge: Judge) -> _Problems:
    watched = _Watched(judge)
    with Traffic(judge.folder) as traffic:
        watched.unit.gather()
        watched.unit.free()
        held = watched.held()
        if held:
            return (f"after free the full values still have {held:,} bytes of memory",)
        once = traffic.sent
        watched.unit.gather()
    if traffic.sent == once or watched.held() == 0:
        return ("a gather after free sends nothing: is the unit still marked as full?",)
    return (difference("values gathered again", watched.unit.values, watched.full),)


def _guarded(watched: _Watched, output: Tensor) -> None:
    """Let backward fail in words, before it reads freed memory."""

    def look(_: Tensor) -> None:
        if watched.held() == 0:
            raise WrongAnswer(
                "backward comes back to the module, and its full values are not there: "
                "gather them when the gradient of its output is known"
            )

    output.register_hook(look)


def _judge_forward(judge: Judge) -> _Problems:
    watched = _Watched(judge)
    unit, module = watched.unit, watched.module
    x = torch.ones(1, 64)
    with torch.no_grad():
        module(x)
    unit.num_missing = 2
    output = module(x)
    if held := watched.held():
        return (f"after forward the unit still has {held:,} bytes of full values",)
    want = nn.functional.linear(
        x, watched.full[: 64 * 32].view(32, 64), watched.full[64 * 32 :]
    ).detach()
    _guarded(watched, output)
    output.sum().backward()
    return (difference("the output", output.detach(), want),)


def _judge_reduce(judge: Judge) -> _Problems:
    watched, n, rank = _Watched(judge), judge.num_ranks, judge.rank
    unit, module = watched.unit, watched.module
    with Traffic(judge.folder) as traffic:
        unit.num_missing = 2
        output = module(torch.full((1, 64), 1.0 + rank))
        _guarded(watched, output)
        output.sum().backward()
    if held := watched.held():
        return (f"after backward the unit still has {held:,} bytes of full values",)
    if unit.shard.grad is None:
        return ("after backward `shard.grad` is None: the reduction of lab 4 is missing",)
    of_ranks = [torch.cat([torch.full((64 * 32,), 1.0 + r), torch.ones(32)]) for r in range(n)]
    want = sum(of_ranks).chunk(n)[rank] / n  # type: ignore[union-attr]
    known = {f"is the sum, the mean was asked for: exactly {times(n)}": want * n}
    needed = 3 * (n - 1) * watched.slice_bytes
    return (
        difference(f"`shard.grad` on rank {rank}", unit.shard.grad, want, known),
        sent_difference(traffic, needed, "two all-gathers and one reduce-scatter"),
    )


def _gathers(calls: list[Call]) -> int:
    return sum(call.name.startswith("all_gather") for call in calls)


def _judge_training(judge: Judge) -> None:
    n, zeros = judge.num_ranks, Zeros(judge, "Zero3")
    compared, measured = zeros.compared(), zeros.measured()
    whole, slices = zeros.whole, zeros.slices
    three_others = 2 * 3  # units of the other model that run once
    twice = _gathers(compared.trained.calls) // 2 - three_others
    judge.facts = {
        "sent": f"{measured.sent:,}",
        "zero1_sent": f"{2 * (n - 1) * slices:,}",
        "gathers": str(_gathers(measured.calls)),
        "gathers of a module that runs twice": str(twice),
        "peak": f"{measured.peak:,}",
    }
    judge_bits(judge, compared)
    with judge.judging("held"):
        held = 4 * slices
        known = {
            "full parameters are still there": held + whole,
            "full gradients are still there": held + whole - slices,
        }
        what = f"bytes held on rank {judge.rank} after backward"
        problem = count_difference(what, measured.held, held, known)
        between = count_difference(
            f"bytes held on rank {judge.rank} between steps",
            measured.at_rest,
            3 * slices,
            {"full parameters are still there": 3 * slices + whole},
        )
        good = f"{held:,} bytes: 4 P / {n}, where P is {whole:,}"
        judge.judge("held", problem, between, good=good)
    with judge.judging("sent"):
        problem = count_difference("bytes sent in a step", measured.sent, 3 * (n - 1) * slices)
        judge.judge("sent", problem, good=f"{measured.sent:,} bytes, 1.5 x those of zero1")
    with judge.judging("peak"):
        first, block = zeros.units[0], zeros.units[1]
        peak = 3 * slices + (whole - first - block) // n + 3 * block
        known = {"full parameters of all units are alive at once": peak + whole - block}
        problem = count_difference("bytes at the peak", measured.peak, peak, known, slack=0.02)
        good = f"{measured.peak:,} bytes: three full copies of one block on top"
        judge.judge("peak", problem, good=good)
    if judge.has_met_all():
        judge.facts["one_unit"] = f"{zeros.measured(is_one_unit=True).peak:,}"
