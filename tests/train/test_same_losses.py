"""Two blocks of the demo's model: the same losses on any number of ranks, at every stage."""

from pathlib import Path

import pytest
import torch

from oracle import Grads
from ranks import run_ranks
from resumes import decoder_roundings
from roundings import SMOOTH_EPS, assert_all_rounded_alike, assert_rounded_alike
from shardwise import shard
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.train.config import load_config
from shardwise.train.decoder import Decoder
from trainer import full_grads

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
KEYS = {"layers": 2}
GLOBAL_BATCH = 12
NUM_STEPS = 3


def demo_losses(rank: int, world_size: int) -> tuple[dict[int, list[float]], Grads]:
    """Train at every stage; return the losses, each the mean over the global batch.

    And the gradients of the first step at stage 3.
    """
    config = load_config(DEMO, KEYS)
    losses: dict[int, list[float]] = {}
    for stage in range(4):
        torch.manual_seed(1)
        model = shard(Decoder(config, 256), stage=stage)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=SMOOTH_EPS)
        draw = torch.Generator().manual_seed(2)
        losses[stage] = []
        for step in range(NUM_STEPS):
            windows = torch.randint(256, (GLOBAL_BATCH, 33), generator=draw)
            mine = windows[rank::world_size]
            loss = model(mine[:, :-1], mine[:, 1:])
            loss.backward()
            if stage == 3 and step == 0:
                grads = full_grads(model)
            optimizer.step()
            optimizer.zero_grad()
            losses[stage].append(all_reduce_scalars([loss.item()])[0] / world_size)
    return losses, grads if rank == 0 else {}


@pytest.mark.kernels
@pytest.mark.slow
def test_one_global_batch_gives_the_same_losses_on_1_to_4_ranks_at_every_stage() -> None:
    """Losses are too flat to show an error of 1e-4 in a gradient; so gradients are compared too."""
    config = load_config(DEMO, {**KEYS, "seq": 32})
    roundings = decoder_roundings(config, GLOBAL_BATCH) // 2  # one step only
    alone, grads_alone = run_ranks(demo_losses, 1)[0]
    for num_ranks in (1, 2, 3, 4):
        losses, grads = (
            (alone, grads_alone) if num_ranks == 1 else run_ranks(demo_losses, num_ranks)[0]
        )
        assert losses[0] == losses[1] == losses[2] == losses[3], f"{num_ranks} ranks: bits differ"
        assert_all_rounded_alike(grads, grads_alone, roundings)
        for ours, theirs in zip(losses[0], alone[0], strict=True):
            assert_rounded_alike(ours, theirs, roundings)
    assert alone[0][-1] < alone[0][0]
