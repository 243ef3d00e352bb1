"""Who waits for whom: notices of long waits, and an end to waits that can have none.

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
Who has waited for half of its patience asks, in the store, those that wait for nobody where they
are. The watch of each rank looks for such a question once a second and answers with the lines that
its main thread is in. A rank that does not answer is stopped or dead, or in a call that does not
let Python go on.

Note [Breaking a wait off]
gloo's waits cannot be cancelled. But a receive that runs out of time closes the connections of its
group, and every wait on them raises. The group is of no use afterwards, and says so when it is
asked again. NCCL's waits block no thread of ours; there NCCL's own timeout ends them.

Note [One watch per process]
A process waits in one call at a time, whichever model it is for, so what it waits for is a fact of
the process, as its process groups are. One thread looks once a second, and costs nothing else.
"""

import atexit
import logging
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.board import FAILED, Board, blame
from shardwise.comm.meeting import Meeting
from shardwise.errors import CollectiveError, StorageError

_LOG = logging.getLogger("shardwise")  # on standard error, unless the program says otherwise
AS_A_RULE = "As a rule another rank died or raised first: its log has the cause"
_MAX_RANKS_SHOWN = 8
_MAX_LINES_SHOWN = 3  # of a missing rank
_FRESH_ANSWERS = 5  # questions, one each look: an older answer is of a rank that has fallen silent
_SILENT = "and does not answer: stopped, dead, or in a call that does not let Python go on"
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = (_PACKAGE, str(Path(torch.__file__).parent), str(Path(threading.__file__).parent))
_REMEDY = (
    "Every rank must make the same calls and run the same units in the same order. Where ranks may "
    "skip layers (layerdrop, stochastic depth, experts, a head per task), name them: "
    "shard(..., optional=[...]); stages 0 to 2 need no such list"
)


@dataclass
class _Wait:
    """One thread's wait, as it goes on."""

    meeting: Meeting
    number: int
    begun_s: float
    serial: int
    told: bool = False
    num_asked: int = 0
    looks: int = 0


class Watch:
    """The waits of this process, and the thread that looks at them."""

    def __init__(self, look_every_s: float = 1.0, patience_s: float = 30.0) -> None:
        self.look_every_s = look_every_s
        self.patience_s = patience_s
        self._begun: Counter[str] = Counter()
        self._waits: dict[int, _Wait] = {}
        self._verdicts: dict[int, str] = {}
        self._failed: dict[int, tuple[Any, str]] = {}
        self._num_waits = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._published = False
        self._board: tuple[dist.Store, Board] | None = None
        self._suspected: dict[int, dict[str, Any]] = {}
        self._telling = threading.Lock()  # what is told is not taken back by who looks meanwhile
        self._failure: str | None = None  # what this rank has told, and not recovered from

    # -- what the ranks' own threads call
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

    def has_failed(self, group: Any) -> bool:
        """Tell whether a collective of a group has failed."""
        return id(group) in self._failed

    def begin(self, meeting: Meeting) -> int:
        """Count a collective that this rank begins; return its number."""
        if self._failure is not None and meeting.axis:  # small exchanges go on beside a failure
            self._failure = None
            with suppress(RuntimeError, ValueError):
                self._board_of_now().clear()
        key = meeting.key
        self._begun[key] += 1
        return self._begun[key]

    def enter(self, meeting: Meeting, number: int) -> None:
        """Note that this thread waits from now on."""
        self._num_waits += 1
        wait = _Wait(meeting, number, time.monotonic(), self._num_waits)
        self._waits[threading.get_ident()] = wait
        if self._thread is None:
            self._start()

    def leave(self) -> None:
        """Note that this thread's wait is over."""
        self._waits.pop(threading.get_ident(), None)

    @contextmanager
    def waiting(self, meeting: Meeting) -> Iterator[None]:
        """Begin a collective that blocks, and wait for it inside."""
        self.refuse_failed(meeting.text, meeting.group)
        self.enter(meeting, self.begin(meeting))
        try:
            yield
        finally:
            self.leave()

    def fail(self, meeting: Meeting, reason: str) -> str:
        """Note that a group has failed; return why, which may be what the watch has found."""
        found = self._verdicts.pop(threading.get_ident(), None) or self._told(meeting) or reason
        self._failed.setdefault(id(meeting.group), (meeting.group, found))
        if found.startswith(FAILED):
            self.tell_failure(found)  # to those who wait for this rank in another group
        return found

    def tell_failure(self, text: str) -> None:
        """Tell ranks that wait for this one, or will, what it has failed with, before it raises.

        See Note [A rank that has failed]. **Cost** a message to the store.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        with self._telling, suppress(RuntimeError, ValueError):  # the group, or its store, is gone
            self._failure = text
            self._board_of_now().publish({"failed": text, "begun": dict(self._begun)})

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Tell of a StorageError that is raised inside, to the caller of the model."""
        try:
            yield
        except StorageError as failure:
            self.tell_failure(str(failure))
            raise

    # -- the thread
    def _start(self) -> None:
        with suppress(RuntimeError, ValueError):  # now: the store may end before this process does
            self._board_of_now()
        self._thread = threading.Thread(target=self._run, name="shardwise-watch", daemon=True)
        self._thread.start()
        atexit.register(self._stop.set)

    def _run(self) -> None:
        while not self._stop.wait(self.look_every_s):
            if not dist.is_initialized():
                continue
            try:
                self._look()
            except Exception:  # the process group is gone, and with it whoever could be waited for
                self._published = False

    def _look(self) -> None:
        board = self._board_of_now()
        board.answer(_lines_of_main)
        now, least_s = time.monotonic(), self.look_every_s
        waits = [(t, w) for t, w in list(self._waits.items()) if now - w.begun_s > least_s]
        main = threading.main_thread().ident
        mine = next((w for t, w in waits if t == main), None)
        if mine is None:
            with self._telling:
                if self._published and self._failure is None:
                    board.clear()
                    self._published = False
        else:
            mine.looks += 1
            board.publish(self._record(mine))
            self._published = True
            verdict = board.told_of(mine.meeting.group_name) or self._find_circle(board, mine)
            if verdict is not None:
                self._end(main or 0, mine, verdict)
        for thread, wait in waits:
            if wait.told or now - wait.begun_s <= self.patience_s / 2:
                continue
            if now - wait.begun_s <= self.patience_s:
                wait.num_asked += 1
                for other in wait.meeting.ranks:
                    if other != dist.get_rank() and board.read(other) is None:
                        board.ask(other, wait.num_asked)
            else:
                wait.told = True
                _LOG.warning(self._notice(board, thread, wait))

    def _board_of_now(self) -> Board:
        store = dist.distributed_c10d._get_default_store()
        if self._board is None or self._board[0] is not store:
            self._board = store, Board(store)
        return self._board[1]

    def _told(self, meeting: Meeting) -> str | None:
        """Return the circle that another rank has found, and broken off; None without one.

        Replicas wait for a rank of the circle in a group of their own: it fails with that rank.
        """
        try:
            return self._board_of_now().told(meeting)
        except (RuntimeError, ValueError):  # the process group, or its store, is gone
            return None

    def _record(self, wait: _Wait) -> dict[str, Any]:
        failed = {} if self._failure is None else {"failed": self._failure}
        return failed | {
            "serial": wait.serial,
            "look": wait.looks,
            "trains": bool(wait.meeting.axis),
            "key": wait.meeting.key,
            "number": wait.number,
            "ranks": wait.meeting.ranks,
            "text": wait.meeting.text + _where(threading.main_thread().ident or 0),
            "begun": dict(self._begun),
        }

    def _find_circle(self, board: Board, wait: _Wait) -> str | None:
        """Return what to say of a circle that this rank is in or waits for; None without one."""
        rank = dist.get_rank()
        found = board.circle(rank, self._record(wait))
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
        board.tell(wait.meeting.group_name, sorted(found), verdict)
        return verdict

    def _end(self, thread: int, wait: _Wait, verdict: str) -> None:
        """Break off a wait that cannot end, as this rank has found, or another one of its group.

        Who has found it may be gone, and gloo wakes nobody who waits for a third rank.
        """
        if self._waits.get(thread) is not wait or thread in self._verdicts:
            return
        self._verdicts[thread] = verdict
        if not break_off(wait.meeting):
            _LOG.error("shardwise: %s", verdict)

    def _notice(self, board: Board, thread: int, wait: _Wait) -> str:
        meeting, rank = wait.meeting, dist.get_rank()
        states = {r: board.read(r) for r in meeting.ranks if r != rank}
        missing = []
        for other, record in states.items():
            if record is None:
                where = board.answer_of(other, max(1, wait.num_asked - _FRESH_ANSWERS))
                missing.append(f"rank {other} is in no call of Shardwise, {where or _SILENT}")
            elif "failed" in record:
                missing.append(f"rank {other} has failed: {record['failed']}")
            elif record["begun"].get(meeting.key, 0) < wait.number:
                missing.append(f"rank {other} waits in {record['text']}")
        who = "; ".join(missing[:8]) or "all others have come, so the network or a device is slow"
        if len(missing) > 8:
            who += f"; and {len(missing) - 8} more"
        return (
            f"shardwise: rank {rank} has waited {self.patience_s:.0f} s in {meeting.text}"
            f"{_where(thread)}: {who}. Every rank must make this call"
        )


def name_ranks(ranks: Sequence[int]) -> str:
    """Return e.g. ``rank 1``, ``ranks 1, 2`` or ``ranks 1, 2, ... (30 in all)``."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def reason_of(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _lines_of_main() -> str:
    """Return the lines of the user's program that the main thread is in, the innermost first."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines: list[str] = []
    while frame is not None and len(lines) < _MAX_LINES_SHOWN:
        code = frame.f_code
        if not code.co_filename.startswith((*_LIBRARIES, "<")):
            lines.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
        frame = frame.f_back
    return f"but in {', called by '.join(lines)}" if lines else "nor in a line of the program's"


def _where(thread: int) -> str:
    """Return the line of the user's program that made a thread wait, as ` (file:line)`."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_LIBRARIES) and not name.startswith("<"):
            return f" ({Path(name).name}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


def break_off(meeting: Meeting) -> bool:
    """Make waits on a gloo group raise; tell whether that is possible."""
    group = meeting.group
    backend = group._get_backend(torch.device("cpu")) if hasattr(group, "_get_backend") else group
    if backend.name().lower() != "gloo":
        return False
    for peer in range(backend.size()):  # one whose connection is closed already closes no other
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, 0).wait(timedelta(milliseconds=1))
                warnings.warn("a message of nobody has arrived", RuntimeWarning, stacklevel=2)
                return False
    return True


WATCH = Watch()
