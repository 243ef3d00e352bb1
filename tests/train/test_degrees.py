"""Runs over tensor and context parallelism have one process's losses, and go on from any other."""

from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks
from resumes import TINY, decoder_roundings, lines_of, train, write_text
from roundings import assert_rounded_alike
from shardwise.errors import ConfigError
from shardwise.train.checks import check_run
from shardwise.train.config import TrainConfig, load_config

FLAGS: dict[str, Any] = {
    **{"optimizer": "sgd", "lr": 0.3, "schedule": "constant", "global_batch": 4, "micro_batch": 1},
    **{"seq": 24, "heads": 4, "kv_heads": 2, "dim": 16, "grad_clip": 0.5},
}
# Each takes two steps more of one run.
TURNS: list[tuple[int, dict[str, Any]]] = [
    (4, {"tp": 2, "cp": 2, "cp_method": "gather", "activation_checkpointing": True}),
    (1, {}),
    (2, {"cp": 2, "cp_method": "heads", "stage": 1}),
    (4, {"tp": 2, "dp_replicate": 2, "stage": 2, "layout": "flat"}),
    (3, {"cp": 3, "micro_batch": 2}),
    (2, {"tp": 2, "stage": 0, "tied_head": False}),
]


def one_turn(rank: int, num_ranks: int, flags: dict[str, Any]) -> None:
    train(rank, num_ranks, flags)


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_goes_on_over_any_degrees_as_one_process_does(tmp_path: Path, tied: bool) -> None:
    flags = {**FLAGS, "data": write_text(tmp_path), "tied_head": tied}
    turns = TURNS[:3] if tied else TURNS
    for number, (num_ranks, degrees) in enumerate(turns):
        steps = {"steps": 2 * number + 2, "save_every": 2, "resume": "auto"}
        output = {"output": tmp_path / "run"}
        run_ranks(one_turn, num_ranks, {**flags, **degrees, **steps, **output, "tied_head": tied})
    last = 2 * len(turns)
    run_ranks(one_turn, 1, {**flags, "steps": last, "output": tmp_path / "alone"})
    config = TrainConfig(**{**TINY, **FLAGS})
    roundings = decoder_roundings(config, 4 * last)
    ours, theirs = (
        {line["step"]: line for line in lines_of(tmp_path / name) if "loss" in line}
        for name in ("run", "alone")
    )
    assert list(ours) == list(theirs) == list(range(1, last + 1))
    for step, line in theirs.items():
        assert_rounded_alike(ours[step]["loss"], line["loss"], roundings, f"loss of step {step}")
        assert_rounded_alike(ours[step]["grad_norm"], line["grad_norm"], roundings, f"norm {step}")
        assert ours[step]["tokens"] == line["tokens"]
    evaluated = [
        line["eval_loss"] for name in ("run", "alone") for line in lines_of(tmp_path / name)
        if "eval_loss" in line and line["step"] == last
    ]  # fmt: skip
    assert_rounded_alike(evaluated[0], evaluated[1], roundings, "held out")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp": 3}, "tp: expected a divisor of heads 4, got 3"),
        ({"tp": 4}, "tp: expected a divisor of kv_heads 2, got 4"),
        ({"cp": 5}, "cp: expected a divisor of seq 24, got 5"),
        ({"cp": 8, "tp": 2}, "tp: expected a divisor of seq 24 / cp 8, got 2"),
        ({"tp": 2, "cp": 2}, "axes: cp=2 x tp=2 = 4 does not divide 6 ranks"),
        ({"dp_shard": 4}, "axes: dp_shard=4 is not the 6 ranks that there are: make dp_shard 6"),
        ({"dp_shard": 0}, "expected a number of ranks, or -1 for those that are left"),
    ],
)
def test_degrees_that_do_not_fit_say_which_number_to_change(
    tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    flags = {**FLAGS, "global_batch": None, "data": write_text(tmp_path), **flags}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_run(load_config(None, flags), 6)


def test_ranks_that_share_a_layer_or_a_window_count_once_in_the_batch(tmp_path: Path) -> None:
    flags = {"data": write_text(tmp_path), "tp": 2, "cp": 2, "micro_batch": 3}
    assert check_run(load_config(None, flags), 8).global_batch == 6
    with pytest.raises(ConfigError, match=r"multiple of 6 \(micro_batch 3 x 2 data-parallel ranks"):
        check_run(load_config(None, {**flags, "global_batch": 9}), 8)
