"""Parameters that ``shard_placement_fn`` cuts along any dim: DTensor's shards and gradients.

Training along other dims is compared with torch's own in test_fully_shard.py.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from ranks import on_ranks
from shardwise.interop.fsdp2 import fully_shard

# Along dims behind the first, 30 can be cut evenly for 1, 2, 3 and 5 ranks; dim 0 need not be even.
SHAPES = {
    "rows": ((7, 4), 0),
    "columns": ((4, 30), 1),
    "middle": ((2, 30, 3), 1),
    "last": ((2, 3, 30), -1),
    "vector": ((4,), 0),
    "few": ((1, 2), 0),
    "empty": ((0, 30), 1),
}


class Held(nn.Module):
    """Parameters of whole numbers, so that sums over ranks have no rounding."""

    def __init__(self):
        super().__init__()
        for number, (name, (shape, _)) in enumerate(SHAPES.items()):
            numel = torch.Size(shape).numel()
            values = (torch.arange(numel) % 17 + number).float().reshape(shape)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, factor):
        total = torch.zeros(())
        for name, param in self.named_parameters():
            assert param.is_contiguous(), name
            weights = torch.arange(param.numel()).reshape(param.shape)
            total = total + (param * weights * factor).sum()
        return total


def place(model):
    dims = {id(p): SHAPES[name][1] for name, p in model.named_parameters()}
    return lambda param: Shard(dims[id(param)])


@on_ranks(1, 2, 3, 5)
def test_shards_and_gradients_along_any_dim_are_those_of_distribute_tensor(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    plain = Held()
    model = Held()
    fully_shard(model, mesh=mesh, shard_placement_fn=place(model))
    model(float(rank + 1)).backward()
    plain((world_size + 1) / 2).backward()  # the mean of the ranks' factors
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        dim = SHAPES[name][1] % ours.ndim
        assert ours.placements == (Shard(dim),), name
        for mine, value in ((ours, theirs), (ours.grad, theirs.grad)):
            assert isinstance(mine, DTensor) and value is not None
            expected = distribute_tensor(value, mesh, [Shard(dim)])
            assert torch.equal(mine.to_local(), expected.to_local()), name
            assert mine.to_local().is_contiguous(), name
            assert (mine.shape, mine.stride()) == (expected.shape, expected.stride())
            assert torch.equal(mine.full_tensor(), value), name
            assert torch.equal(mine.redistribute(mesh, [Shard(0)]).full_tensor(), value), name
    model.unshard()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    model.reshard()
