"""The memory of an observed run: the engine's bytes, samples of steps, memory that runs out.

Note [One owner for each byte]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors share memory: a gradient is a part of the buffer of the next step's gradients, a view is a
part of its base. So memory is counted by the blocks of an allocator (torch's storages), each once,
under the first kind that has a part of it. Shards inside full copies are the exception: that part
of the block counts as shards.

Note [What would have fitted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each way to save memory takes known bytes from kinds of the ledger, or a share of the memory that is
not the engine's, which is taken to be activations; on a CPU of the memory that the process has
allocated since its first step began. The new peak is the memory in use and the failed request,
less these. Ways that leave the loss unchanged and cost little time come first; of several that
fit, the first one is the one to try.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch
from torch.distributed.tensor import DTensor

from shardwise.debug import place_of, place_of_state
from shardwise.device import memory_in_use_bytes
from shardwise.engine.tree import tensors_in
from shardwise.host import available_host_bytes
from shardwise.monitor.record import Fix, Memory, Moment, OutOfMemory, RunFacts
from shardwise.names import join_units, name_of_unit
from shardwise.parallel.parts import Parts
from shardwise.quantities import format_bytes
from shardwise.step.overlap import staging_bytes
from shardwise.svg import order_of_kinds
from shardwise.tensor.elements import elements_of
from shardwise.tensor.inner import plain_parts
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit

Key = tuple[str, str, str]  # place, kind, unit
_NO_UNIT = "(no unit)"  # memory of several units, or of no unit
_SAMPLED = ("forward", "backward", "recompute", "step")  # phases, as each begins and ends
_MAX_BLOCKS, _MAX_FIXES = 10, 3
_GIVEN_BY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 2**30, "MB": 2**20, "bytes": 1}
_ASKED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?(GiB|MiB|KiB|GB|MB|bytes)")


@dataclass(frozen=True)
class OwnedBytes:
    """Bytes by (place, kind, unit); places are "device", "host", "files".

    ``in_use_bytes`` is all allocated memory of the device; on the CPU that of the process, with its
    libraries.
    """

    owned: Mapping[Key, int]
    in_use_bytes: int

    def by_kind(self) -> dict[str, int]:
        """Return the device's bytes of each kind, named as in a plan's ledger."""
        found: Counter[str] = Counter()
        for kinds in self.by_unit().values():
            found.update(kinds)
        return {kind: found[kind] for kind in sorted(+found, key=order_of_kinds)}

    def by_unit(self, place: str = "device") -> dict[str, dict[str, int]]:
        """Return the bytes of each kind of each unit in one place."""
        found: dict[str, dict[str, int]] = {}
        for (where, kind, unit), num_bytes in self.owned.items():
            if where == place:
                found.setdefault(unit, {})[kind] = num_bytes
        return found

    @property
    def device_bytes(self) -> int:
        """The engine's bytes on the device."""
        return sum(self.by_kind().values())

    @property
    def other_bytes(self) -> int:
        """Other bytes of the device: activations, temporaries and others."""
        return max(self.in_use_bytes - self.device_bytes, 0)


def state_bytes(optimizers: Sequence[torch.optim.Optimizer]) -> Counter[Key]:
    """Return the bytes of the optimizers' state, which change only in their steps."""
    blocks = _Blocks()
    for optimizer in optimizers:
        for param, state in optimizer.state.items():
            owner = owner_of(param)
            name = _NO_UNIT if owner is None else owner.unit.name
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    place = place_of_state(optimizer, owner, value)
                    blocks.add(place, "optimizer_state", name, [value])
    return blocks.found


def owned_bytes(
    parts: Parts,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    state: Mapping[Key, int] | None = None,
) -> OwnedBytes:
    """Return the bytes that the engine owns on this rank; see Note [One owner for each byte].

    ``state`` is a result of `state_bytes` since the optimizers' last step.

    **Cost** some microseconds of the host for each storage, and for each parameter that has a
    gradient; without ``state`` for each tensor of the optimizers too.
    """
    blocks = _Blocks()
    for unit in parts.units:
        _add_params(blocks, unit)
    for unit in parts.units:
        _add_grads(blocks, unit)
    blocks.found.update(state_bytes(optimizers) if state is None else state)
    for unit in parts.units:
        if unit.gather.pending is not None:
            blocks.add("device", "gather_staging", unit.name, tensors_in(unit.gather.pending.holds))
        coded = [s.coded_memory for s in unit.storages if s.coded_memory is not None]
        blocks.add("device", "gather_staging", unit.name, coded)
    for engine in parts.engines:
        for held in engine.reductions.held:
            name = join_units(held.units)
            blocks.add("device", "grad_shards", name, held.means)
            blocks.add("device", "grad_full", name, held.grads)
            blocks.add("device", "reduce_staging", name, tensors_in(held.staging))
        if engine.activations is not None:
            blocks.count("host", "activations_on_host", _NO_UNIT, engine.activations.host_bytes)
    for optimizer in optimizers:
        blocks.count("device", "state_staging", _NO_UNIT, staging_bytes(optimizer))
    return OwnedBytes(dict(+blocks.found), memory_in_use_bytes(parts.comm.device))


class _Blocks:
    """Blocks of memory, each counted once."""

    def __init__(self) -> None:
        self.found: Counter[Key] = Counter()
        self._seen: set[int] = set()

    def count(self, place: str, kind: str, unit: str, num_bytes: int) -> None:
        self.found[place, kind, unit] += num_bytes

    def see(self, *tensors: torch.Tensor) -> None:
        """Mark memory as counted."""
        self._seen.update(t.untyped_storage().data_ptr() for t in tensors)

    def add(self, place: str, kind: str, unit: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            local = elements_of(tensor) if isinstance(tensor, DTensor) else tensor
            for part in plain_parts(local).values():
                block = part.untyped_storage()
                if block.nbytes() and block.data_ptr() not in self._seen:
                    self._seen.add(block.data_ptr())
                    self.count(place, kind, unit, block.nbytes())


def _add_params(blocks: _Blocks, unit: Unit) -> None:
    for storage in unit.storages:
        memory, place = storage.memory, place_of(unit, "params")
        blocks.count(place, "param_shards", unit.name, memory.shard_bytes)
        blocks.count("device", "param_full", unit.name, storage.kept_bytes + memory.copy_bytes)
        blocks.see(storage.master, storage.full)
    for param in unit.params:
        if not param.encoding.is_in_storage:
            blocks.add(place_of(unit), "param_shards", unit.name, [param.sharded])
            if param.leaf is not None:
                blocks.add("device", "param_full", unit.name, [param.leaf.data])


def _add_grads(blocks: _Blocks, unit: Unit) -> None:
    place = place_of(unit, "grads")
    for storage in unit.storages:
        blocks.add(place_of(unit), "grad_shards", unit.name, storage.mean_memory.kept)
        if storage.unreduced is not None:
            blocks.add("device", "grad_shards", unit.name, [storage.unreduced.sums])
    is_empty = unit.grads.state is GradState.EMPTY and not unit.settings.full_between_calls
    for param in unit.params:
        gradient = param.gradient
        # Autograd writes before the unit's state changes.
        if is_empty and not gradient.has_partial:
            continue
        for mean in (param.grad, gradient.mean):
            if isinstance(mean, DTensor):
                blocks.add(place, "grad_shards", unit.name, [mean])
        partials = [gradient.partial, getattr(param.leaf, "grad", None)]
        blocks.add("device", "grad_full", unit.name, [t for t in partials if t is not None])


class MemoryWatch:
    """Samples the memory of a step, and explains memory that runs out, on this rank.

    On the CPU the memory in use is that of the process. Its largest moment is chance, so the
    engine's memory decides which one is the peak, and memory in use before the first step counts
    as memory that stays.
    """

    def __init__(
        self, parts: Parts, optimizers: Sequence[torch.optim.Optimizer], facts: RunFacts, rank: int
    ) -> None:
        self._parts, self._optimizers = parts, optimizers
        self._facts, self._rank = facts, rank
        self._is_cpu = facts.device == "cpu"
        self._samples: list[tuple[str, str, OwnedBytes]] = []  # phase, unit, bytes
        self._state: Mapping[Key, int] | None = None  # of the optimizers
        self._explained: BaseException | None = None
        self._base_bytes = 0

    def start(self) -> None:
        """Note the memory before the first step."""
        if self._is_cpu:
            self._base_bytes = owned_bytes(self._parts, self._optimizers).other_bytes

    def clear(self) -> None:
        """Keep no optimizer and no error alive."""
        self._optimizers, self._explained = (), None

    def sample(self, phase: str, unit: str) -> None:
        """Sample the memory as a phase of a unit begins, or ends ("forward_end")."""
        if phase.removesuffix("_end") not in _SAMPLED:
            return
        if self._state is None or phase == "step_end":
            self._state = state_bytes(self._optimizers)
        now = owned_bytes(self._parts, self._optimizers, self._state)
        self._samples.append((phase, unit, now))

    def take(self, step: int) -> list[Memory]:
        """Return the samples of a step as a line; none if there are none."""
        samples, self._samples, self._state = self._samples, [], None
        if not samples:
            return []
        each = [owned for *_, owned in samples]
        sizes = [now.device_bytes if self._is_cpu else now.in_use_bytes for now in each]
        peak = sizes.index(max(sizes))
        units = {place: each[peak].by_unit(place) for place in ("device", "host", "files")}
        moments = [Moment(p, u, now.by_kind(), now.other_bytes) for p, u, now in samples]
        return [Memory(step, moments, peak, units)]

    def explain(self, error: BaseException, step: int, phase: str, unit: str) -> OutOfMemory | None:
        """Return a report about an error, before memory is freed; None if it ran out of nothing.

        An error that leaves several phases is reported once.
        """
        if error is self._explained or not is_out_of_memory(error):
            return None
        self._explained = error
        owned, asked = owned_bytes(self._parts, self._optimizers), asked_bytes(error)
        needed, capacity = owned.in_use_bytes + (asked or 0), self._facts.device_bytes
        if self._is_cpu:  # other processes use memory of the host too
            capacity = min(capacity, owned.in_use_bytes + available_host_bytes())
        blocks = [(kind, of, n) for (at, kind, of), n in owned.owned.items() if at == "device"]
        fixes = [
            Fix(change, needed - saved <= capacity, saved, needed - saved, cost)
            for change, saved, cost in _ways(self._facts, owned, self._base_bytes)
            if saved > 0
        ]
        fixes.sort(key=lambda fix: (not fix.fits, 0 if fix.fits else fix.peak_bytes))
        return OutOfMemory(
            *(step, asked, owned.in_use_bytes, capacity, fixes[:_MAX_FIXES]),
            *(self._rank, phase, unit, owned.by_kind(), owned.other_bytes),
            sorted(blocks, key=lambda block: -block[2])[:_MAX_BLOCKS],
        )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out: an accelerator's, or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def asked_bytes(error: BaseException) -> int | None:
    """Return the failed request in torch's message, or None."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _GIVEN_BY[found[2]])


def _ways(facts: RunFacts, owned: OwnedBytes, base_bytes: int) -> list[tuple[str, int, str]]:
    """Return changes, the bytes that each saves, and its cost; the cheapest first.

    **Source** of one activation a block with recomputation: Chen et al. 2016, section 4.
    """
    kinds, other = Counter(owned.by_kind()), max(owned.other_bytes - base_bytes, 0)
    state, shards, full = kinds["optimizer_state"], kinds["param_shards"], kinds["param_full"]
    grads = kinds["grad_full"] + kinds["grad_shards"]
    ranks = next(iter(facts.degrees.values()), 1)
    largest = max((unit.full_bytes for unit in facts.units), default=0)
    blocks = max(len(facts.units) - 1, 1)
    saved = 0  # by stage 3
    if facts.stage < 3 and ranks > 1:
        kept = ceil((shards + full) / ranks) if facts.stage == 0 else shards
        saved = shards + full - kept - 2 * largest
        saved += grads - grads // ranks if facts.stage < 2 else 0
        saved += state - state // ranks if facts.stage == 0 else 0
    recomputed = other - ceil(other / blocks)
    return [
        ("stage=3", saved, "parameters are gathered again in backward"),
        ("activation checkpointing of each block", recomputed, "about a third more computing"),
        ("half the micro-batch, twice the accumulation", other // 2, "no other result"),
        ('offload="cpu" of the optimizer\'s state', state, "the step goes on on the host"),
        ('offload="cpu"', state + shards + kinds["grad_shards"], "slices travel each step"),
    ]


def describe_out_of_memory(report: OutOfMemory) -> str:
    """Return a report as text."""
    asked = "" if report.asked_bytes is None else f" asking for {format_bytes(report.asked_bytes)}"
    kinds = dict(report.kinds or {})
    kinds["activations, temporaries and other memory"] = report.other_bytes
    blocks = {f"{kind} of {name_of_unit(unit)}": n for kind, unit, n in report.blocks}
    fixes = (
        f"  {fix.change}: {format_bytes(fix.saved_bytes)} less, a peak of "
        f"{format_bytes(fix.peak_bytes)}, {'fits' if fix.fits else 'still does not fit'}; "
        f"{fix.cost}"
        for fix in report.fixes
    )
    lines = (
        f"out of memory on rank {report.rank} in step {report.step}, in {report.phase} of "
        f"'{name_of_unit(report.unit)}',{asked} with {format_bytes(report.in_use_bytes)} in use of "
        f"{format_bytes(report.capacity_bytes)}",
        "memory by kind:",
        *(f"  {format_bytes(n):>10}  {name}" for name, n in kinds.items()),
        "the largest blocks of Shardwise:",
        *(f"  {format_bytes(n):>10}  {name}" for name, n in blocks.items()),
        "changes that need less:",
        *fixes,
    )
    return "\n".join(lines)
