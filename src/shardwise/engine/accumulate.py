"""The accumulation window: which micro-batch is the last before the step."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shardwise.engine.api import engine_of
from shardwise.engine.parts import Model, modules_of


@contextmanager
def accumulate(model: Model, *, last: bool) -> Iterator[None]:
    """Run one micro-batch of an accumulation window; ``last`` says that the step comes next.

    For a pipeline, one step of its schedule, with the stages of this rank: gradients of all but the
    last then stay on the rank at any stage of ZeRO.

    Where the stage (or ``reduce_every="step"``) reduces once per step, gradients of the other
    micro-batches stay on this rank, unreduced, summed in the reduce dtype; ``p.grad`` cannot be
    read until the last one is through. Where every micro-batch is reduced, ``p.grad`` grows by
    the mean of each; over replicas (HSDP) `shard`'s gradients are summed once, with the last one,
    and cannot be read before. As without Shardwise, dividing the loss is up to you.
    """
    with ExitStack() as windows:
        for each in modules_of(model):
            windows.enter_context(engine_of(each).conditions.micro_batch(last=bool(last)))
        yield
