"""Bits of `fully_shard`: those of torch's own and of DDP; its shards along any dim, and counts."""

import functools
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from models import Stack
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import debug, fully_shard
from trainer import full, sharded_by_block

# A mean of as many gradients as two micro-batches of four ranks have, or three of three, summed in
# another order; twice, since they are of either sign and what is left is smaller than they are.
TERMS = 9
OFFLOAD = CPUOffloadPolicy(pin_memory=False)


def mesh_of(*shape):
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def stack(seed=0):
    torch.manual_seed(seed)
    return Stack()


def steps(model, rank, *, accumulate=1, num=2):
    """Train; return the losses, then the last gradients and the parameters, in full."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(100 + rank)
    found = []
    for _ in range(num):
        optimizer.zero_grad()
        for number in range(accumulate):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == accumulate - 1)
            loss = model(torch.randn(4, 8, generator=generator)).square().mean()
            loss.backward()
            found.append(loss.detach())
            if number < accumulate - 1:
                assert all(p.grad is None for p in model.parameters())
        grads = [full(p.grad) for p in model.parameters()]
        optimizer.step()
    return found + grads + [full(p) for p in model.parameters()]


def same_bits(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


def LARGEST_EVEN(param):  # noqa: N802
    return Shard(1) if param.ndim == 2 and param.shape[1] % 2 == 0 else Shard(0)


@pytest.mark.kernels
@on_ranks(1, 2)
def test_it_takes_the_steps_of_torchs_own_and_of_ddp_to_the_bit(rank, world):
    cases = [
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    ]
    if world == 2:
        along = {"shard_placement_fn": LARGEST_EVEN}
        cases += [along, {**along, "offload_policy": OFFLOAD, "reshard_after_forward": False}]
        cases += [{**along, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}]
        cases += [{"mesh": mesh_of(2, 1)}]
    for options in cases:
        for accumulate in (1, 2) if options == {} else (2,):
            model = sharded_by_block(stack(), **options)
            ours = steps(model, rank, accumulate=accumulate)
            for local in (param.to_local() for param in model.parameters()):  # it can be pickled
                assert local.untyped_storage().nbytes() == local.nbytes
            theirs = sharded_by_block(stack(), torch_fully_shard, **options)
            expected = steps(theirs, rank, accumulate=accumulate)
            same_bits(ours, expected)
            if options == {} and accumulate == 1:
                same_bits(steps(DistributedDataParallel(stack()), rank), expected)
                at_home = sharded_by_block(stack(), offload_policy=OFFLOAD)
                same_bits(steps(at_home, rank), expected)


def num_collectives(model):
    return Counter(debug.stats(model).num_collectives)


@on_ranks(2)
def test_a_group_costs_one_gather_and_one_reduction():
    for reshards, in_forward, in_backward in ((None, 4, 3), (True, 4, 4), (False, 4, 0)):
        model = sharded_by_block(stack(), reshard_after_forward=reshards)
        for _ in range(3):  # what is learnt in the first steps changes no count
            counts = [num_collectives(model)]
            loss = model(torch.randn(4, 8)).sum()
            counts.append(num_collectives(model))
            loss.backward()
            counts.append(num_collectives(model))
            assert counts[1] - counts[0] == Counter({"shard.all_gather": in_forward})
            expected = {"shard.all_gather": in_backward, "shard.reduce_scatter": 4}
            assert counts[2] - counts[1] == +Counter(expected)


def spread_over_two(rank):
    """With an int, backward gathers over that many ranks, and steps are the same."""
    same_bits(
        steps(sharded_by_block(stack(), reshard_after_forward=2), rank),
        steps(sharded_by_block(stack()), rank),
    )
    model = sharded_by_block(stack(), reshard_after_forward=2)
    loss = model(torch.randn(4, 8)).sum()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    before = debug.stats(model).sent_bytes["shard.all_gather"]
    loss.backward()
    sent = debug.stats(model).sent_bytes["shard.all_gather"] - before
    # Half of what four ranks have with their padding, in four bytes an element, to one peer.
    assert sent == sum(-(-len(p) // 4) * 4 * p[0].numel() * 4 // 2 for p in stack().parameters())


def named_axes_and_two_meshes(rank):
    """Parameters on a full mesh, and a group on two meshes, take the steps of torch's own."""
    from torch.distributed.fsdp import DataParallelMeshDims
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, pair = mesh_of(4), mesh["tp"]
    found = []
    for shards in (fully_shard, torch_fully_shard):
        model = stack().head
        for name, param in list(model.named_parameters()):
            placed = distribute_tensor(param.detach(), mesh, [Replicate(), Replicate()])
            setattr(model, name, nn.Parameter(placed))
        shards(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
        x = DTensor.from_local(torch.ones(3, 8) * rank, mesh, [Shard(0), Replicate()])
        model(x).full_tensor().square().sum().backward()
        infos = FSDPMeshInfo(whole, shard_mesh_dim=0), FSDPMeshInfo(pair, shard_mesh_dim=0)
        place = functools.partial(placed_by_rank, infos, ShardPlacementResult)
        both = sharded_by_block(stack(), shards, mesh=whole, shard_placement_fn=place)
        assert {p.device_mesh.size() for p in both.parameters()} == {2, 4}
        found.append([full(p.grad) for p in model.parameters()] + steps(both, rank))
    # On four ranks torch's backend sums in another order. Two steps of layers of 8, each time a
    # gradient over three rows of four ranks.
    for ours, theirs in zip(*found, strict=True):
        assert_rounded_alike(ours, theirs, 2 * of_gradient(8, 8, 8, 8, over=4 * 4))


def placed_by_rank(infos, result, param):
    return result(Shard(0), infos[param.ndim - 1])


@on_ranks(4)
def test_replicas_of_shards_ints_and_named_axes(rank, world):
    mesh = mesh_of(2, 2)
    expected = steps(sharded_by_block(stack(), torch_fully_shard, mesh=mesh), rank)
    for options in ({}, {"reshard_after_forward": True}, {"offload_policy": OFFLOAD}):
        same_bits(steps(sharded_by_block(stack(), mesh=mesh, **options), rank), expected)
    model = sharded_by_block(stack(), mesh=mesh)
    reference = stack()
    for number in range(2):  # summed over shards in both, over replicas in the last
        model.set_requires_all_reduce(number == 1)
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        before = num_collectives(model)
        model(batch).square().mean().backward()
        counts = num_collectives(model) - before
        assert counts["shard.reduce_scatter"] == 4, counts
        assert counts["replicate.all_reduce"] == 8 * number  # of each unit a scatter and a gather
        reference(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        assert_rounded_alike(full(ours.grad), theirs.grad / world, 2 * TERMS)
    spread_over_two(rank)
    if hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):  # from torch 2.12 on
        named_axes_and_two_meshes(rank)


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
