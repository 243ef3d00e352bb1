"""Time a training step that is observed against one that is not: what `observe()` costs.

    python benchmarks/observe.py                  # two ranks, stage 3
    python benchmarks/observe.py --ranks 1 --stage 2 --rounds 9

How. Ranks of one thread each train one chain of decoder-like blocks with AdamW and clipping, rounds
with and without `observe()` in an order drawn anew each time, in one process tree. The first 25
steps of a round are not timed: an observed run tells each of its first ones by itself, and a long
run has few of them. A round's figures are its median and its mean step, and the CPU seconds per
step of all threads; the table has the medians over rounds, and of the ratio within each pair of
rounds the median with the interval that holds it at 95 % (the order statistics of a sign test).
Target: less than 0.5 % of a step.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import time
from contextlib import nullcontext

import _common as common

common.find_shardwise()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from overlap import Block, _cpu_s  # noqa: E402
from torch import nn  # noqa: E402

import shardwise  # noqa: E402

WAYS = ("plain", "observed")
_UNTIMED = 25  # steps of each round


def measure(rank: int, options: argparse.Namespace, port: int, output: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
    model = shardwise.shard(blocks, stage=options.stage, units=Block)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(options.tokens, options.dim)
    walls: dict[str, list[float]] = {way: [] for way in WAYS}
    cpus: dict[str, list[float]] = {way: [] for way in WAYS}
    means: dict[str, list[float]] = {way: [] for way in WAYS}
    draw = random.Random(0)
    for number in range(options.rounds + 1):
        for way in draw.sample(WAYS, len(WAYS)):
            folder = f"{output}/{number}"
            watched = shardwise.observe(model, optimizer, folder) if way == "observed" else None
            times, cpu = [], 0.0
            with watched or nullcontext():
                for step in range(_UNTIMED + options.steps):
                    if step == _UNTIMED:
                        cpu = _cpu_s()
                    began = time.perf_counter()
                    model(batch).square().mean().backward()
                    shardwise.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    if step >= _UNTIMED:
                        times.append(time.perf_counter() - began)
                cpu = _cpu_s() - cpu
            if number:
                walls[way].append(statistics.median(times))
                means[way].append(statistics.fmean(times))
                cpus[way].append(cpu / options.steps)
    if rank == 0:
        numel = sum(p.numel() for p in model.parameters())
        print(f"{numel / 1e6:.1f} M parameters, {options.ranks} rank(s), stage {options.stage}")
        print(f"{'':10}{'median ms':>12}{'mean ms':>12}{'CPU ms':>12}")
        for way in WAYS:
            row = [1e3 * statistics.median(each[way]) for each in (walls, means, cpus)]
            print(f"{way:10}" + "".join(f"{value:12.2f}" for value in row))
        for name, each in (("median step", walls), ("mean step", means), ("CPU", cpus)):
            pairs = [b / a for a, b in zip(each["plain"], each["observed"], strict=True)]
            low, high = _interval(pairs)
            told = f"{statistics.median(pairs):.4f} (95 %: {low:.4f} to {high:.4f})"
            print(f"observed / plain, {name}: {told}")
    dist.barrier()
    dist.destroy_process_group()


def _interval(values: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies at 95 %: a sign test turned."""
    ordered, number = sorted(values), len(values)
    below, rank = 0.0, 0
    while (below := below + math.comb(number, rank) / 2**number) <= 0.025:
        rank += 1
    lowest = max(rank - 1, 0)
    return ordered[lowest], ordered[-1 - lowest]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as output:
        arguments = (options, store.port, output)
        mp.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
