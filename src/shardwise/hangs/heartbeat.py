"""Heartbeats: the state that each rank publishes every second in the process group's store.

Note [Dead, stopped, silent]
A rank whose heartbeat does not change for some seconds is silent: stopped, dead, cut off, or in a
call that holds the GIL. On the same machine the system distinguishes these, see `fate`. Of a rank
on another machine only its silence is known, until a rank beside it reports more.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from shardwise.processes import Life, Process, fate, own_process

FAILED = "a rank has failed or ended, and will not come: "
ENDED_WELL = "its program is over"
_SILENT_LOOKS = 4


@dataclass(frozen=True)
class WaitRecord:
    """The wait that a rank's main thread is in, as other ranks read it.

    ``serial`` tells waits of the rank apart, ``look`` counts its looks at this one. ``number`` is
    that of the collective among those of its key, if ``is_counted``; torch's own calls are not.
    ``needs_all``: no rank can end it without all others. ``came`` describes the arguments of a call
    of torch's. ``trains``: it is no small exchange about a model or checkpoint.
    """

    serial: int
    look: int
    key: str
    number: int
    ranks: tuple[int, ...]
    text: str
    came: str = ""
    is_counted: bool = True
    needs_all: bool = True
    trains: bool = True


@dataclass(frozen=True)
class Heartbeat:
    """The state of one rank.

    ``last`` is the key of the collective that it began last, ``number`` how many it had begun of
    that key, ``changes`` how many collectives it has begun in all. A rank that begins none at the
    moment adds ``begun``, its counts by key. ``where`` are the lines that its main thread is in.
    ``failed`` is the error that it raises, until it begins another collective. ``left`` says how
    its program has ended, ``follows`` whether because another rank had failed, and ``came``
    describes the arguments of a call of torch's that has failed.
    """

    beat: int
    process: Process
    last: str = ""
    number: int = 0
    changes: int = 0
    computed_s: float = 0.0
    where: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    wait: WaitRecord | None = None
    failed: str = ""
    left: str = ""
    came: str = ""
    follows: bool = False

    @property
    def arguments(self) -> str:
        """The description of a call of torch's that the rank is in, or that has failed."""
        return (self.wait.came if self.wait else "") or self.came

    def has_begun(self, wait: WaitRecord) -> bool:
        """Tell whether the rank has begun a collective that another rank waits in."""
        if not wait.is_counted:
            return self.wait is not None and self.wait.key == wait.key
        number = self.number if self.last == wait.key else 0
        return max(self.begun.get(wait.key, 0), number) >= wait.number

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Heartbeat":
        """Read it from text."""
        values = json.loads(text)
        values["process"] = Process(**values["process"])
        if (wait := values["wait"]) is not None:
            values["wait"] = WaitRecord(**wait | {"ranks": tuple(wait["ranks"])})
        return cls(**values)


class Heartbeats:
    """The heartbeats that this rank has read, and when each rank's last changed."""

    def __init__(self, look_every_s: float) -> None:
        self.look_every_s = look_every_s
        self.process = own_process()
        # Per rank: the first since `forget` and the newest, each with the time when it was read.
        self._heard: dict[int, tuple[Heartbeat, float, Heartbeat, float]] = {}

    def add(self, rank: int, heartbeat: Heartbeat) -> None:
        """Note a rank's heartbeat."""
        now_s = time.monotonic()
        first, first_s, newest, _ = self._heard.get(rank, (heartbeat, now_s, heartbeat, now_s))
        if newest.beat != heartbeat.beat or rank not in self._heard:
            self._heard[rank] = first, first_s, heartbeat, now_s

    def forget(self) -> None:
        """Keep only the newest of each rank: `progress` is measured from there."""
        self._heard = {rank: (new, at, new, at) for rank, (_, _, new, at) in self._heard.items()}

    def newest(self, rank: int) -> Heartbeat | None:
        """Return a rank's last heartbeat."""
        heard = self._heard.get(rank)
        return None if heard is None else heard[2]

    def progress(self, rank: int) -> tuple[bool, float, float]:
        """Return, since `forget`: has a rank begun more; its seconds on a core, and in all."""
        first, first_s, newest, newest_s = self._heard[rank]
        computed_s = newest.computed_s - first.computed_s
        return newest.changes != first.changes, computed_s, newest_s - first_s

    def life(self, rank: int) -> tuple[Life, str]:
        """Return whether a rank's process lives, and its cause of death, as far as is known."""
        heard = self._heard.get(rank)
        if heard is None:
            return "silent", ""
        found, cause = fate(heard[2].process, self.process)
        return ("alive", "") if found == "silent" and not self.is_silent(rank) else (found, cause)

    def is_silent(self, rank: int) -> bool:
        """Tell whether a rank's heartbeat has not changed for some looks."""
        heard = self._heard.get(rank)
        since_s = 0.0 if heard is None else heard[3]
        return time.monotonic() - since_s >= _SILENT_LOOKS * self.look_every_s


class WatchStore:
    """Heartbeats by rank, and verdicts: causes of waits that cannot end, by group and rank."""

    def __init__(self, store: dist.Store) -> None:
        # A separate connection: one is locked as long as another thread waits in it.
        self._store = dist.PrefixStore("shardwise/watch", store.clone())  # type: ignore[attr-defined]
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace this rank's heartbeat."""
        self._store.set(str(self.rank), heartbeat.to_json())

    def read(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        """Return the heartbeats of ranks, as far as there are any.

        **Cost** two requests if each has one.
        """
        there = list(ranks)
        if there and not self._store.check([str(rank) for rank in there]):
            there = [rank for rank in there if self._store.check([str(rank)])]
        if not there:
            return {}
        texts = self._store.multi_get([str(rank) for rank in there])
        return {rank: Heartbeat.from_json(t) for rank, t in zip(there, texts, strict=True)}

    def tell(self, group: str, ranks: Sequence[int], verdict: str) -> None:
        """Publish a verdict for all that wait in a group, and for all that wait for these ranks."""
        for key in (f"verdict/{group}", *(f"verdict/of {rank}" for rank in ranks)):
            with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
                self._store.set(key, verdict)

    def verdict(self, group: str, ranks: Sequence[int] = ()) -> str | None:
        """Return the verdict about a group, or else about one of some ranks."""
        for key in ([f"verdict/{group}"] if group else []) + [f"verdict/of {r}" for r in ranks]:
            if self._store.check([key]):
                return self._store.get(key).decode()
        return None
