"""What a device holds beside tensors, fitted: per meaning of the memory column, and per system.

Note [Two levels]
A share of the tensors (blocks that the caching allocator keeps), a share of what the loss makes of
the logits (few large blocks of unequal sizes, which the allocator keeps apart) and a constant
(context, NCCL, workspaces) are fitted for each meaning of a memory column over all systems, each
source page with the same weight. A system with several rows has figures of its own, drawn towards
the common ones. So a system that was never seen gets what is common, and leaving a page out leaves
no trace of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from _published_systems import MemoryKind

from shardwise.plan.margins import COMMUNICATOR_BYTES, CONTEXT_BYTES

_SHARES = [0.01 * i for i in range(17)]
_CONSTANTS = [0.5e9 * i for i in range(29)]
_OF_LOGITS = (0.0, 0.25, 0.5, 0.75, 1.0)
_FEWEST = 3  # rows for which a system has figures of its own
_PULL = 0.10  # what a row's worth of the common figures weighs, in error per unit of distance


@dataclass(frozen=True)
class Measured:
    """A row's memory: tensors as predicted, and its column."""

    id: str
    page: str
    system: str
    kind: MemoryKind
    tensors: float
    logits: float  # what a loss makes of the logits in blocks of unequal sizes
    groups: int  # communicators
    published: float

    @cached_property
    def base(self) -> float:
        """Bytes of context and communicators, where the column has them."""
        if self.kind != "device":
            return 0.0
        return CONTEXT_BYTES.expected + self.groups * COMMUNICATOR_BYTES.expected


@dataclass(frozen=True)
class Overhead:
    """total = tensors x (1 + fraction) + logits x of_logits + constant."""

    fraction: float = 0.0
    constant: float = 0.0
    of_logits: float = 0.0

    def total(self, row: Measured) -> float:
        """Return the bytes that a row's column shows."""
        kept = row.tensors * self.fraction + row.logits * self.of_logits
        return row.tensors + kept + self.constant + row.base


@dataclass(frozen=True)
class Overheads:
    """Overheads by kind and by "system, kind"; a kind without rows has none."""

    found: Mapping[str, Overhead] = field(default_factory=dict)

    def of(self, system: str, kind: MemoryKind) -> Overhead:
        """Return a system's own, or else what is common to the kind."""
        return self.found.get(f"{system}, {kind}", self.found.get(kind, Overhead()))

    def total(self, row: Measured) -> float:
        """Return what the row's column is predicted to show."""
        return self.of(row.system, row.kind).total(row)

    def without(self, name: str) -> Overheads:
        """Return the same without one constant: a system falls back to its kind, a kind to none."""
        return Overheads({k: v for k, v in self.found.items() if k != name})


def fit_overheads(rows: Iterable[Measured]) -> Overheads:
    """Fit both levels by least absolute relative error; see Note [Two levels].

    **Cost** about a second for 150 rows.
    """
    by_kind: dict[MemoryKind, list[Measured]] = defaultdict(list)
    for row in rows:
        if row.kind != "allocated":
            by_kind[row.kind].append(row)
    found: dict[str, Overhead] = {}
    for kind, some in by_kind.items():
        common = found[kind] = _least(some, kind, None)
        by_system: dict[str, list[Measured]] = defaultdict(list)
        for row in some:
            by_system[row.system].append(row)
        for system, own in by_system.items():
            if len(own) >= _FEWEST:
                found[f"{system}, {kind}"] = _least(own, kind, common)
    return Overheads(found)


def _least(rows: Sequence[Measured], kind: str, common: Overhead | None) -> Overhead:
    weights = _page_weights(rows) if common is None else [1 / len(rows)] * len(rows)
    # Blocks that an allocator keeps are a share of what it manages: no constant beside it.
    constants = _CONSTANTS if kind == "device" else [0.0]

    def loss(each: Overhead) -> float:
        error = sum(
            w * abs(each.total(r) / r.published - 1) for w, r in zip(weights, rows, strict=True)
        )
        return error + (_pull(each, common) / len(rows) if common else 0.0)

    of_logits = _OF_LOGITS if any(r.logits for r in rows) else (0.0,)
    tried = [Overhead(f, c, g) for f in _SHARES for c in constants for g in of_logits]
    return min(tried, key=lambda each: (loss(each), each.constant))


def _pull(each: Overhead, common: Overhead) -> float:
    away = abs(each.fraction - common.fraction) / 0.1
    away += abs(each.of_logits - common.of_logits) / 2
    return _PULL * (away + abs(each.constant - common.constant) / 5e9)


def _page_weights(rows: Sequence[Measured]) -> list[float]:
    sizes: dict[str, int] = defaultdict(int)
    for row in rows:
        sizes[row.page] += 1
    return [1 / sizes[row.page] / len(sizes) for row in rows]
