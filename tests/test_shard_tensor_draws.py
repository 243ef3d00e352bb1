"""What is drawn for a parameter is what rank 0 draws, on all ranks, however they are seeded.

Ranks that are seeded alike stay so: each one's generator goes on as in one process.
"""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from ranks import on_ranks, run_ranks
from shardwise import shard
from shardwise.check import replicas as check_replicas
from test_shard_tensor import LAYOUTS, STAGES, Net, assert_bits, give_grads

DRAWS = {
    "init.normal_": lambda p: nn.init.normal_(p, std=0.02),
    "init.uniform_": lambda p: nn.init.uniform_(p),
    "init.trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "init.kaiming_uniform_": lambda p: nn.init.kaiming_uniform_(p) if p.ndim > 1 else None,
    "init.kaiming_normal_": lambda p: nn.init.kaiming_normal_(p) if p.ndim > 1 else None,
    "init.xavier_uniform_": lambda p: nn.init.xavier_uniform_(p) if p.ndim > 1 else None,
    "init.xavier_normal_": lambda p: nn.init.xavier_normal_(p) if p.ndim > 1 else None,
    "init.orthogonal_": lambda p: draw_orthogonal(p) if p.ndim > 1 else None,
    "init.constant_": lambda p: nn.init.constant_(p, 0.25),
    "normal_": lambda p: p.normal_(0.5, 2),
    "data.uniform_": lambda p: p.data.uniform_(-1, 1),
    "bernoulli_": lambda p: p.bernoulli_(0.5),
    "exponential_": lambda p: p.exponential_(),
    "random_": lambda p: p.random_(0, 9),
    "cauchy_": lambda p: p.cauchy_(),
    "log_normal_": lambda p: p.log_normal_(),
    "geometric_": lambda p: p.geometric_(0.3),
    "a generator of its own": lambda p: p.normal_(generator=own_generator()),
    "randn_like": lambda p: p.add_(torch.randn_like(p), alpha=0.1),
    "rand_like of data": lambda p: p.mul_(torch.rand_like(p.data)),
    "randint_like": lambda p: p.add_(torch.randint_like(p, 9)),
    "randn_like of the gradient": lambda p: p.grad.add_(torch.randn_like(p.grad)),
    "normal_ of the gradient": lambda p: p.grad.normal_(),
    "randn_like in grad mode": lambda p: add_noise_in_grad_mode(p),
    "dropout": lambda p: p.copy_(functional.dropout(p, 0.4)),
}
ALIKE = {"init.orthogonal_"}  # drawn on plain tensors, so by each rank for itself
AT_STAGE_0 = {  # elsewhere these are refused
    "bernoulli": lambda p: p.copy_(torch.bernoulli(torch.sigmoid(p))),
    "dropout of the gradient": lambda p: p.grad.copy_(functional.dropout(p.grad, 0.4)),
    "dropout of the gradient, in place": lambda p: functional.dropout(p.grad, 0.4, inplace=True),
}


def own_generator():
    """Return a generator in the state in which this rank's default one is."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return generator


@torch.enable_grad()
def draw_orthogonal(param):
    nn.init.orthogonal_(param)


def add_noise_in_grad_mode(param):
    with torch.enable_grad():
        noise = torch.randn_like(param)
    assert not noise.requires_grad
    param.add_(noise)


@torch.no_grad()
def draw_all(model, draw):
    give_grads([model, model], 5)
    for param in model.parameters():
        draw(param)
    found = dict(model.named_parameters())
    found |= {f"{n}.grad": p.grad for n, p in model.named_parameters()}
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


def check_draws(rank, world_size, every=False):
    meshes = [None]
    if world_size == 4:
        meshes = [init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))]
    models = {}
    for number, (label, draw) in enumerate([*DRAWS.items(), *AT_STAGE_0.items()]):
        torch.manual_seed(0)
        plain = Net()
        before = copy.deepcopy(plain.state_dict())
        torch.manual_seed(7)
        expected = draw_all(plain, draw)
        stream = torch.randn(3)
        # Each is drawn on ranks that are seeded alike, and apart, at three ranks or at four.
        seed = 7 + rank * ((number + world_size) % 2) * (label not in ALIKE)
        # One stage of the four at three ranks, and another at four.
        first = number + 2 * (world_size == 4)
        drawn = [STAGES[(first + k) % 4] for k in range(4 if every else 1)]
        drawn = drawn if label in DRAWS else [0]
        for stage in drawn:
            layout = LAYOUTS[(number // 2 + stage + world_size) % 3]
            if (stage, layout) not in models:
                models[stage, layout] = shard(Net(), stage=stage, layout=layout, mesh=meshes[0])
            model = models[stage, layout]
            with torch.no_grad():
                for name, param in model.named_parameters():
                    param.copy_(before[name])
            torch.manual_seed(seed)
            found = draw_all(model, draw)
            after = torch.randn(3)
            check_replicas(model)
            for name, value in expected.items():
                what = f"{label}, stage {stage}, {layout}: {name}"
                assert_bits(found[name], value.detach(), what)
            if seed != 7:  # a rank's own stream is as it was
                torch.manual_seed(seed)
                stream = torch.randn(3)
            if "generator" not in label:
                assert torch.equal(after, stream), f"{label}, stage {stage}"


def test_what_is_drawn_for_a_parameter_is_the_same_on_ranks_that_are_seeded_apart():
    for world_size in (1, 3, 4):
        run_ranks(check_draws, world_size)


class Noisy(nn.Module):
    """Two units; the second's weight is used by the root, with noise, and its inputs dropped."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        weight = self.blocks[1].weight
        noise = torch.randn_like(weight)
        return functional.linear(self.blocks[0](x), weight + noise), noise


@on_ranks(1, 2)
def test_noise_drawn_inside_a_forward_pass_is_each_ranks_own_as_dropout_is(rank):
    for stage in (0, 3):
        torch.manual_seed(0)
        model = shard(Noisy(), stage=stage, units=[nn.Linear])
        torch.manual_seed(7 + rank)
        loss, noise = model(torch.ones(1, 4))
        loss.sum().backward()
        torch.manual_seed(7 + rank)
        assert torch.equal(noise, torch.randn(4, 4))
