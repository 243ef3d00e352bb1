"""Waits of this process as they go on: of threads, in torch's calls, on a device; their end.

Note [Waits in torch's own calls]
A loop makes collectives of its own (a loss that is averaged, a barrier), and so do DTensors and
pipelines. Nothing tells when they wait. But whoever waits stands still: its main thread is in the
same call of torch.distributed when it is looked at again, and has begun no collective meanwhile.

Note [DistributedDataParallel]
Its reducer is C++ and begins and awaits all-reduces inside `backward()`, so the innermost Python
frame is the call of the autograd engine, in a wait as in a computation. A thread that waits there
uses no time of a core, and a module of that class is alive with gradients to reduce over gloo.
The garbage collector finds the module: torch keeps no list of them. NCCL's waits block no thread.
"""

import gc
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.hangs.meeting import Meeting

_HISTORY = 4096
_MAX_LINES_SHOWN = 3
_PACKAGE = str(Path(__file__).parents[1])
_DISTRIBUTED = str(Path(dist.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_PACKAGE, _TORCH, str(Path(threading.__file__).parent))
_SAVES = ("save", "async_save")
_OPERATORS = tuple(str(Path(torch.__file__).parent / name) for name in ("_ops.py", "_library"))
_PIPELINE = str(Path(_DISTRIBUTED, "pipelining"))
# Who is elsewhere in torch.distributed computes, as a DTensor does, or writes files.
_CALLS = (
    *(str(Path(_DISTRIBUTED, name)) for name in ("distributed_c10d", "_functional_collectives")),
    _PIPELINE,
)
_BACKWARD = str(Path(_TORCH, "autograd", "graph.py")), "_engine_run_backward"
# Where DistributedDataParallel exchanges shapes, buffers and buckets, outside of backward.
_REPLICAS = (str(Path(_TORCH, "nn/parallel/distributed.py")), str(Path(_DISTRIBUTED, "utils.py")))
_BROKEN = ("gloo", "pair closure")  # in what gloo says of a connection that is closed
_OF_ALL = ("all_", "reduce_scatter", "barrier", "monitored_barrier")


@dataclass(frozen=True)
class TorchWait:
    """A call of torch.distributed that a thread is in.

    ``call`` has the kind of collective alone, so that ranks in different ones can be told; ``text``
    has what this rank came with too. ``group`` is None where it is not known. ``needs_all``: no
    rank of the group can end it without all others.
    """

    call: str
    text: str
    group: Any
    needs_all: bool = False


@dataclass
class Wait:
    """One wait, as it goes on; ``call`` is set where it is in one of torch's own calls."""

    meeting: Meeting
    number: int
    begun_s: float
    serial: int
    told: bool = False
    over: bool = False
    looks: int = 0
    call: TorchWait | None = None
    missing: Sequence[int] = ()

    @property
    def ranks(self) -> Sequence[int]:
        """Return the ranks that must come."""
        if self.meeting.group is None:
            return range(dist.get_world_size())
        return self.meeting.ranks

    def text(self, thread: int) -> str:
        """Return it for people, with the user's line."""
        told = self.call.text if self.call is not None else self.meeting.text
        return told + line_of(thread)


class Ended(NamedTuple):
    """A collective that has ended: its key and number, and the ranks that it was of."""

    key: str
    number: int
    ranks: tuple[int, ...]


@dataclass
class Begun:
    """The collectives that this rank has begun, by their keys and in order; those that have ended.

    ``ended`` has the last one of each group, by its name: groups may be destroyed meanwhile.
    """

    counts: Counter[str] = field(default_factory=Counter)
    order: deque[tuple[str, int]] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    ended: dict[str, Ended] = field(default_factory=dict)
    total: int = 0

    def add(self, meeting: Meeting) -> int:
        """Count one; return its number among those of its key."""
        key = meeting.key
        self.counts[key] = number = self.counts[key] + 1
        self.order.append((key, number))
        self.total += 1
        return number

    def end(self, meeting: Meeting, number: int) -> None:
        """Note that one has ended."""
        name = meeting.group_name
        before = self.ended.get(name)
        with suppress(KeyError, ValueError):  # its group is gone
            ranks = tuple(meeting.ranks) if before is None else before.ranks
            self.ended[name] = Ended(meeting.key, number, ranks)

    def last_of(self, rank: int, said: tuple[str, int] | None) -> str:
        """Return the key of another rank's last collective: as it has said, or one that ended here.

        Ranks that run one program begin the same ones in the same order.
        """
        known = [said] if said and said[0] else []
        ended = [each for each in list(self.ended.values()) if rank in each.ranks]
        known += [(each.key, each.number) for each in ended]
        places = {pair: place for place, pair in enumerate(tuple(self.order))}

        def place(pair: tuple[str, int]) -> int:
            is_ahead = self.counts.get(pair[0], 0) < pair[1]
            return places.get(pair, len(places) if is_ahead else -1)

        return max(known, key=place)[0] if known else ""


class StandingWaits:
    """Finds waits in torch's own calls, by looking again."""

    def __init__(self) -> None:
        self._place: tuple[Any, ...] = ()
        self._since_s = 0.0
        self._found: Wait | None = None
        self._serial = 0

    def look(self) -> Wait | None:
        """Return the wait that the main thread has stood in since the last look, or longer."""
        place = standing()
        if place != self._place:
            self._place, self._found = place, None
            self._since_s = time.monotonic()
            return None
        if self._found is None and (call := torch_wait()) is not None:
            self._serial -= 1
            meeting = Meeting(call.call, "", 0, "torch", call.group)
            self._found = Wait(meeting, 0, self._since_s, self._serial, call=call)
        return self._found


_Flying = deque[tuple[Wait, Sequence[Any]]]


class Flights:
    """Collectives that a device makes while no thread waits for them, as NCCL's.

    They end in the order in which they began, group by group. Whoever has begun one may run ahead
    of its device by a step or so: the time that counts begins when the one before has ended.
    """

    def __init__(self) -> None:
        self._flying: dict[str, _Flying] = {}
        self._lock = threading.Lock()

    def begin(self, wait: Wait, works: Sequence[Any]) -> None:
        """Note one that was begun; those before it that are over keep no tensors alive."""
        with self._lock:
            flying = self._flying.setdefault(wait.meeting.group_name, deque())
            _drop_ended(flying)
            flying.append((wait, works))

    def oldest(self) -> Wait | None:
        """Return the one that has flown longest, of those that others may be waited for in."""
        found: list[Wait] = []
        with self._lock:  # the thread that trains drops them too
            for flying in self._flying.values():
                _drop_ended(flying)
                found += [wait for wait, _ in list(flying)[:1]]
        return min(found, key=lambda wait: wait.begun_s, default=None)


def _drop_ended(flying: _Flying) -> None:
    while flying and _is_over(flying[0][1]):
        flying.popleft()
        if flying:
            flying[0][0].begun_s = max(flying[0][0].begun_s, time.monotonic())


def _is_over(works: Sequence[Any]) -> bool:
    with suppress(RuntimeError):  # it has failed, as its own wait will tell
        return all(work.is_completed() for work in works)
    return True


# -- where this process is
def lines_of_main() -> str:
    """Return the lines of the user's program that the main thread is in, the innermost first."""
    lines = [
        f"{frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        for frame in _frames(threading.main_thread().ident or 0)
        if _is_users(frame)
    ][:_MAX_LINES_SHOWN]
    return f"in {', called by '.join(lines)}" if lines else "in no line of the program's"


def line_of(thread: int) -> str:
    """Return the line of the user's program that a thread is in, as ` (file:line)`."""
    frame = next(filter(_is_users, _frames(thread)), None)
    return "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def save_under_way(thread: int) -> str | None:
    """Return the save of torch that a thread is in, as ``torch.save (file:line)``; not ours."""
    frames = list(_frames(thread))
    names = [frame.f_code.co_filename for frame in frames]
    if any(name.startswith(_PACKAGE) for name in names):
        return None
    for number, frame in enumerate(frames):
        if frame.f_code.co_name in _SAVES and names[number].startswith(_TORCH):
            users = next(filter(_is_users, frames[number:]), frame)
            line = f"{Path(users.f_code.co_filename).name}:{users.f_lineno}"
            return f"torch.{frame.f_code.co_name} ({line})"
    return None


def computed_s() -> float:
    """Return how long the main thread has had a core; 0 where the system does not tell."""
    thread = threading.main_thread().ident
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread or 0))
    return 0.0


def num_begun() -> int:
    """Return how many collectives torch has begun on all groups, as far as backends count."""
    begun = 0
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(Exception):  # a backend that does not
            begun += group._get_sequence_number_for_group()
    return begun


def standing() -> tuple[Any, ...]:
    """Return where the main thread is, and how many collectives it has begun; cheap.

    Where two looks find the same, it has stood still in between; in backward, it has not computed.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return (num_begun(),)
    computed_s_ = round(computed_s(), 2) if _is_backward(frame) else 0.0
    return id(frame), frame.f_lasti, frame.f_code.co_name, computed_s_, num_begun()


def torch_wait() -> TorchWait | None:
    """Return the call of torch.distributed that the main thread is in, if it is in one."""
    frames = list(_frames(threading.main_thread().ident or 0))
    return _wait_in(frames) or _wait_of_replicas(frames)


def wait_of_error(error: BaseException) -> TorchWait | None:
    """Return the call of torch.distributed that an error was raised in, if it was in one."""
    frames: list[FrameType] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    is_broken = any(word in str(error) for word in _BROKEN)
    return _wait_in(frames) or (_wait_of_replicas(frames) if is_broken else None)


def _is_backward(frame: FrameType) -> bool:
    return (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD


def _wait_of_replicas(frames: list[FrameType]) -> TorchWait | None:
    """Return the wait of a DistributedDataParallel; see Note [DistributedDataParallel]."""
    name = DistributedDataParallel.__name__
    if frames and frames[0].f_code.co_filename in _REPLICAS:
        call, group = f"{name}'s exchange of shapes or buffers", _group(frames[:2])
    elif frames and _is_backward(frames[0]):
        found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
        groups = [each.process_group for each in found if each.require_backward_grad_sync]
        groups = [group for group in groups if blocks(group)]
        if not groups:
            return None
        call, group = f"{name}'s reduction of gradients", groups[0]
    else:
        return None
    has_group = group is not None
    return TorchWait(call, f"{call} over {_named(group)}" if has_group else call, group, has_group)


def _wait_in(frames: list[FrameType]) -> TorchWait | None:
    """Return the wait that some frames are in, the innermost first."""
    rest = list(dropwhile(lambda frame: frame.f_code.co_filename.startswith(_OPERATORS), frames))
    inside = list(takewhile(lambda frame: frame.f_code.co_filename.startswith(_DISTRIBUTED), rest))
    if not any(frame.f_code.co_filename.startswith(_CALLS) for frame in inside):
        return None
    if any(frame.f_code.co_filename.startswith(_PIPELINE) for frame in inside):
        return TorchWait("exchange", "an exchange between stages", _group(inside))
    calls = [frame for frame in inside if not frame.f_code.co_name.startswith("_")]
    calls = [frame for frame in calls if frame.f_code.co_name != "wrapper"] or inside
    if calls[0].f_code.co_name.startswith("destroy"):  # which waits for nobody
        return None
    return _collective(calls[0], inside)


def _collective(frame: FrameType, inside: list[FrameType]) -> TorchWait:
    """Return the wait of a collective, from the call that the user, or a DTensor, has made.

    A decorator's frame may lie around it, and a method's inside; the first one without an
    underscore is the collective itself.
    """
    values = frame.f_locals
    tensors = [v for v in values.values() if isinstance(v, torch.Tensor)]
    group = _group(inside)
    kind = frame.f_code.co_name
    shape = ""
    if tensors:
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        shape = f" of {tuple(tensors[0].shape)} {dtype}"
    over = f" over {_named(group)}" if group is not None else ""
    needs_all = group is not None and kind.startswith(_OF_ALL)
    return TorchWait(kind, f"torch's {kind}{shape}{over}", group, needs_all)


def _group(inside: list[FrameType]) -> Any:
    """Return the process group among the arguments, or a stage's; None where none can be found."""
    for frame in inside:
        values = frame.f_locals
        schedule = values.get("self")
        stages = (
            getattr(schedule, "_stage", None),
            *(getattr(schedule, "_stages", None) or ())[:1],
        )
        given = [values.get(name) for name in ("group", "pg", "process_group")]
        given.append(getattr(schedule, "process_group", None))
        for value in (*given, *(getattr(stage, "group", None) for stage in stages)):
            if isinstance(value, str):
                with suppress(Exception):
                    resolve: Any = dist.distributed_c10d._resolve_process_group
                    value = resolve(value)
            if isinstance(value, dist.ProcessGroup):
                return value
        if "group" in values and values["group"] is None:
            default: Any = dist.group.WORLD
            return default
    return None


def _named(group: Any) -> str:
    """Return what a group is for: the axis of a mesh, or all ranks."""
    told = str(getattr(group, "group_desc", "") or "")
    if told.startswith("mesh_"):
        return f"axis '{told.removeprefix('mesh_')}'"
    return f"ranks {', '.join(map(str, dist.get_process_group_ranks(group)[:8]))}"


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


# -- an end to waits, see Note [Breaking a wait off] in watch.py
def backend_of(group: Any) -> Any:
    """Return the backend of a process group that moves training's tensors, or the group itself."""
    if not hasattr(group, "_get_backend"):
        return group
    for device in getattr(group, "_device_types", ()):
        if device.type != "cpu":
            return group._get_backend(device)
    return group._get_backend(torch.device("cpu"))


def blocks(group: Any) -> bool:
    """Tell whether waits on a group block the thread that waits, as gloo's do."""
    try:
        return bool(backend_of(group).name().lower() == "gloo")
    except (AttributeError, RuntimeError):  # no process group of torch's
        return True


def timeout_s_of(group: Any) -> float | None:
    """Return how long a group waits, as its backend was told; None where that is not known."""
    with suppress(AttributeError, RuntimeError):
        return float(backend_of(group).options._timeout.total_seconds())
    return None


def break_off(group: Any) -> bool:
    """Make waits on a group raise; tell whether that is possible."""
    backend = backend_of(group)
    if not blocks(group):
        abort = getattr(backend, "abort", None)
        if abort is None:
            return False
        abort()
        return True
    for peer in range(backend.size()):  # one whose connection is closed already closes no other
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, 0).wait(timedelta(milliseconds=1))
                warnings.warn("a message of nobody has arrived", RuntimeWarning, stacklevel=2)
                return False
    return True


def break_off_all() -> None:
    """Make waits on all groups that torch knows raise."""
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(RuntimeError, AttributeError):
            break_off(group)
