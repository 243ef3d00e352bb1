"""Optimizer steps that run on a background thread, and the tensors that wait for them.

Note [Tensors of a step under way]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The caller continues while a unit is stepped. Until the step is done, its tensors (this rank's
slices of parameters, gradients and optimizer state) have another class, whose ``_local_tensor``
waits for the step. Every reader of elements uses that attribute: operations, ``full_tensor()``,
``to_local()``, checkpoints. A reader waits for this step alone; shapes and dtypes need no wait.
After the step the tensors have their class again, which costs nothing. A unit does not read through
its parameters, so it keeps a list of its steps and waits for them before it is gathered.

A tensor taken before the step (a kept ``p.to_local()``) does not wait; take it again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.comm.listener import WAITS
from shardwise.errors import ShardError
from shardwise.tensor.elements import elements_of, set_elements
from shardwise.trace import Tracer

_STEP = "_step_under_way"


class BackgroundStep:
    """One unit's step: created and awaited by the caller, run by another thread.

    ``tensors`` are the DTensors whose elements the step reads or writes. ``phase`` names the step
    in the trace, where each thread has a line.
    """

    def __init__(
        self,
        unit: str,
        work: Callable[[], None],
        tensors: Sequence[DTensor],
        tracer: Tracer,
        phase: Literal["step", "store"] = "step",
    ) -> None:
        self._unit = unit
        self._tracer = tracer
        self._phase = phase
        self._work: Callable[[], None] | None = work
        self._tensors = tensors
        self._done = threading.Event()
        self._error: BaseException | None = None
        for tensor in tensors:
            assert _STEP not in vars(tensor)
            vars(tensor)[_STEP] = self
            tensor.__class__ = _waiting_class(type(tensor))

    def run(self) -> None:
        """Do the work; keep its error for `wait`."""
        assert self._work is not None
        try:
            with self._tracer.span(self._phase, self._unit, line=f"{self._phase} behind"):
                self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # frees the gradients that it holds
        if self._error is None:
            self.release()
        self._done.set()

    @property
    def is_over(self) -> bool:
        """Tell whether the step has ended, with or without an error."""
        return self._done.is_set()

    def give_up(self) -> None:
        """Wait until the step has ended, also with an error, so that a load may follow."""
        self._done.wait()
        self.release()

    def release(self) -> None:
        """Restore the tensors' class, so that readers no longer wait."""
        for tensor in self._tensors:
            tensor.__class__ = type(tensor).__bases__[0]
            del vars(tensor)[_STEP]
        self._tensors = ()

    def wait(self) -> None:
        """Wait until the step is done. **Raises** ShardError in every call if it has failed."""
        if not self.is_over and threading.current_thread() is threading.main_thread():
            with self._tracer.span("wait_step", self._unit):
                self._done.wait()
        self._done.wait()
        if self._error is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            why = (
                f"rank {rank}, unit '{self._unit or '(root)'}': the optimizer's step, which ran in "
                f"the background, failed: {type(self._error).__name__}: {self._error}. Its "
                "parameters may be stepped in part; shardwise.load() a checkpoint before it is used"
            )
            WAITS.listener.report_failure(why)
            raise ShardError(why) from self._error


def is_under_way(tensor: DTensor) -> bool:
    """Tell whether a step in progress reads or writes this rank's elements."""
    return _STEP in vars(tensor)


@cache
def _waiting_class(base: type[DTensor]) -> type[DTensor]:
    """Return a ``base`` whose elements wait; see Note [Tensors of a step under way]."""

    def read(tensor: Any) -> torch.Tensor:
        step: BackgroundStep | None = vars(tensor).get(_STEP)
        if step is not None:
            step.wait()
        return elements_of(tensor)

    def write(tensor: Any, local: torch.Tensor) -> None:
        step: BackgroundStep | None = vars(tensor).get(_STEP)
        if step is not None:
            step.wait()
        set_elements(tensor, local)

    def copy(tensor: Any, memo: object) -> Any:
        tensor._local_tensor  # noqa: B018 - DTensor's deepcopy does not read this attribute
        return base.__deepcopy__(tensor, memo)

    members = {
        "__slots__": (),
        "__module__": base.__module__,
        "__deepcopy__": copy,
        "_local_tensor": property(read, write),
    }
    return type(base.__name__, (base,), members)
