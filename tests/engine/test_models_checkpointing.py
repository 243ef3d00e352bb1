"""Activation checkpointing of both kinds, nested, around and inside units, with frozen layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from models import Block, Checkpointed, Stack
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike
from shardwise import ShardTensor, shard
from shardwise.debug import stats
from trainer import STAGES, compare, sample


class CheckpointedReentrant(Checkpointed):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


class CheckpointedInside(Stack):
    """Checkpoints inside the unit rather than around it."""

    class Inner(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    block_class = Inner


class CheckpointedTwice(Stack):
    """A checkpoint around all blocks, and one around each of them."""

    use_reentrant = False

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return self.head(checkpoint(self.run, x, use_reentrant=self.use_reentrant))


class CheckpointedTwiceReentrant(CheckpointedTwice):
    use_reentrant = True


class CheckpointedMixed(CheckpointedTwice):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class CheckpointedSegment(Stack):
    """One checkpoint around two blocks, one block without."""

    def pair(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.pair, x, use_reentrant=False)
        return self.head(self.blocks[2](x))


class CheckpointedFrozen(Checkpointed):
    """The first block is frozen whole, one layer of the second; the last has early stop's case."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.blocks[1].up.requires_grad_(False)
        self.blocks[2].down.requires_grad_(False)


class CheckpointedFrozenReentrant(CheckpointedFrozen):
    use_reentrant = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.requires_grad_())


class CheckpointedToTheEnd(Checkpointed):
    """Recomputes whole blocks, where early stop would have ended."""

    def forward(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return super().forward(x)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


class UsedBeforeItIsClosed(nn.Module):
    """A unit without an input hook, whose weight a region that is recomputed uses too."""

    use_reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.products = nn.ModuleList([Product()])
        self.blocks = nn.ModuleList([Block()])

    def region(self, x: Tensor) -> Tensor:
        return self.blocks[0](x @ self.products[0].weight)

    def forward(self, x: Tensor) -> Tensor:
        recomputed = checkpoint(self.region, self.first(x), use_reentrant=self.use_reentrant)
        return recomputed + self.products[0](x)


class UsedBeforeItIsClosedNow(UsedBeforeItIsClosed):
    use_reentrant = False


class CallsAUnitElsewhere(nn.Module):
    """A unit with a checkpoint inside that calls another unit."""

    class Caller(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.other = [other]

        def region(self, x: Tensor) -> Tensor:
            return torch.tanh(self.other[0](torch.tanh(self.up(x))))

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.region, x, use_reentrant=True)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.callers = nn.ModuleList([self.Caller(self.blocks[0])])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.callers[0](x.detach().requires_grad_()))


CHECKPOINTED = [
    Checkpointed,
    CheckpointedReentrant,
    CheckpointedInside,
    CheckpointedTwice,
    CheckpointedTwiceReentrant,
    CheckpointedMixed,
    CheckpointedSegment,
    CheckpointedFrozen,
    CheckpointedFrozenReentrant,
    CheckpointedToTheEnd,
]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # nested, reentrant
@pytest.mark.parametrize("make_model", CHECKPOINTED)
def test_checkpointing_takes_the_same_steps(make_model: Any) -> None:
    run_ranks(compare, 3, make_model, sample(CHECKPOINTED.index(make_model)))


@pytest.mark.parametrize(
    ("make_model", "units"),
    [
        (UsedBeforeItIsClosed, ["Product", "Block"]),
        (UsedBeforeItIsClosedNow, ["Product", "Block"]),
        (CallsAUnitElsewhere, ["Caller", "Block"]),
    ],
)
def test_a_unit_that_is_recomputed_from_outside_takes_the_same_steps(
    make_model: Any, units: list[str]
) -> None:
    run_ranks(compare, 3, make_model, [{"stage": stage, "units": units} for stage in (2, 3)])


@on_ranks(1, 3)
def test_a_graph_with_a_recomputed_region_runs_backward_twice(world_size):
    results = []
    for stage in (None, 2, 3):
        torch.manual_seed(0)
        model: nn.Module = UsedBeforeItIsClosedNow()
        if stage is not None:
            model = shard(model, stage=stage, units=["Product", "Block"])
        loss = model(torch.ones(3, 8)).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        results.append([g.full_tensor() if isinstance(g, ShardTensor) else g for g in grads])
    for sharded in results[1:]:
        for ours, theirs in zip(sharded, results[0], strict=True):
            # One rank has the same bits; the mean of three equal gradients is two sums, a quotient.
            assert_rounded_alike(ours, theirs, 0 if world_size == 1 else 3)


def bytes_of_a_step(rank: int, world_size: int, make_model: Any) -> tuple[int, list[int]]:
    """Return the peak of full parameters, and unreduced gradients at the end of backward."""
    torch.manual_seed(0)
    model = shard(make_model(), stage=3)
    seen = []
    for _ in range(2):
        x = torch.randn(4, 8, requires_grad=True)
        x.register_hook(lambda _: seen.append(stats(model).grad_partial_bytes))
        model(x).sum().backward()
    return stats(model).param_full_peak_bytes, seen


def test_a_checkpoint_inside_a_unit_holds_no_more_than_one_around_it() -> None:
    around, inside = (
        run_ranks(bytes_of_a_step, 3, model)[0] for model in (Checkpointed, CheckpointedInside)
    )
    assert inside == around


def test_checkpointing_takes_the_same_steps_alone_and_when_accumulating() -> None:
    for make_model in (Checkpointed, CheckpointedReentrant):
        run_ranks(compare, 1, make_model, STAGES)
        run_ranks(compare, 2, make_model, STAGES, num_micro_batches=2)
