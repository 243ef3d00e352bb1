"""The check of lab 0: averages of small tensors, training on two ranks, and stages beside it."""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise_labs.counting import Traffic
from shardwise_labs.given import LR, OneProcess, make_model, numel_of, one_process
from shardwise_labs.judge import Judge
from shardwise_labs.words import (
    WrongAnswer,
    count_difference,
    difference,
    number_of,
    sent_difference,
    times,
)
from shardwise_labs.zero import STAGES, Trained, measured_stages, train

ZEROS = STAGES[1:]


def _measured(judge: Judge) -> Trained:
    trainer: Any = judge.call("Replicas")
    build = lambda model: trainer(model, LR)  # noqa: E731
    return train(build, judge.rank, judge.folder, steps=2, is_plain=True)


def run(judge: Judge) -> None:
    """Train a model that fits, replicated by the reader's code and at each stage of ZeRO."""
    own = _measured(judge)
    whole = 4 * numel_of(own.model)
    rows = {"replicated": own} | {s: measured_stages(judge.rank, judge.solutions)[s] for s in ZEROS}
    passes: Any = judge.call("passes")
    heads = ("calls", "bytes sent", "passes", "yours", "bytes held")
    judge.row("", "{:>6} {:>12} {:>8} {:>6} {:>12}".format(*heads))
    for stage, each in rows.items():
        share = each.sent / (whole * (judge.num_ranks - 1) / judge.num_ranks)
        judge.row(
            stage,
            f"{len(each.calls):>6} {each.sent:>12,} {share:>8.2f} {passes(stage, 1):>6} "
            f"{each.held:>12,}",
        )


def check(judge: Judge) -> None:
    """Compare averages with known tensors, and training with one process."""
    with judge.judging("fits"):
        _judge_fits(judge)
    for target, function in (("each", "average_each"), ("flat", "average_flat")):
        with judge.judging(target):
            _judge_average(judge, target, function)
    with judge.judging("start"):
        _judge_start(judge)
    with judge.judging("passes"):
        _judge_passes(judge)
    if judge.has_met_all():
        with judge.judging("bits"):
            _judge_training(judge)


def _judge_fits(judge: Judge) -> None:
    most: Any = judge.call("most_parameters")
    for device, activations in ((40_000_000_000, 8_000_000_000), (80_000_000_000, 0)):
        got, free = number_of("most_parameters", most(device, activations)), device - activations
        known = {
            "activations need memory, too": device / 16,
            "gradients are missing": free / 12,
            "Adam's two moments are missing": free / 8,
            "only parameters are counted": free / 4,
            "these are bytes: how many parameters?": float(free),
            "activations are added where they are missing": (device + activations) / 16,
        }
        what = f"parameters in {device / 1e9:g} GB with {activations / 1e9:g} GB of activations"
        if problem := count_difference(what, got, free // 16, known):
            judge.judge("fits", problem)
            return
    judge.judge("fits", good="what is left, by 16 bytes")


def _parameters(rank: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(40 + rank)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in ((6, 4), (5,), (3, 2), (7,))]
    for index, p in enumerate(parameters):
        if index != 1:  # that one has no gradient
            p.grad = torch.randn(p.shape, generator=generator)
    return parameters


def _flat(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def _judge_average(judge: Judge, target: str, name: str) -> None:
    n, rank, average = judge.num_ranks, judge.rank, judge.call(name)
    parameters = _parameters(rank)
    with Traffic(judge.folder) as traffic:
        average(parameters)  # type: ignore[operator]
    own = [_flat(_parameters(r)) for r in range(n)]
    want = sum(own) / n
    if parameters[1].grad is not None:
        raise WrongAnswer("a parameter without a gradient has one now: None stays None")
    got = _flat(parameters)
    if got.shape != want.shape:  # type: ignore[union-attr]
        raise WrongAnswer("some gradients are gone")
    known = {
        f"is the sum, the mean was asked for: exactly {times(n)}": want * n,
        "is as it was, this rank's alone": own[rank],
        "is divided twice by the number of ranks": want / n,
        "is this rank's alone, divided": own[rank] / n,
        "has its parts in other places": torch.cat([want[30:], want[24:30], want[:24]]),  # type: ignore[index]
    }
    problem = difference(f"{name}: the gradient on rank {rank}", got, want, known)  # type: ignore[arg-type]
    calls = 3 if target == "each" else 1
    if len(traffic.calls) != calls and traffic.calls:
        problem = problem or f"{len(traffic.calls)} messages, {calls} expected"
    needed = (n - 1) * 2 * got.nbytes // n
    problem = problem or sent_difference(traffic, needed, "all-reduce")
    judge.judge(target, problem, good=f"means over ranks in {calls} message{'s' * (calls > 1)}")


def _judge_start(judge: Judge) -> None:
    torch.manual_seed(50 + judge.rank)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    trainer = judge.call("Replicas")(model, LR)  # type: ignore[operator]
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    wants = []
    for rank in range(judge.num_ranks):
        torch.manual_seed(50 + rank)
        drawn = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
        wants.append(torch.cat([p.detach().flatten() for p in drawn.parameters()]))
    known = {
        f"is what rank {judge.rank} drew: ranks begin apart and stay apart": wants[judge.rank],
        "is the sum of all ranks' values": sum(wants),
        "is the mean of all ranks' values; rank 0's are asked for": sum(wants) / judge.num_ranks,
        "is rank 1's": wants[1],
    }
    problem = difference(f"the model on rank {judge.rank}", got, wants[0], known)  # type: ignore[arg-type]
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    missing = len({id(p) for p in model.parameters()} - held)
    problem = problem or (f"the optimizer lacks {missing} of 4 parameters" if missing else None)
    judge.judge("start", problem, good="all ranks begin with rank 0's values")


def _judge_passes(judge: Judge) -> None:
    passes: Any = judge.call("passes")
    whole = 4 * numel_of(make_model(is_plain=True)) * (judge.num_ranks - 1) / judge.num_ranks
    for count in (1, 2):
        runs = measured_stages(judge.rank, judge.solutions, count)
        for stage in STAGES:
            want = 2 if stage == "replicated" else round(runs[stage].sent / whole)
            got = number_of(f"passes({stage!r}, {count})", passes(stage, count))
            if got != want:
                sent = f"{want * whole:,.0f} bytes were sent"
                judge.judge(
                    "passes", f"passes({stage!r}, {count}) is {got:g}, {want} expected: {sent}"
                )
                return
    judge.judge("passes", good="as counted in runs with one and with two micro-batches")


@cache
def _oracle(num_ranks: int, steps: int) -> OneProcess:
    return one_process(num_ranks, steps)


def _judge_training(judge: Judge) -> None:
    trainer: Any = judge.call("Replicas")
    build = lambda model: trainer(model, LR)  # noqa: E731
    n, measured = judge.num_ranks, _measured(judge)
    zeros = measured_stages(judge.rank, judge.solutions)
    judge.facts = {
        "sent": f"{measured.sent:,}",
        "held": f"{measured.held:,}",
        "zero1_sent": f"{zeros['zero1'].sent:,}",
        "zero1_saved": f"{measured.held - zeros['zero1'].held:,}",
        "zero3_sent": f"{zeros['zero3'].sent:,}",
        "zero3_calls": f"{len(zeros['zero3'].calls)}",
    }
    problem = None
    for steps in (1, 3):
        trained = train(build, judge.rank, judge.folder, steps, is_measured=False)
        got = torch.cat([value.flatten() for value in trained.values.values()])
        want = torch.cat([value.flatten() for value in _oracle(n, steps).values[-1].values()])
        what = f"after step {steps} the parameters on rank {judge.rank}"
        problem = problem or difference(what, got, want)
    judge.judge("bits", problem, good="34,763 parameters as in one process, to the bit")
    with judge.judging("sent"):
        whole = 4 * numel_of(measured.model)
        needed = 2 * (n - 1) * whole // n
        problem = count_difference("bytes sent in a step", measured.sent, needed)
        judge.judge("sent", problem, good=f"{needed:,} bytes in {len(measured.calls)} message")
