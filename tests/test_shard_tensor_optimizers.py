"""Every optimizer of torch.optim, and Hugging Face's Adafactor, at every stage, layout and size.

The oracle is a plain loop in one process. What is elementwise must have its bits. What takes norms
or products over whole tensors adds up in another order: there the model is in float64, and the
roundings are counted.
"""

from functools import partial

import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from oracle import plain_loop
from ranks import run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import shard
from shardwise.errors import ShardError

LAYOUTS = ("rows", "flat", "matrices")
# Each optimizer has two of these at each number of ranks, which lie four apart: at two ranks and
# three it meets all four stages and both layouts. Those that can do without `foreach` do so at two
# ranks, and have it at three.
COMBINATIONS = [(s, LAYOUTS[x]) for s, x in ((0, 0), (1, 1), (0, 1), (1, 0))]
COMBINATIONS += [(s, LAYOUTS[x]) for s, x in ((3, 1), (2, 0), (3, 0), (2, 1))]
STEPS = 2
# A gradient over 3 ranks of 4 rows; sums over all 105 elements, of which Adafactor takes a few.
# What is divided (by a root of a square) is a thousandth of the largest, and so are its roundings.
GRADIENT, NUMEL, DIVIDED = of_gradient(5, 7, 5, 12, over=3 * 4), 105, 1000
OF_WHOLE = STEPS * (GRADIENT + 4 * NUMEL) * DIVIDED


class Shapes(nn.Module):
    """Matrices, a vector, a scalar, one column, one row, and a convolution's four dims."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 5)])
        self.column = nn.Parameter(torch.randn(5, 1))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.kernel = nn.Parameter(torch.randn(3, 2, 2, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.row) @ self.column * self.scale + self.kernel.square().sum()


ELEMENTWISE = {
    f"{name}, foreach {foreach}": lambda p, make=make, foreach=foreach: make(p, foreach=foreach)
    for name, make in {
        "adadelta": lambda p, **k: torch.optim.Adadelta(p, lr=0.1, weight_decay=0.1, **k),
        "adagrad": lambda p, **k: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, **k),
        "adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
        "adamax": lambda p, **k: torch.optim.Adamax(p, lr=0.1, **k),
        "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
        "asgd": lambda p, **k: torch.optim.ASGD(p, lr=0.1, t0=1, **k),
        "nadam": lambda p, **k: torch.optim.NAdam(p, lr=0.1, **k),
        "radam": lambda p, **k: torch.optim.RAdam(p, lr=0.1, **k),
        "rmsprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.1, centered=True, **k),
        "rprop": lambda p, **k: torch.optim.Rprop(p, lr=0.1, **k),
        "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    }.items()
    for foreach in (False, True)
}
WHOLE = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    "adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "transformers' adafactor": lambda p: HuggingFaceAdafactor(list(p)),
    "transformers' adafactor, with momentum": lambda p: HuggingFaceAdafactor(
        list(p), lr=0.1, beta1=0.9, weight_decay=0.1, scale_parameter=False, relative_step=False
    ),
}


def make_model(dtype):
    torch.manual_seed(3)
    return Shapes().to(dtype)


def batch_of(rank, step, dtype):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator).to(dtype)


def loss_of(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def expected_after(make, num_ranks, dtype):
    steps = [[[batch_of(r, s, dtype) for r in range(num_ranks)]] for s in range(STEPS)]
    return plain_loop(make_model(dtype), steps, loss_of, make).parameters


def train(rank, make, dtype, **how):
    model = shard(make_model(dtype), **how)
    optimizer = make(model.parameters())
    for step in range(STEPS):
        loss_of(model, batch_of(rank, step, dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.full_tensor() for n, p in model.named_parameters()}


def check_optimizers(rank, world_size, every=False):
    for table, dtype, roundings in (
        (ELEMENTWISE, torch.float32, 0),
        (WHOLE, torch.float64, OF_WHOLE),
    ):
        for number, (label, make) in enumerate(table.items()):
            if table is ELEMENTWISE and world_size > 1 and (number + world_size) % 2 and not every:
                continue
            expected = expected_after(make, world_size, dtype)
            drawn = COMBINATIONS[(number + world_size) % 4 :: 4]
            for stage, layout in COMBINATIONS if every else drawn:
                ours = train(rank, make, dtype, stage=stage, layout=layout)
                for name, value in expected.items():
                    what = f"{label}, stage {stage}, {layout}: {name}"
                    assert_rounded_alike(ours[name], value, roundings, what)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_optimizer_of_torch_makes_the_steps_of_a_plain_loop_at_every_stage(world_size):
    run_ranks(check_optimizers, world_size)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_whole(rank, world_size, make):
    """Compare with a plain loop at stage 0; return the refusal of the other stages."""
    torch.manual_seed(3)
    plain = Matrices()
    steps = [[[batch_of(r, s, torch.float32) for r in range(world_size)]] for s in range(STEPS)]

    def loss(model, batch):
        return model(batch).square().mean()

    def step(optimizer, model, number):
        loss(model, batch_of(rank, number, torch.float32)).backward()
        optimizer.step(lambda: 1.0)  # alike on all ranks
        optimizer.zero_grad()

    torch.manual_seed(3)
    model = shard(Matrices(), stage=0)
    optimizer = make(model.parameters())
    for number in range(STEPS):
        step(optimizer, model, number)

    def with_closure(params):
        made = make(params)
        made.step = partial(made.step, lambda: 1.0)
        return made

    for name, value in plain_loop(plain, steps, loss, with_closure).parameters.items():
        assert torch.equal(model.get_parameter(name).full_tensor(), value), name
    messages = set()
    for stage in (1, 2, 3):
        torch.manual_seed(3)
        model = shard(Matrices(), stage=stage)
        optimizer = make(model.parameters())
        before = [p.full_tensor() for p in model.parameters()]
        with pytest.raises(ShardError) as refused:
            step(optimizer, model, 0)
        messages.add(str(refused.value))
        after = [p.full_tensor() for p in model.parameters()]
        assert all(map(torch.equal, before, after))
    (message,) = messages
    return message


def check_muon(rank, world_size):
    return check_whole(rank, world_size, lambda p: torch.optim.Muon(p, lr=0.1))


def check_l_bfgs(rank, world_size):
    return check_whole(rank, world_size, lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=1))


@pytest.mark.parametrize("check, name", [(check_muon, "Muon"), (check_l_bfgs, "LBFGS")])
def test_muon_and_l_bfgs_run_at_stage_0_and_their_refusal_elsewhere_says_so(check, name):
    for world_size in (1, 2):
        for message in run_ranks(check, world_size):
            assert message.startswith(f"{name} asks for"), message
            assert "shard(stage=0), where it runs as it is" in message
            assert "layout='matrices'" not in message or name == "Muon"
