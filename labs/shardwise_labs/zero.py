"""Train the model with a trainer of labs 3 to 5, count what it holds and sends, and compare it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwise_labs.counting import Call, Meter, Traffic
from shardwise_labs.given import LR, OneProcess, batch, loss_of, make_model, one_process, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.reader import load
from shardwise_labs.words import WrongAnswer, difference, tensor_of, times

STAGES = ("replicated", "zero1", "zero2", "zero3")


class Trainer(Protocol):
    """What a reader's Zero1, Zero2 and Zero3 can do."""

    def backward(self, loss: Tensor) -> None:
        """Run backward."""

    def step(self) -> None:
        """Update the parameters."""


@dataclass
class Trained:
    """The parameters after training, and bytes of the last step on this rank."""

    model: nn.Module
    trainer: Trainer
    values: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    at_rest: int = 0  # before backward begins to write, after a step
    held: int = 0  # after backward, before the step
    peak: int = 0  # of forward and backward
    step_peak: int = 0  # of the whole step
    grads: list[Tensor] = field(default_factory=list)  # in each step what the optimizer is given
    calls: list[Call] = field(default_factory=list)
    calls_of_setup: list[Call] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Return the bytes that this rank sent in the last step."""
        return sum(call.sent for call in self.calls)


def train(
    build: Callable[[nn.Module], Trainer],
    rank: int,
    folder: Path,
    steps: int = 3,
    micro_batches: int = 1,
    is_plain: bool = False,
    is_measured: bool = True,
) -> Trained:
    """Train ``steps`` steps; every rank of the group calls this. Measuring takes most of the time.

    ``is_plain``: a model of equal blocks, each with a gradient for each parameter.
    """
    model = make_model(is_plain)
    meter = Meter(*model.parameters())
    with meter if is_measured else nullcontext(), Traffic(folder) as traffic:
        trainer = build(model)
        found = Trained(model, trainer, calls_of_setup=list(traffic.calls))
        record_gradients(trainer, found.grads)
        for step in range(steps):
            traffic.clear()
            if is_measured:
                found.at_rest = meter.settled()
                meter.restart()
            total = 0.0
            for micro in range(micro_batches):
                loss = loss_of(model, batch(rank, step * micro_batches + micro))
                trainer.backward(loss)
                total += loss.item()
                del loss
            if is_measured:
                found.peak, found.held = meter.peak, meter.settled()
            trainer.step()
            found.step_peak = meter.peak
            found.losses.append(total / micro_batches)
        found.calls = list(traffic.calls)
        if hasattr(trainer, "full_parameters"):
            trainer.full_parameters()
    found.values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found


class Replicated:
    """Plain data parallelism, beside the stages."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=LR, foreach=False)

    def backward(self, loss: Tensor) -> None:
        """Run backward, and average the gradients."""
        loss.backward()
        for p in self.model.parameters():
            torch.distributed.all_reduce(p.grad)
            p.grad /= torch.distributed.get_world_size()  # type: ignore[operator]

    def step(self) -> None:
        """Update the parameters."""
        self.optimizer.step()
        self.optimizer.zero_grad()


@cache
def measured_stages(rank: int, folder: Path, micro_batches: int = 1) -> dict[str, Trained]:
    """Return the plain model, trained at each stage by the solutions; a process does it once."""
    zero1 = load(folder / "lab03_zero1.py").Zero1
    zero2 = load(folder / "lab04_zero2.py").Zero2
    zero3 = load(folder / "lab05_zero3.py").Zero3
    builders = (
        Replicated,
        lambda model: zero1(model, LR),
        lambda model: zero2(units_of(model), LR),
        lambda model: zero3(units_of(model), LR),
    )
    return {
        stage: train(build, rank, folder, 2, micro_batches, is_plain=True)
        for stage, build in zip(STAGES, builders, strict=True)
    }


def record_gradients(trainer: object, grads: list[Tensor]) -> None:
    """Keep what the trainer's optimizer is given in each step, flat."""
    optimizer = getattr(trainer, "optimizer", None)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WrongAnswer("`self.optimizer` is no optimizer of torch")

    def record(*_: object) -> None:
        with _disable_current_modes():
            params = [p for group in optimizer.param_groups for p in group["params"]]
            flat = [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in params]
            grads.append(torch.cat(flat))

    optimizer.register_step_pre_hook(record)


def own_slices(
    named: Mapping[str, Tensor], by_unit: bool, rank: int, num_ranks: int
) -> dict[str, Tensor]:
    """Return a rank's slices of the model's values, flat, by unit; missing values are zeros.

    Without ``by_unit`` the whole model is one unit, named ''.
    """
    model = make_model()
    names = {id(p): name for name, p in model.named_parameters()}
    found = {}
    for unit, module in model.named_children() if by_unit else [("", model)]:
        parts = [named.get(names[id(p)], torch.zeros(p.shape)) for p in module.parameters()]
        flat = torch.cat([part.flatten() for part in parts])
        flat = torch.cat([flat, torch.zeros(-len(flat) % num_ranks)])
        found[unit] = flat.chunk(num_ranks)[rank]
    return found


def padded_numel(by_unit: bool, num_ranks: int) -> int:
    """Return the number of parameters with the zeros that make slices equal."""
    return num_ranks * sum(map(len, own_slices({}, by_unit, 0, num_ranks).values()))


@dataclass(frozen=True)
class Compared:
    """Training on one rank beside one process: where gradients and parameters differ, in words.

    ``by_unit``: each unit has its own slices. Problems of the first step come first, since what
    comes after them says little.
    """

    rank: int
    num_ranks: int
    by_unit: bool
    first: Trained  # one step
    trained: Trained
    oracle: OneProcess
    oracle_first: OneProcess

    def slices(self, named: Mapping[str, Tensor], rank: int | None = None) -> dict[str, Tensor]:
        """Return a rank's slices of the model's values by unit; by default this rank's."""
        return own_slices(named, self.by_unit, self.rank if rank is None else rank, self.num_ranks)

    @cached_property
    def gradient_problem(self) -> str | None:
        """How the gradients that the optimizer was given differ from the means."""
        problem = self._gradient_problem(self.first, self.oracle_first)
        if problem or self._value_problem(self.first, self.oracle_first):
            return problem
        return self._gradient_problem(self.trained, self.oracle)

    @cached_property
    def value_problem(self) -> str | None:
        """How the parameters after training differ."""
        return self._value_problem(self.first, self.oracle_first) or self._value_problem(
            self.trained, self.oracle
        )

    def _gradient_problem(self, trained: Trained, oracle: OneProcess) -> str | None:
        steps, n, rank = len(oracle.values), self.num_ranks, self.rank
        if len(trained.grads) != steps:
            return f"the optimizer made {len(trained.grads)} steps in {steps}"
        mean = "the mean over ranks was asked for"
        for step, got in enumerate(trained.grads):
            means, own = oracle.grads[step], oracle.rank_grads[step][rank]
            wants = self.slices(means)
            what = f"the gradient that rank {rank}'s optimizer gets in step {step + 1}"
            got = tensor_of(what, got, (sum(map(len, wants.values())),))
            known = {
                f"is the sum over ranks, {mean}: exactly {times(n)}": {
                    unit: want * n for unit, want in wants.items()
                },
                f"is of this rank's batch alone, {mean}": self.slices(own),
                "is that of the last micro-batch alone": self.slices(oracle.last_grads[step]),
            }
            if step:
                before = self.slices(oracle.grads[step - 1])
                known["still has that of the step before in it: `step` sets it to zero"] = {
                    unit: want + before[unit] for unit, want in wants.items()
                }
            for other in range(n):
                if other != rank:
                    known[f"is that of rank {other}'s slice"] = self.slices(means, other)
            parts = got.split([len(want) for want in wants.values()])
            for (unit, want), part in zip(wants.items(), parts, strict=True):
                named = f"{what}{f', unit {unit!r},' if unit else ''}"
                wrongs = {words: values[unit] for words, values in known.items()}
                if problem := difference(named, part, want, wrongs):
                    return problem
        return None

    def _value_problem(self, trained: Trained, oracle: OneProcess) -> str | None:
        start = {name: p.detach() for name, p in make_model().named_parameters()}
        n, steps = self.num_ranks, len(oracle.values)
        for owner in sorted(range(n), key=lambda other: other != self.rank):
            firsts, wants, gots = (
                self.slices(named, owner) for named in (start, oracle.values[-1], trained.values)
            )
            whose = "its own slice" if owner == self.rank else f"the slice of rank {owner}"
            known = "is as before: gather all slices, after the optimizer's step"
            for unit, first in firsts.items():
                want, got = wants[unit], gots[unit]
                of = f" of unit {unit!r}" if unit else ""
                what = f"after step {steps} rank {self.rank} has {whose}{of}, which"
                if problem := difference(what, got, want, {known: first}):
                    ratio = float((got - first).norm() / (want - first).norm())
                    if abs(ratio - 1) > 0.2:
                        problem += f"; it moved {times(ratio)} as far as in one process"
                    return problem
        return None


def compare(
    build: Callable[[nn.Module], Trainer],
    rank: int,
    num_ranks: int,
    folder: Path,
    by_unit: bool,
    micro_batches: int = 1,
) -> Compared:
    """Train one step and three; every rank of the group calls this."""
    runs = [train(build, rank, folder, steps, micro_batches, is_measured=False) for steps in (1, 3)]
    oracles = [one_process(num_ranks, steps, micro_batches) for steps in (1, 3)]
    return Compared(rank, num_ranks, by_unit, *runs, *reversed(oracles))


def update_after_sum(num_ranks: int) -> str:
    """Return how far parameters are from those after training with sums instead of means."""
    want = one_process(num_ranks)
    got = one_process(num_ranks, scale=num_ranks)
    flat = [torch.cat([v.flatten() for v in each.values[-1].values()]) for each in (got, want)]
    return f"{float((flat[0] - flat[1]).norm() / flat[1].norm()):.1e}"


def judge_bits(judge: Judge, compared: Compared) -> None:
    """Judge the targets "gradient" and "bits"."""
    with judge.judging("gradient"):
        steps = len(compared.trained.grads)
        good = f"{steps} steps, the bits of one process"
        judge.judge("gradient", compared.gradient_problem, good=good)
    with judge.judging("bits"):
        good = "34,763 parameters as in one process, to the bit"
        judge.judge("bits", compared.value_problem, good=good)


def show(judge: Judge, trained: Trained, numel: int, peak: int, compared: Compared) -> None:
    """Add the rows of a run: bytes held and sent, and if the parameters are right."""
    judge.row("parameters, padded", f"{numel:>10,}")
    judge.row("held between steps", f"{trained.at_rest:>10,}")
    judge.row("held after backward", f"{trained.held:>10,}")
    judge.row("replicated would hold", f"{16 * numel:>10,}")
    judge.row("held over replicated", f"{trained.held / (16 * numel):>10.3f}")
    judge.row("peak", f"{peak:>10,}")
    judge.row("sent in a step", f"{trained.sent:>10,}")
    judge.row("sent, in P", f"{trained.sent / (4 * numel):>10.3f}")
    judge.row("collectives in a step", f"{len(trained.calls):>10,}")
    judge.row("the bits of one process", f"{'no' if compared.value_problem else 'yes':>10}")
