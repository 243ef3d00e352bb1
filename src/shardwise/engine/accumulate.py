"""The accumulation window: which micro-batch is the last before the step."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwise.engine.api import engine_of


@contextmanager
def accumulate(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Run one micro-batch of an accumulation window; ``last`` says that the step comes next.

    Where the stage (or ``reduce_every="step"``) reduces once per step, gradients of the other
    micro-batches stay on this rank, unreduced, summed in the reduce dtype; ``p.grad`` cannot be
    read until the last one is through. Where every micro-batch is reduced, ``p.grad`` grows by
    the mean of each. As without Shardwise, dividing the loss is up to you.
    """
    with engine_of(model).conditions.micro_batch(last=bool(last)):
        yield
