"""The mean loss over the tokens of all ranks, for ranks with different numbers of tokens."""

import torch
from torch import nn

from shardwise.comm.pending import CollectiveId
from shardwise.engine.api import engine_of

_COUNT = CollectiveId("gather", "(tokens)", 0)


def mean_loss(
    model: nn.Module, total: torch.Tensor, num_tokens: int | torch.Tensor
) -> torch.Tensor:
    """Return a loss whose gradients are those of the mean over all ranks' tokens.

    ``total`` is this rank's sum of losses over its valid tokens, and ``num_tokens`` their number,
    which may be 0. With several micro-batches, call it with the ``total`` of each and the number
    in all. A mean of the ranks' means weights a token more on a rank with fewer tokens, which is
    wrong if sequences are padded, packed or cut (context parallelism). Reductions divide gradients
    by the number of data-parallel ranks, so this function multiplies by it. The loss to log is the
    result summed over micro-batches and averaged over these ranks.

    **Cost** one collective of a number over each data-parallel axis; all ranks call it.
    If no rank has a token, the loss is 0.
    """
    engine = engine_of(model)
    comm = engine.comm
    count = torch.as_tensor(num_tokens, dtype=torch.float64, device=comm.device).reshape(1)
    for axis in comm.axes.all:
        count = comm.sum_in_rank_order(count, axis, _COUNT)
    divisor = engine.units[0].sums.divisor or comm.axes.num_ranks
    weight = (divisor / count.clamp_min(1)).to(torch.promote_types(total.dtype, torch.float32))
    return total * weight.squeeze()
