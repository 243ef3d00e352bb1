"""Items, work in flight and errors of collectives, for both transports."""

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

    ``about`` describes the content, if it differs between calls.
    """

    kind: str
    unit: str
    index: int
    about: str = ""


class GatherItem(NamedTuple):
    """All-gather of one segment.

    ``full`` is flat and has all shares of the segment; ``source`` is flat and has this rank's
    share. ``in_place``: ``source`` is this rank's share inside ``full``.
    """

    segment: Segment
    source: torch.Tensor
    full: torch.Tensor
    in_place: bool


class ReduceItem(NamedTuple):
    """Reduce-scatter of one segment.

    - ``parts``: this rank's addends as (offset in the segment, flat tensor). Elements of the result
      that no part covers are undefined.
    - ``out``: flat; this rank's share of the result.
    - ``codings``: the coding of each part in messages; empty if none is encoded.
    - ``counts``: the elements are counts of ranks, not gradients.
    """

    segment: Segment
    parts: tuple[tuple[int, torch.Tensor], ...]
    out: torch.Tensor
    codings: tuple[Coding | None, ...] = ()
    counts: bool = False


# Works that were dropped before their wait, as a model was deleted with reductions in flight.
# Their buffers must stay allocated: if one is freed, gloo never reads from that peer again.
_abandoned: list[object] = []


class MessagesInFlight:
    """Messages in flight with the memory that they use, which is kept until they have ended."""

    def __init__(self, works: Sequence[dist.Work], memory: object) -> None:
        self._works = works
        self._memory = memory

    def wait(self) -> None:
        """Wait until all have ended."""
        for work in self._works:
            work.wait()
        self._works = ()
        self._memory = None

    def __del__(self) -> None:
        if self._works:
            _abandoned.append((self._works, self._memory))


class Pending:
    """Work in flight, collectives or copies, with the memory that it needs; ``wait`` once.

    It is either the works of one collective, or copies between host and device (`of_copies`).
    """

    __slots__ = (
        "_copies",
        "_end_span",
        "_finish",
        "_keep",
        "_key",
        "_number",
        "_peers",
        "_recorder",
        "_wait_before",
        "_works",
    )
    _works: Sequence[dist.Work]

    def __init__(
        self,
        key: CollectiveKey,
        works: Sequence[dist.Work],
        finish: Callable[[], None] | None = None,
        keep: object = None,
        peers: Sequence[int] = (),
    ) -> None:
        """Begin to report a collective to the listener.

        ``finish`` is called after the wait. ``keep`` is memory that is kept until then. ``peers``
        are the ranks in the group with which each work exchanges, if they are known.
        """
        self._init_without_works(finish, keep, peers)
        self._key = key
        self._number = WAITS.listener.begin(key) if works else 0
        self._works = works
        if works and not peers:
            WAITS.listener.launch(key, self._number, works)

    def _init_without_works(
        self, finish: Callable[[], None] | None, keep: object, peers: Sequence[int]
    ) -> None:
        # ``__del__`` reads the first two, also if the listener raises in ``__init__``.
        self._works = ()
        self._copies: tuple[Event, ...] = ()
        self._peers = peers
        self._finish = finish
        self._keep = keep
        self._recorder: Recorder | None = None
        self._end_span: Callable[[], None] | None = None  # ends the recorder's span of the work
        self._wait_before: Callable[[], Exception | None] | None = None  # see `wait_first`

    @classmethod
    def of_copies(cls, *copies: Event, keep: object = None) -> "Pending":
        """Return copies between host and device: ``wait`` blocks until the events have happened."""
        pending = cls.__new__(cls)
        pending._init_without_works(finish=None, keep=keep, peers=())
        pending._copies = copies
        return pending

    def wait_first(
        self, finish: Callable[[], Exception | None], group: dist.ProcessGroup | None
    ) -> None:
        """Call ``finish`` before the wait; it waits for messages of the same ranks on ``group``.

        An error that ``finish`` returns is raised after the wait. An error that it raises is not
        caught.
        """
        self._wait_before = finish
        self._key = replace(self._key, companion=group)

    def follow(self, recorder: Recorder, line: str, unit: str, num_bytes: int) -> None:
        """Report the begin and the end of this work to a recorder.

        On the CPU the end is the end of the wait.
        """
        if self._works:
            self._recorder = recorder
            self._end_span = recorder.begin(line, unit, num_bytes, self._works)

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
                error = None if self._wait_before is None else self._wait_before()
                if self._recorder is not None and self._peers:
                    self._wait_by_peer(self._recorder)
                else:
                    for work in self._works:
                        work.wait()
            if error is not None:
                self._works = ()
                raise error
        if self._end_span is not None:
            self._end_span()
        if self._finish is not None:
            self._finish()
        self._copies = ()
        self._works = ()
        self._finish = None
        self._keep = None
        self._end_span = None
        self._wait_before = None

    def _wait_by_peer(self, recorder: Recorder) -> None:
        """Wait, and report the seconds by peer.

        Waits are in sequence: the first late peer hides others that are late by as much.
        """
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
        for copy in self._copies:  # they use the memory until they end, which is soon
            copy.wait()
        if self._works:
            _abandoned.append(self._works)


def key_of(collective: CollectiveId, axis: Axis) -> CollectiveKey:
    """Return the key of a collective over an axis, for its start and its wait."""
    return CollectiveKey(
        collective.kind,
        collective.unit,
        collective.index,
        axis.name,
        axis.group,
        about=collective.about,
    )


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
        """Record that the group has failed; return the text of the error."""
        cause = fail(self._key, usual_reason(error))
        return f"{self._key.text} ({len(self._key.ranks)} ranks) failed: {cause}"


class collective_wait(collective_errors):  # noqa: N801 - reads as a statement
    """Wait inside for a collective that was begun earlier; ``number`` is from the listener."""

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
