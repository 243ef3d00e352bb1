"""The host: memory and what is left of it, cores, addresses and a server on one of them."""

import os
import platform
import resource
import socket
import socketserver
import sys
import threading
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if unknown."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no /proc outside Linux
        return None
    return pages * resource.getpagesize()


def total_host_bytes() -> int:
    """Return the memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def processor_name() -> str:
    """Return the name of the processor's model."""
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(n for n in lines if n.startswith("model name")).partition(":")[2].strip()
    return platform.processor() or platform.machine()


def own_address(seen_from: str | None) -> str:
    """Return the address by which a host is reached from ``seen_from``, where the store is."""
    with suppress(OSError):
        found = socket.getaddrinfo(seen_from or socket.gethostname(), 9, type=socket.SOCK_DGRAM)
        family, _, _, _, place = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing: it chooses the interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Tell whether an address leads each host to itself; an empty text is none."""
    return bool(address) and ip_address(address).is_loopback


class TcpServer(socketserver.ThreadingTCPServer):
    """A server on a free port of one of the host's addresses, in a thread of this ``name``."""

    daemon_threads = True
    request_queue_size = 128
    poll_s = 0.5  # `close` takes up to so long

    def __init__(
        self, host: str, handler: type[socketserver.BaseRequestHandler], name: str
    ) -> None:
        self.address_family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
        super().__init__((host, 0), handler)
        self.address = str(self.server_address[0]), int(self.server_address[1])
        run = self.serve_forever
        threading.Thread(target=run, args=(self.poll_s,), name=name, daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()


def available_host_bytes() -> int:
    """Return the memory that this process can still take on its host without swapping.

    It is the least of: the system's available memory (proc(5), MemAvailable); the rest of the
    control group's limit (memory.max and memory.current, or their names in version 1); the rest of
    the process's limit of address space (ulimit -v).
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
    """Return the bytes of a control group's cached pages, which the system can drop."""
    lines = (limit.parent / "memory.stat").read_text().splitlines()
    counts = dict(line.split() for line in lines)
    return int(counts.get("total_inactive_file", counts.get("inactive_file", 0)))


def cores_of(cpulist: Path) -> set[int]:
    """Read a list of cores in the system's format: ``0-3,8``."""
    with suppress(OSError, ValueError):
        ranges = (part.split("-") for part in cpulist.read_text().strip().split(",") if part)
        return {core for r in ranges for core in range(int(r[0]), int(r[-1]) + 1)}
    return set()


def core_wait_s(thread: int) -> float:
    """Return how long a thread of this process has waited for a core; 0 if unknown.

    ``thread`` is its `threading.get_native_id`. The time counts from the thread's start.

    **Source** Linux, Documentation/scheduler/sched-stats.rst: time on the run queue, in ns.
    """
    try:
        return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
