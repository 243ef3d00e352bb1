"""One parameter of a ``fully_shard`` call: its sharded DTensor, its full form, its gradient."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from shardwise.comm.packed import waited_for
from shardwise.interop.fsdp2.extension import Extension
from shardwise.interop.fsdp2.meshes import Spread, sharded_spec
from shardwise.layout.units import ParamUse
from shardwise.unit.cut import Cut, make_cut
from shardwise.unit.grad_hooks import GradHooks
from shardwise.unit.plain_state import FULLY_SHARD
from shardwise.unit.storage import Storage

_SUMS_IN_OWN_DTYPE = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


class GroupSlot:
    """A parameter in its sharded form (``param``, a DTensor) and its full one (``leaf``).

    One that is cut along another dim than 0 is gathered rank by rank and put together in memory of
    its own, since layers and optimizers want it contiguous: ``whole``.
    """

    def __init__(
        self, unit: Any, uses: tuple[ParamUse, ...], param: nn.Parameter, dim: int
    ) -> None:
        spread: Spread = unit.spread
        self.unit = unit
        self.uses = uses
        self.name = uses[0].name
        self.dim = dim
        self.full_spec: DTensorSpec | None = param._spec if isinstance(param, DTensor) else None
        values = param._local_tensor if isinstance(param, DTensor) else param.detach()
        self.shape = tuple(values.shape)
        self.num_ranks = spread.axes.shard.size
        self._check(param, values)
        spec = sharded_spec(param, self.name, dim, spread)
        # Tied parameters of two calls are found by it; ids are given to new objects again.
        self.identity = vars(param).setdefault("_fully_shard_identity", object())
        chunk = _chunk(values, self.num_ranks, spread.axes.shard.rank, dim)
        self.local_shape = tuple(chunk.shape)
        self.param: Any = nn.Parameter(as_dtensor(chunk, spec), requires_grad=param.requires_grad)
        vars(self.param)[FULLY_SHARD] = True
        self.padded_size = torch.Size(
            -(-size // self.num_ranks) if d == dim else size for d, size in enumerate(self.shape)
        )
        self.storage: Storage | None = None
        self.index = 0
        self.local: torch.Tensor | None = None
        self.leaf: Any = None
        self.extension: Extension | None = None
        self.partial: torch.Tensor | None = None
        self.cut: Cut | None = None
        self.grad_hooks = GradHooks()  # stays empty: hooks stand on the DTensor, see `deliver`
        self._parts: list[torch.Tensor] = []
        self._whole: torch.Tensor | None = None
        self.register()

    def _check(self, param: nn.Parameter, values: torch.Tensor) -> None:
        if not param.is_contiguous() or not values.is_contiguous():
            raise NotImplementedError(
                f"FSDP does not support non-contiguous parameters yet: '{self.name}' has "
                f"{param.shape=} {param.stride()=}; call .contiguous() on it first"
            )
        if self.dim >= len(self.shape):
            raise AssertionError(
                f"Shard dim {self.dim} is invalid for {len(self.shape)}D tensor: {param.shape}"
            )
        if self.dim > 0 and self.shape[self.dim] % self.num_ranks:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {self.dim}: '{self.name}' has "
                f"{values.shape} (world size: {self.num_ranks})"
            )

    @property
    def layout_shape(self) -> tuple[int, ...]:
        """The shape that is cut along dim 0 in memory: one row per rank, for another dim."""
        if self.dim == 0:
            return self.shape
        numel = torch.Size(self.shape).numel()
        return (self.num_ranks, numel // self.num_ranks)

    # -- what stands in the modules
    def register(self, param: Any = None) -> None:
        """Put the sharded parameter, or ``param``, into every module that uses it."""
        param = self.param if param is None else param
        for use in self.uses:
            if type(use.module).__setattr__ is nn.Module.__setattr__:
                use.module._parameters[use.attribute] = param
            else:
                setattr(use.module, use.attribute, param)

    def reread(self) -> bool:
        """Take what stands in the module for the sharded parameter; tell whether it is new."""
        found: Any = self.uses[0].module._parameters[self.uses[0].attribute]
        if not isinstance(found, DTensor):
            raise AssertionError(f"parameter '{self.name}': expected DTensor, got {type(found)}")
        self.param = found
        vars(found)[FULLY_SHARD] = True
        has_methods = Extension.of(found._local_tensor) is not None
        is_known = has_methods == (self.extension is not None)
        return found._local_tensor is not self.local or not is_known

    # -- memory
    def settle(self, storage: Storage, index: int) -> None:
        """Let the sharded parameter's elements lie in ``storage``, as its ``index``-th."""
        self.storage, self.index = storage, index
        plain = self.dim == 0 and self.full_spec is None
        self.cut = make_cut(self.shape, storage.layout, index, self.unit.comm) if plain else None
        shape = self.local_shape if self.dim == 0 else (1, torch.Size(self.local_shape).numel())
        place = storage.local_apart(index, shape).view(self.local_shape)
        place.copy_(self.param._local_tensor)
        self.local = self.param._local_tensor = place
        view = storage.leaf(index, False).data
        if self.dim:
            self._parts = [part.view(self.local_shape) for part in view]
            self._whole = torch.empty(self.shape, dtype=view.dtype, device=view.device)
            self._whole.untyped_storage().resize_(0)
            view = self._whole.data
        self._make_leaf(view)

    def _make_leaf(self, view: torch.Tensor) -> None:
        if self.full_spec is not None:
            spec, meta = self.full_spec, self.full_spec.tensor_meta
            if meta is not None and meta.dtype != view.dtype:
                spec = replace(spec, tensor_meta=TensorMeta(meta.shape, meta.stride, view.dtype))
            view = as_dtensor(view, spec)
        self.leaf = nn.Parameter(view, requires_grad=self.param.requires_grad)
        self._watched = False
        self.watch()

    def watch(self) -> None:
        """Let the engine, if there is one, hear when autograd has written the gradient."""
        engine = self.unit.scheduler
        if self.leaf is not None and self.leaf.requires_grad and not self._watched and engine:
            engine.watch_grad(self.unit, self.leaf)
            self._watched = True

    @torch.no_grad()
    def complete(self, module_dtype: torch.dtype | None) -> None:
        """Make the full parameter whole after the gather, and put it into the modules."""
        if self.extension is not None:
            made = self.extension.finish(self.leaf, module_dtype or self.param.dtype)
            if made is not None:
                stride = torch.empty(self.shape, device="meta").stride()
                self._make_leaf(torch.as_strided(made, self.shape, stride, 0))
        elif self._whole is not None:
            whole = self._whole
            whole.untyped_storage().resize_(whole.nbytes)
            places = whole.chunk(self.num_ranks, dim=self.dim)
            torch._foreach_copy_(list(places), self._parts)
        if self.leaf.requires_grad != self.param.requires_grad:
            self.leaf.requires_grad_(self.param.requires_grad)
            self.watch()
        self.register(self.leaf)

    def release(self) -> None:
        """Put the sharded parameter back and free what is this parameter's own."""
        self.register()
        if self.extension is not None:
            self.extension.free()
        if self._whole is not None:
            self._whole.untyped_storage().resize_(0)

    # -- what checkpoints and contexts ask
    @property
    def grad(self) -> torch.Tensor | None:
        """The reduced gradient."""
        found: torch.Tensor | None = self.param.grad
        return found

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which unreduced gradients are summed that came on another way."""
        return self.reduce_dtype or self.param.dtype

    def like(self, local: torch.Tensor) -> DTensor:
        """Return a tensor that is cut as the parameter is, of which ``local`` is this rank's."""
        spec: DTensorSpec = self.param._spec
        assert spec.tensor_meta is not None
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        return as_dtensor(local, replace(spec, tensor_meta=meta))

    def is_alike(self, value: Any) -> bool:
        """Tell whether a tensor is cut as the parameter is."""
        if not isinstance(value, DTensor) or value.shape != self.param.shape:
            return False
        spec = self.param._spec
        return (value.device_mesh, value.placements) == (spec.mesh, spec.placements)

    # -- gradients
    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype that gradients are summed in; None is that in which they come.

        Without ``reduce_dtype`` torch sums in the dtype of computation before 2.15, and from 2.15
        in that of the sharded parameter; so it is here, by the torch that is installed.
        """
        asked = self.unit.settings.mp.reduce_dtype
        return self.param.dtype if asked is None and _SUMS_IN_OWN_DTYPE else asked

    @property
    def has_grad(self) -> bool:
        """Tell whether this rank has a gradient that is not reduced."""
        return self.partial is not None or (self.leaf is not None and self.leaf.grad is not None)

    def keep_grad(self, dtype: torch.dtype | None) -> None:
        """Keep the gradient for a later reduction, summed in ``dtype`` (None: in its own)."""
        grad = None if self.leaf is None else self.leaf.grad
        if grad is None or (self.partial is None and dtype in (None, grad.dtype)):
            return
        self.leaf.grad = None
        self.partial = grad.to(dtype) if self.partial is None else self.partial.add_(grad)

    def take_grad(self) -> torch.Tensor:
        """Return this rank's full gradient (zeros where there is none) and forget it."""
        grad, self.leaf.grad = self.leaf.grad, None
        if self.partial is not None:
            grad = self.partial if grad is None else self.partial.add_(grad)
            self.partial = None
        if grad is None:
            grad = torch.zeros_like(self.leaf)
        if self.full_spec is not None:
            grad = self._local_grad(grad)
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        return grad

    def _local_grad(self, grad: Any) -> torch.Tensor:
        """Return what this rank holds of a DTensor's gradient, placed as the parameter is."""
        grad = waited_for(grad)
        assert self.full_spec is not None
        wanted = list(self.full_spec.placements)
        for dim in self.unit.spread.reduced_dims:  # a sum over them is ours to complete
            wanted[dim] = grad.placements[dim]
        if tuple(wanted) != tuple(grad.placements):
            grad = grad.redistribute(placements=wanted)
        found: torch.Tensor = grad._local_tensor
        return found

    def drop_grad(self) -> None:
        """Forget the unreduced gradient."""
        self.partial = None
        if self.leaf is not None:
            self.leaf.grad = None

    def deliver(self, mean: torch.Tensor) -> None:
        """Give ``param.grad`` this rank's slice of the mean, or add it; run the user's hooks."""
        mean = mean.view(self.local_shape).to(self.param.device)
        if self.param.grad is None:
            self.param.grad = as_dtensor(mean, self.param._spec)
        else:
            self.param.grad._local_tensor.add_(mean)
        hooks = getattr(self.param, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(self.param)


def as_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of ``local``, without a copy."""
    return DTensor(local, spec, requires_grad=local.requires_grad)


def _chunk(values: torch.Tensor, num_ranks: int, rank: int, dim: int) -> torch.Tensor:
    """Return this rank's chunk, as ``torch.chunk`` cuts; a copy for a tensor subclass."""
    size = values.shape[dim]
    rows = -(-size // num_ranks)
    begin = min(rank * rows, size)
    length = min(rows, size - begin)
    chunk = values.narrow(dim, begin, length)
    if type(values) is torch.Tensor:
        return chunk.clone()  # a DTensor made of a view can be neither pickled nor copied
    padded = list(values.shape)
    padded[dim] = rows
    made = values.new_zeros(padded)
    if length:
        made.narrow(dim, 0, length).copy_(chunk)
    return made.narrow(dim, 0, length)


def tie_free(slots: Iterable[GroupSlot]) -> None:
    """Check that no parameter is in two groups. **Raises** ValueError, naming it."""
    seen: set[object] = set()
    for slot in slots:
        if slot.identity in seen:
            raise ValueError(
                f"Parameter '{slot.name}' is shared with a parameter already managed by another "
                "FSDP group. For shared/tied parameters, use fully_shard([module_a, module_b]) to "
                "place them in the same FSDP group."
            )
        seen.add(slot.identity)
