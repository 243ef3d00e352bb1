"""Equal draws from random generators on all ranks.

Note [One draw for all ranks]
If each rank drew from its generator, a replicated parameter, or one with replicas, would differ
between ranks. So every rank draws the whole tensor from the state of rank 0's generator and keeps
its slice. The values depend neither on the number of ranks nor on their seeds. A rank whose
generator had another state restores that state.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardwise.comm.pending import CollectiveId
from shardwise.device import accelerator_generator, set_accelerator_generator
from shardwise.tensor.cut import Cut

_SITE = CollectiveId("broadcast", "(generator)", 0)


@contextmanager
def same_draws(cut: Cut, device: torch.device, own: torch.Generator | None) -> Iterator[None]:
    """Draw as rank 0 does, from the default generators or ``own``; every rank must enter.

    **Cost** one broadcast of the generator's state, 5 KB.
    """
    comm = cut.comm
    if all(axis.size == 1 for axis in (*comm.axes.all, *cut.outer_axes)):
        yield
        return
    before = generator_states(device, own)
    first = torch.cat(list(before)).to(comm.device)
    comm.broadcast(first, _SITE, also=cut.outer_axes)
    states = first.cpu().split([state.numel() for state in before])
    set_generator_states(device, states, own)
    try:
        yield
    finally:
        if not all(map(torch.equal, states, before)):
            set_generator_states(device, before, own)


def generator_states(
    device: torch.device, own: torch.Generator | None = None
) -> Sequence[torch.Tensor]:
    """Return the states of the default generators of the host and ``device``, or of ``own``."""
    if own is not None:
        return [own.get_state()]
    accelerator = accelerator_generator(device)
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator])]


def set_generator_states(
    device: torch.device, states: Sequence[torch.Tensor], own: torch.Generator | None = None
) -> None:
    """Give these generators these states; see `generator_states`."""
    if own is not None:
        own.set_state(states[0])
        return
    torch.set_rng_state(states[0])
    if len(states) > 1:
        set_accelerator_generator(device, states[1])
