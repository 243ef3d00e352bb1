"""Encodings of a parameter for the gather: its elements as sent, and the full parameter from them.

`AsItLies` sends the unit's memory (cast there to the computing dtype). `AlongDim` cuts along
another dim than the first. `OwnGather` calls a tensor subclass's methods.
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

    ``in_storage``: its elements lie in a storage of the unit, which gathers them.
    ``puts_together``: the full parameter has separate memory, freed with the storage's.
    """

    in_storage: bool
    puts_together: bool

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Take the parameter's memory in a storage's full copy; return the layers' tensor."""

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full tensor's elements in the storage's order, rank after rank."""

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Return the items to gather besides the storage's."""

    def finish(self, param: "ShardedParam") -> torch.Tensor | None:
        """Make the parameter whole after the gather; return it if it is a new tensor."""

    def free(self) -> None:
        """Free the parameter's separate memory."""


class AsItLies:
    """A cut along dim 0: every rank's rows arrive in their place."""

    in_storage = True
    puts_together = False

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return the storage's memory unchanged."""
        return view

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return the tensor unchanged."""
        return full

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """List nothing: the storage gathers it."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Do nothing: the parameter is whole."""

    def free(self) -> None:
        """Do nothing: the storage frees it."""


AS_IT_LIES = AsItLies()


class AlongDim:
    """A cut along another dim: gathered as one row per rank, then copied into the full tensor.

    The full tensor has separate memory, as layers and optimizers need it contiguous.
    """

    in_storage = puts_together = True

    def __init__(self, dim: int, shape: tuple[int, ...]) -> None:
        self._dim = dim
        self._shape = shape

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Take the ranks' parts; return the full tensor's memory."""
        self._parts = [part.view(local_shape) for part in view]
        self._full = torch.empty(self._shape, dtype=view.dtype, device=view.device)
        self.free()
        return self._full.data

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a row for each rank."""
        return _row_per_rank(full, len(self._parts), self._dim)

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """List nothing: the storage gathers it."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Copy the parts into the full tensor."""
        full = self._full
        full.untyped_storage().resize_(full.nbytes)
        places = full.chunk(len(self._parts), dim=self._dim)
        torch._foreach_copy_(list(places), self._parts)

    def free(self) -> None:
        """Free the full tensor's memory."""
        self._full.untyped_storage().resize_(0)


class OwnGather:
    """The gather of a tensor subclass: ``fsdp_pre_all_gather`` encodes, ``fsdp_post_...`` decodes.

    Float8 and quantized weights of torchao use it. Source: the protocol of torch's FSDP2,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_api.py`` and its tests of all-gather extensions.
    """

    in_storage = False
    puts_together = True

    def __init__(self, policy: Any, num_ranks: int, dim: int = 0, frees: bool = True) -> None:
        self.frees = frees  # when the unit is resharded
        self._policy, self._num_ranks, self._dim = policy, num_ranks, dim
        self._version: int | None = None  # of the gathered tensor, while its memory stays
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        self._inner: list[torch.Tensor] = []

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Refuse: the parameter is in no storage."""
        raise AssertionError("a tensor with a gather of its own lies in no storage")

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full gradient's elements, rank after rank."""
        return full if self._dim == 0 else _row_per_rank(full, self._num_ranks, self._dim)

    def again(self) -> "OwnGather":
        """Return the encoding for a copy of the parameter."""
        return OwnGather(self._policy, self._num_ranks, self._dim, self.frees)

    def is_fresh(self, param: "ShardedParam") -> bool:
        """Tell whether the gathered tensor is allocated and as new as the sharded one."""
        return self._version == version_of(param.sharded._local_tensor)

    @torch.no_grad()
    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Return the items that the local tensor's ``fsdp_pre_all_gather`` gives."""
        self._version = version_of(param.sharded._local_tensor)
        local: Any = param.sharded._local_tensor.to(param.unit.comm.device)
        self._local: Any = local  # with the methods of FSDP2's protocol
        prepare = local.fsdp_pre_all_gather
        count = len(inspect.signature(prepare).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(prepare)}\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: "
                "tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        mesh = param.unit.comm.axes.mesh
        of_shards = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        args: list[Any] = [of_shards]
        if count == 5:
            args += [torch.Size(param.shape), contiguous_stride(param.shape)]
            args += [param.uses[0].module, self._policy]
        inputs, self._metadata = prepare(*args)
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
            GatherItem(Segment(o.numel(), f.numel(), 0, 0), f, o, False)
            for f, o in zip(flats, self._outputs, strict=True)
        ]

    def finish(self, param: "ShardedParam") -> torch.Tensor | None:
        """Decode the gathered bytes: into a new tensor the first time, then into the leaf."""
        outputs = tuple(
            o.view(-1, *size[1:]) for o, size in zip(self._outputs, self._sizes, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        dtype = param.unit.precision.param or param.sharded.dtype
        made: torch.Tensor | None = None
        if param.leaf is None:
            made, inner = self._local.fsdp_post_all_gather(outputs, metadata, dtype)
            self._inner = list(inner)
        else:
            for tensor in self._inner:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            with _unsafe_preserve_version_counter(param.full):  # a graph's saved tensors stay valid
                self._local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.full)
        del self._local
        return made

    def free(self) -> None:
        """Free the gathered bytes and the full tensor made from them."""
        self._version = None
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)


class Apart:
    """The parameters of a unit whose full form has memory apart from the storages' full copies.

    Those with a gather of their own are also gathered apart, in the unit's collective.
    """

    def __init__(self, params: Sequence["ShardedParam"] = ()) -> None:
        own = [(param, param.encoding) for param in params]
        self._gathered = [(p, by) for p, by in own if isinstance(by, OwnGather)]
        self._put_together = [p for p, by in own if by.in_storage and by.puts_together]
        self._arriving: list[ShardedParam] = []  # of those gathered, in the gather in flight

    @property
    def gathers(self) -> bool:
        """Tell whether a parameter is gathered apart."""
        return bool(self._gathered)

    @property
    def is_fresh(self) -> bool:
        """Tell whether all that is gathered apart is as new as its shards."""
        return not self._gathered or all(by.is_fresh(param) for param, by in self._gathered)

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers that change when a shard that is gathered apart is modified."""
        return tuple(version_of(param.sharded._local_tensor) for param, _ in self._gathered)

    def start(self, *, anew: bool) -> list[GatherItem]:
        """Return the items to gather: those of stale parameters, or of all."""
        arriving = [(p, by) for p, by in self._gathered if anew or not by.is_fresh(p)]
        self._arriving = [param for param, _ in arriving]
        return [item for param, by in arriving for item in by.start(param)]

    def finish(self) -> None:
        """Make the parameters whole after the gather."""
        for param in self._put_together:
            param.encoding.finish(param)
        for param in self._arriving:
            param.complete()

    def free(self) -> None:
        """Free the memory, as the storages free theirs."""
        for param in self._put_together:
            if param.storage.frees:
                param.encoding.free()
        for _, by in self._gathered:
            if by.frees:
                by.free()


def _row_per_rank(full: torch.Tensor, num_ranks: int, dim: int) -> torch.Tensor:
    return torch.stack([chunk.reshape(-1) for chunk in full.chunk(num_ranks, dim=dim)])
