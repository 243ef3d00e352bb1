"""Time a training step that is observed against one that is not: what `observe()` costs.

    python benchmarks/observe.py                  # two ranks, stage 3
    python benchmarks/observe.py --ranks 1 --stage 2 --rounds 9

How. Ranks of one thread each have two chains of decoder-like blocks that are alike, with AdamW and
clipping. One of them is observed; steps of the two alternate, in an order drawn anew for each pair,
so that what else the machine does meets both alike. From round to round the other one is observed,
and a figure is the geometric mean of two such rounds: which memory a model has makes no difference
then. The first 25 steps of a round are not counted: an observed run tells each of its first ones
by itself, and a long run has few of them. Of the ratio within each two rounds the table has the
median with the interval that holds it at 95 % (the order statistics of a sign test).

What the observer's own thread does falls into steps of both chains, so it is counted apart, in CPU
seconds; "CPU in all" adds it to the CPU seconds of the mean step. Target: at most 0.5 % at steps of
25 ms. To compare two builds, run both with PYTHONPATH, alternating (`--label` names them).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import tempfile
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, field

import _common as common

common.find_shardwise()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from overlap import Block  # noqa: E402
from torch import nn  # noqa: E402

import shardwise  # noqa: E402

_UNCOUNTED = 25  # steps of each round


@dataclass
class Chain:
    """A model, its optimizer, and how long its steps took, with and without an observer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def step(self, batch: torch.Tensor) -> None:
        wall_s, cpu_s = time.perf_counter(), time.thread_time()
        self.model(batch).square().mean().backward()
        shardwise.parallel.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.wall_s.append(time.perf_counter() - wall_s)
        self.cpu_s.append(time.thread_time() - cpu_s)


def make_chain(options: argparse.Namespace) -> Chain:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
    model = shardwise.shard(blocks, stage=options.stage, units=Block)
    return Chain(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))


def observers_cpu_s() -> float:
    """Return the seconds on a core of the thread that tells what was observed."""
    for thread in threading.enumerate():
        if thread.name == "shardwise-observe" and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    raise SystemExit("benchmarks/observe.py: nothing observes; has its thread another name now?")


def play_round(
    plain: Chain, observed: Chain, options: argparse.Namespace, folder: str, draw: random.Random
) -> dict[str, float]:
    """Return the ratios of one round, observed to plain."""
    batch = torch.randn(options.tokens, options.dim)
    own_s = 0.0
    with shardwise.observe(observed.model, observed.optimizer, folder) as run:
        for step in range(_UNCOUNTED + options.steps):
            if step == _UNCOUNTED:
                own_s = observers_cpu_s()
                for chain in (plain, observed):
                    chain.wall_s.clear()
                    chain.cpu_s.clear()
            for chain in draw.sample((plain, observed), 2):
                with nullcontext() if chain is observed else run.paused():
                    chain.step(batch)
        own_s = observers_cpu_s() - own_s
    mean = statistics.fmean(observed.wall_s) / statistics.fmean(plain.wall_s)
    mean_cpu_s = statistics.fmean(plain.cpu_s)
    own = own_s / options.steps / mean_cpu_s
    # A step that is interrupted has cold caches; of pairs the median leaves those out.
    more_s = [one - other for one, other in zip(observed.cpu_s, plain.cpu_s, strict=True)]
    return {
        "median step": statistics.median(observed.wall_s) / statistics.median(plain.wall_s),
        "mean step": mean,
        "step's CPU": 1 + statistics.median(more_s) / mean_cpu_s,
        "mean step's CPU": statistics.fmean(observed.cpu_s) / mean_cpu_s,
        "observer's thread": 1 + own,
        "CPU in all": statistics.fmean(observed.cpu_s) / mean_cpu_s + own,
    }


def measure(rank: int, options: argparse.Namespace, port: int, output: str) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    chains = make_chain(options), make_chain(options)
    draw, rounds = random.Random(0), []
    for number in range(2 * options.rounds + 2):
        plain, observed = chains if number % 2 else chains[::-1]
        rounds.append(play_round(plain, observed, options, f"{output}/{number}", draw))
    if rank == 0:
        numel = sum(p.numel() for p in chains[0].model.parameters())
        step_ms = 1e3 * statistics.fmean(chains[0].wall_s)
        what = f"{numel / 1e6:.1f} M parameters, {options.ranks} rank(s), stage {options.stage},"
        print(options.label, what)
        print(f"steps of {step_ms:.1f} ms; observed / plain, median and 95 %:")
        pairs = list(zip(rounds[2::2], rounds[3::2], strict=True))  # the first two warm up
        for name in rounds[0]:
            ratios = [math.sqrt(one[name] * other[name]) for one, other in pairs]
            low, high = _interval(ratios)
            print(f"{name:20}{statistics.median(ratios):8.4f} ({low:.4f} to {high:.4f})")
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
    parser.add_argument("--rounds", type=int, default=15, help="pairs of them")
    parser.add_argument("--label", default="", help="printed first")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as output:
        arguments = (options, store.port, output)
        mp.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
