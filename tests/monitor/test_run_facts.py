"""What is said of a run once: operations for each token."""

import torch
from torch import nn

from models import Stack
from ranks import run_ranks
from shardwise import shard
from shardwise.monitor.describe import facts_of
from shardwise.parallel import MixtureOfExperts
from shardwise.parallel.routing import Routing

DIM, WIDTH, EXPERTS, CHOSEN = 8, 12, 6, 2


class Layers(nn.Module):
    """Two mixtures of experts, one of them with a shared expert, and a head that is frozen."""

    def __init__(self):
        super().__init__()
        routing = Routing(EXPERTS, CHOSEN)
        self.table = nn.Embedding(5, DIM)
        self.one = MixtureOfExperts(DIM, WIDTH, routing)
        self.two = MixtureOfExperts(DIM, WIDTH, routing, nn.Linear(DIM, DIM))
        self.head = nn.Linear(DIM, 3).requires_grad_(False)


def flops_of(rank, world_size, kind):
    model = shard({"mixture": Layers, "dense": Stack}[kind](), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return facts_of(model, [optimizer], ["host"] * world_size).flops_per_token


def test_of_experts_those_count_that_a_token_is_sent_to():
    experts = CHOSEN * 3 * DIM * WIDTH
    wanted = 6 * (2 * (EXPERTS * DIM + experts) + DIM * DIM) + 4 * 3 * DIM
    assert run_ranks(flops_of, 3, "mixture") == [wanted] * 3
    matrices = sum(p.numel() for p in Stack().parameters() if p.ndim > 1)
    assert run_ranks(flops_of, 1, "dense") == [6 * matrices]
