"""One parameter of a unit: its sharded form, its full form, and its gradient.

`forms.Form` defines its sharded form in the model, `encodings.Encoding` its gather.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import StateError
from shardwise.layout.units import ParamUse
from shardwise.tensor.cut import Cut
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.encodings import AS_IT_LIES, AlongDim, Encoding
from shardwise.unit.forms import Form
from shardwise.unit.grad_hooks import GradHooks
from shardwise.unit.partial import PartialGrad
from shardwise.unit.states import GradState
from shardwise.unit.storage import Storage

_SUMS = "_shardwise_sums"  # on a leaf: the parameter that sums its gradients as they arrive


class Scheduler(Protocol):
    """The engine's interface for parameters: operations on more than one unit."""

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the step follows the current micro-batch."""

    def finish_reductions(self, unit: Any = None) -> None:
        """Complete the reductions in flight up to one unit's, or all."""

    def use_outside(self, unit: Any) -> None:
        """Unshard a unit until backward ends, for a use of its parameter outside its module."""

    def is_running(self) -> bool:
        """Tell whether a forward pass is running."""

    def watch_grad(self, unit: Any, leaf: torch.Tensor) -> None:
        """Install a callback for when autograd has written a full parameter's gradient."""


class ShardedParam:
    """A parameter in its ``sharded`` form and its ``full`` form, which is autograd's leaf.

    ``mean`` is the reduced gradient if the form asks the unit for it. ``partial`` is the sum of
    unreduced gradients that autograd does not keep in the leaf. The cut is along ``dim``.
    """

    def __init__(
        self,
        unit: Any,
        uses: tuple[ParamUse, ...],
        form: Form,
        shape: tuple[int, ...],
        requires_grad: bool,
        *,
        cut: Cut | None = None,
        dim: int = 0,
    ) -> None:
        self.name = uses[0].name
        self.unit = unit
        self.uses = uses
        self.form: Any = form
        self.shape = shape
        self.requires_grad = requires_grad
        self.cut: Any = cut  # None if the cut is not a range of elements
        self.dim = dim
        self.encoding: Encoding = AlongDim(dim, shape) if dim else AS_IT_LIES
        self.storage: Any = None  # None if its elements lie in no storage
        self.index = 0
        self.sharded: Any = None
        self.full: Any = None
        self.local: Any = None  # this rank's elements, as last laid out
        self.mean: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.leaves_scale = False  # see PartialGrad
        self.tie: Any = None  # with copies on other stages of a pipeline; see ties.py
        self.grad_hooks = GradHooks()
        self._watched = False

    # -- memory
    def lie_in(self, storage: Storage, index: int) -> None:
        """Put the sharded parameter's elements into ``storage`` as parameter ``index``."""
        self.storage, self.index = storage, index
        self.form.place(self, storage)
        self.local = self.sharded._local_tensor
        self._make_leaf(self.encoding.attach(storage.view(index), tuple(self.local.shape)))

    def lie_apart(self, encoding: Encoding) -> None:
        """Leave the sharded parameter in its memory, outside any storage."""
        self.storage, self.encoding, self.full = None, encoding, None
        self.local = self.sharded._local_tensor

    def _make_leaf(self, view: torch.Tensor) -> None:
        is_trained = self.sharded.requires_grad
        self.full = nn.Parameter(self.form.full(view), requires_grad=is_trained)
        self._watched = False
        self.watch()

    def watch(self) -> None:
        """Install the engine's callback for a written gradient, if the unit has an engine."""
        engine: Scheduler | None = self.unit.scheduler
        if engine is None or self._watched or self.full is None:
            return
        if self.full.requires_grad:
            engine.watch_grad(self.unit, self.full)
            self._watched = True

    def another_leaf(self) -> nn.Parameter:
        """Return another leaf of the same memory, whose gradients are summed as they arrive."""
        made = nn.Parameter(self.full.detach())
        vars(made)[_SUMS] = self
        self.unit.scheduler.watch_grad(self.unit, made)
        return made

    def read_through(self, leaf: nn.Parameter) -> None:
        """Make the layers, also those that run now, read this leaf of the same memory."""
        self.full = leaf
        if self.unit.shows_full:
            self.put(leaf)

    @torch.no_grad()
    def complete(self) -> None:
        """Make the full parameter whole after the gather; copy ``requires_grad`` to it."""
        made = self.encoding.finish(self)
        if made is not None:
            stride = torch.empty(self.shape, device="meta").stride()
            # A separate version counter: gathers may write into the leaf's memory.
            self._make_leaf(torch.as_strided(made.data, self.shape, stride, 0))
        if self.full.requires_grad != self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)
            self.watch()

    @property
    def padded_size(self) -> torch.Size:
        """The shape of the largest rank's part."""
        num_ranks = self.unit.comm.axes.shard.size
        sizes = enumerate(self.shape)
        return torch.Size(-(-s // num_ranks) if d == self.dim else s for d, s in sizes)

    def keep_notes(self, notes: Mapping[str, Any]) -> None:
        """Copy the user's attributes of the original parameter."""
        ours = ("_cut", "_owner", "_is_param", "_local_tensor", "_spec")
        for name, value in notes.items():
            if name not in ours:
                vars(self.sharded).setdefault(name, value)

    def put(self, param: Any) -> None:
        """Put a parameter into every module that uses this one."""
        for use in self.uses:
            if type(use.module).__setattr__ is nn.Module.__setattr__:
                use.module._parameters[use.attribute] = param
            else:
                setattr(use.module, use.attribute, param)

    # -- the interface of ShardTensor's Owner
    def read_grad(self) -> torch.Tensor | None:
        """Finish the gradient's reduction and return the mean, or a `PartialGrad`."""
        state = self.unit.grad_state
        if state is GradState.REDUCING:
            self._finish_reduction()
        if self.unit.grad_state is GradState.PARTIAL and (self.has_partial or self.is_deferred):
            return PartialGrad.of(self)
        return self.mean

    def write_grad(self, value: torch.Tensor | None) -> None:
        """Replace the gradient; None drops it. A full tensor is cut."""
        state = self.unit.grad_state
        if state is GradState.EMPTY and value is None:
            return
        if state is GradState.REDUCING:
            self._finish_reduction()
        if self.unit.grad_state is GradState.PARTIAL:
            self.forget_partial()
        if value is None:
            self.mean = None
            self.unit.forget_grads_if_none()
            return
        if not isinstance(value, ShardTensor):
            value = ShardTensor.wrap(self.cut.slice_of(value).clone(), self.cut)
        if not value._cut.matches(self.cut) or value.dtype != self.sharded.dtype:
            raise StateError(
                f"gradient of '{self.name}': expected {self.cut.shape} {self.sharded.dtype}, got "
                f"{tuple(value.shape)} {value.dtype}"
            )
        self.mean = value
        self.unit.enter_grad_state(GradState.REDUCED)

    def _finish_reduction(self) -> None:
        self.unit.scheduler.finish_reductions(self.unit)

    def use_full(self) -> torch.Tensor:
        """Return the full parameter for a use outside its module."""
        self.unit.scheduler.use_outside(self.unit)
        found: torch.Tensor = self.full
        return found

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is running."""
        return bool(self.unit.scheduler.is_running())

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""
        if self.full is not None:
            self.full.requires_grad_(requires_grad)
            self.watch()

    def add_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter after a pass that gave it a reduced gradient."""
        return self.grad_hooks.add(hook, self.sharded if self.full is None else self.full)

    # -- the interface for checkpoints and contexts
    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, as far as reductions are finished."""
        return self.form.grad_of(self)

    @property
    def is_trained(self) -> bool:
        """Tell whether the parameter gets gradients."""
        of = self.full if self.form.asks_unit and self.full is not None else self.sharded
        return bool(of.requires_grad)

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of sums of gradients; None means the gradients' dtype."""
        asked: torch.dtype | None = self.unit.precision.reduce_dtype
        if asked is None and self.unit.sums.in_param_dtype:
            asked = self.sharded.dtype
        return asked

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of sums of unreduced gradients: `reduce_dtype`, or the sharded one's."""
        return self.reduce_dtype or self.sharded.dtype

    # -- unreduced gradients
    @property
    def has_partial(self) -> bool:
        """Tell whether this rank has an unreduced gradient of this parameter."""
        return self.partial is not None or (self.full is not None and self.full.grad is not None)

    @property
    def keeps_grad(self) -> bool:
        """Tell whether the unit holds a gradient, reduced or not."""
        return self.mean is not None or self.has_partial or self.is_deferred

    @property
    def is_deferred(self) -> bool:
        """Tell whether a gradient on any rank awaits its sum over replicas."""
        kept = None if self.storage is None else self.storage.unreduced
        return kept is not None and self in kept.params

    @property
    def gets_mean(self) -> bool:
        """Tell whether a reduction gives a mean, also if frozen after a gradient in the window."""
        return self.full.requires_grad or self.is_deferred

    def drop_partial(self) -> None:
        """Drop the unreduced gradient and update the unit's state."""
        self.forget_partial()
        self.unit.forget_grads_if_none()

    def forget_partial(self) -> None:
        """Drop the unreduced gradient; the caller updates the unit's state."""
        self.partial, self.leaves_scale = None, False
        if self.full is not None:
            self.full.grad = None
        if self.is_deferred:
            begin = self.storage.place_in_shards(self.index)
            part = slice(begin, begin + self.cut.hi - self.cut.lo)
            self.storage.unreduced.drop(self, part)
            if not self.storage.unreduced.params:
                self.storage.unreduced = None

    def keep_partial(self, leaf: torch.Tensor | None = None) -> None:
        """Add the micro-batch's gradient, or another leaf's, to the unreduced sum."""
        leaf = self.full if leaf is None else leaf
        grad = None if leaf is None else leaf.grad
        dtype = self.reduce_dtype
        if leaf is None or grad is None or (self.partial is None and dtype in (None, grad.dtype)):
            return
        leaf.grad = None
        self.partial = grad.to(dtype) if self.partial is None else self.partial.add_(grad)

    def take_partial(self) -> torch.Tensor | None:
        """Return the unreduced gradient as a strided local tensor, and drop it."""
        if self.full is None:
            return None
        grad, self.full.grad = self.full.grad, None
        partial, self.partial = self.partial, None
        self.leaves_scale = False
        if partial is not None:
            grad = partial if grad is None else partial.add_(grad)
        if grad is None:
            return None
        grad = self.form.full_grad(grad)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        found: torch.Tensor = grad
        return found


def sum_as_they_come(leaf: torch.Tensor) -> None:
    """Add a leaf's gradient to its parameter's unreduced sum, if it is `another_leaf`."""
    param: ShardedParam | None = vars(leaf).get(_SUMS)
    if param is not None:
        param.keep_partial(leaf)
