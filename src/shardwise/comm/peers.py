"""Slices exchanged with a few ranks of an axis, and no others: stages that share a parameter."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId, meeting_of, meets
from shardwise.mesh import Axis

_TAG = 9  # gloo's, of messages that a schedule's own (0) must not be taken for


def exchange_with(
    peers: Sequence[int], mine: torch.Tensor, axis: Axis, comm: Comm, name: str
) -> dict[int, torch.Tensor]:
    """Return each peer's tensor, of the shape of ``mine``, by its rank along ``axis``.

    Each of them calls it with the others as peers.

    **Cost** sends ``mine`` to each peer.
    """
    here = mine.to(comm.device).contiguous()  # what lives on the host is sent from the device
    received = {peer: torch.empty_like(here) for peer in peers}
    comm.traffic.add(f"{axis.name}.tied", name, here.nbytes * len(received))
    if not here.numel() or not received:
        return {peer: tensor.to(mine.device) for peer, tensor in received.items()}
    site = CollectiveId("exchange", name, 0)
    with meets(meeting_of(site, axis)):
        _swap(here, received, axis.group)
    return {peer: tensor.to(mine.device) for peer, tensor in received.items()}


def _swap(here: torch.Tensor, received: dict[int, torch.Tensor], group: dist.ProcessGroup) -> None:
    messages = []
    for peer, tensor in received.items():
        other = dist.get_global_rank(group, peer)
        messages.append(dist.P2POp(dist.irecv, tensor, other, group, _TAG))
        messages.append(dist.P2POp(dist.isend, here, other, group, _TAG))
    for work in dist.batch_isend_irecv(messages):
        work.wait()
