"""Time a training step with the optimizer's step blocking, and behind the next forward pass.

    python benchmarks/overlap.py                  # one rank: one core computes, one steps
    python benchmarks/overlap.py --ranks 2 --stage 3 --rounds 7

How. Ranks of one thread each train a chain of decoder-like blocks with AdamW and clipping, `plain`
and `overlap` in turn, in one process tree. A round's figure is its median step; the table has the
medians over rounds, their ratio, and CPU seconds per step beside them. `step` is how long
``optimizer.step()`` keeps the loop. Both leave the same bits, which is checked.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import _common as common

common.find_shardwise()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import shardwise  # noqa: E402

WAYS = ("plain", "overlap")


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(torch.relu(self.up(x)))
        return found


class Trainer:
    """One model and what is measured of it."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(options.dim) for _ in range(options.blocks)))
        self.model = shardwise.shard(blocks, stage=options.stage, units=Block)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=options.fused)
        if way != "plain":
            shardwise.overlap(self.optimizer, threads=1)
        self.batch = torch.randn(options.tokens, options.dim)
        self.times: list[tuple[float, float, float]] = []

    def run(self, steps: int) -> None:
        rows = []
        for _ in range(steps):
            began, cpu = time.perf_counter(), _cpu_s()
            self.model(self.batch).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            stepped = time.perf_counter()
            self.optimizer.step()
            returned = time.perf_counter()
            self.optimizer.zero_grad()
            rows.append((time.perf_counter() - began, returned - stepped, _cpu_s() - cpu))
        if steps > 1:
            self.times.append(tuple(map(statistics.median, zip(*rows[1:], strict=True))))  # type: ignore[arg-type]


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(rank: int, options: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    trainers = {way: Trainer(way, options) for way in WAYS}
    for trainer in trainers.values():
        trainer.run(2)
        trainer.times = []
    for _ in range(options.rounds):
        for trainer in trainers.values():
            trainer.run(options.steps)
            for param in trainer.model.parameters():
                param.to_local()  # the last step is through before the other's turn
    plain, overlapped = (list(trainers[way].model.parameters()) for way in WAYS)
    same = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(plain, overlapped, strict=True)
    )
    if rank == 0:
        _tell(trainers, options)
    dist.barrier()
    dist.destroy_process_group()
    if not same:
        raise SystemExit(f"rank {rank}: the ways left other bits")


def _tell(trainers: dict[str, Trainer], options: argparse.Namespace) -> None:
    found = {
        way: [statistics.median(row[n] for row in trainer.times) for n in range(3)]
        for way, trainer in trainers.items()
    }
    numel = sum(p.numel() for p in trainers["plain"].model.parameters())
    print(
        f"{numel / 1e6:.1f} M parameters, {options.ranks} rank(s), stage {options.stage}, "
        f"{options.tokens} tokens, AdamW and clipping"
    )
    print(f"{'':12}{'step ms':>10}{'optimizer.step() ms':>22}{'CPU ms':>10}")
    for way, (total, step, cpu) in found.items():
        print(f"{way:12}{1e3 * total:10.1f}{1e3 * step:22.1f}{1e3 * cpu:10.1f}")
    print(f"overlap / plain: {found['overlap'][0] / found['plain'][0]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    options = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(measure, (options, store.port), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
