"""One parameter of a unit: its sharded form, its full form, and its gradient.

A `Form` is the class of the sharded tensor in the model. An `encodings.Encoding` is how the
parameter is gathered. `shard()` uses `ShardTensorForm`: reading ``p.grad`` finishes the reduction.
`fully_shard` uses `DTensorForm`, as torch does: ``p.grad`` is an attribute, set when the reduction
is finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from shardwise.comm.torch_collectives import waited_for
from shardwise.errors import ShardError
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamUse
from shardwise.tensor.aliases import Aliases, Shared, SharedParam, SharedPlain, move_to_copy
from shardwise.tensor.cut import Cut, as_dtensor
from shardwise.tensor.shard_tensor import ShardTensor
from shardwise.tensor.tensor_base import owner_of_elements
from shardwise.unit.encodings import CONTIGUOUS, AlongDim, Encoding
from shardwise.unit.full_parameter import data_of, make_full, set_full_data
from shardwise.unit.gradient import Gradient
from shardwise.unit.storage import Storage

if TYPE_CHECKING:
    from shardwise.tensor.tensor_base import Sharded
    from shardwise.unit.unit import Unit


class Tie(Protocol):
    """The copies of a parameter on other stages of a pipeline; see `parallel.tying`."""

    name: str

    def counts(self, param: "ShardedParam") -> bool:
        """Tell whether this copy is the one to count where each parameter counts once."""


class Form(Protocol):
    """The class of the sharded tensor, and where its gradient is.

    ``finishes_reduction_on_read``: reading ``p.grad`` finishes the reduction in flight.
    """

    finishes_reduction_on_read: bool

    @property
    def outer(self) -> DTensorSpec | None:
        """The placement on another mesh, if the parameter was a DTensor before sharding."""

    def place_in_storage(self, param: "ShardedParam", storage: Storage) -> None:
        """Move this rank's elements of the parameter into a storage."""

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return a sharded tensor of ``local`` with the parameter's cut."""

    def has_same_cut(self, value: Any) -> bool:
        """Tell whether a tensor has the parameter's cut."""

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return the tensor that layers compute with, over the full parameter's memory."""

    def full_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return a full gradient as a plain tensor."""

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the reduced gradient."""

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the parameter's gradient to a mean, or add the mean to it."""


@dataclass(frozen=True)
class ShardTensorForm:
    """A `ShardTensor` with the cut ``cut``; ``is_trained``: it requires a gradient."""

    cut: Cut
    is_trained: bool
    finishes_reduction_on_read = True

    @property
    def outer(self) -> DTensorSpec | None:
        """The placement on another mesh, if the parameter was a DTensor before sharding."""
        return self.cut.outer

    def place_in_storage(self, param: "ShardedParam", storage: Storage) -> None:
        """Make the sharded parameter over the storage's memory."""
        local = storage.local(param.index, self.cut.local_shape)
        self.make_sharded(param, local)

    def make_sharded(self, param: "ShardedParam", local: torch.Tensor) -> None:
        """Make the sharded parameter of this rank's elements."""
        sharded = ShardTensor.wrap(local, self.cut, param)
        param.sharded = cast("Sharded", nn.Parameter(sharded, requires_grad=self.is_trained))

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return a ShardTensor that no unit owns."""
        return ShardTensor.wrap(local, self.cut)

    def has_same_cut(self, value: Any) -> bool:
        """Tell whether the tensor is a ShardTensor whose cut matches."""
        return isinstance(value, ShardTensor) and value._cut.matches(self.cut)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor if the parameter was one."""
        return view if self.cut.outer is None else as_dtensor(view, self.cut.outer)

    def full_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a DTensor's gradient, placed as the parameter is."""
        return grad if self.cut.outer is None else _local_grad(grad, self.cut.outer)

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the parameter's mean."""
        return param.gradient.mean

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the parameter's mean, or add to it, as autograd would."""
        param.gradient.hooks.is_due = True
        grad = param.gradient.mean
        if grad is None:
            param.gradient.mean = ShardTensor.wrap(mean, self.cut)
        else:
            if param.has_storage:
                # The sum is in other memory, so the buffer of this mean need not stay.
                param.storage.mean_memory.drop_kept()
            (grad._local_tensor if isinstance(grad, ShardTensor) else grad).add_(mean)


@dataclass(frozen=True)
class DTensorForm:
    """A DTensor of torch with ``spec``.

    ``full_spec`` is the spec of the full form if the parameter was a DTensor before sharding, of
    tensor parallelism. Its gradients may be partial sums over ``summed_dims`` of that mesh, which
    are data-parallel axes. ``outer`` is ``full_spec`` without these. ``identity`` is the same for
    two parameters if two calls of `fully_shard` tie them.
    """

    spec: DTensorSpec
    identity: object
    full_spec: DTensorSpec | None = None
    outer: DTensorSpec | None = None
    summed_dims: Sequence[int] = ()
    finishes_reduction_on_read = False

    def place_in_storage(self, param: "ShardedParam", storage: Storage) -> None:
        """Move the local tensor's elements into the storage."""
        local_shape = tuple(param.sharded._local_tensor.shape)
        shape = local_shape if param.dim == 0 else (1, torch.Size(local_shape).numel())
        local = storage.local_at_offset_zero(param.index, shape).view(local_shape)
        local.copy_(param.sharded._local_tensor)
        param.sharded._local_tensor = local

    def wrap(self, local: torch.Tensor) -> DTensor:
        """Return a DTensor of the same mesh and placements."""
        return as_dtensor(local, self.spec)

    def has_same_cut(self, value: Any) -> bool:
        """Tell whether the tensor is a DTensor of the same mesh, placements and shape."""
        meta = self.spec.tensor_meta
        if not isinstance(value, DTensor) or meta is None or value.shape != meta.shape:
            return False
        return (value.device_mesh, value.placements) == (self.spec.mesh, self.spec.placements)

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return a DTensor if the parameter was one."""
        return view if self.full_spec is None else as_dtensor(view, self.full_spec)

    def full_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a DTensor's gradient, placed as the parameter is."""
        if self.full_spec is None:
            return grad
        return _local_grad(grad, self.full_spec, self.summed_dims)

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the DTensor's ``grad``."""
        grad: torch.Tensor | None = param.sharded.grad
        return grad

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the DTensor's ``grad``, or add to it; run the user's hooks."""
        sharded = param.sharded
        mean = mean.to(sharded.device)
        if sharded.grad is None:
            sharded.grad = as_dtensor(mean, sharded._spec)
        else:
            local_of(sharded.grad).add_(mean)
        hooks = getattr(sharded, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(sharded)


def _local_grad(grad: Any, spec: DTensorSpec, summed_dims: Sequence[int] = ()) -> torch.Tensor:
    """Return the local tensor of a DTensor's gradient, redistributed as ``spec`` places it.

    A partial sum over ``summed_dims`` of its mesh stays partial; the reduction completes it.
    """
    grad = waited_for(grad)
    placements = list(spec.placements)
    for dim in summed_dims:
        placements[dim] = grad.placements[dim]
    if tuple(placements) != tuple(grad.placements):
        grad = grad.redistribute(placements=placements)
    local: torch.Tensor = grad._local_tensor
    return local


# The attribute of a `new_leaf`: the parameter to whose partial sum its gradient is added.
_PARAM_OF_LEAF = "_shardwise_sums"


class ParamEngine(Protocol):
    """Interface of the engine that parameters and units call."""

    @property
    def is_last_micro_batch(self) -> bool:
        """Tell whether the step follows the current micro-batch."""

    def finish_reductions(self, unit: "Unit | None" = None) -> None:
        """Complete the reductions in flight up to one unit's, or all."""

    def use_outside(self, unit: "Unit") -> None:
        """Unshard a unit until backward ends, for a use of its parameter outside its module."""

    def watch_use(self, unit: "Unit", leaf: torch.Tensor) -> torch.Tensor:
        """Return the leaf for one use outside its module, watched while its graph lives."""

    def is_running(self) -> bool:
        """Tell whether a forward pass is running."""

    def note_assigned(self, param: "ShardedParam", shared: Shared | None) -> None:
        """Note an assignment to ``p.data``, until the next forward pass."""

    def watch_grad(self, unit: "Unit", leaf: torch.Tensor) -> None:
        """Install a callback for when autograd has written a full parameter's gradient."""


class ShardedParam:
    """A parameter in its ``sharded`` form and its ``full`` form, which is autograd's leaf.

    - ``uses``: the places in modules where the parameter is registered; the first one names it.
    - ``shape``: of the full parameter, on this rank before data parallelism cuts it.
    - ``dim``: the dim along which it is cut.
    - ``index``: its number in the layout of its storage.
    - ``sharded``: this rank's elements, as in ``model.parameters()``; set by ``form``.
    - ``leaf``: the full parameter; its memory is the storage's or the encoding's.
    - ``local``: the local tensor of ``sharded`` when it was laid out. If ``sharded`` has another
      one, the user has put it there.
    - ``tie``: the copies of the parameter on other pipeline stages, if there are any.
    - ``holds_codes``: the elements are quantized codes, which no cast may change.
    """

    def __init__(
        self,
        unit: "Unit",
        uses: tuple[ParamUse, ...],
        form: Form,
        shape: tuple[int, ...],
        *,
        cut: Cut | None = None,
        dim: int = 0,
    ) -> None:
        self.unit = unit
        self.uses = uses
        self.form = form
        self.shape = shape
        self._cut = cut
        self.dim = dim
        self.encoding: Encoding = AlongDim(dim, shape) if dim else CONTIGUOUS
        self._storage: Storage | None = None
        self.index = 0
        self.sharded: Sharded = None  # type: ignore[assignment]  # until it is laid out
        self.leaf: nn.Parameter | None = None  # of a `SubclassGather`, None until the first gather
        self.local: torch.Tensor = None  # type: ignore[assignment]  # until it is laid out
        self.gradient = Gradient(self)
        self.tie: Tie | None = None
        self.aliases = Aliases()
        self.holds_codes = False
        self._is_watched = False  # the engine's callback is on the leaf

    @property
    def name(self) -> str:
        """The name in the model of the parameter's first use."""
        return self.uses[0].name

    @property
    def full(self) -> nn.Parameter:
        """The full parameter, autograd's leaf; it must have been gathered once."""
        assert self.leaf is not None, f"'{self.name}' has not been gathered yet"
        return self.leaf

    @property
    def has_cut(self) -> bool:
        """Tell whether the parameter's cut is a range of elements."""
        return self._cut is not None

    @property
    def cut(self) -> Cut:
        """The cut, as a range of elements; the parameter must have one, see `has_cut`."""
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
        """The storage of the parameter's elements; there must be one, see `has_storage`."""
        assert self._storage is not None, f"'{self.name}' is in no storage"
        return self._storage

    def is_stored_in(self, storage: Storage) -> bool:
        """Tell whether the parameter's elements are in this storage."""
        return self._storage is storage

    @property
    def engine(self) -> ParamEngine:
        """The engine of the parameter's model."""
        assert self.unit.engine is not None, f"'{self.name}': its unit has no engine yet"
        return self.unit.engine

    # -- memory
    def attach_storage(self, storage: Storage, index: int) -> None:
        """Move this rank's elements into ``storage`` as parameter ``index``; make the leaf."""
        self._storage = storage
        self.index = index
        self.form.place_in_storage(self, storage)
        self.local = self.sharded._local_tensor
        self._make_leaf(self.encoding.attach(storage.view(index), tuple(self.local.shape)))

    def detach_storage(self, encoding: Encoding) -> None:
        """Keep this rank's elements in the sharded tensor's memory; gather them by ``encoding``."""
        self._storage = None
        self.encoding = encoding
        self.leaf = None
        self.local = self.sharded._local_tensor

    def _make_leaf(self, view: torch.Tensor) -> None:
        is_trained = self.sharded.requires_grad
        self.leaf = make_full(self.form.full(view), is_trained, self.unit.slots.access)
        self._is_watched = False
        self.watch()

    def watch(self) -> None:
        """Install the engine's callback for a written gradient, if the unit has an engine."""
        engine: ParamEngine | None = self.unit.engine
        if engine is None or self._is_watched or self.leaf is None:
            return
        if self.leaf.requires_grad:
            engine.watch_grad(self.unit, self.leaf)
            self._is_watched = True

    def new_leaf(self) -> nn.Parameter:
        """Return a new leaf over the full parameter's memory.

        `accumulate_partial_grad` adds its gradient to the parameter's unreduced sum.
        """
        leaf = nn.Parameter(self.full.detach())
        vars(leaf)[_PARAM_OF_LEAF] = self
        self.engine.watch_grad(self.unit, leaf)
        return leaf

    def show_leaf(self, leaf: nn.Parameter) -> None:
        """Use ``leaf`` from now on, also in modules that show the full parameter now."""
        self.leaf = leaf
        if self.unit.shows_full:
            self.put_in_modules(leaf)

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Finish the full parameter after the gather; copy ``requires_grad`` to it."""
        new_full = self.encoding.finish(self)
        if new_full is not None:
            # Through ``.data``: it gives the leaf a separate version counter, so that later gathers
            # into its memory are no in-place writes for autograd.
            stride = contiguous_stride(self.shape)
            self._make_leaf(new_full.data.as_strided(self.shape, stride, 0))
        if self.full.requires_grad != self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)
            self.watch()

    @property
    def padded_size(self) -> torch.Size:
        """The shape of the largest part that a rank has."""
        num_ranks = self.unit.comm.axes.shard.size
        return torch.Size(
            -(-size // num_ranks) if dim == self.dim else size
            for dim, size in enumerate(self.shape)
        )

    def copy_attributes(self, attributes: Mapping[str, Any]) -> None:
        """Copy the attributes that the user has set on the original parameter."""
        reserved = ("_cut", "_owner", "_is_param", "_local_tensor", "_spec")
        for name, value in attributes.items():
            if name not in reserved:
                vars(self.sharded).setdefault(name, value)

    def _full_memory(self) -> torch.Tensor | None:
        """Return the full parameter's memory in its storage; None if it has separate memory."""
        if (
            self._storage is None
            or self.encoding.has_separate_memory
            or self.form.outer is not None
        ):
            return None
        return self._storage.view(self.index)

    @torch.no_grad()
    def keep_written(
        self, value: nn.Parameter, *, in_place: bool, reads: Sequence[torch.Tensor] = ()
    ) -> str | None:
        """Keep the value that a forward pass has given the full parameter.

        ``value`` is the parameter in the module now: the full one or another. ``in_place``: the
        memory of the full one was written. ``reads`` are tensors over this memory; if it gets the
        values of other memory, they keep the old ones. Return the reason if the value cannot be
        kept; then the full parameter is as it was before.
        """
        memory = self._full_memory()
        if memory is None:
            return "it is a copy there"
        new = data_of(value)
        fits = type(new) is torch.Tensor and (new.shape, new.dtype) == (memory.shape, memory.dtype)
        has_other_memory = new.data_ptr() != memory.data_ptr()
        holds_shards = self.storage.memory.aliased and not self.storage.frees
        reason = None
        if value is not self.full and (value.requires_grad or self.full.requires_grad):
            reason = "it was replaced by another parameter, which no optimizer trains"
        elif not fits:
            reason = f"it has shape {tuple(new.shape)} and dtype {new.dtype} now"
        elif not holds_shards and (in_place or has_other_memory):
            reason = "it is a copy there"
        elif has_other_memory:
            try:
                self.aliases.release(self.sharded._local_tensor, self.name)
            except ShardError as error:
                reason = str(error)
            else:
                old = [read for read in reads if read.data_ptr() == memory.data_ptr()]
                move_to_copy(old, memory)
                memory.copy_(new)
        self.restore_memory()
        return reason

    def restore_memory(self) -> None:
        """Give the full parameter the memory that gathers write, if a user has replaced it."""
        memory = self._full_memory()
        if memory is not None and data_of(self.full).data_ptr() != memory.data_ptr():
            set_full_data(self.full, memory)

    def put_in_modules(self, param: nn.Parameter) -> None:
        """Register ``param`` in every module that uses this parameter."""
        for use in self.uses:
            if type(use.module).__setattr__ is nn.Module.__setattr__:
                use.module._parameters[use.attribute] = param
            else:
                setattr(use.module, use.attribute, param)

    # -- the interface of ShardTensor's Owner
    def use_full(self) -> torch.Tensor:
        """Return the full parameter, or a view of it, for a use outside its module."""
        self.engine.use_outside(self.unit)
        return self.engine.watch_use(self.unit, self.full)

    def in_use(self) -> bool:
        """Tell whether a forward pass of the model is running."""
        return self.engine.is_running()

    def set_requires_grad(self, requires_grad: bool) -> None:
        """Freeze or thaw the full parameter along with its shard."""
        if self.leaf is not None:
            self.leaf.requires_grad_(requires_grad)
            self.watch()

    def note_alias(self, elements: torch.Tensor) -> None:
        """Note a plain tensor over the parameter's elements."""
        self.aliases.add(elements)

    @torch.no_grad()
    def assign(self, value: torch.Tensor) -> None:
        """Copy the values that are assigned to ``p.data``; see Note [Assignment of data].

        **Cost** a gather of the values if their cut differs.

        **Raises** ShardError for another shape or dtype, before anything is changed.
        """
        sharded = self.sharded
        if value.shape != sharded.shape or value.dtype != sharded.dtype:
            raise ShardError(
                f"parameter '{self.name}' is {tuple(sharded.shape)} {sharded.dtype} and was to "
                f"become {tuple(value.shape)} {value.dtype}; change the model before shard(), and "
                "its dtype by shard(precision=...)"
            )
        other = owner_of_elements(value) if isinstance(value, ShardTensor) else None
        if other is self:
            return  # ``p.data = p.data``
        new: torch.Tensor = value
        shared: Shared | None = None
        if not isinstance(value, ShardTensor):
            shared = SharedPlain(value)
        elif not value._cut.matches(self.cut):
            new = value.full_tensor()
        if isinstance(other, ShardedParam):
            shared = SharedParam(other.name, other.aliases)
        self.aliases.release(sharded._local_tensor, self.name)
        sharded.copy_(new)
        self.engine.note_assigned(self, shared)

    # -- the interface for checkpoints and contexts
    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient; reductions in flight are not waited for."""
        return self.form.grad_of(self)

    @property
    def is_trained(self) -> bool:
        """Tell whether the parameter gets gradients."""
        if self.form.finishes_reduction_on_read and self.leaf is not None:
            return self.leaf.requires_grad
        return bool(self.sharded.requires_grad)


def accumulate_partial_grad(leaf: torch.Tensor) -> None:
    """Add a leaf's gradient to its parameter's unreduced sum, if `new_leaf` has made the leaf."""
    param: ShardedParam | None = vars(leaf).get(_PARAM_OF_LEAF)
    if param is not None:
        param.gradient.accumulate_partial(leaf)
