"""Collectives on activations: what arrives, what their gradients are, and what is counted."""

import copy

import torch
import torch.distributed as dist

from ranks import on_ranks
from shardwise.comm.exchange import Exchange
from shardwise.mesh import Axis


def world(rank, num_ranks):
    assert dist.group.WORLD is not None
    return Axis("cp", dist.group.WORLD, rank, num_ranks, "gloo")


@on_ranks(1, 2, 3)
def test_a_gather_sums_the_gradients_of_all_ranks(rank, num_ranks):
    exchange = Exchange(world(rank, num_ranks), "(sequence)")
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.randn(num_ranks, 2, 3, generator=torch.Generator().manual_seed(1)).to(dtype)
        mine = parts[rank].clone().requires_grad_()
        gathered = exchange.all_gather(mine)
        assert torch.equal(gathered, parts)
        weights = torch.randn(
            num_ranks, *parts.shape, generator=torch.Generator().manual_seed(2)
        ).to(dtype)
        gathered.backward(weights[rank])
        assert mine.grad is not None
        wanted = weights[:, rank].float().sum(0).to(dtype)  # in rank order, rounded once
        assert torch.equal(mine.grad, wanted)
    sent = sum(2 * 3 * size for size in (4, 2)) * (num_ranks - 1)
    calls = 2 if num_ranks > 1 else 0
    assert exchange.traffic.sent_bytes["cp.all_gather"] == sent
    assert exchange.traffic.sent_bytes["cp.all_to_all"] == sent
    assert exchange.traffic.num_collectives["cp.all_gather"] == calls
    assert copy.deepcopy(exchange).traffic.sent_bytes.total() == 0


@on_ranks(1, 2, 3)
def test_rows_go_to_other_ranks_and_their_gradients_come_back(rank, num_ranks):
    exchange = Exchange(world(rank, num_ranks), "(experts)")
    counts = [[(3 * r + 2 * s) % 4 for s in range(num_ranks)] for r in range(num_ranks)]
    counts[-1] = [0] * num_ranks if num_ranks > 1 else counts[-1]  # who has nothing to send
    sent, received = counts[rank], [row[rank] for row in counts]
    rows = (torch.arange(sum(sent) * 2.0).reshape(-1, 2) + 100 * rank).requires_grad_()
    arrived = exchange.all_to_all(rows, sent, received)
    wanted = []
    for source in range(num_ranks):
        theirs = torch.arange(sum(counts[source]) * 2.0).reshape(-1, 2) + 100 * source
        wanted.append(theirs.split(counts[source])[rank])
    assert torch.equal(arrived, torch.cat(wanted))
    arrived.backward(arrived.detach() + 1)
    assert rows.grad is not None and torch.equal(rows.grad, rows.detach() + 1)
    away = sum(sent) - sent[rank]
    back = sum(received) - received[rank]
    assert exchange.traffic.sent_bytes.total() == (away + back) * 8


@on_ranks(1, 2, 3)
def test_rows_are_divided_and_joined(rank, num_ranks):
    exchange = Exchange(world(rank, num_ranks), "(tokens)")
    for num_rows in (0, 1, 5):
        rows = torch.arange(num_rows * 2.0).view(-1, 2).requires_grad_()
        part = exchange.part(rows)
        share = -(-num_rows // num_ranks)
        assert torch.equal(part, rows[share * rank : share * (rank + 1)])
        joined = exchange.whole(part * 3, num_rows)
        assert torch.equal(joined, 3 * rows)
        weights = torch.randn(num_rows, 2, generator=torch.Generator().manual_seed(1))
        joined.backward(weights)  # which all ranks have alike
        assert rows.grad is not None and torch.equal(rows.grad, 3 * weights)
    counts = torch.arange(4) * (rank + 1)
    total = exchange.total(counts)
    assert torch.equal(total, torch.arange(4) * sum(range(1, num_ranks + 1)))
    assert torch.equal(counts, torch.arange(4) * (rank + 1))
    sent = exchange.traffic.sent_bytes
    assert sent["cp.all_reduce"] == (32 if num_ranks > 1 else 0)
    shares = sum(-(-n // num_ranks) for n in (1, 5))
    assert sent["cp.all_gather"] == 2 * shares * 8 * (num_ranks - 1)
