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

import torch

from shardwise.comm.pending import GatherItem, Pending
from shardwise.layout.memory import Memory
from shardwise.layout.segments import Layout, Segment
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.stages import Stage
from shardwise.trace import FullParamLedger
from shardwise.unit.coded import CodedGather
from shardwise.unit.home import Home, SlicesInFile
from shardwise.unit.partial import Unreduced


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
        self.layout, self.rank = layout, rank
        casts = master_dtype != compute_dtype
        sizes = master_dtype.itemsize, compute_dtype.itemsize
        stays = home is not None and home.leaves_copy
        coding = coding if compute_dtype.is_floating_point else None
        self._memory = Memory(layout, stage, *sizes, casts, home is not None, stays, coding, rank)
        self.shards_state = stage.shards_state
        self.aliased = self._memory.aliased
        self.frees = self._memory.frees
        self.needs_gather = self._memory.needs_gather
        self.home = home
        self._file: SlicesInFile | None = None
        self._ledger = ledger
        self._is_for_memory = stage.frees_after_backward
        make = torch.zeros if self.aliased else torch.empty
        self.full = make(layout.full_numel, dtype=compute_dtype, device=device)
        if self.aliased:
            self.master = self.full
        else:
            numel = self._memory.own_numel
            if self.home is None:
                self.master = torch.zeros(numel, dtype=master_dtype, device=device)
            elif self.home.files.params is not None:
                self._file = self.home.take_slices_in_file()
                self.master = self._file.mapped
            else:
                self.master = self.home.lasting(numel, master_dtype)
        self._full_data, self._master_data = self.full.data, self.master.data
        self._coded = CodedGather.of(self._memory.wire, rank, self._full_data)
        self._copy: torch.Tensor | None = None  # on the device, of offloaded slices
        self._copied_version: int | None = None
        if self._memory.copy_bytes:
            self._copy = torch.empty(self._memory.own_numel, dtype=compute_dtype, device=device)
        self._plan_gather()
        self._places = [
            layout.piece(i, rank).shard_offset if stage.shards_state else layout.full_offset(i)
            for i in range(len(layout.params))
        ]
        self.full_bytes = self.full.nbytes
        self._allocated = True
        self._gathered_version: int | None = None
        self._fetch: Pending | None = None
        self._grad_buffer: torch.Tensor | None = None
        self._grad_references = 0
        self._means_at_home: torch.Tensor | None = None
        self._references_at_home = 0
        if not self.aliased:
            ledger.allocate(self.full_bytes)

    def count_in(self, ledger: FullParamLedger) -> None:
        """Count the full copy in another ledger from now on."""
        if self._allocated and not self.aliased:
            self._ledger.free(self.full_bytes)
            ledger.allocate(self.full_bytes)
        self._ledger = ledger

    @property
    def is_fresh(self) -> bool:
        """Tell whether the full copy is allocated and has the shards' present values."""
        if self.aliased and not self.needs_gather:
            return True
        return self._allocated and self._gathered_version == self.master._version

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

    def local(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
        """Return this rank's slice of parameter ``index``, sharing memory with ``master``."""
        piece = self.layout.piece(index, self.rank)
        begin, numel = self._places[index], piece.numel
        if not self.shards_state:
            numel = self.layout.params[index].numel
        elif self.aliased:
            begin = self.layout.full_offset(index) + piece.lo
        return self.master[begin : begin + numel].view(local_shape)

    def local_apart(self, index: int, local_shape: tuple[int, ...]) -> torch.Tensor:
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
        stride = torch.empty(shape, device="meta").stride()
        return self.full.data.as_strided(shape, stride, self.layout.full_offset(index))

    def allocate(self) -> None:
        """Give the full copy its memory."""
        if not self._allocated:
            self.full.untyped_storage().resize_(self.full_bytes)
            self._ledger.allocate(self.full_bytes)
            self._allocated = True

    def free(self) -> None:
        """Free the full copy's memory if the stage does."""
        if self.frees and self._allocated:
            self.full.untyped_storage().resize_(0)
            self._ledger.free(self.full_bytes)
            self._allocated = False
            self._gathered_version = None

    def prepare_gather(self) -> Sequence[GatherItem]:
        """Allocate the full copy and cast or encode this rank's shares; return the gather items."""
        self.allocate()
        self._gathered_version = self.master._version
        if self._coded is not None:
            slices = self._master_data if self._file is None else self._file.take(self.version)
            self._fetch = self._coded.start(slices, self.home)
            return self._coded.items
        if not self.shards_state:
            if not self.aliased:
                self._fill_full([self._full_data], [self._master_data])
            return ()
        if self._copy is not None and self._copied_version != self.master._version:
            self._copied_version = self.master._version
            self._fill_full([self._copy], [self._master_data])
        if self._memory.fills_first and self._gather_items:
            self._fill_full([item.source for item in self._gather_items], self._shares)
        return self._gather_items

    def _fill_full(self, places: list[torch.Tensor], slices: list[torch.Tensor]) -> None:
        if self.home is None:
            torch._foreach_copy_(places, slices)
            return
        if self._file is not None:
            memory = self._file.take(self.master._version)
            slices = [memory[s.storage_offset() :][: s.numel()] for s in slices]
        self._fetch = self.home.start_fetch(places, slices)

    def finish_read(self) -> None:
        """Wait for slices that are read ahead. **Raises** StorageError if the read has failed."""
        if self._file is not None:
            self._file.finish_read(self.master._version)

    def read_ahead(self) -> None:
        """Start reading slices from their file, ahead of a gather."""
        if self._file is not None and not self.is_fresh:
            self._file.start_read(self.master._version)

    def finish_fetch(self) -> None:
        """Wait until offloaded slices have been copied to the device."""
        if self._fetch is not None:
            self._fetch.wait()
            self._fetch = None
            if self._file is not None:
                self._file.release()

    def finish_gather(self) -> None:
        """Decode the arrived bytes into the full copy, if gathers are encoded."""
        if self._coded is not None:
            self._coded.finish()

    def _plan_gather(self) -> None:
        """Make once the views that every gather uses; they outlive the memory under them."""
        self._shares: list[torch.Tensor] = []
        self._gather_items: list[GatherItem] = []
        if not self.shards_state or self._coded is not None:
            return
        for segment in self.layout.segments:
            (begin, end), full = segment.share(self.rank), segment.full_offset
            own = self._full_data[full + begin : full + end]
            gathered = self._full_data[full : full + segment.full_numel(self.layout.num_ranks)]
            in_place = self._memory.gathers_in_place
            shard = own
            if not self.aliased:
                slices = self._master_data if self._copy is None else self._copy
                shard = slices[segment.shard_offset :][: end - begin]
            self._shares.append(shard)
            self._gather_items.append(
                GatherItem(segment, own if in_place else shard, gathered, in_place)
            )

    def grad_buffer(self, dtype: torch.dtype, behind: int = 0) -> torch.Tensor:
        """Return uninitialised memory for the means of the gradients, and ``behind`` elements more.

        The means are [S], or [P] at stage 0.

        On the CPU the previous step's buffer is reused unless something still refers to it
        (``p.grad``, or a tensor that the user kept). Fresh memory costs a page fault per 4 KiB, a
        tenth of a training step. On other devices the allocator reuses memory, and a stage that
        frees its parameters is chosen for memory, not for speed.
        """
        numel = self._memory.own_numel + behind
        device = self.full.device
        if device.type != "cpu" or self._is_for_memory:
            return torch.empty(numel, dtype=dtype, device=device)
        kept = self._grad_buffer
        if kept is not None and (kept.numel(), kept.dtype) != (numel, dtype):
            kept = None
        if kept is None or _num_references(kept) > self._grad_references:
            kept = torch.empty(numel, dtype=dtype)
            self._grad_buffer, self._grad_references = kept, _num_references(kept)
        return kept[:]  # a new reference, counted while a reduction holds it

    def start_evict(self, means: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """Start copying the means of the gradients to the slices' home.

        Return the destination: the means themselves unless the slices are offloaded.
        """
        if self.home is None:
            return means, Pending.of_copies()
        kept = self._means_at_home
        is_free = kept is not None and _num_references(kept) == self._references_at_home
        to = kept[:] if kept is not None and is_free else None
        return self.home.start_evict(means, self.master.dtype, to)

    def reserve_means(self) -> None:
        """Allocate now the memory to which means of gradients are evicted.

        If it is in use (by another micro-batch, or kept by the user), an eviction allocates more.
        """
        if self.home is not None and self.home.files.grads is None:
            self._means_at_home = self.home.lasting(self._memory.own_numel, self.master.dtype)
            self._references_at_home = _num_references(self._means_at_home)

    @property
    def held_for_means(self) -> list[torch.Tensor]:
        """The memory held for means of gradients, on the device and at home."""
        return [kept for kept in (self._grad_buffer, self._means_at_home) if kept is not None]

    @property
    def bytes_at_home(self) -> int:
        """Bytes reserved at home for means."""
        return 0 if self._means_at_home is None else self._means_at_home.nbytes

    def has_at_home(self, grad: torch.Tensor) -> bool:
        """Tell whether a mean lies in the memory of `reserve_means`."""
        kept, held = self._means_at_home, grad.untyped_storage()
        return kept is not None and held.data_ptr() == kept.untyped_storage().data_ptr()

    def mirror(self, index: int) -> torch.Tensor | None:
        """Return the flat copy of parameter ``index``'s slice that stays on the device.

        It is in the computing dtype, and the masters are offloaded. None if no such copy stays.
        """
        piece = self.layout.piece(index, self.rank)
        numel = piece.numel if self.shards_state else self.layout.params[index].numel
        if self._copy is not None:
            memory, begin = self._copy, self._places[index]
        elif self.home is not None and self.has_values_of_slices:
            memory = self._full_data
            begin = self.layout.full_offset(index) + (piece.lo if self.shards_state else 0)
        else:
            return None
        return memory[begin : begin + numel]

    @property
    def has_values_of_slices(self) -> bool:
        """Tell whether the full copy stays, and equals this rank's slices but for a cast."""
        return not (self.frees or self.needs_gather) and self._coded is None

    @property
    def gather_bytes(self) -> tuple[int, int]:
        """Bytes that a rank sends to each other rank in a gather, and their number unencoded."""
        segments = self._memory.gathered_segments
        if not self.needs_gather:
            return 0, 0
        whole = self.layout.shard_numel(self.rank) * self.full.element_size()
        return sum(segment.share_numel(self.rank) * size for segment, size in segments), whole

    @property
    def coded_memory(self) -> torch.Tensor | None:
        """The memory of arriving encoded bytes, empty between gathers; None if not encoded."""
        return None if self._coded is None else self._coded.memory

    @property
    def coding(self) -> Coding | None:
        """The coding of gathers; None if they are not encoded."""
        return None if self._coded is None else self._memory.coding

    @property
    def mirrored_version(self) -> int | None:
        """The version of the slices that every `mirror` holds."""
        return self._gathered_version if self._copy is None else self._copied_version

    def note_mirrored(self, version: int) -> None:
        """Record that every `mirror` now holds a version of the slices."""
        if self._copy is None:
            self._gathered_version = version
        else:
            self._copied_version = version

    def forget_grad_buffer(self) -> None:
        """Drop the gradient buffer, so that the next step allocates one."""
        self._grad_buffer = None

    @torch.no_grad()
    def fill(self, index: int, full: torch.Tensor) -> None:
        """Copy this rank's slice of a full value into parameter ``index``."""
        placed = self.layout.params[index]
        flat = full.detach().reshape(-1)
        begin = self.layout.full_offset(index)
        if self.aliased or not self.shards_state:
            self.master[begin : begin + placed.numel].copy_(flat)
            return
        piece = self.layout.piece(index, self.rank)
        self.master[piece.shard_offset : piece.shard_offset + piece.numel].copy_(
            flat[piece.lo : piece.hi]
        )

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's slices, padding included, offloaded or not."""
        return self._memory.shard_bytes

    @property
    def copy_bytes(self) -> int:
        """Bytes of the copy on the device of offloaded slices, which gathers read."""
        return self._memory.copy_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of full copies alive now, beyond the slices."""
        return self._memory.beside_bytes if self.aliased or self._allocated else 0


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
            storage.allocate()
            segment = Segment(storage.full.numel(), part.numel(), 0, 0)
            items.append(GatherItem(segment, part, storage.full.data, False))
        return items
