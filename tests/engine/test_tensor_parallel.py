"""`shard()` of models whose parameters are DTensors already: the steps of one process."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from models import NormedBlock as Block
from models import NormedStack as Net
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.errors import ConfigError, ReplicaError, ShardError
from shardwise.interop.fsdp2 import fully_shard
from trainer import full

WIDTH, HIDDEN = Block.WIDTH, Block.HIDDEN
ROWS = 4  # of each rank's batch


# Of one gradient: two blocks and the head, forward and back, over all rows of all ranks.
SUMS = (WIDTH, WIDTH, HIDDEN) * 2 + (WIDTH,)


def grid(dp, tp):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))


def parallel(model, mesh):
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for block in model.layers:
        parallelize_module(block, mesh, plan)
    return model


def batch_of(step, dp):
    return torch.randn(ROWS * dp, WIDTH, generator=torch.Generator().manual_seed(step))


def alike(ours, theirs, of, roundings):
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert p.shape == q.shape
        assert_rounded_alike(full(of(p)), of(q).detach(), roundings, name)


def trains(mesh, stage, layout, in_window):
    """Two steps with clipping, of micro-batches if asked, against one process."""
    dp = mesh["dp"].size()
    here = mesh["dp"].get_local_rank()
    torch.manual_seed(0)
    plain = Net()
    model = parallel(copy.deepcopy(plain), mesh["tp"])
    if stage == 2:  # an optimizer that was there before
        before = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        shardwise.shard(
            model, stage=stage, layout=layout, mesh=mesh["dp"], units=Block, optimizer=before
        )
        optimizer = before
    else:
        shardwise.shard(model, stage=stage, layout=layout, mesh=mesh["dp"], units=Block)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x = batch_of(step, dp)
        mine = x[ROWS * here : ROWS * (here + 1)]
        parts = mine.chunk(2) if in_window else (mine,)
        for number, part in enumerate(parts):
            with shardwise.accumulate(model, last=number == len(parts) - 1):
                (model(part).square().mean() / len(parts)).backward()
        plain(x).square().mean().backward()
        roundings = of_gradient(*SUMS, over=ROWS * dp) * (step + 1)
        alike(model, plain, lambda p: p.grad, roundings)
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, plain)]
        numel = sum(p.numel() for p in plain.parameters())
        assert_rounded_alike(float(norms[0]), float(norms[1]), roundings + numel, "norm")
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
        alike(model, plain, lambda p: p, roundings)
    gathered_copied_and_drawn(model, plain, batch_of(9, dp))
    shardwise.check.replicas(model, optimizer)


def gathered_copied_and_drawn(model, plain, x):
    """What stands in the gathered model are DTensors; a copy, a write and a draw are whole."""
    tolerance = {"rtol": 1e-4, "atol": 1e-5}  # that it runs; values were compared before
    with shardwise.gathered(model):
        torch.testing.assert_close(model(x), plain(x), **tolerance)
        assert type(model.layers[0].up.weight.data) is DTensor
        assert model.layers[0].up.weight.placements == (Shard(0),)
    torch.testing.assert_close(copy.deepcopy(model)(x), plain(x), **tolerance)
    weight = model.layers[0].up.weight
    with shardwise.gathered(weight, writeback=True) as (whole,):
        whole.copy_(torch.arange(whole.numel()).view_as(whole))
    with torch.no_grad():
        assert torch.equal(full(weight).view(-1), torch.arange(HIDDEN * WIDTH).float())
        assert float(weight.sum()) == sum(range(HIDDEN * WIDTH))
        assert float(weight.max()) == HIDDEN * WIDTH - 1
        assert torch.equal(weight.sum(dim=0), full(weight).sum(dim=0))
    torch.manual_seed(torch.distributed.get_rank())
    nn.init.normal_(weight)
    alike_on_all_ranks(full(weight))


def works_on_fully_shard_too(mesh):
    """Contexts take models of `fully_shard` with DTensors and other dims, and their parameters."""
    torch.manual_seed(0)
    plain = Net()
    model = parallel(copy.deepcopy(plain), mesh["tp"])

    def place(param):
        return Shard(1) if param.shape == (3, WIDTH) else None

    weight = fully_shard(model, mesh=mesh["dp"], shard_placement_fn=place).head.weight
    with pytest.raises(ConfigError, match="has not run yet"), shardwise.gathered(weight):
        pass
    x = batch_of(1, 1)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    shardwise.check.replicas(model)
    with shardwise.gathered(model):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        assert model.layers[0].up.weight.placements == (Shard(0),)
    model.reshard()
    params = model.layers[0].up.weight, model.head.weight, model.layers[1].down.weight
    assert params[1].placements == (Shard(1),)
    with shardwise.gathered(*params, writeback=True) as wholes:
        for whole, truth in zip(wholes, ("0.up", "head", "1.down"), strict=True):
            name = truth if truth == "head" else f"layers.{truth}"
            assert torch.equal(whole, plain.get_submodule(name).weight)
            whole.copy_(torch.arange(whole.numel()).view_as(whole))
    for param in params:
        assert torch.equal(full(param).view(-1), torch.arange(param.numel()).float())
    assert copy.deepcopy(params[1]).placements == (Shard(1),)
    pickle.loads(pickle.dumps(params[1].detach()))


def refuses(mesh):
    """What cannot be cut further is refused before anything changes, with what to do."""
    with pytest.raises(ConfigError, match=r"has ranks .* of it too\. Pass the axes"):
        shardwise.shard(parallel(Net(), mesh["tp"]))
    partial = Net()
    spread = distribute_tensor(torch.ones(6), mesh["tp"], [Shard(0)])
    sums = DTensor.from_local(spread.to_local(), mesh["tp"], [Partial()])
    partial.register_parameter("sums", nn.Parameter(sums))
    with pytest.raises(ConfigError, match=r"'sums' is a DTensor .*Shard or Replicate on each axis"):
        shardwise.shard(partial, mesh=mesh["dp"])
    assert not any(isinstance(p, shardwise.ShardTensor) for p in partial.parameters())


def starts_on_meta(mesh):
    """Values of a model on meta are those of a model that is not parallel, each rank its piece."""
    found = []
    for parallelize in (False, True):
        with torch.device("meta"):
            model = Net()
        if parallelize:
            parallel(model, mesh["tp"])
        torch.manual_seed(3 + torch.distributed.get_rank())
        shardwise.shard(model, mesh=mesh["dp"] if parallelize else None, units=Block)
        found.append([full(p) for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    torch.manual_seed(torch.distributed.get_rank())  # and live ones are those of one rank
    model = shardwise.shard(parallel(Net(), mesh["tp"]), mesh=mesh["dp"], units=Block)
    for param in model.parameters():
        alike_on_all_ranks(full(param))


def alike_on_all_ranks(tensor):
    everywhere = [torch.empty_like(tensor) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everywhere, tensor.contiguous())
    assert all(torch.equal(each, everywhere[0]) for each in everywhere)


def saves_over_two_axes(folder):
    """Ranks that hold parts along different axes all meet in one save."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "ep"))
    model = Net()
    for block, axis in zip(model.layers, ("tp", "ep"), strict=True):
        placed = distribute_tensor(block.up.weight.detach(), mesh[axis], [Shard(0)])
        block.up.weight = nn.Parameter(placed)
    before = [full(p) if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]
    shardwise.shard(model, mesh=mesh["dp"], units=Block)
    shardwise.save(folder, model)
    plain = Net()
    shardwise.load(folder, plain)
    for ours, theirs in zip(plain.parameters(), before, strict=True):
        assert torch.equal(ours, theirs)


def finds_copies_that_differ(mesh):
    """What tensor parallelism does not cut has copies along its axis; one that differs is named."""
    model = shardwise.shard(parallel(Net(), mesh["tp"]), mesh=mesh["dp"], units=Block)
    shardwise.check.replicas(model)
    if torch.distributed.get_rank() == 2:
        model.head.weight.to_local().add_(1)
    with pytest.raises(ReplicaError, match=r"'head.weight', value: ranks 2, 3 differ from"):
        shardwise.check.replicas(model)


def refuses_optimizers_of_matrices(mesh):
    """Where the advice for slices would not help, the error does not give it."""
    model = shardwise.shard(parallel(Net(), mesh["tp"]), stage=0, mesh=mesh["dp"], units=Block)
    optimizer = torch.optim.LBFGS(model.parameters())

    def closure():
        loss = model(batch_of(0, 1)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(ShardError, match=r"LBFGS asks for .* a piece of it at every stage"):
        optimizer.step(closure)


def unscales(mesh):
    """An overflow in a piece of one rank makes all ranks skip the step."""
    model = shardwise.shard(parallel(Net(), mesh["tp"]), mesh=mesh["dp"], units=Block)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = full(model.head.weight).clone()
    scaler.scale(model(batch_of(0, 1)).square().mean()).backward()
    grad = model.layers[0].up.weight.grad
    if torch.distributed.get_rank() == 3:
        grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert torch.equal(full(model.head.weight), before)


@pytest.mark.parametrize(
    ("world_size", "cells"),
    [
        (1, [(1, 1, 3, "rows", False)]),
        (3, [(3, 1, 1, "rows", False), (1, 3, 2, "flat", True)]),
        (
            4,
            [
                (2, 2, 0, "rows", True),
                (2, 2, 1, "flat", False),
                (2, 2, 2, "matrices", False),
                (2, 2, 3, "rows", True),
            ],
        ),
    ],
)
@on_ranks()
def test_a_tensor_parallel_model_trains_as_one_process_does(world_size, cells, tmp_path):
    folder = str(tmp_path / "saved")
    meshes = {}
    for dp, tp, stage, layout, in_window in cells:
        if (dp, tp) not in meshes:
            meshes[dp, tp] = grid(dp, tp)
        trains(meshes[dp, tp], stage, layout, in_window)
    if world_size == 4:
        refuses(meshes[2, 2])
        starts_on_meta(meshes[2, 2])
        unscales(meshes[2, 2])
        works_on_fully_shard_too(meshes[2, 2])
        refuses_optimizers_of_matrices(meshes[2, 2])
        finds_copies_that_differ(meshes[2, 2])
        saves_over_two_axes(folder)
