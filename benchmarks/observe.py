"""Time a training step that is observed against one that is not: what `observe()` costs.

    python benchmarks/observe.py                  # two ranks, stage 3
    python benchmarks/observe.py --ranks 1 --stage 2 --rounds 9

How. Ranks of one thread each train one chain of decoder-like blocks with AdamW and clipping, rounds
with and without `observe()` in turn, in one process tree. A round's figure is its median step; the
table has the medians over rounds, their ratio, and CPU seconds per step of all threads beside them.
Every tenth step of a round's figures is exchanged between the ranks, and every detail step keeps a
timeline and the memory of each moment, as in a long run: so means over the rounds stand beside the
medians. Target: less than 0.5 % of a step.
"""

from __future__ import annotations

import argparse
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
    for number in range(options.rounds + 1):
        for way in WAYS:
            folder = f"{output}/{number}"
            watched = shardwise.observe(model, optimizer, folder) if way == "observed" else None
            times, cpu = [], 0.0
            with watched or nullcontext():
                cpu = _cpu_s()
                for _ in range(options.steps):
                    began = time.perf_counter()
                    model(batch).square().mean().backward()
                    shardwise.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
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
            print(f"observed / plain, {name}: {statistics.median(pairs):.4f}")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as output:
        arguments = (options, store.port, output)
        mp.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
