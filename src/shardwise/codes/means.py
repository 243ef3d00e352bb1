"""The mean of a flat tensor over an axis, encoded in both directions.

Each rank encodes its addend once and sends every other rank the bytes of that rank's share. The
share's mean is encoded once more and sent to all. Every rank decodes the same bytes, also those
that it has sent, so all have the same bits. Note [Encoded once] in `codes.reduce` has the first
half.
"""

import torch

from shardwise.codes.reduce import decode, encode
from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId, GatherItem, ReduceItem
from shardwise.layout.segments import even_segment
from shardwise.layout.wire import SCALE_BYTES, share_numel
from shardwise.mesh import Axis
from shardwise.precisions import Coding


def coded_mean(
    comm: Comm, values: torch.Tensor, axis: Axis, collective: CollectiveId, coding: Coding
) -> torch.Tensor:
    """Return the mean of a flat float32 tensor over ``axis``, decoded; the same on all ranks.

    **Cost** sends 2 x (ranks - 1) x the bytes of a share, which is padded to whole blocks.
    """
    num_ranks = axis.size
    share = share_numel(values.numel(), num_ranks, coding.block)
    addend = values.new_zeros(share * num_ranks)
    addend[: values.numel()].copy_(values)
    mean = values.new_empty(share)
    item = ReduceItem(even_segment(addend.numel(), num_ranks), ((0, addend),), mean, (coding,))
    comm.start_reduce_scatter([item], axis, collective, num_ranks).wait()
    num_blocks = share // coding.block
    size = num_blocks * (coding.code_bytes(coding.block) + SCALE_BYTES)
    sent = torch.empty(size * num_ranks, dtype=torch.uint8, device=values.device)
    mine = sent[axis.rank * size :][:size]
    codes, scales = _split(mine, num_blocks)
    encode(mean.view(num_blocks, -1), codes, scales, coding.format)
    gathered = GatherItem(even_segment(sent.numel(), num_ranks), mine, sent, True)
    comm.start_all_gather([gathered], axis, collective).wait()
    for rank in range(num_ranks):
        codes, scales = _split(sent[rank * size :][:size], num_blocks)
        out = addend[rank * share :][:share].view(num_blocks, -1)
        decode(codes, scales, out, coding.format)
    return addend[: values.numel()]


def _split(box: torch.Tensor, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a message's codes and scales; the scales come first, so are aligned."""
    scales, codes = box.split([num_blocks * SCALE_BYTES, box.numel() - num_blocks * SCALE_BYTES])
    return codes.view(num_blocks, -1), scales.view(torch.float32).view(num_blocks, 1)
