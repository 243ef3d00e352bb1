"""Parameters of every kind: tied, frozen, unused, scalar, empty, mixed dtypes, used elsewhere."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from models import Block, Experts, Stack, routed_loss
from oracle import assert_same_bits
from ranks import on_ranks, run_ranks
from shardwise import shard
from trainer import (
    ENDS,
    SPREAD,
    STAGES,
    adamw,
    assert_same_run,
    backward_all,
    compare,
    full_parameters,
    make_steps,
    mean_square,
    reduces_each_micro_batch,
    sample,
    sgd,
    train,
    train_plain,
)


class TiedTwiceBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(8, 11)
        self.again.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)) * torch.sigmoid(self.again(x)))


class TiedInEachUnit(Stack):
    block_class = TiedTwiceBlock


class TiedAcrossUnits(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.embed = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(super().forward(self.embed(x)) @ torch.ones(5, 8))


TIED = [TiedInEachUnit, TiedAcrossUnits]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", TIED)
def test_tied_weights_have_one_gradient_and_one_state(make_model: Any, world_size: int) -> None:
    run_ranks(compare, world_size, make_model, sample(2 * TIED.index(make_model) + world_size // 2))


class OneFrozenUnit(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)


class AllButTheHeadFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)


class AdapterBlock(Block):
    """As LoRA: the first layer is frozen, a small trainable one comes after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(11, 2, bias=False), nn.Linear(2, 8, bias=False))
        self.down.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return x + self.down(h) + self.adapter(h)


class Adapters(Stack):
    block_class = AdapterBlock


FROZEN = [OneFrozenUnit, AllButTheHeadFrozen, Adapters]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", FROZEN)
def test_frozen_parameters_stay_and_the_others_train(make_model: Any, world_size: int) -> None:
    run_ranks(
        compare, world_size, make_model, sample(2 * FROZEN.index(make_model) + world_size // 2)
    )


def test_frozen_parameters_train_around_in_an_accumulation_window() -> None:
    run_ranks(compare, 2, Adapters, STAGES, num_micro_batches=2)


def toggling_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Freeze by the sign of the batch's first number."""
    trains = bool(batch[0, 0] > 0)
    model.blocks[0].requires_grad_(trains)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad = trains
    return mean_square(model, batch)


@on_ranks(1, 3)
def test_requires_grad_may_be_toggled_between_steps(world_size):
    """Toggle by the step, the same on all ranks."""
    steps = make_steps(world_size, 5)
    for number, (by_rank,) in enumerate(steps):
        for batch in by_rank:
            batch[0, 0] = 1.0 if number in (0, 2, 3) else -1.0
    torch.manual_seed(0)
    truth = train_plain(Stack(), steps, toggling_loss)
    for options in SPREAD:
        torch.manual_seed(0)
        assert_same_run(train(Stack(), steps, toggling_loss, **options), truth)


class Branches(nn.Module):
    """Two branches in one unit and two that are units; the batch says which one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"a": nn.Linear(8, 8), "b": Block()})
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        x = self.inside["ab"[which]](x)
        return self.blocks[2](self.blocks[which](x))


ROUTES = [0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 1]


def routed_steps(world_size: int, num_micro_batches: int, per_rank: bool) -> list[Any]:
    """Give every batch a branch: one for all ranks of a micro-batch, or one per rank."""
    steps: list[Any] = []
    number = 0
    for s, micro_batches in enumerate(make_steps(world_size, 4, num_micro_batches)):
        steps.append([])
        for m, by_rank in enumerate(micro_batches):
            steps[-1].append([])
            for batch in by_rank:
                route = ROUTES[(number if per_rank else s + m) % len(ROUTES)]
                steps[-1][-1].append((batch, route))
                number += 1
    return steps


def compare_routed(
    rank: int, world_size: int, per_rank: bool, num_micro_batches: int, optimizer: Any
) -> None:
    steps = routed_steps(world_size, num_micro_batches, per_rank)
    failures = []
    make_model = Experts if per_rank else Branches
    for options in SPREAD:
        each = reduces_each_micro_batch(options)
        torch.manual_seed(0)
        truth = train_plain(
            make_model(), steps, routed_loss, optimizer, reduce_each_micro_batch=each
        )
        torch.manual_seed(0)
        trained = train(make_model(), steps, routed_loss, optimizer, **options)
        try:
            assert_same_run(trained, truth)
        except AssertionError as error:
            failures.append(f"{options}: {error}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_parameter_that_a_step_does_not_use_keeps_its_value_state_and_no_gradient(
    world_size: int, num_micro_batches: int
) -> None:
    run_ranks(compare_routed, world_size, False, num_micro_batches, adamw)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_that_one_rank_uses_counts_as_zero_on_the_others(
    world_size: int, num_micro_batches: int
) -> None:
    run_ranks(compare_routed, world_size, True, num_micro_batches, sgd)


class TwoScalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.0]))
        self.b = nn.Parameter(torch.tensor([0.0]))

    def forward(self, which: str) -> Tensor:
        return getattr(self, which).sum()


def moves_of_a(rank: int, world_size: int, stage: int, windows: list[str]) -> list[float]:
    """Return by how much `a` moved in each step of plain SGD with lr 1."""
    model = shard(TwoScalars(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    values = [0.0]
    for window in windows:
        backward_all(model, [[w] * world_size for w in window], lambda m, w: m(w), rank)
        optimizer.step()
        optimizer.zero_grad()
        values.append(-float(full_parameters(model)["a"]))
    return [after - before for before, after in pairwise(values)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_gradient_outlives_its_step(stage: int) -> None:
    assert run_ranks(moves_of_a, 2, stage, ["a", "b", "b"]) == [[1.0, 0.0, 0.0]] * 2
    assert run_ranks(moves_of_a, 2, stage, ["ba", "bb", "ab"]) == [[0.5, 0.0, 0.5]] * 2


class CocktailBlock(nn.Module):
    """One unit with parameters of four dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.fp32 = nn.Linear(8, 5)
        self.fp64 = nn.Linear(5, 7).double()
        self.bf16 = nn.Linear(7, 8).bfloat16()
        self.offsets = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fp64(self.fp32(x).double())
        return self.bf16(x.bfloat16()).float() + self.offsets


class Cocktail(Stack):
    block_class = CocktailBlock


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_unit_may_hold_several_dtypes(world_size: int) -> None:
    run_ranks(compare, world_size, Cocktail, SPREAD)


class OddShapesBlock(nn.Module):
    """Scalars, empty parameters, fewer elements than ranks, three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.single = nn.Parameter(torch.ones(1))
        self.empty = nn.Parameter(torch.zeros(0))
        self.no_columns = nn.Parameter(torch.zeros(4, 0))
        self.pair = nn.Parameter(torch.ones(2, 1))
        self.cube = nn.Parameter(torch.randn(2, 8, 3))
        self.unused_scalar = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scalar + self.single * self.pair.sum()
        x = x + self.empty.sum() + self.no_columns.sum()
        return x + (x @ self.cube).sum((0, 2))[:, None]


class OddShapes(Stack):
    block_class = OddShapesBlock


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_scalar_empty_and_tiny_parameters_train(world_size: int) -> None:
    run_ranks(compare, world_size, OddShapes, SPREAD if world_size == 3 else ENDS)


class OnlyEmptyOnSomeRanks(nn.Module):
    """Fewer elements than ranks in the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_model_with_fewer_elements_than_ranks_trains() -> None:
    run_ranks(compare, 3, OnlyEmptyOnSomeRanks, SPREAD)


class UsedByTheRoot(Stack):
    """The root reads weights of blocks, before and after they run."""

    before = True
    after = True

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            x = F.linear(x, self.blocks[1].up.weight[:8])
        for block in self.blocks:
            x = block(x)
        if self.after:
            x = x + F.linear(x, self.blocks[0].up.weight)[:, :8] * self.blocks[2].down.bias
        return self.head(x)


class UsedBefore(UsedByTheRoot):
    after = False


class UsedAfter(UsedByTheRoot):
    before = False


OUTSIDE = [UsedBefore, UsedAfter, UsedByTheRoot]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make_model", OUTSIDE)
def test_a_parameter_may_be_used_outside_its_module(make_model: Any, world_size: int) -> None:
    run_ranks(
        compare, world_size, make_model, sample(2 * OUTSIDE.index(make_model) + world_size // 2)
    )


def decayed_loss(model: nn.Module, batch: Tensor) -> Tensor:
    decay = sum(p.square().sum() for p in model.parameters())
    return mean_square(model, batch) + 0.01 * decay


def decayed_first_loss(model: nn.Module, batch: Tensor) -> Tensor:
    decay = sum((p**2).sum() for p in model.parameters() if p.ndim > 1)
    norm = model.blocks[1].up.weight.norm()
    return 0.01 * decay + 0.1 * norm + mean_square(model, batch)


@pytest.mark.parametrize("loss_fn", [decayed_loss, decayed_first_loss])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_weight_decay_may_be_a_term_of_the_loss(loss_fn: Any, num_micro_batches: int) -> None:
    settings = sample(3 * (loss_fn is decayed_loss) + num_micro_batches)
    run_ranks(compare, 3, Stack, settings, loss_fn, num_micro_batches=num_micro_batches)


def decay_only_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return sum(p.square().sum() for p in model.blocks.parameters()) * batch.mean()


def test_a_loss_of_parameters_alone_needs_no_forward() -> None:
    run_ranks(compare, 2, Stack, SPREAD, decay_only_loss)


def two_groups(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "lr": 3e-3}, {"params": vectors, "weight_decay": 0.0}]
    return adamw(groups)


def test_parameter_groups_by_ndim_take_the_same_steps() -> None:
    run_ranks(compare, 3, Stack, ENDS, optimizer_factory=two_groups)


def scheduled(rank: int, world_size: int, is_sharded: bool) -> Any:
    """Train with a schedule and two groups; one rank's own data only, so that N does not matter."""
    torch.manual_seed(0)
    model = Stack()
    if is_sharded:
        shard(model, stage=3)
    optimizer = two_groups(list(model.parameters()))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=6)
    rates = []
    for _ in range(5):
        model(torch.linspace(-1, 1, 16).view(2, 8)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rates.append(schedule.get_last_lr())
    return rates, full_parameters(model)


@on_ranks(2)
def test_learning_rate_schedules_drive_the_sharded_optimizer(rank, world_size):
    rates, parameters = scheduled(rank, world_size, True)
    expected_rates, expected = scheduled(rank, world_size, False)
    assert rates == expected_rates
    assert_same_bits(parameters, expected)


class WithNothing(nn.Module):
    """A parameter without elements, alone in its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.nothing = nn.Parameter(torch.empty(0, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.nothing.sum().float()


@on_ranks(2)
def test_a_parameter_without_elements_alone_in_its_dtype_is_reduced_over_replicas(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for stage in range(4):
        model = shard(WithNothing(), stage=stage, mesh=mesh)
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        means = [g.full_tensor() for g in grads]
        by_name = dict(zip((n for n, _ in model.named_parameters()), means, strict=True))
        assert torch.equal(by_name["layer.weight"], torch.full((4, 4), 3.0)), stage
        assert by_name["nothing"].shape == (0, 4) and by_name["nothing"].dtype == torch.float64
