"""What ranks say in the store of the process group, and whether their processes live.

Note [Dead, stopped, silent]
A rank whose record does not change for some seconds is silent: stopped, dead, cut off, or in a call
that does not let Python go on. On the same machine the system tells which, see `fate`. Of a rank on
another machine that is silent no more is known, until a rank beside it says more.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise.hangs.meeting import Meeting
from shardwise.processes import Life, Process, fate, own_process

FAILED = "a rank has failed or ended, and will not come: "
ENDED_WELL = "its program is over"
_SILENT_LOOKS = 4


@dataclass(frozen=True)
class Pulse:
    """What a rank has said last.

    ``last`` is the key of the collective that it began last, ``number`` how many it had begun of
    that key, ``changes`` how much it has begun at all. If it was asked, it says for some seconds
    ``where`` it is, and what it has ``begun`` by keys. ``left`` says how its program has ended,
    ``follows`` whether that was as another rank had failed, and ``came`` with what it had come to a
    call of torch's that failed.
    """

    beat: int
    process: Process
    last: str = ""
    number: int = 0
    changes: int = 0
    computed_s: float = 0.0
    where: str = ""
    came: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    left: str = ""
    follows: bool = False

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> "Pulse":
        """Return what a rank has said."""
        values = json.loads(text)
        return cls(**values | {"process": Process(**values["process"])})


class Pulses:
    """What this rank has heard of others, and since when it has heard nothing new."""

    def __init__(self, look_every_s: float) -> None:
        self.look_every_s = look_every_s
        self.process = own_process()
        self._heard: dict[int, tuple[Pulse, float, Pulse, float]] = {}  # first, newest; when

    def hear(self, rank: int, pulse: Pulse) -> None:
        """Note what a rank has said."""
        now_s = time.monotonic()
        first, first_s, newest, _ = self._heard.get(rank, (pulse, now_s, pulse, now_s))
        if newest.beat != pulse.beat or rank not in self._heard:
            self._heard[rank] = first, first_s, pulse, now_s

    def forget(self) -> None:
        """Begin anew, with the newest as the first: what changes from now on is what counts."""
        self._heard = {rank: (new, at, new, at) for rank, (_, _, new, at) in self._heard.items()}

    def newest(self, rank: int) -> Pulse | None:
        """Return what a rank has said last."""
        heard = self._heard.get(rank)
        return None if heard is None else heard[2]

    def moved(self, rank: int) -> tuple[bool, float, float]:
        """Tell of a rank since `forget`: has it begun more; its seconds on a core, and all."""
        first, first_s, newest, newest_s = self._heard[rank]
        computed_s = newest.computed_s - first.computed_s
        return newest.changes != first.changes, computed_s, newest_s - first_s

    def life(self, rank: int) -> tuple[Life, str]:
        """Return whether a rank lives, as far as it can be known; see `fate`."""
        heard = self._heard.get(rank)
        if heard is None:
            return "silent", ""
        found, cause = fate(heard[2].process, self.process)
        if found == "silent" and time.monotonic() - heard[3] < _SILENT_LOOKS * self.look_every_s:
            return "alive", ""
        return found, cause

    def is_silent(self, rank: int) -> bool:
        """Tell whether a rank has said nothing for some looks."""
        heard = self._heard.get(rank)
        since = 0.0 if heard is None else heard[3]
        return time.monotonic() - since >= _SILENT_LOOKS * self.look_every_s


class Board:
    """A record for each rank: its wait (see `Watch`), what it has failed with ("failed"), or both.

    In each is how many collectives the rank has begun ("begun"), by their keys. Beside them stand
    verdicts: what was found about ranks that wait for each other.
    """

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: one is locked as long as another thread waits in it.
        own: Any = store
        self._store = dist.PrefixStore("shardwise/watch", own.clone())
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def publish(self, record: Mapping[str, Any]) -> None:
        """Replace this rank's record."""
        self._store.set(str(self.rank), json.dumps(record))

    def clear(self) -> None:
        """Take this rank's record away."""
        self._store.set(str(self.rank), "")

    def tell(self, group: str, ranks: Sequence[int], verdict: str) -> None:
        """Publish what was found, about a group and ranks."""
        for key in (f"verdict/{group}", *(f"verdict/of {rank}" for rank in ranks)):
            self._store.set(key, verdict)

    def told(self, meeting: Meeting, ranks: Sequence[int]) -> str | None:
        """Return what was told of a group; else of one of its ranks, that waits in another one.

        Else what one of them has failed with.
        """
        others = [rank for rank in ranks if rank != self.rank]
        members = (self.told_of(f"of {rank}") for rank in ranks)
        failed = ((self.read(rank) or {}).get("failed") for rank in others if meeting.axis)
        return (
            self.told_of(meeting.group_name)
            or next((text for text in members if text), None)
            or next((blame(text) for text in failed if text), None)
        )

    def told_of(self, whom: str) -> str | None:
        """Return what was told of a group."""
        key = f"verdict/{whom}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def read(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's record, None where there is none; never waits for it."""
        if not self._store.check([str(rank)]):
            return None
        text = self._store.get(str(rank))
        return json.loads(text) if text else None

    def scan(self, ranks: Sequence[int]) -> dict[int, tuple[dict[str, Any] | None, Pulse | None]]:
        """Return the records and the pulses of ranks, None where there are none.

        **Cost** two requests where all have a pulse.
        """
        keys = [key for rank in ranks for key in (str(rank), f"pulse/{rank}")]
        if not keys:
            return {}
        if self._store.check(keys):
            texts = self._store.multi_get(keys)
        else:
            texts = [self._store.get(k) if self._store.check([k]) else b"" for k in keys]
        found = zip(ranks, texts[::2], texts[1::2], strict=True)
        return {
            rank: (
                json.loads(record) if record else None,
                Pulse.read(pulse) if pulse else None,
            )
            for rank, record, pulse in found
        }

    def beat(self, pulse: Pulse) -> None:
        """Replace what this rank says of itself."""
        self._store.set(f"pulse/{self.rank}", pulse.to_json())

    def ask(self, rank: int) -> None:
        """Ask a rank to say where it is, with its next pulses."""
        self._store.set(f"ask/{rank}", "1")

    def was_asked(self) -> bool:
        """Tell whether somebody has asked this rank since it was last looked."""
        key = f"ask/{self.rank}"
        if not self._store.check([key]) or not self._store.get(key):
            return False
        self._store.set(key, "")
        return True

    def circle(self, rank: int, record: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """Return the records of a circle of ranks that wait for each other, reached from ``rank``.

        Or that of a rank that has failed. Empty where there is none: then somebody is at work who
        may come.
        """
        records = {rank: record}
        path: list[int] = []

        def visit(at: int) -> list[int]:
            if at in path:
                return path[path.index(at) :]
            path.append(at)
            for other in (rank for rank in records[at]["ranks"] if rank != at):
                if other not in records and (found := self.read(other)) is not None:
                    records[other] = found
                waits = records.get(other)
                if not waits or waits["begun"].get(records[at]["key"], 0) >= records[at]["number"]:
                    continue
                if "failed" in waits and records[at]["trains"]:
                    return [other]
                if "ranks" in waits and (circle := visit(other)):
                    return circle
            path.pop()
            return []

        return {r: records[r] for r in visit(rank)}


def blame(failed: str) -> str:
    """Return why a wait for a rank that has failed, or for one that waits for it, is over."""
    return failed if failed.startswith(FAILED) else FAILED + failed
