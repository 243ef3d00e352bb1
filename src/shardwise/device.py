"""What differs between devices; the only file that says ``torch.cuda``.

Note [Time on a device]
An accelerator runs what is enqueued on a stream in order, streams beside each other, and the host
goes on meanwhile. `DeviceTime` is what the engine asks about that: streams, events on them, and
host memory that copies need not block for. On the CPU everything is done when a call returns, so
all of it is empty there. `Comm` has one; tests put one in its place that finds what is not ordered
(``tests/checking_device.py``).
"""

import os
import resource
import sys
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import torch


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank: its CUDA device where there is one, else the CPU."""
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
    """Let `peak_memory_bytes` begin anew, where the system can; return the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(
        OSError
    ):  # Linux alone; proc(5), clear_refs: 5 resets the peak of resident memory
        Path("/proc/self/clear_refs").write_text("5")
    return memory_in_use_bytes(device)


def memory_in_use_bytes(device: torch.device) -> int:
    """Return what is in use now: the allocator's on CUDA, resident memory of the process on CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no /proc outside Linux
        return peak_memory_bytes(device)
    return resident_pages * resource.getpagesize()


def available_host_bytes() -> int:
    """Return how much memory this process may still take on its host, without swapping.

    What the system has (proc(5), MemAvailable) or, if less, what the limit of the process's control
    group leaves: memory.max and memory.current (version 2), or their names of version 1.
    """
    found = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(n.split()[1]) for n in lines if n.startswith("MemAvailable")) * 1024)
    groups = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such group; "max", where it has no limit
            left = int((groups / limit).read_text()) - int((groups / used).read_text())
            found.append(max(left + _cached_bytes(groups / limit), 0))
    return min(found, default=sys.maxsize)


def _cached_bytes(limit: Path) -> int:
    """Return what a control group's use has of pages that the system can drop."""
    lines = (limit.parent / "memory.stat").read_text().splitlines()
    counts = dict(line.split() for line in lines)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


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
    """Let this thread work for a device: on the cores next to it, of which the number is returned.

    With it goes the memory that it writes first: Linux gives a page from the node of that core
    (numa(7)). Without what the system tells of the device's place (sysfs, ``local_cpulist``) the
    cores stay as they are, and None is returned.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # another thread begins with device 0
    near = cores_near(device) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return len(near) or None


def cores_near(device: torch.device) -> set[int]:
    """Return the cores on the device's node of memory; none where that is not known."""
    if device.type != "cuda":
        return set()
    facts = torch.cuda.get_device_properties(device)
    numbers = (getattr(facts, f"pci_{name}_id", None) for name in ("domain", "bus", "device"))
    place = "{:04x}:{:02x}:{:02x}.0".format(*(number or 0 for number in numbers))
    return _cores_of(Path("/sys/bus/pci/devices") / place / "local_cpulist")


def _cores_of(cpulist: Path) -> set[int]:
    """Read a list of cores as the system writes it: ``0-3,8``."""
    with suppress(OSError, ValueError):
        ranges = (part.split("-") for part in cpulist.read_text().strip().split(",") if part)
        return {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}
    return set()


class Event(Protocol):
    """A moment of a stream: what was enqueued on it until then."""

    def wait(self) -> None:
        """Block the host until the device is there."""


class Stream(Protocol):
    """A queue of a device: it runs in order, and beside other streams."""

    def record(self) -> Event:
        """Return the moment at which all that is enqueued now is done."""

    def wait(self, event: Any) -> None:
        """Let what is enqueued from now on follow an event; the host does not wait."""

    def use(self) -> AbstractContextManager[Any]:
        """Enqueue on this stream what is called inside."""


class DeviceTime(Protocol):
    """The streams of a device, and its copies from and to the host; see Note [Time on a device].

    Slices that live on the host are fetched on one stream of their own, and what goes back is
    evicted on another: a link carries both ways at once.
    """

    @property
    def fetch_stream(self) -> Stream:
        """The stream of copies from the host."""

    @property
    def evict_stream(self) -> Stream:
        """The stream of copies to the host."""

    def current_stream(self) -> Stream:
        """Return the stream that what is called now is enqueued on."""

    def new_stream(self) -> Stream:
        """Return another stream."""

    def host_memory(self, numel: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Return uninitialised host memory; page-locked, so that copies need not block."""

    def locked_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros on the host, uint8: page-locked, of this size and no more, and near."""

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Tell whether copies of this host memory need not block."""


@contextmanager
def follow_current(time: DeviceTime, stream: Stream) -> Iterator[None]:
    """Enqueue on ``stream`` what is called inside, after what the current stream holds now."""
    stream.wait(time.current_stream().record())
    with stream.use():
        yield


class HostTime:
    """The time of the CPU, its only stream and every event: all is done when a call returns."""

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

    def use(self) -> AbstractContextManager[Any]:
        """Do nothing."""
        return nullcontext()

    def host_memory(self, numel: int, dtype: torch.dtype, pinned: bool = True) -> torch.Tensor:
        """Return uninitialised memory."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def locked_memory(self, num_bytes: int) -> torch.Tensor:
        """Return zeros."""
        return host_buffer(num_bytes, torch.device("cpu"))

    def is_page_locked(self, tensor: torch.Tensor) -> bool:
        """Nothing need be: copies block, and are not needed."""
        return True


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


@cache
def time_of(device: torch.device) -> DeviceTime:
    """Return the time of a device; one for each, as streams are few."""
    return HostTime() if device.type == "cpu" else _AcceleratorTime(device)


def wait_for_copies(devices: set[torch.device]) -> None:
    """Return when what was copied from these devices without waiting has arrived."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
