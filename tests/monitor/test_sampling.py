"""Which steps are looked at, and the means of a line, against all steps looked at."""

import math
import statistics

from hypothesis import given
from hypothesis import strategies as st

from shardwise.monitor.gatherer import Sampler
from shardwise.monitor.metrics import STEP_S

FIRST = 10  # steps, of which each is a line


def lines_of(sampler, steps, rare=frozenset()):
    """Run steps of so many seconds; return each line's last step, its mean and who was seen."""
    lines, seen = [], []
    for number, step_s in enumerate(steps, start=1):

        def look(number=number, step_s=step_s):
            seen.append(number)
            return {"twice": 2 * step_s, **({"rare": 1.0} if number in rare else {})}

        sampler.take({STEP_S: step_s}, look, number in rare)
        if sampler.ends_line:
            lines.append((number, sampler.mean(), tuple(seen)))
            seen.clear()
            sampler.begin_line(lines[-1][1][STEP_S])
    return lines


def test_the_first_steps_are_lines_and_long_ones_all_looked_at():
    lines = lines_of(Sampler(None), [1.0] * 40)
    assert [last for last, _, _ in lines] == [*range(1, 11), 20, 30, 40]
    assert [n for _, _, seen in lines for n in seen] == [*range(1, 41)]


def test_short_steps_make_lines_of_two_seconds_and_one_in_a_quarter_is_looked_at():
    lines = lines_of(Sampler(None), [0.05] * 100)
    assert [last for last, _, _ in lines[FIRST:]] == [50, 90]
    assert lines[FIRST][2] == tuple(range(15, 51, 5))


@given(every=st.integers(1, 40), step_s=st.floats(1e-4, 3.0))
def test_lines_asked_for_end_at_multiples_and_each_has_a_step_that_was_looked_at(every, step_s):
    lines = lines_of(Sampler(every), [step_s] * 130)
    ends = [last for last, _, _ in lines]
    assert ends == [*range(1, 11), *(n for n in range(11, 131) if n % every == 0)]
    assert all(seen for _, _, seen in lines)


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


def test_a_step_that_took_long_is_looked_at_and_counts_once():
    steps = [0.02] * 210
    steps[130] = 1.0
    (line,) = [line for line in lines_of(Sampler(None), steps) if 131 in line[2]]
    numbers = range(111, 211)
    assert line[0] == 210
    exact = statistics.fmean(2 * steps[n - 1] for n in numbers)
    assert math.isclose(line[1]["twice"], exact)
