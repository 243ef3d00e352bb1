"""Optimizers and clipping on ShardTensors do what they do on full tensors."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from ranks import run_ranks
from roundings import assert_rounded_alike
from shardwise import ShardTensor
from shardwise.debug import stats
from shardwise.step.local_step import Apart
from test_shard_tensor import (
    LAYOUTS,
    Net,
    WithEmpty,
    assert_bits,
    give_grads,
    in_layouts,
    named,
    pair,
)


class Even(nn.Module):
    """Every slice of every parameter on 1, 2 or 3 ranks is a multiple of 64 elements."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 64))
        self.bias = nn.Parameter(torch.randn(384))


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


# Kinds of arguments; every optimizer of torch is in test_shard_tensor_optimizers.py.
OPTIMIZERS = {
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, maximize=True),
    "adam, tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "lion": Lion,
}
FUSED = {
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True, amsgrad=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}


def groups_of(model):
    """Return the usual two groups: matrices decay, the rest does not and has another rate."""
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim >= 2]
    others = [p for p in params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.003}]


def train_both(models, make, by_operations=False):
    """Train a model and its plain twin. A hook of a user's makes steps of operations on shards."""
    optimizers = [make(groups_of(m)) for m in models]
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
        param = models[1].get_parameter(name)
        if param._cut.owner not in (None, dist.get_rank()) and isinstance(optimizers[1], Lion):
            assert not states[1][name]  # of a class that nobody knows, matrices are their owner's
            continue
        assert states[0][name].keys() == states[1][name].keys(), name
        for key, value in states[0][name].items():
            ours = states[1][name][key]
            if isinstance(value, Tensor) and value.shape:
                assert isinstance(ours, ShardTensor) and ours.shape == value.shape, (name, key)


@in_layouts(1, 3)
def test_elementwise_optimizers_make_the_steps_that_they_make_on_full_tensors(layout):
    for stage in (0, 3) if layout == "rows" else (3,):  # at stage 0 nothing is cut
        for number, (label, make) in enumerate(OPTIMIZERS.items()):
            models = pair(layout, stage, WithEmpty)
            train_both(models, make, by_operations=(number + len(layout)) % 2 == 0)
            for name, expected, param in named(models):
                what = f"{label}, stage {stage}, {layout}: {name}"
                assert_bits(param.full_tensor(), expected.data, what)


@pytest.mark.kernels
@in_layouts(1, 3)
def test_fused_optimizers_make_the_same_steps(layout):
    for label, make in FUSED.items():
        for stage in (0, 3):
            models = pair(layout, stage, Even)
            train_both(models, make, by_operations=stage == 3)
            for name, expected, param in named(models):
                assert_bits(param.full_tensor(), expected.data, f"{label}, {layout}: {name}")
            # A slice that does not fill the vector registers takes the kernel's scalar tail, whose
            # multiply-adds round twice. Adam has about twelve operations, in each of three steps.
            models = pair(layout, stage)
            train_both(models, make, by_operations=stage == 0)
            for name, expected, param in named(models):
                what = f"{label}, {layout}: {name}"
                assert_rounded_alike(param.full_tensor(), expected.data, 3 * 12, what)


@in_layouts(2)
def test_a_step_takes_the_gradients_that_a_closure_or_a_hook_gives(layout):
    """Gradients that a closure or a hook gives are those of the step, whatever takes it."""
    plain, taken = Apart.__call__, []
    models = pair(layout)
    alone = [nn.Parameter(torch.ones(3)) for _ in models]  # a parameter that is not sharded
    made = [torch.optim.AdamW([*m.parameters(), p]) for m, p in zip(models, alone, strict=True)]

    def give(step):
        give_grads(models, step)
        for param in alone:
            param.grad = torch.full((3,), 1.0 + step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Apart, "__call__", lambda self: (taken.append(self), plain(self))[1])
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


@in_layouts(3)
def test_schedulers_that_change_momentum_too_work_as_before(layout):
    models = pair(layout)
    made = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
    cycles = [OneCycleLR(o, max_lr=0.2, total_steps=5) for o in made]
    for step in range(4):
        give_grads(models, step)
        for optimizer, cycle in zip(made, cycles, strict=True):
            optimizer.step()
            cycle.step()
    for name, plain, param in named(models):
        assert_bits(param.full_tensor(), plain.data, name)


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


def clip_reports(rank, world_size):
    """Clip in every way; return (label, norm) of each."""
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
    return found


@pytest.mark.kernels
def test_clipping_is_right_the_same_on_every_rank_and_one_collective():
    for world_size in (1, 2, 3):
        first, *others = run_ranks(clip_reports, world_size)
        assert all(other == first for other in others)


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
