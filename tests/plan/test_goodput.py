"""The expected goodput against a run played failure by failure, and against Young and Daly."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.timing.scaling import (
    Goodput,
    best_interval_s,
    expected_goodput,
    young_interval_s,
)
from shardwise.plan.timing.scenario import Checkpoints, Failures, Scenario

CLUSTER = Scenario(
    num_shards=64,
    num_replicas=16,
    failures=Failures(mtbf_hours=3000, detect_s=30, restart_s=300),
    checkpoints=Checkpoints(interval_s=900, stall_s=12, cost_s=150, load_s=60),
    seed=1,
)


@dataclass(frozen=True)
class SimulatedRun:
    num_steps: int
    wall_s: float
    fraction: float
    num_failures: int
    lost_steps: int


def simulate_failures(step_s: float, scenario: Scenario, num_steps: int) -> SimulatedRun:
    """Play a run with failures at random moments: the beginning and every interval are saved."""
    failures, saves = scenario.failures, scenario.checkpoints
    assert failures is not None
    assert saves is not None
    mtbf_s = failures.mtbf_hours * 3600 / scenario.num_ranks
    every = max(1, round(saves.interval_s / step_s))
    cycle_s = every * step_s + saves.stall_s
    lag_s = saves.cost_s - saves.stall_s
    back_s = failures.detect_s + failures.restart_s + saves.load_s
    rng = np.random.default_rng(scenario.seed)
    now_s, kept, num_failures, lost_steps = 0.0, 0, 0, 0
    while True:
        left = num_steps - kept
        needed_s = left * step_s + left // every * saves.stall_s
        alive_s = rng.exponential(mtbf_s)
        if alive_s >= needed_s:
            break
        num_failures += 1
        cycles, rest_s = divmod(alive_s, cycle_s)
        done = min(left, int(cycles) * every + min(every, int(rest_s / step_s)))
        saved = max(0, int((alive_s - lag_s) // cycle_s)) * every
        lost_steps += done - saved
        kept += saved
        now_s += alive_s
        while (survived_s := rng.exponential(mtbf_s)) < back_s:
            num_failures += 1
            now_s += survived_s
        now_s += back_s
    wall_s = now_s + needed_s
    return SimulatedRun(num_steps, wall_s, num_steps * step_s / wall_s, num_failures, lost_steps)


@pytest.mark.parametrize(
    ("mtbf_hours", "interval_s", "stall_s", "cost_s"),
    [(3000, 900, 12, 150), (3000, 900, 60, 60), (500, 300, 5, 200), (20000, 7200, 100, 100)],
)
def test_the_expectation_agrees_with_a_run_played_failure_by_failure(
    mtbf_hours: float, interval_s: float, stall_s: float, cost_s: float
) -> None:
    failures, saves = Failures(mtbf_hours, 30, 300), Checkpoints(interval_s, stall_s, cost_s, 60)
    scenario = replace(CLUSTER, failures=failures, checkpoints=saves)
    expected = expected_goodput(10.0, scenario)
    played = simulate_failures(10.0, scenario, num_steps=3_000_000)
    assert played.num_failures > 400
    assert played.fraction == pytest.approx(expected.fraction, rel=0.02)
    work_per_failure = (played.num_steps + played.lost_steps) / played.num_failures
    assert work_per_failure > expected.lost_steps_per_failure


def test_lost_steps_are_half_an_interval_and_what_was_not_yet_durable() -> None:
    scenario = replace(
        CLUSTER, failures=Failures(50_000), checkpoints=Checkpoints(1000, cost_s=200)
    )
    expected = expected_goodput(1.0, scenario)
    assert expected.lost_steps_per_failure == 500 + 200
    played = simulate_failures(1.0, scenario, num_steps=300_000_000)
    lost = played.lost_steps / played.num_failures
    assert lost == pytest.approx(expected.lost_steps_per_failure, rel=0.05)


def test_young_is_the_first_order_of_the_best_interval() -> None:
    assert young_interval_s(50, 10_000) == 1000
    for mtbf_s in (1e4, 1e6, 1e8):
        young, best = young_interval_s(60, mtbf_s), best_interval_s(60, mtbf_s)
        assert best == pytest.approx(young, rel=math.sqrt(60 / mtbf_s))


@settings(max_examples=60, deadline=None)
@given(
    st.floats(10, 1e5), st.floats(1, 100), st.floats(0, 600), st.floats(0.1, 10), st.integers(1, 99)
)
def test_no_interval_beats_the_best_one(
    mtbf_hours: float, stall_s: float, back_s: float, times: float, ranks: int
) -> None:
    failures = Failures(mtbf_hours, restart_s=back_s)

    def at(interval_s: float) -> Goodput:
        saves = Checkpoints(interval_s, stall_s, stall_s)
        return expected_goodput(0.001, Scenario(ranks, failures=failures, checkpoints=saves))

    best = at(1000.0)
    assert 0 <= best.fraction <= best.fraction_at_best + 1e-9 <= 1 + 1e-9
    assert at(best.best_interval_s * times).fraction <= best.fraction_at_best + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10_000), st.floats(100, 1e6), st.floats(60, 7200), st.floats(0, 30))
def test_more_ranks_and_longer_restarts_never_help(
    ranks: int, mtbf_hours: float, interval_s: float, stall_s: float
) -> None:
    scenario = Scenario(
        num_shards=ranks,
        failures=Failures(mtbf_hours, restart_s=100),
        checkpoints=Checkpoints(interval_s, stall_s, stall_s),
    )
    made = expected_goodput(10.0, scenario)
    assert made.fraction + made.checkpoint_fraction + made.failure_fraction == pytest.approx(1)
    assert min(made.fraction, made.checkpoint_fraction, made.failure_fraction) >= -1e-12
    doubled = expected_goodput(10.0, replace(scenario, num_shards=2 * ranks))
    slower = expected_goodput(10.0, replace(scenario, failures=Failures(mtbf_hours, restart_s=200)))
    assert doubled.fraction <= made.fraction
    assert slower.fraction <= made.fraction


def test_a_cluster_that_does_not_fail_loses_only_the_stalls() -> None:
    scenario = replace(
        CLUSTER, failures=Failures(1e15), checkpoints=Checkpoints(90, stall_s=10, cost_s=10)
    )
    assert expected_goodput(1.0, scenario).fraction == pytest.approx(0.9)
    played = simulate_failures(1.0, scenario, num_steps=9000)
    assert (played.num_failures, played.lost_steps, played.wall_s) == (0, 0, 10_000)


def test_a_cluster_that_always_fails_makes_no_progress() -> None:
    scenario = replace(CLUSTER, failures=Failures(0.001))
    assert expected_goodput(10.0, scenario).fraction == 0


def test_the_interval_is_whole_steps_and_saves_do_not_overlap() -> None:
    assert expected_goodput(7.0, CLUSTER).steps_per_checkpoint == 129
    assert expected_goodput(5000.0, CLUSTER).steps_per_checkpoint == 1
    made = expected_goodput(7.0, replace(CLUSTER, failures=Failures(1.0)))
    assert made.best_interval_s >= 150 - 12


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="failures: expected Failures"):
        expected_goodput(1.0, replace(CLUSTER, failures=None))
    with pytest.raises(ConfigError, match="checkpoints: expected Checkpoints"):
        expected_goodput(1.0, replace(CLUSTER, checkpoints=None))
    with pytest.raises(ConfigError, match="step_s=0"):
        expected_goodput(0, CLUSTER)
