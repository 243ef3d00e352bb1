"""Small exchanges between ranks, about models and checkpoints, on a separate group.

Training's collectives run on training's groups, perhaps at the same time in another thread: these
messages never mix with them. Every message has a fixed size: no object is pickled.

Note [How long a rank may be silent]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The timeout is that of the process group that trains: a rank that is silent for so long is taken for
lost, and the others raise. A rank may need longer for its part of a save or a load, on a slow disk.
So while it works, another thread of it keeps exchanging with the other ranks (`exchange_after`).
The timeout limits how long a rank may be silent, and not how long its disk takes. A process that is
stopped, dead or cut off is silent.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol
from zlib import crc32

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, name_ranks
from shardwise.comm.listener import WAITS
from shardwise.comm.pending import MessagesInFlight, blocking_collective, collective_errors
from shardwise.comm.process_groups import FAILED_GROUPS, abort, fail, usual_reason
from shardwise.errors import CollectiveError
from shardwise.mesh import DataAxes

_TAGS = 0x7FFFFFFF  # of messages between two ranks; collectives are numbered separately
_EXCHANGES = 4  # within one timeout, while a rank works
_EXCHANGE_S = 10.0  # at least so often


class Control(Protocol):
    """Exchanges with the other ranks of a model. Ranks are numbered replica by replica.

    ``members`` are their numbers in the process group, in this order; one rank alone names none.
    """

    rank: int
    num_ranks: int
    members: Sequence[int]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the exchanges; None for one rank alone."""

    def exchange(self, row: bytes, about: str = "") -> list[bytes]:
        """Return every rank's row in rank order; rows have one length on all ranks.

        ``about`` is the same on all ranks, too. The error of a rank that waits alone contains it.
        """

    def exchange_after(self, work: Callable[[], bytes], row_bytes: int) -> list[bytes]:
        """Do work that may take long, then exchange the row of ``row_bytes`` that it returns."""

    def start_exchange(self, row: bytes, about: str) -> Callable[[], dict[int, bytes]]:
        """Send the row to other ranks, and return a function that waits for theirs, by rank.

        ``about`` names a series of exchanges; at most one of a series is unfinished.
        """

    def waiting(self, about: str) -> AbstractContextManager[object]:
        """Report and name a wait inside for `start_exchange`, outside any other collective's."""

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes of rank ``source``; the other ranks' argument is ignored."""

    def break_off(self) -> None:
        """Make waits in an exchange raise, here and on other ranks; none is possible afterwards."""


class SoloControl:
    """The exchanges of one rank."""

    rank = 0
    num_ranks = 1
    members: Sequence[int] = ()
    group = None

    def exchange(self, row: bytes, about: str = "") -> list[bytes]:
        """Return the row."""
        return [row]

    def exchange_after(self, work: Callable[[], bytes], row_bytes: int) -> list[bytes]:
        """Do the work; return its row."""
        return [work()]

    def start_exchange(self, row: bytes, about: str) -> Callable[[], dict[int, bytes]]:
        """Return a function that returns the row."""
        return lambda: {0: row}

    def waiting(self, about: str) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the bytes."""
        return data

    def break_off(self) -> None:
        """Do nothing: no rank waits."""


class GroupControl:
    """The exchanges over a gloo group of all ranks of one mesh."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        members: Sequence[int],
        timeout: timedelta,
        name: str = "",
    ) -> None:
        self._group = group
        self._own_timeout_s = timeout.total_seconds()
        self.members = members
        self.rank = rank
        self.num_ranks = len(members)
        self._key = CollectiveKey(
            "an exchange between all ranks", name, 0, "", group, tuple(members)
        )

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the exchanges."""
        return self._group

    @property
    def _timeout_s(self) -> float:
        """Seconds that a rank may be silent: the timeout or the `hang_timeout`, the shorter."""
        return min(self._own_timeout_s, WAITS.limit_s or self._own_timeout_s)

    def exchange(self, row: bytes, about: str = "") -> list[bytes]:
        """Return every rank's row in rank order.

        Each rank sends its row to all others, so a missing row shows which rank is missing. A
        message of another length or ``about`` is never received in its place: both ranks wait, and
        raise.

        **Cost** sends and receives ranks - 1 messages of a byte more than the row.

        **Raises** CollectiveError naming the ranks that did not come within the timeout.
        """
        if not row:
            return [row] * self.num_ranks
        # The first byte is 1, so that a row which was received differs from one which was not.
        sent = torch.frombuffer(bytearray(b"\x01" + row), dtype=torch.uint8)
        rows = torch.zeros((self.num_ranks, len(sent)), dtype=torch.uint8, device="cpu")
        rows[self.rank] = sent
        others = [rank for rank in range(self.num_ranks) if rank != self.rank]
        tag = crc32(f"{len(row)} {about}".encode()) & _TAGS
        key = replace(self._key, index=len(row), about=about)
        began_s = time.monotonic()

        def describe_lost(error: RuntimeError) -> str:
            missing = [rank for rank in others if not rows[rank, 0]]
            return self._describe_lost(key, missing, time.monotonic() - began_s, error)

        with _agreement(key, describe_lost):
            receives = [self._group.recv([rows[rank]], rank, tag) for rank in others]
            sends = [self._group.send([sent], rank, tag) for rank in others]
            for work in (*receives, *sends):
                left_s = self._timeout_s - (time.monotonic() - began_s)
                work.wait(timedelta(seconds=max(left_s, 0.01)))
        return [received.tobytes() for received in rows[:, 1:].numpy()]

    def break_off(self) -> None:
        """Make waits raise, see Note [Aborting a group]."""
        FAILED_GROUPS.add(self._key.group, f"rank {dist.get_rank()} has left the group")
        abort(self._key.group)

    def _describe_lost(
        self, key: CollectiveKey, missing: list[int], waited_s: float, error: Exception
    ) -> str:
        """Return the text about ranks whose rows were not received."""
        ranks = name_ranks([self.members[n] for n in missing]) if missing else "another rank"
        is_late = waited_s > 0.9 * self._timeout_s
        detail = f" within {self._timeout_s:g} s" if is_late else f": {usual_reason(error)}"
        reason = f"{ranks} did not come{detail}"
        cause = fail(key, reason)
        if cause == reason and is_late:  # the listener knows nothing of the ranks
            return f"{reason}: stopped, dead, or elsewhere. Every rank must make this call"
        return cause if cause.startswith(reason) else f"{ranks} did not come: {cause}"

    def exchange_after(self, work: Callable[[], bytes], row_bytes: int) -> list[bytes]:
        """Do work that may take long, then exchange the row of ``row_bytes`` that it returns.

        Another thread exchanges meanwhile, see Note [How long a rank may be silent]: the work must
        not communicate here.

        **Cost** one exchange, and one more for each few seconds that the slowest rank works.
        """
        done, failures = threading.Event(), list[Exception]()

        def keep_exchanging() -> None:
            try:
                while not done.wait(min(self._timeout_s / _EXCHANGES, _EXCHANGE_S)):
                    self.exchange(bytes(1 + row_bytes))
            except Exception as error:  # raised below
                failures.append(error)

        thread = threading.Thread(target=keep_exchanging, name="shardwise-meet", daemon=True)
        thread.start()
        try:
            mine = work()
        finally:
            done.set()  # if work is interrupted, the others miss this rank, as a dead one
        thread.join()
        if failures:
            raise failures[0]
        while True:
            rows = self.exchange(b"\x01" + mine)
            if all(row[0] for row in rows):
                return [row[1:] for row in rows]

    def start_exchange(self, row: bytes, about: str) -> Callable[[], dict[int, bytes]]:
        """Send the row to other ranks, and return a function that waits for theirs, by rank.

        Up to 64 ranks send to all others. Of more ranks, each exchanges with those at a distance of
        a power of two, so that a rank sends 2 log2(ranks) messages.

        **Raises** RuntimeError in the wait if a rank has died or does not come within the timeout.
        """
        peers = compared_ranks(self.rank, self.num_ranks)
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        memory = bytearray(len(peers) * len(mine))
        rows = torch.frombuffer(memory, dtype=torch.uint8).view(len(peers), -1)
        tag = crc32(about.encode()) & _TAGS
        works: list[dist.Work] = []
        with collective_errors(replace(self._key, about=about)):
            works += [self._group.recv([rows[n]], peer, tag) for n, peer in enumerate(peers)]
            works += [self._group.send([mine], peer, tag) for peer in peers]
        flight = MessagesInFlight(works, (mine, rows))

        def finish() -> dict[int, bytes]:
            flight.wait()
            found = {peer: rows[n].numpy().tobytes() for n, peer in enumerate(peers)}
            return found | {self.rank: row}

        return finish

    def waiting(self, about: str) -> AbstractContextManager[object]:
        """Report and name a wait inside for `start_exchange`, outside any other collective's."""
        return _agreement(replace(self._key, about=about))

    def broadcast(self, data: bytes, source: int = 0) -> bytes:
        """Return the source's bytes; two broadcasts, of the length and of the bytes."""
        size, limit = torch.tensor([len(data)], device="cpu"), timedelta(seconds=self._timeout_s)

        def describe_lost(error: RuntimeError) -> str:
            abort(self._key.group)  # or gloo goes on, and the process cannot exit
            return fail(self._key, usual_reason(error))

        with _agreement(self._key, describe_lost):
            self._group.broadcast(size, source).wait(limit)
            buffer = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
            if self.rank == source:
                buffer.numpy()[:] = memoryview(data)
            if buffer.numel():
                self._group.broadcast(buffer, source).wait(limit)
        return buffer.numpy().tobytes()


_ALL_TO_ALL_RANKS = 64


def compared_ranks(rank: int, num_ranks: int) -> list[int]:
    """Return the ranks that a rank compares itself with; each of them names this one, too."""
    if num_ranks <= _ALL_TO_ALL_RANKS:
        return [other for other in range(num_ranks) if other != rank]
    distances = [1 << power for power in range((num_ranks - 1).bit_length())]
    others = {(rank + sign * distance) % num_ranks for distance in distances for sign in (1, -1)}
    return sorted(others - {rank})


class _agreement(blocking_collective):  # noqa: N801 - reads as a statement
    """A small exchange; ``describe_lost`` returns the cause of an error inside."""

    __slots__ = ("_describe_lost",)

    def __init__(
        self, key: CollectiveKey, describe_lost: Callable[[RuntimeError], str] | None = None
    ) -> None:
        super().__init__(key)
        self._describe_lost = describe_lost

    def describe(self, error: RuntimeError) -> str:
        """Note that the group has failed; return the message about it."""
        describe = self._describe_lost or (lambda error: fail(self._key, usual_reason(error)))
        return f"the ranks could not agree: {describe(error)}"


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Begin the text of a CollectiveError with ``call``."""
    try:
        yield
    except CollectiveError as error:
        raise CollectiveError(f"{call}: {error}") from error


def open_group(store: dist.Store, ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Open a gloo group of these ranks, this one among them, that torch does not know."""
    rank = ranks.index(dist.get_rank())
    return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)  # type: ignore[return-value]  # a Backend does too


def timeout_of(axes: DataAxes) -> timedelta:
    """Return how long the groups of a mesh wait for a rank: the shortest, if they differ."""
    found = []
    for axis in axes.all:
        for device in axis.group._device_types:
            with suppress(AttributeError, RuntimeError):  # a backend without a timeout
                found.append(axis.group._get_backend(device).options._timeout)
    return min(found, default=dist.distributed_c10d.default_pg_timeout)


def exchange_any(control: Control, data: bytes) -> list[bytes]:
    """Return every rank's bytes, which may differ in length. **Cost** two exchanges."""
    rows = control.exchange(len(data).to_bytes(8, "big"))
    lengths = [int.from_bytes(row, "big") for row in rows]
    padded = control.exchange(data.ljust(max(lengths), b"\0"))
    return [row[:length] for row, length in zip(padded, lengths, strict=True)]


def control_over(axes: DataAxes, ranks: Sequence[int] | None = None) -> Control:
    """Open a group for small exchanges over a mesh; every rank of the mesh calls it together.

    ``ranks``: over more than the mesh, which these are.

    Torch does not know this group: it ends with the last reference to it. Ranks find each other by
    its name, which does not depend on other groups of a rank. Two threads must not share one. A
    rank of a fake process group gets a `SoloControl`. The group waits for a rank as long as the
    groups of the mesh do, see Note [How long a rank may be silent].

    **Cost** one gloo group for more than one rank.

    **Raises** CollectiveError where another rank has died; under gloo at once.
    """
    if ranks is None:
        ranks = axes.mesh.mesh.flatten().tolist()  # (replicate, shard), so replica by replica
    if len(ranks) == 1 or axes.shard.backend == "fake":
        return SoloControl()
    rank = ranks.index(dist.get_rank())
    name = f"shardwise/control/{'_'.join(map(str, ranks))}"
    store = dist.distributed_c10d._get_default_store()
    name += f"/{store.add(f'{name}/{rank}', 1)}"  # all ranks count the same calls
    opening = CollectiveKey("the opening of a group", name, 0, "", axes.shard.group, tuple(ranks))
    with _agreement(opening):
        for axis in axes.all:
            if "gloo" in axis.backend:  # it notices a rank that has died
                # Called on the backend, where modes that count collectives do not see it.
                backend: Any = axis.group._get_backend(torch.device("cpu"))
                backend.allreduce([torch.zeros(1, device="cpu")]).wait()
        timeout = timeout_of(axes)
        group = open_group(dist.PrefixStore(name, store), ranks, timeout)
    return GroupControl(group, rank, ranks, timeout, name)
