"""How far long work is: lines on stderr, or a bar where there is a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardwise.quantities import format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, TaskID

INTERVAL_S = 30.0
Clock = Callable[[], float]
Text = Callable[[float, float | None, float], str]  # of (done, total, seconds so far)


class ProgressLines:
    """Say how far a long job is: a line every 30 s, and one at the end.

    A line comes with the first advance after its time, so work that stands still is silent. The
    last one comes if there was a line before, or with ``ends_always``.

    Args:
        text: takes (done, total, seconds so far) and returns the line up to the time left.
        shown: False says nothing; on every rank but 0, and where a terminal shows a bar.
        first: what was done before this process began; it does not count in the rate.
        clock: seconds, from any origin.
    """

    def __init__(
        self,
        text: Text,
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
            sys.stderr.write(f"{line}{ending}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # closed, or none: nobody reads it
            self._shown = False


@contextmanager
def bar(
    text: Text,
    clock: Clock,
    *columns: ProgressColumn,
    console: Console | None = None,
    shown: bool = True,
    **task: Any,
) -> Iterator[tuple[Progress, TaskID, ProgressLines]]:
    """Show a bar where there is a terminal, else lines of ``text``; yield what tells them.

    The bar is on stderr, or on ``console``; ``task`` is what rich asks for.
    """
    from rich import console as consoles
    from rich import progress as bars

    console = console or consoles.Console(stderr=True)
    lines = ProgressLines(text, shown=shown and not console.is_terminal, clock=clock)
    hidden = not (shown and console.is_terminal)
    with bars.Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield progress, progress.add_task(**task), lines
    lines.end()
