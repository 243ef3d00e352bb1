"""Labels for the profiler and the ledger of bytes; shared by the engine and the reports.

Note [Marks]
A span is always left in the call that entered it. torch writes the end of a span into memory of
the profile in which it began; if that profile is over and another one runs, the process dies. What
one hook begins and another ends (a unit's forward and backward pass) may stay open when the pass is
cut short, so it has two labels of no length: ``backward`` and ``backward_end``.
"""

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.profiler import record_function

_NO_SPAN = nullcontext()


def span(phase: str, *units: str) -> AbstractContextManager[object]:
    """Label what runs inside as ``shardwise.<phase>(<units>)``; free when no profiler runs."""
    if not torch.autograd._profiler_enabled():
        return _NO_SPAN
    return record_function(f"shardwise.{phase}({', '.join(name or '(root)' for name in units)})")


def mark(phase: str, unit: str) -> None:
    """Put the label ``shardwise.<phase>(<unit>)`` where it is called; see Note [Marks]."""
    with span(phase, unit):
        pass


@dataclass(frozen=True)
class Stats:
    """What one rank holds and has sent, in bytes, at the moment of the call.

    ``param_shard_bytes`` are the persistent master slices; ``param_full_bytes`` full copies alive
    now beyond those (where the slices lie inside the full copy they are counted once, as slices),
    ``param_full_peak_bytes`` their peak; ``grad_shard_bytes`` reduced, ``grad_partial_bytes``
    unreduced gradients. ``bytes_by_place`` has where slices, reduced gradients, full copies and, if
    it was given, the optimizer's state rest: "device", "host", "files"; of activations, what they
    have of the host. ``sent_bytes`` and
    ``num_collectives`` count payloads sent by this rank since ``shard()``, by ``axis.kind``; of
    those that torch sends, what was sent in `counting`.
    """

    param_shard_bytes: int
    param_full_bytes: int
    param_full_peak_bytes: int
    grad_shard_bytes: int
    grad_partial_bytes: int
    bytes_by_place: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    num_collectives: Mapping[str, int]


@dataclass
class Traffic:
    """Counts of what this rank sent, by ``axis.kind``, and the events if somebody asked."""

    sent_bytes: Counter[str] = field(default_factory=Counter)
    num_collectives: Counter[str] = field(default_factory=Counter)
    events: list[tuple[str, str, int]] | None = None

    def add(self, kind: str, unit: str, num_bytes: int) -> None:
        """Count one collective of ``kind`` for ``unit`` which sends ``num_bytes``."""
        self.sent_bytes[kind] += num_bytes
        self.num_collectives[kind] += 1
        if self.events is not None:
            self.events.append((kind, unit, num_bytes))


@dataclass
class FullParamLedger:
    """Full parameters alive, now and at most."""

    now: int = 0
    peak: int = 0

    def allocate(self, num_bytes: int) -> None:
        """Count ``num_bytes`` of full parameters as alive."""
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def free(self, num_bytes: int) -> None:
        """Count ``num_bytes`` of full parameters as freed."""
        self.now -= num_bytes
