"""Runs over tensor and context parallelism: one process's losses; they resume from any other."""

import pytest

from ranks import run_ranks
from resumes import TINY, decoder_roundings, lines_of, train, write_text
from roundings import assert_rounded_alike
from shardwise.errors import ConfigError
from shardwise.train.checks import check_run
from shardwise.train.config import TrainConfig, load_config

FLAGS = {
    **{"optimizer": "sgd", "lr": 0.3, "schedule": "constant", "global_batch": 4, "micro_batch": 1},
    **{"seq": 24, "heads": 4, "kv_heads": 2, "dim": 16, "grad_clip": 0.5},
}
# Each takes two steps more of one run.
TURNS = [
    (4, {"tp": 2, "cp": 2, "cp_method": "gather", "activation_checkpointing": True}),
    (1, {}),
    (2, {"cp": 2, "cp_method": "heads", "stage": 1}),
    (4, {"tp": 2, "dp_replicate": 2, "stage": 2, "layout": "flat"}),
    (3, {"cp": 3, "micro_batch": 2}),
    (2, {"tp": 2, "stage": 0}),
]


# Stages draw other weights than the whole model, so one process begins.
PIPELINE_TURNS = [
    (1, {}),
    (2, {"pp": 2}),
    (4, {"pp": 2, "tp": 2, "pp_schedule": "gpipe", "activation_checkpointing": True}),
    (3, {"pp": 3, "stage": 0}),
    (4, {"pp": 2, "cp": 2, "cp_method": "heads", "stage": 1}),
    (4, {"pp": 2, "dp_replicate": 2, "stage": 2, "micro_batch": 1}),
]
# With experts; one micro-batch each, as the auxiliary loss is one of a micro-batch.
EXPERTS = {
    **{"experts": 6, "shared_experts": 1, "dense_layers": 1, "expert_scoring": "sigmoid"},
    **{"expert_bias": True, "expert_ffn_multiple": 2.0, "global_batch": 12},
}
EXPERT_TURNS = [
    (4, {"ep": 2, "micro_batch": 3, "dp_replicate": 2}),
    (1, {"micro_batch": 12}),
    (4, {"ep": 2, "tp": 2, "micro_batch": 6}),
    (3, {"ep": 3, "micro_batch": 4, "stage": 2}),
    (2, {"ep": 2, "cp": 2, "micro_batch": 12, "activation_checkpointing": True}),
]


@pytest.mark.parametrize("kind", ["dense", "experts", "tied pipeline"])
def test_a_run_goes_on_over_any_degrees_as_one_process_does(tmp_path, kind):
    flags = {**FLAGS, "data": write_text(tmp_path), "tied_head": kind == "tied pipeline"}
    turns = TURNS
    if kind == "experts":
        flags, turns = {**flags, **EXPERTS}, EXPERT_TURNS
    elif kind == "tied pipeline":
        flags, turns = {**flags, "layers": 3}, PIPELINE_TURNS
    for number, (num_ranks, degrees) in enumerate(turns):
        steps = {"steps": 2 * number + 2, "save_every": 2, "resume": "auto"}
        run_ranks(train, num_ranks, {**flags, **degrees, **steps, "output": tmp_path / "run"})
    last = 2 * len(turns)
    alone = {"micro_batch": flags["global_batch"], "steps": last, "output": tmp_path / "alone"}
    run_ranks(train, 1, {**flags, **alone})
    config = TrainConfig(**{**TINY, **FLAGS, "layers": flags.get("layers", TINY["layers"])})
    roundings = decoder_roundings(config, flags["global_batch"] * last)
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
        ({"cp": 4, "tp": 2, "cp_method": "heads"}, "needs a cp that divides heads 4 / tp 2"),
        ({"cp": 8, "cp_method": "ring"}, "'ring' needs 2 x cp 8 to divide seq 24"),
        ({"cp": 2, "cp_method": "ring", "dropout": 0.1}, "cp_method: 'ring' needs no dropout"),
        ({"tp": 2, "cp": 2}, "axes: cp=2 x tp=2 = 4 does not divide 6 ranks"),
        ({"dp_shard": 4}, "axes: dp_shard=4 is not the 6 ranks that there are: make dp_shard 6"),
        ({"ep": 4, "experts": 6}, "ep: expected a divisor of experts 6, got 4"),
        ({"ep": 2}, "ep: expected a divisor of experts 0, got 2"),
        ({"experts": 1}, "experts_per_token: expected at most experts 1, got 2"),
        ({"ep": 4, "experts": 4}, "axes: ep=4 does not divide dp_shard x cp x tp = 6 x 1 x 1"),
        ({"pp": 3, "layers": 2}, "pp: expected at most layers 2, got 3"),
        ({"pp": 2, "experts": 4}, "stages hand on tokens alone, and not the loss of expert_bal"),
        ({"pp": 2, "tied_head": True, "layout": "flat"}, "layout: expected rows with pp and tied"),
        ({"pp": 2, "precision": "fp16"}, "precision: expected bf16 or fp32 with pp"),
        ({"offload": "{activations: cpu}"}, "offload: activations='cpu' moves the inputs of"),
        ({"pp": 2}, "accumulation: expected at least pp 2, as many micro-batches as stages, got 1"),
        ({"dp_shard": 0}, "expected a number of ranks, or -1 for those that are left"),
    ],
)
def test_degrees_that_do_not_fit_say_which_number_to_change(tmp_path, flags, message):
    flags = {**FLAGS, "global_batch": None, "data": write_text(tmp_path), **flags}
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        check_run(load_config(None, flags), 6)


def test_ranks_that_share_a_layer_or_a_window_count_once_in_the_batch(tmp_path):
    flags = {"data": write_text(tmp_path), "tp": 2, "cp": 2, "micro_batch": 3}
    assert check_run(load_config(None, flags), 8).global_batch == 6
    assert check_run(load_config(None, {**flags, "global_batch": 9}), 8).accumulation == 2
