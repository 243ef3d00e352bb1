"""The check of lab 2: collectives on three ranks, their sums, bytes and messages."""

import torch
from torch import Tensor

from shardwise_labs.counting import Traffic
from shardwise_labs.given import make_model
from shardwise_labs.judge import Judge
from shardwise_labs.words import (
    WrongAnswer,
    count_difference,
    difference,
    number_of,
    tensor_of,
    times,
)

SLICE = 1024
MESSAGES = ("isend", "send")


def _values(judge: Judge) -> list[Tensor]:
    """Return each rank's values: whole numbers, so that every order of adding is exact."""
    generator = torch.Generator().manual_seed(2)
    size = judge.num_ranks * SLICE
    return [
        torch.randint(-999, 999, (size,), generator=generator).float()
        for _ in range(judge.num_ranks)
    ]


def run(judge: Judge) -> None:
    """Call each collective, and show bytes and messages."""
    values = _values(judge)[judge.rank]
    model = [p.detach() for p in make_model().parameters()]
    numel = sum(p.numel() for p in model)
    model.append(torch.zeros(-numel % judge.num_ranks))
    judge.row("", f"{'bytes sent':>10} {'messages':>10}")
    for name, given in (
        ("reduce_scatter", values),
        ("all_gather", values[:SLICE]),
        ("all_reduce", values),
        ("all_reduce_many", model),
    ):
        with Traffic(judge.folder) as traffic:
            judge.call(name)(given)  # type: ignore[operator]
        judge.row(name, f"{traffic.sent:>10,} {len(traffic.named(*MESSAGES)):>10,}")


def check(judge: Judge) -> None:
    """Compare each function with known sums, and count its bytes."""
    values = _values(judge)
    total = torch.stack(values).sum(0)
    for target, follow in (
        ("exchange", _judge_exchange),
        ("scatter", _judge_reduce_scatter),
        ("gather", _judge_all_gather),
        ("reduce", _judge_all_reduce),
    ):
        with judge.judging(target):
            follow(judge, values, total)
        if not judge.has_met_all():
            return
    with judge.judging("seconds"):
        _judge_seconds(judge)
    _tell_facts(judge, values)


def _sent(traffic: Traffic, needed: int, known: dict[str, float] | None = None) -> str | None:
    others = [call for call in traffic.calls if call.name not in MESSAGES]
    if others:
        name = others[0].name.replace("_", "-")
        return f"line {others[0].line} calls {name}: this lab builds it from isend and recv"
    return count_difference("bytes sent", traffic.sent, needed, known)


def _judge_exchange(judge: Judge, values: list[Tensor], _: Tensor) -> None:
    n, rank = judge.num_ranks, judge.rank
    given = values[rank].clone()
    with Traffic(judge.folder) as traffic:
        got = judge.call("exchange")(given)  # type: ignore[operator]
    known = {"is what this rank sent": values[rank]}
    got = tensor_of("what exchange returns", got, tuple(given.shape))
    problem = difference(f"what exchange returns on rank {rank}", got, values[rank - 1], known)
    if not torch.equal(given, values[rank]):
        problem = "exchange changed the tensor that it sends: receive into another one"
    twice = {"it was sent twice": 2.0 * given.nbytes}
    problem = problem or _sent(traffic, given.nbytes, twice)
    judge.judge("exchange", problem, good=f"rank {(rank - 1) % n}'s tensor, on rank {rank}")


def _judge_reduce_scatter(judge: Judge, values: list[Tensor], total: Tensor) -> None:
    n, rank = judge.num_ranks, judge.rank
    with Traffic(judge.folder) as traffic:
        got = judge.call("reduce_scatter")(values[rank].clone())  # type: ignore[operator]
    want = total.chunk(n)[rank]
    known = {
        "is the mean, the sum was asked for": want / n,
        **{
            f"is one rank's own slice, of rank {r}: add in each step": v.chunk(n)[rank]
            for r, v in enumerate(values)
        },
        **{f"is the sum of slice {r}": total.chunk(n)[r] for r in range(n) if r != rank},
        "is a sum in which this rank's numbers are added twice": want + values[rank].chunk(n)[rank],
    }
    got = tensor_of("what reduce_scatter returns", got, (SLICE,))
    problem = difference(f"what reduce_scatter returns on rank {rank}", got, want, known)
    needed = (n - 1) * 4 * SLICE
    wrong = {
        "all slices go around, one is enough": 1.0 * n * needed,
        "one step too many": needed + 4.0 * SLICE,
    }
    problem = problem or _sent(traffic, needed, wrong)
    judge.judge("scatter", problem, good=f"{needed:,} bytes, (N - 1) / N of {4 * n * SLICE:,}")


def _judge_all_gather(judge: Judge, values: list[Tensor], _: Tensor) -> None:
    n, rank = judge.num_ranks, judge.rank
    mine = [v[:SLICE] for v in values]
    with Traffic(judge.folder) as traffic:
        got = judge.call("all_gather")(mine[rank].clone())  # type: ignore[operator]
    want = torch.cat(mine)
    got = tensor_of("what all_gather returns", got, (n * SLICE,))
    problem = None
    for r, (piece, right) in enumerate(zip(got.chunk(n), mine, strict=True)):
        known = {f"is what rank {s} has": mine[s] for s in range(n) if s != r}
        what = f"on rank {rank} the place of slice {r}"
        problem = problem or difference(what, piece, right, known)
    assert problem or torch.equal(got, want)
    problem = problem or _sent(traffic, (n - 1) * 4 * SLICE)
    judge.judge("gather", problem, good=f"{(n - 1) * 4 * SLICE:,} bytes, one slice in each step")


def _judge_all_reduce(judge: Judge, values: list[Tensor], total: Tensor) -> None:
    n, rank = judge.num_ranks, judge.rank
    with Traffic(judge.folder) as traffic:
        got = judge.call("all_reduce")(values[rank].clone())  # type: ignore[operator]
    known = {
        "is the mean, the sum was asked for": total / n,
        f"is the sum {times(n)}": total * n,
        "has slices of single ranks: nothing was added": torch.cat(
            [v.chunk(n)[r] for r, v in enumerate(values)]
        ),
    }
    got = tensor_of("what all_reduce returns", got, (n * SLICE,))
    problem = difference(f"what all_reduce returns on rank {rank}", got, total, known)
    needed = 2 * (n - 1) * 4 * SLICE
    wrong = {"everything goes to everyone": (n - 1) * 4.0 * n * SLICE}
    problem = problem or _sent(traffic, needed, wrong)
    judge.judge("reduce", problem, good=f"{needed:,} bytes, 2 (N - 1) / N of {4 * n * SLICE:,}")


def _judge_seconds(judge: Judge) -> None:
    got = number_of("seconds(...)", judge.call("seconds")(28e9, 8, 25e9))  # type: ignore[operator]
    known = {
        "a rank sends 2 (N - 1) / N of the bytes, not all of them": 28 / 25,
        "this is one pass: an all-reduce is two": 28 / 25 * 7 / 8,
        "this is everything to everyone": 28 / 25 * 7,
        "N - 1 slices, each of 1 / N of the bytes": 28 / 25 * 14,
        "a rank keeps one slice: (N - 1) / N in each pass": 28 / 25 * 2,
        "bytes divided by bytes per second are seconds": 25 / 28 * 14 / 8,
    }
    if abs(got - 1.96) > 1e-6:
        words = next((f": {w}" for w, v in known.items() if abs(got - v) < 1e-6), "")
        raise WrongAnswer(f"seconds(28e9, 8, 25e9) is {got:.4g}, 1.96 expected{words}")
    judge.judge("seconds", good="1.96 s for 28 GB on 8 ranks at 25 GB/s")


def _tell_facts(judge: Judge, values: list[Tensor]) -> None:
    n, rank = judge.num_ranks, judge.rank
    with Traffic(judge.folder) as traffic:
        judge.call("all_reduce")(values[rank].clone())  # type: ignore[operator]
    generator = torch.Generator().manual_seed(3)
    uneven = [torch.randn(n * SLICE, generator=generator) for _ in range(n)]
    got = judge.call("all_reduce")(uneven[rank].clone())  # type: ignore[operator]
    ordered = uneven[0].clone()
    for each in uneven[1:]:
        ordered += each
    whole = values[rank].nbytes
    judge.facts = {
        "sent": f"{traffic.sent:,}",
        "whole": f"{whole:,}",
        "other_bits": f"{int((got != ordered).sum()):,}",
        "numel": f"{n * SLICE:,}",
        "of_six": f"{2 * 5 * whole // 6:,}",
    }
