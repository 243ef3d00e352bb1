"""What this rank has begun, and waits as they go on: of threads, in torch's calls, on a device."""

import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist

from shardwise.comm import stacks
from shardwise.comm.meeting import Meeting
from shardwise.comm.stacks import TorchWait

_HISTORY = 4096


@dataclass
class Wait:
    """One wait, as it goes on; ``call`` is set where it is in one of torch's own calls."""

    meeting: Meeting
    number: int
    begun_s: float
    serial: int
    told: bool = False
    over: bool = False
    looks: int = 0
    call: TorchWait | None = None
    missing: Sequence[int] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks that must come."""
        if self.meeting.group is None:
            return range(dist.get_world_size())
        return self.meeting.ranks

    def text(self, thread: int) -> str:
        """Return it for people, with the user's line."""
        told = self.call.text if self.call is not None else self.meeting.text
        return told + stacks.line_of(thread)


class Ended(NamedTuple):
    """A collective that has ended: its key and number, and the ranks that it was of."""

    key: str
    number: int
    ranks: tuple[int, ...]


@dataclass
class Begun:
    """The collectives that this rank has begun, by their keys and in order; those that have ended.

    ``ended`` has the last one of each group, by its name: groups may be destroyed meanwhile.
    """

    counts: Counter[str] = field(default_factory=Counter)
    order: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    ended: dict[str, Ended] = field(default_factory=dict)
    total: int = 0

    def add(self, meeting: Meeting) -> int:
        """Count one; return its number among those of its key."""
        key = meeting.key
        self.counts[key] = number = self.counts[key] + 1
        self.order.append((key, number))
        self.total += 1
        return number

    def end(self, meeting: Meeting, number: int) -> None:
        """Note that one has ended."""
        name = meeting.group_name
        before = self.ended.get(name)
        with suppress(KeyError, ValueError):  # its group is gone
            ranks = tuple(meeting.ranks) if before is None else before.ranks
            self.ended[name] = Ended(meeting.key, number, ranks)

    @property
    def last(self) -> tuple[str, int]:
        """Return the key and the number of the last one."""
        return self.order[-1] if self.order else ("", 0)

    def last_of(self, rank: int, said: tuple[str, int] | None) -> str:
        """Return the key of another rank's last collective: as it has said, or one that ended here.

        Ranks that run one program begin the same ones in the same order.
        """
        known = [said] if said and said[0] else []
        ended = [each for each in list(self.ended.values()) if rank in each.ranks]
        known += [(each.key, each.number) for each in ended]
        places = {pair: place for place, pair in enumerate(tuple(self.order))}

        def place(pair: tuple[str, int]) -> int:
            is_ahead = self.counts.get(pair[0], 0) < pair[1]
            return places.get(pair, len(places) if is_ahead else -1)

        return max(known, key=place)[0] if known else ""


class StandingWaits:
    """Finds waits in torch's own calls, by looking again; see stacks.py."""

    def __init__(self) -> None:
        self._place: tuple[Any, ...] = ()
        self._since_s = 0.0
        self._found: Wait | None = None
        self._serial = 0

    def look(self) -> Wait | None:
        """Return the wait that the main thread has stood in since the last look, or longer."""
        place = stacks.standing()
        if place != self._place:
            self._place, self._found = place, None
            self._since_s = time.monotonic()
            return None
        if self._found is None and (call := stacks.torch_wait()) is not None:
            self._serial -= 1
            meeting = Meeting(call.call, "", 0, "torch", call.group)
            self._found = Wait(meeting, 0, self._since_s, self._serial, call=call)
        return self._found


_Flying = deque[tuple[Wait, Sequence[Any]]]


class Flights:
    """Collectives that a device makes while no thread waits for them, as NCCL's.

    They end in the order in which they began, group by group. Whoever has begun one may run ahead
    of its device by a step or so: the time that counts begins when the one before has ended.
    """

    def __init__(self) -> None:
        self._flying: dict[str, _Flying] = {}
        self._lock = threading.Lock()

    def begin(self, wait: Wait, works: Sequence[Any]) -> None:
        """Note one that was begun; those before it that are over keep no tensors alive."""
        with self._lock:
            flying = self._flying.setdefault(wait.meeting.group_name, deque())
            _drop_ended(flying)
            flying.append((wait, works))

    def oldest(self) -> Wait | None:
        """Return the one that has flown longest, of those that others may be waited for in."""
        found: list[Wait] = []
        with self._lock:  # the thread that trains drops them too
            for flying in self._flying.values():
                _drop_ended(flying)
                found += [wait for wait, _ in list(flying)[:1]]
        return min(found, key=lambda wait: wait.begun_s, default=None)


def _drop_ended(flying: _Flying) -> None:
    while flying and _is_over(flying[0][1]):
        flying.popleft()
        if flying:
            flying[0][0].begun_s = max(flying[0][0].begun_s, time.monotonic())


def _is_over(works: Sequence[Any]) -> bool:
    with suppress(RuntimeError):  # it has failed, as its own wait will tell
        return all(work.is_completed() for work in works)
    return True
