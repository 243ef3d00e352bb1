"""The waits of this process, and a table of the ranks that a wait needs.

Note [Waits in torch's own calls]
A loop makes collectives itself (an averaged loss, a barrier), and so do DTensors, pipelines and the
reducer of `DistributedDataParallel` inside `backward()`. They report no wait. A wait is detected by
comparing two looks: the main thread is in the same call, and no collective has begun in between.
The call of the autograd engine is the same for a computation, so in it the thread must also have
used no time of a core.

Note [The table]
A wait needs the ranks of its collective. If one of these ranks waits in another collective, the
ranks of that collective are needed too, and so on. Each rank of the table waits, or is in a line of
the program, or is gone: it has died, ended or failed. If a gone rank follows another rank's
failure, its verdict is passed on instead of a new one.
"""

import sys
import threading
import time
import tomllib
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import dropwhile, takewhile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, name_ranks, ranks_of
from shardwise.hangs.heartbeat import (
    ENDED_WELL,
    Heartbeat,
    Heartbeats,
    WaitRecord,
    frames_of,
    line_of,
)
from shardwise.processes import Life, Process

FAILED = "it cannot end: "
_MAX_SHOWN = 8
_OF_UNIT = " of unit '"
_DISTRIBUTED = str(Path(dist.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
_OPERATORS = tuple(str(Path(_TORCH, name)) for name in ("_ops.py", "_library"))
_DDP, _PIPELINE = str(Path(_TORCH, "nn/parallel/distributed.py")), f"{_DISTRIBUTED}/pipelining"
# A thread elsewhere in torch.distributed computes, as in a DTensor, or writes files.
_HELPERS = ("distributed_c10d", "_functional_collectives", "utils.py")
_CALLS = (*(str(Path(_DISTRIBUTED, name)) for name in _HELPERS), _DDP, _PIPELINE)
_BACKWARD = str(Path(_TORCH, "autograd", "graph.py")), "_engine_run_backward"
_BROKEN = ("gloo", "pair closure")  # gloo's words for a closed connection
_NEED_ALL = ("all_", "reduce_scatter", "barrier", "monitored_barrier")
_TEXTS = tomllib.loads(files(__package__).joinpath("texts.toml").read_text(encoding="utf-8"))


# -- waits


@dataclass(eq=False)
class Wait:
    """A collective in flight, or a call of torch.distributed by the program.

    ``number`` is that of the collective among those of its key. A call of torch's has 0, and
    ``torch_text`` describes it with this rank's arguments. ``needs_all``: no rank can end it
    without all others.
    """

    key: CollectiveKey
    number: int = 0
    begun_s: float = field(default_factory=time.monotonic)
    torch_text: str = ""
    needs_all: bool = True
    is_reported: bool = False
    is_ended: bool = False

    @property
    def waited_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.begun_s

    @property
    def text(self) -> str:
        """Its description for messages."""
        return self.torch_text or self.key.text

    def record(self) -> WaitRecord:
        """Return the main thread's wait as other ranks read it.

        **Raises** KeyError or ValueError if its group was destroyed.
        """
        is_any = self.key.group is None and not self.key.members
        return WaitRecord(
            self.key.key,
            self.number,
            tuple(range(dist.get_world_size()) if is_any else self.key.ranks),
            self.text + line_of(threading.main_thread().ident or 0),
            self.needs_all,
            trains=bool(self.key.axis or self.key.about),
        )


class StalledCalls:
    """Finds waits in torch's own calls, see Note [Waits in torch's own calls]."""

    def __init__(self) -> None:
        self._place: tuple[object, ...] = ()
        self._since_s = 0.0
        self._wait: Wait | None = None

    def look(self) -> Wait | None:
        """Return the wait that the main thread has been in since the last look, or longer."""
        place = _place_of_main()
        if place != self._place:
            self._place = place
            self._wait = None
            self._since_s = time.monotonic()
        elif self._wait is None and (wait := torch_call()) is not None:
            wait.begun_s = self._since_s
            self._wait = wait
        return self._wait


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
        """Add a collective that has begun; drop ended ones, which keep their tensors alive."""
        with self._lock:
            launched = self._by_group.setdefault(wait.key.group_name, deque())
            _drop_ended(launched)
            launched.append((wait, works))

    def oldest(self) -> Wait | None:
        """Return the oldest collective that has not ended, of the first ones of all groups."""
        with self._lock:
            for launched in self._by_group.values():
                _drop_ended(launched)
            firsts = [launched[0][0] for launched in self._by_group.values() if launched]
        return min(firsts, key=lambda wait: wait.begun_s, default=None)


def _drop_ended(launched: _Launched) -> None:
    def is_over(works: Sequence[dist.Work]) -> bool:
        with suppress(RuntimeError):  # it has failed, and its own wait raises that
            return all(work.is_completed() for work in works)
        return True

    while launched and is_over(launched[0][1]):
        launched.popleft()
        if launched:
            launched[0][0].begun_s = max(launched[0][0].begun_s, time.monotonic())


# -- calls of torch.distributed by the program


def torch_call() -> Wait | None:
    """Return the call of torch.distributed that the main thread is in, if it is in one."""
    frames = list(frames_of(threading.main_thread().ident or 0))
    return _call_in(frames) or _backward_in(frames)


def call_of_error(error: BaseException) -> Wait | None:
    """Return the call of torch.distributed that has raised an error, if one has."""
    frames: list[FrameType] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        frames.insert(0, trace.tb_frame)
        trace = trace.tb_next
    is_broken = any(word in str(error) for word in _BROKEN)
    return _call_in(frames) or (_backward_in(frames) if is_broken else None)


def _place_of_main() -> tuple[object, ...]:
    """Return the main thread's place, and the number of collectives that torch has begun.

    If two looks return the same, the thread has waited in between.
    """
    begun, main = 0, threading.main_thread().ident or 0
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(Exception):  # a backend that does not count
            begun += group._get_sequence_number_for_group()
    frame = next(frames_of(main), None)
    if frame is None:
        return (begun,)
    core_s = 0.0
    if _is_backward(frame):
        with suppress(AttributeError, OSError):  # a system without this clock
            core_s = round(time.clock_gettime(time.pthread_getcpuclockid(main)), 2)
    return id(frame), frame.f_lasti, frame.f_code.co_name, core_s, begun


def _is_backward(frame: FrameType) -> bool:
    return (frame.f_code.co_filename, frame.f_code.co_name) == _BACKWARD


def _backward_in(frames: list[FrameType]) -> Wait | None:
    if not frames or not _is_backward(frames[0]):
        return None
    return _torch_wait("backward(), in a reduction of gradients", dist.group.WORLD, True)


def _call_in(frames: list[FrameType]) -> Wait | None:
    """Return the call that some frames are in, the innermost first.

    A decorator's frame may be around the collective, and a method's inside: the first name without
    an underscore is the collective's, which the user or a DTensor has called.
    """
    rest = dropwhile(lambda frame: frame.f_code.co_filename.startswith(_OPERATORS), frames)
    homes = (_DISTRIBUTED, _DDP)
    inside = list(takewhile(lambda frame: frame.f_code.co_filename.startswith(homes), rest))
    names = [frame.f_code.co_filename for frame in inside]
    if not any(name.startswith(_CALLS) for name in names):
        return None
    group = _group_in(inside)
    if any(name.startswith(_PIPELINE) for name in names):
        return _torch_wait("exchange", group, False, "an exchange between stages")
    calls = [frame for frame in inside if not frame.f_code.co_name.startswith("_")]
    calls = [frame for frame in calls if frame.f_code.co_name != "wrapper"] or inside
    kind = calls[0].f_code.co_name
    if kind.startswith("destroy"):  # which waits for no rank
        return None
    given = [v for v in calls[0].f_locals.values() if isinstance(v, torch.Tensor)][:1]
    of = "".join(f" of {tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in given)
    if group is None:
        return _torch_wait(kind, None, False, f"torch's {kind}{of}")
    description = str(getattr(group, "group_desc", "") or "")
    axis = description.removeprefix("mesh_")
    over = f"axis '{axis}'" if axis != description else name_ranks(ranks_of(group))
    needs_all = kind.startswith(_NEED_ALL)
    return _torch_wait(kind, group, needs_all, f"torch's {kind}{of} over {over}")


def _torch_wait(
    kind: str, group: dist.ProcessGroup | None, needs_all: bool, text: str = ""
) -> Wait:
    """Return a call of torch's; its key is the same on all ranks of the group."""
    key = CollectiveKey(kind, "", 0, "torch", group)
    return Wait(key, torch_text=text or kind, needs_all=needs_all)


def _group_in(frames: list[FrameType]) -> dist.ProcessGroup | None:
    """Return the process group among the arguments, or that of a pipeline's stage, if any."""
    default: dist.ProcessGroup | None = dist.group.WORLD
    resolve: Any = dist.distributed_c10d._resolve_process_group
    for frame in frames:
        values = frame.f_locals
        schedule = values.get("self")
        given = [values.get(name) for name in ("group", "pg", "process_group")]
        given.append(getattr(schedule, "process_group", None))
        stages = getattr(schedule, "_stage", None), *(getattr(schedule, "_stages", None) or ())[:1]
        for value in (*given, *(getattr(stage, "group", None) for stage in stages)):
            if isinstance(value, str):
                with suppress(Exception):
                    value = resolve(value)
            if isinstance(value, dist.ProcessGroup):
                return value
        if "group" in values and values["group"] is None:
            return default
    return None


# -- the table of ranks


def needed_ranks(
    heartbeats: Heartbeats, rank: int, wait: WaitRecord, most: int = sys.maxsize
) -> dict[int, WaitRecord]:
    """Return the ranks that a wait of ``rank`` needs, each with the wait that needs it.

    At most about ``most``, the nearest first. See Note [The table].
    """
    needed: dict[int, WaitRecord] = {}
    todo = [wait]
    while todo and len(needed) < most:
        by = todo.pop(0)
        for other in sorted(by.ranks, key=lambda other: abs(other - rank))[: most + 1]:
            if other == rank or other in needed:
                continue
            needed[other] = by
            beat = heartbeats.newest(other)
            if beat is not None and beat.wait is not None and not beat.has_begun(by):
                todo.append(beat.wait)
    return needed


class WaitTable:
    """The ranks that a wait of ``rank`` needs, by their heartbeats: see Note [The table].

    ``gone`` never come, ``missing`` have not come yet, ``waiting`` wait too.
    """

    def __init__(self, heartbeats: Heartbeats, rank: int, wait: WaitRecord) -> None:
        self.gone: list[int] = []
        self.missing: list[int] = []
        self._heartbeats = heartbeats
        self._rank = rank
        self._waiting: dict[int, WaitRecord] = {rank: wait}
        self._lives: dict[int, tuple[Life, str]] = {}
        for other, by in needed_ranks(heartbeats, rank, wait).items():
            beat = heartbeats.newest(other)
            life, cause = heartbeats.life(other)
            self._lives[other] = life, cause
            failed = beat is not None and bool(beat.failed) and wait.trains
            if failed or _is_gone(beat, life, cause, by):
                self.gone.append(other)
            elif beat is not None and beat.wait is not None and life == "alive" and not beat.left:
                self._waiting[other] = beat.wait
            else:
                self.missing.append(other)

    @property
    def reporter(self) -> int:
        """The rank that logs the table of a long wait: the lowest rank that is in it.

        A rank that lacks heartbeats logs its own table, as the lowest rank may know less. That is
        so without the store, and among more ranks than one rank reads.
        """
        is_incomplete = any(self._heartbeats.newest(rank) is None for rank in self._lives)
        if is_incomplete or not self._heartbeats.is_current:
            return self._rank
        key = self._waiting[self._rank].key
        return min(rank for rank, wait in self._waiting.items() if wait.key == key)

    @property
    def followers(self) -> list[int]:
        """The missing ranks that end because of another rank's failure."""
        beats = {rank: self._heartbeats.newest(rank) for rank in self.missing}
        return [rank for rank, beat in beats.items() if beat is not None and beat.left]

    def describe_unheard(self) -> str | None:
        """Describe missing ranks without a heartbeat; return None if there are none."""
        ranks = [rank for rank in self.missing if self._heartbeats.newest(rank) is None]
        never: str = _TEXTS["table"]["never"]
        return never.format(ranks=name_ranks(ranks)) if ranks else None

    @property
    def may_come(self) -> bool:
        """True if a missing rank is at work, or has not begun to publish heartbeats."""
        beats = {rank: self._heartbeats.newest(rank) for rank in self.missing}
        return any(
            beat is None or (beat.works and self._lives[rank][0] == "alive")
            for rank, beat in beats.items()
        )

    @property
    def stopped(self) -> list[Process]:
        """The stopped processes of missing ranks on this machine."""
        beats = [self._heartbeats.newest(r) for r in self.missing if self._lives[r][0] == "stopped"]
        return [beat.process for beat in beats if beat is not None]

    def describe(self) -> str:
        """Return the table in sentences, or the verdict that a gone rank published."""
        beats = {rank: self._heartbeats.newest(rank) for rank in self.gone}
        causes = [rank for rank, beat in beats.items() if beat is None or not beat.follows]
        verdict = next((beat.failed for beat in beats.values() if beat and beat.failed), "")
        if self.gone and not causes and verdict:
            return verdict.removeprefix(FAILED)
        shown = causes or self.gone or self.missing
        if not self._heartbeats.is_current:  # gone ranks may not have published a stopped rank
            stopped = [rank for rank in self.missing if self._lives[rank][0] == "stopped"]
            shown = list(dict.fromkeys([*stopped, *shown]))
        sentences = [self._describe_rank(rank) for rank in shown[:_MAX_SHOWN]]
        if len(shown) > _MAX_SHOWN:
            sentences.append(f"and {len(shown) - _MAX_SHOWN} more")
        if not self._heartbeats.is_current:
            sentences.insert(0, _TEXTS["table"]["no_store"])
        by_text: dict[str, list[int]] = defaultdict(list)
        for rank, wait in sorted(self._waiting.items()):
            by_text[wait.text].append(rank)
        waiting = "; ".join(f"{name_ranks(ranks)} in {text}" for text, ranks in by_text.items())
        if shown:
            return f"{'; '.join(sentences)}. Waiting: {waiting}"
        return ". ".join([waiting, self._describe_common_cause(), *sentences])

    def _describe_common_cause(self) -> str:
        """Describe the cause if all ranks wait."""
        waits = self._waiting.values()
        if len({wait.key for wait in waits}) == 1:
            return str(_TEXTS["table"]["stuck"])
        are_units = all(_OF_UNIT in wait.text for wait in waits)
        return str(_TEXTS["table"]["other_units" if are_units else "other_calls"])

    def _describe_rank(self, rank: int) -> str:
        beat, (life, cause) = self._heartbeats.newest(rank), self._lives[rank]
        if beat is None:
            return str(_TEXTS["ranks"]["unheard"].format(rank=rank))
        if beat.failed and rank in self.gone:
            return beat.failed.removeprefix(FAILED)
        where, state = beat.where, str(life)
        if beat.left:
            state = "over" if beat.left == ENDED_WELL else "left"
        elif life == "alive":
            state = "computes" if beat.wait is None else "waits"
            where = beat.where if beat.wait is None else beat.wait.text
        kinds = {"signal 6 ": "abort", "signal ": "known", "exit code ": "exited"}
        death = next((kinds[start] for start in kinds if cause.startswith(start)), "unknown")
        if not self._waiting[self._rank].number and death in ("unknown", "abort"):
            death = f"torch_{death}"
        text: str = _TEXTS["ranks"][state].format(
            rank=rank,
            process=beat.process,
            who=f"rank {rank} ({beat.process})",
            left=beat.left,
            where=where,
            death=_TEXTS["death"][death].format(cause=cause),
            last=f"; its last collective: {beat.last}" if beat.last else "",
        )
        return text


def _is_gone(beat: Heartbeat | None, life: Life, cause: str, wait: WaitRecord) -> bool:
    """True if a rank has ended that a wait needs.

    A rank that has ended without an error may have done its part of a message, or of a collective
    of other ranks. It is missing only from a call that needs all ranks and that it has not begun.
    """
    left = beat.left if beat is not None else ""
    if life == "dead" and cause.startswith("signal"):
        return True
    if (life != "dead" and not left) or (beat is not None and beat.has_begun(wait)):
        return False
    if beat is not None and left and beat.follows and life != "dead":
        return False  # it is about to publish the rank that is the cause
    return wait.needs_all or left != ENDED_WELL
