"""Small exchanges between ranks, about models and checkpoints, on a group of their own.

Training's collectives run on training's groups, perhaps at this very moment in another thread; what
is said here never mixes with them. Everything has a fixed size: no object is pickled.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.watch import WATCH, Meeting
from shardwise.errors import CollectiveError
from shardwise.mesh import Axes

_TIMEOUT = timedelta(minutes=30)


class Control(Protocol):
    """What is asked of the other ranks. Ranks are numbered replica by replica."""

    rank: int
    num_ranks: int

    def exchange(self, row: bytes) -> list[bytes]:
        """Return every rank's row in rank order; rows have one length on all ranks."""

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes; the other ranks' argument is ignored."""


class SoloControl:
    """The exchanges of one rank."""

    rank = 0
    num_ranks = 1

    def exchange(self, row: bytes) -> list[bytes]:
        """Return the row."""
        return [row]

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes."""
        return data


class GroupControl:
    """The exchanges over a gloo group of all ranks of one mesh."""

    def __init__(
        self, group: dist.ProcessGroup, rank: int, members: Sequence[int], name: str = ""
    ) -> None:
        self._group = group
        self.rank = rank
        self.num_ranks = len(members)
        self._meeting = Meeting("an exchange between all ranks", name, 0, "", group, tuple(members))

    def exchange(self, row: bytes) -> list[bytes]:
        """Return every rank's row in rank order; one all-gather."""
        if not row:
            return [row] * self.num_ranks
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        rows = torch.empty(self.num_ranks * len(row), dtype=torch.uint8, device="cpu")
        with _Blame(self.rank, self._meeting):
            self._group.allgather([list(rows.chunk(self.num_ranks))], [mine]).wait()
        whole = rows.numpy().tobytes()
        return [whole[i : i + len(row)] for i in range(0, len(whole), len(row))]

    def broadcast(self, data: bytes) -> bytes:
        """Return rank 0's bytes; two broadcasts, of the length and of the bytes."""
        size = torch.tensor([len(data)], device="cpu")
        with _Blame(self.rank, self._meeting):
            self._group.broadcast(size, 0).wait()
            buffer = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
            if self.rank == 0:
                buffer.numpy()[:] = memoryview(data)
            if buffer.numel():
                self._group.broadcast(buffer, 0).wait()
        return buffer.numpy().tobytes()


class _Blame:
    """Turn a failure of the group into a CollectiveError."""

    def __init__(self, rank: int, meeting: Meeting | None = None) -> None:
        self._rank = rank
        self._meeting = meeting

    def __enter__(self) -> None:
        if self._meeting is not None:
            WATCH.refuse_failed(self._meeting.text, self._meeting.group)
            WATCH.enter(self._meeting, WATCH.begin(self._meeting))

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        if self._meeting is not None:
            WATCH.leave()
        if isinstance(error, RuntimeError) and not isinstance(error, CollectiveError):
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            cause = f"{reason}. As a rule another rank died or raised first: its log has the cause"
            if self._meeting is not None:
                cause = WATCH.fail(self._meeting, cause)
            raise CollectiveError(
                f"rank {self._rank}: the ranks could not agree: {cause}"
            ) from error


def control_over(axes: Axes, timeout: timedelta = _TIMEOUT) -> Control:
    """Open a group for small exchanges over a mesh; every rank of the mesh calls it together.

    Torch does not know this group: it ends with the last reference to it, and its name, which
    ranks find each other by, does not depend on which other groups a rank is in. Two threads must
    not share one. Each rank of a fake process group stands for itself.

    **Cost** one gloo group for more than one rank.

    **Raises** CollectiveError where another rank has died; under gloo at once.
    """
    if axes.num_ranks == 1 or axes.shard.backend == "fake":
        return SoloControl()
    ranks = axes.mesh.mesh.flatten().tolist()  # (replicate, shard), so replica by replica
    rank = ranks.index(dist.get_rank())
    name = f"shardwise/control/{'_'.join(map(str, ranks))}"
    store = dist.distributed_c10d._get_default_store()
    opening = Meeting("the opening of a group", name, 0, "", axes.shard.group, tuple(ranks))
    with _Blame(rank, opening):
        for axis in axes.all:
            if "gloo" in axis.backend:  # it notices a rank that died before; the store waits for it
                dist.all_reduce(torch.zeros(1, device="cpu"), group=axis.group)
        number = store.add(f"{name}/{rank}", 1)  # each rank counts its own calls, all alike
        own_store = dist.PrefixStore(f"{name}/{number}", store)
        group = dist.ProcessGroupGloo(own_store, rank, len(ranks), timeout)
    return GroupControl(group, rank, ranks, f"{name}/{number}")  # type: ignore[arg-type]  # a Backend does too
