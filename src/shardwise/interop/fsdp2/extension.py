"""Tensor subclasses that say themselves what is gathered: ``fsdp_pre_all_gather`` and its like.

A local tensor with the two methods is not gathered as it lies: the first gives what to gather, the
second makes the full tensor of what came. Float8 and quantized weights use this.
"""

import inspect
from typing import Any

import torch

from shardwise.comm.pending import GatherItem
from shardwise.layout.segments import Segment


class Extension:
    """The gathers of one parameter whose local tensor brings the two methods."""

    def __init__(self) -> None:
        self._metadata: Any = None
        self._outputs: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []
        self._inner: list[torch.Tensor] = []

    @staticmethod
    def of(local: torch.Tensor) -> "Extension | None":
        """Return an extension for a local tensor that has the methods, else None."""
        has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
        if has[0] != has[1]:
            raise AssertionError(
                "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
                f"all-gather extensions: {local}"
            )
        return Extension() if has[0] else None

    @torch.no_grad()
    def start(self, slot: Any) -> list[GatherItem]:
        """Ask the local tensor what to gather, and list it."""
        local = slot.param._local_tensor.to(slot.unit.device)
        self._local = local
        prepare = local.fsdp_pre_all_gather
        count = len(inspect.signature(prepare).parameters)
        if count not in (1, 5):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {inspect.signature(prepare)}\nExpects "
                "fsdp_pre_all_gather(self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: "
                "tuple[int, ...], module: nn.Module, mp_policy: MixedPrecisionPolicy)"
            )
        args: list[Any] = [slot.unit.shard_mesh]
        if count == 5:
            size = torch.Size(slot.shape)
            stride = torch.empty(size, device="meta").stride()
            args += [size, stride, slot.uses[0].module, slot.unit.settings.mp]
        inputs, self._metadata = prepare(*args)
        uneven = local.size() != slot.padded_size
        if count == 5 and uneven and any(t.size() != slot.padded_size for t in inputs):
            raise AssertionError(
                "When a parameter is unevenly sharded by FSDP "
                f"(orig size={torch.Size(slot.shape)}, FSDP world size={slot.num_ranks}), "
                "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
                f"{slot.padded_size} but got {[t.size() for t in inputs]}"
            )
        self._sizes = [t.size() for t in inputs]
        flats = [t.contiguous().view(-1) for t in inputs]
        if not self._outputs:
            self._outputs = [t.new_empty(t.numel() * slot.num_ranks) for t in flats]
        for output in self._outputs:
            output.untyped_storage().resize_(output.nbytes)
        return [
            GatherItem(Segment(o.numel(), f.numel(), 0, 0), f, o, False)
            for f, o in zip(flats, self._outputs, strict=True)
        ]

    def finish(self, leaf: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """Make the full tensor of what came: a new one the first time, else inside ``leaf``."""
        outputs = tuple(
            o.view(-1, *size[1:]) for o, size in zip(self._outputs, self._sizes, strict=True)
        )
        metadata, self._metadata = self._metadata, None
        made: torch.Tensor | None = None
        if leaf is None:
            made, inner = self._local.fsdp_post_all_gather(outputs, metadata, dtype)
            self._inner = list(inner)
        else:
            for tensor in self._inner:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
            self._local.fsdp_post_all_gather(outputs, metadata, dtype, out=leaf)
        del self._local
        return made

    def free(self) -> None:
        """Give back the memory of what was gathered and of what was made of it."""
        for tensor in (*self._outputs, *self._inner):
            tensor.untyped_storage().resize_(0)
