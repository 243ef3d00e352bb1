"""Progress of long work, in bytes or steps: a bar on a terminal, else lines on stderr."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
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
    """Write the progress of a long job: a line every 30 s, and one at the end.

    A line is written by the first advance after its time. The last one is written if there was a
    line before, or with ``ends_always``. ``text`` takes (done, total, seconds so far) and returns
    the line up to the time left. If not ``shown``, nothing is written: on every rank but 0, and if
    a terminal shows a bar. ``first`` was done before this process began and does not count in the
    rate; ``clock`` gives seconds from any origin.
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
        """Note the amount done, and the total if it is known; write a line if one is due."""
        self._done, self._total = done, total
        if self._shown and (now_s := self._clock()) - self._told_s >= INTERVAL_S:
            self._told_s, self._ends = now_s, True
            self._write(self._time_left(now_s - self._started_s))

    def add(self, amount: float, total: float | None) -> None:
        """Add to the amount done; see `advance`."""
        self.advance(self._done + amount, total)

    def end(self) -> None:
        """Write the amount done and the time it took."""
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
        except (OSError, ValueError, AttributeError):  # stderr is closed or missing
            self._shown = False


@contextmanager
def _bar(
    text: Said,
    clock: Clock,
    *columns: ProgressColumn,
    shown: bool = True,
    first: int = 0,
    ends_always: bool = False,
    description: str,
    total: float | None,
    status: str = "",
) -> Iterator[tuple[Progress, TaskID, ProgressLines]]:
    """Show a bar if stderr is a terminal, else `ProgressLines`; yield bar, task and lines."""
    console = terminal.EscapingConsole(stderr=True)
    shows_lines = shown and not console.is_terminal
    lines = ProgressLines(
        text, shown=shows_lines, first=first, ends_always=ends_always, clock=clock
    )
    hidden = not (shown and console.is_terminal)
    try:
        with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
            task = progress.add_task(description, total=total, completed=first, status=status)
            yield progress, task, lines
    finally:
        lines.end()


class _Bytes(ProgressColumn):
    """A column of bytes done, their total and rate."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
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
    """Show bytes, bytes per second and the time left; yield a function that adds bytes."""

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
    """Show the steps done of a long job; yield a function of (done, total)."""

    def text(done: float, total: float | None, elapsed_s: float) -> str:
        return f"{label}: {done:,.0f} of {total:,.0f}"

    def advance(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        lines.advance(done, total)

    steps = TextColumn("{task.completed:.0f} of {task.total:.0f}")
    columns = TextColumn(label, markup=False), BarColumn(None), steps, TimeRemainingColumn()
    with _bar(text, clock, *columns, description=label, total=1) as (progress, task, lines):
        yield advance


class Advance(Protocol):
    """The function that `run_bar` yields."""

    def __call__(self, *status: str) -> None:
        """Count one step and show short texts beside the bar."""


@contextmanager
def run_bar(
    num_steps: int, shown: bool, num_done: int = 0, clock: Clock = time.monotonic
) -> Iterator[Advance]:
    """Show steps, loss, speed and bytes of a run; yield the function to call after each step.

    Lines have the step, the first two texts and the time left; one ends the run, also after an
    error.
    """
    now = ""

    def advance(*status: str) -> None:
        nonlocal now
        now = ", ".join(status[:2])
        progress.update(task, advance=1, status="  ".join(status))
        lines.add(1, num_steps)

    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(None)
    with _bar(
        lambda done, total, elapsed_s: f"step {done:,.0f} of {total:,.0f}: {now}",
        clock,
        *(*columns, TextColumn("{task.fields[status]}"), TimeRemainingColumn()),
        shown=shown,
        first=num_done,
        ends_always=True,
        description="step",
        total=num_steps,
    ) as (progress, task, lines):
        yield advance


@contextmanager
def share_bar(shown: bool, clock: Clock = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """Show the present part of a job and the share done; yield a function of (label, share)."""
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
