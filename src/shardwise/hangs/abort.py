"""The watch of a process: it publishes this rank's heartbeat, and ends waits that cannot end.

Note [The rule]
Once a second a thread publishes this rank's heartbeat, reads those of the ranks that the wait of
the main thread needs, and ends the wait in two cases: a rank that it needs is gone, or it has
lasted for the limit of `watch`. If `watch` was not called, and the program gave the process group
no timeout, the limit is 5 minutes. A wait for a rank that is at work (it compiles, loads or saves)
lasts until the timeout of the process group. The error has the table of the ranks, see
Note [The table]. The cause is published with the heartbeat, and ranks that wait for this one pass
it on. The wait is ended by an abort, see Note [Aborting a group].

Note [A rank that has failed]
A rank whose disk or host memory fails raises, and enters no collective of its model before a load,
which all ranks make. So it publishes the failure before it raises, and waits for this rank end. The
failure holds until the rank begins another collective, which shows that it has recovered. Small
exchanges (`control`) are no sign of that: loads use them, and saves that report a failure.

Note [A store that does not answer]
Rank 0 keeps the store if no launcher does. If rank 0 is stopped, and not dead, its connections stay
open and a request to the store never returns. So a second thread applies the rule while a look of
the first is late, to the heartbeats that were read before. It sends the store no request.

Note [A stopped rank]
A launcher ends the ranks after a failure with SIGTERM, which a stopped process does not get, and
kills those that are left after 30 s or more. So a rank whose wait has ended because a rank of its
machine is stopped kills that one at its own end, when its error is printed, or 20 s after the wait.

Note [Errors of torch's own calls]
A wait in torch's own calls raises an error of torch. If that ends the program, the verdict is added
to the error as a note. If the watch has ended the wait, or no hook saw the error, the verdict is
logged.
"""

import atexit
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from weakref import WeakKeyDictionary

import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, reason_of
from shardwise.comm.listener import WAITS, Listener
from shardwise.comm.process_groups import (
    FAILED_GROUPS,
    USUAL_CAUSE,
    abort,
    abort_all,
    has_usual_timeout,
    timeout_s_of,
    waits_block,
)
from shardwise.errors import CollectiveError
from shardwise.hangs.diagnosis import (
    FAILED,
    AsyncCollectives,
    StalledCalls,
    Wait,
    WaitTable,
    call_of_error,
    needed_ranks,
)
from shardwise.hangs.heartbeat import (
    ENDED_WELL,
    Heartbeat,
    Heartbeats,
    Progress,
    WaitRecord,
    line_of,
    lines_of_main,
)
from shardwise.processes import Process, kill_stopped, launcher_process

_LOG = logging.getLogger("shardwise")  # on standard error, unless the program says otherwise
_MAX_RANKS = 256  # that one rank reads: the store must serve all ranks that look
_READ_EVERY = 10  # looks, without a wait: the store may end with a rank
_FIND_CAUSE_S = 3.0  # a rank may be about to publish why it has ended
_POLL_S = 0.1
_PUBLISH_S = 5.0
_LINGER_S = 1.5  # longer than the time between two looks of the others
_KILL_AFTER_S = 20.0


def watch(hang_timeout: float | None) -> None:
    """End waits that last ``hang_timeout`` seconds, and name the ranks that are missing.

    Without a call a wait ends after 5 minutes if the missing ranks do nothing, or else at the
    timeout of the process group, which alone counts if the program gave it one.

    It holds for this process and all its models, those of `fully_shard` too, and for the calls of
    torch.distributed that the loop makes itself. Call it on every rank after
    ``init_process_group``. None leaves the end to the timeout of the process group. A rank that is
    later than this ends the run: choose several times the longest step, save or evaluation.

    **Cost** a look a second, by a thread. **Raises** ConfigError for less than 4 seconds.
    """
    WAITS.set_limit(hang_timeout)


class Watch(Listener):
    """The listener to this process's collectives, and the threads that look at their waits."""

    def __init__(self, look_every_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.look_every_s = look_every_s
        self.patience_s = patience_s
        self._heartbeats = Heartbeats()
        self._progress = Progress()
        self._counts: Counter[str] = Counter()  # of collectives begun, by key
        self._last: CollectiveKey | None = None
        # See `Heartbeat`.
        self._failure = ""
        self._left = ""
        self._follows = False
        self._waits: dict[int, Wait] = {}  # by thread
        self._failed: Wait | None = None  # its cause is being determined
        self._async = AsyncCollectives()
        self._stalled = StalledCalls()
        self._blocking: WeakKeyDictionary[dist.ProcessGroup | None, bool] = WeakKeyDictionary()
        self._verdicts: dict[int, str] = {}  # of aborted waits, by thread
        self._threads: list[threading.Thread] = []
        self._pid = 0  # of the process that runs the threads: they do not run in its forks
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._looked = threading.Condition()
        self._num_begun = 0  # looks
        self._num_looks = 0  # that have ended
        self._look_began_s: float | None = None  # of the present look
        self._lost_store: dist.Store | None = None
        self._has_logged_error = False
        self._stopped: list[Process] = []  # see Note [A stopped rank]
        self._kill_at_s = math.inf
        self.tells_of_launcher = True  # a loop that ends with its launcher says so itself
        self._launcher: Process | None = None  # torchrun's agent, while it lives
        self._explained: BaseException | None = None
        self._hook_before = sys.excepthook

    def start(self) -> None:
        """Start the threads, if they do not run."""
        if self._threads or not dist.is_initialized():
            return
        # This process may be a fork.
        self._pid = os.getpid()
        self._heartbeats = Heartbeats()
        self._progress = Progress()
        self._launcher = launcher_process() if dist.is_torchelastic_launched() else None
        for run in (self._look_regularly, self._look_at_looks):
            self._threads.append(threading.Thread(target=run, name="shardwise-watch", daemon=True))
            self._threads[-1].start()
        self.publish()  # now: the store may end before this process does
        atexit.register(self._report_exit)
        self._hook_before, sys.excepthook = sys.excepthook, self._annotate

    # Calls of the threads that make collectives.
    def begin(self, key: CollectiveKey) -> int:
        """Count a collective that begins; return its number among those of its key."""
        if self._failure and key.axis:  # a small exchange is no recovery
            self._failure, self._follows = "", False
            self.publish()
        name = key.key
        self._counts[name] = number = self._counts[name] + 1
        self._last = key
        return number

    def launch(self, key: CollectiveKey, number: int, works: Sequence[dist.Work]) -> None:
        """Record a collective that runs on a device, see `AsyncCollectives`."""
        blocks = self._blocking.get(key.group)
        if blocks is None:
            blocks = self._blocking[key.group] = waits_block(key.group)
        if not blocks:
            self._async.add(Wait(key, number), works)
            self.start()

    def enter(self, key: CollectiveKey, number: int) -> None:
        """Record that this thread begins to wait."""
        self._waits[threading.get_ident()] = Wait(key, number)
        self.start()

    def leave(self, is_over: bool) -> None:
        """Record that this thread's wait has ended; ``is_over``: without an error."""
        self._waits.pop(threading.get_ident(), None)

    def find_cause(self, key: CollectiveKey, reason: str) -> str:
        """Return the cause of a failed collective: the verdict that ended the wait, or another."""
        verdict = self._verdicts.pop(threading.get_ident(), None)
        cause = verdict or self._cause_of(Wait(key, self._counts[key.key]), reason)
        return self._publish_cause(cause, reason)

    def report_failure(self, text: str) -> None:
        """Publish that this rank is about to raise, for ranks that wait for it now or later.

        See Note [A rank that has failed]. **Cost** a look.
        """
        self._failure, self._follows = text, False
        self.publish()

    def publish(self) -> None:
        """Run a look now; return when it has ended, or after some seconds."""
        if not self._threads or not self._is_one_of_several() or self._is_late:
            return
        if threading.current_thread() in self._threads:
            return
        with self._looked:
            number = self._num_begun + 1  # a look that has begun may publish an older state
            self._wake.set()
            self._looked.wait_for(lambda: self._num_looks >= number, _PUBLISH_S)

    def _publish_cause(self, cause: str, reason: str) -> str:
        """Return the cause; if it is known, publish it for ranks that wait for this one."""
        if cause != reason:
            self._failure, self._follows = cause, True
            self.publish()
        return cause

    def _cause_of(self, wait: Wait, reason: str) -> str:
        """Return the table of ranks if one of them is gone, or if the wait was over time.

        It waits a little for a rank that is about to die, or to publish why it has ended.
        """
        self.start()
        timed_out = "imed out" in reason or "did not come within" in reason
        until_s = time.monotonic() + _FIND_CAUSE_S
        self._failed = wait
        try:
            record = wait.record()
            while True:
                self.publish()
                table = WaitTable(self._heartbeats, dist.get_rank(), record)
                if table.gone:
                    # A rank may publish why it ends after the read, and before its process is seen.
                    self.publish()
                    table = WaitTable(self._heartbeats, dist.get_rank(), record)
                if table.gone or timed_out:
                    break
                if time.monotonic() >= until_s:
                    table.gone = table.followers
                    break
                time.sleep(_POLL_S)
        except (KeyError, ValueError):  # the group was destroyed: its ranks are unknown
            return reason
        finally:
            self._failed = None
        if table.gone:
            return FAILED + table.describe()
        if not timed_out:
            never = table.describe_unheard() if reason.startswith((USUAL_CAUSE, "[")) else None
            return reason if never is None else f"{never} ({_raw(reason)})"
        self._note_stopped(table)
        if reason.startswith((USUAL_CAUSE, "[")):  # the table knows more, and a path of C++ less
            return f"it has not ended in time: {table.describe()} ({_raw(reason)})"
        return f"{reason}: {table.describe()}"

    # The looks of the threads.
    def _look_regularly(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.look_every_s)
            self._wake.clear()
            with self._looked:
                self._num_begun += 1
            try:
                self._note_orphan()
                if dist.is_initialized():
                    self._look_began_s = time.monotonic()
                    self._look()
            except (RuntimeError, ValueError, KeyError):  # the process group was destroyed
                pass
            except Exception:
                if not self._has_logged_error:
                    self._has_logged_error = True
                    _LOG.exception("shardwise: the watch of rank %d has failed", dist.get_rank())
            finally:
                self._look_began_s = None
                with self._looked:
                    self._num_looks = self._num_begun
                    self._looked.notify_all()

    def _note_orphan(self) -> None:
        """Warn once that torchrun's agent has died: its ranks get no signal, and go on."""
        if (launcher := self._launcher) is not None and os.getppid() != launcher.pid:
            self._launcher = None
            if not self.tells_of_launcher:
                return
            _LOG.warning(
                "rank %d: its launcher (%s) has died. Nothing starts or ends this rank any more. "
                "Its loop goes on to its end; to end it now: kill %d",
                *(dist.get_rank() if dist.is_initialized() else -1, launcher, os.getpid()),
            )

    def _look(self) -> None:
        main = threading.main_thread().ident or 0
        wait = self._wait_of_main()
        self._exchange(None if wait is None else wait.record())
        if wait is not None and wait is not self._failed:
            self._judge(wait)
        for thread, waiting in [*self._waits.items(), *([(main, wait)] if wait else [])]:
            self._report_long_wait(thread, waiting)

    def _wait_of_main(self) -> Wait | None:
        """Return the wait that the main thread is in for longer than a look, if it is in one."""
        main = self._failed or self._waits.get(threading.main_thread().ident or 0)
        if main is None and (stalled := self._stalled.look()) is not None:
            return stalled
        wait = main or self._async.oldest()
        is_long = wait is not None and (wait is self._failed or wait.waited_s > self.look_every_s)
        return wait if is_long else None

    def _exchange(self, record: WaitRecord | None) -> None:
        """Publish this rank's heartbeat; read those of the ranks that its wait needs."""
        store = dist.distributed_c10d._get_default_store()
        self._heartbeats.look_every_s = self.look_every_s
        if store is self._lost_store:  # each request would print a C++ stack
            return
        works = self._progress.look()  # also in a wait: the next line may compute
        heartbeat = Heartbeat(
            beat=self._num_begun,
            process=self._heartbeats.process,
            last=self._last.text if self._last is not None else "",
            where=lines_of_main(),
            wait=record,
            failed=self._failure,
            left=self._left,
            follows=self._follows,
            works=works,
            begun=dict(self._counts) if self._left else {},
        )
        rank, read = dist.get_rank(), set[int]()
        try:
            self._heartbeats.publish(heartbeat)
            if record is None and self._num_begun % _READ_EVERY in (1, 2, 5):
                nearest = sorted(range(dist.get_world_size()), key=lambda other: abs(other - rank))
                self._heartbeats.read([other for other in nearest[:_MAX_RANKS] if other != rank])
            while record is not None:  # until no rank that was read waits for further ones
                needed = needed_ranks(self._heartbeats, rank, record, _MAX_RANKS).keys() - read
                if not needed:
                    break
                self._heartbeats.read(sorted(needed))
                read |= needed
            self._heartbeats.is_current = True
        except dist.DistNetworkError:  # the store has ended with rank 0
            self._lost_store = store
            self._heartbeats.is_current = False

    def _judge(self, wait: Wait) -> None:
        """Apply Note [The rule] to the main thread's wait."""
        table = WaitTable(self._heartbeats, dist.get_rank(), wait.record())
        limit_s = self._limit_s(wait)
        is_over = limit_s is not None and wait.waited_s >= limit_s
        if not is_over and wait.waited_s >= WAITS.idle_limit_s:
            is_over = has_usual_timeout(wait.key.group) and not table.may_come
        if table.gone:
            self._end(wait, FAILED + table.describe())
        elif is_over:
            self._note_stopped(table)
            self._end(wait, f"it has not ended in {wait.waited_s:.0f} s: {table.describe()}")

    def _limit_s(self, wait: Wait) -> float | None:
        """Return the seconds after which a wait is ended; None if its timeout ends it."""
        limit_s = WAITS.limit_s
        if not wait.key.axis:  # small exchanges end by themselves
            return None if limit_s is None else limit_s + self.look_every_s
        if limit_s is not None or (not wait.torch_text and waits_block(wait.key.group)):
            return limit_s
        timeout_s = timeout_s_of(wait.key.group)
        return None if timeout_s is None else timeout_s - 3 * self.look_every_s

    def _end(self, wait: Wait, verdict: str) -> None:
        """Abort the main thread's wait; gloo ends none by itself if a third rank dies."""
        main = threading.main_thread().ident or 0
        if self._waits.get(main) is wait:
            if main not in self._verdicts:
                self._verdicts[main] = verdict
                abort(wait.key.group)
                if wait.key.companion is not None:
                    abort(wait.key.companion)
        elif (wait.torch_text or not waits_block(wait.key.group)) and not wait.is_ended:
            wait.is_ended = True  # torch raises an error without the verdict, so it is logged
            who = f"rank {dist.get_rank()}: {wait.text}{line_of(main)}"
            _LOG.error("shardwise: %s failed: %s", who, verdict)
            FAILED_GROUPS.add(wait.key.group, verdict)
            self._failure, self._follows = verdict, True
            if self._heartbeats.is_current and not self._is_late:
                self._exchange(None)
            abort_all()

    def _note_stopped(self, table: WaitTable) -> None:
        """Record the ranks that are stopped when a wait is over its limit."""
        if not self._stopped and table.stopped:
            self._stopped = table.stopped
            self._kill_at_s = time.monotonic() + _KILL_AFTER_S

    def _kill_stopped(self) -> None:
        """Kill the recorded ranks that are still stopped."""
        stopped, self._stopped, self._kill_at_s = self._stopped, [], math.inf
        for process in stopped:
            if kill_stopped(process, self._heartbeats.process):
                _LOG.warning("shardwise: killed %s, a rank that was stopped", process)

    def _report_long_wait(self, thread: int, wait: Wait) -> None:
        if wait.is_reported or wait.is_ended or wait.waited_s <= self.patience_s:
            return
        wait.is_reported = True
        rank = dist.get_rank()
        who = f"rank {rank} has waited {self.patience_s:.0f} s in {wait.text}{line_of(thread)}"
        table = WaitTable(self._heartbeats, rank, wait.record())
        if table.reporter == rank:
            text = f"{who}: {table.describe()}. Every rank must make this call"
        else:
            text = f"{who}; rank {table.reporter} logs what each rank does"
        _LOG.warning("shardwise: %s", text)

    def _look_at_looks(self) -> None:
        """Apply the rule while a look hangs; see Note [A store that does not answer]."""
        while not self._stop.wait(self.look_every_s):
            if time.monotonic() >= self._kill_at_s:
                self._kill_stopped()
            if self._is_late and dist.is_initialized():
                self._heartbeats.is_current = False
                with suppress(RuntimeError, ValueError, KeyError):  # the group was destroyed
                    if (wait := self._wait_of_main()) is not None:
                        self._judge(wait)

    @property
    def _is_late(self) -> bool:
        """True if the present look is late."""
        began_s = self._look_began_s
        return began_s is not None and time.monotonic() - began_s > 2 * self.look_every_s

    # The end of the program.
    def _annotate(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Add the cause to an error of torch's that ends the program, and print it."""
        with suppress(Exception):  # the error itself must be printed
            if (cause := self._explain(error)) is not None:
                error.add_note(cause)
        self._hook_before(kind, error, trace)

    def _report_exit(self) -> None:
        """Publish the end of this rank's program; log the cause if a call of torch's has failed."""
        if os.getpid() != self._pid:
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        with suppress(Exception):  # the group may be destroyed
            if error is None:
                self._left = ENDED_WELL
                self.publish()
            elif self._is_one_of_several():
                logged, cause = FAILED_GROUPS.reasons(), self._explain(error)
                if cause is not None and not any(reason in cause for reason in logged):
                    _LOG.error("shardwise: %s", cause)
                if self._heartbeats.is_current and dist.get_rank() == 0:
                    time.sleep(_LINGER_S)  # it may keep the store that others read
        self._kill_stopped()
        self._stop.set()  # a thread in C++ at the end of Python would abort the process
        self._wake.set()
        self._threads[0].join(0 if self._is_late else _PUBLISH_S)
        self._threads[1].join(_PUBLISH_S)

    def _is_one_of_several(self) -> bool:
        is_rank = dist.is_initialized() and self._pid == os.getpid()  # not a fork of a rank
        return is_rank and dist.get_world_size() > 1

    def _explain(self, error: BaseException) -> str | None:
        """Publish the error that ends this program; return the cause of a failed call, once."""
        if error is self._explained or not self._is_one_of_several():
            return None
        self._explained = error
        follows = isinstance(error, CollectiveError)
        call = call_of_error(error) if isinstance(error, RuntimeError) and not follows else None
        name, reason = type(error).__name__, reason_of(error)
        self._left = f"{name} in {call.text}" if call else f"{name}: {reason}"
        self._follows = follows or call is not None
        self.publish()
        if call is None:
            return None
        cause = FAILED_GROUPS.reason(call.key.group) or self._cause_of(call, reason)
        failed = f"rank {dist.get_rank()}: {call.text} failed"
        return f"{failed}: {self._publish_cause(cause, reason)}"


def _raw(reason: str) -> str:
    """Return the backend's text alone."""
    return reason.removeprefix(USUAL_CAUSE).strip(" ()")


WATCH = Watch()
