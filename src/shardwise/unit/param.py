"""One parameter of a unit: its sharded form, its full form, and its gradient.

`Form` defines its sharded form in the model, `encodings.Encoding` its gather. `shard()` uses
`AsShardTensor`; a read of its gradient asks the unit. `fully_shard` uses `AsDTensor`, as torch
does; its gradient is an attribute, set as soon as it is reduced.
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
from shardwise.tensor.aliases import Aliases, Shared, SharedParam, SharedPlain
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
        """Tell whether this is the copy that counts where each parameter counts once."""


class Form(Protocol):
    """The sharded form; ``finishes_on_read``: a read of its gradient finishes the reduction."""

    finishes_on_read: bool

    @property
    def outer(self) -> DTensorSpec | None:
        """The placement on axes of another mesh, if the parameter was a DTensor before."""

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Put the elements of the parameter in the model into a storage."""

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a tensor with the parameter's cut and the local tensor ``local``."""

    def is_alike(self, value: Any) -> bool:
        """Tell whether a tensor has the parameter's cut."""

    def full(self, view: torch.Tensor) -> torch.Tensor:
        """Return the layers' tensor over the full parameter's memory."""

    def full_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the memory of a full gradient."""

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the reduced gradient."""

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the parameter's gradient to a mean, or add the mean to it."""


@dataclass(frozen=True)
class AsShardTensor:
    """A `ShardTensor` with the cut ``cut``, which autograd trains or not."""

    cut: Cut
    is_trained: bool
    finishes_on_read = True

    @property
    def outer(self) -> DTensorSpec | None:
        """The placement on axes of another mesh, if the parameter was a DTensor before."""
        return self.cut.outer

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Make the parameter over the storage's memory."""
        local = storage.local(param.index, self.cut.local_shape)
        self.place_apart(param, local)

    def place_apart(self, param: "ShardedParam", local: torch.Tensor) -> None:
        """Make the parameter from elements outside any storage."""
        made = ShardTensor.wrap(local, self.cut, param)
        param.sharded = cast("Sharded", nn.Parameter(made, requires_grad=self.is_trained))

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a ShardTensor that no unit owns."""
        return ShardTensor.wrap(local, self.cut)

    def is_alike(self, value: Any) -> bool:
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
                param.storage.mean_memory.forget()  # the sum lies elsewhere; do not keep two
            (grad._local_tensor if isinstance(grad, ShardTensor) else grad).add_(mean)


@dataclass(frozen=True)
class AsDTensor:
    """A DTensor of torch with ``spec``.

    ``full_spec`` is set if the parameter was a DTensor before (tensor parallelism); its full form
    is one too. Its gradients may be partial sums over ``summed_dims`` of its mesh, which are
    data-parallel axes. ``outer`` is ``full_spec`` without these. ``identity`` identifies parameters
    that two calls tie.
    """

    spec: DTensorSpec
    identity: object
    full_spec: DTensorSpec | None = None
    outer: DTensorSpec | None = None
    summed_dims: Sequence[int] = ()
    finishes_on_read = False

    def place(self, param: "ShardedParam", storage: Storage) -> None:
        """Move the local tensor's elements into the storage."""
        local_shape = tuple(param.sharded._local_tensor.shape)
        shape = local_shape if param.dim == 0 else (1, torch.Size(local_shape).numel())
        place = storage.local_at_start(param.index, shape).view(local_shape)
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
        """Return a DTensor if the parameter was one."""
        return view if self.full_spec is None else as_dtensor(view, self.full_spec)

    def full_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a DTensor's gradient, placed as the parameter is."""
        if self.full_spec is None:
            return grad
        return _local_grad(grad, self.full_spec, self.summed_dims)

    def grad_of(self, param: "ShardedParam") -> torch.Tensor | None:
        """Return the DTensor's ``grad``."""
        found: torch.Tensor | None = param.sharded.grad
        return found

    def add_to_grad(self, param: "ShardedParam", mean: torch.Tensor) -> None:
        """Set the DTensor's ``grad``, or add to it; run the user's hooks."""
        held = param.sharded
        mean = mean.to(held.device)
        if held.grad is None:
            held.grad = as_dtensor(mean, held._spec)
        else:
            local_of(held.grad).add_(mean)
        hooks = getattr(held, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(held)


def _local_grad(grad: Any, spec: DTensorSpec, summed_dims: Sequence[int] = ()) -> torch.Tensor:
    """Return this rank's part of a DTensor's gradient, placed as in ``spec``.

    A partial sum over ``summed_dims`` of its mesh stays partial; the reduction completes it.
    """
    grad = waited_for(grad)
    wanted = list(spec.placements)
    for dim in summed_dims:
        wanted[dim] = grad.placements[dim]
    if tuple(wanted) != tuple(grad.placements):
        grad = grad.redistribute(placements=wanted)
    found: torch.Tensor = grad._local_tensor
    return found


_SUMS = "_shardwise_sums"  # on a leaf: the parameter that sums its gradients as they arrive


class EngineOfUnits(Protocol):
    """The engine's interface for parameters: operations on more than one unit."""

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

    The cut is along ``dim``.
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
        self.leaf: nn.Parameter | None = None  # None until it is made; `SubclassGather` makes it
        # The local tensor when it was laid out; another one in its place was put there by the user.
        self.local: torch.Tensor = None  # type: ignore[assignment]
        self.gradient = Gradient(self)
        self.tie: Tie | None = None  # with copies on other pipeline stages
        self.aliases = Aliases()
        self.holds_codes = False
        self._watched = False

    @property
    def name(self) -> str:
        """The name in the model, of its first use."""
        return self.uses[0].name

    @property
    def full(self) -> nn.Parameter:
        """The full form, if it has been made: autograd's leaf."""
        assert self.leaf is not None, f"'{self.name}' has not been gathered yet"
        return self.leaf

    @property
    def has_cut(self) -> bool:
        """Tell whether the parameter's cut is a range of elements."""
        return self._cut is not None

    @property
    def cut(self) -> Cut:
        """The cut, if the parameter `has_cut`."""
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

    def is_stored_in(self, storage: Storage) -> bool:
        """Tell whether the parameter's elements are in this storage."""
        return self._storage is storage

    @property
    def engine(self) -> EngineOfUnits:
        """The engine of the parameter's model."""
        assert self.unit.engine is not None, f"'{self.name}': its unit has no engine yet"
        return self.unit.engine

    # -- memory
    def lie_in(self, storage: Storage, index: int) -> None:
        """Put the sharded parameter's elements into ``storage`` as parameter ``index``."""
        self._storage, self.index = storage, index
        self.form.place(self, storage)
        self.local = self.sharded._local_tensor
        self._make_leaf(self.encoding.attach(storage.view(index), tuple(self.local.shape)))

    def lie_apart(self, encoding: Encoding) -> None:
        """Leave the sharded parameter in its memory, outside any storage."""
        self._storage, self.encoding, self.leaf = None, encoding, None
        self.local = self.sharded._local_tensor

    def _make_leaf(self, view: torch.Tensor) -> None:
        is_trained = self.sharded.requires_grad
        self.leaf = make_full(self.form.full(view), is_trained, self.unit.slots.access)
        self._watched = False
        self.watch()

    def watch(self) -> None:
        """Install the engine's callback for a written gradient, if the unit has an engine."""
        engine: EngineOfUnits | None = self.unit.engine
        if engine is None or self._watched or self.leaf is None:
            return
        if self.leaf.requires_grad:
            engine.watch_grad(self.unit, self.leaf)
            self._watched = True

    def another_leaf(self) -> nn.Parameter:
        """Return another leaf of the same memory, whose gradients are summed as they arrive."""
        made = nn.Parameter(self.full.detach())
        vars(made)[_SUMS] = self
        self.engine.watch_grad(self.unit, made)
        return made

    def read_through(self, leaf: nn.Parameter) -> None:
        """Make the layers, also those that run now, read this leaf of the same memory."""
        self.leaf = leaf
        if self.unit.shows_full:
            self.put(leaf)

    @torch.no_grad()
    def complete(self) -> None:
        """Make the full parameter whole after the gather; copy ``requires_grad`` to it."""
        made = self.encoding.finish(self)
        if made is not None:
            # A separate version counter: gathers may write into the leaf's memory.
            self._make_leaf(made.data.as_strided(self.shape, contiguous_stride(self.shape), 0))
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
    def keep_written(self, value: nn.Parameter, *, in_place: bool) -> str | None:
        """Keep what a forward pass has put in the full parameter's place, or in its memory.

        ``in_place``: the memory was written. Return the reason if it cannot be kept. Then the full
        parameter is as it was.
        """
        memory = self._full_memory()
        if memory is None:
            return "it is a copy there"
        new = data_of(value)
        is_alike = (new.shape, new.dtype, type(new)) == (memory.shape, memory.dtype, torch.Tensor)
        is_elsewhere = new.data_ptr() != memory.data_ptr()
        holds_shards = self.storage.memory.aliased and not self.storage.frees
        reason = None
        if value is not self.full and (value.requires_grad or self.full.requires_grad):
            reason = "another parameter stands in its place, which no optimizer trains"
        elif not is_alike:
            reason = f"it has shape {tuple(new.shape)} and dtype {new.dtype} now"
        elif not holds_shards and (in_place or is_elsewhere):
            reason = "it is a copy there"
        elif is_elsewhere:
            memory.copy_(new)
        self.restore_memory()
        return reason

    def restore_memory(self) -> None:
        """Give the full parameter the memory that gathers write, if it was given other memory."""
        memory = self._full_memory()
        if memory is not None and data_of(self.full).data_ptr() != memory.data_ptr():
            set_full_data(self.full, memory)

    def put(self, param: nn.Parameter) -> None:
        """Put a parameter into every module that uses this one."""
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
        """Take over values that are assigned to ``p.data``; see Note [Assignment of data].

        **Cost** a gather of the values if they are cut otherwise.

        **Raises** ShardError for another shape or dtype, before anything is changed.
        """
        held = self.sharded
        if value.shape != held.shape or value.dtype != held.dtype:
            raise ShardError(
                f"parameter '{self.name}' is {tuple(held.shape)} {held.dtype} and was to become "
                f"{tuple(value.shape)} {value.dtype}; change the model before shard(), and its "
                "dtype by shard(precision=...)"
            )
        other = owner_of_elements(value) if isinstance(value, ShardTensor) else None
        if other is self:
            return  # its own elements
        new: torch.Tensor = value
        shared: Shared | None = None
        if not isinstance(value, ShardTensor):
            shared = SharedPlain(value)
        elif not value._cut.matches(self.cut):
            new = value.full_tensor()
        if isinstance(other, ShardedParam):
            shared = SharedParam(other.name, other.aliases)
        self.aliases.release(held._local_tensor, self.name)
        held.copy_(new)
        self.engine.note_assigned(self, shared)

    # -- the interface for checkpoints and contexts
    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient, as far as reductions are finished."""
        return self.form.grad_of(self)

    @property
    def is_trained(self) -> bool:
        """Tell whether the parameter gets gradients."""
        of = self.leaf if self.form.finishes_on_read and self.leaf is not None else self.sharded
        return bool(of.requires_grad)


def sum_as_they_come(leaf: torch.Tensor) -> None:
    """Add a leaf's gradient to its parameter's unreduced sum, if it is `another_leaf`."""
    param: ShardedParam | None = vars(leaf).get(_SUMS)
    if param is not None:
        param.gradient.keep_partial(leaf)
