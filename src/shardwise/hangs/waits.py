"""The waits of this process: in our collectives, in torch's calls, on a device; and their lines.

Note [Waits in torch's own calls]
A loop makes collectives itself (an averaged loss, a barrier), and so do DTensors and pipelines.
They report no wait. But a thread that waits stands still: at two looks in succession the main
thread is in the same call of torch.distributed, and no collective has begun in between.

Note [DistributedDataParallel]
Its reducer is C++ and makes all-reduces inside `backward()`, so the innermost Python frame is the
call of the autograd engine, in a wait as in a computation. It is a wait if the thread uses no time
of a core, and a module of that class is alive with gradients to reduce over gloo. The garbage
collector finds the module, as torch keeps no list of them. NCCL's waits block no thread.
"""

import gc
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType, TracebackType

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm.collective_key import CollectiveKey
from shardwise.comm.process_groups import waits_block
from shardwise.hangs.heartbeat import WaitRecord

_MAX_LINES_SHOWN = 3
_PACKAGE = str(Path(__file__).parents[1])
_DISTRIBUTED = str(Path(dist.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_LIBRARIES = (_PACKAGE, _TORCH, str(Path(threading.__file__).parent))
_SAVES = ("save", "async_save")
_OPERATORS = tuple(str(Path(_TORCH, name)) for name in ("_ops.py", "_library"))
_PIPELINE = str(Path(_DISTRIBUTED, "pipelining"))
# A thread elsewhere in torch.distributed computes, as in a DTensor, or writes files.
_CALLS = (
    *(str(Path(_DISTRIBUTED, name)) for name in ("distributed_c10d", "_functional_collectives")),
    _PIPELINE,
)
_BACKWARD = str(Path(_TORCH, "autograd", "graph.py")), "_engine_run_backward"
# DistributedDataParallel exchanges shapes, buffers and buckets here, outside of backward.
_REPLICAS = (str(Path(_TORCH, "nn/parallel/distributed.py")), str(Path(_DISTRIBUTED, "utils.py")))
_BROKEN = ("gloo", "pair closure")  # gloo's words for a closed connection
_NEED_ALL = ("all_", "reduce_scatter", "barrier", "monitored_barrier")


@dataclass(frozen=True)
class TorchCall:
    """A call of torch.distributed that a thread is in.

    ``kind`` is the kind of collective alone, ``text`` has this rank's arguments too. ``group`` is
    None if it is unknown. ``needs_all``: no rank of the group can end it without all others.
    """

    kind: str
    text: str
    group: dist.ProcessGroup | None
    needs_all: bool = False

    @property
    def key(self) -> CollectiveKey:
        """Its key, the same on all ranks of the group."""
        return CollectiveKey(self.kind, "", 0, "torch", self.group)


@dataclass
class Wait:
    """A wait under way.

    ``serial`` is unique in this process, and negative for waits in no call of ours. ``looks``
    counts how often the watch has seen it. ``call`` is torch's own call, if it is one.
    """

    key: CollectiveKey
    number: int
    begun_s: float
    serial: int = -1
    call: TorchCall | None = None
    looks: int = 0
    is_reported: bool = False
    is_ended: bool = False

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that must come."""
        return range(dist.get_world_size()) if self.key.group is None else self.key.ranks

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun_s

    def text(self, thread: int) -> str:
        """Return its description, with the user's line."""
        return (self.key.text if self.call is None else self.call.text) + line_of(thread)

    def record(self) -> WaitRecord:
        """Return its description for other ranks; it is the main thread's."""
        return WaitRecord(
            self.serial,
            self.looks,
            self.key.key,
            self.number,
            tuple(self.ranks),
            self.text(threading.main_thread().ident or 0),
            came=self.call.text if self.call else "",
            is_counted=self.call is None,
            needs_all=self.call is None or self.call.needs_all,
            trains=bool(self.key.axis or self.key.about),
        )


class CollectiveCounts:
    """The collectives that this rank has begun; ``last`` is the key of the last one, its number."""

    def __init__(self) -> None:
        self.by_key: Counter[str] = Counter()
        self.total = 0
        self.last = ("", 0)

    def begin(self, key: CollectiveKey) -> int:
        """Count one; return its number among those of its key."""
        name = key.key
        self.by_key[name] = number = self.by_key[name] + 1
        self.last = name, number
        self.total += 1
        return number


class StalledCalls:
    """Finds waits in torch's own calls, see Note [Waits in torch's own calls]."""

    def __init__(self) -> None:
        self._place: tuple[object, ...] = ()
        self._since_s = 0.0
        self._found: Wait | None = None
        self._serial = 0

    def look(self) -> Wait | None:
        """Return the wait that the main thread has been in since the last look, or longer."""
        place = _place_of_main()
        if place != self._place:
            self._place, self._found, self._since_s = place, None, time.monotonic()
        elif self._found is None and (call := torch_call()) is not None:
            self._serial -= 1
            self._found = Wait(call.key, 0, self._since_s, self._serial, call)
        return self._found


_Launched = deque[tuple[Wait, Sequence[dist.Work]]]


class AsyncCollectives:
    """Collectives that a device runs while no thread waits for them, as NCCL's.

    They end group by group in the order in which they began. A rank may run ahead of its device by
    a step or so: the time of one counts from the end of the one before.
    """

    def __init__(self) -> None:
        self._by_group: dict[str, _Launched] = {}
        self._lock = threading.Lock()  # the main thread and the watch both drop the ended ones

    def add(self, wait: Wait, works: Sequence[dist.Work]) -> None:
        """Note one that has begun; drop the ended ones, whose tensors would stay alive."""
        with self._lock:
            launched = self._by_group.setdefault(wait.key.group_name, deque())
            _drop_ended(launched)
            launched.append((wait, works))

    def oldest(self) -> Wait | None:
        """Return the first of its group that has not ended, and of these the oldest."""
        found: list[Wait] = []
        with self._lock:
            for launched in self._by_group.values():
                _drop_ended(launched)
                found += [wait for wait, _ in list(launched)[:1]]
        return min(found, key=lambda wait: wait.begun_s, default=None)


def _drop_ended(launched: _Launched) -> None:
    def is_over(works: Sequence[dist.Work]) -> bool:
        with suppress(RuntimeError):  # it has failed, and its own wait raises that
            return all(work.is_completed() for work in works)
        return True

    while launched and is_over(launched[0][1]):
        launched.popleft()
        if launched:
            launched[0][0].begun_s = max(launched[0][0].begun_s, time.monotonic())


# -- where this process is
def lines_of_main() -> str:
    """Return the lines of the user's program that the main thread is in, the innermost first."""
    frames = filter(_is_users, _frames(threading.main_thread().ident or 0))
    lines = [f"{frame.f_code.co_name} ({_line(frame)})" for frame in frames][:_MAX_LINES_SHOWN]
    return f"in {', called by '.join(lines)}" if lines else "in no line of the program's"


def line_of(thread: int) -> str:
    """Return the line of the user's program that a thread is in, as ` (file:line)`."""
    frame = next(filter(_is_users, _frames(thread)), None)
    return "" if frame is None else f" ({_line(frame)})"


def save_under_way(thread: int) -> str | None:
    """Return the save of torch that a thread is in, as ``torch.save (file:line)``; not ours."""
    frames = list(_frames(thread))
    names = [frame.f_code.co_filename for frame in frames]
    if any(name.startswith(_PACKAGE) for name in names):
        return None
    for number, frame in enumerate(frames):
        if frame.f_code.co_name in _SAVES and names[number].startswith(_TORCH):
            caller = next(filter(_is_users, frames[number:]), frame)
            return f"torch.{frame.f_code.co_name} ({_line(caller)})"
    return None


def computed_s() -> float:
    """Return the seconds that the main thread has had a core; 0 if the system does not tell."""
    thread = threading.main_thread().ident
    with suppress(AttributeError, OSError):
        return time.clock_gettime(time.pthread_getcpuclockid(thread or 0))
    return 0.0


def num_begun() -> int:
    """Return how many collectives torch has begun on all groups, as far as backends count."""
    begun = 0
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(Exception):  # a backend that does not count
            begun += group._get_sequence_number_for_group()
    return begun


def _place_of_main() -> tuple[object, ...]:
    """Return where the main thread is, and how many collectives it has begun.

    If two looks find the same, it has stood still in between; in backward, without computing.
    """
    frame = next(_frames(threading.main_thread().ident or 0), None)
    if frame is None:
        return (num_begun(),)
    core_s = round(computed_s(), 2) if _is_backward(frame) else 0.0
    return id(frame), frame.f_lasti, frame.f_code.co_name, core_s, num_begun()


def torch_call() -> TorchCall | None:
    """Return the call of torch.distributed that the main thread is in, if it is in one."""
    frames = list(_frames(threading.main_thread().ident or 0))
    return _call_in(frames) or _call_of_replicas(frames)


def call_of_error(error: BaseException) -> TorchCall | None:
    """Return the call of torch.distributed that has raised an error, if one has."""
    frames: list[FrameType] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    is_broken = any(word in str(error) for word in _BROKEN)
    return _call_in(frames) or (_call_of_replicas(frames) if is_broken else None)


def _is_backward(frame: FrameType) -> bool:
    return (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD


def _call_of_replicas(frames: list[FrameType]) -> TorchCall | None:
    """Return the call of a DistributedDataParallel; see Note [DistributedDataParallel]."""
    name = DistributedDataParallel.__name__
    if frames and frames[0].f_code.co_filename in _REPLICAS:
        kind, group = f"{name}'s exchange of shapes or buffers", _group_in(frames[:2])
    elif frames and _is_backward(frames[0]):
        found = [o for o in gc.get_objects() if issubclass(type(o), DistributedDataParallel)]
        groups = [each.process_group for each in found if each.require_backward_grad_sync]
        kind = f"{name}'s reduction of gradients"
        group = next(filter(waits_block, groups), None)
        if group is None:
            return None
    else:
        return None
    return TorchCall(kind, kind + _over(group), group, group is not None)


def _call_in(frames: list[FrameType]) -> TorchCall | None:
    """Return the call that some frames are in, the innermost first.

    A decorator's frame may be around the collective, and a method's inside: the first name without
    an underscore is the collective's, which the user or a DTensor has called.
    """
    rest = dropwhile(lambda frame: frame.f_code.co_filename.startswith(_OPERATORS), frames)
    inside = list(takewhile(lambda frame: frame.f_code.co_filename.startswith(_DISTRIBUTED), rest))
    names = [frame.f_code.co_filename for frame in inside]
    if not any(name.startswith(_CALLS) for name in names):
        return None
    group = _group_in(inside)
    if any(name.startswith(_PIPELINE) for name in names):
        return TorchCall("exchange", "an exchange between stages", group)
    calls = [frame for frame in inside if not frame.f_code.co_name.startswith("_")]
    calls = [frame for frame in calls if frame.f_code.co_name != "wrapper"] or inside
    kind = calls[0].f_code.co_name
    if kind.startswith("destroy"):  # which waits for no rank
        return None
    given = [v for v in calls[0].f_locals.values() if isinstance(v, torch.Tensor)][:1]
    of = "".join(f" of {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given)
    needs_all = group is not None and kind.startswith(_NEED_ALL)
    return TorchCall(kind, f"torch's {kind}{of}{_over(group)}", group, needs_all)


def _group_in(frames: list[FrameType]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments, or that of a pipeline's stage, if any."""
    default: dist.ProcessGroup | None = dist.group.WORLD
    for frame in frames:
        values = frame.f_locals
        schedule = values.get("self")
        given = [values.get(name) for name in ("group", "pg", "process_group")]
        given.append(getattr(schedule, "process_group", None))
        stages = getattr(schedule, "_stage", None), *(getattr(schedule, "_stages", None) or ())[:1]
        for value in (*given, *(getattr(stage, "group", None) for stage in stages)):
            if isinstance(value, str):
                with suppress(Exception):
                    value = dist.distributed_c10d._resolve_process_group(value)  # type: ignore[arg-type]
            if isinstance(value, dist.ProcessGroup):
                return value
        if "group" in values and values["group"] is None:
            return default
    return None


def _over(group: dist.ProcessGroup | None) -> str:
    """Return the mesh axis or the ranks of a group, for a message."""
    if group is None:
        return ""
    description = str(getattr(group, "group_desc", "") or "")
    if description.startswith("mesh_"):
        return f" over axis '{description.removeprefix('mesh_')}'"
    return f" over ranks {', '.join(map(str, dist.get_process_group_ranks(group)[:8]))}"


def _frames(thread: int) -> Iterator[FrameType]:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((*_LIBRARIES, "<"))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
