"""The host link and the disk, and what is taken on the device outside of the allocator."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shardwise.bench.stopwatch import Stopwatch
from shardwise.device import host_buffer
from shardwise.plan.machine.calibration import Curve

_TRANSFERS = [1 << i for i in range(12, 29, 2)]
_FILES = [1 << i for i in range(16, 27, 2)]


def host_link_curves(watch: Stopwatch) -> dict[str, Curve]:
    """Measure copies between the device and page-locked memory; none for the CPU."""
    if watch.device.type == "cpu":
        return {}

    def measure(num_bytes: int) -> Sequence[float]:
        host = host_buffer(num_bytes, watch.device)
        there = torch.empty_like(host, device=watch.device)
        return [
            watch.seconds(lambda: there.copy_(host, non_blocking=True)),
            watch.seconds(lambda: host.copy_(there, non_blocking=True)),
        ]

    found = watch.sweep(_TRANSFERS, measure)
    return {
        name: Curve.through("bytes", [(float(n), parts[part]) for n, parts in found])
        for part, name in enumerate(("to_device", "to_host"))
    }


def disk_curves(watch: Stopwatch, folder: Path) -> dict[str, Curve]:
    """Measure writing a file, fsync included, and reading it back from the disk."""
    with tempfile.TemporaryDirectory(prefix=".shardwise-bench-", dir=folder) as inside:
        path = Path(inside, "file")

        def measure(num_bytes: int) -> Sequence[float]:
            return watch.parts(_write_and_read(watch, path, os.urandom(num_bytes)))

        found = watch.sweep(_FILES, measure)
    return {
        name: Curve.through("bytes", [(float(n), parts[part]) for n, parts in found])
        for part, name in enumerate(("disk_write", "disk_read"))
    }


def _write_and_read(watch: Stopwatch, path: Path, data: bytes) -> Callable[[], tuple[float, float]]:
    def work() -> tuple[float, float]:
        begin = watch.now()
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        middle = watch.now()
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            unread = watch.now()
            file.read()
        return middle - begin, watch.now() - unread

    return work


def context_bytes(device: torch.device) -> int:
    """Return what is taken on the device outside of torch's allocator; 0 for the CPU.

    The device must be this process's alone.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.accelerator.get_memory_info(device)
    return total - free - torch.accelerator.memory_reserved(device)
