"""Runs whose micro-batches go through the model layer by layer: the same bits, fewer gathers."""

from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks
from resumes import lines_of, train, write_text
from shardwise.errors import ConfigError
from shardwise.train.config import load_config

FLAGS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16", "activation_checkpointing": True},
    {"stage": 3, "precision": "fp16", "layout": "flat", "offload": "cpu"},
    {"stage": 3},
    {"stage": 3, "experts": 3, "expert_bias": True},
]
SAME = ("loss", "grad_norm", "state_bytes", "eval_loss")
COMPOSED: list[dict[str, Any]] = [{"tp": 2}, {"cp": 2, "activation_checkpointing": True}]


def train_both_ways(
    rank: int, world_size: int, folder: Path, settings: list[dict[str, Any]]
) -> None:
    for number, flags in enumerate(settings):
        made = {**flags, "data": folder / "text.txt", "steps": 3, "reduce_every": "step"}
        for order in ("depth_first", "breadth_first"):
            ours = {"accumulation": 3, "accumulation_order": order}
            train(rank, world_size, {**made, **ours, "output": folder / str(number) / order})
        alone = {**made, "accumulation": 1, "output": folder / str(number) / "alone"}
        train(rank, world_size, alone)


def figures(output: Path, keys: tuple[str, ...]) -> list[Any]:
    rows = [row for row in lines_of(output) if "step" in row]
    return [(row["step"], key, row[key]) for row in rows for key in keys if key in row]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_has_the_same_bits_in_either_order_and_sends_what_one_micro_batch_does(
    world_size: int, tmp_path: Path
) -> None:
    write_text(tmp_path)
    run_ranks(train_both_ways, world_size, tmp_path, FLAGS)
    for number in range(len(FLAGS)):
        depth, breadth, alone = (
            tmp_path / str(number) / name for name in ("depth_first", "breadth_first", "alone")
        )
        assert len(figures(depth, SAME)) >= 9
        assert figures(breadth, SAME) == figures(depth, SAME)
        if FLAGS[number] == {"stage": 3}:
            # In half precision sums over micro-batches are sent in float32; routers send for each.
            assert figures(breadth, ("sent_bytes",)) == figures(alone, ("sent_bytes",))


def test_tensor_and_context_parallel_runs_have_the_same_bits_in_either_order(
    tmp_path: Path,
) -> None:
    write_text(tmp_path)
    run_ranks(train_both_ways, 2, tmp_path, COMPOSED)
    for number in range(len(COMPOSED)):
        orders = [tmp_path / str(number) / name for name in ("depth_first", "breadth_first")]
        assert figures(orders[0], SAME) == figures(orders[1], SAME)


def test_a_pipeline_has_an_order_of_its_own() -> None:
    with pytest.raises(ConfigError, match="accumulation_order: expected depth_first with pp"):
        load_config(None, {"pp": 2, "accumulation_order": "breadth_first"})
