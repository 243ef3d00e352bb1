"""Ranks that use different parameters inside the same units, where the order of reductions could
come to differ, and changes that would be lost without a word."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ranks import run_ranks
from shardwise import shard
from shardwise.errors import ShardError, StateError
from trainer import ENDS, compare, sgd


class Experts(nn.Module):
    """Adds one of two linear layers, which its caller chooses."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(2))
        self.both = nn.Linear(dim, dim)

    def forward(self, x, which):
        return self.both(x) + self.experts[which](x)


class TwoTowers(nn.Module):
    """A tower on data and one on ids: neither has an input that needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Experts(8)
        self.read = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x, ids, which):
        return self.head(self.seen(x, which) + self.read(ids))


class Checkpointed(nn.Module):
    """Blocks under reentrant checkpoints, whose recomputed inputs are leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Experts(8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x, ids, which):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, which, use_reentrant=True)
        return self.head(x)


def loss_of(model, batch):
    x, ids, targets, which = batch
    return F.cross_entropy(model(x, ids, which), targets)


def draw_batch(random):
    """Draw the expert too, so that ranks take the same one in some steps and not in others."""
    x = torch.randn(4, 8, generator=random)
    ids = torch.randint(11, (4,), generator=random)
    which = int(torch.randint(2, (), generator=random))
    return x, ids, torch.randint(3, (4,), generator=random), which


def experts_differ(rank, world_size, kind):
    units = {TwoTowers: [Experts, nn.Embedding], Checkpointed: [Experts]}[kind]
    settings = [dict(end, units=units) for end in ENDS]
    compare(rank, world_size, kind, settings, loss_of, sgd, draw_batch, num_steps=6)


@pytest.mark.parametrize("kind", [TwoTowers, Checkpointed])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_may_use_different_experts_of_a_unit_without_a_gradient_at_its_input(num_ranks, kind):
    run_ranks(experts_differ, num_ranks, kind)


def write_in_forward(rank, world_size):
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4, max_norm=0.1)
            self.head = nn.Linear(4, 2)

        def forward(self, ids):
            return self.head(self.table(ids))

    for stage in range(4):
        model = shard(Clipped(), stage=stage)
        with pytest.raises(ShardError, match=r"table\.weight"):
            model(torch.tensor([1, 2]))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_parameter_that_is_written_in_forward_is_refused_by_name(num_ranks):
    run_ranks(write_in_forward, num_ranks)


def step_before_outside_backward(rank, world_size):
    for stage in (1, 3):
        model = shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = model[0].weight.square().sum()
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1.0)
        with pytest.raises(StateError, match="between forward and backward"):
            penalty.backward()
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_step_between_an_outside_use_and_its_backward_is_refused(num_ranks):
    run_ranks(step_before_outside_backward, num_ranks)
