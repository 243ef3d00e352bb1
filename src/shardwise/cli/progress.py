"""Bars on stderr for what takes long, of bytes or of steps; silent where there is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from shardwise.quantities import format_bytes


class _Bytes(ProgressColumn):
    """Bytes done, of how many, and how many per second."""

    def render(self, task: Task) -> Text:
        """Write them as everywhere else."""
        total = f" of {format_bytes(task.total)}" if task.total is not None else ""
        speed = f", {format_bytes(task.speed)}/s" if task.speed else ""
        return Text(f"{format_bytes(task.completed)}{total}{speed}")


@contextmanager
def byte_bar(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show bytes, bytes per second and the time left; yield what takes the bytes of each piece."""
    console = Console(stderr=True)
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
        yield lambda num_bytes: progress.advance(task, num_bytes)


@contextmanager
def step_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show how many steps of a long job are done; yield what takes (done, in all)."""
    console = Console(stderr=True)
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
        yield lambda done, total: progress.update(task, completed=done, total=total)
