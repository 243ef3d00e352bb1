"""Differences between devices; the only file that uses ``torch.cuda``.

Note [Time on a device]
An accelerator runs each stream in order and several streams concurrently, while the host continues.
`DeviceTime` has the parts that the engine needs: streams, events on them, and host memory for
copies that do not block. On the CPU all work is done when a call returns, so these do nothing
there. `Comm` has one; tests replace it by one that finds missing ordering
(``tests/checking_device.py``).
"""

import os
import resource
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import Work

from shardwise.host import cores_of, resident_bytes, total_host_bytes


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank: a CUDA device if available, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def current_device(device_type: str) -> torch.device:
    """Return the device of this process for a mesh of ``device_type``."""
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak so far: the allocator's on CUDA, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak_memory(device: torch.device) -> int:
    """Reset `peak_memory_bytes`, if the system can; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(
        OSError
    ):  # Linux alone; proc(5), clear_refs: 5 resets the peak of resident memory
        Path("/proc/self/clear_refs").write_text("5")
    return memory_in_use_bytes(device)


def memory_in_use_bytes(device: torch.device) -> int:
    """Return the bytes in use: the allocator's on CUDA, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return resident_bytes() or peak_memory_bytes(device)


@dataclass(frozen=True)
class MemoryFigures:
    """A device's memory since its peak was last reset, in bytes; of the CPU, of this process.

    ``reserved_bytes`` is the peak that the allocator holds. ``capacity_bytes`` is the device's, or
    the host's. ``num_retries`` counts allocations that were retried after the allocator freed its
    cache, ``num_ooms`` allocations that failed.
    """

    peak_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    num_retries: int = 0
    num_ooms: int = 0


def memory_figures(device: torch.device) -> MemoryFigures:
    """Return the allocator's figures of a device. **Cost** on CUDA about 0.1 ms."""
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        return MemoryFigures(
            stats.get("allocated_bytes.all.peak", 0),
            stats.get("reserved_bytes.all.peak", 0),
            torch.cuda.get_device_properties(device).total_memory,
            stats.get("num_alloc_retries", 0),
            stats.get("num_ooms", 0),
        )
    peak = peak_memory_bytes(device)
    return MemoryFigures(peak, peak, total_host_bytes())


def name_of(device: torch.device) -> str:
    """Return the name of the device's model, e.g. "NVIDIA H100"; of the CPU, "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed what initialisers draw from: the device's generator, and the host's."""
    if device.type == "cpu":  # torch.manual_seed formats the stack for each kind of device there is
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def fork_rng_devices(device: torch.device) -> list[torch.device]:
    """Return the devices whose generators ``torch.random.fork_rng`` has to save."""
    return [device] if device.type == "cuda" else []


def accelerator_generator(device: torch.device) -> torch.Tensor | None:
    """Return the state of the device's default generator, uint8 on the CPU; None for the CPU."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_accelerator_generator(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of the device's default generator."""
    torch.cuda.set_rng_state(state, device)


def host_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return host memory for copies from ``device``: uint8 [num_bytes], touched, page-locked."""
    return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")


def _locked_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return page-locked zeros of just this size, where the device's library can lock any memory.

    torch's own allocator rounds up to a power of two (2.11 to 2.15, CachingHostAllocator).
    """
    if device.type != "cuda" or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    made = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")  # written by whoever calls
    library, address = torch.cuda.cudart(), made.data_ptr()
    if int(library.cudaHostRegister(address, num_bytes, 0)):
        return host_buffer(num_bytes, device)
    weakref.finalize(made.untyped_storage(), library.cudaHostUnregister, address)
    return made


def run_near(device: torch.device) -> int | None:
    """Run this thread on the cores next to a device; return their number.

    Memory that the thread touches first is near too: Linux takes a page from that core's node
    (numa(7)). If the device's place is unknown (sysfs, ``local_cpulist``), the cores stay
    unchanged, and the result is None.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # another thread begins with device 0
    near = cores_near(device) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return len(near) or None


def cores_near(device: torch.device) -> set[int]:
    """Return the cores on the device's NUMA node; empty if unknown."""
    if device.type != "cuda":
        return set()
    facts = torch.cuda.get_device_properties(device)
    numbers = (getattr(facts, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    place = "{:04x}:{:02x}:{:02x}.0".format(*(number or 0 for number in numbers))
    return cores_of(Path("/sys/bus/pci/devices") / place / "local_cpulist")


class Event(Protocol):
    """A point in a stream, after all work enqueued until then."""

    def wait(self) -> None:
        """Block the host until the device reaches the event."""


class Stream(Protocol):
    """A queue of a device: it runs in order, concurrently with other streams."""

    def record(self) -> Event:
        """Return an event after all work enqueued until now."""

    def wait(self, event: Any) -> None:
        """Make later work wait for an event; the host does not wait."""

    def use(self) -> AbstractContextManager[object]:
        """Return a context that enqueues work on this stream."""


class DeviceTime(Protocol):
    """The streams of a device, and its copies from and to the host; see Note [Time on a device].

    Slices on the host are fetched on one stream and evicted on another, because a link carries
    both directions at once.
    """

    @property
    def fetch_stream(self) -> Stream:
        """The stream of copies from the host."""

    @property
    def evict_stream(self) -> Stream:
        """The stream of copies to the host."""

    def current_stream(self) -> Stream:
        """Return the stream on which work is enqueued now."""

    def new_stream(self) -> Stream:
        """Return another stream."""

    def host_memory(self, numel: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Return uninitialised host memory; page-locked, so that copies need not block."""

    def locked_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros on the host, uint8: page-locked, of this size and no more, and near."""

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Return True if copies of this host memory need not block."""

    def clock(self) -> "DeviceClock | None":
        """Return a clock of the device's work; None if the host's clock suffices."""


class DeviceMoment(Protocol):
    """A time of a device, known when the device has reached it."""

    def seconds_since(self, earlier: Any) -> float:
        """Return the seconds from another moment to this one; waits for both."""


class DeviceClock(Protocol):
    """Times a device's work without making the host wait."""

    def now(self) -> DeviceMoment:
        """Return the time at which the current stream finishes its present work."""

    def when_over(self, works: Iterable[Work]) -> DeviceMoment:
        """Return the time at which torch's collectives end."""


@contextmanager
def follow_current(time: DeviceTime, stream: Stream) -> Iterator[None]:
    """Enqueue work inside on ``stream``, after the current stream's present work."""
    stream.wait(time.current_stream().record())
    with stream.use():
        yield


class HostTime:
    """The CPU's time, only stream and event: all work is done when a call returns."""

    @property
    def fetch_stream(self) -> "HostTime":
        """The only stream."""
        return self

    evict_stream = fetch_stream

    def current_stream(self) -> "HostTime":
        """Return the only stream."""
        return self

    new_stream = record = current_stream

    def wait(self, event: Any = None) -> None:
        """Do nothing."""

    def use(self) -> AbstractContextManager[object]:
        """Do nothing."""
        return nullcontext()

    def host_memory(self, numel: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def locked_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros."""
        return host_buffer(num_bytes, torch.device("cpu"))

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Return True: nothing is copied, so no lock is needed."""
        return True

    def clock(self) -> None:
        """Return None: the host's clock times all work."""


@dataclass(frozen=True)
class _AcceleratorEvent:
    event: torch.Event

    def wait(self) -> None:
        self.event.synchronize()


@dataclass(frozen=True)
class _AcceleratorStream:
    stream: torch.Stream

    def record(self) -> _AcceleratorEvent:
        return _AcceleratorEvent(self.stream.record_event())

    def wait(self, event: _AcceleratorEvent) -> None:
        self.stream.wait_event(event.event)

    @contextmanager
    def use(self) -> Iterator[None]:
        # torch.Stream's own context is kept on the stream: in torch 2.11 it cannot be nested.
        before = torch.accelerator.current_stream(self.stream.device)
        torch.accelerator.set_stream(self.stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)


@dataclass(frozen=True)
class _TimedEvent:
    event: torch.Event

    def seconds_since(self, earlier: "_TimedEvent") -> float:
        self.event.synchronize()
        return earlier.event.elapsed_time(self.event) / 1e3


class _AcceleratorClock:
    """Timed events on the current stream, or on one that waits for collectives."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._beside = _AcceleratorStream(torch.Stream(device))

    def now(self) -> _TimedEvent:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return _TimedEvent(event)

    def when_over(self, works: Iterable[Work]) -> _TimedEvent:
        with self._beside.use():
            for work in works:
                work.wait()
            return self.now()


class _AcceleratorTime:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def fetch_stream(self) -> _AcceleratorStream:
        return self.new_stream()

    @cached_property
    def evict_stream(self) -> _AcceleratorStream:
        return self.new_stream()

    def current_stream(self) -> _AcceleratorStream:
        return _AcceleratorStream(torch.accelerator.current_stream(self._device))

    def new_stream(self) -> _AcceleratorStream:
        return _AcceleratorStream(torch.Stream(self._device))

    def host_memory(self, numel: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pinned)

    def locked_memory(self, num_bytes: int) -> torch.Tensor:
        with ThreadPoolExecutor(1, initializer=run_near, initargs=(self._device,)) as near:
            return near.submit(_locked_zeros, num_bytes, self._device).result()

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()

    def clock(self) -> _AcceleratorClock:
        return _AcceleratorClock(self._device)


@cache
def time_of(device: torch.device) -> DeviceTime:
    """Return the time of a device; cached, as streams are few."""
    return HostTime() if device.type == "cpu" else _AcceleratorTime(device)


def wait_for_copies(devices: set[torch.device]) -> None:
    """Wait for non-blocking copies from these devices."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
