"""Count what the reader's code sends and holds.

Sent bytes are those of one rank, as an algorithm that sends no byte twice would send them: an
all-gather or a reduce-scatter of P bytes over N ranks sends (N-1)/N * P, an all-reduce twice that.
Sums over ranks are made in rank order, so that their bits can be compared with one process; gloo's
own order depends on the number of ranks. Held bytes are those of the storages that are alive;
storages of 8 bytes or less (Adam's counter of steps, a loss) do not count.
"""

import functools
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

SCALAR_BYTES = 8


@dataclass(frozen=True)
class Call:
    """One call of torch.distributed: its name, the bytes that this rank sends, and the line."""

    name: str
    sent: int
    line: int


def _others(group: Any) -> int:
    return dist.get_world_size(group) - 1


def _of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


# Bytes that this rank sends in one call; the arguments are those of the wrapped function.


def _all_reduce(tensor: Tensor, op: Any = None, group: Any = None, **_: Any) -> int:
    return 2 * _others(group) * tensor.nbytes // (_others(group) + 1)


def _all_gather(_out: Any, tensor: Tensor, group: Any = None, *_a: Any, **_: Any) -> int:
    return _others(group) * tensor.nbytes


def _reduce_scatter(out: Tensor, _in: Any, op: Any = None, group: Any = None, **_: Any) -> int:
    return _others(group) * out.nbytes


def _all_to_all(_out: Any, tensors: Sequence[Tensor], group: Any = None, **_: Any) -> int:
    return _of(tensors) - tensors[dist.get_rank(group)].nbytes


def _all_to_all_single(
    _out: Any, tensor: Tensor, _outs: Any = None, ins: Any = None, group: Any = None, **_: Any
) -> int:
    rows = ins[dist.get_rank(group)] if ins else tensor.shape[0] // (_others(group) + 1)
    return tensor.nbytes - rows * (tensor.nbytes // max(1, tensor.shape[0]))


def _broadcast(tensor: Tensor, src: int | None = None, group: Any = None, **_: Any) -> int:
    return _others(group) * tensor.nbytes if dist.get_rank() == src else 0


def _to_root(tensor: Tensor, *_a: Any, dst: int | None = 0, **_: Any) -> int:
    return 0 if dist.get_rank() == dst else tensor.nbytes


def _scatter(
    tensor: Tensor, scatter_list: Any = None, src: int | None = 0, group: Any = None, **_: Any
) -> int:
    return _others(group) * tensor.nbytes if dist.get_rank() == src else 0


def _send(tensor: Tensor, *_a: Any, **_: Any) -> int:
    return tensor.nbytes


SENT: dict[str, Callable[..., int]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
    "all_gather_single": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "broadcast": _broadcast,
    "reduce": _to_root,
    "gather": _to_root,
    "scatter": _scatter,
    "send": _send,
    "isend": _send,
}


# Sums in rank order. Each returns False, having done nothing, if torch must take the call.


def _add_in_order(source: Tensor, out: Tensor, begin: int, op: Any, group: Any, how: Any) -> bool:
    is_plain = op in (None, dist.ReduceOp.SUM) and not how
    if not is_plain or source.dtype != out.dtype or not out.is_contiguous():
        return False
    with _disable_current_modes(), torch.no_grad():
        source = source.detach().reshape(-1)
        everyone = [torch.empty_like(source) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, source, group=group)
        total = everyone[0][begin : begin + out.numel()].clone()
        for each in everyone[1:]:
            total += each[begin : begin + out.numel()]
        out.detach().view(-1).copy_(total)
    return True


def _all_reduce_in_order(tensor: Tensor, op: Any = None, group: Any = None, **how: Any) -> bool:
    return _add_in_order(tensor, tensor, 0, op, group, any(how.values()))


def _reduce_scatter_in_order(
    out: Tensor, source: Any, op: Any = None, group: Any = None, **how: Any
) -> bool:
    num_ranks, begin = dist.get_world_size(group), dist.get_rank(group) * out.numel()
    if not isinstance(source, Tensor):
        shapes = {tensor.shape for tensor in source}
        if len(source) != num_ranks or shapes != {out.shape}:
            return False
        with _disable_current_modes():
            source = torch.cat([tensor.detach().reshape(-1) for tensor in source])
    if source.numel() != num_ranks * out.numel():
        return False
    return _add_in_order(source, out, begin, op, group, any(how.values()))


ORDERED: dict[str, Callable[..., bool]] = {
    "all_reduce": _all_reduce_in_order,
    "reduce_scatter": _reduce_scatter_in_order,
    "reduce_scatter_tensor": _reduce_scatter_in_order,
    "reduce_scatter_single": _reduce_scatter_in_order,
}


class Traffic:
    """The calls of torch.distributed inside a block, with the lines of the reader's files."""

    def __init__(self, folder: Path) -> None:
        self.calls: list[Call] = []
        self._folder, self._depth = folder, 0

    @property
    def sent(self) -> int:
        """Return the bytes that this rank has sent."""
        return sum(call.sent for call in self.calls)

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def named(self, *names: str) -> list[Call]:
        """Return the calls of these functions."""
        return [call for call in self.calls if call.name.startswith(names)]

    def __enter__(self) -> "Traffic":
        self._before = [
            (home, name, getattr(home, name))
            for home in (dist, distributed_c10d)
            for name in SENT
            if hasattr(home, name)
        ]
        for home, name, function in self._before:
            setattr(home, name, self._counted(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for home, name, function in self._before:
            setattr(home, name, function)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0:
                try:
                    sent = SENT[name](*args, **kwargs)
                except (TypeError, AttributeError, IndexError):
                    sent = 0  # a wrong call: torch says what is wrong with it
                self.calls.append(Call(name, sent, self._line()))
            self._depth += 1
            try:
                if name in ORDERED and self._depth == 1 and ORDERED[name](*args, **kwargs):
                    return None
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return counted

    def _line(self) -> int:
        frame = sys._getframe(2)
        while frame is not None:
            if Path(frame.f_code.co_filename).parent == self._folder:
                return frame.f_lineno
            frame = frame.f_back  # type: ignore[assignment]
        return 0


class Meter(TorchDispatchMode):
    """Bytes of the storages that operations inside this mode have made, and of watched tensors."""

    def __init__(self, *watched: Tensor) -> None:
        super().__init__()
        self._live: dict[int, StorageWeakRef] = {}
        self.peak = 0
        for tensor in watched:
            self._note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note the storages of its results."""
        out = func(*args, **(kwargs or {}))
        outs = out if isinstance(out, list | tuple) else (out,)
        for value in outs:
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if isinstance(tensor, Tensor):
                    self._note(tensor)
        self.peak = max(self.peak, self.held())
        return out

    def held(self) -> int:
        """Return the bytes that are alive now."""
        total = 0
        for key, ref in list(self._live.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                del self._live[key]
            elif storage.nbytes() > SCALAR_BYTES:
                total += storage.nbytes()
        return total

    def settled(self) -> int:
        """Return the bytes that are alive after a collection of garbage."""
        gc.collect()
        return self.held()

    def rested(self) -> int:
        """Return the bytes that are alive once the transport has let go of its last message."""
        found = self.settled()
        for _ in range(5):
            time.sleep(0.004)
            found = min(found, self.held())
        return found

    def restart(self) -> None:
        """Begin to look for the peak anew."""
        self.peak = self.held()

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._live or self._live[storage._cdata].expired():
            self._live[storage._cdata] = StorageWeakRef(storage)
