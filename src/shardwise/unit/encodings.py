"""How a parameter's elements are sent, and how what arrives becomes the full parameter.

As they lie in the unit's memory (cast there, where the layers compute in another dtype), cut along
another dim than the first, or as a tensor says itself.
"""

import inspect
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd import _unsafe_preserve_version_counter

from shardwise.comm.pending import GatherItem
from shardwise.layout.segments import Segment
from shardwise.tensor.inner import version_of

if TYPE_CHECKING:
    from shardwise.unit.param import ShardedParam


class Encoding(Protocol):
    """How one parameter is gathered.

    ``in_storage``: its elements lie in a storage of the unit, which gathers them.
    ``puts_together``: the full parameter has memory of its own, which is freed with the others'.
    """

    in_storage: bool
    puts_together: bool

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Take the storage's full memory of the parameter; return what the layers read."""

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full tensor's elements as they lie in a storage, each rank's behind another."""

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """List what is gathered beside the storage's items."""

    def finish(self, param: "ShardedParam") -> torch.Tensor | None:
        """Make the parameter whole after the gather; return it where it is a new tensor."""

    def free(self) -> None:
        """Give back the memory that is the parameter's own."""


class AsItLies:
    """Cut along dim 0: every rank's rows arrive in their place."""

    in_storage = True
    puts_together = False

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return the storage's memory as it is."""
        return view

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return full

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """List nothing: the storage gathers it."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Do nothing: it is whole."""

    def free(self) -> None:
        """Do nothing: the storage frees it."""


AS_IT_LIES = AsItLies()


class AlongDim:
    """Cut along another dim: gathered rank by rank, one row each, and then put together.

    In memory of its own, as layers and optimizers want it contiguous.
    """

    in_storage = puts_together = True

    def __init__(self, dim: int, shape: tuple[int, ...]) -> None:
        self._dim = dim
        self._shape = shape

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Take the ranks' parts; return the memory that they are put together in."""
        self._parts = [part.view(local_shape) for part in view]
        self._full = torch.empty(self._shape, dtype=view.dtype, device=view.device)
        self.free()
        return self._full.data

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a row for each rank."""
        return torch.stack([c.reshape(-1) for c in full.chunk(len(self._parts), dim=self._dim)])

    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """List nothing: the storage gathers it."""
        return []

    def finish(self, param: "ShardedParam") -> None:
        """Put the parts together."""
        full = self._full
        full.untyped_storage().resize_(full.nbytes)
        places = full.chunk(len(self._parts), dim=self._dim)
        torch._foreach_copy_(list(places), self._parts)

    def free(self) -> None:
        """Give back the memory that they were put together in."""
        self._full.untyped_storage().resize_(0)


class OwnGather:
    """The tensor's own: ``fsdp_pre_all_gather`` says what is sent, ``fsdp_post_...`` what came.

    Float8 and quantized weights of torchao use this. Source: the protocol of torch's FSDP2,
    ``torch/distributed/fsdp/_fully_shard/_fsdp_api.py`` and its tests of all-gather extensions.
    """

    in_storage = False
    puts_together = True

    def __init__(self, policy: Any, frees: bool = True) -> None:
        self.frees = frees  # when the unit gives its full parameters up
        self._policy = policy
        self._version: int | None = None  # of what was gathered last, while its memory stays
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        self._inner: list[torch.Tensor] = []

    def attach(self, view: torch.Tensor, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Refuse: nothing of it lies in a storage."""
        raise AssertionError("a tensor with a gather of its own lies in no storage")

    def spread(self, full: torch.Tensor) -> torch.Tensor:
        """Return a full gradient as it is: every rank's rows lie one after the other."""
        return full

    def again(self) -> "OwnGather":
        """Return one for a copy of the parameter."""
        return OwnGather(self._policy, self.frees)

    def is_fresh(self, param: "ShardedParam") -> bool:
        """Tell whether what was gathered last is there, and not older than the sharded one."""
        return self._version == version_of(param.sharded._local_tensor)

    @torch.no_grad()
    def start(self, param: "ShardedParam") -> list[GatherItem]:
        """Ask the local tensor what to gather, and list it."""
        self._version = version_of(param.sharded._local_tensor)
        local = param.sharded._local_tensor.to(param.unit.comm.device)
        self._local = local
        prepare = local.fsdp_pre_all_gather
        count = len(inspect.signature(prepare).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(prepare)}\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: "
                "tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        args: list[Any] = [param.unit.shard_mesh]
        if count == 5:
            size = torch.Size(param.shape)
            stride = torch.empty(size, device="meta").stride()
            args += [size, stride, param.uses[0].module, self._policy]
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
        """Make the full tensor of what came: a new one the first time, else inside the leaf."""
        outputs = tuple(
            o.view(-1, *size[1:]) for o, size in zip(self._outputs, self._sizes, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        dtype = param.unit.precision.param or param.sharded.dtype
        made: torch.Tensor | None = None
        if param.full is None:
            made, inner = self._local.fsdp_post_all_gather(outputs, metadata, dtype)
            self._inner = list(inner)
        else:
            for tensor in self._inner:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            with _unsafe_preserve_version_counter(param.full):  # what a graph has saved is whole
                self._local.fsdp_post_all_gather(outputs, metadata, dtype, out=param.full)
        del self._local
        return made

    def free(self) -> None:
        """Give back the memory of what was gathered and of what was made of it."""
        self._version = None
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)
