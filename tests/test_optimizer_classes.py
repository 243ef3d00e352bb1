"""Optimizers that are not elementwise: draws in a step, DTensors of fully_shard, placements.

The oracle is a plain loop in one process. `campaigns/optimizers.py` runs the classes of all
libraries; a few of torch's and transformers' run here, and must have the verdicts of the docs.
"""

import copy
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "campaigns"))

from optimizer_cases import RIGHT, alone, named_remedies, run_case, which_of  # noqa: E402
from oracle import plain_loop  # noqa: E402
from ranks import agreed, on_ranks  # noqa: E402
from shardwise import ShardTensor, fully_shard, load, save, shard  # noqa: E402
from shardwise.errors import ShardError  # noqa: E402
from test_shard_tensor_optimizers import batch_of, loss_of, make_model  # noqa: E402

STEPS = 3


class Drawing(torch.optim.Optimizer):
    """Adds noise that it draws as a plain tensor; from its first step also Python's and NumPy's."""

    first = 1

    def __init__(self, params):
        super().__init__(params, {"step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                draws = group["step"] >= self.first
                noise = torch.randn(p.shape) if draws else torch.zeros(p.shape)
                noise += random.random() + np.random.rand() if self.first == 1 else 0
                p.add_(p.grad, alpha=-0.1).add_(noise.to(p.dtype), alpha=0.01)


class Summing(torch.optim.Optimizer):
    """D-Adaptation's kind: one number from sums over all parameters, by ``item()``; a momentum."""

    def __init__(self, params):
        super().__init__(params, {"rate": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            total = sum(p.grad.abs().sum().item() for p in group["params"])
            group["rate"] += 0.1 / (1 + total)
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum_buffer"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                state["momentum_buffer"] = state["momentum_buffer"] * 0.9 + p.grad
                p.sub_(state["momentum_buffer"] * group["rate"])


class OfABase(Summing):
    """Calls the step of its base class, of which there is an optimizer: torch hooks both."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def one_dim_model(dtype=torch.float64):
    """Return the model with a scalar of one dim, as `fully_shard` wants it."""
    model = make_model(dtype)
    model.scale = torch.nn.Parameter(model.scale.detach().reshape(1))
    return model


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def expected(make, world_size):
    steps = [[[batch_of(r, s, torch.float64) for r in range(world_size)]] for s in range(STEPS)]
    model = one_dim_model()
    seed(0)
    return plain_loop(model, steps, loss_of, make).parameters


def train(rank, model, optimizer, steps=range(STEPS)):
    for step in steps:
        loss_of(model, batch_of(rank, step, torch.float64)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(model, values):
    for name, value in values.items():
        ours = model.get_parameter(name).full_tensor()
        torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-14, msg=name)


@on_ranks(2, 3)
def test_draws_in_a_step_are_those_of_one_process_whatever_the_ranks_seeds(rank, world_size):
    for how in ({"stage": 0}, {"stage": 3}, {"stage": 3, "layout": "flat"}, None):
        values = expected(Drawing, world_size)
        model = one_dim_model()
        model = fully_shard(model) if how is None else shard(model, **how)
        seed(rank)
        before = torch.get_rng_state()
        train(rank, model, Drawing(model.parameters()))
        assert_alike(model, values)
        assert torch.equal(before, torch.get_rng_state()) == (rank > 0), "ranks keep their own"


@on_ranks(2)
def test_a_step_that_calls_its_bases_step_is_one_step(rank, world_size):
    values = expected(Summing, world_size)
    for how in ({"stage": 3}, None):
        model = one_dim_model()
        model = fully_shard(model) if how is None else shard(model, **how)
        seed(rank)
        before = torch.get_rng_state()
        train(rank, model, OfABase(model.parameters()))
        assert torch.equal(before, torch.get_rng_state())
        assert_alike(model, values)


@on_ranks(2)
def test_a_class_that_draws_late_draws_alike_on_all_ranks(rank, world_size):
    class Late(Drawing):
        first = 3

    model = shard(one_dim_model(), stage=0)
    seed(rank)
    train(rank, model, Late(model.parameters()))
    agreed([p.full_tensor().tolist() for p in model.parameters()])


@on_ranks(1, 2, 3)
def test_optimizers_over_fully_shards_dtensors_step_as_one_process_and_keep_dtensors(
    rank, world_size, tmp_path
):
    values = expected(Summing, world_size)
    model = fully_shard(one_dim_model())
    optimizer = Summing(model.parameters())
    train(rank, model, optimizer, range(2))
    save(tmp_path / str(world_size), model, optimizer)
    for param in model.parameters():
        state = optimizer.state[param]
        kept = state["momentum_buffer"]
        assert isinstance(kept, DTensor) and not isinstance(kept, ShardTensor)
        assert kept.placements == param.placements and state["count"] == 2
    torch.save(optimizer.state_dict(), tmp_path / f"{world_size}-{rank}.pt")
    again = fully_shard(one_dim_model())
    resumed = Summing(again.parameters())
    load(tmp_path / str(world_size), again, resumed)
    for each, stepped in ((model, optimizer), (again, resumed)):
        train(rank, each, stepped, range(2, STEPS))
        assert_alike(each, values)


class Dividing(torch.optim.Optimizer):
    """Cuts an update by itself, as its placements say."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, DTensor):
                    assert all(at.is_shard() or at.is_replicate() for at in p.placements)
                p.add_(p.grad, alpha=-0.1)


@on_ranks(1, 2)
def test_an_optimizer_that_reads_placements_is_refused_where_torch_has_none(rank, world_size):
    for layout, refused in (("rows", False), ("flat", True), ("matrices", True)):
        model = shard(one_dim_model(), stage=3, layout=layout)
        assert all(p.placements for p in model.parameters()), "anyone else may read them"
        optimizer = Dividing(model.parameters())
        if not refused:
            train(rank, model, optimizer)
            assert_alike(model, expected(lambda p: torch.optim.SGD(p, lr=0.1), world_size))
            continue
        with pytest.raises(ShardError, match=r"Dividing reads the placements .*layout='rows'"):
            train(rank, model, optimizer)
    model = shard(make_model(torch.float64), stage=3)
    with pytest.raises(ShardError, match=r"placements of parameter 'scale'.*once the scalar"):
        train(rank, model, Dividing(model.parameters()))


@on_ranks(1)
def test_a_class_that_is_wrong_over_dtensors_is_refused_by_name(rank, world_size):
    kind = type("Scion", (torch.optim.SGD,), {"__module__": "heavyball.chainable"})
    for model in (shard(one_dim_model(), stage=0), fully_shard(one_dim_model())):
        with pytest.raises(ShardError, match=r"Scion over .*\(heavyball 3.2.1\).*DistributedData"):
            train(rank, model, kind(model.parameters(), lr=0.1))


SAMPLE = {
    "torch.AdamW": ("stage 3 rows", "stage 3 matrices"),
    "torch.Adafactor": ("stage 3 flat", "fully_shard"),
    "torch.Muon": ("stage 3 rows", "stage 3 matrices"),
    "transformers.Adafactor": ("stage 3 rows", "fully_shard"),
}


@on_ranks(2)
def test_verdicts_of_the_docs_hold(rank, world_size):
    told = json.loads((ROOT / "docs" / "optimizers.json").read_text())["classes"]
    for name, cases in SAMPLE.items():
        which = which_of(name)
        rows = {row["class"]: row for row in told[which.package]}
        facts = alone(rank, world_size, which, False)
        assert facts["parameters"] == rows[which.name]["parameters"]
        for case in cases:
            found = run_case(rank, world_size, which, case, facts, False)
            row = rows[which.name]["cases"][case]
            is_right = found["verdict"] in RIGHT and row["verdict"] in RIGHT
            assert is_right or found["verdict"] == row["verdict"] == "refused", (name, case, found)
            assert is_right or set(named_remedies(found["message"])) == set(row["remedies"])
    dist.barrier()


class TransposesInPlace(torch.optim.Optimizer):
    """Transposes gradients in place, a dim with itself, as Shampoo of pytorch_optimizer."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad.transpose_(0, -param.dim()).contiguous(), alpha=-0.1)


@on_ranks(2)
def test_a_dim_is_transposed_with_itself_in_place_where_tensors_are_whole():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    models = [shard(copy.deepcopy(plain), stage=0), plain]
    for model in models:
        optimizer = TransposesInPlace(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, expected in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(ours.full_tensor(), expected)
    with pytest.raises(ShardError, match="transpose_ on a ShardTensor"):
        models[0][0].weight.detach().transpose_(0, 1)
