"""The check of lab 3: the functions on small tensors, then three steps of training on ranks."""

import torch
from torch import nn

from shardwise_labs.counting import Traffic
from shardwise_labs.given import LR
from shardwise_labs.judge import Judge
from shardwise_labs.words import (
    count_difference,
    difference,
    number_of,
    sent_difference,
    tensor_of,
    times,
)
from shardwise_labs.zero import (
    Compared,
    Trained,
    Trainer,
    compare,
    judge_bits,
    padded_numel,
    show,
    train,
    update_after_sum,
)

SLICE = 1024  # elements of the small tensors' slices


def run(judge: Judge) -> None:
    """Train 34,763 parameters and show what a rank holds and sends."""
    trained, compared = _trained(judge)
    show(judge, trained, padded_numel(False, judge.num_ranks), trained.step_peak, compared)


def check(judge: Judge) -> None:
    """Compare functions with known tensors, and training with one process."""
    with judge.judging("pad"):
        _judge_pad(judge)
    with judge.judging("mean"):
        judge_mean_slice(judge)
    with judge.judging("gather"):
        judge_gather(judge)
    if judge.has_met_all():
        with judge.judging("gradient"):
            _judge_training(judge)


def _judge_pad(judge: Judge) -> None:
    padded = judge.call("padded")
    for numel, ranks, want in ((10, 4, 12), (12, 4, 12), (1, 3, 3), (34763, 2, 34764)):
        got = number_of("padded(...)", padded(numel, ranks))  # type: ignore[operator]
        known = {
            "rounded down: the last elements have no owner": numel // ranks * ranks,
            "this is one slice, not all of them": want // ranks,
            "a multiple stays as it is": numel + ranks,
            f"no multiple of {ranks}, so the slices differ in size": numel,
        }
        why = next((f": {words}" for words, value in known.items() if value == got != want), "")
        if got != want:
            judge.judge("pad", f"padded({numel}, {ranks}) is {got:g}, {want} expected{why}")
            return
    judge.judge("pad", good="the smallest multiple")


def judge_mean_slice(judge: Judge) -> None:
    """Give `mean_slice` tensors that differ by rank, and count its bytes."""
    n, rank = judge.num_ranks, judge.rank
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(n * SLICE, generator=generator) for _ in range(n)]
    total = grads[0].clone()
    for grad in grads[1:]:
        total += grad
    want = total.chunk(n)[rank] / n
    given = grads[rank].clone()
    with Traffic(judge.folder) as traffic:
        got = judge.call("mean_slice")(given)  # type: ignore[operator]
    mean = "the mean was asked for"
    known = {
        f"is the sum, {mean}: exactly {times(n)}": want * n,
        "is divided twice by the number of ranks": want / n,
        f"is the slice of this rank's own values, {mean} over ranks": grads[rank].chunk(n)[rank],
        "is divided before the sum, which rounds otherwise; divide the sum": torch.stack(
            [grad.chunk(n)[rank] / n for grad in grads]
        ).sum(0),
        **{f"is rank {r}'s slice": total.chunk(n)[r] / n for r in range(n) if r != rank},
    }
    got = tensor_of(f"mean_slice of {n * SLICE:,} elements on {n} ranks", got, (SLICE,))
    problem = difference(f"mean_slice on rank {rank}", got, want, known)
    problem = problem or sent_difference(traffic, (n - 1) * 4 * SLICE, "reduce-scatter")
    judge.judge(
        "mean", problem, good=f"{traffic.sent:,} bytes sent, (N - 1) / N of {given.nbytes:,}"
    )


def judge_gather(judge: Judge) -> None:
    """Let `gather_slices` fill a tensor, and count its bytes."""
    n, rank = judge.num_ranks, judge.rank
    shards = [torch.arange(SLICE) * 1.0 + SLICE * r + 1 for r in range(n)]
    values = torch.zeros(n * SLICE)
    with Traffic(judge.folder) as traffic:
        judge.call("gather_slices")(values, shards[rank].clone())  # type: ignore[operator]
    alone = torch.zeros(n * SLICE)
    alone[rank * SLICE : (rank + 1) * SLICE] = shards[rank]
    known = {
        "is as it was: the slices went to other memory": torch.zeros(n * SLICE),
        "has this rank's slice alone: nothing came from the others": alone,
        "has this rank's slice in every place": shards[rank].repeat(n),
        "has the slices in another order than that of ranks": torch.cat(shards[::-1]),
    }
    problem = difference(f"`values` on rank {rank}", values, torch.cat(shards), known)
    problem = problem or sent_difference(traffic, (n - 1) * 4 * SLICE, "all-gather")
    judge.judge(
        "gather", problem, good=f"{traffic.sent:,} bytes sent, one slice to each other rank"
    )


def _trained(judge: Judge) -> tuple[Trained, Compared]:
    zero1 = judge.call("Zero1")

    def build(model: nn.Module) -> Trainer:
        return zero1(model, LR)  # type: ignore[operator]

    compared = compare(build, judge.rank, judge.num_ranks, judge.folder, by_unit=False)
    return train(build, judge.rank, judge.folder, steps=2), compared


def _judge_training(judge: Judge) -> None:
    n = judge.num_ranks
    trained, compared = _trained(judge)
    whole = 4 * padded_numel(False, n)
    piece = whole // n
    judge.facts = {
        "sent": f"{trained.sent:,}",
        "ddp_sent": f"{2 * (n - 1) * piece:,}",
        "grads": f"{whole:,}",
        "sum_update": update_after_sum(n),
    }
    judge_bits(judge, compared)
    held = 2 * whole + 2 * piece
    known = {
        "Adam's moments are those of all parameters": 4 * whole,
        "the shard still has its gradient: set it to None": held + piece,
        "Adam has no moments": 2 * whole,
    }
    with judge.judging("held"):
        what = f"bytes held on rank {judge.rank} between steps"
        judge.judge(
            "held",
            _shard_problem(trained, judge.rank, n),
            count_difference(what, trained.at_rest, held, known),
            good=f"{held:,} bytes: P + P + 2 P / {n}, where P is {whole:,}",
        )
    with judge.judging("sent"):
        problem = count_difference("bytes sent in a step", trained.sent, 2 * (n - 1) * piece)
        judge.judge("sent", problem, good=f"{trained.sent:,} bytes, as DDP's all-reduce")
    with judge.judging("peak"):
        peak = held + 3 * piece
        extra = "a whole copy of the gradients or parameters is alive in the step"
        what, got = "bytes at the peak", trained.step_peak
        problem = count_difference(what, got, peak, {extra: peak + whole}, slack=0.03)
        good = f"{peak:,} bytes: held, the mean's slice, and two more in Adam"
        judge.judge("peak", problem, good=good)


def _shard_problem(trained: Trained, rank: int, num_ranks: int) -> str | None:
    try:
        values, shard = trained.trainer.flat.values, trained.trainer.shard  # type: ignore[attr-defined]
    except AttributeError:
        return "Zero1 has no `flat` or no `shard` any more"
    size = values.numel() // num_ranks
    if shard.numel() != size:
        return f"rank {rank}'s shard holds {shard.numel():,} elements, {size:,} expected"
    if shard.untyped_storage().data_ptr() != values.untyped_storage().data_ptr():
        return "the shard has memory of its own, but it can be a view of the values"
    if shard.storage_offset() != rank * size:
        at = shard.storage_offset()
        return (
            f"rank {rank}'s shard begins at element {at:,} of the values, {rank * size:,} expected"
        )
    return None
