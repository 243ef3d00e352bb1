"""Parameters of `shard()` on a mesh of their own or cut along another dim, and where they are."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.config import Units
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from trainer import full

WIDTH, EXPERTS, ROWS = 12, 4, 3


class Experts(nn.Module):
    """One matrix for each expert, and all of them for each row, as if every row were sent to all.

    The expert axis has a part of them each; the backward pass brings the gradients of all its
    ranks' rows, as the way back of an all-to-all does.
    """

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)
        self.gate = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        weight = self.weight
        if hasattr(weight, "redistribute") and not isinstance(weight, shardwise.ShardTensor):
            weight = weight.redistribute(placements=[Replicate()])
            weight = weight.to_local(grad_placements=[Partial()])
        mixed = torch.einsum("bi,eij->bj", x * self.gate, weight)
        return x + torch.tanh(mixed)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Experts(), Experts())
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, x):
        return self.head(self.layers(x))


ROUNDINGS = of_gradient(*(WIDTH * EXPERTS,) * 2, WIDTH, over=ROWS * 4)


def batch_of(step, num_ranks):
    return torch.randn(ROWS * num_ranks, WIDTH, generator=torch.Generator().manual_seed(step))


def trains(rank, num_ranks, model, plain, num_sums):
    """Two steps with clipping are those of one process with the whole batch."""
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        x = batch_of(step, num_ranks)
        for part in x[ROWS * rank : ROWS * (rank + 1)].split([1, 2]):
            with shardwise.accumulate(model, last=len(part) == 2):
                (model(part).square().sum() / ROWS / 6).backward()
        plain(x).square().mean().backward()
        roundings = ROUNDINGS * (step + 1)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.shape == q.shape
            assert_rounded_alike(full(p.grad), q.grad, roundings, name)
        before = shardwise.debug.stats(model).num_collectives
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (model, plain)]
        after = shardwise.debug.stats(model).num_collectives
        sent = {k: n - before.get(k, 0) for k, n in after.items() if n != before.get(k, 0)}
        if num_ranks > 1:
            assert sum(sent.values()) == num_sums, sent
        numel = sum(p.numel() for p in plain.parameters())
        assert_rounded_alike(float(norms[0]), float(norms[1]), roundings + numel, "norm")
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    x = batch_of(7, 1)
    with shardwise.gathered(model):
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(copy.deepcopy(model)(x), plain(x), rtol=1e-4, atol=1e-5)
    shardwise.check.replicas(model, ours)


def experts(rank, world_size, mesh, stage, layout):
    """Experts are DTensors over one axis and sharded over the other, the rest over both."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    for block in model.layers:
        placed = distribute_tensor(block.weight.detach(), mesh["ep"], [Shard(0)])
        block.weight = nn.Parameter(placed)
    shardwise.shard(
        model,
        stage=stage,
        layout=layout,
        units=Units(Experts, placements={"layers.*.weight": mesh["efsdp"]}),
        mesh=mesh._flatten("dp"),
    )
    weight = model.layers[0].weight
    assert weight.device_mesh.mesh_dim_names == ("efsdp", "ep")
    # The norm: over the axes of the rest, where it is sharded, and over those of the experts.
    sums = (stage > 0) + (stage > 0 and mesh["efsdp"].size() > 1) + 1
    trains(rank, world_size, model, plain, sums)


def columns(rank, world_size, stage):
    """Matrices cut along their last dim train as one process does; `p` is its columns."""
    torch.manual_seed(0)
    plain = Net()
    model = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (world_size,))
    shardwise.shard(
        model,
        stage=stage,
        mesh=mesh,
        units=Units(Experts, placements=lambda name, param: Shard(-1) if param.ndim > 1 else None),
    )
    weight = model.layers[1].weight
    if stage:
        assert weight.placements == (Shard(2),)
        assert weight.to_local().shape == (EXPERTS, WIDTH, WIDTH // world_size)
        assert torch.equal(full(weight), plain.layers[1].weight)
        again = torch.empty_like(weight).copy_(plain.layers[1].weight)
        assert torch.equal(again.to_local(), weight.to_local())
    trains(rank, world_size, model, plain, 1 if stage else 0)


def clips_over_meshes(mesh, order):
    """One norm of parameters on three meshes, of fully_shard: torch's own fails there."""
    torch.manual_seed(0)
    model = Net()
    for block in model.layers:
        placed = distribute_tensor(block.weight.detach(), mesh["ep"], [Shard(0)])
        block.weight = nn.Parameter(placed)
        fully_shard(block, mesh=mesh["efsdp"])
    fully_shard(model, mesh=mesh["efsdp", "ep"]._flatten("dp"))
    x = batch_of(mesh["efsdp"].get_local_rank(), 1)  # alike on the ranks of ep, which share gates
    model(x).square().mean().backward()
    before = [full(p.grad).double() for p in model.parameters()]
    truth = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in before]), order)
    sent = shardwise.debug.stats(model).num_collectives
    found = shardwise.parallel.clip_grad_norm_(model.parameters(), 0.05, order)
    after = shardwise.debug.stats(model).num_collectives
    assert sum(after.values()) - sum(sent.values()) == 4  # dp; efsdp; efsdp and ep
    assert type(found) is Tensor
    numel = sum(g.numel() for g in before)
    assert_rounded_alike(float(found), float(truth), numel, "norm")
    for param, grad in zip(model.parameters(), before, strict=True):
        clipped = grad * min(1.0, 0.05 / (float(truth) + 1e-6))
        assert_rounded_alike(full(param.grad), clipped.float(), numel, "clipped")
    with pytest.raises(RuntimeError, match="non-finite"):
        model.head.weight.grad.to_local().fill_(float("nan"))
        shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)


def clips_as_torch_does(rank, world_size):
    """On one mesh the norm and the gradients have the bits of torch's function."""
    found = []
    for clip in (nn.utils.clip_grad_norm_, shardwise.parallel.clip_grad_norm_):
        torch.manual_seed(0)
        model = shardwise.shard(Net(), mesh=init_device_mesh("cpu", (world_size,)))
        model(batch_of(rank, 1)).square().mean().backward()
        norm = clip(model.parameters(), 0.01)
        found.append([norm, *(full(p.grad) for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert shardwise.parallel.clip_grad_norm_([], 1.0) == 0
    mesh = init_device_mesh("cpu", (world_size,))
    params = []
    for rows in (world_size, 1):  # of the second one all but rank 0 have nothing
        param = nn.Parameter(distribute_tensor(torch.ones(rows, 3).bfloat16(), mesh, [Shard(0)]))
        if rank == 0:
            param.grad = torch.full_like(param, 3.0)
        params.append(param)
    for order, norm in ((float("inf"), 3.0), (float("-inf"), 3.0), (1.0, 18.0)):
        assert shardwise.parallel.clip_grad_norm_(params, 1e9, order) == norm, order
    plain = nn.Parameter(torch.ones(4))
    plain.grad = torch.full((4,), 2.0)
    assert shardwise.parallel.clip_grad_norm_(plain, 1.0) == 4
    assert torch.allclose(plain.grad, torch.full((4,), 0.5))


def refuses(mesh):
    """What cannot be is refused on all ranks before anything changes, with the parameter's name."""
    cases = [
        ({"layers.7": Shard(1)}, {}, "'layers.7' is the name of no parameter"),
        ({"head": Shard(1)}, {"layout": "flat"}, "'head.weight'.*cuts ranges of elements"),
        ({"head.weight": Shard(2)}, {}, "'head.weight' has 2 dims"),
        ({"head.bias": "dp"}, {}, "'head.bias' gets 'dp'; expected a DeviceMesh"),
        ({"head.bias": mesh["ep"]}, {"mesh": mesh["efsdp"]}, "are not of the model's"),
        (lambda name, param: Shard(1) if name == "layers.0.weight" else None, {}, "share evenly"),
        (Shard(1), {}, "expected a mapping of names, or a function"),
        ({1: Shard(1)}, {}, "1 is no name of a parameter"),
        ({"head.weight": (Shard(1), Shard(0))}, {}, "name one of each kind"),
        (lambda name: None, {}, "the function raised TypeError for 'layers.0"),
        ({"head.bias": mesh["ep"]}, {"spread": mesh["efsdp"]}, "would be left out"),
    ]
    for placements, options, said in cases:
        model = Net()
        model.layers[0].weight = nn.Parameter(torch.zeros(2, 5, 2))
        if "spread" in options:  # a DTensor whose copies no mesh would bring together
            small = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
            placed = distribute_tensor(model.head.bias.detach(), small["tp"], [Replicate()])
            model.head.bias = nn.Parameter(placed)
            placements = {"head.bias": options.pop("spread")}
        with pytest.raises(ConfigError, match=said):
            shardwise.shard(model, units=Units(placements=placements), **options)
        assert not any(isinstance(p, shardwise.ShardTensor) for p in model.parameters())


@on_ranks(1, 3, 4)
def test_meshes_and_dims_of_single_parameters_leave_the_steps_of_one_process(rank, world_size):
    if world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
        for stage, layout in ((0, "rows"), (1, "flat"), (2, "matrices"), (3, "rows")):
            experts(rank, world_size, mesh, stage, layout)
        refuses(mesh)
        for order in (2.0, 1.0, float("inf")):
            clips_over_meshes(mesh, order)
    elif world_size == 3:
        experts(rank, 3, init_device_mesh("cpu", (1, 3), mesh_dim_names=("efsdp", "ep")), 3, "rows")
    clips_as_torch_does(rank, world_size)
    for stage in (0, 1, 2, 3) if world_size < 4 else ():
        columns(rank, world_size, stage)


# `describe()` says where a parameter's elements are.


def make():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"up": nn.Linear(12, 24), "down": nn.Linear(24, 12), "head": nn.Linear(12, 5)}
    )


class Parts(nn.Module):
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
        model = Parts()
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
