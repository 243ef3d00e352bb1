"""Collectives that a loop makes itself by torch.distributed, told to recorders.

Note [Calls of the loop's own]
A loop averages its loss, or meets in a barrier, on groups that no model knows. torch wraps each of
these calls in a function that logs its errors, and keeps the call in a cell of that function's
closure. While a recorder listens, the cell holds a function that tells of the call and makes it.
So a call is seen under whatever name it was imported, and no name of torch changes. A wait for
what was begun with ``async_op=True`` is in no such call, and is not seen.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import CellType, FunctionType
from typing import Any

import torch.distributed as dist

from shardwise.comm.counted import is_counted
from shardwise.names import MAIN
from shardwise.trace import Recorder

_KINDS = ("all_", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")


class TorchCalls:
    """Tells recorders of the thread that they were begun on; calls are a fact of the process."""

    def __init__(self) -> None:
        self._told: list[tuple[int, Recorder]] = []
        self._calls: list[tuple[CellType, Callable[..., Any]]] = []

    @contextmanager
    def telling(self, recorder: Recorder) -> Iterator[None]:
        """Tell a recorder of calls inside, as the phase "exchange"; any may end first.

        **Cost** some microseconds for each call.
        """
        entry = threading.get_ident(), recorder
        if not self._told:
            self._calls = _calls_of_torch()
            for cell, call in self._calls:
                cell.cell_contents = self._wrapped(call)
        self._told.append(entry)
        try:
            yield
        finally:
            self._told.remove(entry)
            if not self._told:
                for cell, call in self._calls:
                    cell.cell_contents = call

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def told(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            recorders = [recorder for at, recorder in self._told if at == thread]
            if not recorders or is_counted(sys._getframe(1)):  # a call inside another one too
                return call(*args, **kwargs)
            for recorder in recorders:
                recorder.enter(MAIN, "exchange", "")
            try:
                return call(*args, **kwargs)
            finally:
                for recorder in recorders:
                    recorder.leave(MAIN, "exchange", "")

        return told


def _calls_of_torch() -> list[tuple[CellType, Callable[..., Any]]]:
    """Return the cells that hold torch's collectives, and what they hold."""
    found = []
    for name, value in vars(dist.distributed_c10d).items():
        if type(value) is FunctionType and name.startswith(_KINDS):  # asking some others warns
            call = getattr(value, "__wrapped__", None)
            cells = value.__closure__ or ()
            found += [(cell, call) for cell in cells if call and cell.cell_contents is call]
    return found


TORCH_CALLS = TorchCalls()
