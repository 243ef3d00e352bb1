"""Count what ranks cost that only coordinate: tiny models on up to 256 ranks of one machine.

    python benchmarks/many_ranks.py                     # 8, 16, 32, 64 ranks
    python benchmarks/many_ranks.py --ranks 64 128 256  # 256 take about 20 GiB

A model of 16 tiny units is sharded, stepped, saved, copied to memory and loaded again, at stage 3.
There is next to no state, so what is left are agreements between ranks, names in manifests and
collectives of a few bytes. Target: CPU time of a rank grows with the number of ranks by a small
constant for each. Each figure is the median over the ranks of CPU milliseconds (of the process, its
threads included); all ranks share the machine's cores, so wall time is about the sum over the ranks
by the cores and says nothing of a cluster.
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

import _common as common

common.find_shardwise()
sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch  # noqa: E402
from torch import nn  # noqa: E402

import ranks  # noqa: E402
import shardwise  # noqa: E402
from shardwise.config import Units  # noqa: E402

NUM_UNITS, WIDTH = 16, 64
PARTS = ("shard", "step", "save", "copy", "load")


def work(rank: int, world_size: int, folder: str) -> dict[str, float]:
    """Return the CPU milliseconds of each part on this rank."""
    found: dict[str, float] = {}

    def timed(part: str, call: Callable[[], object]) -> None:
        torch.distributed.barrier()
        began_s = time.process_time()
        call()
        found[part] = 1e3 * (time.process_time() - began_s)

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(NUM_UNITS)))
    units = Units("Sequential")
    timed("shard", lambda: shardwise.shard(model, stage=3, units=units))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # which makes buffers and opens connections
    timed("step", step)
    with shardwise.Checkpoints(folder, model, optimizer, memory_every=1) as kept:
        kept.save(1)  # which opens a group
        timed("save", lambda: kept.save(2))

        def copy() -> None:
            kept.copy_to_memory(3)
            kept.finish()

        copy()
        timed("copy", copy)
        timed("load", kept.load)
    return found


def main() -> None:
    """Measure each number of ranks; print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    table: dict[int, dict[str, float]] = {}
    print(f"{'ranks':>6}" + "".join(f"{part:>10}" for part in PARTS) + f"{'wall':>10}", flush=True)
    for num in asked.ranks:
        with tempfile.TemporaryDirectory() as folder:
            began_s = time.monotonic()
            rows = ranks.run_ranks(work, num, folder, fresh=True)
            wall_s = time.monotonic() - began_s
        table[num] = {part: statistics.median(row[part] for row in rows) for part in PARTS}
        shown = "".join(f"{table[num][part]:>7.1f} ms" for part in PARTS)
        print(f"{num:>6}{shown}{wall_s:>8.1f} s", flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
