"""What lies on the host or on disk, and the copies that this takes. In numbers only, as planned.

Note [Offloading as planned]
The numbers are those of `accounting`: a fraction of the
optimizer's state, with the master weights and the reduced gradients of the same elements, lies off
the device; gradients go there as soon as a bucket is reduced; the host's cores step unit by unit,
and each unit's new parameters go back in the computing dtype while the next one steps
(ZeRO-Offload, arXiv 2101.06840; per unit as in torchao's CPU offload). State on disk is read
before the unit's step and written after it. Stepped on the device, it passes three buffers there,
and so do gradients; parameters that stay on the device are written there. Offloaded parameters are
fetched for every gather (ZeRO-Infinity, arXiv 2104.07857).
"""

from shardwise.homes import LOAD_BYTES, LOADS
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import DTYPE_BYTES, PRECISIONS
from shardwise.plan.step.footprint import Footprint
from shardwise.plan.step.issue import Issuer

_BUFFERED_UNITS = 2  # pinned buffers for what is on disk: one is filled while another is used


class Offloading:
    """The offloading of one candidate; does nothing where everything is on the device."""

    def __init__(self, candidate: Candidate) -> None:
        self.candidate = candidate
        offload = candidate.offload
        row = PRECISIONS[candidate.precision]
        self.fraction = 0.0 if offload.optimizer == "device" else offload.optimizer_fraction
        self.params_away = offload.params != "device"
        self._compute = DTYPE_BYTES[row.compute]
        self._master = DTYPE_BYTES[row.master]
        self._has_master = row.has_master
        self._row = row
        self._arrived: dict[int, int] = {}  # the operation after which a unit's gradients are there

    def share(self, num_bytes: int) -> int:
        """Return the offloaded part of bytes of state, rounded up."""
        return -int(-num_bytes * self.fraction // 1) if self.fraction else 0

    # -- what lies where
    def params_on_device(self, weight: Footprint) -> int:
        """Return the bytes of a unit's slices that stay on the device."""
        if not self.fraction and not self.params_away:
            return weight.shard_bytes + weight.compute_shard_bytes
        numel = weight.shard_bytes // self._master
        if not self._has_master:
            return 0 if self.params_away and weight.freed_bytes else weight.shard_bytes
        held = weight.shard_bytes - self.share(weight.shard_bytes)
        if weight.freed_bytes and not self.params_away:
            held += weight.compute_shard_bytes or self.share(numel) * self._compute
        return held

    def out_on_device(self, weight: Footprint) -> int:
        """Return the bytes of a unit's reduced gradients that stay on the device."""
        out = weight.reduce.out if weight.reduce else 0
        return out - self.share(out)

    def bytes_away(self, weights: list[Footprint]) -> tuple[int, int, int]:
        """Return the bytes of state on the host, of pinned buffers there, and on disk."""
        places = {"device": 0, "host": 0, "nvme": 0}
        offload = self.candidate.offload
        pinned = 0  # the largest unit's, of what is on disk
        for weight in weights:
            numel = weight.shard_bytes // self._master
            reduced = weight.reduce.out if weight.reduce and weight.num_updated else 0
            places["host"] += self.share(reduced)
            apart = self._has_master or offload.params != offload.optimizer
            state = self.share(weight.state_bytes)
            state += self.share(weight.shard_bytes) if apart else 0
            places[offload.optimizer] += state if self.fraction else 0
            params = numel * self._compute if self.params_away else 0
            places[offload.params] += params
            staged = state if offload.optimizer == "nvme" else 0
            staged += params if offload.params == "nvme" else 0
            pinned = max(pinned, staged)
        return places["host"], _BUFFERED_UNITS * pinned, places["nvme"]

    # -- copies
    def fetch(self, weight: Footprint, unit: int, issue: Issuer) -> int:
        """Bring a unit's slices to the device for a gather; return the bytes of their buffer."""
        if not self.params_away:
            return 0
        num_bytes = weight.shard_bytes // self._master * self._compute
        after = issue.inputs
        if self.candidate.offload.params == "nvme":
            after = (issue.transfer("disk_read", num_bytes, unit, ()),)
        issue.before_collective(issue.transfer("to_device", num_bytes, unit, after))
        return num_bytes

    def send_grads(self, weight: Footprint, unit: int, issue: Issuer) -> int:
        """Copy a unit's reduced gradients to the host; return the bytes that the device frees.

        Those of a window's further micro-batches are added to the first by the host's cores.
        """
        num_bytes = self.share(weight.reduce.out if weight.reduce else 0)
        if num_bytes:
            arrived = issue.transfer("to_host", num_bytes, unit, issue.inputs)
            if unit in self._arrived:
                cost = Cost("memory", self._row.reduce, 0, 3 * num_bytes, 1)
                arrived = issue.on_cpu((cost,), unit, (arrived, self._arrived[unit]))
            self._arrived[unit] = arrived
        return num_bytes

    def staging_bytes(self, weights: list[Footprint]) -> int:
        """Return the buffers on the device that state passes, if it is stepped there."""
        if not self.fraction or self.candidate.offload.step_on == "host":
            return 0
        sizes = [self._brought(weight) for weight in weights if weight.num_updated]
        return LOADS * min(LOAD_BYTES, max(sizes, default=0))

    def _stored(self, weight: Footprint) -> int:
        return self.share(weight.state_bytes + weight.local_numel * self._master)

    def _brought(self, weight: Footprint) -> int:
        """Return what comes to the device for a unit's step: state, masters and gradients."""
        return self._stored(weight) + self.share(weight.reduce.out if weight.reduce else 0)

    def step(self, weights: list[Footprint], issue: Issuer, moved: list[int]) -> None:
        """Issue the step of what is offloaded, unit by unit; ``moved``: bytes of each."""
        ready = issue.inputs
        for unit, weight in enumerate(weights):
            if not self.fraction or not weight.num_updated:
                continue
            after = [*ready, self._arrived[unit]]
            if self.candidate.offload.optimizer == "nvme":
                after.append(issue.transfer("disk_read", self._stored(weight), unit, ()))
            copy = self.share(weight.local_numel * self._compute)
            cost = Cost("memory", self._row.master, 0, self.share(moved[unit]) + copy, 1)
            if self.candidate.offload.step_on == "device":
                issue.wait(issue.transfer("to_device", self._brought(weight), unit, after))
                there = issue.compute((cost,), unit, "optimizer")
                stepped = issue.transfer("to_host", self._stored(weight), unit, (there,))
            else:
                stepped = issue.on_cpu((cost,), unit, after)
                if not self.params_away:
                    issue.transfer("to_device", copy, unit, (stepped,))
            if self.candidate.offload.optimizer == "nvme":
                issue.transfer("disk_write", self._stored(weight), unit, (stepped,))

    def return_params(self, weights: list[Footprint], issue: Issuer) -> None:
        """Copy to the host, where parameters lie there, what the device has updated."""
        numel = sum(w.local_numel for w in weights)
        updated = (numel - self.share(numel)) * self._compute
        if self.params_away and updated:
            issue.transfer("to_host", updated, 0, issue.inputs)
