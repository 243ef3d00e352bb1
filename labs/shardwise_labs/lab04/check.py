"""The check of lab 4: units on small modules, then training on two ranks."""

import inspect
from typing import Any

import torch
from torch import nn

from shardwise_labs.counting import Traffic
from shardwise_labs.given import LR, make_model, numel_of, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.words import (
    WrongAnswer,
    count_difference,
    difference,
    sent_difference,
    tensor_of,
    times,
)
from shardwise_labs.zero import Compared, Trained, Trainer, compare, judge_bits, show, train


class Zeros:
    """Training with a reader's class of labs 4 and 5, measured on the plain model."""

    def __init__(self, judge: Judge, name: str) -> None:
        self.judge = judge
        self._trainer: Any = judge.call(name)
        units = [numel_of(unit) for unit in units_of(make_model(is_plain=True))]
        n = judge.num_ranks
        self.units = [4 * (-(-numel // n) * n) for numel in units]  # bytes, padded
        self.whole, self.slices = sum(self.units), sum(self.units) // n

    def _build(self, model: nn.Module) -> Trainer:
        return self._trainer(units_of(model), LR)

    def compared(self) -> Compared:
        """Train with two micro-batches, beside one process."""
        where = (self.judge.rank, self.judge.num_ranks, self.judge.folder)
        return compare(self._build, *where, by_unit=True, micro_batches=2)

    def measured(self, micro_batches: int = 1, is_one_unit: bool = False) -> Trained:
        """Train the plain model for two steps, and measure it."""
        where = (self.judge.rank, self.judge.folder, 2, micro_batches)
        build = (lambda model: self._trainer([model], LR)) if is_one_unit else self._build
        return train(build, *where, is_plain=True)

    def show(self) -> None:
        """Add the rows of a run."""
        measured, compared = self.measured(), self.compared()
        show(self.judge, measured, self.whole // 4, measured.peak, compared)


def run(judge: Judge) -> None:
    """Train, and show what a rank holds and sends."""
    zeros = Zeros(judge, "Zero2")
    zeros.show()
    judge.row("sent with 4 micro-batches", f"{zeros.measured(4).sent:>10,}")


def check(judge: Judge) -> None:
    """Compare units with known tensors, and training with one process."""
    torch.manual_seed(4)
    with judge.judging("hooks"):
        _judge_hooks(judge)
    with judge.judging("count"):
        _judge_count(judge)
    with judge.judging("reduce"):
        _judge_reduce(judge)
    if judge.has_met_all():
        with judge.judging("gradient"):
            _judge_training(judge)


def _judge_hooks(judge: Judge) -> None:
    called: list[bool] = []

    unit: Any = judge.call("Unit")
    accepts = inspect.signature(unit.count_gradient).bind

    class Watched(unit):  # type: ignore[misc]
        def count_gradient(self, *given: object) -> None:
            called.append(sum(p.grad is not None for p in linear.parameters()) > len(called))
            try:
                accepts(self, *given)
            except TypeError:
                raise WrongAnswer(
                    "the hook gives the parameter to count_gradient, which takes none: hand on a "
                    "function that drops it"
                ) from None

    linear = nn.Linear(5, 3)
    Watched(linear)
    linear(torch.ones(1, 5)).sum().backward()
    problem = None
    if len(called) != 2:
        count = f"{len(called)} time{'s' * (len(called) != 1)}"
        problem = f"backward wrote 2 gradients, and count_gradient was called {count}"
    elif not all(called):
        problem = (
            "count_gradient is called before the gradient is in p.grad: "
            "register_post_accumulate_grad_hook calls after"
        )
    judge.judge("hooks", problem, good="each gradient is counted when it is written")


def _judge_count(judge: Judge) -> None:
    calls: list[int] = []

    class Watched(judge.call("Unit")):  # type: ignore[misc]
        def reduce(self) -> None:
            calls.append(0)

    unit, after = Watched(nn.Linear(5, 3)), []
    unit.num_missing = 3
    for number in (1, 2, 3):
        unit.count_gradient()
        after += [number] * (len(calls) - len(after))
    problem = None if after else "reduce was not called after the third of 3 gradients"
    if after and after != [3]:
        said = " and ".join(map(str, after))
        problem = f"reduce was called after gradient {said} of 3: after the third, once"
    judge.judge("count", problem, good="the last gradient of a unit reduces it")


def _judge_reduce(judge: Judge) -> None:
    n, rank = judge.num_ranks, judge.rank
    generator = torch.Generator().manual_seed(5)
    unit = judge.call("Unit")(nn.Bilinear(32, 16, 8))  # type: ignore[operator]
    weight, bias = unit.parameters
    grads = [torch.randn(2, weight.numel(), generator=generator) for _ in range(n)]
    wants, problem = [], None
    with Traffic(judge.folder) as traffic:
        for micro in range(2):
            # The first parameter gets no gradient in the first micro-batch; in the second both do.
            weight.grad = grads[rank][micro].view_as(weight).clone() if micro else None
            bias.grad = torch.full_like(bias, 1.0 + rank)
            unit.reduce()
            full = torch.zeros(n, unit.values.numel())
            for r in range(n):
                full[r, : weight.numel()] = grads[r][micro] if micro else 0
                full[r, weight.numel() : weight.numel() + bias.numel()] = 1.0 + r
            wants.append(full.sum(0).chunk(n)[rank] / n)
            want = sum(wants)
            if unit.shard.grad is None:
                raise WrongAnswer("reduce left `shard.grad` as None; one parameter has no gradient")
            what = f"`shard.grad` on rank {rank} after micro-batch {micro + 1}"
            got = tensor_of(what, unit.shard.grad, tuple(wants[0].shape))
            known = {
                "is that of the last micro-batch alone: add to it": wants[-1],
                f"is the sum, the mean was asked for: exactly {times(n)}": want * n,
                "is the mean of this micro-batch, added twice": want + wants[-1],
                "has gradients in other places: a parameter without one counts as zero": (
                    torch.cat([full[:, weight.numel() :], full[:, : weight.numel()]], 1)
                    .sum(0)
                    .chunk(n)[rank]
                    / n
                ),
            }
            problem = problem or difference(what, got, want, known)
            if weight.grad is not None or bias.grad is not None:
                problem = problem or "a full gradient is still in `p.grad` after reduce"
    needed = 2 * (n - 1) * 4 * unit.values.numel() // n
    problem = problem or sent_difference(traffic, needed, "one mean_slice in each reduce")
    judge.judge("reduce", problem, good="the slice of the mean, added up over micro-batches")


def _judge_training(judge: Judge) -> None:
    n, zeros = judge.num_ranks, Zeros(judge, "Zero2")
    compared, measured = zeros.compared(), zeros.measured()
    whole, slices = zeros.whole, zeros.slices
    judge.facts = {
        "sent": f"{measured.sent:,}",
        "peak": f"{measured.peak:,}",
        "held": f"{measured.held:,}",
        "grads": f"{measured.held - measured.at_rest:,}",
        "full_grads": f"{whole:,}",
    }
    judge_bits(judge, compared)
    with judge.judging("held"):
        held = whole + 3 * slices
        known = {
            "full gradients are still there": 2 * whole + 3 * slices,
            "full gradients are there, and no slices of them": 2 * whole + 2 * slices,
        }
        what = f"bytes held on rank {judge.rank} after backward"
        problem = count_difference(what, measured.held, held, known)
        good = f"{held:,} bytes: P + P / {n} + 2 P / {n}, where P is {whole:,}"
        judge.judge("held", problem, good=good)
    with judge.judging("sent"):
        needed = 2 * (n - 1) * slices
        known = {"each unit is reduced twice, or gathered twice": 3 * (n - 1) * slices}
        problem = count_difference("bytes sent in a step", measured.sent, needed, known)
        judge.judge("sent", problem, good=f"{needed:,} bytes with one micro-batch, as at zero1")
    with judge.judging("peak"):
        first, block = zeros.units[0], zeros.units[1]
        peak = whole + 2 * slices + (whole - first - block) // n + 2 * block
        known = {"full gradients of all units are alive at once": peak + whole - 2 * block}
        problem = count_difference("bytes at the peak", measured.peak, peak, known, slack=0.02)
        good = f"{measured.peak:,} bytes: a unit's full gradients and their copy on top"
        judge.judge("peak", problem, good=good)
