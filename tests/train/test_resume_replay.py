"""Steps computed twice, and copies compared: a flipped bit is named.

In test_same_bits.py and test_integrity.py they change no bit.
"""

import pytest
import torch

from ranks import run_ranks
from resumes import prepared, write_text
from shardwise.errors import ReplicaError
from shardwise.train.integrity import ReplayError
from shardwise.train.launch import StopRequest
from shardwise.train.loop import train_prepared


def flip(tensor):
    """Flip the lowest bit of the first element."""
    tensor.view(torch.uint8).view(-1)[0] ^= 1


def flip_in_replay(rank, world_size, flags, where, at_pass):
    """Flip a bit on the last rank in one pass: the fourth is the second through step 3."""
    run = prepared(rank, world_size, flags)
    passes = []

    def at_step(optimizer, args, kwargs):
        passes.append(1)
        if len(passes) == at_pass and rank == world_size - 1:
            param = dict(run.model.named_parameters())["blocks.1.feed_forward.down.weight"]
            flip(param.to_local() if where == "value" else optimizer.state[param][where].to_local())

    def at_forward(module, inputs, output):
        passes.append(1)
        return output * (1.5 if len(passes) == at_pass and rank == world_size - 1 else 1.0)

    if where == "forward":
        run.model.register_forward_hook(at_forward)
    else:
        run.optimizer.register_step_post_hook(at_step)
    with pytest.raises(ReplayError) as caught:
        train_prepared(run, StopRequest())
    return str(caught.value)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("value", "parameter 'blocks.1.feed_forward.down.weight'"),
        ("exp_avg", "parameter 'blocks.1.feed_forward.down.weight', exp_avg"),
        ("forward", "the loss of its own windows"),
    ],
)
def test_a_bit_that_flips_between_two_passes_is_named(tmp_path, where, named):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 9}
    texts = run_ranks(flip_in_replay, 3, {**flags, "replay_every": 3, "stage": 2}, where, 4)
    assert len(set(texts)) == 1
    assert texts[0].startswith("step 3, computed twice from the same state, gave other bits")
    assert f"First difference on rank 2: {named}" in texts[0]


def flip_a_copy(rank, world_size, flags):
    run = prepared(rank, world_size, flags)
    num_steps = 0

    def at_step(optimizer, args, kwargs):
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3 and rank == 1:
            flip(next(run.model.parameters()).to_local())

    run.optimizer.register_step_post_hook(at_step)
    with pytest.raises(ReplicaError) as caught:
        train_prepared(run, StopRequest())
    return str(caught.value), num_steps


def test_a_copy_that_differs_between_ranks_ends_the_run_before_it_is_saved(tmp_path):
    flags = {"data": write_text(tmp_path), "output": tmp_path / "run", "steps": 9, "stage": 0}
    flags |= {"save_every": 1, "check_replicas_every": 2}
    outcomes = run_ranks(flip_a_copy, 3, flags)
    assert len(set(outcomes)) == 1
    text, num_steps = outcomes[0]
    assert "rank 1 differs from ranks 0, 2" in text and "embedding.weight" in text
    assert num_steps == 4
    names = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(names) == "step-00000003"
