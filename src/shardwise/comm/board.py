"""What waiting ranks, and those that have failed, publish in the store of the process group."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from shardwise.comm.meeting import Meeting

FAILED = "a rank has failed, and will not come: "


class Board:
    """A record for each rank: its wait (see `Watch`), what it has failed with ("failed"), or both.

    In each is how many collectives the rank has begun ("begun"), by their keys. Beside them stand
    verdicts: what was found about ranks that wait for each other.
    """

    def __init__(self, store: dist.Store) -> None:
        # A connection of its own: one is locked as long as another thread waits in it.
        own: Any = store
        self._store = dist.PrefixStore("shardwise/watch", own.clone())

    def publish(self, record: Mapping[str, Any]) -> None:
        """Replace this rank's record."""
        self._store.set(str(dist.get_rank()), json.dumps(record))

    def clear(self) -> None:
        """Take this rank's record away."""
        self._store.set(str(dist.get_rank()), "")

    def tell(self, group: str, ranks: Sequence[int], verdict: str) -> None:
        """Publish what was found, about a group and ranks."""
        for key in (f"verdict/{group}", *(f"verdict/of {rank}" for rank in ranks)):
            self._store.set(key, verdict)

    def told(self, meeting: Meeting) -> str | None:
        """Return what was told of a group; else of a rank in it, that waits in another one.

        Else what a rank in it has failed with.
        """
        others = [rank for rank in meeting.ranks if rank != dist.get_rank()]
        members = (self.told_of(f"of {rank}") for rank in meeting.ranks)
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

    def ask(self, rank: int, number: int) -> None:
        """Ask a rank where it is; ``number`` counts the questions."""
        self._store.set(f"ask/{rank}", str(number))

    def answer(self, where: Callable[[], str]) -> None:
        """Say where this rank is, if somebody has asked since it last did."""
        key = f"ask/{dist.get_rank()}"
        if self._store.check([key]) and (number := self._store.get(key).decode()):
            self._store.set(key, "")
            self._store.set(f"answer/{dist.get_rank()}", json.dumps([int(number), where()]))

    def answer_of(self, rank: int, since: int) -> str | None:
        """Return where a rank has said it is, if it has answered a question of late."""
        key = f"answer/{rank}"
        number, where = json.loads(self._store.get(key)) if self._store.check([key]) else (-1, None)
        return where if number >= since else None

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
            for other in _missing(records[at], at):
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


def _missing(record: Mapping[str, Any], rank: int) -> Sequence[int]:
    return [other for other in record["ranks"] if other != rank]
