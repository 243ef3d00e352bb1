"""Inputs of checkpointed blocks: in host memory between their forward and their recomputation.

Note [Which inputs go]
~~~~~~~~~~~~~~~~~~~~~~
While a forward pass of the model runs, everything that autograd saves passes `Activations`, but for
what a checkpoint saves inside: torch's own hooks take that. Of what passes, a tensor goes if
``torch.utils.checkpoint`` has saved it, as the input of a region that it will run again, and it was
computed (it has a graph), is a plain dense tensor on the device, and is no view of a parameter.
Memory that is saved a second time stays, as moving it would free nothing: what several blocks take,
and what another layer needs for its gradient too. All else that passes is kept as it is.

Note [The way of an input]
~~~~~~~~~~~~~~~~~~~~~~~~~~
The inputs of one checkpoint are a group. A group is evicted when the next one is saved, behind the
block that runs then, and given up when the one after that is: the compute stream waits for the copy
first, so two groups are on the device at most. The last one of a forward pass stays, as backward
begins with it. When backward asks for a group, the one before it is fetched, behind the block that
is computed again. Each stream waits for events of the others, and the host for none.

Host memory is taken in slots, each for one input, page-locked once and used again when the graph of
the input is gone. Steps whose inputs are as large as before take no more; where one needs a larger
slot than is free, a smaller free one is given back for it.
"""

import logging
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils.checkpoint
from torch.autograd import function as autograd_function
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.device import DeviceTime, Event, follow_current
from shardwise.errors import StateError
from shardwise.trace import Tracer

_LOG = logging.getLogger("shardwise")
_CHECKPOINT = vars(torch.utils.checkpoint)
_FUNCTION = vars(autograd_function)
_autograd: Any = torch._C._autograd


@dataclass(eq=False)
class _Slot:
    """Host memory for one input, and who has used it last."""

    memory: torch.Tensor  # uint8
    written: Event | None = None
    read: Event | None = None


class _Slots:
    """The host memory of one model's inputs; see Note [The way of an input]."""

    def __init__(self, time: DeviceTime) -> None:
        self._time = time
        self._free: list[_Slot] = []
        self.num_bytes = 0
        self.num_made = 0

    def take(self, num_bytes: int) -> _Slot:
        """Return the smallest free slot that is large enough, or a new one."""
        free = sorted(self._free, key=lambda slot: slot.memory.numel())
        found = next((slot for slot in free if slot.memory.numel() >= num_bytes), None)
        if found is not None:
            self._free.remove(found)
            return found
        if free:
            self._free.remove(free[-1])
            self.num_bytes -= free[-1].memory.numel()
        self.num_made += 1
        self.num_bytes += num_bytes
        return _Slot(self._time.host_memory(num_bytes, torch.uint8))

    def give_back(self, slot: _Slot) -> None:
        """Let a slot be used again; who writes it waits for who has read it."""
        self._free.append(slot)


class _Kept:
    """What autograd keeps in place of a saved tensor, which stays where it is."""

    __slots__ = ("__weakref__", "_version", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached where it has a graph: that of an operation's own output would hold itself.
        has_graph = tensor.grad_fn is not None
        self.tensor: torch.Tensor | None = tensor.detach() if has_graph else tensor
        self._version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Tell whether the tensor was changed in place since it was saved."""
        return self.tensor is not None and self.tensor._version != self._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor. **Raises** StateError where it was changed, as torch does."""
        assert self.tensor is not None
        if self.is_changed:
            raise _changed(self.tensor, self._version)
        return self.tensor


@dataclass(eq=False)
class _Group:
    """The inputs of one checkpoint, and those of the one before it in the same forward pass."""

    number: int  # of operations that autograd had recorded
    ready: Event
    before: "_Group | None"
    inputs: "list[weakref.ref[_Input]]" = field(default_factory=list)

    @property
    def alive(self) -> "list[_Input]":
        """Those whose graph is still there."""
        return [each for found in self.inputs if (each := found()) is not None]


class _Input(_Kept):
    """An input of a checkpoint: on the device, being evicted, or in a slot."""

    __slots__ = ("_device", "_dtype", "_fetched", "_owner", "_shape", "_slot", "_stride", "group")

    def __init__(self, tensor: torch.Tensor, owner: "Activations", group: _Group) -> None:
        super().__init__(tensor)
        self._owner, self.group = owner, group
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._dtype, self._device = tensor.dtype, tensor.device
        self._slot: _Slot | None = None
        self._fetched: tuple[torch.Tensor, Event] | None = None

    def start_evict(self) -> bool:
        """Start the copy to host memory; tell whether there is one. What was changed stays."""
        if self.tensor is None or self._slot is not None or self.is_changed:
            return False
        time = self._owner.time
        slot = self._owner.slots.take(self.tensor.nbytes)
        stream = time.evict_stream
        stream.wait(self.group.ready)
        if slot.read is not None:
            stream.wait(slot.read)
        with stream.use(), self._owner.tracer.copies("to_host", "", self.tensor.nbytes):
            slot.memory[: self.tensor.nbytes].copy_(_bytes_of(self.tensor), non_blocking=True)
            slot.written = stream.record()
        self._slot = slot
        return True

    def give_up(self) -> None:
        """Free the memory on the device, in the order of the current stream."""
        assert self._slot is not None and self._slot.written is not None
        self._owner.time.current_stream().wait(self._slot.written)
        if not self.is_changed:  # else the copy may be of either, and `unpack` says so
            self.tensor = None

    def stay(self) -> None:
        """Stay on the device: its memory was saved by somebody else too."""
        if self.tensor is not None and self._slot is not None:
            self._owner.time.current_stream().wait(self._slot.written)
            self._owner.slots.give_back(self._slot)
            self._slot = None

    def start_fetch(self) -> None:
        """Start the copy back to the device, unless it is there or under way."""
        if self.tensor is not None or self._fetched is not None:
            return
        assert self._slot is not None
        made = torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )
        stream = self._owner.time.fetch_stream
        stream.wait(self._slot.written)
        with (
            follow_current(self._owner.time, stream),
            self._owner.tracer.copies("to_device", "", made.nbytes),
        ):
            _bytes_of(made).copy_(self._slot.memory[: made.nbytes], non_blocking=True)
            self._slot.read = stream.record()
        self._fetched = made, self._slot.read

    def unpack(self) -> torch.Tensor:
        """Return the tensor for its recomputation, and fetch those that are asked for next."""
        self.start_fetch()
        if self.group.before is not None:
            for each in self.group.before.alive:
                each.start_fetch()
        if self._fetched is None:
            return super().unpack()
        (made, event), self._fetched = self._fetched, None  # a graph that is kept fetches again
        self._owner.time.current_stream().wait(event)
        return made

    def __del__(self) -> None:
        if self._fetched is not None:  # and nobody has asked for it
            self._fetched[1].wait()
        if self._slot is not None:
            self._owner.slots.give_back(self._slot)


class Activations:
    """Moves the inputs of checkpointed blocks of one model; see both Notes.

    ``parameters`` returns the memory of full parameters, which is the engine's alone.
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
        self.slots = _Slots(time)
        self._device = device
        self._parameters = parameters
        self._is_open = False
        self._told: set[str] = set()
        self._seen: dict[int, tuple[StorageWeakRef, weakref.ref[_Kept]]] = {}
        self._group: _Group | None = None
        self._under_way: list[_Input] = []  # being evicted: their memory must outlive that
        self._of_parameters: set[int] | None = None

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that inputs have, whether or not one is there now."""
        return self.slots.num_bytes

    # -- around a forward pass of the model
    def open(self) -> None:
        """Begin a forward pass: what autograd saves passes here from now on.

        Not without gradients, nor in a transform of torch.func, nor where somebody else's hooks on
        saved tensors are around the pass, which would not get theirs any more.
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
        """End the forward pass, also one that raised; the inputs of the last block stay."""
        if not self._is_open:
            return
        self._is_open = False
        hooks = _autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] == self._pack:  # else a pass that was interrupted left it
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

    # -- what autograd calls
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
        """Return the group of the checkpoint that saves now; send the one before on its way."""
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
        """Tell whether a tensor is one that may be moved; see Note [Which inputs go]."""
        if tensor.grad_fn is None or tensor.device != self._device or not tensor.numel():
            return False
        if tensor.is_conj() or tensor.is_neg() or not _is_dense(tensor):
            return False
        if self._of_parameters is None:
            self._of_parameters = {t.untyped_storage()._cdata for t in self._parameters()}
        return tensor.untyped_storage()._cdata not in self._of_parameters

    def _let_stay(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether memory was saved before; what holds it stays where it is."""
        _, found = self._seen.get(storage._cdata, (None, None))
        if found is None:
            return False
        other = found()
        if isinstance(other, _Input):
            other.stay()
            self._under_way = [each for each in self._under_way if each is not other]
            other.group.inputs = [each for each in other.group.inputs if each() is not other]
        return True


def _is_of_checkpoint(frame: Any) -> bool:
    """Tell whether torch.utils.checkpoint saves, itself or by an autograd function of its own."""
    if frame.f_globals is _FUNCTION:
        frame = frame.f_back
    return frame is not None and frame.f_globals is _CHECKPOINT


def _is_dense(tensor: torch.Tensor) -> bool:
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a dense tensor, flat."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _changed(tensor: torch.Tensor, version: int) -> StateError:
    return StateError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of {list(tensor.shape)}, {tensor.dtype}, is at version "
        f"{tensor._version}; expected version {version}. Change a copy of it instead"
    )
