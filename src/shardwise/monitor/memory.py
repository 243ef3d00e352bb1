"""The memory of an observed run: samples of single steps, and reports of memory that runs out.

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
from collections.abc import Mapping, Sequence
from math import ceil
from typing import NamedTuple

import torch

from shardwise.engine.parts import Parts
from shardwise.host import available_host_bytes
from shardwise.monitor.ledger import OwnedBytes, owned_bytes, state_bytes
from shardwise.monitor.rank_lines import Fix, Memory, Moment, OutOfMemory
from shardwise.monitor.record import RunFacts
from shardwise.names import name_of_unit
from shardwise.quantities import format_bytes

_SAMPLED = ("forward", "backward", "recompute", "step")  # phases, as each begins and ends
_MAX_BLOCKS, _MAX_FIXES = 10, 3
_GIVEN_BY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 2**30, "MB": 2**20, "bytes": 1}
_ASKED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?(GiB|MiB|KiB|GB|MB|bytes)")


class _Sample(NamedTuple):
    phase: str
    unit: str
    owned: OwnedBytes


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
        self._samples: list[_Sample] = []
        self._state: Mapping[tuple[str, str, str], int] | None = None  # of the optimizers
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
        self._samples.append(_Sample(phase, unit, now))

    def take(self, step: int) -> list[Memory]:
        """Return the samples of a step as a line; none if there are none."""
        samples, self._samples, self._state = self._samples, [], None
        if not samples:
            return []
        sizes = [s.owned.device_bytes if self._is_cpu else s.owned.in_use_bytes for s in samples]
        peak = sizes.index(max(sizes))
        units = {place: samples[peak].owned.by_unit(place) for place in ("device", "host", "files")}
        moments = [Moment(s.phase, s.unit, s.owned.by_kind(), s.owned.other_bytes) for s in samples]
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
            step,
            asked,
            owned.in_use_bytes,
            capacity,
            fixes[:_MAX_FIXES],
            self._rank,
            phase,
            unit,
            owned.by_kind(),
            owned.other_bytes,
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
