"""Which rank is late in a step, and by which part of it."""

from shardwise.monitor import metrics as m
from shardwise.monitor.lateness import Late, late_over_ranks, parts_of

NOISE_S = 0.02


def rows_of(*steps_of_ranks):
    return [parts_of(steps, len(steps_of_ranks)) for steps in steps_of_ranks]


def steps(*compute_s, **others):
    """Return steps that compute for so long, with other parts by step."""
    return [
        {m.COMPUTE_S: seconds, **{name: values[n] for name, values in others.items()}}
        for n, seconds in enumerate(compute_s)
    ]


def test_a_rank_is_late_in_the_steps_in_which_it_has_more_than_the_one_in_the_middle():
    rows = rows_of(steps(0.1, 0.1, 0.1), steps(0.1, 0.1, 0.4), steps(0.1, 0.11, 0.1))
    assert late_over_ranks(rows, NOISE_S) == {1: Late(1, {m.COMPUTE_S: 0.3}, 0.3)}


def test_the_part_that_is_longer_is_the_cause():
    data = {m.DATA_S: [0.0, 0.5]}
    rows = rows_of(steps(0.2, 0.2), steps(0.1, 0.1, **data))
    assert late_over_ranks(rows, NOISE_S) == {
        0: Late(1, {m.COMPUTE_S: 0.1}, 0.1),
        1: Late(1, {m.DATA_S: 0.4}, 0.4),
    }


def test_garbage_collection_on_one_rank_alone_is_the_cause_of_its_late_step():
    alone = rows_of(steps(0.1), steps(0.3, **{m.COLLECTIONS: [1.0]}))
    assert late_over_ranks(alone, NOISE_S) == {1: Late(1, {m.COLLECTIONS: 0.2}, 0.2)}
    on_both = rows_of(steps(0.1, **{m.COLLECTIONS: [1.0]}), steps(0.3, **{m.COLLECTIONS: [1.0]}))
    assert late_over_ranks(on_both, NOISE_S) == {1: Late(1, {m.COMPUTE_S: 0.2}, 0.2)}


def test_waits_for_a_core_and_noise_make_no_rank_late():
    waits = rows_of(steps(0.1), steps(0.4, **{m.CORE_WAIT_S: [0.29]}))
    assert late_over_ranks(waits, NOISE_S) == {}
    assert late_over_ranks(rows_of(steps(0.1), steps(0.115)), NOISE_S) == {}
    assert late_over_ranks(rows_of(steps(0.1, 9.0)), NOISE_S) == {}  # a rank alone


def test_many_ranks_send_the_parts_of_the_first_steps_of_a_line():
    many = steps(*[0.1] * 100)
    assert len(parts_of(many, 2)[m.COMPUTE_S]) == 100
    assert len(parts_of(many, 64)[m.COMPUTE_S]) == 21
    assert len(parts_of(many, 10_000)[m.COMPUTE_S]) == 1
