"""The table of scenarios (tests/scenarios.py), and what users of other ZeRO engines ran into."""

import gc
import weakref

import pytest
import torch
from torch import nn

from models import Stack, stack_roundings
from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike
from scenarios import SCENARIOS, check
from shardwise import accumulate, shard
from shardwise.engine.api import engine_of
from shardwise.errors import ShardwiseError
from trainer import (
    SPREAD,
    STAGES,
    adamw,
    full_grads,
    full_parameters,
    mean_square,
)

BATCH = torch.linspace(-1, 1, 24).view(3, 8)
ROUNDINGS = stack_roundings(rows=3)


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, size, marks=row.marks, id=f"{name}, {size} ranks")
        for name, row in SCENARIOS.items()
        for size in row.sizes
    ],
)
def test_every_setting_takes_the_steps_of_the_oracle(name, world_size):
    run_ranks(check, world_size, name)


def seeded(make_model=Stack, seed=0, **options):
    """Make a model, plain or (given a stage) sharded."""
    torch.manual_seed(seed)
    model = make_model()
    return shard(model, **options) if options else model


# Two engines, one combined loss.


def combined_loss(first, second, batch):
    """The second model sees what the first one made, and something of its own."""
    hidden = first(batch)
    return second(hidden @ torch.ones(5, 8)).square().mean() + (hidden * second(batch)).mean()


@on_ranks(2)
def test_two_sharded_models_train_on_one_combined_loss():
    for options in SPREAD:
        runs = []
        for settings in ({}, options):
            models = [seeded(seed=seed, **settings) for seed in (1, 2)]
            optimizers = [adamw(model.parameters()) for model in models]
            for _ in range(3):
                combined_loss(*models, BATCH).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            runs.append([full_parameters(model) for model in models])
        for actual, expected in zip(runs[1], runs[0], strict=True):
            assert_same_bits(actual, expected)


# An empty parameter group.


@on_ranks(2)
def test_an_empty_parameter_group_is_allowed():
    model = seeded(stage=3)
    optimizer = adamw([{"params": list(model.parameters())}, {"params": []}])
    mean_square(model, BATCH).backward()
    optimizer.step()


# Modules attached late, attributes named like ours.


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_module_attached_after_shard_is_refused_by_name(stage):
    model = seeded(stage=stage)
    model.blocks[1].late = nn.Linear(8, 8)  # whose gradients would not be reduced, silently
    with pytest.raises(ShardwiseError, match=r"blocks\.1\.late"):
        mean_square(model, BATCH).backward()


class NamedLikeOurs(Stack):
    def __init__(self):
        super().__init__()
        self.id = nn.Linear(8, 8)
        self.unit = self.stage = self.engine = "mine"

    def forward(self, x):
        return super().forward(self.id(x))


def plain_grads(make_model=Stack):
    model = seeded(make_model)
    mean_square(model, BATCH).backward()
    return full_grads(model)


@on_ranks(2)
def test_attributes_of_the_user_may_have_any_name():
    model = seeded(NamedLikeOurs, stage=3)
    mean_square(model, BATCH).backward()
    assert model.unit == model.stage == model.engine == "mine"
    assert_same_bits(full_grads(model), plain_grads(NamedLikeOurs))


# Gradients are means, and may be edited.


@on_ranks(3)
def test_gradients_are_means_over_ranks_and_norms_see_edits(rank):
    expected = plain_grads()
    total = torch.nn.utils.get_total_norm(list(expected.values()))
    for options in SPREAD:
        model = seeded(**options)
        (mean_square(model, BATCH) * (rank + 1)).backward()  # the ranks' mean is twice the first
        grads = full_grads(model)
        for name, grad in expected.items():
            # The plain gradient is multiplied, not its loss: other roundings at every layer.
            assert_rounded_alike(grads[name], (grad + grad * 2 + grad * 3) / 3, ROUNDINGS, name)
        for parameter in model.parameters():
            parameter.grad.mul_(0.25)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        assert_rounded_alike(float(norm), float(total) * 0.5, ROUNDINGS)
        clipped = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        assert_rounded_alike(float(clipped), float(total) * 0.5, ROUNDINGS)
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        # torch divides by the norm and 1e-6
        assert_rounded_alike(float(norm), 0.01 * float(total / (total + 2e-6)), ROUNDINGS)


# Functorch and torch.autograd.grad.


def call_others(model):
    others = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    return torch.func.functional_call(model, others, (BATCH,))


def input_gradient(model):
    batch = BATCH.clone().requires_grad_()
    return torch.autograd.grad(mean_square(model, batch), batch)[0]


def first_gradient(model):
    loss = mean_square(model, BATCH)
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)[0]


FUNCTIONAL = {
    "functional_call": lambda model: torch.func.functional_call(
        model, dict(model.named_parameters()), (BATCH,)
    ),
    "functional_call of others": call_others,
    "vmap": lambda model: torch.func.vmap(model)(BATCH),
    "jacrev": lambda model: torch.func.jacrev(lambda x: mean_square(model, x))(BATCH),
    "input gradient": input_gradient,
    "parameter gradients": first_gradient,
}


@on_ranks(2)
def test_functional_transforms_are_right_or_refused():
    for kind, call in FUNCTIONAL.items():
        expected = call(seeded())
        for options in STAGES:
            model = seeded(**options)
            try:
                found = call(model)
            except ShardwiseError:
                found = expected
            assert found is not None and found.shape == expected.shape, (kind, options)
            assert torch.equal(torch.as_tensor(found), expected), (kind, options)
            mean_square(model, BATCH).backward()  # whatever happened, the next step works


# Windows are re-entered; a model that is dropped leaves nothing.


@on_ranks(2)
def test_accumulation_windows_nest_and_survive_exceptions():
    expected = plain_grads()
    for options in STAGES:
        model = seeded(**options)
        with pytest.raises(ZeroDivisionError), accumulate(model, last=False):
            raise ZeroDivisionError
        with accumulate(model, last=False):
            with accumulate(model, last=False):
                (mean_square(model, BATCH) * 0.25).backward()
            (mean_square(model, BATCH) * 0.25).backward()
        with accumulate(model, last=False), accumulate(model, last=True):
            (mean_square(model, BATCH) * 0.5).backward()
        for name, grad in full_grads(model).items():
            assert_rounded_alike(grad, expected[name], ROUNDINGS, name)


@on_ranks(2)
def test_a_model_that_is_dropped_frees_its_engine_hooks_and_memory():
    """Drop it with reductions in flight, and gathers that were ahead."""
    for options in STAGES:
        model = seeded(**options)
        optimizer = adamw(model.parameters())
        for _ in range(2):
            mean_square(model, BATCH).backward()
            optimizer.step()
        mean_square(model, BATCH).backward()
        watched = [weakref.ref(x) for x in (engine_of(model), model.blocks[0])]
        watched += [weakref.ref(s.full) for u in engine_of(model).units for s in u.storages]
        del model, optimizer
        gc.collect()
        assert all(reference() is None for reference in watched), options
