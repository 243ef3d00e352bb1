"""Encodings of a parameter: the tensors that a gather sends, and the full parameter from them.

- `Contiguous`: a cut along dim 0. The storage's full copy is the full parameter.
- `AlongDim`: a cut along another dim. The full parameter is copied from the storage's full copy.
- `SubclassGather`: a tensor subclass, whose methods encode and decode the gathered tensors.
"""

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import _unsafe_preserve_version_counter

from shardwise.comm.pending import GatherItem
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.segments import Segment
from shardwise.tensor.inner import version_of

if TYPE_CHECKING:
    from shardwise.unit.param import ShardedParam


class Encoding(Protocol):
    """The gather of one parameter.

    ``is_in_storage``: its elements are in a storage of the unit, which gathers them.
    ``has_separate_memory``: the full parameter is not a view of the storage's full copy. Its memory
    is freed when the storage frees that copy.
    """

    is_in_storage: bool
    has_separate_memory: bool

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Attach the parameter's part of a storage's full copy; return the full parameter's memory.

        ``view`` has one row per rank if the cut is not along dim 0.
        """

    def order_by_rank(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full tensor's elements in the order of the gather, rank after rank."""

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Start the parameter's own gather; return its items, none if the storage gathers it."""

    def finish(self, param: "ShardedParam") -> torch.Tensor | None:
        """Make the full parameter after the gather; return it if it is a new tensor."""

    def free(self) -> None:
        """Free the parameter's separate memory."""


class Contiguous:
    """A cut along dim 0: every rank's rows are gathered into the full parameter itself."""

    is_in_storage = True
    has_separate_memory = False

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return ``view``: the full parameter is a view of the storage's full copy."""
        return view

    def order_by_rank(self, full: torch.Tensor) -> torch.Tensor:
        """Return ``full``: its rows are in rank order already."""
        return full

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Return no items: the storage gathers the parameter."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Do nothing: the gather has written the full parameter."""

    def free(self) -> None:
        """Do nothing: the storage frees it."""


CONTIGUOUS = Contiguous()


class AlongDim:
    """A cut along another dim than the first: one row per rank is gathered, and then copied.

    The full tensor has separate memory, as layers and optimizers need it contiguous.
    """

    is_in_storage = True
    has_separate_memory = True

    def __init__(self, dim: int, shape: tuple[int, ...]) -> None:
        self._dim = dim
        self._shape = shape

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Keep views of the ranks' parts; return the full tensor, freed until `finish`."""
        self._parts = [row.view(local_shape) for row in view]
        self._full = torch.empty(self._shape, dtype=view.dtype, device=view.device)
        self.free()
        return self._full.data

    def order_by_rank(self, full: torch.Tensor) -> torch.Tensor:
        """Return one row per rank."""
        return _row_per_rank(full, len(self._parts), self._dim)

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Return no items: the storage gathers the parameter."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Copy the parts into the full tensor."""
        full = self._full
        full.untyped_storage().resize_(full.nbytes)
        chunks = full.chunk(len(self._parts), dim=self._dim)
        torch._foreach_copy_(list(chunks), self._parts)

    def free(self) -> None:
        """Free the full tensor's memory."""
        self._full.untyped_storage().resize_(0)


class SubclassGather:
    """The gather of a tensor subclass, by its methods for FSDP2.

    ``fsdp_pre_all_gather`` encodes the local tensor, ``fsdp_post_all_gather`` decodes the gathered
    ones. Float8 and quantized weights of torchao use it. Source: the protocol of torch's FSDP2,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_api.py`` and its tests of all-gather extensions.

    ``frees``: resharding the unit frees the full tensor.
    """

    is_in_storage = False
    has_separate_memory = True

    def __init__(self, policy: Any, num_ranks: int, dim: int = 0, frees: bool = True) -> None:
        self.frees = frees
        self._policy = policy
        self._num_ranks = num_ranks
        self._dim = dim
        # The version of the local tensor that was gathered; None while the memory is freed.
        self._version: int | None = None
        # Of the gather in flight: the local tensor, and what its method returned for decoding.
        self._local: Any = None
        self._metadata: Any = None
        # The gathered flat tensors of all ranks, and the shape of each one on this rank.
        self._outputs: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        # Tensors that the decoded one is made of, freed with it.
        self._inner: list[torch.Tensor] = []

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Refuse: the parameter is in no storage."""
        raise AssertionError("a tensor subclass with its own gather is in no storage")

    def order_by_rank(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full gradient's elements in rank order."""
        return full if self._dim == 0 else _row_per_rank(full, self._num_ranks, self._dim)

    def for_copy(self) -> "SubclassGather":
        """Return an encoding for a copy of the parameter."""
        return SubclassGather(self._policy, self._num_ranks, self._dim, self.frees)

    def is_fresh(self, param: "ShardedParam") -> bool:
        """Tell whether the gathered tensor is allocated and as new as the sharded one."""
        return self._version == version_of(param.sharded._local_tensor)

    @torch.no_grad()
    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Encode the local tensor by its ``fsdp_pre_all_gather``; return one item per tensor."""
        self._version = version_of(param.sharded._local_tensor)
        local: Any = param.sharded._local_tensor.to(param.unit.comm.device)
        self._local = local
        prepare = local.fsdp_pre_all_gather
        count = len(inspect.signature(prepare).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(prepare)}\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: "
                "tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        mesh = param.unit.comm.axes.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        if count == 1:
            inputs, self._metadata = prepare(shard_mesh)
        else:
            inputs, self._metadata = prepare(
                shard_mesh,
                torch.Size(param.shape),
                contiguous_stride(param.shape),
                param.uses[0].module,
                self._policy,
            )
        num_ranks = param.unit.comm.axes.shard.size
        padded = param.padded_size
        uneven = local.size() != padded
        if count == 5 and uneven and any(t.size() != padded for t in inputs):
            raise AssertionError(
                "When a parameter is unevenly sharded by FSDP "
                f"(orig size={torch.Size(param.shape)}, FSDP world size={num_ranks}), "
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{padded} but got {[t.size() for t in inputs]}"
            )
        self._sizes = [t.size() for t in inputs]
        flats = [t.contiguous().view(-1) for t in inputs]
        if not self._outputs:
            self._outputs = [t.new_empty(t.numel() * num_ranks) for t in flats]
        for output in self._outputs:
            output.untyped_storage().resize_(output.nbytes)
        return [
            GatherItem(
                segment=Segment(output.numel(), flat.numel(), full_offset=0, shard_offset=0),
                source=flat,
                full=output,
                in_place=False,
            )
            for flat, output in zip(flats, self._outputs, strict=True)
        ]

    def finish(self, param: "ShardedParam") -> torch.Tensor | None:
        """Decode the gathered tensors: into a new tensor the first time, later into the leaf."""
        outputs = tuple(
            output.view(-1, *size[1:])
            for output, size in zip(self._outputs, self._sizes, strict=True)
        )
        metadata = self._metadata
        dtype = param.unit.precision.param or param.sharded.dtype
        new_full: torch.Tensor | None = None
        if param.leaf is None:
            new_full, inner = self._local.fsdp_post_all_gather(outputs, metadata, dtype)
            self._inner = list(inner)
        else:
            for tensor in self._inner:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            with _unsafe_preserve_version_counter(param.full):  # a graph's saved tensors stay valid
                self._local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.full)
        self._local = None
        self._metadata = None
        return new_full

    def free(self) -> None:
        """Free the gathered tensors and the full tensor made of them."""
        self._version = None
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)


class SeparateParams:
    """The parameters of a unit whose full form has memory besides the storages' full copies.

    Tensor subclasses with a `SubclassGather` also add items to the unit's gather.
    """

    def __init__(self, params: Sequence["ShardedParam"] = ()) -> None:
        # Parameters in a storage: the storage gathers them, and `finish` copies them.
        self._stored: list[ShardedParam] = []
        # Tensor subclasses, each with its encoding, which makes its gather items.
        self._subclasses: list[tuple[ShardedParam, SubclassGather]] = []
        self._in_flight: list[ShardedParam] = []  # the subclasses of the gather in flight
        for param in params:
            encoding = param.encoding
            if isinstance(encoding, SubclassGather):
                self._subclasses.append((param, encoding))
            elif encoding.is_in_storage and encoding.has_separate_memory:
                self._stored.append(param)

    @property
    def has_items(self) -> bool:
        """Tell whether a parameter adds items to the unit's gather."""
        return bool(self._subclasses)

    @property
    def is_fresh(self) -> bool:
        """Tell whether each gathered subclass is as new as its shard."""
        return all(encoding.is_fresh(param) for param, encoding in self._subclasses)

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers that change when the shard of a subclass is modified."""
        return tuple(version_of(param.sharded._local_tensor) for param, _ in self._subclasses)

    def start(self, *, also_fresh: bool) -> list[GatherItem]:
        """Return the gather items of the stale subclasses, or of all if ``also_fresh``."""
        items: list[GatherItem] = []
        self._in_flight = []
        for param, encoding in self._subclasses:
            if also_fresh or not encoding.is_fresh(param):
                self._in_flight.append(param)
                items += encoding.start(param)
        return items

    def finish(self) -> None:
        """Make the full parameters after the gather."""
        for param in self._stored:
            param.encoding.finish(param)
        for param in self._in_flight:
            param.finish_gather()

    def free(self) -> None:
        """Free the memory of the full parameters, as the storages free theirs."""
        for param in self._stored:
            if param.storage.frees:
                param.encoding.free()
        for _, encoding in self._subclasses:
            if encoding.frees:
                encoding.free()


def _row_per_rank(full: torch.Tensor, num_ranks: int, dim: int) -> torch.Tensor:
    return torch.stack([chunk.reshape(-1) for chunk in full.chunk(num_ranks, dim=dim)])
