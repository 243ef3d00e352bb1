"""Norms of sharded tensors, reduced over ranks once, when the number is needed.

``torch.nn.utils.clip_grad_norm_`` takes the norm of every gradient and then the norm of those
norms. Reduced one by one that is a collective per parameter; a `LazyNorm` stays this rank's part
until something needs its value, and survives the ``stack`` in between, so it is one collective;
one for each mesh, where parameters lie on several.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import CollectiveId
from shardwise.errors import ShardError
from shardwise.mesh import Axis
from shardwise.tensor.cut import Cut

_SITE = CollectiveId("gather", "(norm)", 0)
_METADATA = frozenset(
    {"__get__", "dim", "size", "numel", "ndimension", "stride", "is_floating_point"}
)


@dataclass(frozen=True)
class NormKind:
    """What has to agree for partial norms to be completed in one: the order and the ranks.

    Without axes they are complete.
    """

    order: float
    comm: Comm | None = field(compare=False)  # units of one mesh may each have their own
    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, order: float, cut: Cut) -> "NormKind":
        """Return the kind of the norms of tensors that are cut so."""
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
    """A norm (or a vector of norms) of which this rank knows only its own part.

    Norms in a vector may be of several kinds, as parameters may lie on several meshes.

    **Cost** one collective over each axis of each kind when a value is asked for.
    """

    _kinds: tuple[NormKind, ...]  # of each norm
    _partial: torch.Tensor

    @classmethod
    def of(cls, partial: torch.Tensor, *kinds: NormKind) -> "LazyNorm":
        """Wrap this rank's part."""
        lazy: LazyNorm = partial.as_subclass(cls)
        lazy._kinds = kinds
        lazy._partial = partial
        return lazy

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Stay lazy where nothing changes, as when ``get_total_norm`` moves every norm."""
        if not kwargs and args == (self._partial.device,):
            return self
        return self.resolve().to(*args, **kwargs)

    def resolve(self) -> torch.Tensor:
        """Return the norms over all ranks as a plain tensor."""
        total = self._partial.clone()
        for kind, places in self._by_kind():
            total.view(-1)[places] = kind.combine(self._partial.reshape(-1)[places])
        return total

    def total(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the norm of the norms; each kind is put together before it is completed."""
        flat = self._partial.reshape(-1)
        if self._kinds[0].order == 0:  # how many are not 0, which no rank's part alone tells
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
        if all(kind.axes is first.axes for kind in self._kinds):  # as a rule; hashing takes longer
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
        """Stay lazy through what ``get_total_norm`` does; resolve for anything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "stack" and len(args) == 1 and not kwargs:
            stacked = _stacked(args[0])
            if stacked is not None:
                return stacked
        if name in ("vector_norm", "linalg_vector_norm") and _is_total(args, kwargs):
            return args[0].total(*args[1:], **kwargs)
        return func(*_resolved(args), **{k: _resolved(v) for k, v in kwargs.items()})


def _stacked(values: Sequence[torch.Tensor]) -> LazyNorm | None:
    """Stack single norms of one order; plain ones are complete. None where there are others."""
    order = next(v._kinds[0].order for v in values if isinstance(v, LazyNorm))
    complete = NormKind(order, None, ())
    kinds: list[NormKind] = []
    partials: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, LazyNorm):
            kind, partial = value._kinds[0], value._partial
        elif type(value) is torch.Tensor:
            kind, partial = complete, value
        else:
            return None
        if partial.dim() or kind.order != order:
            return None
        kinds.append(kind)
        partials.append(partial)
    return LazyNorm.of(torch.stack(partials), *kinds)


def _is_total(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
    extra = set(kwargs) - {"ord"}
    return (
        isinstance(args[0], LazyNorm)
        and args[0]._kinds[0].order == order
        and not extra
        and len(args) < 3
    )


def _resolved(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.resolve()
    if isinstance(value, tuple | list):
        return type(value)(_resolved(v) for v in value)
    return value


def check_order(order: object) -> None:
    """Raise ShardError for the order of a norm that is not of the elements alone."""
    if not isinstance(order, int | float):
        raise ShardError(
            f"norm of order {order!r}: a sharded tensor has p-norms of its elements only; "
            "use full_tensor()"
        )


def norm_of_nothing(local: torch.Tensor, order: float) -> torch.Tensor:
    """Return the part of a norm that a rank without elements adds, which changes nothing."""
    start = float("inf") if order == float("-inf") else 0.0
    return torch.full((), start, dtype=local.dtype, device=local.device)
