"""All-gather and reduce-scatter by one coalesced group of the backend's collectives; for NCCL.

Every segment is one even collective, so the backend reads and writes the memory that layers use.
All segments of a unit are one group of collectives. After the group, segments with an owner are
broadcast from it, or reduced to it, one by one.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    ReduceItem,
    collective_errors,
    key_of,
)
from shardwise.comm.shares import sends_without_packing
from shardwise.mesh import Axis
from shardwise.trace import Traffic


def start_all_gather(
    items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
) -> Pending:
    """Gather every segment into place.

    **Cost** (ranks - 1) x the share, padding included; no buffers.
    """
    key = key_of(collective, axis)
    owned = [item for item in items if item.segment.owner is not None and item.segment.numel]
    items = [item for item in items if item.segment.owner is None and item.segment.shard_numel]
    outputs = [item.full for item in items]
    inputs = [item.source for item in items]
    sent = sum(item.source.nbytes for item in (*items, *owned)) * (axis.size - 1)
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, sent)
    if axis.size == 1:
        for item in (*items, *owned):
            if not item.in_place:
                item.full.copy_(item.source)
        return Pending(key, ())
    for item in owned:
        if item.segment.owner == axis.rank and not item.in_place:
            item.full.copy_(item.source)
    with collective_errors(key):
        works = [axis.group.allgather_into_tensor_coalesced(outputs, inputs)] if inputs else []
        works += [_broadcast(item, axis) for item in owned]
    return Pending(key, works, keep=(items, owned))


def _broadcast(item: GatherItem, axis: Axis) -> dist.Work:
    """Start sending a segment from its owner to all."""
    options = dist.BroadcastOptions()
    assert item.segment.owner is not None
    options.rootRank = item.segment.owner
    return axis.group.broadcast([item.full], options)


def start_reduce_scatter(
    items: Sequence[ReduceItem],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    divisor: float,
) -> Pending:
    """Reduce every segment into this rank's ``out``; gradients that fit are sent in place.

    **Cost** sends share x (ranks - 1) in ``out``'s dtype; packs (and casts) gradients that are not
    even, not contiguous or of another dtype into one buffer, in one pass.
    """
    key = key_of(collective, axis)
    owned = [item for item in items if item.segment.owner is not None and item.segment.numel]
    items = [item for item in items if item.segment.owner is None and item.segment.shard_numel]
    if axis.size == 1:
        items, owned = [*items, *owned], []
    outputs = [item.out for item in items]
    inputs = even_inputs(items, axis.size)
    totals = [_addend(item, axis) for item in owned]
    sent = sum(o.nbytes for o in outputs) * (axis.size - 1)
    sent += sum(
        total.nbytes
        for item, total in zip(owned, totals, strict=True)
        if item.segment.owner != axis.rank
    )
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, sent)
    works: list[dist.Work] = []
    if axis.size == 1:
        copies = [
            (output, source)
            for output, source in zip(outputs, inputs, strict=True)
            if output is not source
        ]
        if copies:
            torch._foreach_copy_([output for output, _ in copies], [source for _, source in copies])
    else:
        with collective_errors(key):
            if inputs:
                works.append(axis.group.reduce_scatter_tensor_coalesced(outputs, inputs))
            for item, total in zip(owned, totals, strict=True):
                works.append(_reduce(item, total, axis))

    def finish() -> None:
        means = [*outputs, *(item.out for item in owned if item.segment.owner == axis.rank)]
        if divisor != 1 and means:
            torch._foreach_div_(means, float(divisor))

    return Pending(key, works, finish, (items, owned, inputs, totals))


def start_all_to_all(
    received: tuple[torch.Tensor, Sequence[int]],
    sent: tuple[torch.Tensor, Sequence[int]],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    finish: Callable[[], None],
    keep: object,
) -> Pending:
    """Send each rank its part of ``sent`` and receive a part from each, in rank order."""
    key = key_of(collective, axis)
    output, output_sizes = received
    source, source_sizes = sent
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, source.nbytes)
    works = []
    if axis.size > 1:
        with collective_errors(key):
            works.append(
                axis.group.alltoall_base(
                    output, source, list(output_sizes), list(source_sizes), dist.AllToAllOptions()
                )
            )
    return Pending(key, works, finish, (received, sent, keep))


def _addend(item: ReduceItem, axis: Axis) -> torch.Tensor:
    """Return this rank's addend of a segment with an owner.

    On the owner it is in ``item.out``, which becomes the sum.
    """
    _, part = item.parts[0]
    if len(item.parts) > 1 or part.numel() != item.segment.numel:
        raise AssertionError("a segment with an owner is one parameter")
    if item.segment.owner == axis.rank:
        return item.out.copy_(part)
    return part.to(item.out.dtype)


def _reduce(item: ReduceItem, addend: torch.Tensor, axis: Axis) -> dist.Work:
    """Start summing a segment into its owner's addend."""
    options = dist.ReduceOptions()  # the default operation is a sum
    assert item.segment.owner is not None
    options.rootRank = item.segment.owner
    return axis.group.reduce([addend], options)


def even_inputs(items: Sequence[ReduceItem], num_ranks: int) -> list[torch.Tensor]:
    """Return one even tensor per item: the gradient itself if it fits, else a packed copy."""
    inputs: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for item in items:
        full_numel = item.segment.shard_numel * num_ranks
        casts = any(part.dtype != item.out.dtype for _, part in item.parts)
        if sends_without_packing([part.numel() for _, part in item.parts], full_numel, casts):
            inputs.append(item.parts[0][1])
            continue
        packed = item.out if num_ranks == 1 else item.out.new_empty(full_numel)
        covered = sum(part.numel() for _, part in item.parts)
        if covered < full_numel:
            packed.zero_()
        for offset, part in item.parts:
            targets.append(packed[offset : offset + part.numel()])
            sources.append(part)
        inputs.append(packed)
    if targets:
        torch._foreach_copy_(targets, sources)
    return inputs
