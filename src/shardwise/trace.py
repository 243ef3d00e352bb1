"""What goes on, told to torch's profiler and to a recorder; what was sent, and what is alive.

Note [Marks]
A span is always left in the call that entered it. torch writes the end of a span into memory of
the profile in which it began; if that profile is over and another one runs, the process dies. What
one hook begins and another ends (a unit's forward and backward pass) may stay open when the pass is
cut short, so it has two labels of no length: ``backward`` and ``backward_end``. A recorder closes
what was left open when the step is over.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.profiler import record_function

from shardwise.names import MAIN, join_units, name_of_unit

_NO_SPAN = nullcontext()


class Recorder(Protocol):
    """Who keeps what goes on in a model, with the time."""

    def enter(self, line: str, phase: str, unit: str) -> None:
        """Note that a phase of a unit begins now on one line of work."""

    def leave(self, line: str, phase: str, unit: str) -> None:
        """Note that it is over."""

    def begin(self, line: str, unit: str, num_bytes: int, works: Any) -> Callable[[], None]:
        """Note a collective or a copy that begins now; call what is returned once it is over.

        ``works`` are torch's, which it is made of; () if it is what is enqueued on the current
        stream until its end is told, None if the device has no part in it.
        """

    def wait_for(self, group: Any, peer: int, seconds: float) -> None:
        """Note that this rank has waited so long for messages from or to another one of a group."""

    def see_inputs(self, args: Any, kwargs: Any) -> None:
        """Look at what the model was called with."""

    def saved(self, path: str, is_finite: bool) -> None:
        """Note that a checkpoint is on disk, and whether all that this rank wrote is finite."""


class Tracer:
    """Tells what goes on in one model to torch's profiler, and to a recorder while one listens.

    Free while neither does.
    """

    __slots__ = ("_told", "recorder")

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._told: list[Recorder] = []

    @contextmanager
    def telling(self, recorder: Recorder) -> Iterator[None]:
        """Tell a recorder what goes on inside; of several, closed in any order, the newest."""
        self._told.append(recorder)
        self.recorder = recorder
        try:
            yield
        finally:
            self._told.remove(recorder)
            self.recorder = self._told[-1] if self._told else None

    def see_inputs(self, args: Any, kwargs: Any) -> None:
        """Show a recorder what the model was called with."""
        if self.recorder is not None:
            self.recorder.see_inputs(args, kwargs)

    def span(self, phase: str, *units: str, line: str = MAIN) -> AbstractContextManager[object]:
        """Label what runs inside as ``shardwise.<phase>(<units>)``."""
        labels = torch.autograd._profiler_enabled()
        if not labels and self.recorder is None:
            return _NO_SPAN
        label = _label(phase, units) if labels else None
        if self.recorder is None:
            return label or _NO_SPAN
        return _Told(self.recorder, line, phase, units, label)

    def copies(self, line: str, unit: str, num_bytes: int) -> AbstractContextManager[object]:
        """Tell a recorder of what is enqueued on the current stream inside."""
        told = self.recorder
        return _NO_SPAN if told is None else _copies(told, line, unit, num_bytes)

    def mark_begin(self, phase: str, unit: str) -> None:
        """Say that a phase begins that another call ends; see Note [Marks]."""
        if torch.autograd._profiler_enabled():
            with _label(phase, (unit,)):
                pass
        if self.recorder is not None:
            self.recorder.enter(MAIN, phase, unit)

    def mark_end(self, phase: str, unit: str) -> None:
        """Say that it ends, as the label ``<phase>_end``."""
        if torch.autograd._profiler_enabled():
            with _label(f"{phase}_end", (unit,)):
                pass
        if self.recorder is not None:
            self.recorder.leave(MAIN, phase, unit)


class _Told:
    """A span that a recorder is told of."""

    __slots__ = ("_label", "_line", "_phase", "_recorder", "_unit")

    def __init__(
        self,
        recorder: Recorder,
        line: str,
        phase: str,
        units: tuple[str, ...],
        label: AbstractContextManager[object] | None,
    ) -> None:
        self._recorder, self._line, self._phase, self._label = recorder, line, phase, label
        self._unit = join_units(units)

    def __enter__(self) -> None:
        if self._label is not None:
            self._label.__enter__()
        self._recorder.enter(self._line, self._phase, self._unit)

    def __exit__(self, *error: Any) -> None:
        self._recorder.leave(self._line, self._phase, self._unit)
        if self._label is not None:
            self._label.__exit__(*error)


@contextmanager
def _copies(recorder: Recorder, line: str, unit: str, num_bytes: int) -> Iterator[None]:
    over = recorder.begin(line, unit, num_bytes, ())
    yield
    over()


def _label(phase: str, units: tuple[str, ...]) -> AbstractContextManager[object]:
    return record_function(f"shardwise.{phase}({', '.join(map(name_of_unit, units))})")


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
    last_bytes: int = 0

    def add(self, kind: str, unit: str, num_bytes: int) -> None:
        """Count one collective of ``kind`` for ``unit`` which sends ``num_bytes``."""
        self.sent_bytes[kind] += num_bytes
        self.num_collectives[kind] += 1
        self.last_bytes = num_bytes
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
