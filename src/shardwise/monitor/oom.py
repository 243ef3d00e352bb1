"""Out of memory: where it was, whose the memory is, and what would have fitted.

Note [What would have fitted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each way to save memory takes bytes from kinds of the ledger that are known to the byte, or a share
of what is not the engine's, which is taken to be activations; on a CPU of what the process has
taken since its first step began. The new peak is what was in use and
what was asked for, less these. Ways that leave the loss alone and cost little time come first; of
several that fit, the first that fits is the one to try.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

import torch

from shardwise.monitor.ledger import OwnedBytes
from shardwise.monitor.record import RunFacts
from shardwise.names import name_of_unit
from shardwise.quantities import format_bytes

_MAX_BLOCKS = 10
_MAX_FIXES = 3
_GIVEN_BY = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "GB": 2**30, "MB": 2**20, "bytes": 1}
_ASKED = re.compile(r"[Tt]r(?:ied|ying) to allocate ([\d.]+) ?(GiB|MiB|KiB|GB|MB|bytes)")


@dataclass(frozen=True)
class Fix:
    """One way to need less: ``change`` is of `shard()` or of the loop; bytes of this rank."""

    change: str
    saved_bytes: int
    peak_bytes: int
    fits: bool
    cost: str


@dataclass(frozen=True)
class OutOfMemory:
    """What is told when memory ran out; bytes of this rank's device.

    ``asked_bytes`` is None where the error does not say. ``blocks`` are the engine's largest: kind,
    unit, bytes.
    """

    rank: int
    step: int
    phase: str
    unit: str
    asked_bytes: int | None
    in_use_bytes: int
    capacity_bytes: int
    kinds: Mapping[str, int]
    other_bytes: int
    blocks: tuple[tuple[str, str, int], ...]
    fixes: tuple[Fix, ...]

    def __str__(self) -> str:
        """Say it for people."""
        asked = "" if self.asked_bytes is None else f" asking for {format_bytes(self.asked_bytes)}"
        lines = [
            f"out of memory on rank {self.rank} in step {self.step}, in {self.phase} of "
            f"'{name_of_unit(self.unit)}',{asked} with {format_bytes(self.in_use_bytes)} in use of "
            f"{format_bytes(self.capacity_bytes)}",
            "whose the memory is:",
        ]
        lines += [f"  {format_bytes(n):>10}  {kind}" for kind, n in self.kinds.items()]
        lines.append(
            f"  {format_bytes(self.other_bytes):>10}  activations, temporaries and what is not "
            "Shardwise's"
        )
        lines.append("the largest of Shardwise's:")
        lines += [
            f"  {format_bytes(n):>10}  {kind} of {name_of_unit(unit)}"
            for kind, unit, n in self.blocks
        ]
        lines.append("what would need less:")
        for fix in self.fixes:
            verdict = "fits" if fix.fits else "still does not fit"
            lines.append(
                f"  {fix.change}: {format_bytes(fix.saved_bytes)} less, a peak of "
                f"{format_bytes(fix.peak_bytes)}, {verdict}; {fix.cost}"
            )
        return "\n".join(lines)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether memory ran out: an accelerator's, or the host's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def asked_bytes(error: BaseException) -> int | None:
    """Return how much was asked for, as torch's message says it; None where it does not."""
    found = _ASKED.search(str(error))
    return None if found is None else int(float(found[1]) * _GIVEN_BY[found[2]])


def explain_out_of_memory(
    error: BaseException,
    facts: RunFacts,
    owned: OwnedBytes,
    place: tuple[int, int, str, str],
    capacity_bytes: int,
    base_bytes: int = 0,
) -> OutOfMemory:
    """Return what to tell; ``place`` is the rank, the step, the phase and the unit.

    ``base_bytes`` were in use before the first step and not the engine's, so they stay.
    """
    asked = asked_bytes(error)
    needed = owned.in_use_bytes + (asked or 0)
    blocks = [(kind, unit, n) for (at, kind, unit), n in owned.owned.items() if at == "device"]
    blocks.sort(key=lambda block: -block[2])
    fixes = [
        Fix(change, saved, needed - saved, needed - saved <= capacity_bytes, cost)
        for change, saved, cost in _ways(facts, owned, base_bytes)
        if saved > 0
    ]
    fixes.sort(key=lambda fix: (not fix.fits, 0 if fix.fits else fix.peak_bytes))
    return OutOfMemory(
        *place,
        asked,
        owned.in_use_bytes,
        capacity_bytes,
        owned.by_kind(),
        owned.other_bytes,
        tuple(blocks[:_MAX_BLOCKS]),
        tuple(fixes[:_MAX_FIXES]),
    )


def _ways(facts: RunFacts, owned: OwnedBytes, base_bytes: int) -> list[tuple[str, int, str]]:
    """Return changes, the bytes that each saves, and what it costs; the cheapest first.

    **Source** of one activation a block with recomputation: Chen et al. 2016, section 4.
    """
    kinds, other = owned.by_kind(), max(owned.other_bytes - base_bytes, 0)
    state = kinds.get("optimizer_state", 0)
    shards, full = kinds.get("param_shards", 0), kinds.get("param_full", 0)
    grads = kinds.get("grad_full", 0) + kinds.get("grad_shards", 0)
    ranks = next(iter(facts.degrees.values()), 1) if facts.degrees else 1
    largest = max((unit.full_bytes for unit in facts.units), default=0)
    blocks = max(len(facts.units) - 1, 1)
    found: list[tuple[str, int, str]] = []
    if facts.stage < 3 and ranks > 1:
        kept = ceil((shards + full) / ranks) if facts.stage == 0 else shards
        saved = shards + full - kept - 2 * largest
        if facts.stage < 2:
            saved += grads - grads // ranks
        if facts.stage == 0:
            saved += state - state // ranks
        found.append(("stage=3", saved, "parameters are gathered again in backward"))
    recomputed = other - ceil(other / blocks)
    found += [
        ("activation checkpointing of each block", recomputed, "about a third more computing"),
        ("half the micro-batch, twice the accumulation", other // 2, "no other result"),
        ('offload="cpu" of the optimizer\'s state', state, "the step goes on on the host"),
        ('offload="cpu"', state + shards + kinds.get("grad_shards", 0), "slices travel each step"),
    ]
    return found
