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
def same_draws(cut: Cut, device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
    """Draw inside from the state of rank 0's generators; every rank must enter.

    These are the default generators, or ``generator``.

    **Cost** one broadcast of the generator's state, 5 KB.
    """
    comm = cut.comm
    if all(axis.size == 1 for axis in (*comm.axes.all, *cut.outer_axes)):
        yield
        return
    before = generator_states(device, generator)
    first = torch.cat(list(before)).to(comm.device)
    comm.broadcast(first, _SITE, also=cut.outer_axes)
    states = first.cpu().split([state.numel() for state in before])
    set_generator_states(device, states, generator)
    try:
        yield
    finally:
        if not all(map(torch.equal, states, before)):
            set_generator_states(device, before, generator)


def generator_states(
    device: torch.device, generator: torch.Generator | None = None
) -> Sequence[torch.Tensor]:
    """Return the state of ``generator``, or of the default ones of the host and ``device``."""
    if generator is not None:
        return [generator.get_state()]
    accelerator = accelerator_generator(device)
    return [torch.get_rng_state(), *([] if accelerator is None else [accelerator])]


def set_generator_states(
    device: torch.device, states: Sequence[torch.Tensor], generator: torch.Generator | None = None
) -> None:
    """Set the states that `generator_states` has returned."""
    if generator is not None:
        generator.set_state(states[0])
        return
    torch.set_rng_state(states[0])
    if len(states) > 1:
        set_accelerator_generator(device, states[1])
