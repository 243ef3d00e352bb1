"""A save that goes on in the background, and how it ended."""

import threading
import time
from collections.abc import Callable

from shardwise.checkpoint.write import Written


class Saving:
    """A save under way: how long it stopped training, and whether it is done.

    ``stall_s`` is the copy, ``waited_s`` the wait for the save before it, ``write_s`` how long the
    background took; ``held_bytes`` of memory hold the copy.
    """

    def __init__(self, step: int, held_bytes: int, waited_s: float, stall_s: float) -> None:
        self.step = step
        self.held_bytes = held_bytes
        self.waited_s = waited_s
        self.stall_s = stall_s
        self.write_s = 0.0
        self._written: Written | None = None
        self._failure: BaseException | None = None
        self._told = False
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Written]) -> None:
        """Begin the work in a thread; a process that ends waits for it."""
        self._thread = threading.Thread(target=self._run, args=(work,), name="shardwise-save")
        self._thread.start()

    def _run(self, work: Callable[[], Written]) -> None:
        started_s = time.perf_counter()
        try:
            self._written = work()
        except BaseException as error:  # handed to whoever waits
            self._failure = error
        self.write_s = time.perf_counter() - started_s

    @property
    def done(self) -> bool:
        """Tell whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Tell whether it has ended, and not well."""
        return self.done and self._failure is not None

    def wait(self) -> Written:
        """Return when the checkpoint is on disk. **Raises** what went wrong in the background."""
        self.join()
        self._told = True
        if self._failure is not None:
            raise self._failure
        assert self._written is not None
        return self._written

    def join(self) -> None:
        """Return when the thread has ended."""
        assert self._thread is not None
        self._thread.join()

    def raise_once(self) -> None:
        """Raise what went wrong, unless somebody was told already."""
        if not self._told:
            self.wait()
