"""What a run tells: one JSON line per step; a bar on a terminal, lines on stderr without one."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from shardwise.progress import Clock, ProgressLines


class MetricsFile:
    """Append JSON lines to a file; keys name their unit, and each line is flushed.

    A file of path None (every rank but 0) takes lines and keeps none. What is not a finite number
    is written as null, since JSON has no word for it. Of a file that is there, lines up to
    `last_step` stay.
    """

    def __init__(self, path: Path | None, last_step: int = 0) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _cut(path, last_step)
        self._file = path.open("a", encoding="utf-8") if path is not None else None

    def write(self, **values: Any) -> None:
        """Append one line."""
        if self._file is not None:
            finite = {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in values.items()
            }
            self._file.write(json.dumps(finite))
            self._file.write("\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def _cut(path: Path, last_step: int) -> None:
    """Drop the lines of later steps, and one that a kill cut short; the file changes at once."""
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    cut_path = path.with_name(f"{path.name}.cut")
    with cut_path.open("w", encoding="utf-8") as file:
        file.writelines(line for line in lines if 0 < _step_of(line) <= last_step)
        file.flush()
        os.fsync(file.fileno())
    cut_path.replace(path)


def _step_of(line: str) -> int:
    try:
        return int(json.loads(line)["step"]) if line.endswith("\n") else 0
    except (ValueError, TypeError, KeyError):
        return 0


class ProgressBar:
    """Show steps, loss, speed and bytes while a run goes on.

    Where stdout is no terminal, a line on stderr every 30 s has steps, loss, speed and the time
    left, and one at the end, however it came.
    """

    def __init__(
        self, num_steps: int, shown: bool, num_done: int = 0, clock: Clock = time.monotonic
    ) -> None:
        console = Console()
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
