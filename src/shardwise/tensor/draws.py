"""Random draws for parameters, equal on all ranks whatever their seeds.

Note [One draw for all ranks]
If each rank drew from its generator, a replicated parameter, or one with replicas, would differ
between ranks. So every rank draws the whole tensor from the state of rank 0's generator and keeps
its slice. The values depend neither on the number of ranks nor on their seeds. A rank whose
generator had another state restores that state.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwise.comm.pending import CollectiveId
from shardwise.device import accelerator_generator, set_accelerator_generator
from shardwise.tensor.cut import Cut
from shardwise.tensor.operations import LIKE
from shardwise.tensor.tensor_base import ShardTensorBase, shards_in

_SITE = CollectiveId("broadcast", "(generator)", 0)


@contextmanager
def same_draws(cut: Cut, device: torch.device, own: torch.Generator | None) -> Iterator[None]:
    """Draw as rank 0 does, from the default generators or ``own``; every rank must enter.

    **Cost** one broadcast of the generator's state, 5 KB.
    """
    comm = cut.comm
    if all(axis.size == 1 for axis in (*comm.axes.all, *cut.own_axes)):
        yield
        return
    before = _states(device, own)
    first = torch.cat(before).to(comm.device)
    comm.broadcast(first, _SITE, also=cut.own_axes)
    states = first.cpu().split([state.numel() for state in before])
    _set_states(device, own, states)
    try:
        yield
    finally:
        if not all(map(torch.equal, states, before)):
            _set_states(device, own, before)


def _states(device: torch.device, own: torch.Generator | None) -> list[torch.Tensor]:
    if own is not None:
        return [own.get_state()]
    accelerator = accelerator_generator(device)
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator])]


def _set_states(
    device: torch.device, own: torch.Generator | None, states: Sequence[torch.Tensor]
) -> None:
    if own is not None:
        own.set_state(states[0])
        return
    torch.set_rng_state(states[0])
    if len(states) > 1:
        set_accelerator_generator(device, states[1])


def draw(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardTensorBase:
    """Draw the whole tensor and keep this rank's slice, in place or as a new tensor."""
    tensor = shards_in(args, kwargs)[0]
    full = torch.empty(tensor._cut.shape, dtype=tensor.dtype, device=tensor.device)
    drawn = tensor._cut.slice_of(func(full, *args[1:], **kwargs))
    if name in LIKE:
        return tensor.wrap(drawn.detach().clone(), tensor._cut, None, drawn.requires_grad)
    tensor._local_tensor.copy_(drawn)
    torch.autograd.graph.increment_version(tensor._local_tensor)  # marks full copies stale
    return tensor
