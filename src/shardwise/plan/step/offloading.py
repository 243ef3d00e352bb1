"""What lies on the host or in files, and the copies that this takes. In numbers only, as planned.

Note [Offloading as planned]
The engine's layout (`unit.home`): of the units that are away the masters rest where parameters do,
on the host where these are to stay on the device, with memory for the reduced gradients beside
them. A gather fetches the masters, which are cast on the device; where parameters are to stay, the
first gather after a step fetches a copy of the slices, and the others read that. Gradients leave
the device as soon as they are reduced. Each unit's step follows, on the host's cores or, in loads
of a fixed size, on the device. State in files is read before the unit's step and written after it,
through three buffers; slices in files are read for each fetch, as where the system has none of them
in its memory. Papers keep slices in the computing dtype where parameters rest, and fetch those;
their masters rest with the optimizer's state (``keeps_compute_shard``).
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from shardwise.homes import LOADS, NUM_BUFFERS, tier_of
from shardwise.offload.loads import MULTIPLE, cut, room_of
from shardwise.offload.regions import align, regions_of
from shardwise.optim.kinds import ROW
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DTYPE_BYTES, OPTIMIZERS, PRECISIONS, DtypeName
from shardwise.plan.step.footprint import Footprint
from shardwise.plan.step.issue import Issuer
from shardwise.plan.step.ledger import Away


class Offloading:
    """The offloading of one candidate; does nothing for units that are on the device."""

    def __init__(self, candidate: Candidate) -> None:
        offload = candidate.offload
        self._optimizer, self._row = (
            OPTIMIZERS[candidate.optimizer],
            PRECISIONS[candidate.precision],
        )
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
        known: dict[tuple[tuple[int, DtypeName], ...], list[int]] = {}  # layers are alike
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
            counters = self._optimizer.counter_bytes * weight.num_updated
            found["cpu"]["optimizer_state"] += counters
            found[self._state]["optimizer_state"] += weight.state_bytes - counters
            state_files.append(self._file_bytes(weight))
            slices.append(weight.largest_shard)
        if self._state == "nvme":
            found["cpu"]["disk_buffers"] += NUM_BUFFERS * max(state_files)
        if self._masters == "nvme":
            found["cpu"]["disk_buffers"] += NUM_BUFFERS * align(max(slices))
        return {place: Away(**lines) for place, lines in found.items()}

    def _file_bytes(self, weight: Footprint) -> int:
        """Return the bytes of the file of a unit's state."""
        parts = (p for n, master in weight.updated for p in self._optimizer.parts(n, master))
        return regions_of([part for part in parts if part]).num_bytes

    # -- copies
    def fetch(self, num_bytes: int, read_bytes: int, unit: int, issue: Issuer) -> None:
        """Bring so many bytes of a unit's slices to the device for a gather, from so many."""
        after = issue.inputs
        if (self._params if self._papers else self._masters) == "nvme":
            after = (issue.transfer("disk_read", read_bytes, unit, ()),)
        issue.before_collective(issue.transfer("to_device", num_bytes, unit, after))

    def send_grads(self, weight: Footprint, unit: int, issue: Issuer) -> None:
        """Copy a unit's reduced gradients to their place.

        Those of a window's further micro-batches are added to the first by the host's cores.
        """
        num_bytes = weight.means_bytes
        arrived = issue.transfer("to_host", num_bytes, unit, issue.inputs)
        if self._grads == "nvme":
            arrived = issue.transfer("disk_write", num_bytes, unit, (arrived,))
        if unit in self._arrived:
            after: tuple[int, ...] = arrived, self._arrived[unit]
            if self._grads == "nvme":
                after = (issue.transfer("disk_read", 2 * num_bytes, unit, after),)
            cost = Cost("memory", self._row.reduce, 0, 3 * num_bytes, 1)
            arrived = issue.on_cpu((cost,), unit, after)
            if self._grads == "nvme":
                arrived = issue.transfer("disk_write", num_bytes, unit, (arrived,))
        self._arrived[unit] = arrived

    def step(self, weights: Sequence[Footprint], issue: Issuer, moved: Sequence[int]) -> None:
        """Issue the step of the units that are away, one by one; ``moved``: bytes of each."""
        ready = issue.inputs
        for unit, weight in enumerate(weights):
            if not weight.is_away or not weight.num_updated:
                continue
            brought = [self._brought(n, master) for n, master in weight.updated]
            in_files = self._file_bytes(weight) if self._state == "nvme" else 0
            in_files += sum(each[1] for each in brought) if self._masters == "nvme" else 0
            read = in_files + (weight.means_bytes if self._grads == "nvme" else 0)
            after = [*ready, self._arrived[unit]]
            if read:
                after.append(issue.transfer("disk_read", read, unit, (self._arrived[unit],)))
            cost = Cost("memory", self._row.master, 0, moved[unit], 1)
            if self.steps_on_device:
                issue.wait(issue.transfer("to_device", sum(map(sum, brought)), unit, after))
                there = issue.compute((cost,), unit, "optimizer")
                stored = sum(sum(each[1:]) for each in brought)
                stepped = issue.transfer("to_host", stored, unit, (there,))
            else:
                stepped = issue.on_cpu((cost,), unit, after)
            if in_files:
                issue.transfer("disk_write", in_files, unit, (stepped,))
