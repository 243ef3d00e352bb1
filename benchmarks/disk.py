"""Time offload's files against plain direct I/O on the same disk: GB/s of both, and their ratio.

    python benchmarks/disk.py
    python benchmarks/disk.py --folders /mnt/a,/mnt/b --json

Target: 0.85 or more of what plain direct I/O (O_DIRECT) reaches with the block size and number of
threads that are best there, for units of 4, 64 and 256 MiB, written and read.

How. One process. Bytes rest in one folder, then in two: two of those named, or two in the one that
is named, which then share a disk. Plain I/O is preadv and pwritev of one reserved file in the first
folder by 1, 2 and 4 threads with blocks of 1, 4 and 16 MiB: which is best is found out first for
each size and direction, by the median of a few rounds. Then plain I/O and ours run in turn, in
changing order; ratios are the median of those within one round. Both use the same memory: on a
virtual machine some pages take I/O three times as fast as others. A unit is one `start_write` or
`start_read` of aligned memory and its wait; those of 4 MiB are 16 units in a row, started before
the first is waited for, and the plain side has the same 64 MiB as one file. All files were written
once before, as a disk gives space at the first write. With two folders on two disks the ratio is to
one of them, and may be up to 2. Where a file system takes no direct I/O both sides go without it,
and the table says so.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import _common as common

common.find_shardwise()

import torch  # noqa: E402

from shardwise.offload.disk import Disk  # noqa: E402
from shardwise.offload.files import Bytes, System, examine  # noqa: E402

TARGET = 0.85
MIB = 1 << 20
_THREADS, _BLOCKS = (1, 2, 4), (1 * MIB, 4 * MIB, 16 * MIB)
_MANY_BYTES = 64 * MIB  # of small units in a row


@dataclass(frozen=True)
class Result:
    """Medians of one case: our GB/s, those of plain I/O, and the ratio within a round."""

    folders: int
    unit_mib: int
    way: str
    gb_per_s: float
    plain_gb_per_s: float
    ratio: float
    plain_threads: int
    plain_block_mib: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folders", default=".", help="one or two folders, with a comma between")
    parser.add_argument("--sizes", default="4,64,256", help="MiB of a unit")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    results = []
    named = [Path(folder) for folder in options.folders.split(",")]
    with tempfile.TemporaryDirectory(prefix="bench-disk-", dir=named[0]) as other:
        second = named[1] if len(named) > 1 else Path(other)
        is_direct = examine(named[0], 0, System()).is_direct
        for folders in (named[:1], [named[0], second]):
            for size in options.sizes.split(","):
                results += measure(folders, int(size) * MIB, options.rounds, is_direct)
    if options.json:
        print(json.dumps({"direct": is_direct, "results": [vars(r) for r in results]}))
    else:
        report(results, is_direct)


def measure(folders: Sequence[Path], unit_bytes: int, rounds: int, direct: bool) -> list[Result]:
    """Return our figures and plain ones for units of one size, to and from the disk."""
    num_units = max(1, _MANY_BYTES // unit_bytes) if unit_bytes < _MANY_BYTES else 1
    total = num_units * unit_bytes
    make = lambda n: torch.zeros(n, dtype=torch.uint8)  # noqa: E731
    disk = Disk(folders, total, 1, make, rank=0)
    files = [disk.file(f"unit {n}", unit_bytes) for n in range(num_units)]
    memory = disk.acquire().memory.fill_(1)
    memories = memory.split(unit_bytes)
    plain = Plain(folders[0], memory.numpy(), direct)
    results = []
    for way, start in (("write", disk.start_write), ("read", disk.start_read)):

        def ours(start: Callable[..., object] = start) -> None:
            under_way = [start(f, 0, m) for f, m in zip(files, memories, strict=True)]
            for transfer in under_way:
                transfer.wait()  # type: ignore[attr-defined]

        ours(), ours()
        best = plain.best(way)
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        cases = [("ours", ours), ("plain", lambda best=best, way=way: plain.run(way, *best))]
        for number in range(rounds):
            for name, run in cases if number % 2 else reversed(cases):
                times[name].append(timed(run))
        ratios = [p / o for p, o in zip(times["plain"], times["ours"], strict=True)]
        speeds = [total / common.median(times[name]) / 1e9 for name in ("ours", "plain")]
        threads, block = best
        results.append(
            Result(
                *(len(folders), unit_bytes // MIB, way, *speeds, common.median(ratios)),
                *(threads, block // MIB),
            )
        )
    plain.close()
    disk.close()
    return results


def timed(run: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    run()
    return time.perf_counter() - begin_s


class Plain:
    """One file that is read and written by system calls and nothing else."""

    def __init__(self, folder: Path, memory: Bytes, direct: bool) -> None:
        system = System()
        self._memory = memory
        self._fd = system.open(folder)
        system.reserve(self._fd, memory.nbytes)
        if direct:
            system.go_direct(self._fd)
        self._threads: dict[int, Executor] = {n: ThreadPoolExecutor(n) for n in _THREADS if n > 1}
        self.run("write", 1, 4 * MIB)

    def run(self, way: str, threads: int, block: int) -> None:
        """Write or read all bytes."""
        call: Callable[..., int] = os.pwritev if way == "write" else os.preadv
        places = range(0, self._memory.nbytes, block)

        def one(at: int) -> None:
            part = self._memory[at : at + block]
            assert call(self._fd, [part], at) == part.nbytes

        for _ in map(one, places) if threads == 1 else self._threads[threads].map(one, places):
            pass

    def best(self, way: str) -> tuple[int, int]:
        """Return the threads and the block size that are fastest."""
        ways = [(threads, block) for threads in _THREADS for block in _BLOCKS]
        times: dict[tuple[int, int], list[float]] = {case: [] for case in ways}
        for _ in range(3):
            for case in ways:
                times[case].append(timed(lambda case=case: self.run(way, *case)))
        return min(ways, key=lambda case: common.median(times[case]))

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown()
        os.close(self._fd)


def report(results: Sequence[Result], is_direct: bool) -> None:
    rows = [
        [
            *(f"{r.folders}", f"{r.unit_mib} MiB", r.way),
            *(f"{r.gb_per_s:.2f}", f"{r.plain_gb_per_s:.2f}", f"{r.ratio:.2f}"),
            f"{r.plain_threads} x {r.plain_block_mib} MiB",
            common.verdict(r.ratio, TARGET, at_most=False),
        ]
        for r in results
    ]
    header = ["folders", "unit", "way", "GB/s", "plain GB/s", "ratio", "plain", f">= {TARGET}"]
    common.print_table(header, rows)
    if not is_direct:
        print("This file system takes no direct I/O, so both sides went through its cache.")


if __name__ == "__main__":
    main()
