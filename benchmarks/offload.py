"""What offload costs on this machine: steps with state in memory, on the host and in files.

The model is a chain of linear layers with AdamW, on one rank. Cases take turns, step by step:
``plain`` keeps everything in memory and steps plainly; ``cpu`` and ``files`` are `shard(offload=)`
with state in host memory and in files of ``--folder``. A step with many tokens hides what is read
and written behind its forward and backward pass, one with few cannot. Beside them stands how long
the same bytes take to be read and written alone (``benchmarks/disk.py`` holds that against plain
direct I/O).

    python benchmarks/offload.py --folder /local/ssd --width 1024 --depth 16 --tokens 64 1024

Prints medians and ratios, CPU seconds, and bytes read and written per step as counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.offload.disk import Disk

CASES = ("plain", "cpu", "files")


class Chain(nn.Module):
    """``depth`` linear layers of one width."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def stepper(
    case: str, folder: Path, width: int, depth: int
) -> tuple[Callable[[int], None], torch.optim.Optimizer]:
    """Return what trains one step on so many tokens, and its optimizer."""
    offload = {"plain": None, "cpu": "cpu", "files": f"nvme:{folder}"}[case]
    torch.manual_seed(0)
    model: Any = shardwise.shard(Chain(width, depth), units=nn.Linear, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(tokens: int) -> None:
        model(torch.ones(tokens, width)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step, optimizer


def counted_bytes(disk_bytes: dict[str, int]) -> None:
    """Count what passes between files and buffers from now on."""
    for name in ("read", "write"):
        plain = getattr(Disk, f"start_{name}")

        def start(disk: Any, file: Any, begin: int, tensor: Any, *args: Any, n: str = name) -> Any:
            disk_bytes[n] += tensor.nbytes
            return PLAIN[n](disk, file, begin, tensor, *args)

        PLAIN[name] = plain
        setattr(Disk, f"start_{name}", start)


PLAIN: dict[str, Any] = {}


def direct_io_s(folder: Path, unit_bytes: int, num_units: int) -> float:
    """Return how long it takes to read and write the same units at once, and nothing else."""
    disk = Disk([folder], 0, 0, torch.empty, 0)
    memory = torch.zeros(unit_bytes + 4096, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 4096 :][:unit_bytes]
    files = [disk.file(str(number), unit_bytes) for number in range(num_units)]
    for file in files:
        disk.start_write(file, 0, memory).wait()
    begin_s = time.perf_counter()
    under_way = [disk.start_read(file, 0, memory) for file in files]
    under_way += [disk.start_write(file, 0, memory) for file in files]
    for transfer in under_way:
        transfer.wait()
    found_s = time.perf_counter() - begin_s
    disk.close()
    return found_s


def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return one row for each number of tokens and case."""
    disk_bytes = {"read": 0, "write": 0}
    made = {case: stepper(case, folder, args.width, args.depth) for case in CASES}
    steps = {case: step for case, (step, _) in made.items()}
    for case in CASES:
        for _ in range(3):
            steps[case](args.tokens[0])
    counted_bytes(disk_bytes)
    rows = []
    for tokens in args.tokens:
        times: dict[str, list[float]] = {case: [] for case in CASES}
        cpu: dict[str, list[float]] = {case: [] for case in CASES}
        made["files"][1].state_dict()
        disk_bytes.update(read=0, write=0)
        for _ in range(args.steps):
            for case in CASES:
                begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
                steps[case](tokens)
                steps[case](tokens)  # the second waits for what the first has left to the thread
                times[case].append((time.perf_counter() - begin_s) / 2)
                cpu[case].append((time.process_time() - begin_cpu_s) / 2)
        made["files"][1].state_dict()  # waits for the last step
        moved = {name: count // (2 * args.steps) for name, count in disk_bytes.items()}
        unit_bytes = 8 * args.width**2
        direct_s = [direct_io_s(folder, unit_bytes, args.depth) for _ in range(3)]
        plain_s = statistics.median(times["plain"])
        for case in CASES:
            step_s = statistics.median(times[case])
            in_files = case == "files"
            rows.append(
                {
                    "tokens": tokens,
                    "case": case,
                    "step_s": step_s,
                    "x_plain": step_s / plain_s,
                    "cpu_s": statistics.median(cpu[case]),
                    "read_bytes": moved["read"] if in_files else 0,
                    "written_bytes": moved["write"] if in_files else 0,
                    "direct_io_s": statistics.median(direct_s) if in_files else 0.0,
                }
            )
    return rows


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=None, help="unset: here, removed again")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument(
        "--tokens", type=lambda s: [int(n) for n in s.split(",")], default=[64, 1024]
    )
    parser.add_argument("--steps", type=int, default=8, help="pairs of steps of each case")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.NamedTemporaryFile() as store:
        url = f"file://{store.name}.store"
        dist.init_process_group("gloo", init_method=url, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=args.folder or Path.cwd()) as folder:
        rows = measure(args, Path(folder))
    dist.destroy_process_group()
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    print("| tokens | case | step, s | x plain | CPU s | read, MB | written, MB | I/O alone, s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['tokens']} | {row['case']} | {row['step_s']:.3f} | {row['x_plain']:.2f} "
            f"| {row['cpu_s']:.3f} | {row['read_bytes'] / 1e6:.0f} "
            f"| {row['written_bytes'] / 1e6:.0f} | {row['direct_io_s']:.3f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
