"""Runs with state in host memory, and with steps behind the next forward pass, change no bit."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ranks import run_ranks
from resumes import lines_of, train, write_text
from shardwise import Offload
from shardwise.errors import ConfigError
from shardwise.offload import disk
from shardwise.offload.files import System
from shardwise.train.checks import check_run
from shardwise.train.config import load_config

FLAGS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16", "accumulation": 2, "activation_checkpointing": True},
    {"stage": 1, "precision": "fp16", "layout": "flat", "tied_head": True},
    {"stage": 0, "grad_clip": 0, "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    {"stage": 2, "optimizer_options": {"moments": "8bit"}},
]
SAME = ("loss", "grad_norm", "state_bytes", "sent_bytes", "eval_loss")


def train_each_way(rank: int, world_size: int, folder: Path) -> None:
    """Train plainly, overlapped, and in two parts with all in host memory; save and evaluate."""
    for number, flags in enumerate(FLAGS):
        made = {**flags, "data": folder / "text.txt", "steps": 4, "save_every": 2}
        made |= {"eval_every": 1, "schedule": "constant"}
        output = folder / str(number)
        train(rank, world_size, {**made, "output": output / "plain"})
        train(rank, world_size, {**made, "output": output / "overlap", "overlap_step": True})
        with_inputs = {"params": "cpu", "optimizer": "cpu", "activations": "cpu"}
        offload: Any = (with_inputs, {"optimizer": "cpu", "fraction": 0.5})[number % 2]
        if number > 1:
            offload = f"nvme:{folder}"
        ours = {**made, "output": output / "host", "offload": offload, "replay_every": 3}
        train(rank, world_size, {**ours, "steps": 2})
        train(rank, world_size, {**ours, "resume": "auto"})


def figures(output: Path) -> list[Any]:
    rows = [row for row in lines_of(output) if "step" in row]
    return [(row["step"], key, row[key]) for row in rows for key in SAME if key in row]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_has_the_same_bits_wherever_its_state_rests_and_its_step_goes_on(
    world_size: int, tmp_path: Path
) -> None:
    write_text(tmp_path)
    run_ranks(train_each_way, world_size, tmp_path)
    for number in range(len(FLAGS)):
        plain = figures(tmp_path / str(number) / "plain")
        assert len({step for step, _, _ in plain}) == 4 and len(plain) >= 12
        assert figures(tmp_path / str(number) / "overlap") == plain
        theirs = [row for row in figures(tmp_path / str(number) / "host") if "bytes" not in row[1]]
        assert theirs == [row for row in plain if "bytes" not in row[1]]


class WritesLate(System):
    """A disk that takes its time, so that whoever does not wait for a write reads old bytes."""

    def write(self, fd: int, at: int, data: Sequence[Any]) -> int:
        time.sleep(0.01)
        return super().write(fd, at, data)


def replay_on_slow_disk(rank: int, world_size: int, folder: Path) -> None:
    flags = {**FLAGS[3], "data": folder / "text.txt", "steps": 4, "replay_every": 1}
    with mock.patch.object(disk, "System", WritesLate):
        train(rank, world_size, {**flags, "output": folder, "offload": f"nvme:{folder}"})


def test_a_step_computed_twice_waits_for_codes_on_their_way_to_a_slow_disk(tmp_path: Path) -> None:
    write_text(tmp_path)
    run_ranks(replay_on_slow_disk, 1, tmp_path)
    assert len([row for row in lines_of(tmp_path) if "loss" in row]) == 4


def test_inputs_move_where_blocks_are_checkpointed(tmp_path: Path) -> None:
    write_text(tmp_path)
    flags = {"data": tmp_path / "text.txt", "offload": "{activations: cpu}"}
    with pytest.raises(
        ConfigError, match=r"offload: activations='cpu' .* none is; add activation_"
    ):
        check_run(load_config(None, flags), 1)
    config = load_config(None, {**flags, "activation_checkpointing": True})
    assert check_run(config, 1).offloaded == Offload(activations="cpu")
