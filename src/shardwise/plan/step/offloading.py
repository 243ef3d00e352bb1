"""Bytes and copies of offloaded state and of offloaded inputs of blocks.

Note [Offloading as planned]
The plan follows the engine's layout (`offload.home`). The masters of offloaded units are kept in
the tier of the parameters; if that is the device, on the host. Reduced gradients have memory there
too. A gather fetches the masters, which are cast on the device. If parameters stay on the device,
the first gather after a step fetches a copy of the slices, and later gathers read the copy.

Gradients leave the device as soon as they are reduced. Each unit's step follows, on the host's
cores or, in loads of a fixed size, on the device. State in files is read before the unit's step and
written after it, through three buffers. Slices in files are read for each fetch, as if none were in
the page cache.

In the published setups (``keeps_compute_shard``) the slices in the compute dtype are offloaded and
fetched, and the masters are kept with the optimizer's state.

Note [Inputs as planned]
As in `offload.activations`, a block's input is copied to the host while the next block computes.
Its memory is freed when the block after that begins; the last block's input stays on the device. In
backward, while a block is computed again, the input of the previous block is fetched. So the device
holds two inputs beside what a block makes. The host has a place for each of the others, for every
micro-batch that a pipeline has in flight.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from shardwise.homes import COPIES_IN_MEMORY, LOADS, NUM_BUFFERS, tier_of
from shardwise.offload.loads import MULTIPLE, cut_into_loads, padded_bytes
from shardwise.offload.stripes import align, regions_of
from shardwise.optim.kinds import ROW
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost, Tape, Visit
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, DtypeName
from shardwise.plan.step.footprint import Footprint
from shardwise.plan.step.program import OffDeviceBytes, StepRecorder


class Offloading:
    """The offloading of one candidate. Units that stay on the device are left out."""

    def __init__(self, candidate: Candidate) -> None:
        offload = candidate.offload
        self._candidate = candidate
        self._dtypes = candidate.dtypes
        self._optimizer = OPTIMIZERS[candidate.optimizer]
        self._keeps_compute_shard = self._dtypes.keeps_compute_shard
        # The tier of each kind of state.
        self._params = tier_of(offload.params)
        self._grads = tier_of(offload.grads)
        masters = tier_of(offload.optimizer if self._keeps_compute_shard else offload.params)
        self._masters = "cpu" if masters == "device" else masters
        self._state = tier_of(offload.optimizer)
        if not (self._optimizer.by or self._keeps_compute_shard) and self._state == "nvme":
            self._state = "cpu"
        self.steps_on_device = offload.step_on == "device" and bool(self._optimizer.by)
        # By unit: the operation after which its reduced gradients are in their tier.
        self._grads_stored: dict[int, int] = {}

    # -- bytes by tier
    def staging_bytes(self, weights: Sequence[Footprint], root_comes_last: bool) -> int:
        """Return the bytes of the buffers on the device for offloaded state that is stepped there.

        Loads take turns in the buffers, and each buffer is as large as its largest load. The first
        step goes through the parameters in the optimizer's order. Torch's optimizers make their
        state in it, on the device, so its loads are smaller.
        """
        if not self.steps_on_device:
            return 0
        by_optimizer = [*weights[1:], weights[0]] if root_comes_last else weights
        first = list(self._loads(by_optimizer, has_state=self._optimizer.by == "own"))
        later = list(self._loads(weights, has_state=True))
        buffers = [0] * LOADS
        for number, num_bytes in enumerate(first + later * LOADS):
            buffers[number % LOADS] = max(buffers[number % LOADS], num_bytes)
        return sum(buffers)

    def _loads(self, weights: Sequence[Footprint], has_state: bool) -> Iterator[int]:
        """Yield the bytes that each load takes of a buffer."""
        known: dict[tuple[tuple[int, DtypeName], ...], list[int]] = {}  # layers have equal keys
        for updated in (tuple(w.updated) for w in weights if w.is_offloaded):
            if updated not in known:
                slices = [(n, self._read_bytes(n, master, has_state)) for n, master in updated]
                rows = [(n, sum(parts) // max(n, 1), 0) for n, parts in slices]
                loads = known[updated] = []
                for load in cut_into_loads(rows, ROW if self._optimizer.by == "own" else MULTIPLE):
                    pieces = (
                        self._read_bytes(hi - lo, updated[row][1], has_state)
                        for row, lo, hi in load
                    )
                    loads.append(sum(padded_bytes(part) for parts in pieces for part in parts))
            yield from known[updated]

    def _read_bytes(self, numel: int, master: DtypeName, has_state: bool = True) -> tuple[int, ...]:
        """Return the bytes that a step of so many elements reads, of each tensor.

        The tensors are the gradient, the master, and the parts of the state.
        """
        grad = numel * DTYPE_BYTES[self._dtypes.reduce if self._keeps_compute_shard else master]
        parts = self._optimizer.parts(numel, master) if has_state else ()
        return grad, numel * DTYPE_BYTES[master], *parts

    def off_device_bytes(
        self, weights: Sequence[Footprint], num_reductions: int
    ) -> dict[str, OffDeviceBytes]:
        """Return the bytes on the host ("cpu") and in files ("nvme"), without activations.

        ``num_reductions`` are those of a step: reduced gradients of all but the first one are in
        memory that is allocated for them. Files of state and files of slices have separate buffers,
        each as large as the file of the largest unit.
        """
        lines = {"cpu": Counter[str](), "nvme": Counter[str]()}
        state_files, slices = [0], [0]
        for weight in (w for w in weights if w.is_offloaded):
            lines[self._masters]["param_shards"] += weight.shard_bytes
            if self._keeps_compute_shard and self._params != "device":
                lines[self._params]["param_shards"] += weight.compute_shard_bytes
            lines[self._grads]["grad_shards"] += weight.means_bytes
            lines[self._grads]["more_grads"] += weight.means_bytes * (num_reductions > 1)
            counters = self._optimizer.counter_bytes * len(weight.updated)
            lines["cpu"]["optimizer_state"] += counters + weight.outer_bytes
            lines[self._state]["optimizer_state"] += weight.state_bytes - counters
            state_files.append(self._file_bytes(weight))
            slices.append(weight.largest_shard)
        if self._state == "nvme":
            lines["cpu"]["disk_buffers"] += NUM_BUFFERS * max(state_files)
        if self._masters == "nvme":
            lines["cpu"]["disk_buffers"] += NUM_BUFFERS * align(max(slices))
        background, in_memory = self._checkpoint_copies(weights)
        in_files = any(w.is_offloaded for w in weights) and "nvme" in (self._masters, self._state)
        lines["nvme" if in_files else "cpu"]["checkpoint_copies"] += background
        lines["cpu"]["checkpoint_copies"] += in_memory
        return {tier: OffDeviceBytes(**num_bytes) for tier, num_bytes in lines.items()}

    def _checkpoint_copies(self, weights: Sequence[Footprint]) -> tuple[int, int]:
        """Return the bytes of the copy for a background write, and of the copies in memory.

        Replicas divide the writing among them by tensors, so about evenly.
        """
        candidate = self._candidate
        if not (candidate.save_every or candidate.memory_every):
            return 0, 0
        written = -(-sum(weight.saved_bytes for weight in weights) // candidate.num_replicas)
        hosts = 1 + candidate.copies if candidate.memory_every else 0
        return written, written * hosts * COPIES_IN_MEMORY

    def _file_bytes(self, weight: Footprint) -> int:
        """Return the bytes of the file of a unit's state."""
        parts = (p for n, master in weight.updated for p in self._optimizer.parts(n, master))
        return regions_of([part for part in parts if part]).num_bytes

    # -- copies
    def fetch(self, num_bytes: int, read_bytes: int, unit: int, recorder: StepRecorder) -> None:
        """Copy ``num_bytes`` of a unit's slices to the device for a gather.

        ``read_bytes`` are those to read first, if the slices are in files.
        """
        after = recorder.compute_dependencies
        if (self._params if self._keeps_compute_shard else self._masters) == "nvme":
            after = (recorder.transfer("disk_read", read_bytes, unit, ()),)
        recorder.delay_next_collective(recorder.transfer("to_device", num_bytes, unit, after))

    def send_grads(self, weight: Footprint, unit: int, recorder: StepRecorder) -> None:
        """Copy a unit's reduced gradients to their tier.

        If an earlier micro-batch of the window has stored gradients, the host's cores add to them.
        """
        num_bytes, in_files = weight.means_bytes, self._grads == "nvme"

        def write_if_in_files(op: int) -> int:
            return recorder.transfer("disk_write", num_bytes, unit, (op,)) if in_files else op

        copied = recorder.transfer("to_host", num_bytes, unit, recorder.compute_dependencies)
        stored = write_if_in_files(copied)
        if unit in self._grads_stored:
            after: tuple[int, ...] = stored, self._grads_stored[unit]
            if in_files:
                after = (recorder.transfer("disk_read", 2 * num_bytes, unit, after),)
            cost = Cost("memory", self._dtypes.reduce, 0, 3 * num_bytes, 1)
            stored = write_if_in_files(recorder.compute_on_host((cost,), unit, after))
        self._grads_stored[unit] = stored

    def step(
        self, weights: Sequence[Footprint], recorder: StepRecorder, moved: Sequence[int]
    ) -> None:
        """Issue the steps of the offloaded units; ``moved``: bytes that each step moves."""
        ready = recorder.compute_dependencies
        for unit, weight in enumerate(weights):
            if not weight.is_offloaded or not weight.updated:
                continue
            slices = [self._read_bytes(n, master) for n, master in weight.updated]
            masters = sum(master for _, master, *_ in slices)
            in_files = self._file_bytes(weight) if self._state == "nvme" else 0
            in_files += masters if self._masters == "nvme" else 0
            read = in_files + (weight.means_bytes if self._grads == "nvme" else 0)
            after = [*ready, self._grads_stored[unit]]
            if read:
                after.append(recorder.transfer("disk_read", read, unit, after[-1:]))
            cost = Cost("memory", self._dtypes.master, 0, moved[unit], 1)
            if self.steps_on_device:
                read_bytes = sum(sum(slice_bytes) for slice_bytes in slices)
                recorder.wait(recorder.transfer("to_device", read_bytes, unit, after))
                computed = recorder.compute((cost,), unit)
                written_bytes = sum(sum(without_grad) for _, *without_grad in slices)
                stepped = recorder.transfer("to_host", written_bytes, unit, (computed,))
            else:
                stepped = recorder.compute_on_host((cost,), unit, after)
            if in_files:
                recorder.transfer("disk_write", in_files, unit, (stepped,))


# -- inputs of checkpointed blocks
@dataclass
class _BlockInput:
    """One block's input in the present micro-batch.

    ``ready`` are the operations that made it. ``evicted`` and ``fetched`` are the last copies of it
    to the host and to the device.
    """

    unit: int
    num_bytes: int
    ready: tuple[int, ...]
    evicted: int | None = None
    fetched: int | None = None
    is_on_host: bool = False


class Inputs:
    """Moves the inputs of one tape's blocks, unless they stay on the device."""

    def __init__(self, tape: Tape, candidate: Candidate, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._moves = candidate.offload.activations != "device"
        self._tape = tape
        self._order: list[_BlockInput] = []
        self._is_open = False
        sizes = [e.input_bytes for e in tape.events if isinstance(e, Visit) and e.input_bytes]
        self._micro_batch_bytes = sum(sizes[:-1]) if self._moves else 0
        self.host_bytes = ceil(tape.in_flight) * self._micro_batch_bytes

    def others(self, micro_batch: int) -> int:
        """Return the bytes of inputs that the tape books on the device for other micro-batches."""
        is_fewer = micro_batch > 0 and self._tape.first_bytes > 0
        num_others = max(self._tape.in_flight - 1 - is_fewer, 0)
        return round(num_others * self._micro_batch_bytes)

    def visit(self, visit: Visit, in_backward: bool) -> None:
        """Move inputs before a unit runs, and after the whole model's forward."""
        if not self._moves:
            return
        if visit.unit == 0 and visit.kind == "before_forward" and not in_backward:
            self._is_open = True
        if visit.input_bytes:
            if self._is_open:
                self._free_copied()
                for last in self._order[-1:]:
                    last.evicted = self._recorder.transfer(
                        "to_host", last.num_bytes, last.unit, last.ready
                    )
            self._order.append(
                _BlockInput(visit.unit, visit.input_bytes, self._recorder.compute_dependencies)
            )
        elif visit.kind == "after_forward" and visit.unit == 0 and not in_backward:
            self._free_copied()
            self._is_open = False
        elif in_backward and visit.kind in ("before_forward", "before_backward"):
            self._fetch(visit.unit)

    def _free_copied(self) -> None:
        """Wait for the copies to the host, and free their memory on the device."""
        for block_input in self._order:
            if block_input.evicted is not None and not block_input.is_on_host:
                self._recorder.wait(block_input.evicted)
                self._recorder.add("activations", -block_input.num_bytes)
                block_input.is_on_host = True

    def _fetch(self, unit: int) -> None:
        """Fetch the inputs of a unit's block and of the previous one; wait for the first."""
        places = [n for n, block_input in enumerate(self._order) if block_input.unit == unit]
        if not places:
            return
        last = places[-1]
        for block_input in self._order[max(last - 1, 0) : last + 1][::-1]:
            if block_input.is_on_host:
                after = self._recorder.compute_dependencies
                if block_input.evicted is not None:
                    after += (block_input.evicted,)
                block_input.fetched = self._recorder.transfer(
                    "to_device", block_input.num_bytes, block_input.unit, after
                )
                self._recorder.add("activations", block_input.num_bytes)
                block_input.is_on_host = False
        self._recorder.wait(self._order.pop(last).fetched)
