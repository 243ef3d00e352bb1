"""The learning rate against its closed forms."""

import math

import pytest

from shardwise.train.config import TrainConfig
from shardwise.train.schedule import learning_rate


def test_the_warm_up_is_a_straight_line_that_ends_at_lr() -> None:
    config = TrainConfig(lr=1.0, steps=20, warmup_steps=4)
    assert [learning_rate(config, step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]


def test_constant_stays_at_lr() -> None:
    config = TrainConfig(lr=0.5, steps=9, schedule="constant")
    assert {learning_rate(config, step) for step in range(1, 10)} == {0.5}


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_is_halfway_in_the_middle_and_ends_at_min_lr(schedule: str) -> None:
    config = TrainConfig(lr=1.0, min_lr=0.2, steps=10, warmup_steps=2, schedule=schedule)
    assert learning_rate(config, 6) == pytest.approx(0.6)
    assert learning_rate(config, 10) == pytest.approx(0.2)


def test_cosine_is_a_cosine() -> None:
    config = TrainConfig(lr=1.0, steps=8)
    for step in range(1, 9):
        expected = (1 + math.cos(math.pi * step / 8)) / 2
        assert learning_rate(config, step) == pytest.approx(expected)


def test_a_run_of_warm_up_only_never_divides_by_zero() -> None:
    config = TrainConfig(lr=1.0, steps=3, warmup_steps=3)
    assert learning_rate(config, 3) == 1.0
