"""The oracle: what any number of ranks must compute, as a plain loop in one process.

It takes every rank's turn one after the other with one model, sums the gradients in rank order,
divides once by the number of ranks, and steps a plain optimizer on plain parameters. Nothing is
sharded and nothing is sent, so there is little to get wrong.
"""

from typing import NamedTuple

import torch
from torch import Tensor

Grads = dict[str, Tensor | None]


class Truth(NamedTuple):
    """The losses of every rank in every step, and the state after the last step."""

    losses: list[list[float]]  # losses[step][rank]: mean over the rank's micro-batches
    parameters: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    grads: list[Grads]  # grads[step]: what the optimizer saw, after clipping


def plain_loop(
    model,
    steps,  # steps[step][micro_batch][rank] is one batch
    loss_fn,  # loss_fn(model, batch)
    optimizer_factory,
    clip=None,
    reduce_each_micro_batch=False,
    num_replicas=1,
):
    """Train `model` in place as `len(steps[s][m])` data-parallel ranks would.

    Each rank's loss is divided by the number of micro-batches of its step. Gradients of several
    micro-batches are summed on each rank and then over ranks (stages 0 and 1), or with
    `reduce_each_micro_batch` over ranks first (stages 2 and 3).
    With `num_replicas`, ranks r*S .. r*S + S-1 are the shard group of replica r: gradients are
    summed inside each group, those of all micro-batches, then over replicas (hybrid sharding).

    A parameter has no gradient in a step only if no rank has one; a rank without counts as zero.
    Buffers that the forward changes, and dropout, are shared by all ranks here: leave them out.
    """
    optimizer = optimizer_factory(list(model.parameters()))
    losses, grads = [], []
    for micro_batches in steps:
        num_ranks = len(micro_batches[0])
        step_losses = [0.0] * num_ranks

        def local_grads(rank, batches, scale, sums):
            for parameter in model.parameters():
                parameter.grad = None
            for batch in batches:
                loss = loss_fn(model, batch) / scale
                loss.backward()
                sums[rank] += loss.item()
            return {name: p.grad for name, p in model.named_parameters()}

        windows = [[m] for m in micro_batches] if reduce_each_micro_batch else [micro_batches]
        total = {}
        kept = [{}] * num_replicas
        for window in windows:
            by_rank = [
                local_grads(rank, [m[rank] for m in window], len(micro_batches), step_losses)
                for rank in range(num_ranks)
            ]
            if num_replicas == 1:
                total = add(total, average(by_rank))
            else:
                kept = [add(*each) for each in zip(kept, sums(by_rank, num_replicas), strict=True)]
                total = average(kept, len(by_rank))

        for name, parameter in model.named_parameters():
            parameter.grad = total[name]
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        grads.append({name: copy(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        losses.append(step_losses)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Truth(losses, parameters, optimizer, grads)


def sums(by_rank, num_groups=1):
    """Sum gradients in rank order, shard group by shard group."""
    size = len(by_rank) // num_groups
    assert size * num_groups == len(by_rank), "every replica has as many ranks"
    found = [{}] * num_groups
    for rank, grads in enumerate(by_rank):
        found[rank // size] = add(found[rank // size], grads)
    return found


def average(addends, num_ranks=None):
    """Sum in order, and divide once: by the number of ranks, that of the addends as a rule."""
    (total,) = sums(addends)
    divisor = num_ranks or len(addends)
    return {name: None if grad is None else grad / divisor for name, grad in total.items()}


def add(total, grads):
    """Add what is there; no zeros come in, so that one gradient alone keeps its bits."""
    result = {}
    for name, grad in grads.items():
        before = total.get(name)
        result[name] = grad if before is None else before if grad is None else before + grad
    return result


def copy(grad):
    return None if grad is None else grad.detach().clone()


def assert_same_bits(actual, expected):
    """Compare two state dicts name by name, bit by bit, and say by how much they differ."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].shape == tensor.shape, f"{name}: shapes differ"
        if actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor):
            continue  # what follows says by how much they differ, and takes far longer
        try:
            torch.testing.assert_close(actual[name], tensor, rtol=0, atol=0, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
