"""Interface of a listener to the collectives of this process; imports no torch.

A process waits in one call at a time, whichever model the call is for. So the listener and the time
limit of waits belong to the process, as its process groups do. `hangs` attaches a listener that
finds missing ranks. Without it collectives run the same, and errors contain less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from torch.distributed import Work

    from shardwise.comm.collective_key import CollectiveKey

IDLE_LIMIT_S = 300.0
_MIN_LIMIT_S = 4.0  # a few looks of the watch


class Listener:
    """Is called by threads that make collectives; this base class does nothing."""

    def start(self) -> None:
        """Begin work in the background, if it has not begun."""

    def begin(self, key: CollectiveKey) -> int:
        """Count a collective that begins; return its number among collectives with its key."""
        return 0

    def launch(self, key: CollectiveKey, number: int, works: Sequence[Work]) -> None:
        """Note a collective that runs on a device; its wait may block no thread."""

    def enter(self, key: CollectiveKey, number: int) -> None:
        """Note that this thread waits from now on."""

    def leave(self, is_over: bool) -> None:
        """Note that this thread's wait has ended; ``is_over``: without an error."""

    def find_cause(self, key: CollectiveKey, reason: str) -> str:
        """Return why a collective has failed; ``reason`` is the backend's."""
        return reason

    def report_failure(self, text: str) -> None:
        """Report to ranks that wait for this one, now or later, that it is about to raise."""


class ProcessWaits:
    """The listener of this process, and the seconds that a wait may last.

    Without ``limit_s`` the timeout of the process group ends waits. Until one is set, waits for
    ranks that do nothing end after ``idle_limit_s``.
    """

    def __init__(self) -> None:
        self.limit_s: float | None = None
        self.idle_limit_s = IDLE_LIMIT_S
        self.attach(Listener)

    def attach(self, make: Callable[[], Listener]) -> None:
        """Let ``make`` return the listener, when the first collective begins."""
        self._make = make
        self._listener: Listener | None = None

    @property
    def listener(self) -> Listener:
        """The listener that is attached."""
        if self._listener is None:
            self._listener = self._make()
        return self._listener

    def set_limit(self, hang_timeout: float | None) -> None:
        """Set how long a wait may last, and start the listener.

        **Raises** ConfigError, see `checked_timeout`.
        """
        self.limit_s = checked_timeout(hang_timeout)
        self.idle_limit_s = math.inf
        self.listener.start()

    @contextmanager
    def reporting_failures(self) -> Iterator[None]:
        """Report a StorageError that is raised inside to other ranks."""
        try:
            yield
        except StorageError as failure:
            self.listener.report_failure(str(failure))
            raise


def checked_timeout(hang_timeout: object) -> float | None:
    """Return the seconds that a wait may last. **Raises** ConfigError for other values.

    None leaves the end of a wait to the timeout of the process group.
    """
    if hang_timeout is None:
        return None
    if not isinstance(hang_timeout, int | float) or not hang_timeout >= _MIN_LIMIT_S:
        raise ConfigError(
            f"hang_timeout={hang_timeout!r}: expected {_MIN_LIMIT_S:g} seconds or more, or "
            "None for the timeout of the process group"
        )
    return float(hang_timeout)


WAITS = ProcessWaits()
