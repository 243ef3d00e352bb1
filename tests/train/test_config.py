"""Keys of `shardwise train`: YAML, flags, errors written for people; the learning rate."""

import math
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig, dump_config, load_config

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"


WARMUP = {"schedule": "WarmupLR"}


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("dim: 64\nlr: 1.0e-2\n", {"lr": 0.5}, {"dim": 64, "lr": 0.5}),
        ("lr: 3e-4\n", {}, {"lr": 3e-4}),  # a float without a dot
        ("# nothing\n", {}, {}),
        ("", {"resume": "40"}, {"resume": 40}),
        ("", {"resume": 40}, {"resume": 40}),
        ("", {"gather": "fp8", "gather_block": "64"}, {"gather": "fp8", "gather_block": 64}),
        ("", {"reduce": "int8-a2a", "stage": 0}, {"reduce": "int8-a2a", "stage": 0}),
        (
            "dp_replicate: 2\nlocal_steps: {every: 50, lr: 7e-1}\n",
            {},
            {"dp_replicate": 2, "local_steps": {"every": 50, "outer": "nesterov", "lr": 0.7}},
        ),
        ("dp_replicate: 2\n", {"local_steps": "8"}, {"dp_replicate": 2, "local_steps": 8}),
        (
            "",
            {"optimizer": "sgd", "optimizer_options": "{momentum: 0.9, dampening: 1e-3}"},
            {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9, "dampening": 1e-3}},
        ),
    ],
)
def test_keys_are_those_of_the_file_and_flags_win(tmp_path, text, flags, expected):
    assert load_config(write(tmp_path, text), flags) == TrainConfig.model_validate(expected)


@pytest.mark.parametrize(
    ("given", "parts"),  # a file's text, or flags
    [
        ("lr: -1\nheds: 2\n", ["lr: expected greater than 0", "unknown key 'heds'"]),
        ("micro-batch: 2\n", ["unknown key 'micro-batch'", "did you mean 'micro_batch'"]),
        ("zzz: 2\n", ["unknown key 'zzz'", "--help"]),
        ("local_steps: 8\n", ["local_steps: ", "give dp_replicate"]),
        ("nearby_ranks: 2\nstage: 2\n", ["nearby_ranks: backward gathers nothing at stage 2"]),
        ("nearby_ranks: 2\ntp: 2\n", ["nearby_ranks: expected tp, pp, cp and ep 1"]),
        (
            "dp_replicate: 2\nlocal_steps: 8\nprecision: fp16\n",
            ["precision: expected bf16 or fp32 with local_steps"],
        ),
        ("local_steps: {evry: 8}\n", ["unknown field 'evry'", "did you mean 'every'"]),
        ("local_steps: {every: 4, streams: 5}\n", ["streams=5", "at most every=4"]),
        ("local_steps: {every: 4, outer: adam}\n", ["outer='adam'", "'nesterov'"]),
        ("local_steps: {every: 4, outer: average, lr: 1}\n", ["outer 'average' has no lr"]),
        ("local_steps: {every: 4, lr: -1}\n", ["outer.lr=-1", "above 0"]),
        ("local_steps: {outer: nesterov}\n", ["every: expected the number of steps"]),
        ("dim: wide\n", ["dim: expected a valid integer", "'wide'"]),
        ("dim: -1\n", ["dim: expected greater than 0", "-1"]),
        ("schedule: cosin\n", ["expected 'constant', 'cosine', 'linear'", "mean 'cosine'"]),
        ("dim: 60\nheads: 8\n", ["heads: expected dim / heads", "60"]),
        ("kv_heads: 3\n", ["kv_heads: expected a divisor of heads 8", "3"]),
        ("steps: 5\nwarmup_steps: 6\n", ["warmup_steps: expected at most steps 5", "6"]),
        ("min_lr: 1\n", ["min_lr: expected at most lr"]),
        ("resume: atuo\n", ["resume: expected 'auto', 'never' or the step", "mean 'auto'"]),
        ("resume: true\n", ["resume: expected 'auto', 'never' or the step", "got True"]),
        ("resume: 0\n", ["resume: expected 'auto', 'never' or the step", "got 0"]),
        ("save_every: -1\n", ["save_every: expected greater than or equal to 0", "-1"]),
        ("keep_every: 5\n", ["keep_every: expected keep_last beside it"]),
        ("restarts: 5\n", ["restarts: expected resume auto beside it, got never"]),
        ("[1, 2]\n", ["expected `key: value` lines", "list"]),
        ("a: b: c\n", ["expected YAML"]),
        ({"micro_batch": 0}, ["flag --micro-batch: micro_batch: expected greater"]),
        ({"gather": "int8", "stage": 0}, ["nothing is gathered at stage 0"]),
        ({"gather": "int9"}, ["int9"]),
        ({"reduce": "int8"}, ["int8-a2a"]),
        ({"gather": "int8", "gather_block": 24}, ["multiple of 16"]),
        ({"schedule": "WarmupLR", "warmup_steps": 3}, ["leave warmup_steps and min_lr out"]),
        ({"schedule_options": {"warmup_num_steps": 3}}, ["expected one of WarmupLR"]),
        (WARMUP | {"schedule_options": {"warmup_mn_lr": 3}}, ["mean 'warmup_min_lr'"]),
        (WARMUP | {"schedule_options": {"warmup_min_lr": [1, 2]}}, ["one value each"]),
        (WARMUP | {"schedule_options": {"warmup_min_lr": 10**400}}, ["expected a number"]),
        ({"optimizer_options": {"epsilon": 1}}, ["unknown argument 'epsilon' of AdamW"]),
        ({"optimizer_options": {"lr": 1}}, ["lr has keys of its own"]),
        ({"optimizer_options": {"moments": "int8"}}, ["moments='int8': expected one of 'fp32'"]),
        ({"optimizer_options": {"moments": "bf16", "amsgrad": True}}, ["of shardwise.optim.AdamW"]),
        ({"optimizer_options": "[1]"}, ["expected `{name: value"]),
        ({"pp": 2, "accumulation_order": "breadth_first"}, ["expected depth_first with pp"]),
    ],
)
def test_an_error_names_the_file_or_flag_the_key_and_what_was_expected(tmp_path, given, parts):
    path = write(tmp_path, given) if isinstance(given, str) else None
    with pytest.raises(ConfigError) as caught:
        load_config(path, {} if path else given)
    for part in [str(path or ""), *parts]:
        assert part in str(caught.value)


def test_a_config_is_the_same_after_yaml_and_back(tmp_path):
    for config in (
        load_config(DEMO, {}),
        TrainConfig(dim=64, lr=1e-5, data=tmp_path, reduce_every="step"),
    ):
        assert load_config(write(tmp_path, dump_config(config)), {}) == config


@pytest.mark.parametrize(
    ("keys", "num_ranks", "found"),
    [
        *(({"global_batch": 24}, ranks, (24, 12 // ranks)) for ranks in (1, 2, 3, 4)),
        ({"accumulation": 3}, 4, (24, 3)),
        ({"global_batch": 16}, 3, (16, 3)),  # eight micro-batches in nine passes
        ({"global_batch": 16, "accumulation": 3}, 2, "needs 4, got 3"),
        ({"global_batch": 15}, 3, r"multiple of 2 \(micro_batch 2\), got 15"),
        (
            {"global_batch": 16, "pp": 2},
            6,
            r"multiple of 6 \(micro_batch 2 x 3 data-parallel ranks\), got 16",
        ),
        ({"global_batch": 16, "experts": 4}, 3, r"multiple of 6 \(micro_batch 2 x 3 ranks\)"),
        ({"global_batch": 16, "experts": 4, "expert_balance": 0}, 3, (16, 3)),
    ],
)
def test_a_global_batch_is_micro_batches_by_accumulation_by_ranks(keys, num_ranks, found):
    config = TrainConfig.model_validate({"micro_batch": 2, **keys})
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            resolve_batch(config, num_ranks)
        return
    config = resolve_batch(config, num_ranks)
    assert (config.global_batch, config.accumulation) == found
    assert resolve_batch(config, num_ranks) == config


def test_a_run_that_goes_on_keeps_its_global_batch_unless_a_key_asks(tmp_path):
    before = resolve_batch(TrainConfig(micro_batch=2, output=tmp_path), 4)
    (tmp_path / "config.yaml").write_text(dump_config(before))
    config = TrainConfig(micro_batch=2, output=tmp_path, resume="auto")
    assert resolve_batch(config, 3).global_batch == 8
    assert resolve_batch(config.model_copy(update={"accumulation": 1}), 3).global_batch == 6
    assert resolve_batch(config.model_copy(update={"resume": "never"}), 3).global_batch == 6


@pytest.mark.parametrize(
    ("keys", "rates"),
    [
        ({"steps": 20, "warmup_steps": 4}, {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}),
        ({"steps": 9, "schedule": "constant"}, dict.fromkeys(range(1, 10), 1.0)),
        ({"steps": 3, "warmup_steps": 3}, {3: 1.0}),
        *(
            (
                {"min_lr": 0.2, "steps": 10, "warmup_steps": 2, "schedule": schedule},
                {6: 0.6, 10: 0.2},
            )
            for schedule in ("cosine", "linear")
        ),
    ],
)
def test_rates_rise_to_lr_and_fall_to_min_lr(keys, rates):
    config = TrainConfig.model_validate({"lr": 1.0, **keys})
    assert {step: config.learning_rate(step) for step in rates} == pytest.approx(rates)


def test_cosine_is_a_cosine():
    config = TrainConfig(lr=1.0, steps=8)
    for step in range(1, 9):
        expected = (1 + math.cos(math.pi * step / 8)) / 2
        assert config.learning_rate(step) == pytest.approx(expected)


def test_a_curve_of_deepspeed_has_its_own_options_and_ends_with_the_run():
    config = TrainConfig(
        lr=0.5, steps=12, schedule="WarmupCosineLR", schedule_options={"warmup_num_steps": 4}
    )
    rates = [config.learning_rate(step) for step in range(1, 14)]
    assert rates[:2] == [0.0, 0.0] and max(rates) == rates[4] == 0.5
    assert rates[-1] == pytest.approx(0.5 * 1e-4)  # total_num_steps is that of the run
