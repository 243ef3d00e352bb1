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
from shardwise.tensor.operations import FACTS, NORMS, REDUCTIONS
from shardwise.tensor.tensor_base import Operation, ShardTensorBase, is_replicated

_SITE = CollectiveId("gather", "(norm)", 0)
_ORDERS = ("p", "ord")


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

    Norms in a vector may be of several kinds, as parameters may be on several meshes.

    The first call that reads or writes a value completes the norm, once. All calls then run on the
    completed tensor, so a write is seen by every later call, and views share memory with it.
    Functions of C++ that take a number without asking ``__torch_function__`` (``alpha=norm``,
    ``torch.full``) arrive at ``__torch_dispatch__``.

    **Cost** one collective over each axis of each kind when a value is first read.
    """

    _kinds: tuple[NormKind, ...]  # of each norm; empty once they are complete
    _norms: torch.Tensor  # this rank's part, or the complete norms

    @classmethod
    def of(cls, values: torch.Tensor, *kinds: NormKind) -> "LazyNorm":
        """Wrap this rank's part."""
        lazy: LazyNorm = values.as_subclass(cls)
        lazy._kinds = kinds
        lazy._norms = values
        return lazy

    def __hash__(self) -> int:
        """Identify the tensor, as torch does; sends nothing."""
        return id(self)

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stay lazy if nothing changes, as when ``get_total_norm`` moves every norm."""
        if not kwargs and args == (self._norms.device,):
            return self
        return self.resolve().to(*args, **kwargs)

    def detach(self) -> torch.Tensor:
        """Return another tensor of the same memory and class, which `nn.Parameter` asks for."""
        return LazyNorm.of(self.resolve().detach())

    def resolve(self) -> torch.Tensor:
        """Complete the norms over all ranks; return the tensor that all later calls run on."""
        if self._kinds:
            with torch.inference_mode(self._norms.is_inference()), torch.no_grad():
                total = self._norms.clone()
                for kind, places in self._by_kind():
                    total.view(-1)[places] = kind.combine(self._norms.reshape(-1)[places])
            self._norms = total
            self._kinds = ()
        return self._norms

    def total(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the norm of the norms; combine each kind on this rank, then over ranks."""
        flat = self._norms.reshape(-1)
        if self._kinds[0].order == 0:  # the number of norms that are not 0 needs complete norms
            return torch.linalg.vector_norm(self.resolve().reshape(-1), *args, **kwargs)
        totals = [
            kind.combine(torch.linalg.vector_norm(flat[places], *args, **kwargs))
            for kind, places in self._by_kind()
        ]
        if len(totals) == 1:
            return totals[0]
        return torch.linalg.vector_norm(torch.stack(totals), *args, **kwargs)

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
        if call.name == "__get__":
            call.name = func.__self__.__name__  # type: ignore[attr-defined]
        if call.name in FACTS:
            return call.run(lambda value: value._norms if isinstance(value, LazyNorm) else value)
        if call.name == "stack" and len(args) == 1 and not kwargs:
            stacked = _stacked(args[0])
            if stacked is not None:
                return stacked
        if call.name in ("vector_norm", "linalg_vector_norm") and _is_total(call):
            return args[0].total(*args[1:], **call.kwargs)
        result = call.run(_resolved)
        lazy = (value for value in call.values if isinstance(value, LazyNorm))
        return next((value for value in lazy if value._norms is result), result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        """Resolve for a call that reaches ATen without ``__torch_function__``."""
        return Operation(func, "", args, kwargs).run(_resolved)


def _stacked(values: Sequence[torch.Tensor]) -> LazyNorm | None:
    """Stack single norms of one order; plain ones are complete. Return None for other values."""
    orders = [v._kinds[0].order for v in values if isinstance(v, LazyNorm) and v._kinds]
    if not orders:
        return None
    order = orders[0]
    complete = NormKind(order, None, ())
    kinds: list[NormKind] = []
    partials: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, LazyNorm):
            kind = value._kinds[0] if value._kinds else complete
            partial = value._norms
        elif type(value) is torch.Tensor:
            kind = complete
            partial = value
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
    is_lazy = isinstance(first, LazyNorm) and bool(first._kinds)
    return is_lazy and first._kinds[0].order == order and is_plain


def _resolved(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.resolve()
    if isinstance(value, tuple | list):
        return type(value)(_resolved(v) for v in value)
    return value


def norm_of_nothing(order: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the norm of a rank without elements: it changes no norm that it is combined with."""
    return torch.full((), float("inf") if order < 0 else 0.0, dtype=dtype, device=device)


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
    totals: list[torch.Tensor] = []
    kind: NormKind | None = None
    for tensor, part in zip(tensors, parts, strict=True):
        if part.numel():
            value = next(norms)
        elif tensor.numel():
            value = norm_of_nothing(order, part.dtype, part.device)
        else:
            value = torch.linalg.vector_norm(part, order)  # or torch's error: there is none
        cut = tensor._cut if isinstance(tensor, ShardTensorBase) else None
        axes = () if cut is None else cut.axes
        if cut is not None and axes:
            if kind is None or kind.axes is not axes or kind.comm is not cut.comm:
                kind = NormKind.of(order, cut)
            value = LazyNorm.of(value, kind)
        totals.append(value)
    return totals


def _warn_of_plain(tensors: Sequence[torch.Tensor]) -> None:
    """Warn of plain gradients among sharded ones, as each rank has others."""
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
    if REDUCTIONS[name] == "sum":
        if name == "mean" and not (local.is_floating_point() or local.is_complex()):
            return _tensor(call.func(local))  # torch's error
        partial = local.sum() / tensor.numel() if name == "mean" else _tensor(call.func(local))
        return _sum(partial, cut)
    if name == "prod":
        partial = _tensor(call.func(local))
        for axis in cut.axes:
            partial = cut.comm.gather_rows(partial, axis, GATHER_SITE).prod(dim=0)
        return partial
    is_max = REDUCTIONS[name] == "max"
    if tensor.numel() and not local.numel() and name not in ("all", "any"):
        local = local.new_full((1,), _lowest(local.dtype) if is_max else _highest(local.dtype))
    extreme = _tensor(call.func(local))
    sent = extreme.byte() if extreme.dtype == torch.bool else extreme
    for axis in cut.axes:
        rows = cut.comm.gather_rows(sent, axis, GATHER_SITE)
        sent = rows.amax(dim=0) if is_max else rows.amin(dim=0)
    return sent.to(extreme.dtype)


def _highest(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _lowest(dtype: torch.dtype) -> float | int:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


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
