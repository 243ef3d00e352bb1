"""Offload of inputs of checkpointed blocks to host memory, from forward to recomputation.

Note [Which inputs go]
~~~~~~~~~~~~~~~~~~~~~~
During a forward pass of the model, `Activations` sees every tensor that autograd saves, except
those saved inside a checkpoint, which torch's own hooks take. A tensor is moved if
``torch.utils.checkpoint`` saved it as the input of a region to recompute, and if it was computed
(it has a graph), is a plain dense tensor on the device, and is no view of a parameter. Memory that
is saved twice stays, because moving it would free nothing: an input of several blocks, or one that
another layer needs for its gradient. All other tensors stay unchanged.

Note [The way of an input]
~~~~~~~~~~~~~~~~~~~~~~~~~~
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
_autograd: Any = torch._C._autograd  # whose stubs miss None


class _Kept:
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
class _Group:
    """The inputs of one checkpoint, and the previous group of the same forward pass."""

    number: int  # autograd's sequence number at the checkpoint
    ready: Event
    before: "_Group | None"
    inputs: "list[weakref.ref[_Input]]" = field(default_factory=list)

    @property
    def alive(self) -> "list[_Input]":
        """The inputs whose graph still exists."""
        return [each for found in self.inputs if (each := found()) is not None]


class _Input(_Kept):
    """An input of a checkpoint: on the device, being evicted, or in a buffer."""

    __slots__ = (
        *("_buffer", "_device", "_dtype", "_fetched", "_owner", "_shape", "_stride"),
        *("_written", "group"),
    )

    def __init__(self, tensor: torch.Tensor, owner: "Activations", group: _Group) -> None:
        super().__init__(tensor)
        self._owner, self.group = owner, group
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._buffer: Buffer | None = None
        self._fetched: tuple[torch.Tensor, Event] | None = None
        self._written: Event | None = None  # of the buffer

    def start_evict(self) -> bool:
        """Start the copy to host memory; return True if it started. A changed tensor stays."""
        if self.tensor is None or self._buffer is not None or self.is_changed:
            return False
        time = self._owner.time
        buffer = self._owner.pool.take(self.tensor.nbytes)
        stream = time.evict_stream
        stream.wait(self.group.ready)
        if buffer.last_use is not None:
            stream.wait(buffer.last_use)
        with stream.use(), self._owner.tracer.copies("to_host", "", self.tensor.nbytes):
            buffer.memory[: self.tensor.nbytes].copy_(_bytes_of(self.tensor), non_blocking=True)
            self._written = stream.record()
        self._buffer = buffer
        return True

    def give_up(self) -> None:
        """Free the device memory, after the current stream has waited for the copy."""
        assert self._written is not None
        self._owner.time.current_stream().wait(self._written)
        if not self.is_changed:  # else the copy may be of either value, and `unpack` raises
            self.tensor = None

    def stay(self) -> None:
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
        made = torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )
        stream = self._owner.time.fetch_stream
        stream.wait(self._written)
        with (
            follow_current(self._owner.time, stream),
            self._owner.tracer.copies("to_device", "", made.nbytes),
        ):
            _bytes_of(made).copy_(self._buffer.memory[: made.nbytes], non_blocking=True)
            self._buffer.last_use = stream.record()
        self._fetched = made, self._buffer.last_use

    def unpack(self) -> torch.Tensor:
        """Return the tensor for its recomputation, and prefetch the previous group."""
        self.start_fetch()
        if self.group.before is not None:
            for each in self.group.before.alive:
                each.start_fetch()
        if self._fetched is None:
            return super().unpack()
        (made, event), self._fetched = self._fetched, None  # a retained graph fetches again
        self._owner.time.current_stream().wait(event)
        return made

    def __del__(self) -> None:
        if self._fetched is not None:  # fetched and not used
            self._fetched[1].wait()
        if self._buffer is not None:
            self._buffer.release()


class Activations:
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
        self._told: set[str] = set()
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[_Kept]]] = {}
        self._group: _Group | None = None
        self._under_way: list[_Input] = []  # being evicted; their memory must outlive the copy
        self._of_parameters: set[int] | None = None

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
        around = _autograd._top_saved_tensors_default_hooks(True)
        if around is not None or not _autograd._saved_tensors_hooks_is_enabled():
            self._tell(
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
        self._give_up()
        if self._group is None:
            self._tell("a forward pass had none: turn activation checkpointing on")
        self._group = self._of_parameters = None
        self._seen.clear()

    def _tell(self, why: str) -> None:
        if why not in self._told:
            self._told.add(why)
            _LOG.warning("offload: activations='cpu' moves inputs of checkpointed blocks; %s", why)

    # -- called by autograd
    def _pack(self, tensor: torch.Tensor) -> _Kept:
        saved = _Kept(tensor)
        is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not is_plain or not self._is_open:
            return saved
        storage = tensor.untyped_storage()
        was_seen = self._let_stay(storage)
        if _is_of_checkpoint(sys._getframe(1)):
            group = self._current_group()
            if self._may_go(tensor):
                saved = _Input(tensor, self, group)
                if not was_seen:
                    group.inputs.append(weakref.ref(saved))
        if not was_seen:
            self._seen[storage._cdata] = StorageWeakRef(storage), weakref.ref(saved)
        return saved

    def _current_group(self) -> _Group:
        """Return the group of the current checkpoint; start evicting the previous group."""
        number = torch.autograd._get_sequence_nr()
        before = self._group
        if before is not None and before.number == number:
            return before
        ready = self.time.current_stream().record()
        self._group = _Group(number, ready, before)
        self._give_up()
        if before is not None:
            self._under_way = [each for each in before.alive if each.start_evict()]
        return self._group

    def _give_up(self) -> None:
        under_way, self._under_way = self._under_way, []
        for each in under_way:
            each.give_up()

    def _may_go(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor may be moved; see Note [Which inputs go]."""
        if tensor.grad_fn is None or tensor.device != self._device or not tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
            return False
        if self._of_parameters is None:
            self._of_parameters = {t.untyped_storage()._cdata for t in self._parameters()}
        return tensor.untyped_storage()._cdata not in self._of_parameters

    def _let_stay(self, storage: torch.UntypedStorage) -> bool:
        """Return True if the memory was saved before; its holder then stays on the device."""
        _, found = self._seen.get(storage._cdata, (None, None))
        if found is None:
            return False
        other = found()
        if isinstance(other, _Input):
            other.stay()
            self._under_way = [each for each in self._under_way if each is not other]
            other.group.inputs = [each for each in other.group.inputs if each() is not other]
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
