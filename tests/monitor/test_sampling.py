"""Which steps are looked at, and the means of a line, against all steps looked at."""

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from shardwise.monitor.gatherer import Sampler
from shardwise.monitor.metrics import STEP_S

FIRST = 10  # steps, of which each is a line


def lines_of(sampler, steps, rare=frozenset()):
    """Run steps of so many seconds; return each line's last step, its mean, steps with details."""
    lines, seen = [], []
    for number, step_s in enumerate(steps, start=1):
        detail = None
        if number in rare or sampler.wants_details(number):
            seen.append(number)
            detail = {"twice": 2 * step_s, **({"rare": 1.0} if number in rare else {})}
        sampler.take({STEP_S: step_s}, detail, number in rare)
        if sampler.ends_line:
            lines.append((number, sampler.mean(), tuple(seen)))
            seen.clear()
            sampler.begin_line(lines[-1][1][STEP_S])
    return lines


def test_each_of_the_first_steps_is_a_line_and_long_ones_have_details():
    lines = lines_of(Sampler(None), [1.0] * 40)
    assert [last for last, _, _ in lines] == [*range(1, 11), 20, 30, 40]
    assert [n for _, _, seen in lines for n in seen] == [*range(1, 41)]


def test_short_steps_make_lines_of_two_seconds_and_one_in_a_second_has_details():
    lines = lines_of(Sampler(None), [0.05] * 100)
    assert [last for last, _, _ in lines[FIRST:]] == [50, 90]
    assert lines[FIRST][2] == (20, 40)


@given(every=st.integers(1, 40), step_s=st.floats(1e-4, 3.0))
def test_lines_asked_for_end_at_multiples_and_each_has_a_step_with_details(every, step_s):
    lines = lines_of(Sampler(every), [step_s] * 130)
    ends = [last for last, _, _ in lines]
    assert ends == [*range(1, 11), *(n for n in range(11, 131) if n % every == 0)]
    # The first line after them may be short.
    assert all(seen for last, _, seen in lines if last - FIRST >= every)
    assert all("twice" in mean for _, mean, _ in lines)


@given(st.lists(st.floats(0.01, 0.011), min_size=60, max_size=400), st.sets(st.integers(11, 300)))
def test_the_mean_of_rare_steps_is_exact_and_usual_ones_stand_for_each_other(steps, rare):
    begin = 0
    for last, mean, seen in lines_of(Sampler(None), steps, rare):
        numbers = range(begin + 1, last + 1)
        assert math.isclose(mean[STEP_S], statistics.fmean(steps[n - 1] for n in numbers))
        assert rare.intersection(numbers) <= set(seen)
        assert 0.02 - 1e-9 <= mean["twice"] <= 0.022 + 1e-9
        if rare.intersection(numbers):
            assert mean["rare"] == 1.0
        begin = last


def test_every_step_has_details_if_those_without_say_nothing():
    sampler = Sampler(None)
    sampler.needs_details = True
    lines = lines_of(sampler, [0.05] * 100)
    assert [n for _, _, seen in lines for n in seen] == [*range(1, 91)]
