"""The memory of one unit's parameters of one dtype: shards that persist, full copies that do not.

`layout.memory`, Note [Where the shard lies], defines the buffers.

Note [Freed storage comes back to life]
Freeing a full copy resizes its storage to zero bytes. The tensors that autograd saved still refer
to that storage, and are valid again when backward gathers into it. The gather must not look like an
in-place edit to autograd. So the layers' parameters are made through ``.data``, which gives them
separate version counters (FSDP2 resets the counters instead).

Note [Spread over fewer ranks]
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
from shardwise.layout.memory import Memory
from shardwise.layout.segments import Layout, Segment
from shardwise.layout.wire import Wire
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.stages import Stage
from shardwise.trace import FullParamLedger
from shardwise.unit.home import Home, SlicesInFile
from shardwise.unit.partial import Unreduced


class CodedGather(Protocol):
    """The gather of encoded slices, see `codes.gather`, which is not part of the core."""

    items: Sequence[GatherItem]

    @property
    def memory(self) -> torch.Tensor:
        """The memory of arriving bytes; empty between gathers."""

    def start(self, slices: torch.Tensor, home: Home | None) -> Pending | None:
        """Encode this rank's slices into its shares; return their copy from home, if any."""

    def finish(self) -> None:
        """Decode arrived bytes into the full copy; do nothing if no gather was started."""


def _coded_gather(wire: Wire | None, rank: int, full: torch.Tensor) -> CodedGather | None:
    if wire is None:
        return None
    made: CodedGather = import_module("shardwise.codes.gather").CodedGather(wire, rank, full)
    return made


class Storage:
    """Master slices and full copies of the parameters that one layout describes.

    ``master`` is the buffer whose elements the optimizer updates: [S] for a separate shard, [P] if
    the slices lie inside the full copy or (stage 0) every rank owns everything.
    """

    unreduced: Unreduced | None = None  # see Note [Sums over replicas]

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
        self.layout, self.rank, self.home = layout, rank, home
        casts = master_dtype != compute_dtype
        sizes = master_dtype.itemsize, compute_dtype.itemsize
        stays = home is not None and home.leaves_copy
        coding = coding if compute_dtype.is_floating_point else None
        self.memory = Memory(layout, stage, *sizes, casts, home is not None, stays, coding, rank)
        self.shards_state, self.frees = stage.shards_state, self.memory.frees
        make = torch.zeros if self.memory.aliased else torch.empty
        self.full = make(layout.full_numel, dtype=compute_dtype, device=device)
        numel, file = self.memory.own_numel, None
        if self.memory.aliased:
            self.master = self.full
        elif home is None:
            self.master = torch.zeros(numel, dtype=master_dtype, device=device)
        elif home.files.params is not None:
            file = home.slices_in_file(numel, master_dtype)
            self.master = file.mapped
        else:
            self.master = home.lasting(numel, master_dtype)
        self.copy = FullCopy(self.full, self.frees, None if self.memory.aliased else ledger)
        self._places = [
            layout.piece(i, rank).shard_offset if stage.shards_state else layout.full_offset(i)
            for i in range(len(layout.params))
        ]
        self._shares = Shares(self.memory, self.copy.data, self.master.data, home, file)
        # Where parameters are freed to save memory, that of their gradients is not kept either.
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
        """Return a number that changes whenever a slice is modified."""
        return self.master._version

    def place_in_shards(self, index: int) -> int:
        """Return the offset of this rank's slice of parameter ``index`` among its slices.

        The offset is in [S] if state is sharded, else in [P].
        """
        return self._places[index]

    def _span(self, index: int, in_full: bool) -> slice:
        """Return the place of this rank's slice of a parameter, in the full copy or the slices."""
        if not self.shards_state:
            begin = self.layout.full_offset(index)
            return slice(begin, begin + self.layout.params[index].numel)
        piece = self.layout.piece(index, self.rank)
        begin = self.layout.full_offset(index) + piece.lo if in_full else piece.shard_offset
        return slice(begin, begin + piece.numel)

    def local(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's slice of parameter ``index``, sharing memory with ``master``."""
        return self.master[self._span(index, self.memory.aliased)].view(local_shape)

    def local_at_start(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return `local` as a tensor that begins at the start of a storage, over the same memory.

        A DTensor whose local tensor begins inside its storage can be neither pickled nor copied
        (torch 2.11 to 2.15). Its version counter is separate, so `version` does not see its edits.
        """
        local = self.local(index, local_shape)
        begin = local.storage_offset() * local.element_size()
        own = local.untyped_storage()[begin : begin + local.nbytes]
        apart = torch.empty(0, dtype=local.dtype, device=local.device)
        return apart.set_(own, 0, local.shape, local.stride())

    @torch.no_grad()
    def view(self, index: int) -> torch.Tensor:
        """Return a view of the full parameter; see Note [Freed storage comes back to life]."""
        shape = self.layout.params[index].shape
        begin = self.layout.full_offset(index)
        return self.full.data.as_strided(shape, contiguous_stride(shape), begin)

    @torch.no_grad()
    def fill(self, index: int, full: torch.Tensor) -> None:
        """Write a full value into parameter ``index``: this rank's slice, or all if all is kept."""
        flat = full.detach().reshape(-1)
        if self.memory.aliased or not self.shards_state:
            begin = self.layout.full_offset(index)
            self.master[begin : begin + flat.numel()].copy_(flat)
            return
        piece = self.layout.piece(index, self.rank)
        self.master[self._span(index, in_full=False)].copy_(flat[piece.lo : piece.hi])

    # -- the full copy and its gathers
    def free(self) -> None:
        """Free the full copy's memory if the stage does."""
        self.copy.free()

    def prepare_gather(self) -> Sequence[GatherItem]:
        """Allocate the full copy and cast or encode this rank's shares; return the gather items."""
        self.copy.allocate()
        self.copy.version = version = self.master._version
        return self._shares.start(version)

    def finish_read(self) -> None:
        """Wait for slices that are read ahead. **Raises** StorageError if the read has failed."""
        if self._shares.file is not None:
            self._shares.file.finish_read(self.master._version)

    def read_ahead(self) -> None:
        """Start reading slices from their file, ahead of a gather."""
        if self._shares.file is not None and not self.is_fresh:
            self._shares.file.start_read(self.master._version)

    def finish_fetch(self) -> None:
        """Wait until offloaded slices have been copied to the device."""
        self._shares.finish_fetch()

    def finish_gather(self) -> None:
        """Decode the arrived bytes into the full copy, if gathers are encoded."""
        if self._shares.coded is not None:
            self._shares.coded.finish()

    # -- the copy that stays on the device
    def mirror(self, index: int) -> torch.Tensor | None:
        """Return the flat copy of parameter ``index``'s slice that stays on the device.

        It is in the computing dtype, and the masters are offloaded. None if no such copy stays.
        """
        memory = self.memory
        if self._shares.resident is not None:
            return self._shares.resident[self._span(index, in_full=False)]
        if self.home is None or memory.frees or memory.needs_gather or memory.wire is not None:
            return None
        return self.copy.data[self._span(index, in_full=True)]

    @property
    def mirrored_version(self) -> int | None:
        """The version of the slices that every `mirror` holds."""
        return self.copy.version if self._shares.resident is None else self._shares.resident_version

    def note_mirrored(self, version: int) -> None:
        """Record that every `mirror` now holds a version of the slices."""
        if self._shares.resident is None:
            self.copy.version = version
        else:
            self._shares.resident_version = version

    # -- figures
    @property
    def coded_memory(self) -> torch.Tensor | None:
        """The memory of arriving encoded bytes, empty between gathers; None if not encoded."""
        return None if self._shares.coded is None else self._shares.coded.memory

    @property
    def coding(self) -> Coding | None:
        """The coding of gathers; None if they are not encoded."""
        return None if self._shares.coded is None else self.memory.coding

    @property
    def kept_bytes(self) -> int:
        """Bytes of full copies alive now, beyond the slices."""
        return self.memory.beside_bytes if self.copy.is_allocated else 0


class FullCopy:
    """The memory of full parameters: allocated by gathers, freed after use if the stage ``frees``.

    ``ledger`` counts it; None if the slices lie inside. ``version`` is that of the slices whose
    values it has; None if it has none.
    """

    def __init__(self, full: torch.Tensor, frees: bool, ledger: FullParamLedger | None) -> None:
        self.data, self.is_allocated = full.data, True
        self.version: int | None = None
        self._nbytes, self._frees, self._ledger = full.nbytes, frees, ledger
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
        """Tell whether the memory could not be freed: ``tensor.numpy()`` makes it stay as it is."""
        return self._frees and self.is_allocated and not self.data.untyped_storage().resizable()

    def free(self) -> None:
        """Free the memory if the stage does, and give up its values."""
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


class Shares:
    """This rank's shares of a storage's gathers, brought from where the slices are.

    They are read from the slices, or from a ``resident`` copy of offloaded slices, which stays on
    the device. Or they are brought into the full copy: ``coded``, from the host, or from a
    ``file``. Items are made once: views outlive the memory under them.
    """

    def __init__(
        self,
        memory: Memory,
        full: torch.Tensor,
        slices: torch.Tensor,
        home: Home | None,
        file: SlicesInFile | None,
    ) -> None:
        self._memory, self._full, self._slices = memory, full, slices
        self._home, self.file = home, file
        self.coded = _coded_gather(memory.wire, memory.rank, full)
        self.resident: torch.Tensor | None = None
        self.resident_version: int | None = None
        if memory.copy_bytes:
            self.resident = torch.empty(memory.own_numel, dtype=full.dtype, device=full.device)
        self._fetch: Pending | None = None
        self._sources: list[torch.Tensor] = []
        self._items: list[GatherItem] = []
        if not memory.stage.shards_state or self.coded is not None:
            return
        for segment in memory.layout.segments:
            (begin, end), at = segment.share(memory.rank), segment.full_offset
            own = full[at + begin : at + end]
            gathered = full[at : at + segment.full_numel(memory.layout.num_ranks)]
            source = own
            if not memory.aliased:
                held = slices if self.resident is None else self.resident
                source = held[segment.shard_offset :][: end - begin]
            in_place = memory.gathers_in_place
            self._sources.append(source)
            self._items.append(GatherItem(segment, own if in_place else source, gathered, in_place))

    def start(self, version: int) -> Sequence[GatherItem]:
        """Start to bring the shares of a version of the slices; return the gather items."""
        if self.coded is not None:
            slices = self._slices if self.file is None else self.file.take(version)
            self._fetch = self.coded.start(slices, self._home)
            return self.coded.items
        if not self._memory.stage.shards_state:
            if not self._memory.aliased:
                self._bring([self._full], [self._slices], version)
            return ()
        if self.resident is not None and self.resident_version != version:
            self.resident_version = version
            self._bring([self.resident], [self._slices], version)
        if self._memory.fills_first and self._items:
            self._bring([item.source for item in self._items], self._sources, version)
        return self._items

    def _bring(self, places: list[torch.Tensor], slices: list[torch.Tensor], version: int) -> None:
        if self._home is None:
            torch._foreach_copy_(places, slices)
            return
        if self.file is not None:
            memory = self.file.take(version)
            slices = [memory[s.storage_offset() :][: s.numel()] for s in slices]
        self._fetch = self._home.start_fetch(places, slices)

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
        self._numel, self._dtype, self._device = numel, dtype, device
        self._home, self._is_kept = home, is_kept
        self._here, self._at_home = _Reused(), _Reused()

    def take(self, dtype: torch.dtype, behind: int = 0) -> torch.Tensor:
        """Return uninitialised memory for the means, and ``behind`` elements more."""
        numel = self._numel + behind
        if not self._is_kept:
            return torch.empty(numel, dtype=dtype, device=self._device)
        found = self._here.lend()
        if found is None or (found.numel(), found.dtype) != (numel, dtype):
            found = self._here.keep(torch.empty(numel, dtype=dtype, device=self._device))
        return found

    def forget(self) -> None:
        """Drop the kept memory, so that the next step allocates its own."""
        self._here = _Reused()

    def reserve(self) -> None:
        """Allocate now the memory to which means are evicted.

        If it is in use (by another micro-batch, or kept by the user), an eviction allocates more.
        """
        if self._home is not None and self._home.files.grads is None:
            self._at_home.keep(self._home.lasting(self._numel, self._dtype))

    def start_evict(self, means: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start copying the means to the slices' home; return the destination.

        The destination is the means themselves if the slices are not offloaded.
        """
        if self._home is None:
            return means, Pending.of_copies()
        return self._home.start_evict(means, self._dtype, self._at_home.lend())

    @property
    def held(self) -> list[torch.Tensor]:
        """The memory kept for means, on the device and at home."""
        both = self._here.memory, self._at_home.memory
        return [memory for memory in both if memory is not None]

    @property
    def bytes_at_home(self) -> int:
        """Bytes reserved at home."""
        return 0 if self._at_home.memory is None else self._at_home.memory.nbytes

    def has_at_home(self, grad: torch.Tensor) -> bool:
        """Tell whether a mean lies in the memory of `reserve`."""
        kept, held = self._at_home.memory, grad.untyped_storage()
        return kept is not None and held.data_ptr() == kept.untyped_storage().data_ptr()


class _Reused:
    """Memory that is lent again when no tensor but this one's refers to it."""

    def __init__(self) -> None:
        self.memory: torch.Tensor | None = None
        self._num_references = 0

    def keep(self, memory: torch.Tensor) -> torch.Tensor:
        """Keep memory, and lend it."""
        self.memory, self._num_references = memory, _num_references(memory)
        return memory[:]

    def lend(self) -> torch.Tensor | None:
        """Return a new tensor over the memory; None if it is in use, or none is kept."""
        if self.memory is None or _num_references(self.memory) > self._num_references:
            return None
        return self.memory[:]


def _num_references(tensor: torch.Tensor) -> int:
    """Count the tensors that share the tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


class Nearby:
    """The parts that this rank keeps of one unit, over the ranks of ``axis``."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._leaves = False
        self._parts: list[torch.Tensor] = []
        self._versions: list[int] = []

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Keep parts of storages freed inside, after a forward pass, if backward needs them."""
        self._leaves = torch.is_grad_enabled()
        try:
            yield
        finally:
            self._leaves = False

    @torch.no_grad()
    def leave(self, storages: Iterable[Storage], versions: list[int]) -> None:
        """Keep this rank's parts of full storages, which are about to be freed."""
        if self._leaves:
            axis = self.axis
            self._versions = versions
            self._parts = [s.full.data.chunk(axis.size)[axis.rank].clone() for s in storages]

    def forget(self) -> None:
        """Drop the parts, after the parameters were replaced."""
        self._parts = []

    def take(self, storages: Sequence[Storage], versions: list[int]) -> list[GatherItem]:
        """Return the gather items of the parts over the axis; none if the parts are stale."""
        parts, self._parts = self._parts, []
        if not parts or self._versions != versions:
            return []
        items = []
        for storage, part in zip(storages, parts, strict=True):
            storage.copy.allocate()
            segment = Segment(storage.full.numel(), part.numel(), 0, 0)
            items.append(GatherItem(segment, part, storage.full.data, False))
        return items
