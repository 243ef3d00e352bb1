"""Offload of inputs of checkpointed blocks to host memory, from forward to recomputation.

Note [Inputs that are moved]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
During a forward pass of the model, `ActivationOffload` sees every tensor that autograd saves,
except those saved inside a checkpoint, which torch's own hooks take. A tensor is moved if
``torch.utils.checkpoint`` saved it as the input of a region to recompute, and if it was computed
(it has a graph), is a plain dense tensor on the device, and is no view of a parameter. Memory that
is saved twice stays, because moving it would free nothing: an input of several blocks, or one that
another layer needs for its gradient. All other tensors stay unchanged.

Note [The path of an input]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The inputs of one checkpoint are a group. The eviction of a group starts when the next group is
saved, and overlaps the block that runs then. Its device memory is freed when the group after that
is saved: the compute stream first waits for the copy, so at most two groups are on the device. The
last group of a forward pass stays, as backward begins with it. When backward unpacks a group, the
previous group is fetched, overlapped with recomputation. Streams wait for each other's events; the
host does not wait.

Host memory comes in buffers, one per input. A buffer is page-locked once, and reused when the graph
of its input is freed. Steps with inputs of the same sizes take no more memory.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import function as autograd_function
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.device import DeviceTime, Event, follow_current
from shardwise.errors import StateError
from shardwise.offload.pool import Buffer, Pool
from shardwise.trace import Tracer

_LOG = logging.getLogger("shardwise")
_CHECKPOINT = vars(torch.utils.checkpoint)
_FUNCTION = vars(autograd_function)
_autograd: Any = torch._C._autograd  # its type stubs lack that results may be None


class _SavedTensor:
    """A saved tensor that stays on the device, as autograd keeps it."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached if it has a graph: an operation's saved output would be a reference cycle.
        has_graph = tensor.grad_fn is not None
        self.tensor: torch.Tensor | None = tensor.detach() if has_graph else tensor
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Return True if the tensor was changed in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor. **Raises** StateError if it was changed, as torch does."""
        assert self.tensor is not None
        if self.is_changed:
            raise _changed(self.tensor, self._version)
        return self.tensor


@dataclass(eq=False)
class _CheckpointInputs:
    """The inputs of one checkpoint, and the previous group of the same forward pass."""

    number: int  # autograd's sequence number at the checkpoint
    ready: Event  # the compute stream has computed the inputs
    before: "_CheckpointInputs | None"
    inputs: "list[weakref.ref[_OffloadedInput]]" = field(default_factory=list)

    @property
    def alive(self) -> "list[_OffloadedInput]":
        """The inputs whose graph still exists."""
        return [saved for ref in self.inputs if (saved := ref()) is not None]


class _OffloadedInput(_SavedTensor):
    """An input of a checkpoint: on the device, being evicted, or in a buffer."""

    __slots__ = (
        "_buffer",
        "_device",
        "_dtype",
        "_fetched",
        "_owner",
        "_shape",
        "_stride",
        "_written",
        "group",
    )

    def __init__(
        self, tensor: torch.Tensor, owner: "ActivationOffload", group: _CheckpointInputs
    ) -> None:
        super().__init__(tensor)
        self._owner = owner
        self.group = group
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._dtype = tensor.dtype
        self._device = tensor.device
        self._buffer: Buffer | None = None  # the copy in host memory
        self._fetched: tuple[torch.Tensor, Event] | None = None  # on the device, copied at Event
        self._written: Event | None = None  # the eviction into the buffer has ended

    def start_evict(self) -> bool:
        """Start the copy to host memory; return True if it started. A changed tensor stays."""
        if self.tensor is None or self._buffer is not None or self.is_changed:
            return False
        time = self._owner.time
        buffer = self._owner.pool.acquire(self.tensor.nbytes)
        stream = time.evict_stream
        stream.wait(self.group.ready)
        if buffer.last_use is not None:
            stream.wait(buffer.last_use)
        with stream.use(), self._owner.tracer.copies("to_host", "", self.tensor.nbytes):
            buffer.memory[: self.tensor.nbytes].copy_(_bytes_of(self.tensor), non_blocking=True)
            self._written = stream.record()
        self._buffer = buffer
        return True

    def free(self) -> None:
        """Free the device memory, after the current stream has waited for the copy."""
        assert self._written is not None
        self._owner.time.current_stream().wait(self._written)
        if not self.is_changed:  # else the copy may be of either value, and `unpack` raises
            self.tensor = None

    def cancel_evict(self) -> None:
        """Cancel the eviction, because another operation saved the same memory."""
        if self.tensor is not None and self._buffer is not None:
            self._owner.time.current_stream().wait(self._written)
            self._buffer.release()
            self._buffer = None

    def start_fetch(self) -> None:
        """Start the copy to the device, unless it is there or in flight."""
        if self.tensor is not None or self._fetched is not None:
            return
        assert self._buffer is not None
        fetched = torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )
        stream = self._owner.time.fetch_stream
        stream.wait(self._written)
        with (
            follow_current(self._owner.time, stream),
            self._owner.tracer.copies("to_device", "", fetched.nbytes),
        ):
            _bytes_of(fetched).copy_(self._buffer.memory[: fetched.nbytes], non_blocking=True)
            self._buffer.last_use = stream.record()
        self._fetched = (fetched, self._buffer.last_use)

    def unpack(self) -> torch.Tensor:
        """Return the tensor for its recomputation, and prefetch the previous group."""
        self.start_fetch()
        if self.group.before is not None:
            for saved in self.group.before.alive:
                saved.start_fetch()
        if self._fetched is None:
            return super().unpack()
        fetched, event = self._fetched
        self._fetched = None  # a retained graph fetches again
        self._owner.time.current_stream().wait(event)
        return fetched

    def __del__(self) -> None:
        if self._fetched is not None:  # fetched and not used
            self._fetched[1].wait()
        if self._buffer is not None:
            self._buffer.release()


class ActivationOffload:
    """Moves the inputs of checkpointed blocks of one model; see both Notes.

    ``parameters`` returns the memory of full parameters, which the engine manages.
    """

    def __init__(
        self,
        device: torch.device,
        time: DeviceTime,
        tracer: Tracer,
        parameters: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        self.time = time
        self.tracer = tracer
        self.pool = Pool(partial(time.host_memory, dtype=torch.uint8))
        self._device = device
        self._parameters = parameters
        self._is_open = False
        self._warnings: set[str] = set()  # given already
        # By memory: the tensor that has saved it in this forward pass.
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[_SavedTensor]]] = {}
        self._group: _CheckpointInputs | None = None  # of the last checkpoint
        self._evicting: list[_OffloadedInput] = []  # their memory must outlive the copy
        self._param_storages: set[int] | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in buffers, used or free."""
        return self.pool.num_bytes

    # -- around a forward pass of the model
    def open(self) -> None:
        """Begin a forward pass: install hooks on the tensors that autograd saves.

        Do nothing without gradients, inside a transform of torch.func, or inside other hooks on
        saved tensors, since those would no longer be called.
        """
        self.close()
        if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        outer_hooks = _autograd._top_saved_tensors_default_hooks(True)
        if outer_hooks is not None or not _autograd._saved_tensors_hooks_is_enabled():
            self._warn_once(
                "they stay on the device: other hooks on saved tensors are around the forward pass"
            )
            return
        _autograd._push_saved_tensors_default_hooks(self._pack, lambda saved: saved.unpack())
        self._is_open = True

    def close(self) -> None:
        """End the forward pass, also after an error; the inputs of the last block stay."""
        if not self._is_open:
            return
        self._is_open = False
        hooks = _autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] == self._pack:  # else the pass was interrupted
            _autograd._pop_saved_tensors_default_hooks()
        self._free_evicted()
        if self._group is None:
            self._warn_once("a forward pass had none: turn activation checkpointing on")
        self._group = None
        self._param_storages = None
        self._seen.clear()

    def _warn_once(self, why: str) -> None:
        if why not in self._warnings:
            self._warnings.add(why)
            _LOG.warning("offload: activations='cpu' moves inputs of checkpointed blocks; %s", why)

    # -- called by autograd
    def _pack(self, tensor: torch.Tensor) -> _SavedTensor:
        saved = _SavedTensor(tensor)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not is_plain or not self._is_open:
            return saved
        storage = tensor.untyped_storage()
        was_seen = self._keep_shared(storage)
        if _is_of_checkpoint(sys._getframe(1)):
            group = self._current_group()
            if self._may_move(tensor):
                saved = _OffloadedInput(tensor, self, group)
                if not was_seen:
                    group.inputs.append(weakref.ref(saved))
        if not was_seen:
            self._seen[storage._cdata] = (StorageWeakRef(storage), weakref.ref(saved))
        return saved

    def _current_group(self) -> _CheckpointInputs:
        """Return the group of the current checkpoint; start evicting the previous group."""
        number = torch.autograd._get_sequence_nr()
        before = self._group
        if before is not None and before.number == number:
            return before
        ready = self.time.current_stream().record()
        self._group = _CheckpointInputs(number, ready, before)
        self._free_evicted()
        if before is not None:
            self._evicting = [saved for saved in before.alive if saved.start_evict()]
        return self._group

    def _free_evicted(self) -> None:
        evicted = self._evicting
        self._evicting = []
        for saved in evicted:
            saved.free()

    def _may_move(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor may be moved; see Note [Inputs that are moved]."""
        if tensor.grad_fn is None or tensor.device != self._device or not tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
            return False
        if self._param_storages is None:
            self._param_storages = {t.untyped_storage()._cdata for t in self._parameters()}
        return tensor.untyped_storage()._cdata not in self._param_storages

    def _keep_shared(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the memory was saved before; that input then stays on the device too."""
        _, ref = self._seen.get(storage._cdata, (None, None))
        if ref is None:
            return False
        other = ref()
        if isinstance(other, _OffloadedInput):
            other.cancel_evict()
            self._evicting = [saved for saved in self._evicting if saved is not other]
            other.group.inputs = [ref for ref in other.group.inputs if ref() is not other]
        return True


def _is_of_checkpoint(frame: FrameType | None) -> bool:
    """Return True if torch.utils.checkpoint saves, itself or in its autograd function."""
    if frame and frame.f_globals is _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_globals is _CHECKPOINT


def _is_dense(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the flat bytes of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _changed(tensor: torch.Tensor, version: int) -> StateError:
    return StateError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of {list(tensor.shape)}, {tensor.dtype}, is at version "
        f"{tensor._version}; expected version {version}. Change a copy of it instead"
    )
