"""Copies of offloaded state, and reads and writes of its files, are lines of the timeline."""

from collections import Counter
from itertools import pairwise

import pytest
import torch

from models import Checkpointed
from ranks import run_ranks
from shardwise import observe, shard
from shardwise.monitor.describe import describe
from shardwise.monitor.metrics import TRANSFERS, transfers_ms
from shardwise.monitor.record import Timeline, read_run

STEPS = 5
_IN_FILES = ("disk_read", "disk_write")


def offloaded(rank, world_size, output, offload):
    torch.manual_seed(0)
    model = shard(Checkpointed(), stage=3, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with observe(model, optimizer, output, detail_every=1):
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [unit.rank_bytes for unit in describe(model).units]


@pytest.mark.parametrize(("place", "world_size"), [("cpu", 3), ("nvme", 1), ("nvme", 3)])
def test_every_copy_of_offloaded_state_is_told_with_its_bytes(place, world_size, tmp_path):
    (tmp_path / "files").mkdir()
    offload = place if place == "cpu" else f"nvme:{tmp_path / 'files'}"
    resting = run_ranks(offloaded, world_size, str(tmp_path), offload)
    record = read_run(tmp_path)
    for rank, (root, *blocks) in enumerate(resting):
        shards = root + sum(blocks)
        in_files = []
        for _, timeline in record.lines(Timeline, rank):
            lines = {}
            for row in timeline.spans:
                lines.setdefault(row[0], []).append(row)
            for rows in lines.values():
                assert all(b[3] >= a[3] + a[4] - 1e-3 for a, b in pairwise(rows))
            moved = {kind: sum(row[5] for row in lines.get(kind, ())) for kind in TRANSFERS}
            # The root and the last block stay gathered between the passes; gradients go once.
            assert moved["to_device"] == shards + sum(blocks[:-1])
            assert moved["to_host"] == shards
            both = moved["disk_read"], moved["disk_write"]
            if place == "cpu":
                assert both == (0, 0)
            elif timeline.step == 1:  # both moments are made, of elements and no padding
                assert both[0] == 0 < both[1] <= 2 * shards
            else:
                in_files += [
                    (kind, row[2], row[5]) for kind in _IN_FILES for row in lines.get(kind, ())
                ]
                _check_turns(in_files, timeline.step - 2, resting[rank])
    last = record.steps[-1].metrics
    for kind in TRANSFERS:
        if kind.startswith("to_") or place == "nvme":
            assert last[transfers_ms(kind)].min >= 0
        else:
            assert transfers_ms(kind) not in last


def _check_turns(in_files, num_steps, resting):
    """Check what was told of files through a step: each unit is read and written once a step.

    A step may go on in the background of the forward pass after it, and what is read and written
    is told in the step in which it ends. So of the last step some units are read, and some of
    these written.
    """
    sizes = {}
    for _, unit, num_bytes in in_files:
        sizes.setdefault(unit, set()).add(num_bytes)
    told = Counter((kind, unit) for kind, unit, _ in in_files)
    for unit in sizes:
        num_reads, num_writes = (told[kind, unit] for kind in _IN_FILES)
        assert num_reads - num_steps in (0, 1)
        assert num_reads - num_writes in (0, 1)
    if num_steps > 1:
        assert len(sizes) == len(resting)
        for (whole,) in sizes.values():  # whole blocks of the file
            assert whole >= 2 * max(resting) and whole % 4096 == 0
