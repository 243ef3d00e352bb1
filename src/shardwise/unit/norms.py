"""Norms of sharded tensors, reduced over ranks once, when the number is needed.

``torch.nn.utils.clip_grad_norm_`` takes the norm of every gradient and then the norm of those
norms. Reduced one by one that is a collective per parameter; a `LazyNorm` stays this rank's part
until something needs its value, and survives the ``stack`` in between, so it is one collective.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.collectives import Comm
from shardwise.comm.pending import Site
from shardwise.errors import ShardError

_SITE = Site("gather", "(norm)", 0)
_METADATA = frozenset(
    {"__get__", "dim", "size", "numel", "ndimension", "stride", "is_floating_point"}
)


@dataclass(frozen=True)
class NormKind:
    """What has to agree for two partial norms to be stacked: the order and the ranks."""

    order: float
    comm: Comm

    def combine(self, partial: torch.Tensor) -> torch.Tensor:
        """Complete partial norms over the shard axis, elementwise."""
        axis = self.comm.axes.shard
        if self.order in (float("inf"), float("-inf")):
            sign = 1 if self.order > 0 else -1
            return self.comm.max(partial * sign, axis, _SITE) * sign
        if self.order == 0:
            return self.comm.sum_in_rank_order(partial, axis, _SITE)
        powers = partial.double().pow(self.order)
        total = self.comm.sum_in_rank_order(powers, axis, _SITE)
        return total.pow(1.0 / self.order).to(partial.dtype)


class LazyNorm(torch.Tensor):
    """A norm (or a vector of norms) of which this rank knows only its own part.

    **Cost** one collective over the shard axis when a value is asked for.
    """

    _kind: NormKind
    _partial: torch.Tensor

    @classmethod
    def of(cls, partial: torch.Tensor, kind: NormKind) -> "LazyNorm":
        """Wrap this rank's part."""
        lazy: LazyNorm = partial.as_subclass(cls)
        lazy._kind = kind
        lazy._partial = partial
        return lazy

    def resolve(self) -> torch.Tensor:
        """Return the norm over all ranks as a plain tensor."""
        return self._kind.combine(self._partial)

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
        if name == "to" and not kwargs and args[1:] == (args[0]._partial.device,):
            return args[0]
        if name == "stack" and len(args) == 1 and not kwargs:
            lazies = [t for t in args[0] if isinstance(t, LazyNorm)]
            if len(lazies) == len(args[0]) and len({t._kind for t in lazies}) == 1:
                return cls.of(torch.stack([t._partial for t in lazies]), lazies[0]._kind)
        if name in ("vector_norm", "linalg_vector_norm") and _is_total(args, kwargs):
            lazy = args[0]
            return lazy._kind.combine(torch.linalg.vector_norm(lazy._partial, *args[1:], **kwargs))
        return func(*_resolved(args), **{k: _resolved(v) for k, v in kwargs.items()})


def _is_total(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
    extra = set(kwargs) - {"ord"}
    return (
        isinstance(args[0], LazyNorm)
        and args[0]._kind.order == order
        and not extra
        and len(args) < 3
    )


def _resolved(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.resolve()
    if isinstance(value, tuple | list):
        return type(value)(_resolved(v) for v in value)
    return value


def local_norm(local: torch.Tensor, order: float, kind: NormKind) -> torch.Tensor:
    """Return the lazy norm of a tensor of which ``local`` is this rank's part."""
    if not isinstance(order, int | float):
        raise ShardError(
            f"norm of order {order!r}: a sharded tensor has p-norms of its elements only; "
            "use full_tensor()"
        )
    if local.numel() == 0:
        start = float("inf") if order == float("-inf") else 0.0
        partial = torch.full((), start, dtype=local.dtype, device=local.device)
    else:
        partial = torch.linalg.vector_norm(local, order)
    return LazyNorm.of(partial, kind)
