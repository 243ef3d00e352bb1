"""A rank that dies or raises: every other rank ends soon, and says what it was waiting for."""

import os
import signal
import time
from contextlib import nullcontext

import pytest
import torch

from models import Stack
from ranks import HANG_S, start_ranks
from shardwise import observe, shard

WORLD_SIZE = 3
VICTIM = 1

pytestmark = pytest.mark.slow


def fail(how):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank had enough")


def train_until_one_fails(rank, world_size, stage, where, how):
    torch.manual_seed(0)
    model = shard(Stack(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail_in_a_pass(module, args, output):
        if where == "forward":
            fail(how)
        output.register_hook(lambda grad: fail(how))

    with observe(model, optimizer) if stage == 3 else nullcontext():  # whose thread ends too
        for step in range(50):
            if rank == VICTIM and step == 2:
                if where == "between steps":
                    fail(how)
                model.blocks[1].up.register_forward_hook(fail_in_a_pass)
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    time.sleep(2 * HANG_S)  # nobody notices anything: the test will say so


def assert_blamed(outcome, stage):
    assert outcome.error_type == "CollectiveError", outcome.describe()
    message = (outcome.error or "").strip().splitlines()[-1]
    assert f"rank {outcome.rank}: " in message
    kinds = ("all_gather of unit '", "reduce_scatter of unit '", "flags of unit '")
    assert any(kind in message for kind in kinds), message
    assert any(f"unit '{name}'" in message for name in ("(root)", "blocks.", "(all)")) or (
        "unit 'blocks." in message
    )
    assert "axis 'shard' (3 ranks)" in message and f"rank {VICTIM} (process" in message
    assert "imed out" not in message, "it waited for the timeout of the process group"


@pytest.mark.parametrize(
    ("where", "stage", "how"),  # each two of them together
    [
        *(("forward", 1, "kill"), ("forward", 3, "raise")),
        *(("backward", 1, "raise"), ("backward", 3, "kill")),
        *(("between steps", 1, "kill"), ("between steps", 3, "raise")),
    ],
)
def test_when_a_rank_fails_every_other_ends_soon_and_says_where(stage, where, how):
    ranks = start_ranks(train_until_one_fails, WORLD_SIZE, stage, where, how)
    outcomes = ranks.wait()
    victim = outcomes[VICTIM]
    if how == "kill":
        assert victim.exit_code == -signal.SIGKILL
    else:
        assert victim.error_type == "ValueError" and "had enough" in (victim.error or "")
    for outcome in outcomes:
        if outcome is not victim:
            assert not outcome.timed_out, outcome.describe()
            assert_blamed(outcome, stage)
