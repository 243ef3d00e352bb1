"""Time training with copies in the hosts' memory against training without them.

    python benchmarks/memory_copies.py                     # two ranks, stage 3, a copy in 10 steps
    python benchmarks/memory_copies.py --every 50 --rounds 9
    python benchmarks/memory_copies.py --profile           # where the time of the copies goes

How. Ranks of one thread each train a chain of decoder-like blocks with AdamW. Periods of
``--every`` steps alternate in pairs, in an order drawn anew for each pair. One period begins with a
copy, the other has none, and each ends when its copy is whole. CPU seconds are of all threads of
the process and of the kernel's work for it. The table has the median over pairs, with the interval
that holds it at 95 % (the order statistics of a sign test). "alone" is the CPU time of a copy while
training stands still, as a share of that of its steps: it is steady on a busy machine too. To
compare two builds, run this program
on each in turn, with PYTHONPATH. Target: at most 3 % of CPU and wall time at steps of 24 ms.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from observe import _interval as interval  # noqa: E402
from overlap import Block  # noqa: E402
from torch import nn  # noqa: E402

import shardwise  # noqa: E402

_SHOWN = 45  # lines of a profile


def measure(rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
    model = shardwise.shard(blocks, stage=options.stage, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(options.tokens, options.dim)
    draw, number = random.Random(0), 0
    pairs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    stalls, written = [], 0
    with shardwise.Checkpoints(folder, model, optimizer, memory_every=1) as checkpoints:

        def period(copies: bool) -> tuple[float, float]:
            nonlocal number, written
            dist.barrier()
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            number += 1
            saving = checkpoints.copy_to_memory(number) if copies else None
            for _ in range(options.every):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if saving is not None:
                written = saving.wait().rank_bytes
                stalls.append(saving.stall_s)
                checkpoints.finish()
            dist.barrier()
            return time.perf_counter() - wall_s, time.process_time() - cpu_s

        for copies in (False, True, False, True):  # the optimizer's state, the buffers
            period(copies)
        stalls.clear()
        for _ in range(options.rounds):
            if draw.random() < 0.5:
                with_copy, without = period(True), period(False)
            else:
                without, with_copy = period(False), period(True)
            pairs.append((with_copy, without))
        alone = []
        for _ in range(options.rounds):
            dist.barrier()
            cpu_s, number = time.process_time(), number + 1
            saving = checkpoints.copy_to_memory(number)
            assert saving is not None
            saving.wait()
            checkpoints.finish()
            alone.append(time.process_time() - cpu_s)
        if options.profile and rank == 0:
            profiled(lambda: [period(True) for _ in range(40)])
        elif options.profile:
            [period(True) for _ in range(40)]
    if rank == 0 and not options.profile:
        report(options, model, pairs, stalls, alone, written)
    dist.barrier()
    dist.destroy_process_group()


def report(
    options: argparse.Namespace,
    model: nn.Module,
    pairs: list[tuple[tuple[float, float], tuple[float, float]]],
    stalls: list[float],
    alone: list[float],
    written: int,
) -> None:
    numel = sum(p.numel() for p in model.parameters())
    step_ms = 1e3 * statistics.median(without[0] for _, without in pairs) / options.every
    print(
        f"{Path(shardwise.__file__).parents[1]}: {numel / 1e6:.1f} M parameters, "
        f"{options.ranks} rank(s), stage {options.stage}, steps of {step_ms:.1f} ms, a copy of "
        f"{written / 1e6:.1f} MB a rank in {options.every} steps, "
        f"stall {1e3 * statistics.median(stalls):.1f} ms"
    )
    for place, name in enumerate(("wall", "CPU")):
        ratios = [with_copy[place] / without[place] for with_copy, without in pairs]
        more = [1e3 * (with_copy[place] - without[place]) for with_copy, without in pairs]
        low, high = interval(ratios)
        print(
            f"{name:5}{statistics.median(ratios):8.4f} ({low:.4f} to {high:.4f}), "
            f"{statistics.median(more):6.2f} ms a copy"
        )
    of_steps = statistics.median(without[1] for _, without in pairs)
    copy_s = statistics.median(alone)
    print(f"alone{1 + copy_s / of_steps:8.4f}, {1e3 * copy_s:6.2f} ms of CPU a copy")


def profiled(work: Any) -> None:
    """Print what the threads of background saves and the main thread spend their time in."""
    stats: list[cProfile.Profile] = []

    def begin(*_: object) -> None:
        if threading.current_thread().name.startswith("shardwise-save"):
            profile = cProfile.Profile(time.thread_time)
            stats.append(profile)
            profile.enable()

    threading.setprofile(begin)
    main_thread = cProfile.Profile(time.thread_time)
    main_thread.runcall(work)
    threading.setprofile(None)  # type: ignore[arg-type]
    for each in (main_thread, *stats[:1]):
        total = pstats.Stats(each)
        for other in stats[1:] if each is not main_thread else ():
            total.add(other)
        total.sort_stats("cumulative").print_stats(_SHOWN)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--every", type=int, default=10, help="steps of a period")
    parser.add_argument("--rounds", type=int, default=31, help="pairs of periods")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, store.port, folder)
        mp.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
