"""One parameter of a unit: what stands for it in the model, its full form, and its gradient.

How it looks in the model is its `forms.Form`, how it is gathered its `encodings.Encoding`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils.hooks import RemovableHandle

from shardwise.comm.packed import waited_for
from shardwise.errors import StateError
from shardwise.layout.units import ParamUse
from shardwise.tensor.cut import Cut, as_dtensor
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.unit.encodings import AS_IT_LIES, AlongDim, Encoding
from shardwise.unit.grad_hooks import GradHooks
from shardwise.unit.partial import PartialGrad
from shardwise.unit.states import GradState
from shardwise.unit.storage import Storage

if TYPE_CHECKING:
    from shardwise.unit.unit import Unit


class Form(Protocol):
    """How a parameter looks in the model; ``asks_unit``: its gradient is asked of the unit."""

    asks_unit: bool

    @property
    def outer(self) -> DTensorSpec | None:
        """How the parameter is placed on axes of another mesh, if it was a DTensor before."""

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Let what stands in the model have its elements in a storage."""

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a tensor that is cut as the parameter is, of which ``local`` is this rank's."""

    def is_alike(self, value: Any) -> bool:
        """Tell whether a tensor is cut as the parameter is."""

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return what the layers read, of the full parameter's memory."""

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return the memory of a full gradient."""

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the reduced gradient."""

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Give the parameter a mean of gradients, or add it to what is there."""


@dataclass(frozen=True)
class AsShardTensor:
    """A `ShardTensor`, cut as ``cut`` says."""

    cut: Cut
    asks_unit = True

    @property
    def outer(self) -> DTensorSpec | None:
        """How the parameter is placed on axes of another mesh, if it was a DTensor before."""
        return self.cut.outer

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Make the parameter."""
        local = storage.local(param.index, self.cut.local_shape)
        param.sharded = nn.Parameter(
            ShardTensor.wrap(local, self.cut, param), requires_grad=param.requires_grad
        )

    def place_apart(self, param: "ShardedParam", local: torch.Tensor) -> None:
        """Make the parameter of elements that lie in no storage."""
        made = ShardTensor.wrap(local, self.cut, param)
        param.sharded = nn.Parameter(made, requires_grad=param.requires_grad)

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a ShardTensor that no unit owns."""
        return ShardTensor.wrap(local, self.cut)

    def is_alike(self, value: Any) -> bool:
        """Compare the elements that every rank has."""
        return isinstance(value, ShardTensor) and value._cut.matches(self.cut)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor where the parameter was one."""
        return view if self.cut.outer is None else as_dtensor(view, self.cut.outer)

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return what this rank holds of a DTensor's gradient, placed as the parameter is."""
        found: torch.Tensor = grad
        return found if self.cut.outer is None else _local_grad(grad, self.cut.outer)

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return what the parameter keeps."""
        found: torch.Tensor | None = param.mean
        return found

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Keep the mean in the parameter, or add it to what is there, as autograd would."""
        param.grad_hooks.is_due = True
        if param.mean is None:
            param.mean = ShardTensor.wrap(mean, self.cut)
        else:
            if param.has_storage:
                param.storage.forget_grad_buffer()  # the sum lies elsewhere; do not keep two
            grad = param.mean
            (grad._local_tensor if isinstance(grad, ShardTensor) else grad).add_(mean)


@dataclass(frozen=True)
class AsDTensor:
    """A DTensor of torch, as ``spec`` says.

    ``full_spec``: the parameter was a DTensor before (tensor parallelism), and its full form is one
    too; gradients may be sums that are not complete over ``summed_dims`` of its mesh, which are
    data-parallel axes; ``outer`` is ``full_spec`` without these. ``identity`` tells tied parameters
    of two calls.
    """

    spec: DTensorSpec
    identity: object
    full_spec: DTensorSpec | None = None
    outer: DTensorSpec | None = None
    summed_dims: Sequence[int] = ()
    asks_unit = False

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Move the local tensor's elements into the storage."""
        local_shape = tuple(param.sharded._local_tensor.shape)
        shape = local_shape if param.dim == 0 else (1, torch.Size(local_shape).numel())
        place = storage.local_apart(param.index, shape).view(local_shape)
        place.copy_(param.sharded._local_tensor)
        param.sharded._local_tensor = place

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor of the same mesh and placements."""
        return as_dtensor(local, self.spec)

    def is_alike(self, value: Any) -> bool:
        """Compare mesh and placements."""
        meta = self.spec.tensor_meta
        if not isinstance(value, DTensor) or meta is None or value.shape != meta.shape:
            return False
        return (value.device_mesh, value.placements) == (self.spec.mesh, self.spec.placements)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor where the parameter was one."""
        return view if self.full_spec is None else as_dtensor(view, self.full_spec)

    def full_grad(self, grad: Any) -> torch.Tensor:
        """Return what this rank holds of a DTensor's gradient, placed as the parameter is."""
        found: torch.Tensor = grad
        if self.full_spec is None:
            return found
        return _local_grad(grad, self.full_spec, self.summed_dims)

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the attribute."""
        found: torch.Tensor | None = param.sharded.grad
        return found

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the attribute, or add to it; run the user's hooks."""
        held = param.sharded
        mean = mean.to(held.device)
        if held.grad is None:
            held.grad = as_dtensor(mean, held._spec)
        else:
            held.grad._local_tensor.add_(mean)
        hooks = getattr(held, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(held)


def _local_grad(grad: Any, spec: DTensorSpec, summed_dims: Sequence[int] = ()) -> torch.Tensor:
    """Return this rank's part of a DTensor's gradient, as ``spec`` places it.

    A sum over ``summed_dims`` of its mesh may stay incomplete: it is ours to complete.
    """
    grad = waited_for(grad)
    wanted = list(spec.placements)
    for dim in summed_dims:
        wanted[dim] = grad.placements[dim]
    if tuple(wanted) != tuple(grad.placements):
        grad = grad.redistribute(placements=wanted)
    found: torch.Tensor = grad._local_tensor
    return found


_SUMS = "_shardwise_sums"  # on a leaf: the parameter that sums its gradients as they come


class Scheduler(Protocol):
    """What a parameter asks of the engine: things that concern more than its own unit."""

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the step comes after the micro-batch under way."""

    def finish_reductions(self, unit: "Unit | None" = None) -> None:
        """Complete the reductions under way, those up to one unit's or all."""

    def use_outside(self, unit: "Unit") -> None:
        """Unshard a unit whose parameter is used outside its module, until backward ends."""

    def is_running(self) -> bool:
        """Tell whether a forward pass is under way."""

    def watch_grad(self, unit: "Unit", leaf: torch.Tensor) -> None:
        """Hear when autograd has written the gradient of a full parameter."""


class ShardedParam:
    """A parameter in its ``sharded`` form and its ``full`` one, which is autograd's leaf.

    ``mean`` is the reduced gradient where the form asks the unit for it, ``partial`` the sum of
    unreduced ones that autograd does not keep in the leaf. ``dim`` is the one it is cut along.
    """

    def __init__(
        self,
        unit: "Unit",
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
        self.form = form
        self.shape = shape
        self.requires_grad = requires_grad
        self._cut = cut
        self.dim = dim
        self.encoding: Encoding = AlongDim(dim, shape) if dim else AS_IT_LIES
        self._storage: Storage | None = None
        self.index = 0
        self.sharded: Any = None
        self.full: Any = None
        self.local: Any = None  # this rank's elements, as they were last laid out
        self.mean: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None
        self.leaves_scale = False  # see PartialGrad
        self.tie: Any = None  # with copies on other stages of a pipeline; see ties.py
        self.grad_hooks = GradHooks()
        self._watched = False

    @property
    def has_cut(self) -> bool:
        """Tell whether ranges of elements describe how the parameter is cut."""
        return self._cut is not None

    @property
    def cut(self) -> Cut:
        """How the parameter is cut, if it `has_cut`."""
        assert self._cut is not None, f"'{self.name}' is not cut by ranges of elements"
        return self._cut

    @cut.setter
    def cut(self, cut: Cut | None) -> None:
        self._cut = cut

    @property
    def has_storage(self) -> bool:
        """Tell whether the parameter's elements are in a storage of the unit."""
        return self._storage is not None

    @property
    def storage(self) -> Storage:
        """The storage, if the parameter `has_storage`."""
        assert self._storage is not None, f"'{self.name}' is in no storage"
        return self._storage

    def rests_in(self, storage: Storage) -> bool:
        """Tell whether the parameter's elements are in this storage."""
        return self._storage is storage

    @property
    def _engine(self) -> Scheduler:
        assert self.unit.scheduler is not None, f"'{self.name}': its unit has no engine yet"
        return self.unit.scheduler

    # -- memory
    def lie_in(self, storage: Storage, index: int) -> None:
        """Let the sharded parameter's elements lie in ``storage``, as its ``index``-th."""
        self._storage, self.index = storage, index
        self.form.place(self, storage)
        self.local = self.sharded._local_tensor
        self._make_leaf(self.encoding.attach(storage.view(index), tuple(self.local.shape)))

    def lie_apart(self, encoding: Encoding) -> None:
        """Let the sharded parameter stay where it is, in no storage, or in none yet."""
        self._storage, self.encoding, self.full = None, encoding, None
        self.local = self.sharded._local_tensor

    def _make_leaf(self, view: torch.Tensor) -> None:
        is_trained = self.sharded.requires_grad
        self.full = nn.Parameter(self.form.full(view), requires_grad=is_trained)
        self._watched = False
        self.watch()

    def watch(self) -> None:
        """Let the engine, if there is one, hear when autograd has written the gradient."""
        engine: Scheduler | None = self.unit.scheduler
        if engine is None or self._watched or self.full is None:
            return
        if self.full.requires_grad:
            engine.watch_grad(self.unit, self.full)
            self._watched = True

    def another_leaf(self) -> nn.Parameter:
        """Return another leaf of the same memory, whose gradients are summed as they come."""
        made = nn.Parameter(self.full.detach())
        vars(made)[_SUMS] = self
        self._engine.watch_grad(self.unit, made)
        return made

    def read_through(self, leaf: nn.Parameter) -> None:
        """Let the layers, and those that run now, read this leaf of the same memory."""
        self.full = leaf
        if self.unit.shows_full:
            self.put(leaf)

    @torch.no_grad()
    def complete(self) -> None:
        """Make the full parameter whole after the gather, and as trainable as the sharded one."""
        made = self.encoding.finish(self)
        if made is not None:
            stride = torch.empty(self.shape, device="meta").stride()
            # Of its own version: what was gathered may be its memory, and is written anew.
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
        """Take over what the user has noted on the parameter that this one stands for."""
        ours = ("_cut", "_owner", "_is_param", "_local_tensor", "_spec")
        for name, value in notes.items():
            if name not in ours:
                vars(self.sharded).setdefault(name, value)

    def put(self, param: nn.Parameter) -> None:
        """Put a parameter into every module that uses this one."""
        for use in self.uses:
            if type(use.module).__setattr__ is nn.Module.__setattr__:
                use.module._parameters[use.attribute] = param
            else:
                setattr(use.module, use.attribute, param)

    # -- what ShardTensor asks (sliced.Owner)
    def read_grad(self) -> torch.Tensor | None:
        """Return the reduced gradient, finishing its reduction; see `PartialGrad`."""
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
        self._engine.finish_reductions(self.unit)

    def use_full(self) -> torch.Tensor:
        """Return the full parameter for a use outside its module."""
        self._engine.use_outside(self.unit)
        found: torch.Tensor = self.full
        return found

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is under way."""
        return self._engine.is_running()

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""
        if self.full is not None:
            self.full.requires_grad_(requires_grad)
            self.watch()

    def add_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call ``hook`` with the parameter after a pass that gave it a reduced gradient."""
        return self.grad_hooks.add(hook, self.sharded if self.full is None else self.full)

    # -- what checkpoints and contexts ask
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
        """The dtype that gradients are summed in; None is that in which they come."""
        asked: torch.dtype | None = self.unit.precision.reduce_dtype
        if asked is None and self.unit.sums.in_param_dtype:
            asked = self.sharded.dtype
        return asked

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which unreduced gradients are summed that came on another way."""
        return self.reduce_dtype or self.sharded.dtype

    # -- gradients on their way
    @property
    def has_partial(self) -> bool:
        """Tell whether this rank has a gradient of this parameter that is not reduced."""
        return self.partial is not None or (self.full is not None and self.full.grad is not None)

    @property
    def keeps_grad(self) -> bool:
        """Tell whether the unit holds a gradient, reduced or not."""
        return self.mean is not None or self.has_partial or self.is_deferred

    @property
    def is_deferred(self) -> bool:
        """Tell whether a gradient, on whatever rank, waits for its sum over replicas."""
        kept = None if self._storage is None else self._storage.unreduced
        return kept is not None and self in kept.params

    @property
    def gets_mean(self) -> bool:
        """Tell whether a reduction gives the parameter a mean; one frozen in a window had some."""
        return self.full.requires_grad or self.is_deferred

    def drop_partial(self) -> None:
        """Forget the unreduced gradient."""
        self.forget_partial()
        self.unit.forget_grads_if_none()

    def forget_partial(self) -> None:
        """Forget the unreduced gradient; the unit's state is the caller's to change."""
        self.partial, self.leaves_scale = None, False
        if self.full is not None:
            self.full.grad = None
        kept = None if self._storage is None else self._storage.unreduced
        if kept is not None and self in kept.params:
            begin = self.storage.place_in_shards(self.index)
            kept.drop(self, slice(begin, begin + self.cut.hi - self.cut.lo))
            if not kept.params:
                self.storage.unreduced = None

    def keep_partial(self, leaf: torch.Tensor | None = None) -> None:
        """Add the micro-batch's gradient, or what another leaf has got, to the unreduced sum."""
        leaf = self.full if leaf is None else leaf
        grad = None if leaf is None else leaf.grad
        dtype = self.reduce_dtype
        if leaf is None or grad is None or (self.partial is None and dtype in (None, grad.dtype)):
            return
        leaf.grad = None
        self.partial = grad.to(dtype) if self.partial is None else self.partial.add_(grad)

    def take_partial(self) -> torch.Tensor | None:
        """Return the unreduced gradient, a strided tensor of this rank's memory, and forget it."""
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
    """Add what a leaf has got to its parameter's unreduced sum, if it is `another_leaf`."""
    param: ShardedParam | None = vars(leaf).get(_SUMS)
    if param is not None:
        param.keep_partial(leaf)
