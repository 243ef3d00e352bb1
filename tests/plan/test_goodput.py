"""The expected goodput against a run played failure by failure, and against Young and Daly."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.timing.goodput import (
    best_interval_s,
    expected_goodput,
    young_interval_s,
)

CLUSTER = {"mtbf_s": 10_000.0, "back_s": 390.0, "interval_s": 900.0, "stall_s": 12.0}


def goodput(step_s, **changed):
    return expected_goodput(step_s, **CLUSTER | changed)


def simulate_failures(step_s, num_steps, **changed):
    """Play a run with failures at random moments: the beginning and every interval are saved.

    Return its seconds, the number of failures and of steps that were lost.
    """
    given = CLUSTER | changed
    every = max(1, round(given["interval_s"] / step_s))
    cycle_s = every * step_s + given["stall_s"]
    rng = np.random.default_rng(1)
    now_s, kept, num_failures, lost_steps = 0.0, 0, 0, 0
    while True:
        left = num_steps - kept
        needed_s = left * step_s + left // every * given["stall_s"]
        alive_s = rng.exponential(given["mtbf_s"])
        if alive_s >= needed_s:
            break
        num_failures += 1
        cycles, rest_s = divmod(alive_s, cycle_s)
        done = min(left, int(cycles) * every + min(every, int(rest_s / step_s)))
        saved = int(cycles) * every
        lost_steps += done - saved
        kept += saved
        now_s += alive_s
        while (survived_s := rng.exponential(given["mtbf_s"])) < given["back_s"]:
            num_failures += 1
            now_s += survived_s
        now_s += given["back_s"]
    return now_s + needed_s, num_failures, lost_steps


@pytest.mark.parametrize(
    ("mtbf_s", "interval_s", "stall_s"),
    [(10_000, 900, 12), (10_000, 900, 60), (1700, 300, 5), (70_000, 7200, 100)],
)
def test_the_expectation_agrees_with_a_run_played_failure_by_failure(mtbf_s, interval_s, stall_s):
    given = {"mtbf_s": mtbf_s, "interval_s": interval_s, "stall_s": stall_s}
    expected = goodput(10.0, **given)
    wall_s, num_failures, lost_steps = simulate_failures(10.0, num_steps=3_000_000, **given)
    assert num_failures > 400
    assert 3e7 / wall_s == pytest.approx(expected.kept_fraction, rel=0.02)
    work_per_failure = (3_000_000 + lost_steps) / num_failures
    assert work_per_failure > expected.num_lost_steps_per_failure


def test_lost_steps_are_half_an_interval():
    given = {"mtbf_s": 200_000.0, "interval_s": 1000.0, "stall_s": 0.0}
    expected = goodput(1.0, **given)
    assert expected.num_lost_steps_per_failure == 500
    _, num_failures, lost_steps = simulate_failures(1.0, num_steps=300_000_000, **given)
    lost = lost_steps / num_failures
    assert lost == pytest.approx(expected.num_lost_steps_per_failure, rel=0.05)


def test_young_is_the_first_order_of_the_best_interval():
    assert young_interval_s(50, 10_000) == 1000
    for mtbf_s in (1e4, 1e6, 1e8):
        young, best = young_interval_s(60, mtbf_s), best_interval_s(60, mtbf_s)
        assert best == pytest.approx(young, rel=math.sqrt(60 / mtbf_s))


@settings(max_examples=60, deadline=None)
@given(st.floats(400, 1e8), st.floats(1, 100), st.floats(0, 600), st.floats(0.1, 10))
def test_no_interval_beats_the_best_one(mtbf_s, stall_s, back_s, times):
    def at(interval_s):
        times_s = {"mtbf_s": mtbf_s, "back_s": back_s, "stall_s": stall_s}
        return goodput(0.001, interval_s=interval_s, **times_s)

    best = at(1000.0)
    assert 0 <= best.kept_fraction <= best.kept_at_best_interval_fraction + 1e-9 <= 1 + 1e-9
    assert (
        at(best.best_interval_s * times).kept_fraction <= best.kept_at_best_interval_fraction + 1e-9
    )


@settings(max_examples=60, deadline=None)
@given(st.floats(40, 1e8), st.floats(60, 7200), st.floats(0, 30))
def test_more_failures_and_longer_restarts_never_help(mtbf_s, interval_s, stall_s):
    given = {"interval_s": interval_s, "stall_s": stall_s}
    made = goodput(10.0, mtbf_s=mtbf_s, **given)
    assert made.kept_fraction + made.checkpoint_fraction + made.failure_fraction == pytest.approx(1)
    assert min(made.kept_fraction, made.checkpoint_fraction, made.failure_fraction) >= -1e-12
    assert goodput(10.0, mtbf_s=mtbf_s / 2, **given).kept_fraction <= made.kept_fraction
    assert (
        goodput(10.0, mtbf_s=mtbf_s, **given | {"back_s": 500.0}).kept_fraction
        <= made.kept_fraction
    )


def test_a_cluster_that_does_not_fail_loses_only_the_stalls():
    given = {"mtbf_s": 1e18, "interval_s": 90.0, "stall_s": 10.0}
    assert goodput(1.0, **given).kept_fraction == pytest.approx(0.9)
    assert simulate_failures(1.0, num_steps=9000, **given) == (10_000, 0, 0)


def test_a_cluster_that_always_fails_makes_no_progress():
    assert goodput(10.0, mtbf_s=0.001).kept_fraction == 0


def test_the_interval_is_whole_steps():
    assert goodput(7.0).num_steps_per_checkpoint == 129
    assert goodput(5000.0).num_steps_per_checkpoint == 1
    assert goodput(7.0, mtbf_s=1.0).best_interval_s == 7


@pytest.mark.parametrize(
    ("times", "name"),
    [({"mtbf_s": 0.0}, "mtbf_s=0"), ({"interval_s": -1.0}, "interval_s"), ({"back_s": -1}, "back")],
)
def test_times_that_cannot_be_are_refused(times, name):
    with pytest.raises(ConfigError, match=name):
        goodput(1.0, **times)
    with pytest.raises(ConfigError, match="step_s=0"):
        goodput(0)
