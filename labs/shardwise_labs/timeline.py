"""A recorded step: when messages begin and are waited for, when units compute; as text and SVG.

The recorder wraps `gather`, `end_forward` and `reduce` of the trainer's units, and the functions of
`torch.distributed` that return work.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist


@dataclass(frozen=True)
class Event:
    """One moment of a step: "begin" or "end" of compute, "launch" or "wait" of a message."""

    kind: str
    name: str  # of a message "g2" or "r0", of compute "c2"
    at: float
    until: float = 0.0  # of a wait: when it returned


class Trainer(Protocol):
    """What the recorder reads of a trainer."""

    @property
    def units(self) -> Sequence[Any]:
        """The units in the order of forward."""


class _Work:
    """Work of torch.distributed, whose waits are recorded."""

    def __init__(self, work: Any, name: str, events: list[Event]) -> None:
        self._work, self._name, self._events = work, name, events

    def wait(self, *args: Any) -> Any:
        """Wait, and record when that began and ended."""
        begin = time.perf_counter()
        found = self._work.wait(*args)
        self._events.append(Event("wait", self._name, begin, time.perf_counter()))
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class Timeline:
    """The events of one step on this rank, and how many units were full at once."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.full_at_once = 0
        self.reductions_at_once = 0
        self._open = ""

    @contextmanager
    def recording(self, trainer: Trainer) -> Iterator[None]:
        """Record what happens inside."""
        before = dist.all_gather, dist.reduce_scatter
        shards = {unit.shard.data_ptr(): index for index, unit in enumerate(trainer.units)}

        def gather_name(_out: Any, shard: Any, *_: Any, **__: Any) -> str:
            return f"g{shards.get(shard.data_ptr(), '?')}"

        def reduce_name(*_: Any, **__: Any) -> str:
            return f"r{sum(e.kind == 'launch' and e.name[0] == 'r' for e in self.events)}"

        dist.all_gather = self._launched(before[0], gather_name, trainer)
        dist.reduce_scatter = self._launched(before[1], reduce_name, trainer)
        for index, unit in enumerate(trainer.units):
            unit.gather = functools.partial(self._gather, type(unit).gather, unit, index)
            for name in ("end_forward", "reduce"):
                method = getattr(type(unit), name)
                setattr(unit, name, functools.partial(self._ended, method, unit))
        try:
            yield
        finally:
            self._end()
            dist.all_gather, dist.reduce_scatter = before
            for unit in trainer.units:
                for name in ("gather", "end_forward", "reduce"):
                    vars(unit).pop(name, None)

    def names(self, kind: str) -> list[str]:
        """Return the names of the events of a kind, in order."""
        return [event.name for event in self.events if event.kind == kind]

    def order(self, count: int) -> str:
        """Return the first events as words: a launch g1, its wait w1, then compute c1."""
        found = [
            f"w{event.name[1:]}" if event.kind == "wait" else event.name
            for event in self.events
            if event.kind != "end" and event.name[0] != "r"
        ]
        return " ".join(found[:count])

    def hidden(self, letter: str = "g") -> int:
        """Return how many messages had a unit compute between their launch and their wait."""
        count, has_computed = 0, dict[str, bool]()
        for event in self.events:
            if event.kind == "begin":
                has_computed = dict.fromkeys(has_computed, True)
            elif event.kind == "launch" and event.name[0] == letter:
                has_computed[event.name] = False
            elif event.kind == "wait":
                count += has_computed.pop(event.name, False)
        return count

    def _note(self, kind: str, name: str) -> None:
        self.events.append(Event(kind, name, time.perf_counter()))

    def _end(self) -> None:
        if self._open:
            self._note("end", self._open)
        self._open = ""

    def _gather(self, gather: Callable[..., None], unit: Any, index: int) -> None:
        self._end()
        gather(unit)
        self._open = f"c{index}"
        self._note("begin", self._open)

    def _ended(self, method: Callable[..., None], unit: Any, *args: Any) -> None:
        self._end()
        method(unit, *args)

    def _launched(
        self, function: Callable[..., Any], name_of: Callable[..., str], trainer: Trainer
    ) -> Callable[..., Any]:
        def launched(*args: Any, **kwargs: Any) -> Any:
            name = name_of(*args, **kwargs)
            self._note("launch", name)
            full = [u for u in trainer.units if u.values.untyped_storage().nbytes()]
            self.full_at_once = max(self.full_at_once, len(full))
            begun, ended = ([n for n in self.names(k) if n[0] == "r"] for k in ("launch", "wait"))
            self.reductions_at_once = max(self.reductions_at_once, len(begun) - len(ended))
            work = function(*args, **kwargs)
            if work is None:  # it has waited
                self._note("wait", name)
                return None
            return _Work(work, name, self.events)

        return launched


def draw(timelines: dict[str, Timeline], path: Path) -> None:
    """Write timelines below each other as SVG: events in their order, equally far apart.

    In time nearly all of a step is messages, and compute would not be visible.
    """
    moments = {
        title: sorted(
            {at for event in timeline.events for at in (event.at, event.until or event.at)}
        )
        for title, timeline in timelines.items()
    }
    apart, parts, top = 900 / max(map(len, moments.values())), list[str](), 10
    colours = {"c": "#4477aa", "g": "#ddaa33", "r": "#bb5566"}
    lanes = {"c": ("compute", 0), "g": ("gathers", 1), "r": ("reductions", 2)}
    for title, timeline in timelines.items():
        place = {at: 90 + apart * index for index, at in enumerate(moments[title])}
        parts.append(f'<text x="4" y="{top + 14}" font-weight="bold">{title}</text>')
        for letter, (label, lane) in lanes.items():
            parts.append(f'<text x="4" y="{top + 36 + 24 * lane}">{label}</text>')
            for name, begin, end in _spans(timeline, letter):
                x, y, width = place[begin], top + 22 + 24 * lane, place[end] - place[begin]
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" stroke="white" '
                    f'fill="{colours[letter]}" fill-opacity="0.7"><title>{name}: '
                    f"{1e6 * (end - begin):.0f} microseconds</title></rect>"
                    f'<text x="{x + 1:.1f}" y="{y + 12}" font-size="9">{name}</text>'
                )
        top += 110
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 {top}" font-size="13" '
        f'font-family="sans-serif">{"".join(parts)}</svg>\n'
    )


def _spans(timeline: Timeline, letter: str) -> Iterator[tuple[str, float, float]]:
    """Return the spans of compute, or of messages from launch until their wait has returned."""
    begun: dict[str, float] = {}
    for event in timeline.events:
        if event.name[0] == letter and event.kind in ("begin", "launch"):
            begun[event.name] = event.at
        elif event.name[0] == letter and event.name in begun:
            yield event.name, begun.pop(event.name), event.until or event.at
