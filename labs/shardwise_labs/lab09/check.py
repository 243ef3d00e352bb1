"""The check of lab 9: bf16 arithmetic, training with masters, and a scaler on two ranks."""

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from shardwise_labs.counting import Meter, Traffic
from shardwise_labs.given import batch, make_model, numel_of
from shardwise_labs.judge import Judge
from shardwise_labs.words import (
    WrongAnswer,
    count_difference,
    difference,
    number_of,
    sent_difference,
    tensor_of,
    times,
)
from shardwise_labs.zero import own_slices, record_gradients

LR, STEPS = 0.001, 16  # Adam's own; a gain of 1.0 moves by 0.001 in a step
TINY = 1e-5  # the weight of an fp16 loss whose gradients are small


def _loss(model: nn.Module, rank: int, step: int, scale: float = 1.0) -> Tensor:
    x, classes = batch(rank, step)
    dtype = next(model.parameters()).dtype
    return functional.cross_entropy(model(x.to(dtype)), classes) * scale


@cache
def _oracle(num_ranks: int) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train in one process with masters; return mean gradients and masters after each step."""
    model = make_model()
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    model.bfloat16()
    optimizer = torch.optim.Adam(masters.values(), lr=LR, foreach=False)
    grads, values = [], []
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            model.zero_grad()
            _loss(model, rank, step).backward()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    sums[name] = sums.get(name, 0) + p.grad.float()
        for name, p in model.named_parameters():
            mean = sums.get(name, torch.zeros(p.shape)) / num_ranks
            masters[name].grad = mean
        optimizer.step()
        grads.append({name: master.grad.clone() for name, master in masters.items()})  # type: ignore[union-attr]
        values.append({name: master.detach().clone() for name, master in masters.items()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
    return grads, values


class _Trained:
    """Training with the reader's class: what each step left on this rank, and bytes of the last."""

    def __init__(self, judge: Judge, steps: int, is_measured: bool) -> None:
        self.model = make_model()
        meter = Meter(*self.model.parameters())
        self.grads: list[Tensor] = []
        self.values: list[tuple[Tensor, Tensor]] = []  # masters and bf16 values
        with meter if is_measured else nullcontext(), Traffic(judge.folder) as traffic:
            self.trainer = judge.call("MixedZero1")(self.model, LR)  # type: ignore[operator]
            for name in ("master", "flat"):
                if not hasattr(self.trainer, name):
                    raise WrongAnswer(f"MixedZero1 sets no `self.{name}`")
            self.first = self._own()
            record_gradients(self.trainer, self.grads)
            for step in range(steps):
                traffic.clear()
                loss = _loss(self.model, judge.rank, step)
                self.trainer.backward(loss)
                del loss
                self.trainer.step()
                self.values.append((self._own(), self._half()))
            self.held = meter.rested() if is_measured else 0
        self.sent = traffic.sent

    def _own(self) -> Tensor:
        with _disable_current_modes():
            return self.trainer.master.detach().clone()  # type: ignore[attr-defined, no-any-return]

    def _half(self) -> Tensor:
        with _disable_current_modes():
            return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@cache
def _without_masters(rank: int, num_ranks: int) -> tuple[nn.Module, list[float], float]:
    """Train in bf16 without masters; return the model, losses, and the share of lost updates.

    Each step has another batch, so the losses are means over all batches, before and after.
    """
    model = make_model().bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, foreach=False)
    losses, lost, total = [_mean_loss(model, num_ranks)], 0, 0
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        for p in model.parameters():
            if p.grad is not None:
                mean = p.grad.float()
                dist.all_reduce(mean)
                p.grad = (mean / num_ranks).bfloat16()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            if p.grad is not None:
                asked = p.grad != 0
                lost += int((asked & (p == old)).sum())
                total += int(asked.sum())
    return model, [*losses, _mean_loss(model, num_ranks)], lost / total


def _mean_loss(model: nn.Module, num_ranks: int) -> float:
    with torch.no_grad():
        each = [_loss(model, rank, step) for rank in range(num_ranks) for step in range(STEPS)]
    return torch.stack(each).float().mean().item()


def _gains(model: nn.Module) -> tuple[int, int]:
    """Return how many gains of norms have left 1.0, and how many there are."""
    gains = [m.weight.detach() for m in model.modules() if isinstance(m, nn.LayerNorm)]
    return sum(int((g != 1).sum()) for g in gains), sum(g.numel() for g in gains)


def _zero_gradients(scale: float) -> tuple[int, bool]:
    """Return how many fp16 gradients of a small loss are zero, and if all are finite."""
    model = make_model(is_plain=True).half()
    _loss(model, 0, 0, TINY * scale).backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return int((grads == 0).sum()), bool(grads.isfinite().all())


def run(judge: Judge) -> None:
    """Train in mixed precision beside bf16 alone, and scale the loss of an fp16 model."""
    trained = _Trained(judge, STEPS, is_measured=True)
    alone, _losses, lost = _without_masters(judge.rank, judge.num_ranks)
    numel = numel_of(trained.model)
    masters = torch.cat(list(own_slices(_oracle(2)[1][-1], False, judge.rank, 2).values()))
    is_right = torch.equal(trained.trainer.master.data, masters)
    judge.row("held between steps", f"{trained.held:>10,}")
    judge.row("held, per parameter", f"{trained.held / numel:>10.3f}")
    judge.row("sent in a step", f"{trained.sent:>10,}")
    judge.row("the bits of one process", f"{'yes' if is_right else 'no':>10}")
    for name, model in (("with masters", trained.model), ("bf16 alone", alone)):
        judge.row(f"gains that moved, {name}", f"{_gains(model)[0]:>10,}")
    judge.row("updates lost, bf16 alone", f"{lost:>10.3f}")
    for scale in (1, 2**14, 2**40):
        zeros, is_finite = _zero_gradients(scale)
        judge.row(
            f"fp16 gradients that are 0, scale 2**{scale.bit_length() - 1}",
            f"{zeros:>10,}" if is_finite else f"{'overflow':>10}",
        )


def check(judge: Judge) -> None:
    """Compare the reader's arithmetic, training and scaler with one process."""
    with judge.judging("ulp"):
        _judge_ulp(judge)
    if not judge.has_met_all():
        return
    with judge.judging("gradient"):
        _judge_training(judge)
    with judge.judging("skip"):
        _judge_unscale(judge)
    with judge.judging("scale"):
        _judge_update(judge)
    if judge.has_met_all():
        with judge.judging("moves"):
            _judge_moves(judge)


def _judge_ulp(judge: Judge) -> None:
    weights = torch.tensor([1.0, 1.5, 1.984375, 2.0, 0.7, 3e-5, 300.0])
    got = tensor_of("half_ulp", judge.call("half_ulp")(weights), (7,))  # type: ignore[operator]
    half = weights.bfloat16()
    above = torch.nextafter(half, torch.full_like(half, torch.inf)).float()
    want = (above - half.float()) / 2
    known = {
        "is a whole step; half of it is where rounding turns back": want * 2,
        "is a quarter of a step": want / 2,
        "is that of fp16, which has 11 significant bits": want / 8,
        "is that of fp32": want / 2**16,
        "is the same share of each weight; steps are powers of two": weights * 2**-8,
        "is the same for all weights; steps grow with the exponent": torch.full((7,), 2.0**-8),
    }
    judge.judge("ulp", difference("half_ulp", got, want, known), good="as torch's next bf16 number")


def _judge_training(judge: Judge) -> None:
    n, rank = judge.num_ranks, judge.rank
    numel = -(-numel_of(make_model()) // n) * n
    with judge.judging("held"):
        _judge_master(judge, numel // n)
    if not judge.has_met_all():
        return
    trained = _Trained(judge, 2, is_measured=True)
    gradient, bits = _problems(judge, trained)
    judge.judge("gradient", gradient, good="means over ranks in fp32")
    judge.judge("bits", bits, good="masters and values as in one process, to the bit")
    with judge.judging("held"):
        held = (4 + 12 // n) * numel
        known = {
            "masters and moments are those of all parameters": 16 * numel,
            "Adam has no moments": 4 * numel + 4 * numel // n,
        }
        problem = count_difference(f"bytes held on rank {rank}", trained.held, held, known)
        memory = trained.trainer.master.untyped_storage().nbytes()
        if memory > 4 * numel // n:
            problem = "the master is a view of all fp32 values, so all of them stay: clone it"
        judge.judge("held", problem, good=f"{held:,} bytes: 2 + 2 + 12 / {n} per parameter")
    with judge.judging("sent"):
        needed = 6 * (n - 1) * numel // n
        known = {"values are sent in fp32": 8 * (n - 1) * numel // n}
        problem = count_difference("bytes sent in a step", trained.sent, needed, known)
        good = f"{needed:,} bytes: gradients in fp32, values in bf16"
        judge.judge("sent", problem, good=good)


def _judge_master(judge: Judge, numel: int) -> None:
    """Look at the master before the first step uses it."""
    trainer: Any = _Trained(judge, 0, is_measured=False).trainer
    what = f"`master` on rank {judge.rank}"
    tensor_of(what, trainer.master, (numel,))
    if trainer.master.dtype != torch.float32:
        raise WrongAnswer(f"{what} is {trainer.master.dtype}, and fp32 is asked for")
    if list(map(id, trainer.optimizer.param_groups[0]["params"])) != [id(trainer.master)]:
        raise WrongAnswer("`self.optimizer` has other parameters than the master")


def _judge_moves(judge: Judge) -> None:
    trained = _Trained(judge, STEPS, is_measured=False)
    moved, gains = _gains(trained.model)
    alone, losses, lost = _without_masters(judge.rank, judge.num_ranks)
    judge.facts |= {
        "moved": f"{moved}",
        "gains": f"{gains}",
        "moved_without": f"{_gains(alone)[0]}",
        "first_loss": f"{losses[0]:.2f}",
        "last_loss": f"{losses[-1]:.2f}",
        "lost": f"{100 * lost:.0f} %",
        **_stepped_alone(judge, trained.trainer),
    }
    said = f"{moved} of {gains} gains of norms have left 1.0, {_gains(alone)[0]} in bf16 alone"
    want = own_slices(_oracle(judge.num_ranks)[1][-1], False, judge.rank, judge.num_ranks)[""]
    problem = difference(f"after step {STEPS} `master`", trained.values[-1][0], want)
    judge.judge("moves", problem or (None if moved else said), good=said)


def _problems(judge: Judge, trained: _Trained) -> tuple[str | None, str | None]:
    """Return the first problem of gradients, or of masters and values."""
    n, rank = judge.num_ranks, judge.rank
    first = {name: p.detach() for name, p in make_model().named_parameters()}
    mine = own_slices(first, False, rank, n)[""]
    known = {
        "is rounded to bf16; take it from the fp32 values": mine.bfloat16().float(),
        **{f"is rank {r}'s slice": own_slices(first, False, r, n)[""] for r in range(n)},
    }
    if trained.trainer.master.grad is not None:  # type: ignore[attr-defined]
        return "after `step` the master still has its gradient: set it to None", None
    what = f"before training `master` on rank {rank}"
    if problem := difference(what, trained.first.float(), mine, known):
        return None, problem
    for step, (grads, values) in enumerate(zip(*_oracle(n), strict=True)):
        if step >= len(trained.values):
            break
        if len(trained.grads) <= step:
            return f"the optimizer made {step} steps in {step + 1}", None
        if problem := _gradient_problem(rank, n, step, trained.grads[step], grads):
            return problem, None
        want = own_slices(values, False, rank, n)[""]
        got, half = trained.values[step]
        problem = difference(f"after step {step + 1} `master` on rank {rank}", got, want)
        if problem and torch.equal(got, got.bfloat16().float()):
            problem += "; every element is a bf16 number: what rounding drops is not kept"
        all_of_it = torch.cat([v.flatten() for v in values.values()]).bfloat16()
        stale = "is as before: gather the masters after the optimizer's step"
        before = torch.cat([p.flatten() for p in first.values()]).bfloat16()
        what = f"after step {step + 1} the bf16 copy of all values on rank {rank}"
        same = got.bfloat16().repeat(n)[: len(half)]
        if torch.allclose(half, same, atol=0.02):
            problem = f"{what} is one slice in every place: has each rank its own slice as master?"
        problem = problem or difference(what, half, all_of_it, {stale: before})
        if problem:
            return None, problem
    return None, None


def _gradient_problem(
    rank: int, n: int, step: int, got: Tensor, grads: dict[str, Tensor]
) -> str | None:
    want = own_slices(grads, False, rank, n)[""]
    what = f"the gradient that rank {rank}'s optimizer gets in step {step + 1}"
    got = tensor_of(what, got.float(), tuple(want.shape))
    known = {
        f"is the sum, the mean was asked for: exactly {times(n)}": want * n,
        "is rounded to bf16 after the sum: keep it in fp32": want.bfloat16().float(),
    }
    if step:
        before = own_slices(_oracle(n)[0][step - 1], False, rank, n)[""]
        if torch.allclose(got, want + before, rtol=0.02, atol=0.02 * float(before.abs().max())):
            return f"{what} still has that of the step before in it: `step` sets it to zero"
    return difference(what, got, want, known)


def _stepped_alone(judge: Judge, trainer: object) -> dict[str, str]:
    """Let rank 1 skip a step that the others make, as a counter-example."""
    master, optimizer = trainer.master, trainer.optimizer  # type: ignore[attr-defined]
    master.grad = None if judge.rank == 1 else torch.ones_like(master)
    before = master.detach().clone()
    optimizer.step()
    moved = torch.tensor([float((master != before).sum()), float(master.numel())])
    dist.all_reduce(moved)
    return {"apart": f"{int(moved[0]):,}", "all": f"{int(moved[1]):,}"}


def _judge_unscale(judge: Judge) -> None:
    rank, size, scales = judge.rank, 1000, set[float]()
    for bad, value in ((None, 0.0), (1, torch.inf), (0, torch.nan), (None, 0.0)):
        scaler = judge.call("Scaler")(1024.0, 3)  # type: ignore[operator]
        grad = torch.arange(1.0, size + 1) * (rank + 1)
        given = grad.clone()
        if bad == rank:
            given[7] = value
        with Traffic(judge.folder) as traffic:
            got = scaler.unscale(given)
        where = f"{value} in the gradient of rank {bad}" if bad is not None else "finite gradients"
        scales.add(scaler.scale)
        # Every rank runs the rest: another one would wait for it.
        if bad is not None and got is not None:
            others = "; only that rank sees it: tell the others" if bad != rank else ""
            judge.judge("skip", f"{where}: rank {rank} does not skip the step{others}")
            return
        if bad is None:
            if got is None:
                judge.judge("skip", f"{where}: rank {rank} skips the step")
                return
            known = {
                "still has the scale in it": grad,
                "is multiplied by the scale, divided was asked for": grad * 1024,
                "is that of another rank in it: only the flag is shared": grad / 1024 * 3,
            }
            got = tensor_of("what unscale returns", got, (size,))
            if problem := difference("what unscale returns", got, grad / 1024, known):
                judge.judge("skip", problem)
                return
        if traffic.sent > 8:
            judge.judge("skip", sent_difference(traffic, 4, "one flag"))
            return
    problem = "unscale changes the scale: that is `update`'s part" if scales != {1024} else None
    judge.judge("skip", problem, good="one rank's overflow skips the step on all; 4 bytes are sent")


def _judge_update(judge: Judge) -> None:
    scaler = judge.call("Scaler")(8.0, 3)  # type: ignore[operator]
    events = [False, False, True, False, False, False, False, False, False, True]
    wants = [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 8.0]
    for index, (skipped, want) in enumerate(zip(events, wants, strict=True)):
        scaler.update(skipped)
        got = number_of("the scale", scaler.scale)
        if got != want:
            before = ["skipped" if each else "good" for each in events[: index + 1]]
            said = f"after {', '.join(before)} the scale is {got:g}, {want:g} expected"
            why = f"it begins at 8, grows after 3 good steps, and {scaler.good_steps} are counted"
            judge.judge("scale", f"{said}: {why}")
            return
    judge.judge("scale", good="halved after a skipped step, doubled after three good ones")
