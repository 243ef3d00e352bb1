"""The gradient of one parameter: this rank's unreduced sum, the reduced mean, and the hooks."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ConfigError, StateError
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.partial import PartialGrad, Unreduced
from shardwise.unit.states import GradState

if TYPE_CHECKING:
    from shardwise.unit.param import ShardedParam
    from shardwise.unit.unit import Unit

Hook = Callable[[Any], None]


class Gradient:
    """The gradient of one parameter, reduced or not.

    - ``mean``: this rank's slice of the reduced gradient, under `shard()`. Under FSDP2's contract
      the slice is in ``grad`` of the sharded parameter instead.
    - ``partial``: this rank's sum of unreduced gradients [full shape], without the one that
      autograd keeps in the leaf. It lives until a reduction takes it.
    - ``ignores_scale``: see `PartialGrad`.
    """

    def __init__(self, param: "ShardedParam") -> None:
        self.param = param
        self.mean: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.ignores_scale = False
        self.hooks = GradHooks()

    # -- the interface of ShardTensor's Owner
    def read(self) -> torch.Tensor | None:
        """Finish the reduction and return the mean, or a `PartialGrad`."""
        unit = self.param.unit
        if unit.grads.state is GradState.REDUCING:
            self.param.engine.finish_reductions(unit)
        if unit.grads.state is GradState.PARTIAL and (self.has_partial or self.is_deferred):
            return PartialGrad.of(self)
        return self.mean

    def write(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it. A full tensor is sliced."""
        param, unit = self.param, self.param.unit
        if unit.grads.state is GradState.EMPTY and value is None:
            return
        if unit.grads.state is GradState.REDUCING:
            param.engine.finish_reductions(unit)
        if unit.grads.state is GradState.PARTIAL:
            self.clear_partial()
        if value is None:
            self.mean = None
            unit.grads.enter_empty_if_none()
            return
        cut, dtype = param.cut, param.sharded.dtype
        if not isinstance(value, ShardTensor):
            value = ShardTensor.wrap(cut.slice_of(value).clone(), cut)
        if not value._cut.matches(cut) or value.dtype != dtype:
            raise StateError(
                f"gradient of '{param.name}': expected {cut.shape} {dtype}, got "
                f"{tuple(value.shape)} {value.dtype}"
            )
        self.mean = value
        unit.grads.enter(GradState.REDUCED)

    def add_hook(self, hook: Hook) -> RemovableHandle:
        """Call ``hook`` with the parameter after a pass that gave it a reduced gradient."""
        param = self.param
        return self.hooks.add(hook, param.sharded if param.leaf is None else param.leaf)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of sums of gradients; None means the gradients' dtype."""
        return self.param.unit.reduce_dtype_of(self.param.sharded.dtype)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums of unreduced gradients: `reduce_dtype`, or the slices' dtype."""
        return self.reduce_dtype or self.param.sharded.dtype

    # -- unreduced gradients
    @property
    def has_partial(self) -> bool:
        """Tell whether this rank has an unreduced gradient of this parameter."""
        leaf = self.param.leaf
        return self.partial is not None or (leaf is not None and leaf.grad is not None)

    @property
    def exists(self) -> bool:
        """Tell whether the parameter has a gradient, reduced or not."""
        return self.mean is not None or self.has_partial or self.is_deferred

    @property
    def is_deferred(self) -> bool:
        """Tell whether a gradient on any rank awaits its sum over replicas."""
        return self._deferred is not None

    @property
    def _deferred(self) -> Unreduced | None:
        """The window's sums over shards that contain this parameter's gradient."""
        unreduced = self.param.storage.unreduced if self.param.has_storage else None
        if unreduced is None or self.param not in unreduced.params:
            return None
        return unreduced

    @property
    def gets_mean(self) -> bool:
        """Tell whether a reduction gives a mean; also after the parameter was frozen."""
        return self.param.is_trained or self.is_deferred

    def drop_partial(self) -> None:
        """Drop the unreduced gradient and update the unit's state."""
        self.clear_partial()
        self.param.unit.grads.enter_empty_if_none()

    def clear_partial(self) -> None:
        """Drop the unreduced gradient; the caller updates the unit's state."""
        param = self.param
        deferred = self._deferred
        self.partial = None
        self.ignores_scale = False
        if param.leaf is not None:
            param.leaf.grad = None
        if deferred is not None:
            begin = param.storage.shard_offset_of(param.index)
            deferred.drop(param, slice(begin, begin + param.cut.hi - param.cut.lo))
            if not deferred.params:
                param.storage.unreduced = None

    def accumulate_partial(self, leaf: torch.Tensor | None = None) -> None:
        """Add the micro-batch's gradient, or another leaf's, to the unreduced sum.

        The first gradient stays in the leaf, where autograd adds to it, if it has the sum's dtype.
        """
        leaf = self.param.leaf if leaf is None else leaf
        grad = None if leaf is None else leaf.grad
        if leaf is None or grad is None:
            return
        dtype = self.reduce_dtype
        if self.partial is None and dtype in (None, grad.dtype):
            return
        leaf.grad = None
        self.partial = grad.to(dtype) if self.partial is None else self.partial.add_(grad)

    def take_partial(self) -> torch.Tensor | None:
        """Return the unreduced gradient as a strided local tensor, and drop it."""
        leaf = self.param.leaf
        if leaf is None:
            return None
        grad, leaf.grad = leaf.grad, None
        partial, self.partial = self.partial, None
        self.ignores_scale = False
        if partial is not None:
            grad = partial if grad is None else partial.add_(grad)
        if grad is None:
            return None
        grad = self.param.form.full_grad(grad)
        if grad.layout is not torch.strided:
            return grad.to_dense()
        if type(grad) is not torch.Tensor and is_traceable_wrapper_subclass(grad):
            # A send of a tensor made of others would send each of them, and match one receive.
            return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
        return grad


class GradHooks:
    """The hooks of one parameter; ``is_due``: its gradient has changed since they ran."""

    def __init__(self) -> None:
        self.is_due = False
        self._hooks: dict[int, Hook] = OrderedDict()

    def __bool__(self) -> bool:
        """Tell whether the parameter has hooks."""
        return bool(self._hooks)

    def add(self, hook: Hook, leaf: torch.Tensor) -> RemovableHandle:
        """Register a hook. **Raises** RuntimeError for a frozen parameter, as torch does."""
        if not leaf.requires_grad:
            raise RuntimeError("cannot register a hook on a tensor that doesn't require gradient")
        self.is_due = False
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def adopt(self, plain: torch.Tensor) -> None:
        """Use the hooks of the original parameter; their handles stay valid."""
        if plain._post_accumulate_grad_hooks is not None:
            self._hooks = plain._post_accumulate_grad_hooks

    def run(self, param: Any) -> None:
        """Call the hooks if they are due."""
        is_due, self.is_due = self.is_due, False
        if is_due:
            for hook in list(self._hooks.values()):
                hook(param)


def check_hooks(name: str, param: torch.Tensor) -> None:
    """Refuse a parameter with hooks that sharding cannot keep. **Raises** ConfigError."""
    if param._backward_hooks:
        raise ConfigError(
            f"parameter '{name}' has a hook of register_hook(), which autograd calls with a "
            "gradient of this rank and micro-batch alone; the sharded parameter has only the mean. "
            "Remove it, and use register_post_accumulate_grad_hook(), which is called with the "
            "mean in p.grad, or change p.grad before optimizer.step()"
        )


def any_grad_hooks(units: "Iterable[Unit]") -> bool:
    """Tell whether any parameter has a hook."""
    return any(param.gradient.hooks for unit in units for param in unit.params)


@torch.no_grad()
def run_grad_hooks(units: "Iterable[Unit]") -> None:
    """Call the hooks of the parameters that got a gradient, in the order of the units."""
    for unit in units:
        for param in unit.params:
            if param.gradient.hooks and param.grad is not None:
                param.gradient.hooks.run(param.sharded)
