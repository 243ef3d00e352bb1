"""The watch of a process: notices of long waits, and an end to waits that cannot end, or last long.

Note [Verdicts]
Once a second a thread publishes this rank's heartbeat, and judges the wait of the main thread. A
wait ends with a verdict if it is in a circle, see Note [A wait that has no end]; if a rank that it
needs has died or failed; or if it has lasted for the limit of `watch`. The verdict is published, so
that all ranks of the group raise it. The wait is broken off, see Note [Aborting a group].

Note [A rank that has failed]
A rank whose disk or host memory fails raises, and comes to no collective of its model before a
load, which all ranks make. So it publishes the failure before it raises, and waits for it end. The
failure holds until the rank begins another collective: then it has recovered. Small exchanges
(`control`) work beside a failure: loads, and saves that report one on all ranks, are made of them.

Note [A store that does not answer]
Rank 0 keeps the store if no launcher does. If rank 0 is stopped, and not dead, its connections stay
open and a request to the store never returns. So a second thread looks at the first. If a look has
not returned for half of the limit, and a wait is over the limit, the second thread ends the wait.
It asks nothing of the store, and reports the heartbeats that were read before.

Note [Errors of torch's own calls]
A wait in torch's own calls raises an error of torch. If that ends the program, the verdict is added
to the error as a note. It stands in the log if the watch has ended the wait, or no hook saw the
error.
"""

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, reason_of
from shardwise.comm.listener import WAITS, Listener
from shardwise.comm.process_groups import FAILED_GROUPS, abort, abort_all, waits_block
from shardwise.errors import CollectiveError
from shardwise.hangs.diagnosis import HangFinder, describe_waits
from shardwise.hangs.heartbeat import ENDED_WELL, FAILED
from shardwise.hangs.waits import AsyncCollectives, StalledCalls, Wait, call_of_error

_LOG = logging.getLogger("shardwise")  # on standard error, unless the program says otherwise
_HEAR_EVERY = 10  # looks
_JOIN_S = 5.0
_LINGER_S = 1.5  # longer than the time between two looks of the others


def watch(hang_timeout: float | None) -> None:
    """End waits that last ``hang_timeout`` seconds, and name the ranks that are missing.

    It holds for this process and all its models, those of `fully_shard` too, and for the calls of
    torch.distributed that the loop makes itself. Call it on every rank after
    ``init_process_group``. None leaves the end to the timeout of the process group. A rank that is
    later than this ends the run: choose several times the longest step, save or evaluation.

    **Cost** a look a second, by a thread. **Raises** ConfigError for less than 4 seconds.
    """
    WAITS.set_limit(hang_timeout)


class Watch(Listener):
    """The listener to this process's collectives, and the thread that looks at their waits."""

    def __init__(self, look_every_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.look_every_s = look_every_s
        self.patience_s = patience_s
        self.finder = HangFinder()
        self._waits: dict[int, Wait] = {}  # by thread
        self._num_waits = 0
        self._async, self._stalled = AsyncCollectives(), StalledCalls()
        self._blocking: WeakKeyDictionary[dist.ProcessGroup | None, bool] = WeakKeyDictionary()
        self._verdicts: dict[int, str] = {}  # of waits that were broken off, by thread
        self._threads: list[threading.Thread] = []
        self._pid = 0  # of the process that runs the threads: they do not run in its forks
        self._stop = threading.Event()
        self._look_began_s: float | None = None  # of the look under way
        self._lost_store: dist.Store | None = None
        self._num_looks = 0
        self._has_logged_error = False
        self._explained: BaseException | None = None
        self._hook_before = sys.excepthook

    def start(self) -> None:
        """Start the threads, if they do not run."""
        if self._threads or not dist.is_initialized():
            return
        with suppress(RuntimeError, ValueError):  # now: the store may end before this process does
            self.finder.start(self.look_every_s)
        self._pid = os.getpid()
        for run in (self._look_regularly, self._look_at_looks):
            self._threads.append(threading.Thread(target=run, name="shardwise-watch", daemon=True))
            self._threads[-1].start()
        atexit.register(self._report_exit)
        self._hook_before, sys.excepthook = sys.excepthook, self._annotate

    # Calls of the threads that make collectives.
    def begin(self, key: CollectiveKey) -> int:
        """Count a collective that begins; return its number among those of its key."""
        if self.finder.failure and key.axis:  # a small exchange is no recovery
            self.finder.failure = ""
            with suppress(RuntimeError, ValueError):
                self.finder.publish()
        return self.finder.counts.begin(key)

    def launch(self, key: CollectiveKey, number: int, works: Sequence[dist.Work]) -> None:
        """Note a collective that runs on a device, see `AsyncCollectives`."""
        blocks = self._blocking.get(key.group)
        if blocks is None:
            blocks = self._blocking[key.group] = waits_block(key.group)
        if not blocks:
            self._async.add(Wait(key, number, time.monotonic()), works)
            self.start()

    def enter(self, key: CollectiveKey, number: int) -> None:
        """Note that this thread waits from now on."""
        self._num_waits += 1
        self._waits[threading.get_ident()] = Wait(key, number, time.monotonic(), self._num_waits)
        self.start()

    def leave(self, is_over: bool) -> None:
        """Note that this thread's wait has ended; ``is_over``: without an error."""
        self._waits.pop(threading.get_ident(), None)

    def find_cause(self, key: CollectiveKey, reason: str) -> str:
        """Return why a collective has failed: the verdict that ended the wait, or another cause."""
        cause = self._verdicts.pop(threading.get_ident(), None)
        if cause is None:
            has_store = not self._store_is_unresponsive()
            cause = self.finder.find_cause(key, reason, None, has_store)
        if cause.startswith(FAILED):
            self.report_failure(cause)  # to ranks that wait for this one in another group
        return cause

    def report_failure(self, text: str) -> None:
        """Tell ranks that wait for this one, or will, that it raises; before it does.

        See Note [A rank that has failed]. **Cost** a message to the store.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self.finder.failure = text
        with suppress(RuntimeError, ValueError):  # the group was destroyed, or its store has ended
            self.finder.publish()

    # The threads that look.
    def _look_regularly(self) -> None:
        while not self._stop.wait(self.look_every_s):
            if not dist.is_initialized():
                continue
            store = None
            try:
                store = dist.distributed_c10d._get_default_store()
                if store is self._lost_store:  # each request would print a C++ stack
                    continue
                self._look_began_s = time.monotonic()
                self._look()
            except dist.DistNetworkError:  # the store has ended with rank 0
                self._lost_store = store
            except (RuntimeError, ValueError, KeyError):  # the process group was destroyed
                pass
            except Exception:
                if not self._has_logged_error:
                    self._has_logged_error = True
                    _LOG.exception("shardwise: the watch of rank %d has failed", dist.get_rank())
            finally:
                self._look_began_s = None

    def _look(self) -> None:
        main = threading.main_thread().ident or 0
        stalled = None if main in self._waits else self._stalled.look()
        waits = {t: w for t, w in list(self._waits.items()) if w.waited_s > self.look_every_s}
        if main not in self._waits and (found := stalled or self._late_async()) is not None:
            waits[main] = found
        mine = waits.get(main)
        if mine is not None:
            mine.looks += 1
        self.finder.publish(mine)
        self._num_looks += 1
        if self._num_looks % _HEAR_EVERY == 1 or self._num_looks < _HEAR_EVERY / 2:
            self.finder.hear(self.look_every_s)
        if mine is not None:
            verdict = self.finder.judge(mine, self.finder.limit_s(mine, WAITS.limit_s))
            if verdict is not None:
                self._end(main, mine, verdict)
        for thread, wait in waits.items():
            self._report_long_wait(thread, wait)

    def _late_async(self) -> Wait | None:
        oldest = self._async.oldest()
        return oldest if oldest is not None and oldest.waited_s > self.look_every_s else None

    def _end(self, thread: int, wait: Wait, verdict: str, has_store: bool = True) -> None:
        """Break off a wait that cannot end, whichever rank has found the verdict.

        That rank may have died, and gloo ends no wait for a third rank.
        """
        if self._waits.get(thread) is wait:
            if thread not in self._verdicts:
                self._verdicts[thread] = verdict
                abort(wait.key.group)
        elif wait.serial < 0 and not wait.is_ended:  # in no call of ours, which would raise it
            wait.is_ended = True
            who = f"rank {dist.get_rank()}: {wait.text(thread)}"
            _LOG.error("shardwise: %s failed: %s", who, verdict)
            FAILED_GROUPS.add(wait.key.group, verdict)
            if has_store:
                self.finder.tell_cause(wait.key, verdict)
            abort_all()

    def _report_long_wait(self, thread: int, wait: Wait) -> None:
        if wait.is_reported or wait.is_ended or wait.waited_s <= self.patience_s:
            return
        wait.is_reported = True
        _LOG.warning(
            "shardwise: rank %d has waited %.0f s in %s: %s. Every rank must make this call",
            *(dist.get_rank(), self.patience_s, wait.text(thread)),
            describe_waits(self.finder.graph(wait)),
        )

    def _look_at_looks(self) -> None:
        """End waits while a look hangs; see Note [A store that does not answer]."""
        main = threading.main_thread().ident or 0
        while not self._stop.wait(self.look_every_s):
            if not self._late_s():
                continue
            wait = self._waits.get(main) or self._stalled.look() or self._late_async()
            is_over = wait is not None and wait.waited_s >= (WAITS.limit_s or 0)
            if wait is not None and is_over and self._store_is_unresponsive():
                with suppress(RuntimeError, ValueError, KeyError):  # the group was destroyed
                    over = f"it has not ended in {wait.waited_s:.0f} s, and "
                    self._end(main, wait, over + self.finder.judge_without_store(wait), False)

    def _late_s(self) -> float:
        """Return how late the look under way is."""
        began_s = self._look_began_s
        late_s = 0.0 if began_s is None else time.monotonic() - began_s
        return late_s if late_s > 2 * self.look_every_s else 0.0

    def _store_is_unresponsive(self) -> bool:
        late_s = self._late_s()
        return WAITS.limit_s is not None and late_s > 0 and late_s >= WAITS.limit_s / 2

    # The end of the program.
    def _annotate(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Add the cause to an error of torch's that ends the program, and print it."""
        with suppress(Exception):  # the error itself must be printed
            cause = self._explain(error, not self._late_s())
            if cause is not None:
                error.add_note(cause)
        self._hook_before(kind, error, trace)

    def _report_exit(self) -> None:
        """Publish how this rank's program has ended; log why a call of torch's has failed."""
        if os.getpid() != self._pid:
            return
        self._stop.set()  # a thread that is in C++ while Python ends would abort
        self._threads[0].join(0 if self._late_s() else _JOIN_S)
        self._threads[1].join(_JOIN_S)
        if not self._is_one_of_several():
            return
        has_store = not self._threads[0].is_alive()
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with suppress(Exception):  # the group may be destroyed, and the store may have ended
            if error is not None:
                logged = FAILED_GROUPS.reasons()
                cause = self._explain(error, has_store)
                if cause is not None and not any(reason in cause for reason in logged):
                    _LOG.error("shardwise: %s", cause)
                if has_store and dist.get_rank() == 0:  # it may keep the store that others read
                    time.sleep(_LINGER_S)
            elif has_store:
                self.finder.publish_exit(ENDED_WELL)

    def _is_one_of_several(self) -> bool:
        is_rank = dist.is_initialized() and self._pid == os.getpid()  # and no fork of one
        return is_rank and dist.get_world_size() > 1

    def _explain(self, error: BaseException, has_store: bool) -> str | None:
        """Publish the error that ends this program; return, once, why a call of torch's failed."""
        if error is self._explained or not self._is_one_of_several():
            return None
        self._explained = error
        follows = isinstance(error, CollectiveError)
        call = call_of_error(error) if isinstance(error, RuntimeError) and not follows else None
        name = type(error).__name__
        if has_store:
            with suppress(RuntimeError, ValueError):  # the store may have ended with rank 0
                if call is None:
                    self.finder.publish_exit(f"{name}: {reason_of(error)}", "", follows)
                else:
                    self.finder.publish_exit(f"{name} in {call.text}", call.text, True)
        if call is None:
            return None
        cause = FAILED_GROUPS.reason(call.group)
        if cause is None:
            cause = self.finder.find_cause(call.key, reason_of(error), call, has_store)
        return f"rank {dist.get_rank()}: {call.text} failed: {cause}"


WATCH = Watch()
