"""The learning rate against its closed forms."""

import math

import pytest

from shardwise.train.config import TrainConfig


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
