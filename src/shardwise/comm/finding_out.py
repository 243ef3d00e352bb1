"""What the watch of a rank says in the store, and finds out there about others."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from shardwise.comm import missing, stacks
from shardwise.comm.board import FAILED, Board, blame
from shardwise.comm.breaking import blocks, timeout_s_of
from shardwise.comm.meeting import Meeting
from shardwise.comm.pulse import Pulse, Pulses
from shardwise.comm.stacks import TorchWait
from shardwise.comm.waits import Begun, Wait

_NEAR = 32  # ranks that are looked at each second, of a group that is waited in
_ASKED_LOOKS = 10  # for so long a rank says more than it does unasked
_FIND_OUT_S = 3.0  # for a failed collective's cause: its rank may be about to say it
_POLL_S = 0.1
_REMEDY = (
    "Every rank must make the same calls and run the same units in the same order. Where ranks may "
    "skip layers (layerdrop, stochastic depth, experts, a head per task), name them: "
    "shard(..., optional=[...]); stages 0 to 2 need no such list"
)


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
        key, number = self._begun.last
        self.board.beat(
            Pulse(
                beat=self._looks,
                process=self._pulses.process,
                last=key,
                number=number,
                changes=self._begun.total + stacks.num_begun(),
                computed_s=stacks.computed_s(),
                where=stacks.lines_of_main() if asked else "",
                begun=dict(self._begun.counts) if asked or left else {},
                left=left,
                follows=follows,
                came=came,
            )
        )

    def hear(self) -> None:
        """Learn which processes the others are, before the store may end with one of them."""
        ended = list(self._begun.ended.values())
        ranks = {r for e in ended for r in missing.nearest(e.ranks, dist.get_rank(), _NEAR)}
        for rank, (_, pulse) in self.board.scan(sorted(ranks | {0})).items():
            if pulse is not None:
                self._pulses.hear(rank, pulse)

    def record(self, wait: Wait) -> dict[str, Any]:
        """Return what this rank says of a wait of its main thread."""
        failure = self._failure()
        failed = {} if failure is None else {"failed": failure}
        return failed | {
            "serial": wait.serial,
            "look": wait.looks,
            "trains": bool(wait.meeting.axis),
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
        ranks = missing.nearest(wait.ranks, dist.get_rank(), _NEAR)
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

    def scene(self, wait: Wait, near: int | None = None) -> missing.Scene:
        """Return who keeps a wait from ending; ``near``: looking at so many ranks."""
        looked = self._pulses, dist.get_rank(), self.record(wait), self._last_of
        found = missing.look_round(self.board, *looked, *(() if near is None else (near,)))
        wait.missing = tuple(found.missing)
        return found

    def _last_of(self, rank: int) -> str:
        pulse = self._pulses.newest(rank)
        said = None if pulse is None else (pulse.last, pulse.number)
        return missing.last_collective(self._begun.last_of(rank, said))

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
        verdict = why + missing.said(scene)
        self._tell(wait.meeting, scene, verdict)
        return verdict

    def without_store(self, wait: Wait) -> str:
        """Return what to say of a wait that is over while the store answers nobody.

        As a rule the store is rank 0's then, and that is stopped, as the system can tell.
        """
        record = self.record(wait)
        scene = missing.Scene(waits={dist.get_rank(): record})
        if dist.get_rank() != 0 and self._pulses.life(0)[0] != "alive":
            scene.missing[0] = missing.said_of(0, None, self._pulses, record) + self._last_of(0)
        else:
            scene.missing[0] = "nobody can say who is missing"
        return (
            "the store of the process group does not answer, which rank 0 or the launcher keeps: "
            + missing.said(scene)
        )

    def _tell(self, meeting: Meeting, scene: missing.Scene, verdict: str) -> None:
        """Publish a verdict; one about a small exchange, after which ranks may go on, to it alone.

        What is told of ranks stands for as long as the program.
        """
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

    def cause(self, meeting: Meeting, reason: str, call: TorchWait | None = None) -> str:
        """Return why a collective has failed: what was told of it, or who is gone; else ``reason``.

        A rank that is about to die, or to say why it has ended, is waited for, but not long.
        """
        wait = Wait(meeting, self._begun.counts[meeting.key], time.monotonic(), -1, call=call)
        try:
            num_ranks = len(wait.ranks)
        except (KeyError, ValueError):  # the group is gone, and with it whoever could be missing
            return reason
        timed_out = "imed out" in reason or "did not come within" in reason
        scene, heard = missing.Scene(), dict[int, int]()
        has_store = True
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
            num_gone = len(scene.gone) + len(scene.followers)
            if timed_out or (scene.gone and (call is None or num_gone == num_ranks - 1)):
                break
            if scene.missing and self._all_well(scene, heard):
                return reason
            time.sleep(_POLL_S)
        if not timed_out and not scene.gone:
            return reason
        why = FAILED if scene.gone else f"{reason}. "
        verdict = why + missing.said(scene)
        with suppress(RuntimeError, ValueError):
            self._tell(meeting, scene, verdict)
        return verdict

    def _all_well(self, scene: missing.Scene, heard: dict[int, int]) -> bool:
        """Tell whether all others have spoken twice since this was first asked."""
        newest = {
            rank: self._pulses.newest(rank) for rank in scene.ranks if rank != dist.get_rank()
        }
        beats = {rank: pulse.beat for rank, pulse in newest.items() if pulse is not None}
        for rank, beat in beats.items():
            heard.setdefault(rank, beat)
        return len(beats) == len(newest) and all(beats[r] >= heard[r] + 2 for r in beats)
