"""A launcher for labs that kill ranks: forks processes with a group, and reports how each ended."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from shardwise_labs.reader import describe
from shardwise_labs.words import WrongAnswer

LOST = ("gloo", "pair closure")  # in errors of a rank that lost its peer, or waits in vain
WAIT_S, GRACE_S = 120.0, 10.0  # what takes longer hangs, on any machine


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its result, the words of its exception, or the signal that killed it."""

    value: Any = None
    error: str = ""
    killed_by: int = 0


def launch(num_ranks: int, work: Callable[[int], object], folder: Path) -> list[Ended]:
    """Run ``work(rank)`` in a new process for each rank, in a group of their own.

    If one is killed, the others are killed soon after, as launchers do. ``folder`` is the
    reader's. **Raises** WrongAnswer if a rank does not end.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pids = []
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _run(rank, num_ranks, work, Path(scratch), folder)
            pids.append(pid)
        signals = _wait(pids)
        return [_ended(Path(scratch, f"{rank}.json"), signals[rank]) for rank in range(num_ranks)]


def result(ended: list[Ended]) -> list[Any]:
    """Return the results of ranks that have all ended well. **Raises** WrongAnswer."""
    errors = {rank: each.error for rank, each in enumerate(ended) if each.error}
    for rank, error in errors.items():
        if not any(words in error for words in LOST):
            raise WrongAnswer(f"rank {rank}: {error}")
    if errors:
        lines = [f"rank {rank} in {_last_line(error)}" for rank, error in errors.items()]
        raise WrongAnswer(
            f"ranks wait for each other in different calls, {', '.join(lines)}: do all ranks make "
            "the same calls?"
        )
    return [each.value for each in ended]


def join_ranks(scratch: Path, rank: int, num_ranks: int, timeout: timedelta) -> None:
    """Make the process group, and wait until all ranks are connected.

    A rank that ends at once would break the connections that others still open.
    """
    import torch.distributed as dist

    store = dist.FileStore(str(scratch / "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    store.set(f"connected {rank}", "")
    store.wait([f"connected {other}" for other in range(num_ranks)], timeout)


def _last_line(error: str) -> str:
    """Return the innermost line of the reader's file in a described exception."""
    lines = [line.strip() for line in error.splitlines() if line.startswith("  line ")]
    return lines[-1].split(":")[0] if lines else "the check"


def _run(
    rank: int, num_ranks: int, work: Callable[[int], object], scratch: Path, folder: Path
) -> None:
    found: dict[str, object] = {}
    try:
        join_ranks(scratch, rank, num_ranks, timedelta(seconds=20))
        found["value"] = work(rank)
    except BaseException as error:
        found["error"] = describe(error, folder)
    path = scratch / f"{rank}.json.new"
    path.write_text(json.dumps(found))
    path.rename(scratch / f"{rank}.json")
    os._exit(0)


def _wait(pids: list[int]) -> dict[int, int]:
    """Wait for all; return the signals by rank. **Raises** WrongAnswer after a while."""
    signals: dict[int, int] = {}
    end, is_over = time.monotonic() + WAIT_S, False
    while len(signals) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in signals:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    signals[rank] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        if any(signals.values()) and not is_over:
            is_over, end = True, min(end, time.monotonic() + GRACE_S)
        if time.monotonic() > end:
            for rank in set(range(len(pids))) - set(signals):
                os.kill(pids[rank], signal.SIGKILL)
                os.waitpid(pids[rank], 0)
                signals[rank] = signal.SIGKILL
            if not is_over:
                raise WrongAnswer("a rank waits for ever: do all ranks make the same calls?")
        time.sleep(0.005)
    return signals


def _ended(path: Path, killed_by: int) -> Ended:
    if killed_by or not path.exists():
        return Ended(killed_by=killed_by or signal.SIGKILL)
    return Ended(**json.loads(path.read_text()))
