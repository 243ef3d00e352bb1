"""Finds the output head of a traced model, and the stretch of the log that is its and the loss's.

Note [Which bytes are logits]
Those allocated from the begin of the output head's forward, through the loss, to the end of the
head's backward, but for gradients of parameters and the gradient of the head's input. The head is
the last module in forward order that owns a matrix and is not an embedding; where it owns none
itself (a product with the embedding's weight) the region begins where the root's forward ends.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.engine.hooks import register_hooks
from shardwise.engine.tree import tensors_in
from shardwise.plan.model.tracking import Tracker


class Head:
    """Finds the output head and the stretch of the log that is its and the loss's."""

    suspended = False

    def __init__(self, model: nn.Module, tracker: Tracker) -> None:
        self._tracker = tracker
        self._call = _HeadCall(None, None, None)
        self._handles = [
            handle
            for module in _outside_lists(model)
            if not isinstance(module, nn.Embedding)
            and any(p is not None and p.dim() == 2 for p in module._parameters.values())
            for handle in register_hooks(self, _Watched(module))
        ]

    def remove(self) -> None:
        """Take all hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def before_forward(self, unit: Any, args: Any, kwargs: Any) -> None:
        """Note where in the log the call begins, and when its backward will have ended."""
        if torch._C._current_graph_task_id() != -1:
            return
        call = self._call = _HeadCall(len(self._tracker.log), None, None)

        def at_end(grad: torch.Tensor) -> None:
            call.end, call.input_grad = len(self._tracker.log), self._tracker.serial_of(grad)

        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(at_end)

    def after_forward(self, unit: Any, output: Any) -> None:
        """Do nothing: the stretch goes on through the loss."""

    def stretch(self, root_end: int, body_begin: int) -> tuple[int, int, int | None]:
        """Return begin and end in the log, and the one storage inside it that is no logits.

        ``root_end``, ``body_begin``: where the root's forward ended, and where the backward of
        another unit first began; they bound the stretch of a model without a head.
        """
        call = self._call
        if call.begin is None:
            return root_end, body_begin, None
        return call.begin, body_begin if call.end is None else call.end, call.input_grad


@dataclass(frozen=True)
class _Watched:
    module: nn.Module


@dataclass
class _HeadCall:
    """Places in the log: begin of forward, end of backward; and the gradient that leaves."""

    begin: int | None
    end: int | None
    input_grad: int | None


def _outside_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that are in no ModuleList: what is in one is the model's body."""
    yield module
    for child in module.children():
        if not isinstance(child, nn.ModuleList):
            yield from _outside_lists(child)
