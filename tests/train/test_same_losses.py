"""The demo's model on one global batch: the same losses on any number of ranks, at every stage."""

from pathlib import Path

import pytest
import torch

from ranks import run_ranks
from shardwise import shard
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.train.config import load_config
from shardwise.train.decoder import Decoder

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
GLOBAL_BATCH = 12
NUM_STEPS = 4


def demo_losses(rank: int, world_size: int) -> dict[int, list[float]]:
    """Train at every stage; return the losses, each the mean over the global batch."""
    config = load_config(DEMO, {})
    losses: dict[int, list[float]] = {}
    for stage in range(4):
        torch.manual_seed(1)
        model = shard(Decoder(config, 256), stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        draw = torch.Generator().manual_seed(2)
        losses[stage] = []
        for _ in range(NUM_STEPS):
            windows = torch.randint(256, (GLOBAL_BATCH, 33), generator=draw)
            mine = windows[rank::world_size]
            loss = model(mine[:, :-1], mine[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[stage].append(all_reduce_scalars([loss.item()])[0] / world_size)
    return losses


@pytest.mark.slow
def test_one_global_batch_gives_the_same_losses_on_1_to_4_ranks_at_every_stage() -> None:
    alone = run_ranks(demo_losses, 1)[0]
    for num_ranks in (1, 2, 3, 4):
        losses = run_ranks(demo_losses, num_ranks)[0]
        assert losses[0] == losses[1] == losses[2] == losses[3], f"{num_ranks} ranks: bits differ"
        torch.testing.assert_close(losses[0], alone[0], rtol=2e-6, atol=0)
    assert alone[0][-1] < alone[0][0]
