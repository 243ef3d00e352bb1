"""What waiting ranks, and those that have failed, publish in the store of the process group."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.comm.meeting import Meeting
from shardwise.comm.pulse import Pulse

FAILED = "a rank has failed or ended, and will not come: "


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
