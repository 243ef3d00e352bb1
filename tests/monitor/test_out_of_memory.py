"""Memory that runs out: where it was, whose it is, and what would have fitted."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from models import Stack
from ranks import start_ranks
from shardwise import observe, shard
from shardwise.device import memory_in_use_bytes
from shardwise.monitor.memory import asked_bytes, is_out_of_memory
from shardwise.monitor.record import OutOfMemory, read_run
from trainer import logged

BIG = 1 << 34  # elements: more than the limit of the test, whatever the machine has


class Greedy(nn.Module):
    """A block that asks for more memory than there is, once it is told to."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.in_forward = self.in_backward = False

    def forward(self, x):
        if self.in_forward:
            torch.empty(BIG)
        x = self.up(x)
        if self.in_backward:
            x.register_hook(lambda grad: torch.empty(BIG).sum() + grad)
        return torch.tanh(x)


class GreedyStack(Stack):
    block_class = Greedy


def run_out(rank, world_size, output, where):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 31), resource.RLIM_INFINITY))
    torch.manual_seed(0)
    model = shard(GreedyStack(), stage=2)
    optimizer = torch.optim.AdamW(model.parameters())
    failing = pytest.raises(RuntimeError, match="can't allocate memory")
    with logged() as heard, failing, observe(model, optimizer, output):
        for step in range(3):
            setattr(model.blocks[1], where, step == 2)
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert memory_in_use_bytes(torch.device("cpu")) < 1 << 33
    (told,) = heard
    return told


@pytest.mark.parametrize("where", ["in_forward", "in_backward"])
def test_it_is_told_where_memory_ran_out_and_whose_it_is(where, tmp_path):
    outcomes = start_ranks(run_out, 2, str(tmp_path), where).wait()
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, outcome.describe()
        text = outcome.result
        assert f"out of memory on rank {rank} in step 3" in text
        phase = where.removeprefix("in_")
        assert f"in {phase} of 'blocks.1', asking for 64 GiB with" in text, text
        for kind in ("param_shards", "param_full", "optimizer_state"):
            assert kind in text
    for _, line in (lines := [*read_run(tmp_path).lines(OutOfMemory)]):
        assert line.asked_bytes == 4 * BIG
        held = line.kinds or {}
        exact = 4 * sum(p.numel() for p in GreedyStack().parameters())
        # Each rank's half of every unit; no parameter has an odd number of rows but the head.
        assert held["param_shards"] + held["param_full"] >= exact
        assert line.fixes and all(fix.saved_bytes > 0 for fix in line.fixes)
        assert [fix.fits for fix in line.fixes] == sorted(
            (fix.fits for fix in line.fixes), reverse=True
        )
        sizes = [block[2] for block in line.blocks]
        assert sizes == sorted(sizes, reverse=True)
        # Of the host only what the limit of the process leaves, not all that there is; and its
        # libraries, loaded before the first step, are nothing that another setting gives back.
        assert line.in_use_bytes <= line.capacity_bytes <= line.in_use_bytes + (1 << 31)
        halved = [fix for fix in line.fixes if fix.change.startswith("half the micro-batch")]
        assert all(fix.saved_bytes < line.other_bytes // 4 for fix in halved)
    assert [rank for rank, _ in lines] == [0, 1]


def test_messages_of_allocators_are_read():
    cuda = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"
    )
    assert is_out_of_memory(cuda) and asked_bytes(cuda) == 5 << 29
    host = RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000 bytes. Error code 12 (Cannot allocate memory)"
    )
    assert is_out_of_memory(host) and asked_bytes(host) == 4000
    assert is_out_of_memory(MemoryError()) and asked_bytes(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("shapes differ"))
