"""Finds the ranks that are missing in a collective, by a walk from rank to rank over the store.

Note [Four words]
A missing rank has *never entered* the collective: dead, stopped, or in the same line since. Or it
is *late*: at work, as it has computed or begun other collectives meanwhile. Ranks that wait in
different calls are *mismatched*. A rank that has begun the collective as well, or all of them, are
*stuck inside*: then the network or a device is at fault, or that process was stopped there.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise.comm.meeting import Meeting, name_ranks, text_of
from shardwise.comm.pulse import ENDED_WELL, FAILED, Board, Pulse, Pulses, blame
from shardwise.comm.waits import (
    Begun,
    TorchWait,
    Wait,
    blocks,
    computed_s,
    lines_of_main,
    num_begun,
    timeout_s_of,
)
from shardwise.processes import Life

_MAX_RANKS = 256  # that one rank looks at: the store must serve all ranks that look
_MAX_SHOWN = 8
_COMPUTES = 0.1  # of the time between two looks: not asleep, on cores that others share
_SILENT = "it does not answer: stopped, dead, or in a call that does not let Python go on"
_NEAR = 32  # ranks that are looked at each second, of a group that is waited in
_ASKED_LOOKS = 10  # for so long a rank says more than it does unasked
_FIND_OUT_S = 3.0  # for a failed collective's cause: its rank may be about to say it
_POLL_S = 0.1
_REMEDY = (
    "Every rank must make the same calls and run the same units in the same order. Where ranks may "
    "skip layers (layerdrop, stochastic depth, experts, a head per task), name them: "
    "shard(..., units=Units(optional=[...])); stages 0 to 2 need no such list"
)
Record = Mapping[str, Any]
_OTHERS: Record = {"among": (), "needs_all": False}  # what a rank is needed in by other groups


@dataclass
class Scene:
    """What the ranks do that one rank waits for, and those that they wait for in turn."""

    missing: dict[int, str] = field(default_factory=dict)  # what is said of each
    gone: list[int] = field(default_factory=list)  # those of them that will never come
    followers: list[int] = field(default_factory=list)  # and that ended as another one had
    unsaid: list[int] = field(default_factory=list)  # and that died, or ended well, without a word
    waits: dict[int, Record] = field(default_factory=dict)
    came: dict[int, str] = field(default_factory=dict)  # with what, to calls of torch's
    elsewhere: list[int] = field(default_factory=list)  # of those that wait

    @property
    def ranks(self) -> list[int]:
        """Return all ranks that it is about."""
        return sorted({*self.missing, *self.waits})


class Finder:
    """This rank's side of the store: what it says, what it has heard, what follows from that."""

    def __init__(self, begun: Begun, failure: Callable[[], str | None]) -> None:
        self._begun = begun
        self._failure = failure
        self._board: tuple[dist.Store, Board] | None = None
        self._pulses = Pulses(1.0)
        self._looks, self._asked_until = 0, 0
        self._suspected: dict[int, dict[str, Any]] = {}

    @property
    def board(self) -> Board:
        """The board of the process group that there is now. **Raises** ValueError without one."""
        store = dist.distributed_c10d._get_default_store()
        if self._board is None or self._board[0] is not store:
            self._board = store, Board(store)
            self._pulses = Pulses(self._pulses.look_every_s)  # of other processes
        return self._board[1]

    def begin(self, look_every_s: float) -> None:
        """Say that this rank is there."""
        self._pulses = Pulses(look_every_s)
        self.board.clear()
        self.beat(look_every_s)

    def beat(
        self, look_every_s: float, left: str = "", came: str = "", follows: bool = False
    ) -> None:
        """Say what this rank is at, and more if it was asked; ``left`` as its last word."""
        self._pulses.look_every_s = look_every_s
        self._looks += 1
        if self.board.was_asked():
            self._asked_until = self._looks + _ASKED_LOOKS
        asked = self._looks < self._asked_until
        key, number = self._begun.order[-1] if self._begun.order else ("", 0)
        self.board.beat(
            Pulse(
                beat=self._looks,
                process=self._pulses.process,
                last=key,
                number=number,
                changes=self._begun.total + num_begun(),
                computed_s=computed_s(),
                where=lines_of_main() if asked else "",
                begun=dict(self._begun.counts) if asked or left else {},
                left=left,
                follows=follows,
                came=came,
            )
        )

    def hear(self) -> None:
        """Learn which processes the others are, before the store may end with one of them."""
        ended = list(self._begun.ended.values())
        ranks = {r for e in ended for r in nearest(e.ranks, dist.get_rank(), _NEAR)}
        for _ in _scan(self.board, self._pulses, sorted(ranks | {0})):
            pass

    def record(self, wait: Wait) -> dict[str, Any]:
        """Return what this rank says of a wait of its main thread."""
        failure = self._failure()
        failed = {} if failure is None else {"failed": failure}
        return failed | {
            "serial": wait.serial,
            "look": wait.looks,
            "trains": bool(wait.meeting.axis or wait.meeting.about),
            "key": wait.meeting.key,
            "number": wait.number,
            "among" if wait.call else "ranks": list(wait.ranks),
            "needs_all": wait.call is None or wait.call.needs_all,
            "text": wait.text(threading.main_thread().ident or 0),
            "came": wait.call.text if wait.call else "",
            "begun": dict(self._begun.counts),
        }

    def told(self, wait: Wait) -> str | None:
        """Return what another rank has found of a wait, or of one in it; None without that.

        Replicas wait for a rank of the circle in a group of their own: it fails with that rank.
        """
        ranks = nearest(wait.ranks, dist.get_rank(), _NEAR)
        try:
            return self.board.told(wait.meeting, [dist.get_rank(), *ranks])
        except dist.DistNetworkError:
            raise
        except (RuntimeError, ValueError):  # the process group, or its store, is gone
            return None

    def circle(self, wait: Wait) -> str | None:
        """Return what to say of a circle that this rank is in or waits for; None without one."""
        rank = dist.get_rank()
        found = self.board.circle(rank, self.record(wait))
        failed = next((w["failed"] for r, w in found.items() if r != rank and "failed" in w), None)
        if failed is not None:
            return blame(failed)
        before = self._suspected
        if {r: w["serial"] for r, w in found.items()} != {
            r: w["serial"] for r, w in before.items()
        }:
            self._suspected = before = found
        if not found or any(found[r]["look"] == before[r]["look"] for r in found):
            return None  # somebody has not looked again yet, and may have gone on meanwhile
        parts = [f"rank {r} waits in {found[r]['text']}" for r in sorted(found)]
        verdict = f"{', and '.join(parts)}, for each other. {_REMEDY}"
        self.board.tell(wait.meeting.group_name, sorted(found), verdict)
        return verdict

    def scene(self, wait: Wait, near: int | None = None) -> Scene:
        """Return who keeps a wait from ending; ``near``: looking at so many ranks."""
        looked = self._pulses, dist.get_rank(), self.record(wait), self._last_of
        found = look_round(self.board, *looked, *(() if near is None else (near,)))
        wait.missing = tuple(found.missing)
        return found

    def _last_of(self, rank: int) -> str:
        pulse = self._pulses.newest(rank)
        key = self._begun.last_of(rank, None if pulse is None else (pulse.last, pulse.number))
        return f"; its last collective: {text_of(key)}" if key else ""

    def gone_or_over(self, wait: Wait, limit_s: float | None) -> str | None:
        """Return what to say of a wait for who will not come, or that is over; None of others."""
        waited_s = time.monotonic() - wait.begun_s
        is_over = limit_s is not None and waited_s >= limit_s
        scene = self.scene(wait, None if is_over else _NEAR)
        if wait.looks == 2:
            self._pulses.forget()  # what the others do from now on is what counts
        if not is_over and not scene.gone:
            return None
        why = FAILED if scene.gone else f"it has not ended in {waited_s:.0f} s: "
        verdict = why + said(scene)
        self._tell(wait.meeting, scene, verdict)
        return verdict

    def without_store(self, wait: Wait) -> str:
        """Return what to say of a wait that is over while the store answers nobody.

        As a rule the store is rank 0's then, and that is stopped, as the system can tell.
        """
        record = self.record(wait)
        scene = Scene(waits={dist.get_rank(): record})
        if dist.get_rank() != 0 and self._pulses.life(0)[0] != "alive":
            scene.missing[0] = said_of(0, None, self._pulses, record) + self._last_of(0)
        else:
            scene.missing[0] = "nobody can say who is missing"
        silent = (
            "the store of the process group does not answer, which rank 0 or the launcher keeps"
        )
        return f"{silent}: {said(scene)}"

    def _tell(self, meeting: Meeting, scene: Scene, verdict: str) -> None:
        # After a small exchange ranks may go on, and what is told of ranks stays: it alone is told.
        self.board.tell(meeting.group_name, scene.ranks if meeting.axis else (), verdict)

    def limit_s(self, wait: Wait, asked_s: float | None) -> float | None:
        """Return when a wait is broken off; None where its own timeout ends it, and is told."""
        if not wait.meeting.axis:  # small exchanges end by themselves
            return None if asked_s is None else asked_s + self._pulses.look_every_s
        if asked_s is not None or (wait.call is None and blocks(wait.meeting.group)):
            return asked_s
        own_s = timeout_s_of(wait.meeting.group)
        return None if own_s is None else own_s - 3 * self._pulses.look_every_s

    def pass_on(self, meeting: Meeting, verdict: str) -> None:
        """Tell those who wait for this rank, or in this collective, what it has failed of."""
        with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
            self.board.tell(meeting.group_name, [dist.get_rank()], verdict)

    def cause(
        self, meeting: Meeting, reason: str, call: TorchWait | None = None, has_store: bool = True
    ) -> str:
        """Return why a collective has failed: what was told of it, or who is gone; else ``reason``.

        A rank that is about to die, or to say why it has ended, is waited for, but not long.
        ``has_store``: the store answers.
        """
        wait = Wait(meeting, self._begun.counts[meeting.key], time.monotonic(), -1, call=call)
        if not has_store:
            return f"{reason}; {self.without_store(wait)}"
        try:
            num_ranks = len(wait.ranks)
        except (KeyError, ValueError):  # the group is gone, and with it whoever could be missing
            return reason
        timed_out = "imed out" in reason or "did not come within" in reason
        scene, heard = Scene(), dict[int, int]()
        while has_store and time.monotonic() - wait.begun_s < _FIND_OUT_S:
            try:
                told = self.told(wait)
            except dist.DistNetworkError:  # what was heard before is all that will be known
                told, has_store = None, False
            if told is not None:
                self.pass_on(meeting, told)
                return told
            with suppress(ValueError):
                scene = self.scene(wait)
                scene.gone = scene.gone or scene.unsaid
            num_gone = len(scene.gone) + len(scene.followers)
            if timed_out or (scene.gone and (call is None or num_gone == num_ranks - 1)):
                break
            if scene.missing and self._all_well(scene, heard):
                return reason
            time.sleep(_POLL_S)
        if not timed_out and not scene.gone:
            return reason
        why = FAILED if scene.gone else f"{reason}. "
        verdict = why + said(scene)
        with suppress(RuntimeError, ValueError):
            self._tell(meeting, scene, verdict)
        return verdict

    def _all_well(self, scene: Scene, heard: dict[int, int]) -> bool:
        """Tell whether all others have spoken twice since this was first asked."""
        newest = {
            rank: self._pulses.newest(rank) for rank in scene.ranks if rank != dist.get_rank()
        }
        beats = {rank: pulse.beat for rank, pulse in newest.items() if pulse is not None}
        for rank, beat in beats.items():
            heard.setdefault(rank, beat)
        return len(beats) == len(newest) and all(beats[r] >= heard[r] + 2 for r in beats)


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
        for other, found, newest in _scan(board, pulses, others):
            life, cause = pulses.life(other)
            failed = "failed" in found if found and record["trains"] else False
            came = (found or {}).get("came") or (newest.came if newest else "")
            if came and came.partition(" of ")[0] == record["came"].partition(" of ")[0]:
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
            elif life == "dead" and not (cause or (newest and newest.left)):
                scene.unsaid.append(other)
            how = said_of(other, found if failed else None, pulses, waits)
            scene.missing[other] = how + last_of(other)
    if scene.followers and not scene.gone:
        _find_first(scene, board, pulses, rank, last_of)
    return scene


def _find_first(
    scene: Scene, board: Board, pulses: Pulses, rank: int, last_of: Callable[[int], str]
) -> None:
    """Add the ranks of other groups that the followers' errors come from, in the end.

    A victim ends, and takes with it ranks that have no group with the rank that died.
    """
    others = [r for r in nearest(range(board.num_ranks), rank, _MAX_RANKS) if r not in scene.ranks]
    for other, found, newest in _scan(board, pulses, others):
        failed = found if found and "failed" in found else None
        if newest is None:
            continue
        life, cause = pulses.life(other)
        if failed or (_will_not_come(newest, life, cause, _OTHERS) and not newest.follows):
            scene.gone.append(other)
        elif life == "dead" and not (cause or newest.left):
            scene.unsaid.append(other)
        else:
            continue
        scene.missing[other] = said_of(other, failed, pulses, _OTHERS) + last_of(other)
    scene.gone = scene.gone or scene.unsaid


def _scan(
    board: Board, pulses: Pulses, ranks: Sequence[int]
) -> Iterator[tuple[int, Record | None, Pulse | None]]:
    """Yield each rank with its record and its newest pulse, which ``pulses`` has heard by then."""
    told: Mapping[int, Any] = dict.fromkeys(ranks, (None, None))
    with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
        told = board.scan(ranks)
    for rank, (found, pulse) in told.items():
        if pulse is not None:
            pulses.hear(rank, pulse)
        yield rank, found, pulses.newest(rank)


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
    waiting = (f"{name_ranks(ranks)} in {text}" for text, ranks in by_text.items())
    return f"{'; '.join(sentences)}. Waiting: {'; '.join(waiting)}"


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
    left = pulse.left if pulse is not None else ""
    if life == "dead" and cause.startswith("signal"):
        return True
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
            "have different numbers of batches, iterate over "
            "shardwise.parallel.join(model, batches)"
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
    moved, core_s, since_s = pulses.moved(rank)
    state = f"and {entered.replace('it', 'this one', 1)}"
    if moved:
        state = "and is late: it has been in other collectives meanwhile"
    elif core_s > _COMPUTES * since_s:
        state = f"and is late: it has computed for {core_s:.1f} s meanwhile"
    place = f", but {pulse.where}," if pulse.where else ""
    return f"rank {rank} is in no call of Shardwise{place} {state} ({pulse.process})"


def _has_begun(pulse: Pulse, waits: Record) -> bool:
    if "ranks" not in waits:
        return False
    key = waits["key"]
    begun = max(pulse.begun.get(key, 0), pulse.number if pulse.last == key else 0)
    return bool(begun >= waits["number"])
