"""The ledger of an observed run: every block of memory of the engine, once; operations a token."""

import gc
import time

import pytest
import torch
from torch import nn

from models import Checkpointed, Stack
from ranks import on_ranks, run_ranks
from shardwise import shard
from shardwise.monitor.describe import facts_of
from shardwise.monitor.memory import owned_bytes
from shardwise.monitor.spans import length
from shardwise.parallel import MixtureOfExperts
from shardwise.parallel.parts import Parts
from shardwise.parallel.routing import Routing
from shardwise.svg import order_of_kinds
from trainer import sharded_by_block


def blocks_of(found):
    """Return the memory blocks of tensors, by address."""
    blocks = {}
    for tensor in found:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            blocks[storage.data_ptr()] = storage.nbytes()
    return blocks


def plain_tensors():
    """Return what is alive, but for numbers of ranks, which are torch's."""
    gc.collect()
    found = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return [
        t for t in found if t.device.type == "cpu" and t.dtype not in (torch.int32, torch.int64)
    ]


@pytest.mark.parametrize(
    ("way", "world_size"), [("0", 3), ("1", 3), ("2", 1), ("3", 3), ("fully_shard", 3)]
)
@on_ranks()
def test_the_ledger_has_every_block_of_the_engines_and_no_other(rank, world_size, way):
    """Hold the ledger against all blocks that are alive beyond those of before."""
    gc.disable()  # what is freed must be freed by its last reference
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    before = blocks_of(plain_tensors())
    torch.manual_seed(0)
    made = Checkpointed()
    model = sharded_by_block(made) if way == "fully_shard" else shard(made, stage=int(way))
    optimizer = torch.optim.AdamW(model.parameters())
    parts = Parts(model)
    moments = []

    def look(when):
        for _ in range(100):  # a thread of gloo's may hold what it has sent a little longer
            told = owned_bytes(parts, [optimizer])
            alive = {a: n for a, n in blocks_of(plain_tensors()).items() if before.get(a) != n}
            # One may begin inside another: what DTensors are made of.
            num_bytes = int(length((a, a + n) for a, n in alive.items()))
            if num_bytes == told.device_bytes:
                break
            time.sleep(0.01)
        moments.append((when, told, num_bytes))

    look("made")
    for step in range(3):
        loss = model(batch).square().mean()
        loss.backward()
        del loss
        if step == 2:
            look("after backward")
        optimizer.step()
        if step == 2:
            look("after the step")
        optimizer.zero_grad()
        look("between steps")
    gc.enable()
    for when, told, alive in moments:
        assert told.device_bytes == alive, (when, told.by_kind(), alive)
        assert all(order_of_kinds(kind) < order_of_kinds("?") for kind in told.by_kind())
        assert sum(told.by_kind().values()) == told.device_bytes
        by_unit = told.by_unit()
        assert sum(n for kinds in by_unit.values() for n in kinds.values()) == told.device_bytes


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
