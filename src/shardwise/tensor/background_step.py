"""An optimizer's step that goes on in the background, and how what it changes is waited for.

Note [Tensors of a step under way]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The caller goes on while a unit is stepped. Until that is done, the tensors that take part (this
rank's slices of parameters, of gradients and of the optimizer's state) have another class, in which
``_local_tensor`` waits for the step. Whatever asks for elements goes through that attribute:
operations, ``full_tensor()``, ``to_local()``, checkpoints; so it waits for this step and no other,
and shapes and dtypes are answered at once. Afterwards the class is back, and costs nothing. A unit
does not go through its parameters, so it is told of its steps and waits before it is gathered.

Memory that was taken out before the step (``p.to_local()``, kept) is not seen; take it again.
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
from shardwise.trace import Tracer

_STEP = "_step_under_way"
_ELEMENTS: Any = DTensor.__dict__["_local_tensor"]


class BackgroundStep:
    """One unit's step: made and waited for by the caller, run by another thread.

    ``tensors`` are the DTensors whose elements the step reads or writes; ``phase`` is its name on
    the tracer's lines, of which each thread has one.
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
        """Do the work; keep what it raises for those who wait."""
        assert self._work is not None
        try:
            with self._tracer.span(self._phase, self._unit, line=f"{self._phase} behind"):
                self._work()
        except BaseException as error:
            self._error = error
        self._work = None  # with the gradients that it holds
        if self._error is None:
            self.release()
        self._done.set()

    @property
    def is_over(self) -> bool:
        """Tell whether nobody would wait any more."""
        return self._done.is_set()

    def give_up(self) -> None:
        """Wait until it is over, well or not; let a load replace what it has left."""
        self._done.wait()
        self.release()

    def release(self) -> None:
        """Let the tensors be read as ever."""
        for tensor in self._tensors:
            tensor.__class__ = type(tensor).__bases__[0]
            del vars(tensor)[_STEP]
        self._tensors = ()

    def wait(self) -> None:
        """Return when the step is done. **Raises** ShardError if it has failed, every time."""
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


def finish_all(steps: list[BackgroundStep]) -> None:
    """Wait for steps, and forget them.

    **Raises** ShardError where one has failed, and forgets none.
    """
    for step in steps:
        step.wait()
    steps.clear()


def elements_of(tensor: DTensor) -> torch.Tensor:
    """Return this rank's elements without waiting, for their shape, dtype, device and bytes."""
    found: torch.Tensor = _ELEMENTS.__get__(tensor)
    return found


def is_under_way(tensor: DTensor) -> bool:
    """Tell whether a step that changes this rank's elements, or reads them, goes on."""
    return _STEP in vars(tensor)


def set_elements(tensor: DTensor, local: torch.Tensor) -> None:
    """Let other memory be this rank's elements, without waiting."""
    _ELEMENTS.__set__(tensor, local)


@cache
def _waiting_class(base: type[DTensor]) -> type[DTensor]:
    """Return ``base`` with elements that are waited for; see Note [Tensors of a step under way]."""

    def read(tensor: Any) -> torch.Tensor:
        step: BackgroundStep | None = vars(tensor).get(_STEP)
        if step is not None:
            step.wait()
        return elements_of(tensor)

    def write(tensor: Any, local: torch.Tensor) -> None:
        step: BackgroundStep | None = vars(tensor).get(_STEP)
        if step is not None:
            step.wait()
        _ELEMENTS.__set__(tensor, local)

    def copy(tensor: Any, memo: dict[int, Any]) -> Any:
        tensor._local_tensor  # noqa: B018 - copies of DTensors read memory in another way
        return base.__deepcopy__(tensor, memo)

    members = {
        "__slots__": (),
        "__module__": base.__module__,
        "__deepcopy__": copy,
        "_local_tensor": property(read, write),
    }
    return type(base.__name__, (base,), members)
