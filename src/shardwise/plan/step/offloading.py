"""State and inputs of blocks on the host or in files, and their copies, in numbers only.

Note [Offloading as planned]
The engine's layout (`unit.home`): of offloaded units the masters rest where parameters do,
on the host where these are to stay on the device, with memory for the reduced gradients beside
them. A gather fetches the masters, which are cast on the device; where parameters are to stay, the
first gather after a step fetches a copy of the slices, and the others read that. Gradients leave
the device as soon as they are reduced. Each unit's step follows, on the host's cores or, in loads
of a fixed size, on the device. State in files is read before the unit's step and written after it,
through three buffers; slices in files are read for each fetch, as if none were
in the page cache. Papers keep slices in the computing dtype where parameters rest, and fetch those;
their masters rest with the optimizer's state (``keeps_compute_shard``).

Note [Inputs as planned]
As in `offload.activations`, a block's input is copied to the host while the next block
computes, and its memory freed when the one after that begins; the last block's stays. In backward
the input of the block before is fetched while a block is computed again. So two are on the device
beside what a block makes. The host has a place for each of the others, for every micro-batch that
a pipeline has in flight.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from shardwise.homes import COPIES_IN_MEMORY, LOADS, NUM_BUFFERS, tier_of
from shardwise.offload.loads import MULTIPLE, cut, room_of
from shardwise.offload.stripes import align, regions_of
from shardwise.optim.kinds import ROW
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost, Tape, Visit
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, DtypeName
from shardwise.plan.step.footprint import Footprint
from shardwise.plan.step.program import Away, Recorder


class Offloading:
    """The offloading of one candidate; does nothing for units that are on the device."""

    def __init__(self, candidate: Candidate) -> None:
        offload, self._row = candidate.offload, candidate.dtypes
        self._candidate = candidate
        self._optimizer = OPTIMIZERS[candidate.optimizer]
        self._papers = self._row.keeps_compute_shard
        self._params, self._grads = tier_of(offload.params), tier_of(offload.grads)
        masters = tier_of(offload.optimizer if self._papers else offload.params)
        self._masters = "cpu" if masters == "device" else masters
        self._state = tier_of(offload.optimizer)
        if not (self._optimizer.by or self._papers) and self._state == "nvme":
            self._state = "cpu"
        self.steps_on_device = offload.step_on == "device" and bool(self._optimizer.by)
        self._arrived: dict[int, int] = {}  # the operation after which a unit's gradients are there

    # -- what lies where
    def staging_bytes(self, weights: Sequence[Footprint], root_comes_last: bool) -> int:
        """Return the buffers on the device that state passes, if it is stepped there.

        Each is as large as the largest load that had its turn. The first step goes by the order of
        the optimizer's parameters; torch's make their state there on the device, so its loads are
        smaller.
        """
        if not self.steps_on_device:
            return 0
        by_optimizer = [*weights[1:], weights[0]] if root_comes_last else weights
        first = [*self._loads(by_optimizer, has_state=self._optimizer.by == "own")]
        later = [*self._loads(weights, has_state=True)]
        buffers = [0] * LOADS
        for number, num_bytes in enumerate(first + later * LOADS):
            buffers[number % LOADS] = max(buffers[number % LOADS], num_bytes)
        return sum(buffers)

    def _loads(self, weights: Sequence[Footprint], has_state: bool) -> Iterator[int]:
        """Yield what each load takes of a buffer."""
        known: dict[tuple[tuple[int, DtypeName], ...], list[int]] = {}  # layers have equal keys
        for updated in (tuple(w.updated) for w in weights if w.is_away):
            if updated not in known:
                slices = [(n, self._brought(n, master, has_state)) for n, master in updated]
                rows = [(n, sum(parts) // max(n, 1), 0) for n, parts in slices]
                loads = known[updated] = []
                for load in cut(rows, ROW if self._optimizer.by == "own" else MULTIPLE):
                    pieces = (
                        self._brought(hi - lo, updated[row][1], has_state) for row, lo, hi in load
                    )
                    loads.append(sum(room_of(part) for parts in pieces for part in parts))
            yield from known[updated]

    def _brought(self, numel: int, master: DtypeName, has_state: bool = True) -> tuple[int, ...]:
        """Return what a step of so many elements reads: gradient, master, parts of the state."""
        grad = DTYPE_BYTES[self._row.reduce if self._papers else master]
        stored = numel * DTYPE_BYTES[master], *self._optimizer.parts(numel, master)
        return numel * grad, *(stored if has_state else stored[:1])

    def away(self, weights: Sequence[Footprint], num_reductions: int) -> dict[str, Away]:
        """Return what lies on the host ("cpu") and in files ("nvme"), but for activations.

        ``num_reductions`` are those of a step: the means of all but the first one are memory that
        is made for them. Of buffers each kind of files has its own, as large as its largest unit's.
        """
        found = {"cpu": Counter[str](), "nvme": Counter[str]()}
        state_files, slices = [0], [0]
        for weight in (w for w in weights if w.is_away):
            found[self._masters]["param_shards"] += weight.shard_bytes
            if self._papers and self._params != "device":
                found[self._params]["param_shards"] += weight.compute_shard_bytes
            found[self._grads]["grad_shards"] += weight.means_bytes
            found[self._grads]["more_grads"] += weight.means_bytes * (num_reductions > 1)
            counters = self._optimizer.counter_bytes * len(weight.updated)
            found["cpu"]["optimizer_state"] += counters + weight.outer_bytes
            found[self._state]["optimizer_state"] += weight.state_bytes - counters
            state_files.append(self._file_bytes(weight))
            slices.append(weight.largest_shard)
        if self._state == "nvme":
            found["cpu"]["disk_buffers"] += NUM_BUFFERS * max(state_files)
        if self._masters == "nvme":
            found["cpu"]["disk_buffers"] += NUM_BUFFERS * align(max(slices))
        behind, in_memory = self._checkpoint_copies(weights)
        in_files = any(w.is_away for w in weights) and "nvme" in (self._masters, self._state)
        found["nvme" if in_files else "cpu"]["checkpoint_copies"] += behind
        found["cpu"]["checkpoint_copies"] += in_memory
        return {place: Away(**lines) for place, lines in found.items()}

    def _checkpoint_copies(self, weights: Sequence[Footprint]) -> tuple[int, int]:
        """Return the bytes of the copy that is written in the background, and of those in memory.

        Replicas share what they write, about evenly: tensor by tensor.
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
    def fetch(self, num_bytes: int, read_bytes: int, unit: int, recorder: Recorder) -> None:
        """Bring so many bytes of a unit's slices to the device for a gather, from so many."""
        after = recorder.inputs
        if (self._params if self._papers else self._masters) == "nvme":
            after = (recorder.transfer("disk_read", read_bytes, unit, ()),)
        recorder.before_collective(recorder.transfer("to_device", num_bytes, unit, after))

    def send_grads(self, weight: Footprint, unit: int, recorder: Recorder) -> None:
        """Copy a unit's reduced gradients to their place.

        Those of a window's further micro-batches are added to the first by the host's cores.
        """
        num_bytes, in_files = weight.means_bytes, self._grads == "nvme"

        def written(op: int) -> int:
            return recorder.transfer("disk_write", num_bytes, unit, (op,)) if in_files else op

        arrived = written(recorder.transfer("to_host", num_bytes, unit, recorder.inputs))
        if unit in self._arrived:
            after: tuple[int, ...] = arrived, self._arrived[unit]
            if in_files:
                after = (recorder.transfer("disk_read", 2 * num_bytes, unit, after),)
            cost = Cost("memory", self._row.reduce, 0, 3 * num_bytes, 1)
            arrived = written(recorder.on_cpu((cost,), unit, after))
        self._arrived[unit] = arrived

    def step(self, weights: Sequence[Footprint], recorder: Recorder, moved: Sequence[int]) -> None:
        """Issue the step of the offloaded units, one by one; ``moved``: bytes of each."""
        ready = recorder.inputs
        for unit, weight in enumerate(weights):
            if not weight.is_away or not weight.updated:
                continue
            brought = [self._brought(n, master) for n, master in weight.updated]
            in_files = self._file_bytes(weight) if self._state == "nvme" else 0
            in_files += sum(each[1] for each in brought) if self._masters == "nvme" else 0
            read = in_files + (weight.means_bytes if self._grads == "nvme" else 0)
            after = [*ready, self._arrived[unit]]
            if read:
                after.append(recorder.transfer("disk_read", read, unit, (self._arrived[unit],)))
            cost = Cost("memory", self._row.master, 0, moved[unit], 1)
            if self.steps_on_device:
                recorder.wait(recorder.transfer("to_device", sum(map(sum, brought)), unit, after))
                there = recorder.compute((cost,), unit)
                stored = sum(sum(each[1:]) for each in brought)
                stepped = recorder.transfer("to_host", stored, unit, (there,))
            else:
                stepped = recorder.on_cpu((cost,), unit, after)
            if in_files:
                recorder.transfer("disk_write", in_files, unit, (stepped,))


# -- inputs of checkpointed blocks
@dataclass
class _Input:
    """One block's input in the micro-batch under way.

    ``ready`` are the operations that made it, ``evicted`` and ``fetched`` those that moved it last.
    """

    unit: int
    num_bytes: int
    ready: tuple[int, ...]
    evicted: int | None = None
    fetched: int | None = None
    is_away: bool = False


class Inputs:
    """Moves the inputs of one tape's blocks; does nothing where they stay on the device."""

    def __init__(self, tape: Tape, candidate: Candidate, recorder: Recorder) -> None:
        self._recorder = recorder
        self._moves = candidate.offload.activations != "device"
        self._tape = tape
        self._order: list[_Input] = []
        self._is_open = False
        sizes = [e.input_bytes for e in tape.events if isinstance(e, Visit) and e.input_bytes]
        self._each = sum(sizes[:-1]) if self._moves else 0  # of one micro-batch
        self.host_bytes = ceil(tape.in_flight) * self._each

    def others(self, micro_batch: int) -> int:
        """Return the bytes that the tape has on the device for micro-batches beside this one."""
        is_fewer = micro_batch > 0 and self._tape.first_bytes > 0
        return round(max(self._tape.in_flight - 1 - is_fewer, 0) * self._each)

    def visit(self, visit: Visit, in_backward: bool) -> None:
        """Move inputs before a unit runs, and after the whole model's forward."""
        if not self._moves:
            return
        if visit.unit == 0 and visit.kind == "before_forward" and not in_backward:
            self._is_open = True
        if visit.input_bytes:
            if self._is_open:
                self._give_up()
                for each in self._order[-1:]:
                    args = each.num_bytes, each.unit, each.ready
                    each.evicted = self._recorder.transfer("to_host", *args)
            self._order.append(_Input(visit.unit, visit.input_bytes, self._recorder.inputs))
        elif visit.kind == "after_forward" and visit.unit == 0 and not in_backward:
            self._give_up()
            self._is_open = False
        elif in_backward and visit.kind in ("before_forward", "before_backward"):
            self._ask(visit.unit)

    def _give_up(self) -> None:
        for each in self._order:
            if each.evicted is not None and not each.is_away:
                self._recorder.wait(each.evicted)
                self._recorder.add("activations", -each.num_bytes)
                each.is_away = True

    def _ask(self, unit: int) -> None:
        """Compute a block again: with its input, while the one before is fetched."""
        places = [place for place, each in enumerate(self._order) if each.unit == unit]
        if not places:
            return
        last = places[-1]
        for each in self._order[max(last - 1, 0) : last + 1][::-1]:
            if each.is_away:
                after = (*self._recorder.inputs, *([] if each.evicted is None else [each.evicted]))
                args = each.num_bytes, each.unit, after
                each.fetched = self._recorder.transfer("to_device", *args)
                self._recorder.add("activations", each.num_bytes)
                each.is_away = False
        self._recorder.wait(self._order.pop(last).fetched)
