"""What the benchmarks share: ranks as processes, memory and CPU of a process, medians, tables.

Imported by every benchmark; measures nothing by itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

# Blocks from 64 KiB on are mapped, and unmapped when they are freed, so that resident memory
# follows what is alive. It costs page faults: use it for memory, not for speed.
RETURN_FREED_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "2",
}


def find_shardwise() -> None:
    """Make ``import shardwise`` work in a checkout where the package is not installed."""
    try:
        import shardwise  # noqa: F401
    except ImportError:
        sys.path.insert(0, str(HERE.parent / "src"))


class CaseFailed(RuntimeError):
    """A case's processes ended badly; the message is the last line of the first bad rank."""


def run_processes(
    script: Path,
    config: Mapping[str, Any],
    num_ranks: int,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 600,
    prefix: Callable[[int], Sequence[str]] = lambda rank: (),
) -> list[dict[str, Any]]:
    """Run ``script --worker JSON`` once per rank; return what each rank wrote, by rank.

    ``prefix`` are words before a rank's command, which runs it somewhere.
    The worker finds ``rank``, ``num_ranks``, ``rendezvous`` and ``result`` in its config.
    **Raises** CaseFailed when a rank fails or the time is over.
    """
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        results = [Path(folder, f"rank{r}.json") for r in range(num_ranks)]
        logs = [Path(folder, f"rank{r}.log") for r in range(num_ranks)]
        processes = []
        for rank in range(num_ranks):
            mine = dict(
                config,
                rank=rank,
                num_ranks=num_ranks,
                rendezvous=f"file://{folder}/rendezvous",
                result=str(results[rank]),
            )
            with open(logs[rank], "w") as log:
                processes.append(
                    subprocess.Popen(
                        [*prefix(rank), sys.executable, str(script), "--worker", json.dumps(mine)],
                        env=_child_env(env or {}),
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        failure = _wait_for_all(processes, timeout_s)
        if failure is None and all(path.exists() for path in results):
            return [json.loads(path.read_text()) for path in results]
        raise CaseFailed(_last_words(logs, failure or "no result was written"))


def _child_env(extra: Mapping[str, str]) -> dict[str, str]:
    env = dict(os.environ)
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": env.get("GLOO_SOCKET_IFNAME", "lo")}
    return {**env, **threads, **extra}


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], timeout_s: float) -> str | None:
    """Wait for every process; return None when all ended well, else why the case failed."""
    deadline = time.monotonic() + timeout_s
    failure = None
    while failure is None and any(p.poll() is None for p in processes):
        if any(p.poll() not in (None, 0) for p in processes):
            failure = "a rank failed"
            time.sleep(1)
        elif time.monotonic() > deadline:
            failure = f"not done after {timeout_s:.0f} s"
        time.sleep(0.05)
    for process in processes:
        if process.poll() is None:
            process.kill()
    codes = [p.wait() for p in processes]
    return failure or (None if not any(codes) else f"exit codes {codes}")


def _last_words(logs: Sequence[Path], failure: str) -> str:
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    errors = [line.strip() for line in lines if "Error" in line or "error:" in line]
    last = errors[-1] if errors else next((x for x in reversed(lines) if x.strip()), "")
    return f"{failure}: {last[:300]}"


def main(work: Callable[[dict[str, Any]], None], compare: Callable[[], None]) -> None:
    """Run one rank with its config, if this process is one; else the whole benchmark."""
    if len(sys.argv) == 3 and sys.argv[1] == "--worker":
        work(json.loads(sys.argv[2]))
    else:
        compare()


@contextlib.contextmanager
def joined_ranks(
    config: Mapping[str, Any], backend: str = "gloo", threads: int = 1
) -> Iterator[None]:
    """Join the process group of a worker's config, with so many CPU threads per rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    dist.init_process_group(
        backend,
        init_method=config["rendezvous"],
        rank=config["rank"],
        world_size=config["num_ranks"],
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def write_result(config: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Hand a worker's result to the parent."""
    Path(config["result"]).write_text(json.dumps(result))


# -- resident memory (Linux)
def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the peak of resident memory since `reset_resident_peak`."""
    return _status_bytes("VmHWM")


def reset_resident_peak() -> None:
    """Start the peak anew: writing 5 to clear_refs resets VmHWM (Linux 4.0 and later)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(field + ":")), 0)


# -- numbers
def median(values: Sequence[float]) -> float:
    """Return the median, NaN of nothing."""
    return statistics.median(values) if values else float("nan")


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and the third quartile."""
    if len(values) < 2:
        return median(values), median(values)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def verdict(value: float, limit: float, at_most: bool = True) -> str:
    """Say whether a measured value keeps its target."""
    if value != value:
        return "not measured"
    return "met" if (value <= limit) == at_most else "missed"


def cpu_ms(work: Callable[[], object], repeats: int, warmup: int = 2) -> float:
    """Return the median CPU milliseconds of this process for one call of ``work``."""
    times = []
    for number in range(warmup + repeats):
        begin = time.process_time_ns()
        work()
        if number >= warmup:
            times.append((time.process_time_ns() - begin) / 1e6)
    return median(times)


# -- output
def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, columns aligned."""
    cells = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    rule = "|" + "|".join("-" * (w + 2) for w in widths) + "|"
    print("\n".join([lines[0], rule, *lines[1:]]), flush=True)


def append_json(path: str | None, record: Mapping[str, Any]) -> None:
    """Append one JSON line, with what it was measured on."""
    if path is None:
        return
    import torch

    about = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    with open(path, "a") as file:
        file.write(json.dumps({**about, **record}) + "\n")


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, linear between neighbours; nan of nothing."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def mean(values: Sequence[float]) -> float:
    """Return the mean; nan of nothing."""
    return sum(values) / len(values) if values else math.nan
