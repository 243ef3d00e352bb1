"""A device for tests, on the CPU, that finds memory which streams use in no order.

Note [What is checked]
Nothing runs asynchronously here; what is kept is what an accelerator would be told. The host, every
stream and the collectives of every process group are timelines, each with a vector clock: how far
it, and through it every other timeline, is known to be done. An operation follows the current
stream and what the host had seen when it was called; a collective follows the stream that it was
started from, and who waits for its work follows it (as with NCCL, ``wait`` orders the current
stream and blocks no host). All memory has who wrote it last and who has read it since. It is a
mistake

- to read what was written, or to write what is written or read, without being ordered after it;
- to read memory that nobody has written since it was allocated, or to use what was freed;
- to free memory that another stream still uses: from its next operation on, the stream that it was
  allocated on may use it for something else (as with torch's caching allocator);
- to use memory on another stream before the one that it was allocated on was so far: there it may
  still be in use as what it was before;
- to use memory of the host and of the device in one operation, copies and scalars apart.

Device and host memory are both the CPU's. Host memory is what `host_memory` gives, what comes out
of operations on it, and scalars made of nothing; a copy between both runs on the current stream,
and the host waits for it unless it is ``non_blocking`` and the memory page-locked.

A step in the background runs at once, as another timeline: it follows what the host had seen when
it was handed over, and the host follows it where it waits for it. What waits for the end of steps
runs where somebody waits for it, so that nothing is ordered by it before.

Operations are seen by a dispatch mode, collectives too. Mistakes are collected, so that ranks stay
together, and raised at the end (a use of freed memory at once: it would end the process).
"""

from __future__ import annotations

import sys
import weakref
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.comm import collectives
from shardwise.comm.control import GroupControl
from shardwise.offload.home import Slab
from shardwise.step import overlap as steps
from shardwise.step.background import BackgroundStep

Clock = dict[str, int]
Work = torch._C._distributed_c10d.Work

_TRANSFERS = {"copy_", "_foreach_copy_", "_to_copy"}
_UNREAD = {  # what is asked of their argument is its shape
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided", "is_same_size"),
}
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# Several under way at once corrupt gloo's heap (torch 2.13; docs/negative-results.md has figures).
# Each is waited for at once, which changes no timeline.
_ONE_AT_A_TIME = "allgather_into_tensor_coalesced_"
_UNTOUCHED = {"set_", "resize_"}  # they change what a tensor is, not its memory


class StreamError(AssertionError):
    """Memory was used in no order."""


@dataclass(frozen=True)
class Access:
    """One use of memory: the ``count``-th step of a timeline."""

    timeline: str
    count: int
    what: str  # the operation, and the line that called it

    def is_before(self, clock):
        return clock.get(self.timeline, 0) >= self.count

    def __str__(self):
        return f"{self.what}, on {self.timeline}"


@dataclass(eq=False)
class Memory:
    """The memory under one storage, and its slices."""

    owner: CheckingStream
    on_host: bool
    is_pinned: bool
    is_scalar: bool  # on the host it may be used with any other memory
    shape: str
    is_blank: bool = False  # allocated, and not written yet
    allocated: Access | None = None
    written: Access | None = None
    read: dict[str, Access] = field(default_factory=dict)  # since then, by timeline
    collective: Clock = field(default_factory=dict)  # that of a functional collective under way
    num_storages: int = 1

    @property
    def uses(self):
        return [*self.read.values(), *([self.written] if self.written else [])]


@dataclass(frozen=True)
class CheckingEvent:
    device: CheckingDevice
    clock: Clock

    def wait(self):
        if not self.device.is_blind:
            self.device.host.join(self.clock)


@dataclass(eq=False)
class CheckingStream:
    """One timeline: a stream of the device, the host, or the collectives of a group."""

    device: CheckingDevice
    name: str
    clock: Clock = field(default_factory=dict)
    freed: list[tuple[str, list[Access]]] = field(default_factory=list)

    def join(self, clock):
        for name, count in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def record(self):
        self.join(self.device.host.clock)
        return CheckingEvent(self.device, dict(self.clock))

    def wait(self, event):
        if not self.device.is_blind:
            self.join(event.clock)

    @contextmanager
    def use(self):
        before, self.device.current = self.device.current, self
        try:
            yield
        finally:
            self.device.current = before


class CheckingDevice:
    """Time on a device that is checked while the context is open; every `Comm` made inside has it.

    ``errors`` are the mistakes so far; they are raised when the context ends.
    """

    def __init__(self):
        self.errors = []
        self.is_blind = False
        self._is_aside = False
        self._streams = {}
        self.host = self._stream("the host")
        self.current = self._stream("the compute stream")
        self.fetch_stream = self._stream("the fetch stream")
        self.evict_stream = self._stream("the evict stream")
        self._memory = {}
        self._works = {}
        self._wait = Work.wait
        self._steps = {}
        self.late_steps = {}
        self._context = ExitStack()
        self.num_operations = self.num_collectives = 0

    # -- device.DeviceTime
    def current_stream(self):
        return self.current

    def new_stream(self):
        return self._stream(f"stream {len(self._streams)}")

    def host_memory(self, numel, dtype, pinned=True):
        with self.aside():
            made = torch.empty(numel, dtype=dtype)
        if numel:
            self._register(made, on_host=True, is_pinned=pinned).is_blank = True
        return made

    def locked_memory(self, num_bytes):
        with self.aside():
            return torch.zeros(num_bytes, dtype=torch.uint8)

    def is_page_locked(self, tensor):
        return self.memory_of(tensor).is_pinned

    def clock(self):
        """No time passes on it."""

    # -- the context
    def __enter__(self):
        for target, name, make in (
            (Work, "wait", self._wait_of),
            (torch.UntypedStorage, "resize_", self._resize_of),
            (torch.UntypedStorage, "__getitem__", self._slice_of),
            (Slab, "allocate", self._taker_of),
            (Tensor, "tolist", self._reader_of),
            (Tensor, "numpy", self._reader_of),
            (GroupControl, "exchange", self._aside_of),
            (GroupControl, "broadcast", self._aside_of),
        ):
            patched = mock.patch.object(target, name, make(getattr(target, name)))
            self._context.enter_context(patched)
        self._context.enter_context(mock.patch.object(collectives, "time_of", lambda _: self))
        step_in_turn = mock.patch.object(
            steps, "ThreadPoolExecutor", lambda _, name: _InTurn(self, "store" in name)
        )
        self._context.enter_context(step_in_turn)
        wait_for_step = self._step_wait_of(BackgroundStep.wait)
        self._context.enter_context(mock.patch.object(BackgroundStep, "wait", wait_for_step))
        self._context.enter_context(_Operations(self))
        return self

    def __exit__(self, kind, error, trace):
        self._context.close()
        for stream in self._streams.values():
            stream.join(self.host.clock)
            self._check_freed(stream)
        if kind is None and self.errors:
            shown = "\n".join(f"  {error}" for error in self.errors[:10])
            raise StreamError(f"{len(self.errors)} mistakes in the order of streams:\n{shown}")

    @contextmanager
    def blind(self):
        """Wait inside as ever, and take no note of it: what a forgotten wait looks like."""
        before, self.is_blind = self.is_blind, True
        try:
            yield
        finally:
            self.is_blind = before

    @contextmanager
    def aside(self):
        """Look at nothing inside."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    # -- what happens, as the patches and the mode tell it
    def run(self, func, args, kwargs):
        """Run one operation of torch."""
        if self._is_aside:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._run_collective(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return self._run_functional(func, args, kwargs)
        arguments = _arguments_of(func)
        if arguments.is_view:
            return func(*args, **kwargs)
        self.num_operations += 1
        name = arguments.operation
        given = _named(func, args, kwargs)
        reads, writes = map(self._memory_under, _read_and_written(func, given))
        like = [t for n in arguments.like for t in _tensors(given.get(n)) if _has_memory(t)]
        is_made_of_nothing = not (reads or writes or like)
        where = self._where(reads, writes or [self.memory_of(t) for t in like])
        on_host = [m for m in (*reads, *writes) if m.on_host and not m.is_scalar]
        if on_host and where is not self.host and name not in _TRANSFERS:
            self._fail(f"{_here(name)} uses memory of the host and of the device")
        if where is not self.host:  # scalars of the host are read when it makes the call
            scalars = [m for m in reads if m.on_host and m.is_scalar]
            self._use(self.host, scalars, [], name)
            reads = [m for m in reads if m not in scalars]
        if reads or writes:
            self._use(where, reads, writes, name)
        out = func(*args, **kwargs)
        made = self._adopt(out, where is self.host, is_made_of_nothing)
        if made and all(memory.on_host for memory in made):
            where = self.host  # a scalar made of nothing
        if name in _UNWRITTEN:
            for memory in made:
                memory.is_blank = True
        elif made:
            self._use(where, [], made, name)
        is_answer = not isinstance(out, Tensor | list | tuple | None)
        is_pinned = all(memory.is_pinned for memory in on_host)
        blocks = not (given.get("non_blocking") and is_pinned)
        if where is not self.host and (is_answer or (on_host and name in _TRANSFERS and blocks)):
            self.host.join(where.clock)
        return out

    def _where(self, reads, writes):
        """Tell what an operation runs on: the host if all memory is the host's."""
        used = (*reads, *writes)
        return self.host if used and all(m.on_host for m in used) else self.current

    def _run_collective(self, func, args, kwargs):
        name = _arguments_of(func).operation
        reads = []
        writes = []
        group = None
        for argument, value in _named(func, args, kwargs).items():
            if argument == "process_group":
                group = dist.ProcessGroup.unbox(value)
            elif argument.startswith("input") or name == "send":
                reads += _tensors(value)
            elif argument.startswith("output") or argument == "tensors":
                writes += _tensors(value)
        assert group is not None
        stream, on_host = self._start_collective(group.group_name, reads, writes, name)
        out = func(*args, **kwargs)
        for found in out if isinstance(out, tuple | list) else (out,):
            if isinstance(found, torch.ScriptObject):
                work = Work.unbox(found)  # the object that the caller gets as well
                if name == _ONE_AT_A_TIME:
                    with self.aside():
                        self._wait(work)
                # The tensors stay until somebody waits, as with NCCL.
                self._works[id(work)] = work, dict(stream.clock), on_host, (reads, writes)
        return out

    def _run_functional(self, func, args, kwargs):
        name = _arguments_of(func).operation
        given = _named(func, args, kwargs)
        group = given.get("group_name")
        if name == "wait_tensor":
            memory = self.memory_of(args[0])
            (self.host if memory.on_host else self.current).join(memory.collective)
        if group is None:
            return func(*args, **kwargs)
        reads, writes = _read_and_written(func, given)
        stream, on_host = self._start_collective(group, reads, writes, name)
        out = func(*args, **kwargs)
        self._use(stream, [], self._adopt(out, on_host, False), name)
        for tensor in _tensors(out):
            self.memory_of(tensor).collective = dict(stream.clock)
        return out

    def _start_collective(self, group, reads, writes, name):
        self.num_collectives += 1
        sent, received = self._memory_under(reads), self._memory_under(writes)
        stream = self._stream(f"the collectives of group {group}")
        stream.join(self.current.clock)
        self._use(stream, sent, received, name)
        return stream, self._where(sent, received) is self.host

    def _wait_of(self, wait):
        def checked(work, *args, **kwargs):
            with self.aside():  # gloo may copy what has come
                done = wait(work, *args, **kwargs)
            if not self.is_blind:
                _, clock, on_host, _ = self._works.pop(id(work), (None, {}, False, None))
                (self.host if on_host else self.current).join(clock)
            return done

        return checked

    def run_step(self, run):
        """Run a step of the background on a timeline of its own."""
        step = run.__self__
        thread = self._stream("the thread that steps")
        thread.join(self.host.clock)
        host, self.host = self.host, thread
        try:
            run()
        finally:
            self.host = host
        self._steps[id(step)] = step, dict(thread.clock)

    def _step_wait_of(self, wait):
        def checked(step):
            if id(step) in self.late_steps:
                self.run_step(self.late_steps.pop(id(step)))
            wait(step)
            if not self.is_blind:
                self.host.join(self._steps[id(step)][1])

        return checked

    def _resize_of(self, resize):
        def checked(storage, num_bytes):
            if self._is_aside or num_bytes == storage.nbytes():
                return resize(storage, num_bytes)
            found = self._memory.get(storage._cdata)
            if found is not None and storage.nbytes():
                self._free(found[0])
            if found is not None:
                memory = found[0]
                memory.written, memory.read = None, {}
                memory.owner, memory.is_blank = self.current, True
                memory.allocated = self._now("the allocation")
            return resize(storage, num_bytes)

        return checked

    def _slice_of(self, get):
        def checked(storage, where):
            part = get(storage, where)
            if isinstance(part, torch.UntypedStorage) and storage._cdata in self._memory:
                memory = self._memory[storage._cdata][0]
                memory.num_storages += 1
                self._watch(part, memory)
            return part

        return checked

    def _taker_of(self, take):
        """Know each piece of a slab apart; nobody uses the slab itself."""

        def checked(slab, *args):
            with self.aside():
                made = take(slab, *args)
            if made.numel():
                self._register(made, on_host=True, is_pinned=True)
            return made

        return checked

    def _reader_of(self, read):
        """Let the host wait for the device before it reads a tensor's elements."""

        def checked(tensor, *args, **kwargs):
            if not self._is_aside and type(tensor) is Tensor:
                memory = self._memory_under([tensor])
                where = self._where(memory, [])
                self._use(where, memory, [], "a read of all elements")
                self.host.join(where.clock)
            return read(tensor, *args, **kwargs)

        return checked

    def _aside_of(self, call):
        """Run small exchanges, which are the host's alone, unseen."""

        def checked(*args, **kwargs):
            with self.aside():
                return call(*args, **kwargs)

        return checked

    # -- memory
    def memory_of(self, tensor):
        """Return what is known about a tensor's memory; what comes from outside is the device's."""
        storage = tensor.untyped_storage()
        found = self._memory.get(storage._cdata)
        if found is not None:
            return found[0]
        is_scalar = tensor.dim() == 0 and storage.nbytes() == tensor.element_size()
        return self._register(tensor, on_host=is_scalar)

    def _memory_under(self, tensors):
        """Return the memory under tensors that have any. **Raises** where it was freed."""
        found = []
        for tensor in tensors:
            if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
                continue
            if not tensor.untyped_storage().nbytes():
                self._fail(f"{_here('a use')} of {tuple(tensor.shape)}, whose memory was freed")
                raise StreamError(self.errors[-1])  # to go on would end the process
            found.append(self.memory_of(tensor))
        return found

    def _register(self, tensor, on_host, is_pinned=False):
        shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        memory = Memory(self.current, on_host, is_pinned, tensor.dim() == 0, shape)
        self._watch(tensor.untyped_storage(), memory)
        return memory

    def _watch(self, storage, memory):
        key = storage._cdata
        self._memory[key] = memory, weakref.ref(storage, partial(self._forget, key))

    def _forget(self, key, reference):
        found = self._memory.get(key)
        if found is None or found[1] is not reference:
            return
        del self._memory[key]
        found[0].num_storages -= 1
        if found[0].num_storages == 0:
            self._free(found[0])

    def _free(self, memory):
        owner = memory.owner
        left = [a for a in memory.uses if a.timeline != owner.name]
        if left and not memory.on_host:  # torch keeps page-locked memory until copies are done
            what = f"{_here('memory')} of {memory.shape} was freed"
            owner.freed.append((what, left))

    def _adopt(self, out, on_host, is_made_of_nothing):
        """Return the memory of an operation's outputs that is new."""
        made = []
        for tensor in _tensors(out):
            if not _has_memory(tensor) or tensor.untyped_storage()._cdata in self._memory:
                continue
            is_host_scalar = is_made_of_nothing and tensor.dim() == 0
            made.append(self._register(tensor, on_host or is_host_scalar))
            if not made[-1].on_host:
                made[-1].allocated = self._now("the allocation")
        return made

    def _now(self, what):
        """Return what the current stream has come to."""
        name = self.current.name
        return Access(name, self.current.clock.get(name, 0), _here(what))

    def _use(self, stream, reads, writes, name):
        """Note that a timeline uses memory, and check what must be ordered before."""
        if not reads and not writes:
            return
        stream.join(self.host.clock)
        self._check_freed(stream)
        stream.clock[stream.name] = stream.clock.get(stream.name, 0) + 1
        access = Access(stream.name, stream.clock[stream.name], _here(name))
        for memory in (*reads, *writes):
            self._check(access, "uses", memory, memory.allocated, "precedes", stream.clock)
        for memory in reads:
            if memory.is_blank:
                self._fail(f"{access}, reads {memory.shape}, in which nothing was written")
            self._check(access, "reads", memory, memory.written, "writes", stream.clock)
            memory.read[stream.name] = access
        for memory in writes:
            self._check(access, "writes", memory, memory.written, "writes", stream.clock)
            for before in memory.read.values():
                self._check(access, "writes", memory, before, "reads", stream.clock)
            memory.written, memory.read, memory.is_blank = access, {}, False

    def _check(self, access, verb, memory, before, its_verb, clock):
        if before is not None and not before.is_before(clock):
            self._fail(f"{access}, {verb} {memory.shape} while {before}, {its_verb} it")

    def _check_freed(self, stream):
        freed, stream.freed = stream.freed, []
        for what, left in freed:
            for access in left:
                if not access.is_before(stream.clock):
                    self._fail(f"{what} while {access}, uses it")

    def _fail(self, text):
        if text not in self.errors:
            self.errors.append(text)

    def _stream(self, name):
        return self._streams.setdefault(name, CheckingStream(self, name))


@dataclass(frozen=True)
class _InTurn:
    """Stands for the thread that steps, or (``is_late``) for the one that waits for steps."""

    device: CheckingDevice
    is_late: bool

    def submit(self, call, *args):
        done = Future()
        step = getattr(call, "__self__", None)
        if isinstance(step, BackgroundStep) and self.is_late:
            self.device.late_steps[id(step)] = call
        elif isinstance(step, BackgroundStep):
            self.device.run_step(call)
        else:
            call(*args)
        done.set_result(None)
        return done


class _Operations(TorchDispatchMode):
    """Shows the device every operation on plain tensors."""

    def __init__(self, device):
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled under it; else every operation would turn Dynamo off

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if FakeTensor in types:  # DTensor asks what shape an operation would give
            return func(*args, **(kwargs or {}))
        plain = torch._C._disabled_torch_dispatch_impl
        if any(t.__torch_dispatch__ is not plain for t in types):
            return NotImplemented  # DTensors come again as what they are made of
        return self._device.run(func, args, kwargs or {})


@dataclass(frozen=True)
class Arguments:
    """What an operation does with its arguments, by name; of views it does nothing with memory."""

    operation: str
    names: tuple[str, ...]
    read: tuple[str, ...]
    written: tuple[str, ...]
    like: tuple[str, ...]  # asked for their shape and device
    is_view: bool


@cache
def _arguments_of(func):
    name = func._schema.name.partition("::")[2]
    arguments = func._schema.arguments
    tensors = tuple(a.name for a in arguments if "Tensor" in str(a.type))
    aliases = {a.name: a.alias_info for a in arguments if a.alias_info is not None}
    written = tuple(n for n, alias in aliases.items() if alias.is_write)
    read = tuple(n for n in tensors if n not in aliases and name not in _UNREAD)
    like = tensors if name in _UNREAD else ()
    is_view = name in _UNTOUCHED or len(aliases) > len(written)
    return Arguments(name, tuple(a.name for a in arguments), read, written, like, is_view)


def _named(func, args, kwargs):
    return {**dict(zip(_arguments_of(func).names, args, strict=False)), **kwargs}


def _read_and_written(func, given):
    arguments = _arguments_of(func)
    return (
        [tensor for name in arguments.read for tensor in _tensors(given.get(name))],
        [tensor for name in arguments.written for tensor in _tensors(given.get(name))],
    )


def _tensors(value):
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _has_memory(tensor):
    if tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel():
        return False
    return tensor.untyped_storage().nbytes() > 0


def _here(name):
    """Return what is called, and from which line outside of torch."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{name} ({frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"


@cache
def _is_foreign(path):
    return path == __file__ or "/site-packages/" in path or "/lib/python" in path
