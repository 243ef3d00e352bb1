"""Events of a model for torch's profiler and a recorder; counts of bytes sent and full parameters.

Note [Marks]
A span is always left in the call that entered it. torch writes the end of a span into memory of
the profile in which it began; if that profile has ended and another one runs, the process dies. A
phase that one hook begins and another ends (a unit's forward and backward pass) may stay open when
the pass is cut short, so it has two labels without length: ``backward`` and ``backward_end``. A
recorder closes open phases at the end of the step.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup, Work
from torch.profiler import record_function

from shardwise.names import MAIN, join_units, name_of_unit

_NO_SPAN = nullcontext()
_STARTS = ("unshard", "reduce")  # phases that only start collectives


class Recorder(Protocol):
    """Receives a model's timed events.

    While it is not ``is_detailed``, it receives neither the phases of single units nor collectives:
    of the training thread only the passes of the root, waits for other ranks, and phases of no
    unit.
    """

    is_detailed: bool

    def enter(self, line: str, phase: str, unit: str) -> None:
        """Note that a phase of a unit begins now on one line of work."""

    def leave(self, line: str, phase: str, unit: str) -> None:
        """Note that the phase ends now."""

    def begin(
        self, line: str, unit: str, num_bytes: int, works: Sequence[Work] | None
    ) -> Callable[[], None]:
        """Note a collective or a copy that begins now; call the result when it has ended.

        ``works`` are torch's handles of it; () if it is all work that is enqueued on the current
        stream until that call; None if the device has no part in it.
        """

    def wait_for(self, group: ProcessGroup | None, peer: int, seconds: float) -> None:
        """Note the time for which this rank has waited for messages from or to another rank."""

    def see_inputs(self, args: object, kwargs: Mapping[str, object]) -> None:
        """Receive the inputs of the model."""

    def see_norm(self, norm: torch.Tensor, max_norm: float) -> None:
        """Receive the norm of gradients before they are clipped to another one."""

    def saved(self, path: str, is_finite: bool) -> None:
        """Note that a checkpoint is on disk, and whether all that this rank wrote is finite."""


class Tracer:
    """Sends the events of one model to torch's profiler, and to a recorder if there is one.

    **Cost** none without both.
    """

    __slots__ = ("_recorders", "recorder")

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._recorders: list[Recorder] = []

    @contextmanager
    def telling(self, recorder: Recorder) -> Iterator[None]:
        """Send events inside to a recorder; of several, closed in any order, to the newest."""
        self._recorders.append(recorder)
        self.recorder = recorder
        try:
            yield
        finally:
            self._recorders.remove(recorder)
            self.recorder = self._recorders[-1] if self._recorders else None

    def see_inputs(self, args: object, kwargs: Mapping[str, object]) -> None:
        """Send the inputs of the model to the recorder."""
        if self.recorder is not None:
            self.recorder.see_inputs(args, kwargs)

    def span(self, phase: str, *units: str, line: str = MAIN) -> AbstractContextManager[object]:
        """Label the work inside as ``shardwise.<phase>(<units>)``."""
        label = _label(phase, units) if torch.autograd._profiler_enabled() else _NO_SPAN
        recorder = self.recorder
        if recorder is None or (phase in _STARTS and not recorder.is_detailed):
            return label
        return _Phase(recorder, label, line, phase, units)

    @property
    def detailed(self) -> Recorder | None:
        """The recorder, if it receives the details of units and collectives at present."""
        recorder = self.recorder
        return recorder if recorder is not None and recorder.is_detailed else None

    def copies(self, line: str, unit: str, num_bytes: int) -> AbstractContextManager[object]:
        """Send the work that is enqueued on the current stream inside to the recorder."""
        recorder = self.recorder
        return _NO_SPAN if recorder is None else _copies(recorder, line, unit, num_bytes)

    def mark_begin(self, phase: str, unit: str) -> None:
        """Begin a phase that another call ends; see Note [Marks]."""
        _mark(phase, unit)
        recorder = self.recorder
        if recorder is not None and (not unit or recorder.is_detailed):
            recorder.enter(MAIN, phase, unit)

    def mark_end(self, phase: str, unit: str) -> None:
        """End the phase, with the label ``<phase>_end``."""
        if torch.autograd._profiler_enabled():
            _mark(f"{phase}_end", unit)
        recorder = self.recorder
        if recorder is not None and (not unit or recorder.is_detailed or sys.exc_info()[1]):
            recorder.leave(MAIN, phase, unit)


class _Phase:
    """A phase of units for a recorder; a class, as a generator costs three times as much.

    Its recorder may change between the begin and the end, so both go to the same one.
    """

    __slots__ = ("_label", "_line", "_phase", "_recorder", "_unit")

    def __init__(
        self,
        recorder: Recorder,
        label: AbstractContextManager[object],
        line: str,
        phase: str,
        units: Sequence[str],
    ) -> None:
        self._recorder, self._label, self._line, self._phase = recorder, label, line, phase
        self._unit = units[0] if len(units) == 1 else join_units(units)

    def __enter__(self) -> None:
        if self._label is not _NO_SPAN:
            self._label.__enter__()
        self._recorder.enter(self._line, self._phase, self._unit)

    def __exit__(self, *error: Any) -> None:
        self._recorder.leave(self._line, self._phase, self._unit)
        if self._label is not _NO_SPAN:
            self._label.__exit__(*error)


@contextmanager
def _copies(recorder: Recorder, line: str, unit: str, num_bytes: int) -> Iterator[None]:
    over = recorder.begin(line, unit, num_bytes, ())
    yield
    over()


def _mark(phase: str, unit: str) -> None:
    if torch.autograd._profiler_enabled():
        with _label(phase, (unit,)):
            pass


def _label(phase: str, units: tuple[str, ...]) -> AbstractContextManager[object]:
    return record_function(f"shardwise.{phase}({', '.join(map(name_of_unit, units))})")


@dataclass(frozen=True)
class Stats:
    """Bytes that one rank holds and has sent, at the moment of the call.

    ``param_shard_bytes`` are the persistent master slices; ``param_full_bytes`` full copies alive
    now beyond those (where the slices lie inside the full copy they are counted once, as slices),
    ``param_full_peak_bytes`` their peak; ``grad_shard_bytes`` reduced, ``grad_partial_bytes``
    unreduced gradients. ``bytes_by_place`` has the slices, reduced gradients, full copies and, if
    given, the optimizer's state by place: "device", "host", "files"; offloaded activations count
    for the host. ``sent_bytes`` and ``num_collectives`` count payloads sent by this rank since
    ``shard()``, by ``axis.kind``; collectives by torch itself count inside of `counting`.
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
    """Counts of bytes that this rank sent, by ``axis.kind``, and the events if they are counted."""

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
