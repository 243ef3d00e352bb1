"""What a run tells while it goes on: a bar on a terminal, lines on stderr without one."""

import time
from typing import Self

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from shardwise.progress import Clock, ProgressLines
from shardwise.terminal import EscapingConsole


class ProgressBar:
    """Show steps, loss, speed and bytes while a run goes on.

    Where stdout is no terminal, a line on stderr every 30 s has steps, loss, speed and the time
    left, and one at the end, however it came.
    """

    def __init__(
        self, num_steps: int, shown: bool, num_done: int = 0, clock: Clock = time.monotonic
    ) -> None:
        console = EscapingConsole()
        self._num_steps, self._status = num_steps, ""
        self._lines = ProgressLines(
            lambda done, total, elapsed_s: f"step {done:,.0f} of {total:,.0f}: {self._status}",
            shown=shown and not console.is_terminal,
            first=num_done,
            ends_always=True,
            clock=clock,
        )
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._progress.add_task("step", total=num_steps, completed=num_done, status="")

    def advance(self, *status: str) -> None:
        """Count one step and show short texts beside the bar; the first two of them in lines."""
        self._progress.update(self._task, advance=1, status="  ".join(status))
        self._status = ", ".join(status[:2])
        self._lines.add(1, self._num_steps)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        self._lines.end()
