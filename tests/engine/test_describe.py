"""`describe()` says where a parameter's elements are."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from ranks import on_ranks
from shardwise.config import Units
from shardwise.interop.fsdp2 import fully_shard


def make():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"up": nn.Linear(12, 24), "down": nn.Linear(24, 12), "head": nn.Linear(12, 5)}
    )


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = make()


@pytest.mark.parametrize(
    ("num_ranks", "degrees"), [(1, {}), (3, {}), (4, {"tp": 2}), (4, {"dp_replicate": 2})]
)
@on_ranks()
def test_each_ranks_elements_are_where_describe_says(rank, num_ranks, degrees):
    axes = shardwise.Axes(**degrees)

    def parallel():
        model = Net()
        if axes.tp > 1:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model.parts, axes["tp"], plan)
        return model

    dim = {"units": Units(placements={"parts.head.weight": Shard(1)})}
    models = [
        shardwise.shard(parallel(), mesh=axes, **dim),
        shardwise.shard(parallel(), mesh=axes, layout="flat"),
        shardwise.shard(parallel(), mesh=axes, layout="matrices"),
        shardwise.shard(parallel(), mesh=axes, stage=0),
        fully_shard(parallel(), mesh=axes),
    ]
    for model in models:
        params = dict(model.named_parameters())
        described = [p for unit in shardwise.describe(model).units for p in unit.params]
        assert {p.name for p in described} == params.keys()
        for found in described:
            full = params[found.name].full_tensor()
            assert found.shape == full.shape
            box = tuple(slice(a, a + n) for a, n in zip(found.at, found.piece_shape, strict=True))
            here = full[box].reshape(-1)[found.lo : found.hi]
            local = params[found.name].to_local()
            assert torch.equal(here, local.reshape(-1)), str(found)
    if num_ranks == 3:
        said = {p.name: str(p) for u in shardwise.describe(models[2]).units for p in u.params}
        here = "" if rank == 0 else ", so not here"
        assert said["parts.up.weight"] == f"parts.up.weight [24, 12]: whole on shard rank 0{here}"
        assert "elements over" in said["parts.up.bias"]
    if degrees == {"tp": 2}:
        said = {p.name: str(p) for u in shardwise.describe(models[0]).units for p in u.params}
        rows = f"{12 * axes['tp'].get_local_rank()}"
        assert said["parts.down.weight"].startswith(
            "parts.down.weight [12, 24]: dim 1 over tp, dim 0 over dp_shard; here ["
        )
        assert said["parts.down.weight"].endswith(f", {rows}:{int(rows) + 12}]")
        assert "dim 1 over dp_shard; here [0:5, " in said["parts.head.weight"]
