"""The memory of one unit's parameters of one dtype: persistent shards, temporary full copies.

Note [Where the shard is] in `layout.memory` defines the buffers. [S] and [P] are their sizes: S
elements of this rank's slices, P elements of the full copy, padding included.

Note [Freed memory is allocated again]
Freeing a full copy resizes its storage to zero bytes. The tensors that autograd saved still refer
to that storage, and are valid again when backward gathers into it. Autograd must not take the
gather for an in-place write. So the layers' parameters are made through ``.data``, which gives them
separate version counters (FSDP2 resets the counters instead).

Note [Secondary shards]
The ranks of a smaller axis each keep one equal part of the unit's full memory, and backward gathers
over that axis. A part is dropped when the parameters have changed. Source: FSDP2,
``fully_shard(reshard_after_forward=<int>)``; ZeRO++ (Wang et al. 2023), section 3.2, hpZ.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol

import torch

from shardwise.comm.pending import GatherItem, Pending
from shardwise.layout.boxes import contiguous_stride
from shardwise.layout.memory import StorageMemory
from shardwise.layout.segments import Layout, Segment
from shardwise.layout.wire import Wire
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.stages import Stage
from shardwise.trace import FullParamLedger
from shardwise.unit.home import Home, SlicesInFile
from shardwise.unit.partial import Unreduced


class CodedGather(Protocol):
    """Interface of the gather of encoded slices; `codes.gather` implements it."""

    items: Sequence[GatherItem]

    @property
    def memory(self) -> torch.Tensor:
        """The memory of received bytes; empty between gathers."""

    def start(self, slices: torch.Tensor, home: Home | None) -> Pending | None:
        """Encode this rank's slices into its shares; return the copy from their home, if any."""

    def finish(self) -> None:
        """Decode the received bytes into the full copy, if a gather was started."""


def _coded_gather(wire: Wire | None, rank: int, full: torch.Tensor) -> CodedGather | None:
    if wire is None:
        return None
    coded: CodedGather = import_module("shardwise.codes.gather").CodedGather(wire, rank, full)
    return coded


class Storage:
    """Master slices and full copies of the parameters that one layout describes.

    - ``master``: the flat buffer of this rank's slices, which the optimizer updates. [S] for a
      separate shard; [P] if the slices are inside the full copy, or all ranks have all elements
      (stage 0). It is in host memory or in a mapped file if the slices are offloaded.
    - ``full``: the flat full copy [P] in the computing dtype. ``copy`` allocates and frees it.
    - ``mean_memory``: the memory of the reduced gradients.
    - ``shards_state``: slices are sharded (stages 1 to 3). ``frees``: the full copy is freed after
      use.
    - ``unreduced``: this window's sums over shards, see Note [Sums over replicas].
    """

    unreduced: Unreduced | None = None

    def __init__(
        self,
        layout: Layout,
        rank: int,
        stage: Stage,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
        ledger: FullParamLedger,
        home: Home | None = None,
        coding: Coding | None = None,
    ) -> None:
        master_dtype, compute_dtype = dtypes
        self.layout = layout
        self.rank = rank
        self.home = home
        self.memory = StorageMemory(
            layout,
            stage,
            master_size=master_dtype.itemsize,
            full_size=compute_dtype.itemsize,
            casts=master_dtype != compute_dtype,
            is_offloaded=home is not None,
            keeps_device_copy=home is not None and home.keeps_device_copy,
            coding=coding if compute_dtype.is_floating_point else None,
            rank=rank,
        )
        self.shards_state = stage.shards_state
        self.frees = self.memory.frees
        allocate = torch.zeros if self.memory.aliased else torch.empty
        self.full = allocate(layout.full_numel, dtype=compute_dtype, device=device)
        numel = self.memory.local_numel
        file: SlicesInFile | None = None
        if self.memory.aliased:
            self.master = self.full
        elif home is None:
            self.master = torch.zeros(numel, dtype=master_dtype, device=device)
        elif home.files.params is not None:
            file = home.slices_in_file(numel, master_dtype)
            self.master = file.mapped
        else:
            self.master = home.allocate_for_model(numel, master_dtype)
        self.copy = FullCopy(self.full, self.frees, None if self.memory.aliased else ledger)
        self._offsets = [
            layout.piece(index, rank).shard_offset
            if stage.shards_state
            else layout.full_offset(index)
            for index in range(len(layout.params))
        ]
        self._sources = GatherSources(self.memory, self.copy.data, self.master.data, home, file)
        # If parameters are freed to save memory, the memory of their gradients is not kept either.
        is_kept = device.type == "cpu" and not stage.frees_after_backward
        self.mean_memory = MeansMemory(numel, master_dtype, device, home, is_kept=is_kept)

    @property
    def is_fresh(self) -> bool:
        """Tell whether the full copy is allocated and has the shards' present values."""
        if self.memory.aliased and not self.memory.needs_gather:
            return True
        return self.copy.version == self.master._version

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the slices, and of their gradients."""
        return self.master.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full copy, and so of full gradients."""
        return self.full.dtype

    @property
    def version(self) -> int:
        """A number that changes whenever a slice is modified."""
        return self.master._version

    def shard_offset_of(self, index: int) -> int:
        """Return the offset of this rank's slice of parameter ``index`` among its slices.

        The offset is in [S] if state is sharded, else in [P].
        """
        return self._offsets[index]

    def _slice_of(self, index: int, *, in_full: bool) -> slice:
        """Return the range of this rank's elements of a parameter, in the full copy or [S]."""
        if not self.shards_state:
            begin = self.layout.full_offset(index)
            return slice(begin, begin + self.layout.params[index].numel)
        piece = self.layout.piece(index, self.rank)
        begin = self.layout.full_offset(index) + piece.lo if in_full else piece.shard_offset
        return slice(begin, begin + piece.numel)

    def local(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's slice of parameter ``index``, sharing memory with ``master``."""
        return self.master[self._slice_of(index, in_full=self.memory.aliased)].view(local_shape)

    def local_at_offset_zero(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return `local` with storage offset 0, over the same memory.

        A DTensor whose local tensor begins inside its storage can be neither pickled nor copied
        (torch 2.11 to 2.15). Its version counter is separate, so `version` does not see its edits.
        """
        local = self.local(index, local_shape)
        begin = local.storage_offset() * local.element_size()
        memory = local.untyped_storage()[begin : begin + local.nbytes]
        moved = torch.empty(0, dtype=local.dtype, device=local.device)
        return moved.set_(memory, 0, local.shape, local.stride())

    @torch.no_grad()
    def view(self, index: int) -> torch.Tensor:
        """Return a view of the full parameter; see Note [Freed memory is allocated again]."""
        shape = self.layout.params[index].shape
        begin = self.layout.full_offset(index)
        return self.full.data.as_strided(shape, contiguous_stride(shape), begin)

    @torch.no_grad()
    def fill(self, index: int, full: torch.Tensor) -> None:
        """Write a full value into ``master``: this rank's slice, or all if it has all elements."""
        flat = full.detach().reshape(-1)
        if self.memory.aliased or not self.shards_state:
            begin = self.layout.full_offset(index)
            self.master[begin : begin + flat.numel()].copy_(flat)
            return
        piece = self.layout.piece(index, self.rank)
        self.master[self._slice_of(index, in_full=False)].copy_(flat[piece.lo : piece.hi])

    # -- the full copy and its gathers
    def free(self) -> None:
        """Free the full copy's memory if the stage does."""
        self.copy.free()

    def prepare_gather(self) -> Sequence[GatherItem]:
        """Allocate the full copy and cast or encode this rank's shares; return the gather items."""
        self.copy.allocate()
        self.copy.version = self.master._version
        return self._sources.start(self.copy.version)

    def finish_read(self) -> None:
        """Wait for `read_ahead`. **Raises** StorageError if the read has failed."""
        if self._sources.file is not None:
            self._sources.file.finish_read(self.master._version)

    def read_ahead(self) -> None:
        """Start reading slices from their file, ahead of a gather."""
        if self._sources.file is not None and not self.is_fresh:
            self._sources.file.start_read(self.master._version)

    def finish_fetch(self) -> None:
        """Wait until offloaded slices have been copied to the device."""
        self._sources.finish_fetch()

    def finish_gather(self) -> None:
        """Decode the received bytes into the full copy, if gathers are encoded."""
        if self._sources.coded is not None:
            self._sources.coded.finish()

    # -- the copy that stays on the device
    def mirror(self, index: int) -> torch.Tensor | None:
        """Return the flat copy of parameter ``index``'s slice that stays on the device.

        It is in the computing dtype, and the masters are offloaded. None if no such copy stays.
        """
        memory = self.memory
        if self._sources.resident is not None:
            return self._sources.resident[self._slice_of(index, in_full=False)]
        if self.home is None or memory.frees or memory.needs_gather or memory.wire is not None:
            return None
        return self.copy.data[self._slice_of(index, in_full=True)]

    @property
    def mirrored_version(self) -> int | None:
        """The version of the slices that every `mirror` holds."""
        return (
            self.copy.version if self._sources.resident is None else self._sources.resident_version
        )

    def note_mirrored(self, version: int) -> None:
        """Record that every `mirror` now holds a version of the slices."""
        if self._sources.resident is None:
            self.copy.version = version
        else:
            self._sources.resident_version = version

    # -- figures
    @property
    def coded_memory(self) -> torch.Tensor | None:
        """The memory of received encoded bytes, empty between gathers; None if not encoded."""
        return None if self._sources.coded is None else self._sources.coded.memory

    @property
    def coding(self) -> Coding | None:
        """The coding of gathers; None if they are not encoded."""
        return None if self._sources.coded is None else self.memory.coding

    @property
    def kept_bytes(self) -> int:
        """Bytes of the full copy that is allocated now, without slices inside it."""
        return self.memory.additional_bytes if self.copy.is_allocated else 0


class FullCopy:
    """The memory of full parameters: allocated by gathers, freed after use if the stage ``frees``.

    ``ledger`` counts it; None if the slices are inside. ``version`` is the version of the slices
    whose values it has; None if it has no values.
    """

    def __init__(self, full: torch.Tensor, frees: bool, ledger: FullParamLedger | None) -> None:
        self.data = full.data
        self.is_allocated = True
        self.version: int | None = None
        self._nbytes = full.nbytes
        self._frees = frees
        self._ledger = ledger
        if ledger is not None:
            ledger.allocate(self._nbytes)

    def allocate(self) -> None:
        """Allocate the memory, unless it is allocated."""
        if not self.is_allocated:
            self.data.untyped_storage().resize_(self._nbytes)
            self.is_allocated = True
            if self._ledger is not None:
                self._ledger.allocate(self._nbytes)

    @property
    def is_held(self) -> bool:
        """Tell whether the memory could not be freed, as ``tensor.numpy()`` was called on it."""
        return self._frees and self.is_allocated and not self.data.untyped_storage().resizable()

    def free(self) -> None:
        """Free the memory if the stage does; it has no values afterwards."""
        if self._frees and self.is_allocated:
            self.version = None
            if self.is_held:
                return
            self.data.untyped_storage().resize_(0)
            self.is_allocated = False
            if self._ledger is not None:
                self._ledger.free(self._nbytes)

    def count_in(self, ledger: FullParamLedger) -> None:
        """Count the memory in another ledger from now on."""
        if self._ledger is not None:
            if self.is_allocated:
                self._ledger.free(self._nbytes)
                ledger.allocate(self._nbytes)
            self._ledger = ledger


class GatherSources:
    """The tensors that this rank sends in gathers of a storage: its share of each segment.

    A share is sent from one of four memories:

    - from the slices themselves, if they have the computing dtype;
    - from ``resident``, a copy of offloaded slices in the computing dtype that stays on the device;
    - from its place in the full copy, where it is cast or copied first, from the device, the host,
      or a ``file``;
    - from the message of an encoded gather, ``coded``.

    The gather items are made once: tensors stay valid when their memory is freed and allocated.
    """

    def __init__(
        self,
        memory: StorageMemory,
        full: torch.Tensor,
        slices: torch.Tensor,
        home: Home | None,
        file: SlicesInFile | None,
    ) -> None:
        self._memory = memory
        self._full = full
        self._slices = slices
        self._home = home
        self.file = file
        self.coded = _coded_gather(memory.wire, memory.rank, full)
        self.resident: torch.Tensor | None = None
        self.resident_version: int | None = None
        if memory.copy_bytes:
            self.resident = torch.empty(memory.local_numel, dtype=full.dtype, device=full.device)
        self._fetch: Pending | None = None
        self._shares: list[torch.Tensor] = []  # in the slices, or in `resident`
        self._items: list[GatherItem] = []
        if not memory.stage.shards_state or self.coded is not None:
            return
        for segment in memory.layout.segments:
            begin, end = segment.share(memory.rank)
            offset = segment.full_offset
            share_in_full = full[offset + begin : offset + end]
            gathered = full[offset : offset + segment.full_numel(memory.layout.num_ranks)]
            share = share_in_full
            if not memory.aliased:
                shard = slices if self.resident is None else self.resident
                share = shard[segment.shard_offset :][: end - begin]
            in_place = memory.gathers_in_place
            source = share_in_full if in_place else share
            self._shares.append(share)
            self._items.append(GatherItem(segment, source, gathered, in_place))

    def start(self, version: int) -> Sequence[GatherItem]:
        """Start copying the shares of a version of the slices; return the gather items."""
        if self.coded is not None:
            slices = self._slices if self.file is None else self.file.take_slices(version)
            self._fetch = self.coded.start(slices, self._home)
            return self.coded.items
        if not self._memory.stage.shards_state:
            if not self._memory.aliased:
                self._copy_slices([self._slices], [self._full], version)
            return ()
        if self.resident is not None and self.resident_version != version:
            self.resident_version = version
            self._copy_slices([self._slices], [self.resident], version)
        if self._memory.fills_before_gather and self._items:
            self._copy_slices(self._shares, [item.source for item in self._items], version)
        return self._items

    def _copy_slices(
        self, slices: list[torch.Tensor], targets: list[torch.Tensor], version: int
    ) -> None:
        """Copy slices, or start copying them from their home."""
        if self._home is None:
            torch._foreach_copy_(targets, slices)
            return
        if self.file is not None:
            memory = self.file.take_slices(version)
            slices = [memory[part.storage_offset() :][: part.numel()] for part in slices]
        self._fetch = self._home.start_fetch(targets, slices)

    def finish_fetch(self) -> None:
        """Wait until offloaded slices have been copied to the device."""
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None
            if self.file is not None:
                self.file.release()


class MeansMemory:
    """Memory for the means of a storage's gradients, on the device and at the slices' home.

    The means are [S], or [P] at stage 0. If ``is_kept``, the device's memory is kept for the next
    step. Fresh memory costs the CPU a page fault per 4 KiB, a tenth of a training step; allocators
    of other devices reuse memory.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        home: Home | None = None,
        *,
        is_kept: bool = False,
    ) -> None:
        self._numel = numel
        self._dtype = dtype
        self._device = device
        self._home = home
        self._is_kept = is_kept
        self._on_device = _ReusableBuffer()
        self._at_home = _ReusableBuffer()

    def take_buffer(self, dtype: torch.dtype, num_extra: int = 0) -> torch.Tensor:
        """Return uninitialised memory for the means, and for ``num_extra`` elements after them."""
        numel = self._numel + num_extra
        if not self._is_kept:
            return torch.empty(numel, dtype=dtype, device=self._device)
        buffer = self._on_device.lend()
        if buffer is None or (buffer.numel(), buffer.dtype) != (numel, dtype):
            buffer = self._on_device.keep(torch.empty(numel, dtype=dtype, device=self._device))
        return buffer

    def drop_kept(self) -> None:
        """Drop the memory kept on the device; the next step allocates new memory."""
        self._on_device = _ReusableBuffer()

    def reserve(self) -> None:
        """Allocate the memory at home to which means are evicted.

        If it is in use, by another micro-batch or by the user, an eviction allocates more.
        """
        if self._home is not None and self._home.files.grads is None:
            self._at_home.keep(self._home.allocate_for_model(self._numel, self._dtype))

    def start_evict(self, means: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start copying the means to the slices' home; return the destination.

        The destination is the means themselves if the slices are not offloaded.
        """
        if self._home is None:
            return means, Pending.of_copies()
        return self._home.start_evict(means, self._dtype, self._at_home.lend())

    @property
    def kept(self) -> list[torch.Tensor]:
        """The memory kept for means, on the device and at home."""
        buffers = (self._on_device, self._at_home)
        return [buffer.memory for buffer in buffers if buffer.memory is not None]

    @property
    def bytes_at_home(self) -> int:
        """Bytes reserved at home."""
        return 0 if self._at_home.memory is None else self._at_home.memory.nbytes

    def has_at_home(self, grad: torch.Tensor) -> bool:
        """Tell whether a mean is in the memory that `reserve` has allocated."""
        kept = self._at_home.memory
        if kept is None:
            return False
        return grad.untyped_storage().data_ptr() == kept.untyped_storage().data_ptr()


class _ReusableBuffer:
    """A buffer that is lent again when no other tensor refers to its memory.

    Users may keep a mean, so the buffer asks torch how many tensors share its memory.
    """

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._num_references = 0

    def keep(self, memory: torch.Tensor) -> torch.Tensor:
        """Keep memory, and lend it."""
        self.memory = memory
        self._num_references = _num_references(memory)
        return memory[:]

    def lend(self) -> torch.Tensor | None:
        """Return a new tensor over the memory; None if it is in use, or if there is none."""
        if self.memory is None or _num_references(self.memory) > self._num_references:
            return None
        return self.memory[:]


def _num_references(tensor: torch.Tensor) -> int:
    """Count the tensors that share the tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


class SecondaryShard:
    """This rank's parts of one unit's full copies; backward gathers them over ``axis``.

    See Note [Secondary shards].
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._keeps_parts = False
        # One part of each storage's full copy, and the versions of the parameters that it has.
        self._parts: list[torch.Tensor] = []
        self._versions: list[int] = []

    @contextmanager
    def keeping_parts(self) -> Iterator[None]:
        """Keep parts of the storages that are freed inside, if a backward pass follows."""
        self._keeps_parts = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._keeps_parts = False

    @torch.no_grad()
    def keep_parts(self, storages: Iterable[Storage], versions: list[int]) -> None:
        """Copy this rank's parts of full storages that are about to be freed."""
        if self._keeps_parts:
            size, rank = self.axis.size, self.axis.rank
            self._versions = versions
            self._parts = [storage.full.data.chunk(size)[rank].clone() for storage in storages]

    def drop_parts(self) -> None:
        """Drop the parts, after the parameters were replaced."""
        self._parts = []

    def gather_items(self, storages: Sequence[Storage], versions: list[int]) -> list[GatherItem]:
        """Return the gather items of the parts, and drop these; none if the parts are stale."""
        parts, self._parts = self._parts, []
        if not parts or self._versions != versions:
            return []
        items = []
        for storage, part in zip(storages, parts, strict=True):
            storage.copy.allocate()
            segment = Segment(storage.full.numel(), part.numel(), full_offset=0, shard_offset=0)
            items.append(GatherItem(segment, part, storage.full.data, in_place=False))
        return items
