"""ShardTensor: what ``model.parameters()`` gives between steps.

Note [What a ShardTensor answers]
It has the parameter's global shape and dtype, and this rank's elements. An operation on it is
one of:

- elementwise (optimizers, EMA, clipping): run on the elements at hand, nothing sent;
- a reduction or norm of the whole tensor: completed over the ranks, so every rank has the answer;
- an in-place draw (``nn.init``): drawn whole on every rank, each keeps its slice;
- anything else on a *parameter*: the full parameter takes its place, so a parameter used outside
  its module (weight decay in the loss, tied projections) is right, in autograd too;
- anything else on other ShardTensors (gradients, optimizer state): a ShardError with the remedy.

So nothing returns this rank's part as if it were the whole.

Note [Why DTensor's dispatch is bypassed]
DTensor derives placements for every argument of every call; for a fused AdamW on a few hundred
parameters that costs 5 times the step on plain tensors. All ShardTensors of an elementwise call
are cut alike, so `__torch_function__` hands the local tensors straight to the kernel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as _torch_optimizer
from torch.utils import _foreach_utils

from shardwise.errors import ShardError
from shardwise.unit.cut import GATHER_SITE, Cut
from shardwise.unit.norms import NormKind, local_norm
from shardwise.unit.operations import (
    FACTORIES,
    GRAD_FREE,
    METADATA,
    NORMS,
    RANDOM,
    REDUCTIONS,
    WHOLE_PROPERTIES,
    is_elementwise,
)


class Owner(Protocol):
    """What a parameter's ShardTensor asks of the unit that owns it."""

    name: str
    param: Any

    def read_grad(self) -> torch.Tensor | None:
        """Return the reduced gradient, finishing reductions that are under way."""

    def write_grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it, reduced or not."""

    def whole(self) -> torch.Tensor:
        """Return the full parameter, the one that autograd knows."""

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is under way."""

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""


class ShardTensor(DTensor):
    """This rank's elements of a tensor that is cut over the shard axis.

    A DTensor: with the ``rows`` layout its placement is ``Shard(0)`` (``Replicate()`` at stage 0),
    with ``flat`` a ragged one. See Note [What a ShardTensor answers].
    """

    _local_tensor: torch.Tensor
    _cut: Cut
    _owner: Owner | None

    @classmethod
    def wrap(
        cls, local: torch.Tensor, cut: Cut, owner: Owner | None = None, requires_grad: bool = False
    ) -> "ShardTensor":
        """Make a ShardTensor of ``local`` (shape ``cut.local_shape``), without a copy."""
        spec = cut.spec(local.dtype)
        made: ShardTensor = DTensor.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[assignment]
        made._cut = cut
        made._owner = owner
        return made

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return this rank's elements, sharing memory; no autograd through this."""
        return self._local_tensor.detach()

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the whole tensor as an ordinary one. Every rank of the shard axis must call it.

        **Cost** one all-gather of this tensor, and its full size in memory.
        """
        return self._cut.gather(self._local_tensor)

    def redistribute(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: a ShardTensor's placement is its unit's."""
        raise ShardError(
            "redistribute: a ShardTensor stays where its unit puts it; use full_tensor()"
        )

    @property
    def grad(self) -> torch.Tensor | None:
        """This rank's slice of the mean gradient; finishes reductions that are under way."""
        owner = self._owner
        if owner is None or owner.param is not self:
            return self.__dict__.get("_plain_grad")
        return owner.read_grad()

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        owner = self._owner
        if owner is None or owner.param is not self:
            self.__dict__["_plain_grad"] = value
        else:
            owner.write_grad(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __repr__(self) -> str:  # type: ignore[override]
        """Show what this rank has; sends nothing."""
        cut = self._cut
        name = f"'{self._owner.name}', " if self._owner is not None else ""
        return (
            f"ShardTensor({name}shape={cut.shape}, dtype={self._local_tensor.dtype}, "
            f"elements [{cut.lo}, {cut.hi}) here: {self._local_tensor})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardTensor":
        """Copy this rank's elements into a ShardTensor that no unit owns (e.g. for EMA)."""
        copied = ShardTensor.wrap(self._local_tensor.detach().clone(), self._cut)
        if isinstance(self, nn.Parameter):
            copied.requires_grad_(self.requires_grad)
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a pickled slice would come back as if it were a parameter."""
        raise ShardError(
            "a ShardTensor holds this rank's slice only and cannot be pickled; pickle "
            "t.full_tensor(), or the state_dict() inside `with shardwise.gathered(model):`"
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer as Note [What a ShardTensor answers] says."""
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__  # type: ignore[attr-defined]
            if name not in WHOLE_PROPERTIES:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        elif name == "__set__":
            return _set_property(func, args)
        elif name in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        wants_grad = torch.is_grad_enabled() and name not in GRAD_FREE and not _is_in_place(name)
        if wants_grad and any(t.requires_grad and t._owner for t in _shards(args, kwargs)):
            return func(*_whole(args), **{k: _whole(v) for k, v in kwargs.items()})
        return _answer(func, name, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Answer what reaches ATen by itself (``detach``, ``.data``, copies)."""
        return _answer(func, func.overloadpacket.__name__, args, kwargs or {})


# torch.optim and clip_grad take their foreach paths only for types they know; DTensor registers
# itself in the same lists (torch/distributed/tensor/__init__.py).
for _types in (_torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    if ShardTensor not in _types:
        _types.append(ShardTensor)


def _shards(args: Any, kwargs: Mapping[str, Any]) -> list[ShardTensor]:
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, ShardTensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(v for v in value if isinstance(v, ShardTensor))
    return found


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not (name.startswith("__") and not name.startswith("__i"))


def _whole(value: Any) -> Any:
    """Put full tensors in the place of ShardTensors: autograd's own for parameters."""
    if isinstance(value, ShardTensor):
        owner = value._owner
        if owner is None:
            raise _refusal("this operation", [value])
        return owner.whole() if torch.is_grad_enabled() or owner.in_use() else value.full_tensor()
    if isinstance(value, list | tuple) and any(isinstance(v, ShardTensor) for v in value):
        return [_whole(v) for v in value]
    return value


def _refusal(name: str, tensors: Sequence[ShardTensor]) -> ShardError:
    owner = tensors[0]._owner
    what = (
        f"parameter '{owner.name}'" if owner else f"a ShardTensor of shape {tensors[0]._cut.shape}"
    )
    return ShardError(
        f"{name} on {what}: each rank holds only a slice, so the result would be this rank's, not "
        "the whole tensor's. Use t.full_tensor(), or `with shardwise.gathered(...)` to change it"
    )


def _set_property(func: Any, args: tuple[Any, ...]) -> Any:
    """Assign ``requires_grad`` (the full parameter follows) or ``data`` (copied in place)."""
    name = func.__self__.__name__
    tensor, value = args
    if name == "data":
        if tensor._owner is not None and (
            value.shape != tensor.shape or value.dtype != tensor.dtype
        ):
            raise ShardError(
                f"parameter '{tensor._owner.name}' is {tuple(tensor.shape)} {tensor.dtype} and "
                f"was to become {tuple(value.shape)} {value.dtype}; change the model before "
                "shard(), and its dtype by shard(precision=...)"
            )
        with torch.no_grad():
            tensor.copy_(value)
        return None
    with torch._C.DisableTorchFunctionSubclass():
        func(*args)
    if name == "requires_grad" and tensor._owner is not None and tensor._owner.param is tensor:
        tensor._owner.set_requires_grad(bool(value))
    return None


def _answer(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    shards = _shards(args, kwargs)
    if name in ("detach", "alias"):
        made = shards[0]
        return ShardTensor.wrap(made._local_tensor.detach(), made._cut, made._owner)
    if name == "requires_grad_":
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.requires_grad_(*args, **kwargs)
        owner = shards[0]._owner
        if owner is not None and getattr(owner, "param", None) is shards[0]:
            owner.set_requires_grad(shards[0].requires_grad)
        return shards[0]
    if is_elementwise(name):
        return _run_local(func, name, args, kwargs, shards)
    if name in RANDOM:
        tensor = shards[0]
        full = torch.empty(tensor._cut.shape, dtype=tensor.dtype, device=tensor.device)
        tensor._local_tensor.copy_(tensor._cut.slice_of(func(full, *args[1:], **kwargs)))
        return tensor
    if name == "_foreach_norm":
        order = args[1] if len(args) > 1 else kwargs.get("ord", 2.0)
        return [_norm(t, order) for t in args[0]]
    if name in NORMS and (order := _order_of_total(args, kwargs)) is not None:
        return _norm(args[0], order)
    if name in REDUCTIONS and len(args) == 1 and not kwargs:
        return _reduce(func, name, shards[0])
    if name == "_amp_foreach_non_finite_check_and_unscale_":
        return _unscale(func, args)
    if name in FACTORIES:
        return _new(func, args, kwargs, shards[0])
    if all(t._cut.layout is None for t in shards):
        return func(*_locals(args), **{k: _locals(v) for k, v in kwargs.items()})
    if _is_in_place(name) or "out" in kwargs or any(t._owner is None for t in shards):
        raise _refusal(name, shards)
    return func(*_whole(args), **{k: _whole(v) for k, v in kwargs.items()})


def _locals(value: Any) -> Any:
    if isinstance(value, ShardTensor):
        return value._local_tensor
    if isinstance(value, list | tuple):
        return type(value)(_locals(v) for v in value)
    return value


def _run_local(
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    shards: Sequence[ShardTensor],
) -> Any:
    """Run an elementwise function on the local tensors; wrap what is new."""
    if name.startswith(("_foreach_", "_fused_")):
        leads: Sequence[Any] = args[0]
        result = func(
            *(_list_of_locals(a, leads, name) for a in args),
            **{k: _list_of_locals(v, leads, name) for k, v in kwargs.items()},
        )
        if name.startswith("_fused_"):
            _bump_versions(args)
        if isinstance(result, list | tuple) and not name.endswith("_"):
            return [_wrapped(r, t) for r, t in zip(result, leads, strict=True)]
        return args[0] if name.endswith("_") else result
    cut = shards[0]._cut
    if _is_in_place(name) and not isinstance(args[0], ShardTensor):
        raise _refusal(f"{name} into a plain tensor", shards)
    result = func(
        *(_operand(a, cut, name) for a in args),
        **{k: _operand(v, cut, name) for k, v in kwargs.items()},
    )
    if isinstance(args[0], ShardTensor) and result is args[0]._local_tensor:
        return args[0]
    if isinstance(result, torch.Tensor) and tuple(result.shape) == cut.local_shape:
        return kwargs["out"] if "out" in kwargs else ShardTensor.wrap(result, cut)
    return result


def _operand(value: Any, cut: Cut, name: str) -> Any:
    if isinstance(value, ShardTensor):
        if value._cut is not cut and not value._cut.matches(cut):
            raise ShardError(
                f"{name}: ShardTensors of shapes {cut.shape} and {value._cut.shape} are not cut "
                "alike, so their elements do not meet on one rank; use full_tensor()"
            )
        return value._local_tensor
    if isinstance(value, torch.Tensor):
        return value.reshape(()) if value.numel() == 1 else cut.slice_of(value)
    return value


def _list_of_locals(value: Any, leads: Sequence[Any], name: str) -> Any:
    """Return the local tensors of one list argument; other arguments pass."""
    if not isinstance(value, list | tuple):
        return value
    if value is leads or len(value) != len(leads):
        return [v._local_tensor if isinstance(v, ShardTensor) else v for v in value]
    found = []
    for item, lead in zip(value, leads, strict=True):
        if isinstance(lead, ShardTensor) and isinstance(item, torch.Tensor):
            if isinstance(item, ShardTensor) and item._cut is lead._cut:
                found.append(item._local_tensor)
            else:
                found.append(_operand(item, lead._cut, name))
        elif isinstance(item, ShardTensor):
            raise _refusal(f"{name} into a plain tensor", [item])
        else:
            found.append(item)
    return found


def _wrapped(result: Any, like: Any) -> Any:
    return ShardTensor.wrap(result, like._cut) if isinstance(like, ShardTensor) else result


def _bump_versions(args: tuple[Any, ...]) -> None:
    """Count a fused step as a change; torch's fused kernels do not bump version counters."""
    torch.autograd.graph.increment_version(
        [t._local_tensor for t in args[0] if isinstance(t, ShardTensor)]
    )


def _order_of_total(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float | None:
    """Return the order when the call is the norm of all elements, else None."""
    names = ("p", "ord")
    order = args[1] if len(args) > 1 else next((kwargs[n] for n in names if n in kwargs), 2.0)
    if len(args) > 2 or any(v is not None for k, v in kwargs.items() if k not in names):
        return None
    return 2.0 if order in (None, "fro") else order


def _norm(tensor: Any, order: float) -> torch.Tensor:
    if not isinstance(tensor, ShardTensor):
        return torch.linalg.vector_norm(tensor, order)
    if tensor._cut.layout is None:
        return torch.linalg.vector_norm(tensor._local_tensor, order)
    return local_norm(tensor._local_tensor, order, NormKind(float(order), tensor._cut.comm))


def _reduce(func: Any, name: str, tensor: ShardTensor) -> torch.Tensor:
    local, cut = tensor._local_tensor, tensor._cut
    if cut.layout is None:
        result: torch.Tensor = func(local)
        return result
    axis = cut.comm.axes.shard
    if REDUCTIONS[name] == "sum":
        partial = local.sum() / tensor.numel() if name == "mean" else func(local)
        return cut.comm.sum_in_rank_order(partial, axis, GATHER_SITE)
    sign = 1 if REDUCTIONS[name] == "max" else -1
    nothing = torch.full((), float("-inf"), dtype=torch.float64, device=local.device)
    extreme = func(local).double() * sign if local.numel() else nothing
    total = cut.comm.max(extreme, axis, GATHER_SITE) * sign
    return total.to(torch.bool if name in ("all", "any") else local.dtype)


def _unscale(func: Any, args: tuple[Any, ...]) -> None:
    """Unscale gradients; an overflow that one rank sees, every rank sees (torch.amp.GradScaler)."""
    tensors, found_inf, inv_scale = args
    func([_locals(t) for t in tensors], found_inf, inv_scale)
    first = next(t for t in tensors if isinstance(t, ShardTensor))
    for axis in first._cut.comm.axes.all:
        found_inf.copy_(first._cut.comm.max(found_inf, axis, GATHER_SITE))


def _new(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], like: ShardTensor) -> Any:
    size = args[1] if len(args) > 1 else kwargs.get("size")
    if isinstance(size, tuple | list) and tuple(size) == like._cut.shape:
        made = func(like._local_tensor, like._cut.local_shape, *args[2:], **kwargs)
        return ShardTensor.wrap(made, like._cut)
    return func(like._local_tensor, *args[1:], **kwargs)
