"""What a run tells: one JSON line per step, and a progress bar on a terminal."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

__all__ = ["MetricsFile", "ProgressBar", "show_load"]


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
            self._file.write(json.dumps({key: _finite(value) for key, value in values.items()}))
            self._file.write("\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressBar:
    """Show steps, loss, speed and bytes while a run goes on; silent where there is no terminal."""

    def __init__(self, num_steps: int, shown: bool, num_done: int = 0) -> None:
        console = Console()
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

    def advance(self, status: str) -> None:
        """Count one step and show a short text beside the bar."""
        self._progress.update(self._task, advance=1, status=status)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


@contextmanager
def show_load(shown: bool) -> Iterator[Callable[[int], None]]:
    """Show bytes while a checkpoint is read; the context is called with each part's bytes."""
    console = Console()
    progress = Progress(
        TextColumn("load"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        console=console,
        disable=not (shown and console.is_terminal),
        transient=True,
    )
    with progress:
        task = progress.add_task("load", total=None)
        yield lambda num_bytes: progress.advance(task, num_bytes)
