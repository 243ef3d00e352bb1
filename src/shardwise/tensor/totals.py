"""Reductions and norms of sharded tensors; a norm is reduced over ranks when its value is read.

``torch.nn.utils.clip_grad_norm_`` takes the norm of every gradient and then the norm of those
norms. Reducing each norm would take a collective per parameter. A `LazyNorm` stays this rank's part
until its value is read, also through the ``stack`` in between. So all norms take one collective, or
one per mesh if parameters are on several meshes.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.errors import ShardError
from shardwise.mesh import Axis
from shardwise.tensor.cut import GATHER_SITE, Cut
from shardwise.tensor.operations import NORMS, REDUCTIONS
from shardwise.tensor.tensor_base import Operation, ShardTensorBase, is_replicated

_SITE = CollectiveId("gather", "(norm)", 0)
_ORDERS = ("p", "ord")
_METADATA = frozenset({"dim", "size", "numel", "ndimension", "stride", "is_floating_point"})
_PROPERTIES_OF_VALUES = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})


@dataclass(frozen=True)
class NormKind:
    """The order and the ranks of partial norms; norms of one kind are completed together.

    Norms of a kind without axes are complete.
    """

    order: float
    comm: Comm | None = field(compare=False)  # units of one mesh may each have their own
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, order: float, cut: Cut) -> "NormKind":
        """Return the kind of the norms of tensors with this cut."""
        return cls(float(order), cut.comm, cut.axes)

    def combine(self, partial: torch.Tensor) -> torch.Tensor:
        """Complete partial norms over the axes, elementwise."""
        comm = self.comm
        if comm is None or not self.axes:
            return partial
        if self.order in (float("inf"), float("-inf")):
            sign = 1 if self.order > 0 else -1
            extreme = partial * sign
            for axis in self.axes:
                extreme = comm.max(extreme, axis, _SITE)
            return extreme * sign
        total = partial if self.order == 0 else partial.double().pow(self.order)
        for axis in self.axes:
            total = comm.sum_in_rank_order(total, axis, _SITE)
        return total if self.order == 0 else total.pow(1.0 / self.order).to(partial.dtype)


class LazyNorm(torch.Tensor):
    """A norm (or a vector of norms) of this rank's elements, completed when a value is read.

    Norms in a vector may be of several kinds, as parameters may be on several meshes. Once complete
    it stands for one plain tensor: views are views of that tensor, and writes are writes to it.

    **Cost** one collective over each axis of each kind when a value is first read or written.
    """

    _kinds: tuple[NormKind, ...]  # of each norm
    _partial: torch.Tensor
    _complete: torch.Tensor | None

    @classmethod
    def of(cls, partial: torch.Tensor, *kinds: NormKind) -> "LazyNorm":
        """Wrap this rank's part."""
        lazy: LazyNorm = partial.as_subclass(cls)
        lazy._kinds = kinds
        lazy._partial = partial
        lazy._complete = None
        return lazy

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stay lazy if nothing changes, as when ``get_total_norm`` moves every norm."""
        if not kwargs and args == (self._partial.device,):
            return self
        return self.resolve().to(*args, **kwargs)

    def resolve(self) -> torch.Tensor:
        """Return the norms over all ranks as a plain tensor, the same one in each call."""
        if self._complete is None:
            total = self._partial.clone()
            for kind, places in self._by_kind():
                total.view(-1)[places] = kind.combine(self._partial.reshape(-1)[places])
            self._complete = total
        return self._complete

    def total(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the norm of the norms; combine each kind on this rank, then over ranks."""
        flat = self._partial.reshape(-1)
        # The number of norms that are not 0 needs complete norms.
        if self._complete is not None or self._kinds[0].order == 0:
            return torch.linalg.vector_norm(self.resolve().reshape(-1), *args, **kwargs)
        found = [
            kind.combine(torch.linalg.vector_norm(flat[places], *args, **kwargs))
            for kind, places in self._by_kind()
        ]
        if len(found) == 1:
            return found[0]
        return torch.linalg.vector_norm(torch.stack(found), *args, **kwargs)

    def _by_kind(self) -> list[tuple[NormKind, Any]]:
        """Return the kinds in order of appearance, with the places of each one's norms."""
        first = self._kinds[0]
        if all(kind.axes is first.axes for kind in self._kinds):  # usual; hashing takes longer
            return [(first, slice(None))]
        places: dict[NormKind, list[int]] = {}
        for place, kind in enumerate(self._kinds):
            places.setdefault(kind, []).append(place)
        return list(places.items())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Stay lazy through the calls of ``get_total_norm``; resolve for any other call."""
        call = Operation(func, getattr(func, "__name__", ""), args, kwargs)
        is_value = call.name == "__get__" and func.__self__.__name__ in _PROPERTIES_OF_VALUES  # type: ignore[attr-defined]
        if call.name in _METADATA or (call.name == "__get__" and not is_value):
            with torch._C.DisableTorchFunctionSubclass():
                return call.run()
        if call.name == "stack" and len(args) == 1 and not kwargs:
            stacked = _stacked(args[0])
            if stacked is not None:
                return stacked
        if call.name in ("vector_norm", "linalg_vector_norm") and _is_total(call):
            return args[0].total(*args[1:], **call.kwargs)
        return call.run(_resolved)


def _stacked(values: Sequence[torch.Tensor]) -> LazyNorm | None:
    """Stack single norms of one order; plain ones are complete. Return None for other values."""
    order = next(v._kinds[0].order for v in values if isinstance(v, LazyNorm))
    complete = NormKind(order, None, ())
    kinds: list[NormKind] = []
    partials: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, LazyNorm) and value._complete is None:
            kind, partial = value._kinds[0], value._partial
        elif isinstance(value, LazyNorm):
            kind, partial = complete, value.resolve()
        elif type(value) is torch.Tensor:
            kind, partial = complete, value
        else:
            return None
        if partial.dim() or kind.order != order:
            return None
        kinds.append(kind)
        partials.append(partial)
    return LazyNorm.of(torch.stack(partials), *kinds)


def _is_total(call: Operation) -> bool:
    first, *others = call.args
    order = others[0] if others else call.kwargs.get("ord", 2.0)
    is_plain = not set(call.kwargs) - {"ord"} and len(others) < 2
    return isinstance(first, LazyNorm) and first._kinds[0].order == order and is_plain


def _resolved(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.resolve()
    if isinstance(value, tuple | list):
        return type(value)(_resolved(v) for v in value)
    return value


def norm(call: Operation) -> object:
    """Return a norm: lazy for all elements, immediate over some dims."""
    order = _order_of_total(call)
    return _reduce_dims(call) if order is None else _total_norms(call.args[:1], order)[0]


def norms_of_list(call: Operation) -> object:
    """Return the lazy norms of tensors in a list (``_foreach_norm``)."""
    order = call.args[1] if len(call.args) > 1 else call.kwargs.get("ord", 2.0)
    return _total_norms(call.args[0], order)


def reduce(call: Operation) -> object:
    """Reduce all elements to one number, or sum or average over some dims.

    **Cost** one collective over each axis that the tensor is cut over.
    """
    if len(call.args) == 1 and not call.kwargs:
        return _reduce_all(call)
    return _reduce_dims(call) if call.name in ("sum", "mean") else NotImplemented


def _order_of_total(call: Operation) -> object:
    """Return the order when the call is the norm of all elements, else None."""
    others = [*call.args[2:], *(v for k, v in call.kwargs.items() if k not in _ORDERS)]
    if any(v is not None and v is not False for v in others):  # dims, keepdim, dtype
        return None
    return _order_of(call)


def _order_of(call: Operation) -> object:
    named = next((call.kwargs[name] for name in _ORDERS if name in call.kwargs), 2.0)
    order: object = call.args[1] if len(call.args) > 1 else named
    return 2.0 if order is None or order == "fro" else order


def _total_norms(tensors: Sequence[torch.Tensor], order: object) -> list[torch.Tensor]:
    """Return each tensor's norm of all elements, lazy."""
    if not isinstance(order, int | float):
        raise ShardError(
            f"norm of order {order!r}: a sharded tensor has p-norms of its elements only; "
            "use full_tensor()"
        )
    _warn_of_plain(tensors)
    parts = [t._local_tensor if isinstance(t, ShardTensorBase) else t for t in tensors]
    filled = [part for part in parts if part.numel()]
    norms = iter(torch._foreach_norm(filled, order) if filled else ())
    found: list[torch.Tensor] = []
    kind: NormKind | None = None
    for tensor, part in zip(tensors, parts, strict=True):
        if part.numel():
            value = next(norms)
        else:  # the neutral element
            start = float("inf") if order < 0 else 0.0
            value = torch.full((), start, dtype=part.dtype, device=part.device)
        if isinstance(tensor, ShardTensorBase) and (axes := (cut := tensor._cut).axes):
            if kind is None or kind.axes is not axes or kind.comm is not cut.comm:
                kind = NormKind.of(order, cut)
            value = LazyNorm.of(value, kind)
        found.append(value)
    return found


def _warn_of_plain(tensors: Sequence[torch.Tensor]) -> None:
    """Warn once of plain gradients among sharded ones, as each rank has others."""
    sharded = next((t for t in tensors if isinstance(t, ShardTensorBase)), None)
    if sharded is None or all(isinstance(t, ShardTensorBase) for t in tensors):
        return
    if any(axis.size > 1 for axis in sharded._cut.comm.axes.all):
        plain = next(t for t in tensors if not isinstance(t, ShardTensorBase))
        warnings.warn(
            f"a norm of sharded tensors and plain ones (the first of shape {tuple(plain.shape)}): "
            "no rank sums plain gradients, so the norm, and what it clips to, differ from rank to "
            "rank. Put the parameter into the model before shard(), or average its gradient over "
            "the ranks and clip with shardwise.parallel.clip_grad_norm_",
            stacklevel=3,
        )


def _reduce_all(call: Operation) -> torch.Tensor:
    tensor: ShardTensorBase = call.args[0]
    local, cut, name = tensor._local_tensor, tensor._cut, call.name
    if cut.is_replicated:
        return _tensor(call.func(local))
    how = REDUCTIONS[name]
    if name == "mean":
        return _sum(local.sum() / tensor.numel(), cut)
    if how in ("max", "min") and not local.numel():
        partial = _neutral(name, local)
    else:
        partial = _tensor(call.func(local))
    if how == "sum":
        return _sum(partial, cut)
    combine = _COMBINE[how]
    is_bool = partial.dtype == torch.bool
    partial = partial.to(torch.uint8) if is_bool else partial
    for axis in cut.axes:
        partial = combine(cut.comm.gather_rows(partial, axis, GATHER_SITE), dim=0)
    return partial.to(torch.bool) if is_bool else partial


_COMBINE: dict[str, Callable[..., torch.Tensor]] = {
    "max": torch.amax,
    "min": torch.amin,
    "prod": torch.prod,
}


def _neutral(name: str, local: torch.Tensor) -> torch.Tensor:
    """Return the value of a maximum or minimum of nothing, which changes no other."""
    dtype, is_max = local.dtype, REDUCTIONS[name] == "max"
    value: float | bool
    if name in ("all", "any"):
        dtype, value = torch.bool, name == "all"
    elif dtype == torch.bool:
        value = not is_max
    elif dtype.is_floating_point:
        value = float("-inf") if is_max else float("inf")
    else:
        limits = torch.iinfo(dtype)
        value = limits.min if is_max else limits.max
    return torch.full((), value, dtype=dtype, device=local.device)


def _reduce_dims(call: Operation) -> object:
    """Reduce over some dims; return NotImplemented for norms that cannot be combined.

    Every rank reduces its elements in a tensor of zeros. If one rank has all elements of a result,
    the others add zeros, so the result's bits stay.

    **Cost** the tensor's full size in memory; one collective of the result's size.
    """
    shards = call.shards
    if len(shards) > 1 or call.kwargs.get("out") is not None or is_replicated(shards):
        return NotImplemented
    tensor, cut = shards[0], shards[0]._cut
    order = _order_of(call) if call.name in NORMS else None
    if order is not None and (not isinstance(order, int | float) or order < 0):
        return NotImplemented
    whole = cut.place(tensor._local_tensor)
    partial = _tensor(call.func(whole, *call.args[1:], **call.kwargs))
    if order is not None:
        return NormKind.of(order, cut).combine(partial)
    return _sum(partial, cut).to(partial.dtype)


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


def _sum(partial: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Sum over the axes that a tensor is cut over, one after the other."""
    for axis in cut.axes:
        partial = cut.comm.sum_in_rank_order(partial, axis, GATHER_SITE)
    return partial
