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
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwise import terminal
from shardwise.quantities import format_bytes, format_duration

INTERVAL_S = 30.0
Clock = Callable[[], float]


@contextmanager
def _work(
    line: Callable[[float, float | None, float], str],
    *columns: ProgressColumn,
    total: float | None,
    clock: Clock,
    shown: bool = True,
    first: int = 0,
    ends_always: bool = False,
) -> Iterator[Callable[..., None]]:
    """Show a long job: a bar if stderr is a terminal, else a line every 30 s and one at the end.

    Yield a function of the amount done, the total if it has changed, and a label of the bar. A line
    is written by the first call after its time; the last one if there was a line before, or with
    ``ends_always``. ``line`` takes (done, total, seconds so far) and returns the line up to the
    time left. If not ``shown``, as on every rank but 0, there is neither. ``first`` was done before
    this process began and does not count in the rate.
    """
    console = terminal.EscapingConsole(stderr=True)
    writes, done = shown and not console.is_terminal, float(first)
    started_s = written_s = clock()

    def write(ending: str) -> None:
        nonlocal writes
        try:
            terminal.complain(f"{line(done, total, clock() - started_s)}{ending}\n")
        except (OSError, ValueError, AttributeError):  # stderr is closed or missing
            writes = False

    def update(now: float, of: float | None = None, label: str = "") -> None:
        nonlocal done, total, written_s, ends_always
        done, total = now, total if of is None else of
        bar.update(task, completed=done, total=total, description=label)
        if writes and (at_s := clock()) - written_s >= INTERVAL_S:
            written_s, ends_always, left = at_s, True, ""
            if total is not None and done > first:
                left_s = (at_s - started_s) * max(0.0, total - done) / (done - first)
                left = f", {format_duration(left_s)} left"
            write(left)

    hidden = not (shown and console.is_terminal)
    try:
        with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
            task = bar.add_task("", total=total, completed=first)
            yield update
    finally:
        if writes and ends_always and done > first:
            write(f", took {format_duration(clock() - started_s)}")


class _Bytes(ProgressColumn):
    """A column of bytes done, their total and rate."""

    def render(self, task: Task) -> Text:
        """Return the column's text."""
        return Text(_describe_bytes(task.completed, task.total, task.speed))


def _describe_bytes(done: float, total: float | None, rate: float | None) -> str:
    whole = f" of {format_bytes(total)}" if total is not None else ""
    return f"{format_bytes(done)}{whole}" + (f", {format_bytes(rate)}/s" if rate else "")


@contextmanager
def byte_bar(
    label: str, total_bytes: int | None, clock: Clock = time.monotonic, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show bytes, bytes per second and the time left; yield a function that adds bytes."""
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        update(done)

    columns = TextColumn(label, markup=False), BarColumn(None), _Bytes(), TimeRemainingColumn()
    with _work(
        lambda done, total, s: f"{label}: {_describe_bytes(done, total, done / s if s else None)}",
        *columns,
        total=total_bytes,
        clock=clock,
        shown=shown,
    ) as update:
        yield advance


@contextmanager
def step_bar(label: str, clock: Clock = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """Show the steps done of a long job; yield a function of (done, total)."""
    steps = TextColumn("{task.completed:.0f} of {task.total:.0f}")
    columns = TextColumn(label, markup=False), BarColumn(None), steps, TimeRemainingColumn()
    text = f"{label}: {{:,.0f}} of {{:,.0f}}".format
    with _work(text, *columns, total=1, clock=clock) as update:
        yield update


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
    done, status_text = num_done, ""

    def advance(*status: str) -> None:
        nonlocal done, status_text
        done, status_text = done + 1, ", ".join(status[:2])
        update(done, label="  ".join(status))

    with _work(
        lambda done, total, _: f"step {done:,.0f} of {total:,.0f}: {status_text}",
        *(TextColumn("step"), MofNCompleteColumn(), BarColumn(None)),
        *(TextColumn("{task.description}"), TimeRemainingColumn()),
        total=num_steps,
        clock=clock,
        shown=shown,
        first=num_done,
        ends_always=True,
    ) as update:
        yield advance


@contextmanager
def share_bar(shown: bool, clock: Clock = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """Show the present part of a job and the share done; yield a function of (label, share)."""
    part = "measure"

    def advance(label: str, share: float) -> None:
        nonlocal part
        part = label
        update(share, label=label)

    columns = TextColumn("{task.description}", markup=False), BarColumn(None), TimeElapsedColumn()
    text = lambda done, *_: f"{part}: {done:.0%}"  # noqa: E731
    with _work(text, *columns, total=1.0, clock=clock, shown=shown) as update:
        yield advance
