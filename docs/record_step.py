"""Record a step of two ranks at each stage for the page on one step: `python docs/record_step.py`.

Then `make pages` writes the page and its picture from what was recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardwise
from shardwise.monitor.record import Memory, Timeline, read_run
from shardwise.svg import colour_of, name_of_kind, order_of_kinds

RECORDED = Path(__file__).parent / "site" / "data" / "step.json"
STEPS, VOCAB, WIDTH, SHORTEST_MS = 24, 1000, 512, 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def train(stage: int, output: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    blocks = (Block() for _ in range(4))
    model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *blocks, nn.Linear(WIDTH, VOCAB))
    shardwise.shard(model, stage=stage, units="Block")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with shardwise.observe(model, optimizer, output=output, detail_every=10):
        for _ in range(STEPS):
            tokens = torch.randint(VOCAB, (8, 32))
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def moments(timeline: Timeline, memory: Memory) -> list[list[object]]:
    """Return the kinds of memory of each moment, with the time at which its phase begins or ends.

    Times and bytes are those of two steps that follow each other.
    """
    rows: list[list[object]] = []
    for moment in memory.moments:
        phase, is_end = moment.phase.removesuffix("_end"), moment.phase.endswith("_end")
        spans = [s for s in timeline.spans if s[:3] == ("main", phase, moment.unit)]
        at = max(s[3] + s[4] for s in spans) if is_end else min(s[3] for s in spans)
        rows.append([round(at, 2), {kind: held for kind, held in moment.device.items() if held}])
    return sorted(rows, key=lambda row: row[0])  # type: ignore[arg-type, return-value]


def of_rank(timeline: Timeline, memory: Memory) -> dict[str, Any]:
    spans = [
        [row, phase, unit, round(begin, 2), round(length, 2)]
        for row, phase, unit, begin, length, *_ in timeline.spans
        if phase != "outside" and length >= SHORTEST_MS
    ]
    return {"spans": spans, "memory": moments(timeline, memory)}


def record(stage: int) -> dict[str, Any]:
    """Train at a stage in two processes; return the newest step that was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__)
        command = [sys.executable, "-m", *launch, "--stage", str(stage), "--output", folder]
        subprocess.run(command, check=True)
        run = read_run(folder)
    timelines, memories = (dict(run.lines(kind)) for kind in (Timeline, Memory))
    ranks = [of_rank(timelines[rank], memories[rank]) for rank in sorted(timelines)]
    length = max(each.seconds for each in timelines.values())
    return {"ms": round(1000 * length, 2), "ranks": ranks}


def write(stages: dict[str, dict[str, Any]]) -> None:
    ranks = [rank for stage in stages.values() for rank in stage["ranks"]]
    kinds = {kind for rank in ranks for _, held in rank["memory"] for kind in held}
    phases = dict.fromkeys(span[1] for rank in ranks for span in rank["spans"])
    found = {
        "phases": {phase: (name_of_kind(phase), colour_of(phase)) for phase in phases},
        "kinds": {kind: colour_of(kind) for kind in sorted(kinds, key=order_of_kinds)},
        "stages": stages,
    }
    RECORDED.write_text(json.dumps(found, separators=(",", ":")).replace("[[", "[\n[") + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int)
    parser.add_argument("--output")
    asked = parser.parse_args()
    if asked.output:
        return train(asked.stage, asked.output)
    write({str(stage): record(stage) for stage in range(4)})


if __name__ == "__main__":
    main()
