"""Gradients inside an accumulation window: unreduced sums, and the value of ``p.grad``."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from shardwise.errors import StateError
from shardwise.tensor.operations import FACTS


@dataclass
class Unreduced:
    """Sums of a window's gradients over shards, to be summed over replicas later.

    - ``sums``: this rank's slices of the sums, flat, in the order of the storage [S].
    - ``params``: the parameters whose gradients are in ``sums``.
    - ``used``: those of ``params`` that had a gradient on this rank.
    """

    sums: torch.Tensor
    params: set[Hashable]
    used: set[Hashable]

    def drop(self, param: Hashable, part: slice) -> None:
        """Zero a parameter's part and remove the parameter."""
        self.sums[part].zero_()
        self.params.discard(param)
        self.used.discard(param)


class Holder(Protocol):
    """Interface of the `Gradient` that a `PartialGrad` stands for."""

    param: Any
    ignores_scale: bool

    def drop_partial(self) -> None:
        """Drop the unreduced gradient."""


class PartialGrad(torch.Tensor):
    """The value of ``p.grad`` inside an accumulation window: a gradient without a mean yet.

    Its metadata can be read and it can be dropped (``zero_grad``); other operations raise. A
    pipeline's schedule inside a window may divide it once: with ``ignores_scale`` the division has
    no effect, because the last schedule divides the whole window.
    """

    _holder: Holder

    def __repr__(self) -> str:  # type: ignore[override]
        """Show the shape; there is no value yet."""
        return f"PartialGrad(shape={tuple(self.shape)}, dtype={self.dtype}, not reduced yet)"

    def full_tensor(self) -> NoReturn:
        """Refuse: there is no mean to gather yet."""
        raise _not_reduced("full_tensor", [self._holder])

    def to_local(self) -> NoReturn:
        """Refuse: there is no mean to slice yet."""
        raise _not_reduced("to_local", [self._holder])

    @classmethod
    def of(cls, holder: Holder) -> "PartialGrad":
        """Make the stand-in for an unreduced gradient; it has one element of memory."""
        sharded = holder.param.sharded
        empty = torch.empty((), dtype=sharded.dtype, device=sharded.device)
        partial: PartialGrad = empty.expand(holder.param.cut.shape).as_subclass(cls)
        partial._holder = holder
        return partial

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Allow dropping the gradient; refuse to read it."""
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
        if name in FACTS or name == "requires_grad_":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name == "detach_":
            return args[0]
        if name in ("zero_", "_foreach_zero_"):
            for grad in args[0] if name == "_foreach_zero_" else args[:1]:
                if isinstance(grad, PartialGrad):
                    grad._holder.drop_partial()
            return None
        if name == "div_" and isinstance(args[0], PartialGrad) and args[0]._holder.ignores_scale:
            args[0]._holder.ignores_scale = False
            return args[0]
        raise _not_reduced(name, _holders((*args, *(kwargs or {}).values())))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> NoReturn:
        """Refuse calls that reach ATen without ``__torch_function__``, as ``torch.tensor``."""
        raise _not_reduced(str(func), _holders((*args, *(kwargs or {}).values())))


def _not_reduced(name: str, holders: Sequence[Holder]) -> StateError:
    param = f"'{holders[0].param.name}'" if holders else "a parameter"
    return StateError(
        f"{name}: the gradient of {param} is not reduced yet, because "
        "the accumulation window is still open. Run the window's last micro-batch under "
        "`shardwise.accumulate(model, last=True)` before clipping or stepping"
    )


def _holders(args: tuple[object, ...]) -> list[Holder]:
    """Return the holders of the partial gradients among arguments, also in lists."""
    values: list[object] = []
    for arg in args:
        if isinstance(arg, list | tuple):
            values += arg
        else:
            values.append(arg)
    return [value._holder for value in values if isinstance(value, PartialGrad)]
