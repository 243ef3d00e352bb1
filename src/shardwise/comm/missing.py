"""Who is missing in a collective that does not end: found by a walk from rank to rank, and said.

Note [Four words]
A missing rank has *never entered* the collective: dead, stopped, or in the same line since. Or it
is *late*: at work, as it has computed or begun other collectives meanwhile. Ranks that wait in
different calls are *mismatched*. A rank that has begun the collective as well, or all of them, are
*stuck inside*: then the network or a device is at fault, or that process was stopped there.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shardwise.comm.board import Board
from shardwise.comm.meeting import text_of
from shardwise.comm.pulse import ENDED_WELL, Life, Pulse, Pulses

_MAX_RANKS = 256  # that one rank looks at: the store must serve all ranks that look
_MAX_SHOWN = 8
_COMPUTES = 0.1  # of the time between two looks: not asleep, on cores that others share
_SILENT = "it does not answer: stopped, dead, or in a call that does not let Python go on"
Record = Mapping[str, Any]


@dataclass
class Scene:
    """What the ranks do that one rank waits for, and those that they wait for in turn."""

    missing: dict[int, str] = field(default_factory=dict)  # what is said of each
    gone: list[int] = field(default_factory=list)  # those of them that will never come
    followers: list[int] = field(default_factory=list)  # and that ended as another one had
    waits: dict[int, Record] = field(default_factory=dict)
    came: dict[int, str] = field(default_factory=dict)  # with what, to calls of torch's
    elsewhere: list[int] = field(default_factory=list)  # of those that wait

    @property
    def ranks(self) -> list[int]:
        """Return all ranks that it is about."""
        return sorted({*self.missing, *self.waits})


def look_round(
    board: Board,
    pulses: Pulses,
    rank: int,
    record: Record,
    last_of: Callable[[int], str],
    near: int = _MAX_RANKS,
) -> Scene:
    """Walk from this rank's wait to all that keep it from ending.

    ``near``: how many ranks are looked at, those next to this one first. ``last_of`` names the last
    collective of a rank. **Cost** two requests to the store for each group of ranks on the way.
    """
    scene = Scene(waits={rank: record}, came={rank: record["came"]} if record["came"] else {})
    seen, todo = {rank}, [(rank, record)]
    while todo and len(seen) < near:
        at, waits = todo.pop(0)
        others = [
            r for r in nearest(waits.get("ranks") or waits["among"], at, near) if r not in seen
        ]
        seen.update(others)
        told: Mapping[int, Any] = dict.fromkeys(others, (None, None))
        with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
            told = board.scan(others)
        for other, (found, pulse) in told.items():
            if pulse is not None:
                pulses.hear(other, pulse)
            newest = pulses.newest(other)
            life, cause = pulses.life(other)
            failed = "failed" in found if found and record["trains"] else False
            came = (found or {}).get("came") or (newest.came if newest else "")
            if came and _kind(came) == _kind(record["came"]):
                scene.came[other] = came
            is_away = life in ("dead", "stopped", "silent") or (newest and newest.left)
            if found and not failed and not is_away and ("ranks" in found or "among" in found):
                scene.waits[other] = found
                if not _is_inside(waits, found):
                    scene.elsewhere.append(other)
                    todo.append((other, found))
                continue
            if failed or _will_not_come(newest, life, cause, waits):
                is_cause = not (newest and newest.left and newest.follows)
                (scene.gone if is_cause else scene.followers).append(other)
            how = said_of(other, found if failed else None, pulses, waits)
            scene.missing[other] = how + last_of(other)
    return scene


def nearest(ranks: Sequence[int], rank: int, most: int) -> list[int]:
    """Return other ranks of a group, those next to this one first."""
    at = ranks.index(rank) if rank in ranks else 0
    ordered = sorted(range(len(ranks)), key=lambda place: abs(place - at))
    return [ranks[place] for place in ordered if ranks[place] != rank][:most]


def said(scene: Scene) -> str:
    """Return the verdict about a scene, in sentences."""
    sentences: list[str] = []
    if len(set(scene.came.values())) > 1:
        came = (f"rank {rank} came with {what}" for rank, what in sorted(scene.came.items()))
        sentences.append(f"the ranks are mismatched: {', '.join(came)}")
    if scene.missing:
        told = scene.gone or list(scene.missing)
        sentences += [scene.missing[rank] for rank in told[:_MAX_SHOWN]]
        if len(told) > _MAX_SHOWN:
            sentences.append(f"and {len(told) - _MAX_SHOWN} more")
    elif scene.elsewhere and not sentences:
        sentences = ["the ranks are mismatched, each of them waits for others that are elsewhere"]
    elif not sentences:
        sentences = [
            "all ranks have begun it, and are stuck inside: a network or a device is slow, or hangs"
        ]
    by_text: dict[str, list[int]] = defaultdict(list)
    for rank, waits in sorted(scene.waits.items()):
        by_text[waits["text"]].append(rank)
    waiting = (f"{_named(ranks)} in {text}" for text, ranks in by_text.items())
    return f"{'; '.join(sentences)}. Waiting: {'; '.join(waiting)}"


def _kind(came: str) -> str:
    """Return which call of torch's it is, without what a rank has come with."""
    return came.partition(" of ")[0]


def _is_inside(waits: Record, other: Record) -> bool:
    """Tell whether a rank that waits does so in the same collective, or has it behind it."""
    if "ranks" not in waits:  # torch's own, whose count is not known
        return bool(other["key"] == waits["key"])
    return bool(other["begun"].get(waits["key"], 0) >= waits["number"])


def _will_not_come(pulse: Pulse | None, life: Life, cause: str, waits: Record) -> bool:
    """Tell whether a rank has ended, and something still needs it.

    Who has ended well may have done its part: of a message, or of a collective of other ranks. Only
    where all ranks must come to a call, and it has not, is it missed for good.
    """
    if life == "dead" and cause.startswith("signal"):
        return True
    left = pulse.left if pulse is not None else ""
    if (life != "dead" and not left) or (pulse is not None and _has_begun(pulse, waits)):
        return False
    return waits["needs_all"] or left not in ("", ENDED_WELL)


def said_of(rank: int, failed: Record | None, pulses: Pulses, waits: Record) -> str:
    """Return what is said of a rank that is missing in what ``waits`` waits in."""
    pulse = pulses.newest(rank)
    if failed is not None:
        return f"rank {rank} has failed: {failed['failed']}"
    if pulse is None:
        return f"rank {rank} is in no call of Shardwise, and does not answer: it may not have begun"
    who = f"rank {rank} ({pulse.process})"
    entered = "is stuck inside it too" if _has_begun(pulse, waits) else "has never entered it"
    life, cause = pulses.life(rank)
    if pulse.left == ENDED_WELL:
        return (
            f"{who} has ended without an error, after fewer collectives than this rank: if ranks "
            "have different numbers of batches, iterate over shardwise.join(model, batches)"
        )
    if pulse.left:
        return f"{who} has ended: {pulse.left}"
    if life == "dead":
        by = f"ended by {cause}" if cause else "killed or crashed, as its launcher's log may tell"
        if cause.startswith("signal 6 "):
            by += ", which is what gloo does to a rank that is sent more bytes than it expects"
        return f"{who} has died: {by}"
    if life == "stopped":
        return f"{who} {entered}: it is stopped (by SIGSTOP, or a debugger)"
    if life == "silent" or pulses.is_silent(rank):
        return f"{who} {entered}: {_SILENT}"
    moved, computed_s, since_s = pulses.moved(rank)
    state = f"and {entered.replace('it', 'this one', 1)}"
    if moved:
        state = "and is late: it has been in other collectives meanwhile"
    elif computed_s > _COMPUTES * since_s:
        state = f"and is late: it has computed for {computed_s:.1f} s meanwhile"
    place = f", but {pulse.where}," if pulse.where else ""
    return f"rank {rank} is in no call of Shardwise{place} {state} ({pulse.process})"


def _has_begun(pulse: Pulse, waits: Record) -> bool:
    if "ranks" not in waits:
        return False
    key = waits["key"]
    begun = max(pulse.begun.get(key, 0), pulse.number if pulse.last == key else 0)
    return bool(begun >= waits["number"])


def _named(ranks: Sequence[int]) -> str:
    more = f" ... ({len(ranks)} in all)" if len(ranks) > _MAX_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_MAX_SHOWN]))}{more}"


def last_collective(key: str) -> str:
    """Return what is said of a rank's last collective, by its key; nothing where none is known."""
    return f"; its last collective: {text_of(key)}" if key else ""
