"""How far long work is, in bytes or steps: a bar on a terminal, lines on stderr without one."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwise import terminal
from shardwise.quantities import format_bytes, format_duration

INTERVAL_S = 30.0
Clock = Callable[[], float]
Said = Callable[[float, float | None, float], str]  # of (done, total, seconds so far)


class ProgressLines:
    """Say how far a long job is: a line every 30 s, and one at the end.

    A line comes with the first advance after its time, so work that stands still is silent. The
    last one comes if there was a line before, or with ``ends_always``. ``text`` takes (done, total,
    seconds so far) and returns the line up to the time left. Not ``shown`` says nothing: on every
    rank but 0, and where a terminal shows a bar. ``first`` was done before this process began and
    does not count in the rate; ``clock`` gives seconds from any origin.
    """

    def __init__(
        self,
        text: Said,
        *,
        shown: bool = True,
        first: float = 0.0,
        ends_always: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        self._text, self._shown, self._clock = text, shown, clock
        self._first, self._done = first, first
        self._total: float | None = None
        self._ends = ends_always
        self._started_s = self._told_s = clock() if shown else 0.0

    def advance(self, done: float, total: float | None) -> None:
        """Note what is done, of how much if that is known; say it if it is time to."""
        self._done, self._total = done, total
        if self._shown and (now_s := self._clock()) - self._told_s >= INTERVAL_S:
            self._told_s, self._ends = now_s, True
            self._write(self._time_left(now_s - self._started_s))

    def add(self, amount: float, total: float | None) -> None:
        """Note that so much more is done; see `advance`."""
        self.advance(self._done + amount, total)

    def end(self) -> None:
        """Say what was done in all, and how long it took."""
        if self._shown and self._ends and self._done > self._first:
            self._write(f", took {format_duration(self._clock() - self._started_s)}")

    def _time_left(self, elapsed_s: float) -> str:
        done, total = self._done - self._first, self._total
        if total is None or done <= 0:
            return ""
        left_s = elapsed_s * max(0.0, total - self._done) / done
        return f", {format_duration(left_s)} left"

    def _write(self, ending: str) -> None:
        line = self._text(self._done, self._total, self._clock() - self._started_s)
        try:
            terminal.complain(f"{line}{ending}\n")
        except (OSError, ValueError, AttributeError):  # closed, or none: nobody reads it
            self._shown = False


@contextmanager
def _bar(
    text: Said, clock: Clock, *columns: ProgressColumn, shown: bool = True, **task: Any
) -> Iterator[tuple[Progress, TaskID, ProgressLines]]:
    """Show a bar on stderr where that is a terminal, else lines of ``text``; yield what tells them.

    ``task`` is what rich asks for.
    """
    console = terminal.EscapingConsole(stderr=True)
    lines = ProgressLines(text, shown=shown and not console.is_terminal, clock=clock)
    hidden = not (shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield progress, progress.add_task(**task), lines
    lines.end()


class _Bytes(ProgressColumn):
    """Bytes done, of how many, and how many per second."""

    def render(self, task: Task) -> Text:
        """Write them as everywhere else."""
        total = f" of {format_bytes(task.total)}" if task.total is not None else ""
        speed = f", {format_bytes(task.speed)}/s" if task.speed else ""
        return Text(f"{format_bytes(task.completed)}{total}{speed}")


@contextmanager
def byte_bar(
    label: str,
    total_bytes: int | None,
    clock: Clock = time.monotonic,
    shown: bool = True,
) -> Iterator[Callable[[int], None]]:
    """Show bytes, bytes per second and the time left; yield what takes the bytes of each piece."""

    def text(done: float, total: float | None, elapsed_s: float) -> str:
        whole = f" of {format_bytes(total)}" if total is not None else ""
        speed = f", {format_bytes(done / elapsed_s)}/s" if elapsed_s > 0 else ""
        return f"{label}: {format_bytes(done)}{whole}{speed}"

    def advance(num_bytes: int) -> None:
        progress.advance(task, num_bytes)
        lines.add(num_bytes, total_bytes)

    columns = TextColumn(label, markup=False), BarColumn(None), _Bytes(), TimeRemainingColumn()
    with _bar(text, clock, *columns, shown=shown, description=label, total=total_bytes) as told:
        progress, task, lines = told
        yield advance


@contextmanager
def step_bar(label: str, clock: Clock = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """Show how many steps of a long job are done; yield what takes (done, in all)."""

    def text(done: float, total: float | None, elapsed_s: float) -> str:
        return f"{label}: {done:,.0f} of {total:,.0f}"

    def advance(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        lines.advance(done, total)

    steps = TextColumn("{task.completed:.0f} of {task.total:.0f}")
    columns = TextColumn(label, markup=False), BarColumn(None), steps, TimeRemainingColumn()
    with _bar(text, clock, *columns, description=label, total=1) as (progress, task, lines):
        yield advance


@contextmanager
def share_bar(shown: bool, clock: Clock = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """Show what is at work, and which share is done; yield what takes (label, share)."""
    now = "measure"

    def advance(label: str, share: float) -> None:
        nonlocal now
        now = label
        progress.update(task, description=label, completed=share)
        lines.advance(share, 1.0)

    title = TextColumn("{task.description}", markup=False)
    columns = title, BarColumn(None), TimeElapsedColumn()
    with _bar(
        lambda done, total, elapsed_s: f"{now}: {done:.0%}",
        clock,
        *columns,
        shown=shown,
        description=now,
        total=1.0,
    ) as (progress, task, lines):
        yield advance
