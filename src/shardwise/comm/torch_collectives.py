"""Collectives that are not Shardwise's: counted by a dispatch mode, and reported to recorders.

DTensors, pipelines and layers of other libraries call torch.distributed themselves. A mode sees
each operation on its way to the device, collectives among them, in forward and in backward.

Note [Counted bytes]
Bytes are those that a rank has to send, however a backend does it: each of n ranks sends its part
to n - 1 ranks in an all-gather, its addends of n - 1 shares in a reduce-scatter, and both in an
all-reduce. Receiving is not counted.

Note [Calls of the loop's own]
A loop averages its loss, or waits in a barrier, on groups that no model knows. torch wraps each of
these calls in a function that logs its errors, and keeps the call in a cell of that function's
closure. While a recorder listens, the cell holds a function that reports the call and makes it.
So a call is seen under any name that it was imported by, and no name of torch changes. A wait for a
collective that was begun with ``async_op=True`` is not such a call, and is not seen.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.mesh import Axis
from shardwise.names import MAIN
from shardwise.trace import Recorder, Traffic

# Operators of c10d: the kind of collective, and the position of the argument with its input.
_OPERATORS: Mapping[str, tuple[str, int]] = {
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_coalesced_": ("all_gather", 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "broadcast_": ("broadcast", 0),
    "gather_": ("gather", 1),
    "reduce_": ("reduce", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
}
# Of functional collectives, whose input comes first, names begin with the kind.
_FUNCTIONAL = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
_GROUPS = ("process_group", "group_name")
_SOURCES = ("root_rank", "src")
_SPLITS = "input_split_sizes"
_KINDS = ("all_", "barrier", "broadcast", "gather", "recv", "reduce", "scatter", "send")
# Shardwise counts the collectives that are made here itself.
_PACKAGE = Path(__file__).parents[1]
_COUNTED = (f"{_PACKAGE / 'comm'}{os.sep}", str(_PACKAGE / "parallel" / "ring.py"))


class CountedCollectives(TorchDispatchMode):
    """While entered, count collectives over ``axes`` that Shardwise does not make.

    **Cost** some microseconds for each operation of torch; modules that are compiled run as they
    were written.
    """

    supports_higher_order_operators = True

    def __init__(self, axes: Sequence[Axis], traffic: Traffic) -> None:
        super().__init__()
        self._axes: dict[tuple[int, ...], Axis] = {}
        for axis in axes:
            self._axes.setdefault(tuple(dist.get_process_group_ranks(axis.group)), axis)
        self._known: dict[str, Axis | None] = {}
        for axis in reversed(axes):
            self._known[axis.group.group_name] = axis
        self._traffic = traffic

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count an operation if it is a collective, and run it."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it first makes its collectives, which come here next
        is_real = not any(issubclass(kind, FakeTensor) for kind in types)
        if is_real and isinstance(func, torch._ops.OpOverload):
            found = _collective_of(func.namespace, func._opname)
            if found is not None and not is_counted(sys._getframe(1)):
                self._count(*found, _by_name(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, place: int, given: dict[str, Any]) -> None:
        axis = self._axis_of(next(given[name] for name in _GROUPS if name in given))
        if axis is None or axis.size == 1:
            return
        num_bytes = _sent_bytes(kind, list(given.values())[place], given, axis)
        self._traffic.add(f"{axis.name}.{kind}", "", num_bytes)

    def _axis_of(self, group: Any) -> Axis | None:
        """Return the axis of a group, by the group's ranks if it is not one of the model's.

        DTensors cache their plans by mesh: a later, equal mesh uses the groups of the first.
        """
        if not isinstance(group, str | dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)  # an operator's object of C++
        name = str(group) if isinstance(group, str) else str(group.group_name)
        if name not in self._known:
            if isinstance(group, str):
                resolve: Any = dist.distributed_c10d._resolve_process_group
                group = resolve(group)
            self._known[name] = self._axes.get(tuple(dist.get_process_group_ranks(group)))
        return self._known[name]


class CollectiveCalled(BaseException):
    """A collective was called under `RefusedCollectives`; ``args[0]`` is its kind."""


class RefusedCollectives(TorchDispatchMode):
    """While entered, raise CollectiveCalled for each collective, before it begins."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise for a collective; run any other operation."""
        if isinstance(func, torch._ops.OpOverload):
            found = _collective_of(func.namespace, func._opname)
            if found is not None or (func.namespace, func._opname) == ("c10d", "barrier"):
                raise CollectiveCalled("barrier" if found is None else found[0])
        return func(*args, **(kwargs or {}))


def _collective_of(namespace: str, name: str) -> tuple[str, int] | None:
    """Return the kind of collective that an operator is, and the position of its input."""
    if namespace == "c10d":
        return _OPERATORS.get(name)
    if namespace == "_c10d_functional":
        kind = next(filter(name.startswith, _FUNCTIONAL), "send" if name == "isend" else "")
        return (kind, 0) if kind else None
    return ("all_to_all", 0) if (namespace, name) == ("_dtensor", "shard_dim_alltoall") else None


def _by_name(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments by their names, in order."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _sent_bytes(kind: str, given: Any, others: Mapping[str, Any], axis: Axis) -> int:
    """Return the bytes that this rank sends, see Note [Counted bytes]."""
    num, here = axis.size, _bytes_of(given)
    source = next((others[name] for name in _SOURCES if name in others), None)
    if kind == "all_gather":
        return here * (num - 1)
    if kind == "all_reduce":
        return 2 * here * (num - 1) // num
    if kind in ("reduce_scatter", "all_to_all"):
        splits = others.get(_SPLITS)
        if splits:
            return here // max(sum(splits), 1) * (sum(splits) - splits[axis.rank])
        if kind == "all_to_all" and isinstance(given, list | tuple):
            return here - _bytes_of(given[axis.rank])
        return here * (num - 1) // num
    if kind == "broadcast":
        return here * (num - 1) if source == axis.rank else 0
    if kind == "scatter":  # only its source has an input
        return here * (num - 1) // num
    if kind in ("reduce", "gather"):
        return 0 if source == axis.rank else here
    return here


def _bytes_of(given: Any) -> int:
    if isinstance(given, Tensor):
        return given.nbytes
    return sum(map(_bytes_of, given))


def is_counted(frame: FrameType | None) -> bool:
    """Tell whether Shardwise makes a collective, and counts it itself."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_COUNTED) and name != __file__:
            return True
        frame = frame.f_back
    return False


class TorchCalls:
    """Reports the calls of a process to recorders, each of the thread on which it was begun."""

    def __init__(self) -> None:
        self._recorders: list[tuple[int, Recorder]] = []
        self._calls: list[tuple[CellType, Callable[..., Any]]] = []

    @contextmanager
    def reporting(self, recorder: Recorder) -> Iterator[None]:
        """Report calls inside to a recorder, as the phase "exchange"; any may end first.

        **Cost** some microseconds for each call.
        """
        entry = threading.get_ident(), recorder
        if not self._recorders:
            self._calls = _calls_of_torch()
            for cell, call in self._calls:
                cell.cell_contents = self._wrapped(call)
        self._recorders.append(entry)
        try:
            yield
        finally:
            self._recorders.remove(entry)
            if not self._recorders:
                for cell, call in self._calls:
                    cell.cell_contents = call

    def _wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def reported(*args: Any, **kwargs: Any) -> Any:
            thread = threading.get_ident()
            recorders = [recorder for at, recorder in self._recorders if at == thread]
            if not recorders or is_counted(sys._getframe(1)):  # a call inside another one too
                return call(*args, **kwargs)
            for recorder in recorders:
                recorder.enter(MAIN, "exchange", "")
            try:
                return call(*args, **kwargs)
            finally:
                for recorder in recorders:
                    recorder.leave(MAIN, "exchange", "")

        return reported


def _calls_of_torch() -> list[tuple[CellType, Callable[..., Any]]]:
    """Return the cells that hold torch's collectives, each with its call."""
    found = []
    for name, value in vars(dist.distributed_c10d).items():
        if type(value) is FunctionType and name.startswith(_KINDS):  # of others some warn
            call = getattr(value, "__wrapped__", None)
            cells = value.__closure__ or ()
            found += [(cell, call) for cell in cells if call and cell.cell_contents is call]
    return found


TORCH_CALLS = TorchCalls()


def waited_for(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a functional collective is not writing any more."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor
