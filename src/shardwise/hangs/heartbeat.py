"""Heartbeats: the state of each rank, published every second in the process group's store.

Note [Dead, stopped, silent]
A rank whose heartbeat does not change for some seconds is silent: stopped, dead, cut off, or in a
call that holds the GIL. On the same machine the system distinguishes these, see `fate`. Of a rank
on another machine only its silence is known.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.processes import Life, Process, fate, own_process, work_done

ENDED_WELL = "its program is over"
_SILENT_LOOKS = 4
_MEASURE_EVERY, _WORKED_LOOKS = 10, 30
_IDLE_CORE, _IDLE_BYTES = 0.1, 2**20  # less, in the time between two measurements, is no work
_MAX_LINES_SHOWN = 3
_SAVES = ("save", "async_save")
_PACKAGE = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_PACKAGE, _TORCH, str(Path(threading.__file__).parent))


@dataclass(frozen=True)
class WaitRecord:
    """The wait that a rank's main thread is in, as other ranks read it.

    ``number`` is that of the collective among those of its key; torch's own calls are not counted
    and have 0. ``needs_all``: no rank can end it without all others. ``trains``: it is no small
    exchange about a model or checkpoint.
    """

    key: str
    number: int
    ranks: tuple[int, ...]
    text: str
    needs_all: bool = True
    trains: bool = True


@dataclass(frozen=True)
class Heartbeat:
    """The state of one rank.

    ``last`` is the collective that it began last, ``where`` are the lines that its main thread is
    in. ``failed`` is the error that it raises, until it begins another collective. ``left`` says
    how its program has ended; then ``begun`` has the number of collectives that it began, by key.
    ``follows``: another rank's failure is the cause. ``works``: see `Progress`.
    """

    beat: int
    process: Process
    last: str = ""
    where: str = ""
    wait: WaitRecord | None = None
    failed: str = ""
    left: str = ""
    follows: bool = False
    works: bool = False
    begun: Mapping[str, int] = field(default_factory=dict)

    def has_begun(self, wait: WaitRecord) -> bool:
        """True if the rank is known to have begun a collective in which another rank waits."""
        if self.wait is not None and self.wait.key == wait.key:
            return self.wait.number >= wait.number
        return wait.number > 0 and self.begun.get(wait.key, 0) >= wait.number

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "Heartbeat":
        """Read it from text."""
        values: dict[str, Any] = json.loads(text)
        values["process"] = Process(**values["process"])
        if (wait := values["wait"]) is not None:
            values["wait"] = WaitRecord(**wait | {"ranks": tuple(wait["ranks"])})
        return cls(**values)


class Progress:
    """The recent work of this process: time of a core, or reads and writes of files.

    Its children count: a compiler's processes, or those that load data.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._worked_at = -_WORKED_LOOKS
        self._since_s = time.monotonic()
        self._done = work_done()

    def look(self) -> bool:
        """Return whether it has worked in the last 30 looks. **Cost** files of /proc, 1 in 10."""
        self._looks += 1
        if self._looks % _MEASURE_EVERY == 0:
            before, since_s = self._done, self._since_s
            self._done, self._since_s = work_done(), time.monotonic()
            core_share = (self._done[0] - before[0]) / (self._since_s - since_s)
            if core_share > _IDLE_CORE or self._done[1] - before[1] > _IDLE_BYTES:
                self._worked_at = self._looks
        return self._looks - self._worked_at < _WORKED_LOOKS


class Heartbeats:
    """The heartbeats that this rank has read, with the times at which they changed.

    ``is_current`` is False if the store has ended, or does not answer.
    """

    def __init__(self) -> None:
        self.process = own_process()
        self.is_current = True
        self.look_every_s = 1.0
        self._heard: dict[int, tuple[Heartbeat, float]] = {}
        self._stores: tuple[dist.Store, dist.Store] | None = None  # the group's, and ours

    @property
    def _store(self) -> dist.Store:
        """The store of the current process group. **Raises** ValueError if there is no group."""
        of_group = dist.distributed_c10d._get_default_store()
        if self._stores is None or self._stores[0] is not of_group:
            self._heard.clear()  # those of another group
            # A separate connection: one is locked as long as another thread waits in it.
            store: Any = of_group
            self._stores = of_group, dist.PrefixStore("shardwise/watch", store.clone())
        return self._stores[1]

    def publish(self, heartbeat: Heartbeat) -> None:
        """Replace this rank's heartbeat. **Cost** a message to the store."""
        self._store.set(str(dist.get_rank()), heartbeat.to_json())

    def read(self, ranks: Sequence[int]) -> None:
        """Read the heartbeats of ranks that have published one.

        **Cost** two requests if all have.
        """
        store, published = self._store, list(ranks)
        if published and not store.check([str(rank) for rank in published]):
            published = [rank for rank in published if store.check([str(rank)])]
        texts = store.multi_get([str(rank) for rank in published]) if published else []
        for rank, text in zip(published, texts, strict=True):
            self.add(rank, Heartbeat.from_json(text))

    def add(self, rank: int, heartbeat: Heartbeat) -> None:
        """Record a rank's heartbeat."""
        before = self.newest(rank)
        if before is None or before.beat != heartbeat.beat:
            self._heard[rank] = heartbeat, time.monotonic()

    def newest(self, rank: int) -> Heartbeat | None:
        """Return a rank's last heartbeat."""
        heard = self._heard.get(rank)
        return None if heard is None else heard[0]

    def life(self, rank: int) -> tuple[Life, str]:
        """Return the state of a rank's process, and its cause of death if that is known."""
        heard = self._heard.get(rank)
        if heard is None:
            return "silent", ""
        life, cause = fate(heard[0].process, self.process)
        is_silent = time.monotonic() - heard[1] >= _SILENT_LOOKS * self.look_every_s
        if life in ("alive", "silent"):
            return ("silent" if is_silent and self.is_current else "alive"), ""
        return life, cause


# -- lines of the program, by thread


def lines_of_main() -> str:
    """Return the lines of the user's program that the main thread is in, the innermost first."""
    frames = filter(_is_users, frames_of(threading.main_thread().ident or 0))
    lines = [f"{frame.f_code.co_name} ({_line(frame)})" for frame in frames][:_MAX_LINES_SHOWN]
    return f"in {', called by '.join(lines)}" if lines else "in no line of the program's"


def line_of(thread: int) -> str:
    """Return the line of the user's program that a thread is in, and its caller's.

    As ` (file:line, called from file:line)`: the first may be in a helper of the loop.
    """
    frames = list(filter(_is_users, frames_of(thread)))
    frames = ([frame for frame in frames if not _is_installed(frame)] or frames)[:2]
    return f" ({', called from '.join(map(_line, frames))})" if frames else ""


def save_under_way(thread: int) -> str | None:
    """Return the save of torch that a thread is in, as ``torch.save (file:line)``; not ours."""
    frames = list(frames_of(thread))
    names = [frame.f_code.co_filename for frame in frames]
    if any(name.startswith(_PACKAGE) for name in names):
        return None
    for number, frame in enumerate(frames):
        if frame.f_code.co_name in _SAVES and names[number].startswith(_TORCH):
            caller = next(filter(_is_users, frames[number:]), frame)
            return f"torch.{frame.f_code.co_name} ({_line(caller)})"
    return None


def frames_of(thread: int) -> Iterator[FrameType]:
    """Yield the frames of a thread that can be read, the innermost first.

    A thread that runs on may return from a frame in the meantime; Python 3.11 has then been seen to
    give another object as the frame before it.
    """
    frame = sys._current_frames().get(thread)
    while isinstance(frame, FrameType):
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def _is_installed(frame: FrameType) -> bool:
    return "site-packages" in frame.f_code.co_filename


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
