"""Backward gathers from neighbours what forward has left there (hpZ): same bits, other bytes."""

from itertools import pairwise

import pytest
import torch

from models import Stack
from ranks import agreed, on_ranks
from shardwise import Axes, debug, shard
from shardwise.config import Schedule, Units
from shardwise.errors import ConfigError
from trainer import compare

NEARBY = {"stage": 3, "schedule": Schedule(nearby_ranks=2)}


@on_ranks(4)
def test_steps_are_those_of_stage_3_in_every_layout(rank, tmp_path):
    settings = [NEARBY, {**NEARBY, "layout": "flat"}, {**NEARBY, "offload": "cpu"}]
    settings.append({**NEARBY, "offload": f"nvme:{tmp_path}", "precision": "fp32"})
    compare(rank, 4, Stack, settings, micro_batches=2)


def sent_in_a_step(schedule):
    """Return the bytes of gathers in forward and in backward, by axis, of the third step."""
    model = shard(Stack(), layout="flat", units=Units("Block"), schedule=schedule)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # what is learnt in the first steps changes no count
        counts = [dict(debug.stats(model).sent_bytes)]
        loss = model(torch.randn(4, 8)).sum()
        counts.append(dict(debug.stats(model).sent_bytes))
        loss.backward()
        counts.append(dict(debug.stats(model).sent_bytes))
        optimizer.step()
        optimizer.zero_grad()
    axes = ("shard.all_gather", "nearby.all_gather")
    return [
        {axis: after.get(axis, 0) - before.get(axis, 0) for axis in axes}
        for before, after in pairwise(counts)
    ]


@on_ranks(4)
def test_backward_gathers_its_bytes_from_neighbours_alone(rank):
    plain, found = sent_in_a_step(None), sent_in_a_step(NEARBY["schedule"])
    numels = [sum(p.numel() for p in block.parameters()) for block in Stack().blocks]
    padded = [-(-numel // 4) * 4 for numel in numels]
    assert found[0] == plain[0]
    # The root and the last block stay full for their backward; half of the others' goes to a peer.
    near = sum(numel // 2 * 4 for numel in padded[:2])
    assert found[1] == {"shard.all_gather": 0, "nearby.all_gather": near}
    assert plain[1]["nearby.all_gather"] == 0 < near < plain[1]["shard.all_gather"]


@on_ranks(4)
def test_neighbours_are_refused_where_they_have_no_meaning(rank):
    for options, said in (
        ({"stage": 2}, "at stage 2 full parameters stay"),
        ({"schedule": Schedule(nearby_ranks=3)}, "a divisor of the 4 ranks"),
        ({"mesh": Axes(dp_shard=2, tp=2)}, "the mesh has 2 of 4 ranks"),
    ):
        with pytest.raises(ConfigError, match=said) as error:
            shard(Stack(), **{**NEARBY, **options})
        agreed(str(error.value))
    for wrong in (1, 0, True, 2.0, "2"):
        with pytest.raises(ConfigError, match="nearby_ranks"):
            Schedule(nearby_ranks=wrong)
    with pytest.raises(ConfigError, match="nearby_ranks"):
        shard(Stack(), schedule=Schedule(nearby_ranks=2 if rank else 4))
    shard(Stack(), schedule=Schedule(nearby_ranks=4))(torch.ones(1, 8)).sum().backward()
