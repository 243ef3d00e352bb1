"""What is gathered next: a recorded order, and a pure function of it and a byte budget."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.schedule import OrderPrediction, units_to_prefetch

unit_ids = st.integers(0, 7)
orders = st.lists(unit_ids, max_size=12)
sizes = st.lists(st.integers(0, 50), min_size=8, max_size=8)
some_units = st.frozensets(unit_ids)


@given(orders, sizes, some_units, some_units, st.integers(0, 200))
def test_the_nearest_units_that_are_not_there_are_chosen_as_far_as_the_budget_goes(
    upcoming, sizes, ahead, resident, budget
):
    before = list(upcoming), set(ahead)
    wanted = [u for u in dict.fromkeys(upcoming) if u not in ahead | resident]
    arguments = (upcoming, sizes.__getitem__, ahead, resident.__contains__, budget)
    chosen = units_to_prefetch(*arguments)
    assert chosen == wanted[: len(chosen)] == units_to_prefetch(*arguments)
    held = sum(sizes[u] for u in ahead)
    left = budget - held - sum(sizes[u] for u in chosen)
    assert left >= min(0, budget - held)
    if chosen != wanted:  # no more is left out than has to be
        assert sizes[wanted[len(chosen)]] > left
    assert (list(upcoming), set(ahead)) == before


def run_step(order, units):
    """Visit the units forward and backward; return what was expected after each."""
    forward = [order.visit_forward(u) for u in units]
    order.begin_backward(units)
    backward = [order.visit_backward(u) for u in reversed(units)]
    order.end_step()
    return forward, backward


def tails(units):
    return [units[i + 1 :] for i in range(len(units))]


@given(st.lists(unit_ids, min_size=1, max_size=12), st.lists(unit_ids, min_size=1, max_size=12))
def test_a_changed_order_is_expected_one_step_later(old, new):
    order = OrderPrediction(range(8))
    for _ in range(2):
        run_step(order, old)
    run_step(order, new)
    forward, _ = run_step(order, new)
    assert forward == tails(new)


@given(st.lists(unit_ids, min_size=1, max_size=12))
def test_backward_is_expected_in_reverse_of_this_very_step(units):
    _, backward = run_step(OrderPrediction(range(8)), units)
    assert backward == tails(units[::-1])


@given(st.permutations(range(8)))
def test_the_first_step_is_expected_in_the_order_of_registration(units):
    forward, _ = run_step(OrderPrediction(units), units)
    assert forward == tails(units)


def test_a_unit_that_was_never_seen_is_expected_by_nobody_and_does_no_harm():
    order = OrderPrediction([0, 1, 2])
    assert order.visit_forward(0) == [1, 2]
    assert order.visit_forward(7) is None
    assert order.visit_forward(1) == [2]


def test_a_unit_that_is_skipped_does_not_spoil_what_is_expected_after_it():
    order = OrderPrediction([0, 1, 2, 3])
    order.visit_forward(0)
    assert order.visit_forward(2) == [3]


@given(orders, st.lists(unit_ids, min_size=1, max_size=12))
def test_evaluation_does_not_change_what_training_expects(evaluated, units):
    order = OrderPrediction(range(8))
    run_step(order, units)
    for unit in evaluated:
        order.visit_forward(unit)
    order.end_step()
    forward, _ = run_step(order, units)
    assert forward == tails(units)


@given(st.lists(unit_ids, min_size=1, max_size=12))
def test_a_step_without_a_visit_forgets_nothing(units):
    order = OrderPrediction(range(8))
    run_step(order, units)
    order.begin_backward([])
    order.end_step()
    forward, _ = run_step(order, units)
    assert forward == tails(units)
