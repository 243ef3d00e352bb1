"""Bars on stderr for what takes long, of bytes or of steps; lines where there is no terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwise.progress import Clock, bar
from shardwise.quantities import format_bytes


class _Bytes(ProgressColumn):
    """Bytes done, of how many, and how many per second."""

    def render(self, task: Task) -> Text:
        """Write them as everywhere else."""
        total = f" of {format_bytes(task.total)}" if task.total is not None else ""
        speed = f", {format_bytes(task.speed)}/s" if task.speed else ""
        return Text(f"{format_bytes(task.completed)}{total}{speed}")


@contextmanager
def byte_bar(
    label: str, total_bytes: int | None, clock: Clock = time.monotonic
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
    with bar(text, clock, *columns, description=label, total=total_bytes) as told:
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
    with bar(text, clock, *columns, description=label, total=1) as (progress, task, lines):
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
    with bar(
        lambda done, total, elapsed_s: f"{now}: {done:.0%}",
        clock,
        *columns,
        shown=shown,
        description=now,
        total=1.0,
    ) as (progress, task, lines):
        yield advance
