"""What a run tells: one JSON line per step, and a progress bar on a terminal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["MetricsFile", "ProgressBar"]


class MetricsFile:
    """Append JSON lines to a file; keys name their unit, and each line is flushed.

    A file of path None (every rank but 0) takes lines and keeps none. What is not a finite number
    is written as null, since JSON has no word for it.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8") if path is not None else None

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


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressBar:
    """Show steps, loss, speed and bytes while a run goes on; silent where there is no terminal."""

    def __init__(self, num_steps: int, shown: bool) -> None:
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
        self._task = self._progress.add_task("step", total=num_steps, status="")

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
