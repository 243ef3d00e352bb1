"""The learning rate against its closed forms."""

import math

import pytest

from shardwise.errors import ConfigError
from shardwise.train.config import TrainConfig, load_config


def test_the_warm_up_is_a_straight_line_that_ends_at_lr() -> None:
    config = TrainConfig(lr=1.0, steps=20, warmup_steps=4)
    assert [config.learning_rate(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_lr() -> None:
    config = TrainConfig(lr=0.5, steps=9, schedule="constant")
    assert {config.learning_rate(step) for step in range(1, 10)} == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_is_halfway_in_the_middle_and_ends_at_min_lr(schedule: str) -> None:
    config = TrainConfig(lr=1.0, min_lr=0.2, steps=10, warmup_steps=2, schedule=schedule)
    assert config.learning_rate(6) == pytest.approx(0.6)
    assert config.learning_rate(10) == pytest.approx(0.2)


def test_cosine_is_a_cosine() -> None:
    config = TrainConfig(lr=1.0, steps=8)
    for step in range(1, 9):
        expected = (1 + math.cos(math.pi * step / 8)) / 2
        assert config.learning_rate(step) == pytest.approx(expected)


def test_a_run_of_warm_up_only_never_divides_by_zero() -> None:
    config = TrainConfig(lr=1.0, steps=3, warmup_steps=3)
    assert config.learning_rate(3) == 1.0


def test_a_curve_of_deepspeed_has_its_own_options_and_ends_with_the_run() -> None:
    config = TrainConfig(
        lr=0.5, steps=12, schedule="WarmupCosineLR", schedule_options={"warmup_num_steps": 4}
    )
    rates = [config.learning_rate(step) for step in range(1, 14)]
    assert rates[:2] == [0.0, 0.0] and max(rates) == rates[4] == 0.5
    assert rates[-1] == pytest.approx(0.5 * 1e-4)  # total_num_steps is that of the run


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"schedule": "OneCycle"}, "OneCycle needs cycle_min_lr"),
        ({"schedule": "WarmupLR", "warmup_steps": 3}, "leave warmup_steps and min_lr out"),
        ({"schedule_options": {"warmup_num_steps": 3}}, "expected one of WarmupLR"),
        (
            {"schedule": "WarmupLR", "schedule_options": {"warmup_steps": 3}},
            "did you mean 'warmup_num_steps'",
        ),
        (
            {"schedule": "LRRangeTest", "schedule_options": {"lr_range_test_min_lr": [1, 2]}},
            "one value each",
        ),
        (
            {"schedule": "LRRangeTest", "schedule_options": {"lr_range_test_min_lr": 10**400}},
            "lr_range_test_min_lr: expected a number, got",
        ),
        ({"optimizer_options": {"epsilon": 1}}, "unknown argument 'epsilon' of AdamW"),
        ({"optimizer_options": {"lr": 1}}, "lr has keys of its own"),
        ({"optimizer_options": {"moments": "int8"}}, "moments='int8': expected one of 'fp32'"),
        (
            {"optimizer_options": {"moments": "bf16", "amsgrad": True}},
            "unknown argument 'amsgrad' of shardwise.optim.AdamW",
        ),
        ({"optimizer_options": "[1]"}, "expected `{name: value"),
    ],
)
def test_options_that_do_not_fit_are_refused(keys: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(None, keys)


def test_options_come_from_a_flag_as_from_a_file() -> None:
    flags = {"optimizer": "sgd", "optimizer_options": "{momentum: 0.9, dampening: 1e-3}"}
    config = load_config(None, flags)
    assert config.optimizer_options == {"momentum": 0.9, "dampening": 1e-3}
