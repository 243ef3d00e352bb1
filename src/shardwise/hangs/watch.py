"""Who waits for whom: notices of long waits, and an end to waits that can have none, or last long.

Note [A wait that has no end]
A collective needs all ranks of its group. If rank 0 waits in one that rank 1 has not begun, and
rank 1 waits in one that rank 0 has not begun, neither ever begins anything more. So a rank that
has waited for some seconds publishes, in the store of the process group, what it waits for and how
many collectives of each kind and unit it has begun; while it waits this cannot change. Who finds a
circle of ranks that wait for each other, all of them still in the same wait when they have looked
again, has a proof, however slow the machine or the network is. The wait is then broken off and
raises, with both ends of the circle named. Only waits of the main thread are looked at.

Note [A rank that has failed]
A rank whose disk or host memory fails raises, and comes to no gather or reduction of its model
before a load, which all ranks make. So it says in the store, before it raises, what has failed and
which collectives it has begun. Who waits in one that it has not begun, or for a rank that does,
breaks off as well and names that failure. What was said holds until the rank begins another
collective, as it has recovered then. Small exchanges (`control`) are left alone: loads, and saves
that tell all ranks of a failure, are made of them.

Note [Where a missing rank is]
Every second the watch of each rank says in the store which process it is, how much it has begun
and what last (`Pulse`). Who has waited for half of its patience asks those that wait for nobody
where they are; they add the lines that their main thread is in. What is known of whoever keeps a
wait from ending is one sentence of the verdict. A rank that has died, as the system or
its last word says, ends the waits for it at once; others end when the time is over (`watch`).

Note [A store that does not answer]
Rank 0 keeps the store where no launcher does. If it is stopped, and not dead, its connections stay
open, and a look never returns. So a second thread looks at the first: where a look has not returned
for half of the patience that `watch` was given, and a wait is over that patience, it ends the wait.
It asks nothing of the store, and says what was heard before.

Note [Breaking a wait off]
gloo's waits cannot be cancelled. But a receive that runs out of time closes the connections of its
group, and every wait on them raises. The group is of no use afterwards, and says so when it is
asked again. NCCL's waits block no thread of ours: its collectives are looked at as they fly, and
the group is aborted, so that its kernels end and the next call raises. A wait in torch's own calls
(waits.py) raises an error of torch: if it ends the program, what the watch has found is added to
it as a note, and stands in the log if the watch has ended the wait, or no hook has seen the error.

Note [One watch per process]
A process waits in one call at a time, whichever model it is for, so what it waits for is a fact of
the process, as its process groups are. One thread looks once a second, and costs nothing else.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.errors import CollectiveError, ConfigError, StorageError
from shardwise.hangs.diagnosis import Finder, said
from shardwise.hangs.heartbeat import ENDED_WELL, FAILED
from shardwise.hangs.meeting import Meeting, reason_of
from shardwise.hangs.waits import (
    Begun,
    Flights,
    StandingWaits,
    Wait,
    blocks,
    break_off,
    break_off_all,
    wait_of_error,
)

_LOG = logging.getLogger("shardwise")  # on standard error, unless the program says otherwise
AS_A_RULE = "As a rule another rank died, raised or ended first: its log has the cause"
_HEAR_EVERY = 10  # looks
_JOIN_S = 5.0
_LINGER_S = 1.5  # longer than between two looks of the others
_LEAST_S = 4.0  # a few looks: the missing are asked where they are


class Watch:
    """The waits of this process, and the thread that looks at them.

    ``limit_s`` ends a wait; None leaves that to the process group's timeout.
    """

    def __init__(self, look_every_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.look_every_s = look_every_s
        self.patience_s = patience_s
        self.limit_s: float | None = None
        self._begun = Begun()
        self._finder = Finder(self._begun, lambda: self._failure)
        self._waits: dict[int, Wait] = {}
        self._blocking: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._flights, self._standing = Flights(), StandingWaits()
        self._verdicts: dict[int, str] = {}
        self._failed: dict[int, tuple[Any, str]] = {}
        self._num_waits = 0
        self._thread: threading.Thread | None = None
        self._second: threading.Thread | None = None
        self._look_began_s: float | None = None  # of the look under way
        self._pid = 0  # of the process that looks: one that it forks ends by itself
        self._lost_store: dist.Store | None = None
        self._has_told_error = False
        self._stop = threading.Event()
        self._published = False
        self._looks = 0
        self._telling = threading.Lock()  # what is told is not taken back by who looks meanwhile
        self._failure: str | None = None  # what this rank has told, and not recovered from
        self._hook_before = sys.excepthook
        self._explained: BaseException | None = None
        self._last_word = "", "", False  # see `Pulse`: left, came, follows

    def refuse_failed(self, kind: str, group: Any) -> None:
        """Refuse a collective of a group on which an earlier one has failed.

        **Raises** CollectiveError with the first failure: some ranks have stopped where others have
        not, so the call might wait for what never comes.
        """
        if self._failed and (failed := self._failed.get(id(group))) is not None:
            raise CollectiveError(
                f"rank {dist.get_rank()}: {kind} is not possible any more, as an earlier call on "
                f"the same process group has failed: {failed[1]}. End this process and start again "
                "from a checkpoint"
            )

    def reason(self, group: Any) -> str | None:
        """Return why a collective of a group has failed; None where none has."""
        return self._failed.get(id(group), (None, None))[1]

    def begin(self, meeting: Meeting) -> int:
        """Count a collective that this rank begins; return its number."""
        if self._failure is not None and meeting.axis:  # small exchanges go on beside a failure
            self._failure = None
            with suppress(RuntimeError, ValueError):
                self._finder.board.clear()
        return self._begun.add(meeting)

    def enter(self, meeting: Meeting, number: int) -> None:
        """Note that this thread waits from now on."""
        self._num_waits += 1
        wait = Wait(meeting, number, time.monotonic(), self._num_waits)
        self._waits[threading.get_ident()] = wait
        self.start()

    def leave(self, ended: bool = False) -> None:
        """Note that this thread's wait is over; ``ended``: the collective is."""
        wait = self._waits.pop(threading.get_ident(), None)
        if ended and wait is not None:
            self._begun.end(wait.meeting, wait.number)

    def fly(self, meeting: Meeting, number: int, works: Sequence[Any]) -> None:
        """Note a collective that no thread will wait for, as its device does; see `Flights`."""
        if not self._blocks(meeting.group):
            self._flights.begin(Wait(meeting, number, time.monotonic(), -1), works)
            self.start()

    def _blocks(self, group: Any) -> bool:
        found = self._blocking.get(group)
        if found is None:
            found = self._blocking[group] = blocks(group)
        return found

    @contextmanager
    def waiting(self, meeting: Meeting) -> Iterator[None]:
        """Begin a collective that blocks, and wait for it inside."""
        self.refuse_failed(meeting.text, meeting.group)
        self.enter(meeting, self.begin(meeting))
        ended = False
        try:
            yield
            ended = True
        finally:
            self.leave(ended)

    def fail(self, meeting: Meeting, reason: str) -> str:
        """Note that a group has failed; return why, which may be what the watch has found."""
        found = self._verdicts.pop(threading.get_ident(), None)
        if found is None:
            is_deaf = self._is_deaf(self._late_s())
            found = self._finder.cause(meeting, reason, has_store=not is_deaf)
        self.leave_group(meeting, found)
        if found.startswith(FAILED):
            self.tell_failure(found)  # to those who wait for this rank in another group
        return found

    def leave_group(self, meeting: Meeting, reason: str) -> None:
        """Note that this rank makes no more collectives of a group."""
        self._failed.setdefault(id(meeting.group), (meeting.group, reason))

    def tell_failure(self, text: str) -> None:
        """Tell ranks that wait for this one, or will, what it has failed with, before it raises.

        See Note [A rank that has failed]. **Cost** a message to the store.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with self._telling, suppress(RuntimeError, ValueError):  # the group, or its store, is gone
            self._failure = text
            self._finder.board.publish({"failed": text, "begun": dict(self._begun.counts)})

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Tell of a StorageError that is raised inside, to the caller of the model."""
        try:
            yield
        except StorageError as failure:
            self.tell_failure(str(failure))
            raise

    def start(self) -> None:
        """Look from now on, if that was not begun yet."""
        if self._thread is not None or not dist.is_initialized():
            return
        with suppress(RuntimeError, ValueError):  # now: the store may end before this process does
            self._finder.begin(self.look_every_s)
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        self._thread.start()
        look = self._run_second
        self._second = threading.Thread(target=look, name="shardwise-watch-2", daemon=True)
        self._second.start()
        atexit.register(self._leave_word)
        self._hook_before, sys.excepthook = sys.excepthook, self._note

    def _run(self) -> None:
        while not self._stop.wait(self.look_every_s):
            if not dist.is_initialized():
                continue
            store = None
            try:
                store = dist.distributed_c10d._get_default_store()
                if store is self._lost_store:  # asking again would print a stack of C++ each time
                    continue
                self._look_began_s = time.monotonic()
                self._look()
            except dist.DistNetworkError:  # rank 0 may have kept it, and has ended
                self._lost_store = store
            except (RuntimeError, ValueError, KeyError):  # the process group is gone
                self._published = False
            except Exception:
                if not self._has_told_error:
                    self._has_told_error = True
                    _LOG.exception("shardwise: the watch of rank %d has failed", dist.get_rank())
            finally:
                self._look_began_s = None

    def _run_second(self) -> None:
        """Look at the first thread; see Note [A store that does not answer]."""
        while not self._stop.wait(self.look_every_s):
            now, late_s = time.monotonic(), self._late_s()
            if not late_s:
                continue
            main = threading.main_thread().ident or 0
            wait = self._waits.get(main) or self._standing.look() or self._late_flight(now)
            waited_s = 0.0 if wait is None else now - wait.begun_s
            if wait is not None and self._is_deaf(late_s) and waited_s >= (self.limit_s or 0):
                with suppress(RuntimeError, ValueError, KeyError):  # the process group is gone
                    over = f"it has not ended in {waited_s:.0f} s, and "
                    self._end(main, wait, over + self._finder.without_store(wait), tells=False)

    def _late_s(self) -> float:
        began_s = self._look_began_s
        late_s = 0.0 if began_s is None else time.monotonic() - began_s
        return late_s if late_s > 2 * self.look_every_s else 0.0

    def _is_deaf(self, late_s: float) -> bool:
        """Tell whether a look is late by so much that the store is taken to answer nobody."""
        return self.limit_s is not None and late_s >= self.limit_s / 2

    def _look(self) -> None:
        main = threading.main_thread().ident or 0
        standing = None if main in self._waits else self._standing.look()
        self._finder.beat(self.look_every_s, *self._last_word)
        self._looks += 1
        if self._looks % _HEAR_EVERY == 1 or self._looks < _HEAR_EVERY / 2:
            self._finder.hear()
        now = time.monotonic()
        waits = [
            (t, w) for t, w in list(self._waits.items()) if now - w.begun_s > self.look_every_s
        ]
        mine = next((w for t, w in waits if t == main), None)
        if mine is None and main not in self._waits:
            mine = standing or self._late_flight(now)
            waits += [(main, mine)] if mine is not None else []
        if mine is None:
            with self._telling:
                if self._published and self._failure is None:
                    self._finder.board.clear()
                    self._published = False
        else:
            mine.looks += 1
            self._finder.board.publish(self._finder.record(mine))
            self._published = True
            self._judge(main, mine)
        for thread, wait in waits:
            self._remind(thread, wait)

    def _late_flight(self, now: float) -> Wait | None:
        flying = self._flights.oldest()
        return flying if flying is not None and now - flying.begun_s > self.look_every_s else None

    def _judge(self, main: int, wait: Wait) -> None:
        """End a wait whose end is known: a circle, a rank that is gone, a time that is over."""
        group = wait.meeting.group_name
        verdict = self._finder.board.told_of(group) if group else None
        if verdict is None and wait.number:
            verdict = self._finder.circle(wait)
        if verdict is None and wait.looks > 1:
            verdict = self._finder.told(wait)
        if verdict is None and wait.looks > 1:
            limit_s = self._finder.limit_s(wait, self.limit_s)
            verdict = self._finder.gone_or_over(wait, limit_s)
        if verdict is not None:
            self._end(main, wait, verdict)

    def _end(self, thread: int, wait: Wait, verdict: str, tells: bool = True) -> None:
        """Break off a wait that cannot end, as this rank has found, or another one of its group.

        Who has found it may be gone, and gloo wakes nobody who waits for a third rank. ``tells``:
        others are told by the store.
        """
        meeting = wait.meeting
        if self._waits.get(thread) is wait:
            if thread not in self._verdicts:
                self._verdicts[thread] = verdict
                break_off(meeting.group)
        elif wait.serial < 0 and not wait.over:  # in no call of ours, which would raise it
            wait.over = True
            who = f"rank {dist.get_rank()}: {wait.text(thread)}"
            _LOG.error("shardwise: %s failed: %s", who, verdict)
            self._failed.setdefault(id(meeting.group), (meeting.group, verdict))
            if tells:
                self._finder.pass_on(meeting, verdict)
            break_off_all()

    def _remind(self, thread: int, wait: Wait) -> None:
        """Ask the missing where they are, and say once that a wait is long."""
        waited_s = time.monotonic() - wait.begun_s
        limit_s = self._finder.limit_s(wait, self.limit_s)
        if waited_s > min(self.patience_s, limit_s or self.patience_s) / 2:
            if not wait.missing:
                self._finder.scene(wait)
            for other in wait.missing:
                self._finder.board.ask(other)
        if wait.told or wait.over or waited_s <= self.patience_s:
            return
        wait.told = True
        _LOG.warning(
            "shardwise: rank %d has waited %.0f s in %s: %s. Every rank must make this call",
            *(dist.get_rank(), self.patience_s, wait.text(thread)),
            said(self._finder.scene(wait)),
        )

    def _leave_word(self) -> None:
        """Say how this rank's program has ended, and what a call of torch's has failed of."""
        if os.getpid() != self._pid or self._thread is None or self._second is None:
            return
        self._stop.set()  # a thread that is in a call of C++ as Python ends would abort
        self._thread.join(0 if self._late_s() else _JOIN_S)
        self._second.join(_JOIN_S)
        if not self._is_one_of_several():
            return
        has_store = not self._thread.is_alive()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with suppress(Exception):  # whatever is gone by now: the error itself has been told
            if error is not None:
                told = [reason for _, reason in self._failed.values()]
                verdict = self._explain(error, has_store)
                if verdict is not None and not any(reason in verdict for reason in told):
                    _LOG.error("shardwise: %s", verdict)
                if has_store and dist.get_rank() == 0:  # which may keep the store that others read
                    time.sleep(_LINGER_S)
            elif has_store:
                self._finder.beat(self.look_every_s, ENDED_WELL)

    def _is_one_of_several(self) -> bool:
        is_ranks = dist.is_initialized() and self._pid == os.getpid()  # not of a fork
        return is_ranks and dist.get_world_size() > 1

    def _explain(self, error: BaseException, has_store: bool) -> str | None:
        """Say what this program ends of; return once why a call of torch's has failed."""
        if error is self._explained or not self._is_one_of_several():
            return None
        self._explained = error
        follows = isinstance(error, CollectiveError)
        call = None
        if isinstance(error, RuntimeError) and not follows:
            call = wait_of_error(error)
        name = type(error).__name__
        if call is None:
            self._last_word = f"{name}: {reason_of(error)}", "", follows
        else:
            self._last_word = f"{name} in {call.text}", call.text, True
        if has_store:
            with suppress(RuntimeError, ValueError):  # it may have ended with rank 0
                self._finder.beat(self.look_every_s, *self._last_word)
        if call is None:
            return None
        cause = self.reason(call.group)
        if cause is None:
            meeting = Meeting(call.call, "", 0, "torch", call.group)
            cause = self._finder.cause(meeting, reason_of(error), call, has_store)
        return f"rank {dist.get_rank()}: {call.text} failed: {cause}"

    def _note(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Add why a call of torch's has failed to an error that ends the program, and print it."""
        with suppress(Exception):  # the error itself must be told
            verdict = self._explain(error, not self._late_s())
            if verdict is not None:
                error.add_note(verdict)
        self._hook_before(kind, error, trace)


def watch(hang_timeout: float | None) -> None:
    """Name who is missing, and end the wait, where one lasts ``hang_timeout`` seconds.

    It holds for this process and all its models, those of `fully_shard` too, and for the calls of
    torch.distributed that the loop makes itself; call it on every rank after
    ``init_process_group``. None leaves it to the timeout of the process group. Ranks that are late
    by more than this end the run: choose several times the longest step, save or evaluation.

    **Cost** a look a second, by a thread. **Raises** ConfigError for what is no time.
    """
    WATCH.limit_s = checked_timeout(hang_timeout)
    WATCH.start()


def checked_timeout(hang_timeout: object) -> float | None:
    """Return a time that a wait may last. **Raises** ConfigError for what is none."""
    if hang_timeout is None:
        return None
    if not isinstance(hang_timeout, int | float) or not hang_timeout >= _LEAST_S:
        raise ConfigError(
            f"hang_timeout={hang_timeout!r}: expected {_LEAST_S:g} seconds or more, or "
            "None for the timeout of the process group"
        )
    return float(hang_timeout)


WATCH = Watch()
