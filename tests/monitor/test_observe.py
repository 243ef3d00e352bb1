"""Observed runs: figures of every step over all ranks, in files, for any sharded model."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import Checkpointed
from ranks import run_ranks
from shardwise import fully_shard, observe, shard, stats
from shardwise.monitor.metrics import (
    DATA_S,
    EXPOSED_SHARE,
    NUM_COLLECTIVES,
    OVERLAP_SHARE,
    SENT_MIB,
    STEP_S,
)
from shardwise.monitor.record import read_run

STEPS = 13


def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any, rank: int) -> None:
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=random) for _ in range(STEPS)]
    for x in run.data(batches):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item(), step=run.step)


def observed(rank: int, world_size: int, output: str, way: str) -> dict[str, float]:
    torch.manual_seed(0)
    if way == "fully_shard":
        model: nn.Module = Checkpointed()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    else:
        model = shard(Checkpointed(), stage=int(way))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = stats(model)
    with observe(model, optimizer, output, detail_every=6) as run:
        train(model, optimizer, run, rank)
    after = stats(model)
    assert run.step == STEPS
    sent = sum(after.sent_bytes.values()) - sum(before.sent_bytes.values())
    return {"sent": sent, "last": run.latest.step if run.latest else 0}


@pytest.mark.parametrize("way", ["0", "3", "fully_shard"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_figures_of_all_steps_and_ranks_are_kept(way: str, world_size: int, tmp_path: Path) -> None:
    told = run_ranks(observed, world_size, str(tmp_path), way)
    record = read_run(tmp_path)
    assert record.facts.num_ranks == world_size == len(record.facts.hosts)
    assert [unit.name for unit in record.facts.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    steps = [line.step for line in record.steps]
    assert steps == [*range(1, 11), STEPS] and record.steps[-1].num_steps == 3
    for line in record.steps:
        assert line.metrics[STEP_S].min > 0
        for share in (EXPOSED_SHARE, OVERLAP_SHARE):
            assert 0 <= line.metrics[share].min <= line.metrics[share].max <= 100
        assert line.metrics[DATA_S].max < line.metrics[STEP_S].max
        assert 0 <= line.metrics[STEP_S].min_rank < world_size
    sent = sum(line.num_steps * line.metrics[SENT_MIB].max for line in record.steps)
    assert sent * 2**20 <= max(each["sent"] for each in told) * (1 + 1e-9)
    assert (record.steps[0].metrics[NUM_COLLECTIVES].min > 0) is (world_size > 1)
    for line in record.steps:  # what was logged after a step is the step's
        assert line.values["step"] == line.step and math.isfinite(line.values["loss"])
    assert {each["last"] for each in told} == {STEPS}
    assert set(record.by_rank) == set(range(world_size))


@pytest.mark.parametrize("world_size", [1, 3])
def test_timelines_have_no_gaps_and_no_overlaps(world_size: int, tmp_path: Path) -> None:
    run_ranks(observed, world_size, str(tmp_path), "3")
    timelines = [*read_run(tmp_path).lines("timeline")]
    assert {(rank, line["step"]) for rank, line in timelines} == {
        (rank, step) for rank in range(world_size) for step in (2, 6, 12)
    }
    for _, timeline in timelines:
        by_line: dict[str, list[list[Any]]] = {}
        for row in timeline["spans"]:
            by_line.setdefault(row[0], []).append(row)
        for rows in by_line.values():
            for one, other in pairwise(rows):
                assert one[4] >= 0 and other[3] >= one[3] + one[4] - 1e-3
        main = by_line["main"]
        assert sum(row[4] for row in main) >= 0.97 * 1e3 * timeline["seconds"]
        phases = {row[1] for row in main}
        assert {"forward", "backward", "recompute", "step", "data"} <= phases
        assert ("shard.all_gather" in by_line) is (world_size > 1)
