"""Values of both transports: segments to gather or reduce, work in flight, errors of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey
from shardwise.comm.listener import WAITS
from shardwise.comm.process_groups import FAILED_GROUPS, fail, usual_reason
from shardwise.device import Event
from shardwise.errors import CollectiveError, StateError
from shardwise.layout.segments import Segment
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.trace import Recorder


@dataclass(frozen=True)
class CollectiveId:
    """A collective of a unit: its kind, the unit, and the unit's index (for message tags).

    ``about`` describes the content where it differs between calls.
    """

    kind: str
    unit: str
    index: int
    about: str = ""


class GatherItem(NamedTuple):
    """All-gather of one segment into ``full`` (exactly the segment's shares, flat).

    ``source`` is exactly this rank's share, flat; it may be its own place inside ``full``.
    """

    segment: Segment
    source: torch.Tensor
    full: torch.Tensor
    in_place: bool


class ReduceItem(NamedTuple):
    """Reduce-scatter of one segment: ``out`` (this rank's share) becomes the mean over ranks.

    ``parts`` are (offset in the segment, flat tensor); elements that no part covers are undefined.
    ``codings`` say how each part is encoded on the wire; empty: none is. ``counts``: the elements
    are counts of ranks, not gradients.
    """

    segment: Segment
    parts: tuple[tuple[int, torch.Tensor], ...]
    out: torch.Tensor
    codings: tuple[Coding | None, ...] = ()
    counts: bool = False


# Works that were dropped before their wait (a model that is deleted with reductions in flight).
# Their buffers must stay: if one is freed, gloo stops reading from that peer for good.
_abandoned: list[object] = []


class Flight:
    """Messages in flight with the memory that they use, kept until they have ended."""

    def __init__(self, works: Sequence[dist.Work], memory: object) -> None:
        self._works, self._memory = works, memory

    def wait(self) -> None:
        """Wait until all have ended."""
        for work in self._works:
            work.wait()
        self._works, self._memory = (), None

    def __del__(self) -> None:
        if self._works:
            _abandoned.append((self._works, self._memory))


class Pending:
    """Work in flight, collectives or copies, with the memory that it needs; ``wait`` once."""

    __slots__ = (
        *("_copies", "_finish", "_first", "_keep", "_key", "_number", "_over", "_peers"),
        "_recorder",
        "_works",
    )

    def __init__(
        self,
        key: CollectiveKey,
        works: Sequence[dist.Work],
        finish: Callable[[], None] | None = None,
        keep: object = None,
        peers: Sequence[int] = (),
    ) -> None:
        """``peers`` are the ranks in the group that each work exchanges with, if they are known."""
        self._key = key
        self._peers = peers
        self._recorder: Recorder | None = None
        self._copies: tuple[Event, ...] = ()
        self._works: Sequence[dist.Work] = ()
        self._over: Callable[[], None] | None = None
        self._first: Callable[[], Exception | None] | None = None
        self._number = WAITS.listener.begin(key) if works else 0
        self._works = works
        self._finish = finish
        self._keep = keep
        if works and not peers:
            WAITS.listener.launch(key, self._number, works)

    @classmethod
    def of_copies(cls, *copies: Event, keep: object = None) -> "Pending":
        """Return copies between host and device: ``wait`` blocks until these have happened."""
        made = cls.__new__(cls)
        made._copies, made._works, made._finish, made._keep = copies, (), None, keep
        made._over, made._peers, made._recorder, made._first = None, (), None, None
        return made

    def wait_first(
        self, finish: Callable[[], Exception | None], group: dist.ProcessGroup | None
    ) -> None:
        """Call ``finish``, which waits for messages of these ranks on ``group``, before the wait.

        An error that it returns is raised after the wait; one that it raises, at once.
        """
        self._first, self._key = finish, replace(self._key, companion=group)

    def follow(self, recorder: Recorder, line: str, unit: str, num_bytes: int) -> None:
        """Report this work to a recorder, and its end: on the CPU, the end of its wait."""
        if self._works:
            self._recorder = recorder
            self._over = recorder.begin(line, unit, num_bytes, self._works)

    @property
    def holds(self) -> object:
        """The memory that is kept alive until the end of the wait."""
        return self._keep

    def wait(self) -> None:
        """Block (CPU) or order the current stream (CUDA) until the result may be read.

        **Raises** CollectiveError with the unit, the axis and this rank when communication fails.
        """
        for copy in self._copies:
            copy.wait()
        if self._works:
            with collective_wait(self._key, self._number):
                error = None if self._first is None else self._first()
                if self._recorder is not None and self._peers:
                    self._wait_for_each(self._recorder)
                else:
                    for work in self._works:
                        work.wait()
            if error is not None:
                self._works = ()
                raise error
        if self._over is not None:
            self._over()
        if self._finish is not None:
            self._finish()
        self._copies, self._works, self._finish, self._keep = (), (), None, None
        self._over = self._first = None

    def _wait_for_each(self, recorder: Recorder) -> None:
        """Wait, and report the seconds by peer; the first hides others that are as late."""
        seconds = dict.fromkeys(self._peers, 0.0)
        before = time.perf_counter()
        for peer, work in zip(self._peers, self._works, strict=True):
            work.wait()
            now = time.perf_counter()
            seconds[peer] += now - before
            before = now
        for peer, waited in seconds.items():
            recorder.wait_for(self._key.group, peer, waited)

    def __del__(self) -> None:
        for copy in self._copies:  # they end soon, and use the memory until then
            copy.wait()
        if self._works:
            _abandoned.append(self._works)


def key_of(collective: CollectiveId, axis: Axis) -> CollectiveKey:
    """Return the key of a collective over an axis, for its start and its wait."""
    where = collective.kind, collective.unit, collective.index, axis.name, axis.group
    return CollectiveKey(*where, about=collective.about)


class collective_errors:  # noqa: N801 - reads as a statement
    """Turn a failure of torch.distributed inside into a CollectiveError that names the collective.

    **Raises** CollectiveError at once if an earlier collective of the same group has failed.
    """

    __slots__ = ("_key",)

    def __init__(self, key: CollectiveKey) -> None:
        self._key = key

    def __enter__(self) -> None:
        FAILED_GROUPS.refuse(self._key, self._key.group)

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if not isinstance(error, RuntimeError) or isinstance(error, CollectiveError | StateError):
            return
        raise CollectiveError(f"rank {dist.get_rank()}: {self.describe(error)}") from error

    def describe(self, error: RuntimeError) -> str:
        """Note that the group has failed; return the message about it."""
        cause = fail(self._key, usual_reason(error))
        return f"{self._key.text} ({len(self._key.ranks)} ranks) failed: {cause}"


class collective_wait(collective_errors):  # noqa: N801 - reads as a statement
    """Wait inside for a collective that was begun earlier; ``number`` is the listener's."""

    __slots__ = ("_number",)

    def __init__(self, key: CollectiveKey, number: int) -> None:
        super().__init__(key)
        self._number = number

    def __enter__(self) -> None:
        super().__enter__()
        WAITS.listener.enter(self._key, self._number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        WAITS.listener.leave(error is None)
        super().__exit__(kind, error, trace)


class blocking_collective(collective_wait):  # noqa: N801 - reads as a statement
    """Begin a collective inside, and wait for the other ranks."""

    __slots__ = ()

    def __init__(self, key: CollectiveKey) -> None:
        super().__init__(key, 0)

    def __enter__(self) -> None:
        FAILED_GROUPS.refuse(self._key, self._key.group)
        WAITS.listener.enter(self._key, WAITS.listener.begin(self._key))
