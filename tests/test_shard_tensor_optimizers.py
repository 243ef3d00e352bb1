"""Optimizers and clipping on ShardTensors do what they do on full tensors.

Every optimizer of torch.optim and Hugging Face's Adafactor step at every stage, layout and size.
The oracle is a plain loop in one process. What is elementwise must have its bits. What takes norms
or products over whole tensors adds up in another order: there the model is in float64, and the
roundings are counted.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor as HuggingFaceAdafactor

from oracle import plain_loop
from ranks import agreed, on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import ShardTensor, shard
from shardwise.debug import stats
from shardwise.errors import ShardError
from shardwise.step.local_step import OptimizerSubset
from test_shard_tensor import (
    LAYOUTS,
    Net,
    assert_bits,
    give_grads,
    in_layouts,
    named,
    pair,
)

# Each optimizer has three of these at each number of ranks, which lie four apart: at two ranks and
# three it meets all four stages and all layouts. Those that can do without `foreach` do so at two
# ranks, and have it at three.
COMBINATIONS = [
    *((0, "rows"), (1, "flat"), (0, "flat"), (1, "rows")),
    *((3, "flat"), (2, "rows"), (3, "rows"), (2, "flat")),
    *((1, "matrices"), (3, "matrices"), (2, "matrices"), (3, "matrices")),
]
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


class Lion(torch.optim.Optimizer):
    """Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2."""

    def __init__(self, params, lr=1e-2, weight_decay=0.1):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                update = (state["m"] * 0.9 + p.grad * 0.1).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
                state["m"].lerp_(p.grad, 0.01)


def in_groups(params):
    """Return the usual two groups: matrices decay, the rest does not and has another rate."""
    params = list(params)
    matrices, others = ([p for p in params if (p.ndim >= 2) is is_one] for is_one in (True, False))
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]


OTHERS = {
    "adam, tensor lr": lambda p: torch.optim.Adam(in_groups(p), lr=torch.tensor(0.01)),
    "adamw, maximize": lambda p: torch.optim.AdamW(in_groups(p), maximize=True),
    "lion": lambda p: Lion(in_groups(p)),
}
ELEMENTWISE = OTHERS | {
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


def train(rank, make, dtype, by_operations, **how):
    """Train; a hook of a user's makes steps of operations on shards."""
    model = shard(make_model(dtype), **how)
    optimizer = make(model.parameters())
    if by_operations:
        optimizer.register_step_pre_hook(lambda *_: None)
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
                by_operations = (number + stage) % 2 == 0
                ours = train(rank, make, dtype, by_operations, stage=stage, layout=layout)
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


@pytest.mark.parametrize(("name", "how"), [("Muon", {}), ("LBFGS", {"max_iter": 1})])
@on_ranks(1, 2)
def test_muon_and_l_bfgs_run_at_stage_0_and_their_refusal_elsewhere_says_so(
    rank, world_size, name, how
):
    make = partial(getattr(torch.optim, name), lr=0.1, **how)
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

    for key, value in plain_loop(plain, steps, loss, with_closure).parameters.items():
        assert torch.equal(model.get_parameter(key).full_tensor(), value), key
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
    assert message.startswith(f"{name} asks for"), message
    assert "shard(stage=0), where it runs as it is" in message
    assert "layout='matrices'" not in message or name == "Muon"


class Even(nn.Module):
    """Every slice of every parameter on 1, 2 or 3 ranks is a multiple of 64 elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 64))
        self.bias = nn.Parameter(torch.randn(384))


TOKENS = torch.tensor([[0, 2, 6], [1, 3, 5]])
FUSED = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def train_both(models, make, by_operations=False):
    """Train a model and its plain twin. A hook of a user's makes steps of operations on shards."""
    optimizers = [make(in_groups(m.parameters())) for m in models]
    if by_operations:
        optimizers[1].register_step_pre_hook(lambda *_: None)
    schedulers = [LambdaLR(o, lambda step: 1 / (step + 1)) for o in optimizers]
    for step in range(3):
        give_grads(models, step)
        if step == 1:  # a parameter without a gradient keeps its value and its state
            for model in models:
                next(model.parameters()).grad = None
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    states = [
        {n: o.state[p] for n, p in m.named_parameters()}
        for m, o in zip(models, optimizers, strict=True)
    ]
    for name in states[0]:
        assert states[0][name].keys() == states[1][name].keys(), name
        for key, value in states[0][name].items():
            ours = states[1][name][key]
            if isinstance(value, Tensor) and value.shape:
                assert isinstance(ours, ShardTensor) and ours.shape == value.shape, (name, key)


@pytest.mark.kernels
@in_layouts(1, 3)
def test_fused_optimizers_make_the_same_steps(layout):
    for label, make in FUSED.items():
        for stage in (0, 2, 3):
            models = pair(layout, stage, Even)
            train_both(models, make, by_operations=stage == 3)
            for name, expected, param in named(models):
                assert_bits(param.full_tensor(), expected.data, f"{label}, {layout}: {name}")
            # A slice that does not fill the vector registers takes the kernel's scalar tail, whose
            # multiply-adds round twice. Adam has about twelve operations, in each of three steps.
            models = pair(layout, stage)
            fresh = [model(TOKENS) for model in models]  # from now on there are full copies
            train_both(models, make, by_operations=stage < 3)
            for name, expected, param in named(models):
                what = f"{label}, {layout}: {name}"
                assert_rounded_alike(param.full_tensor(), expected.data, 3 * 12, what)
            outputs = [model(TOKENS).detach() for model in models]
            assert_rounded_alike(outputs[1], outputs[0], 3 * 12 + 100, f"{label}, stale")
            assert not torch.equal(outputs[1], fresh[1])


@in_layouts(2)
def test_a_step_takes_the_gradients_that_a_closure_or_a_hook_gives(layout):
    warnings.filterwarnings("ignore", "AdamW trains sharded parameters and plain ones")
    plain, taken = OptimizerSubset.__call__, []
    models = pair(layout)
    alone = [nn.Parameter(torch.ones(3)) for _ in models]  # a parameter that is not sharded
    made = [torch.optim.AdamW([*m.parameters(), p]) for m, p in zip(models, alone, strict=True)]

    def give(step):
        give_grads(models, step)
        for param in alone:
            param.grad = torch.full((3,), 1.0 + step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            OptimizerSubset, "__call__", lambda self: (taken.append(self), plain(self))[1]
        )
        for step, by in enumerate(("itself", "itself", "a closure", "a hook")):
            taken.clear()
            give(step)
            hooks = []
            for optimizer in made:
                if by == "a closure":
                    optimizer.step(lambda: give(7) or 0.0)
                    continue
                if by == "a hook":
                    hooks.append(optimizer.register_step_pre_hook(lambda *_: give(8)))
                optimizer.step()
            for hook in hooks:
                hook.remove()
            assert len(taken) == (by == "itself")
            for name, expected, param in named(models):
                assert_bits(param.full_tensor(), expected.data, f"{by}, {layout}: {name}")
            assert torch.equal(*alone)
            assert {type(made[1].state[p]["exp_avg"]) for p in models[1].parameters()} == {
                ShardTensor
            }


# Norms and clipping.

NUMEL = sum(p.numel() for p in Net().parameters())
NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))
WAYS_TO_CLIP = [
    (2.0, None),
    (2.0, True),
    (2.0, False),
    (1.0, True),
    (3.0, False),
    (NORM_TYPES[3], None),
]


@pytest.mark.kernels
@on_ranks(1, 2, 3)
def test_clipping_is_right_the_same_on_every_rank_and_one_collective(world_size):
    found = []
    for layout in LAYOUTS:
        for stage in (0, 3) if layout == "rows" else (3,):
            models = pair(layout, stage)
            sharded = models[1]
            give_grads(models, 3)
            counts = [
                float(nn.utils.get_total_norm([p.grad for p in m.parameters()], 0.0))
                for m in models
            ]
            assert counts[0] == counts[1] > 0, f"{layout}, stage {stage}, norm 0"
            for norm_type, foreach in WAYS_TO_CLIP:
                give_grads(models, 3)
                label = f"{layout}, stage {stage}, norm {norm_type}, foreach {foreach}"
                before = stats(sharded).num_collectives.get("shard.scalars", 0)
                norms = [
                    nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type, True, foreach)
                    for m in models
                ]
                # A sum of NUMEL powers in another order, and a root.
                assert_rounded_alike(norms[1].item(), norms[0].item(), NUMEL + 2, label)
                sent = stats(sharded).num_collectives.get("shard.scalars", 0) - before
                assert sent == (0 if stage == 0 or world_size == 1 else 1), (label, sent)
                for name, expected, param in named(models):
                    scaled = param.grad.full_tensor()
                    what = f"{label}: {name}"
                    assert_rounded_alike(scaled, expected.grad, NUMEL + 4, what)
                found.append((label, norms[1].item()))
                grads = [p.grad for p in sharded.parameters()]
                total = nn.utils.get_total_norm(grads, norm_type, foreach=foreach)
                found.append((f"{label}, again", float(total)))
                # torch divides by the norm and 1e-6: it may be large, and 0.5 is what is left
                whole = norms[0].item()
                left = 0.5 * whole / (whole + 1e-6)
                assert_rounded_alike(float(total), left, 2 * NUMEL + 4, label)
    agreed(found)


@in_layouts(1, 3)
def test_clipping_by_value_is_exact_and_a_nan_of_one_rank_is_seen_by_all(layout):
    models = pair(layout)
    for foreach in (None, True, False):
        give_grads(models, 4)
        for model in models:
            nn.utils.clip_grad_value_(model.parameters(), 0.3, foreach=foreach)
        for name, plain, param in named(models):
            assert_bits(param.grad.full_tensor(), plain.grad, name)
    param = models[1].embed.weight
    broken = torch.ones(param.shape)
    broken[-1, -1] = float("nan")  # on the last rank only
    param.grad = broken
    norm = nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
    assert torch.isnan(norm).item()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0, error_if_nonfinite=True)
