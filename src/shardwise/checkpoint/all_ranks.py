"""Work that all ranks do at once: it succeeds on all of them, or all raise the same error.

Note [The collector while planning]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A save or a load makes some ten objects for each tensor and keeps them to its end; none of them is
in a cycle. So many new objects make Python's garbage collector look at every object of the process:
200 ms where torch is loaded, in every second save of 1,500 tensors, on any of the ranks, and the
others wait. The collector is paused while training waits anyway, not in the background.
"""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from shardwise.errors import (
    CheckpointError,
    ConfigError,
    DamagedCheckpoint,
    ShardwiseError,
    StateError,
)

if TYPE_CHECKING:
    from shardwise.comm.control import Control

_T = TypeVar("_T")
_TEXT_BYTES = 1024
_KINDS: tuple[type[ShardwiseError], ...] = (
    CheckpointError,
    DamagedCheckpoint,
    ConfigError,
    StateError,
)
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def on_all_ranks(control: Control, work: Callable[[], _T]) -> _T:
    """Run ``work`` on every rank; return this rank's result.

    It may take as long as its disk takes: Note [How long a rank may be silent] in `comm.control`.

    **Cost** one exchange of a byte; a second one when a rank failed. ``work`` must not communicate.

    **Raises** on every rank the error of the first rank that failed, with its rank in the text.
    """
    made: list[_T] = []

    def keep() -> bytes:
        made.append(work())
        return b""

    rows_of_all_ranks(control, keep, 0)
    return made[0]


def rows_of_all_ranks(control: Control, work: Callable[[], bytes], row_bytes: int) -> list[bytes]:
    """Return what ``work`` returned on every rank, in rank order: rows of ``row_bytes``.

    **Cost** and **Raises** as `on_all_ranks`.
    """
    failure: Exception | None = None

    def attempt() -> bytes:
        nonlocal failure
        row = bytes(row_bytes)
        try:
            row = work()
        except Exception as error:  # sent to the others below, and raised there and here
            failure = error
        assert len(row) == row_bytes
        return bytes([failure is not None]) + row

    rows = control.exchange_after(attempt, 1 + row_bytes)
    if not any(r[0] for r in rows):
        return [r[1:] for r in rows]
    kind = next((n for n, k in enumerate(_KINDS) if type(failure) is k), 0)
    encoded = explain(failure).encode(errors="backslashreplace")  # a name may not be UTF-8
    text = encoded[:_TEXT_BYTES].decode(errors="ignore").encode()
    row = bytes([failure is not None, kind]) + text.ljust(_TEXT_BYTES, b"\0")
    rows = control.exchange(row)
    rank, first = next((n, r) for n, r in enumerate(rows) if r[0])
    message = first[2:].rstrip(b"\0").decode()
    others = sum(r[0] for r in rows) - 1
    if others:
        who = f"{others} other ranks" if others > 1 else "one other rank"
        message += f" ({who} failed too)"
    where = f"rank {rank}: " if control.num_ranks > 1 else ""
    raise _KINDS[first[1]](where + message) from failure


def ask_first_rank(control: Control, question: Callable[[], bool]) -> bool:
    """Return rank 0's answer, on every rank. **Cost** and **Raises** as `on_all_ranks`."""
    rows = rows_of_all_ranks(control, lambda: bytes([control.rank == 0 and question()]), 1)
    return rows[0] != b"\0"


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector, on all threads. See Note [The collector while planning]."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def explain(failure: Exception | None) -> str:
    """Return an error's text: the file, the reason, the errno, and what helps."""
    if isinstance(failure, OSError) and failure.errno is not None:
        where = f"{failure.filename}: " if failure.filename else ""
        wanted = f". {failure.wanted}" if hasattr(failure, "wanted") else ""
        hint = "; free some space, then save again" if failure.errno in _NO_SPACE else ""
        if failure.errno in (errno.ENOTDIR, errno.EEXIST):
            hint = "; a checkpoint is a folder, and there is a file of that name in its path"
        if failure.errno == errno.ENOENT:
            hint = "; the path must be the same folder on all ranks"
        return f"{where}{failure.strerror} (errno {failure.errno}){wanted}{hint}"
    if isinstance(failure, ShardwiseError):
        return str(failure)
    return f"{type(failure).__name__}: {failure}"
