"""Recorder of a model's events, and the spans made of them, on lines of work.

Note [Lines of work]
~~~~~~~~~~~~~~~~~~~~
A line of work has no overlapping spans. The training thread is one line, together with autograd's
thread, which works in its place: at any moment it is in exactly one phase of one unit, the
innermost that was entered, or outside of all. So its spans cover a step without gaps. Collectives
of one kind over one axis are a line: a group runs them one after the other, so each begins when the
one before it has ended, even if it was started earlier. Copies between host and device, and reads
and writes of files, are a line for each kind, and so is each thread in the background.

Note [Steps without details]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An event of each phase of each unit costs a percent of a short step. So most short steps have none:
of the training thread only the seconds in each phase are added up, where the passes of the root
stand for those of all units. They say how long the rank computed, waited for others and read data,
in every step. Steps with details show the units and the collectives.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, cast

from shardwise.monitor.lines import SpanRow
from shardwise.names import MAIN

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup
    from torch.distributed import Work as TorchWork

    from shardwise.device import DeviceClock, DeviceMoment

OUTSIDE = "outside"  # the phase of the training thread while no other was entered
EVALUATION = "evaluation"  # forward passes that record no gradients
Interval = tuple[float, float]
Waits = dict[tuple["ProcessGroup | None", int], float]  # seconds for a rank of a group
_PASSES = ("forward", EVALUATION, "recompute", "backward")
_MOST_VALUES = 16  # of a batch that are searched for tokens; a list may have one per sample


class Span(NamedTuple):
    """One phase of one unit on one line, in seconds since the cut before."""

    line: str
    phase: str
    unit: str
    begin_s: float
    end_s: float
    num_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s

    def to_row(self) -> SpanRow:
        """Return it as a timeline has it."""
        times = round(1e3 * self.begin_s, 4), round(1e3 * self.seconds, 4)
        return self.line, self.phase, self.unit, *times, self.num_bytes


# A phase of a unit is entered or left: time, whether it is entered, line, phase, unit, and the
# moment of the device. The training thread makes hundreds in a step, and they are kept for a while.
# So their fields are stored one after the other in a list; tuples would be work for Python's
# garbage collector.
Event = tuple[float, bool, str, str, str, "DeviceMoment | None"]
_FIELDS = 6


class Work(NamedTuple):
    """A collective, or a copy of offloaded state, that has ended."""

    begin_s: float
    end_s: float
    line: str
    unit: str
    num_bytes: int
    began: DeviceMoment | None
    ended: DeviceMoment | None


class Recorded(NamedTuple):
    """The events between two cuts; times of the device if it was timed.

    Without details there are no events of the main line, and ``main_s`` has its seconds by phase.
    """

    begin_s: float
    end_s: float
    event_fields: Sequence[object]  # the fields of all events
    works: Sequence[Work]
    num_tokens: int
    waited_for: Waits = {}  # noqa: RUF012 - never written
    first: DeviceMoment | None = None
    last: DeviceMoment | None = None
    main_s: Mapping[str, float] | None = None
    paused_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Its duration."""
        return self.end_s - self.begin_s

    @property
    def is_detailed(self) -> bool:
        """Tell whether it has the events of units and collectives."""
        return self.main_s is None

    @property
    def events(self) -> Iterator[Event]:
        """The events, in order."""
        return cast("Iterator[Event]", zip(*[iter(self.event_fields)] * _FIELDS, strict=True))

    @property
    def has_other_lines(self) -> bool:
        """Tell whether a thread in the background has entered or left a phase."""
        return any(line != MAIN for line in self.event_fields[2::_FIELDS])


class SpanRecorder:
    """A `trace.Recorder` that keeps events until the next `cut`.

    **Cost** of an event: one reading of the clock and an append, less than a microsecond. With a
    ``device`` clock, while it is timed, a moment of the device too.
    """

    def __init__(
        self,
        device: DeviceClock | None = None,
        clock: Callable[[], float] = time.perf_counter,
        casts_to_half: Callable[[], bool] = lambda: False,
        records_grads: Callable[[], bool] = lambda: True,
    ) -> None:
        self.in_half = False  # the model was called under autocast to float16
        self._casts_to_half, self._records_grads = casts_to_half, records_grads
        self.is_detailed = True
        self._main_s: dict[str, float] = defaultdict(float)  # without details: by phase
        self._stack: list[str] = []  # without details: the open phases
        self._at_s = 0.0
        self._forward = "forward"  # the phase of the forward pass under way
        self._host_clock = clock
        self._paused_s = self._paused_before_s = 0.0  # in all, and at the last cut
        self._stopped_s: float | None = None  # the begin of the present pause
        self._device = device
        self._event_fields: list[object] = []
        self._works: list[Work] = []
        self._begin_s = self._clock()
        self._num_tokens = 0
        self._waited_for: Waits = defaultdict(float)
        self._first: DeviceMoment | None = None
        # Called for phases that an error leaves.
        self.on_error: Callable[[BaseException, str, str], None] | None = None
        self.on_saved: Callable[[str, bool], None] | None = None
        # Called at each event of MAIN in steps with details; and with the model's inputs.
        self.on_main: Callable[[str, str], None] | None = None
        self.on_norm: Callable[[Tensor, float], None] | None = None
        self.on_inputs: Callable[[object, Mapping[str, object]], None] | None = None

    def _clock(self) -> float:
        now_s = self._host_clock() if self._stopped_s is None else self._stopped_s
        return now_s - self._paused_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude events and time inside; this step has no times of the device."""
        was_stopped_s, now_s = self._stopped_s, self._host_clock()
        self._stopped_s = now_s if was_stopped_s is None else was_stopped_s
        self._first = None
        try:
            yield
        finally:
            if was_stopped_s is None:
                self._paused_s += self._host_clock() - self._stopped_s
            self._stopped_s = was_stopped_s

    @property
    def is_paused(self) -> bool:
        """Tell whether events are excluded at present."""
        return self._stopped_s is not None

    def enter(self, line: str, phase: str, unit: str) -> None:
        """Note that a phase begins."""
        if phase == "forward":
            phase = self._forward
        if self.is_detailed or line != MAIN:
            self._note(True, line, phase, unit)
        elif self._stopped_s is None:
            self._add_seconds()
            self._stack.append(phase)

    def leave(self, line: str, phase: str, unit: str) -> None:
        """Note that a phase ends."""
        if self.on_error is not None and (error := sys.exc_info()[1]) is not None:
            self.on_error(error, phase, unit)
        if phase == "forward":
            phase = self._forward
        if self.is_detailed or line != MAIN:
            self._note(False, line, phase, unit)
        elif self._stopped_s is None and not (unit and phase in _PASSES):
            self._add_seconds()
            if phase in self._stack:
                del self._stack[len(self._stack) - 1 - self._stack[::-1].index(phase)]

    def _add_seconds(self) -> None:
        """Add the time since the last event to the innermost phase."""
        now_s = self._host_clock() - self._paused_s
        self._main_s[self._stack[-1] if self._stack else OUTSIDE] += now_s - self._at_s
        self._at_s = now_s

    def _note(self, enters: bool, line: str, phase: str, unit: str) -> None:
        if line != MAIN:  # other threads continue during a pause
            self._event_fields.extend((self._clock(), enters, line, phase, unit, None))
        elif self._stopped_s is None:
            at_s = self._host_clock() - self._paused_s
            moment = None if self._first is None else self._now()
            self._event_fields.extend((at_s, enters, line, phase, unit, moment))
            if self.on_main is not None:
                self.on_main(phase if enters else f"{phase}_end", unit)

    def _now(self) -> DeviceMoment | None:
        return None if self._device is None or self._first is None else self._device.now()

    @property
    def has_begun(self) -> bool:
        """Tell whether a forward pass has begun since the last cut."""
        if not self.is_detailed:
            return "forward" in self._main_s or "forward" in self._stack
        return "forward" in self._event_fields[3::_FIELDS]

    def current_phase(self) -> tuple[str, str | None]:
        """Return the phase and the unit that the main line is in; None if the unit is unknown."""
        if not self.is_detailed:
            return (self._stack[-1] if self._stack else OUTSIDE), None
        last = spans_of(Recorded(0.0, math.inf, self._event_fields, (), 0), {})[-1]
        return last.phase, last.unit

    def begin(
        self, line: str, unit: str, num_bytes: int, works: Sequence[TorchWork] | None
    ) -> Callable[[], None]:
        """Note that a collective or a copy begins; call the result when it has ended."""
        is_paused, begin_s = self._stopped_s is not None, self._clock()
        began = None if works is None or self._first is None else self._now()
        ended = None
        if began is not None and works and self._device is not None:
            ended = self._device.when_over(works)

        def over() -> None:
            if not is_paused:
                last = self._now() if began is not None and not works else ended
                done = Work(begin_s, self._clock(), line, unit, num_bytes, began, last)
                self._works.append(done)

        return over

    def wait_for(self, group: ProcessGroup | None, peer: int, seconds: float) -> None:
        """Add to the time for which another rank was waited for."""
        self._waited_for[group, peer] += seconds

    def see_inputs(self, args: object, kwargs: Mapping[str, object]) -> None:
        """Count the tokens of the model's inputs, of passes that record gradients."""
        if not self.is_paused:
            self._forward = "forward" if self._records_grads() else EVALUATION
            if self._forward == EVALUATION:
                return
            self._num_tokens += num_tokens(args, kwargs)
            self.in_half = self.in_half or self._casts_to_half()
            if self.on_inputs is not None:
                self.on_inputs(args, kwargs)

    def see_norm(self, norm: Tensor, max_norm: float) -> None:
        """Pass on the norm of gradients before they are clipped."""
        if self.on_norm is not None:
            self.on_norm(norm, max_norm)

    def saved(self, path: str, is_finite: bool) -> None:
        """Pass on the event that a checkpoint is on disk."""
        if self.on_saved is not None:
            self.on_saved(path, is_finite)

    def cut(self, times_device: bool = False, is_detailed: bool = True) -> Recorded:
        """Return the events since the last cut.

        ``times_device`` and ``is_detailed`` are about those until the next one.
        """
        end_s, last, main_s = self._clock(), self._now(), None
        if not self.is_detailed:
            main_s = self._main_s
            main_s[self._stack[-1] if self._stack else OUTSIDE] += end_s - self._at_s
            self._main_s, self._stack = defaultdict(float), []
        what = self._event_fields, self._works, self._num_tokens, self._waited_for
        paused_s = self._paused_s - self._paused_before_s
        found = Recorded(self._begin_s, end_s, *what, self._first, last, main_s, paused_s)
        self._event_fields, self._works = [], []
        self._num_tokens, self._waited_for = 0, defaultdict(float)
        self._begin_s = self._at_s = end_s
        self._paused_before_s, self.is_detailed = self._paused_s, is_detailed
        timed = times_device and self._device is not None
        self._first = self._device.now() if timed and self._device is not None else None
        return found


def num_tokens(args: object, kwargs: Mapping[str, object]) -> int:
    """Return the elements of ``input_ids``, or of the first tensor of integers, else 0.

    Its dims are the batch and the sequence. Integers of one dim are labels of something else,
    booleans are masks. A batch may be a mapping, a list or a tuple.
    """
    for value in _values_in((kwargs.get("input_ids"), args, kwargs)):
        if hasattr(value, "is_floating_point"):
            tensor = cast("Tensor", value)
            is_mask = str(tensor.dtype) == "torch.bool"
            are_numbers = is_mask or tensor.is_floating_point() or tensor.is_complex()
            if tensor.ndim >= 2 and not are_numbers:
                return tensor.numel()
    return 0


def _values_in(given: object, depth: int = 3) -> Iterator[object]:
    """Yield the values of a model's inputs, also inside of batches, ``input_ids`` first."""
    if isinstance(given, Mapping):
        given = (given.get("input_ids"), *given.values())
    if depth and isinstance(given, list | tuple):
        for value in given[:_MOST_VALUES]:
            yield from _values_in(value, depth - 1)
    else:
        yield given


def spans_of(
    recorded: Recorded, left_open: dict[str, list[tuple[str, str]]], timed: Sequence[Span] = ()
) -> list[Span]:
    """Return the spans between two cuts, by the host's clock, the main line without gaps.

    ``left_open`` are the phases of background lines that continue over cuts; it is updated. A phase
    that is open on the main line at a cut was cut short. Lines of ``timed`` spans are left out.
    """
    by_line: dict[str, list[Event]] = {line: [] for line in (MAIN, *left_open)}
    for event in recorded.events:
        by_line.setdefault(event[2], []).append(event)
    found: list[Span] = []
    for line, events in by_line.items():
        stack = left_open.pop(line, [])
        times = [event[0] - recorded.begin_s for event in events]
        found += _innermost_spans(line, events, times, stack, recorded.seconds)
        if stack and line != MAIN:
            left_open[line] = stack
    found += _sequential_spans(
        (w, w.begin_s - recorded.begin_s, w.end_s - recorded.begin_s) for w in recorded.works
    )
    timed_lines = {span.line for span in timed}
    return [span for span in found if span.line not in timed_lines]


def device_spans_of(recorded: Recorded) -> list[Span]:
    """Return the spans of the device's own streams.

    The line "device" is the stream that computes, in the phases that enqueued on it. Empty if
    the device was not timed.
    """
    first, last = recorded.first, recorded.last
    if first is None or last is None:
        return []
    events = [event for event in recorded.events if event[2] == MAIN and event[5] is not None]
    times = [moment.seconds_since(first) for *_, moment in events if moment is not None]
    found = _innermost_spans("device", events, times, [], last.seconds_since(first))
    return found + _sequential_spans(
        (w, w.began.seconds_since(first), w.ended.seconds_since(first))
        for w in recorded.works
        if w.began is not None and w.ended is not None
    )


def _innermost_spans(
    line: str,
    events: Sequence[Event],
    times: Sequence[float],
    stack: list[tuple[str, str]],
    end_s: float,
) -> list[Span]:
    """Return the innermost phase at each moment; ``stack`` has the open ones, and is updated."""
    found: list[Span] = []
    at_s, has_gaps = 0.0, line not in (MAIN, "device")

    def close(until_s: float) -> None:
        if until_s > at_s and (stack or not has_gaps):
            phase, unit = stack[-1] if stack else (OUTSIDE, "")
            found.append(Span(line, phase, unit, at_s, until_s))

    for (_, enters, _, phase, unit, _), when_s in zip(events, times, strict=True):
        close(when_s)
        at_s = max(at_s, when_s)
        if enters:
            stack.append((phase, unit))
        elif (phase, unit) in stack:  # those of backward may end in another order
            del stack[len(stack) - 1 - stack[::-1].index((phase, unit))]
    close(end_s)
    return found


def _sequential_spans(works: Iterable[tuple[Work, float, float]]) -> list[Span]:
    """Return collectives as spans, those of one line one after the other."""
    free: dict[str, float] = defaultdict(float)
    found = []
    for work, start_s, end_s in sorted(works, key=lambda each: each[1]):
        start_s = max(start_s, free[work.line])
        end_s = max(end_s, start_s)
        free[work.line] = end_s
        phase = work.line.rpartition(".")[2]
        found.append(Span(work.line, phase, work.unit, start_s, end_s, work.num_bytes))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that are in any of the intervals."""
    found_s, until_s = 0.0, -math.inf
    for begin_s, end_s in sorted(intervals):
        found_s += max(end_s - max(begin_s, until_s), 0.0)
        until_s = max(until_s, end_s)
    return found_s


def length_outside(intervals: Iterable[Interval], others: Iterable[Interval]) -> float:
    """Return the seconds that are in any of the intervals, and in none of the others."""
    both = [*intervals], [*others]
    return length([*both[0], *both[1]]) - length(both[1])
