"""Bars on stderr for what takes long, of bytes or of steps; lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from shardwise.progress import ProgressLines
from shardwise.quantities import format_bytes


class _Bytes(ProgressColumn):
    """Bytes done, of how many, and how many per second."""

    def render(self, task: Task) -> Text:
        """Write them as everywhere else."""
        total = f" of {format_bytes(task.total)}" if task.total is not None else ""
        speed = f", {format_bytes(task.speed)}/s" if task.speed else ""
        return Text(f"{format_bytes(task.completed)}{total}{speed}")


Clock = Callable[[], float]


@contextmanager
def byte_bar(
    label: str, total_bytes: int | None, clock: Clock = time.monotonic
) -> Iterator[Callable[[int], None]]:
    """Show bytes, bytes per second and the time left; yield what takes the bytes of each piece."""
    console = Console(stderr=True)

    def text(done: float, total: float | None, elapsed_s: float) -> str:
        whole = f" of {format_bytes(total)}" if total is not None else ""
        speed = f", {format_bytes(done / elapsed_s)}/s" if elapsed_s > 0 else ""
        return f"{label}: {format_bytes(done)}{whole}{speed}"

    lines = ProgressLines(text, shown=not console.is_terminal, clock=clock)

    def advance(num_bytes: int) -> None:
        progress.advance(task, num_bytes)
        lines.add(num_bytes, total_bytes)

    with Progress(
        TextColumn(label, markup=False),
        BarColumn(bar_width=None),
        _Bytes(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=total_bytes)
        yield advance
    lines.end()


@contextmanager
def step_bar(label: str, clock: Clock = time.monotonic) -> Iterator[Callable[[int, int], None]]:
    """Show how many steps of a long job are done; yield what takes (done, in all)."""
    console = Console(stderr=True)

    def text(done: float, total: float | None, elapsed_s: float) -> str:
        return f"{label}: {done:,.0f} of {total:,.0f}"

    lines = ProgressLines(text, shown=not console.is_terminal, clock=clock)

    def advance(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        lines.advance(done, total)

    with Progress(
        TextColumn(label, markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:.0f} of {task.total:.0f}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=1)
        yield advance
    lines.end()


@contextmanager
def share_bar(shown: bool, clock: Clock = time.monotonic) -> Iterator[Callable[[str, float], None]]:
    """Show what is at work, and which share is done; yield what takes (label, share)."""
    console = Console(stderr=True)
    now = "measure"
    lines = ProgressLines(
        lambda done, total, elapsed_s: f"{now}: {done:.0%}",
        shown=shown and not console.is_terminal,
        clock=clock,
    )

    def advance(label: str, share: float) -> None:
        nonlocal now
        now = label
        bar.update(task, description=label, completed=share)
        lines.advance(share, 1.0)

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (shown and console.is_terminal),
    ) as bar:
        task = bar.add_task(now, total=1.0)
        yield advance
    lines.end()
