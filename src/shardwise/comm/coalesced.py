"""All-gather and reduce-scatter by one coalesced group of the backend's collectives; for NCCL.

Every segment is an even collective by itself, so the backend reads and writes the very memory
that the layers use; all segments of a unit go out as one group.
"""

from collections.abc import Sequence

import torch

from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    ReduceItem,
    collective_errors,
    meeting_of,
)
from shardwise.comm.shares import goes_as_it_lies
from shardwise.mesh import Axis
from shardwise.trace import Traffic


def start_all_gather(
    items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
) -> Pending:
    """Gather every segment into place.

    **Cost** (ranks - 1) x the share, padding included; no buffers.
    """
    meeting = meeting_of(collective, axis)
    items = [item for item in items if item.segment.shard_numel]
    outputs = [item.full for item in items]
    inputs = [item.source for item in items]
    sent = sum(i.nbytes for i in inputs) * (axis.size - 1)
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, sent)
    if axis.size == 1:
        for item, output, source in zip(items, outputs, inputs, strict=True):
            if not item.in_place:
                output.copy_(source)
        return Pending(meeting, ())
    with collective_errors(meeting):
        works = [axis.group.allgather_into_tensor_coalesced(outputs, inputs)] if inputs else []
    return Pending(meeting, works, keep=items)


def start_reduce_scatter(
    items: Sequence[ReduceItem],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    divisor: float,
) -> Pending:
    """Reduce every segment into this rank's ``out``; gradients that fit are sent as they lie.

    **Cost** sends share x (ranks - 1) in ``out``'s dtype; packs (and casts) what is not even, not
    contiguous or of another dtype into one buffer, in one pass.
    """
    meeting = meeting_of(collective, axis)
    outputs = [item.out for item in items if item.segment.shard_numel]
    inputs = _inputs([item for item in items if item.segment.shard_numel], axis.size)
    sent = sum(o.nbytes for o in outputs) * (axis.size - 1)
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, sent)
    if axis.size == 1:
        works = []
        pairs = [(o, i) for o, i in zip(outputs, inputs, strict=True) if o is not i]
        if pairs:
            torch._foreach_copy_([o for o, _ in pairs], [i for _, i in pairs])
    else:
        with collective_errors(meeting):
            works = [axis.group.reduce_scatter_tensor_coalesced(outputs, inputs)] if inputs else []

    def finish() -> None:
        if divisor != 1 and outputs:
            torch._foreach_div_(outputs, float(divisor))

    return Pending(meeting, works, finish, (items, inputs))


def _inputs(items: Sequence[ReduceItem], num_ranks: int) -> list[torch.Tensor]:
    """Return one even tensor per item: the gradient itself where it fits, else a packed copy."""
    inputs: list[torch.Tensor] = []
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for item in items:
        full_numel = item.segment.shard_numel * num_ranks
        casts = any(part.dtype != item.out.dtype for _, part in item.parts)
        if goes_as_it_lies([part.numel() for _, part in item.parts], full_numel, casts):
            inputs.append(item.parts[0][1])
            continue
        packed = item.out if num_ranks == 1 else item.out.new_empty(full_numel)
        covered = sum(part.numel() for _, part in item.parts)
        if covered < full_numel:
            packed.zero_()
        for offset, part in item.parts:
            places.append(packed[offset : offset + part.numel()])
            sources.append(part)
        inputs.append(packed)
    if places:
        torch._foreach_copy_(places, sources)
    return inputs
