"""What the host has: its memory, and what this process may still take of it; its cores."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no /proc outside Linux
        return None
    return pages * resource.getpagesize()


def total_host_bytes() -> int:
    """Return the memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def available_host_bytes() -> int:
    """Return how much memory this process may still take on its host, without swapping.

    What the system has (proc(5), MemAvailable) or, if less, what the limit of the process's control
    group leaves: memory.max and memory.current (version 2), or their names of version 1; or what
    its own limit of address space does (ulimit -v).
    """
    found = []
    if (most := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        with suppress(OSError):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            found.append(max(most - pages * resource.getpagesize(), 0))
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


def cores_of(cpulist: Path) -> set[int]:
    """Read a list of cores as the system writes it: ``0-3,8``."""
    with suppress(OSError, ValueError):
        ranges = (part.split("-") for part in cpulist.read_text().strip().split(",") if part)
        return {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}
    return set()


def core_wait_s(thread: int) -> float:
    """Return how long a thread of this process has waited for a core; 0 if nobody tells.

    ``thread`` is its `threading.get_native_id`. Counts from its begin.

    **Source** Linux, Documentation/scheduler/sched-stats.rst: time on the run queue, in ns.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
