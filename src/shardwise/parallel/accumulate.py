"""Gradient accumulation: windows of micro-batches, and the call that runs them unit by unit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal, overload

import torch
from torch import nn

from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError
from shardwise.parallel.breadth_first import layer_by_layer
from shardwise.parallel.parts import Model, modules_of


@overload
def accumulate(model: Model, *, last: bool) -> AbstractContextManager[None]: ...


@overload
def accumulate(
    model: nn.Module,
    forward: Callable[[Any], torch.Tensor],
    micro_batches: Sequence[Any],
    *,
    order: Literal["breadth_first"],
) -> torch.Tensor: ...


def accumulate(
    model: Model,
    forward: Callable[[Any], torch.Tensor] | None = None,
    micro_batches: Sequence[Any] = (),
    *,
    last: bool | None = None,
    order: Literal["depth_first", "breadth_first"] = "depth_first",
) -> AbstractContextManager[None] | torch.Tensor:
    """Accumulate gradients over micro-batches, one after the other or unit by unit.

    ``with accumulate(model, last=...):`` runs one micro-batch of an accumulation window. Pass
    ``last=True`` if the optimizer's step comes next. ``accumulate(model, forward, micro_batches,
    order="breadth_first")`` runs all micro-batches through each unit in turn and returns the sum of
    their losses: see `parallel.breadth_first`.

    For a pipeline, pass this rank's stages and run one ``schedule.step()`` in the context. Then
    gradients of all steps but the last stay on the rank, at any ZeRO stage.

    If the stage (or ``reduce_every="step"``) reduces once per step, gradients of earlier
    micro-batches stay on this rank, unreduced, summed in the reduce dtype. ``p.grad`` cannot be
    read until the last one has ended. If every micro-batch is reduced, ``p.grad`` grows by the mean
    of each. Over replicas (HSDP), `shard`'s gradients are summed once, with the last micro-batch,
    and cannot be read before. The loss is not divided, as without Shardwise.
    """
    if order == "breadth_first":
        if forward is None or not isinstance(model, nn.Module):
            raise ConfigError(
                "accumulate(order='breadth_first'): expected a model, its forward function and "
                "micro-batches"
            )
        return layer_by_layer(model, forward, micro_batches)
    if forward is not None or last is None:
        raise TypeError(
            "accumulate(): expected accumulate(model, last=True or False), or accumulate(model, "
            f"forward, micro_batches, order='breadth_first'); got last={last!r}, order={order!r}"
        )
    return _window(model, last)


@contextmanager
def _window(model: Model, last: bool) -> Iterator[None]:
    with ExitStack() as windows:
        for stage in modules_of(model):
            windows.enter_context(engine_of(stage).status.micro_batch(last=bool(last)))
        yield
