"""What is gathered next: a recorded order, and a pure function of it and a byte budget."""

from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.schedule import Order, units_to_prefetch

unit_ids = st.integers(0, 7)
orders = st.lists(unit_ids, max_size=12)
sizes = st.lists(st.integers(0, 50), min_size=8, max_size=8)
some_units = st.frozensets(unit_ids)


@given(orders, sizes, some_units, some_units, st.integers(0, 200))
def test_what_is_gathered_ahead_never_exceeds_the_budget(
    upcoming: list[int], sizes: list[int], ahead: set[int], resident: set[int], budget: int
) -> None:
    chosen = units_to_prefetch(upcoming, sizes.__getitem__, ahead, resident.__contains__, budget)
    held = sum(sizes[u] for u in ahead)
    assert held + sum(sizes[u] for u in chosen) <= max(budget, held)


@given(orders, sizes, some_units, some_units, st.integers(0, 200))
def test_no_unit_is_chosen_twice_nor_while_it_is_there_already(
    upcoming: list[int], sizes: list[int], ahead: set[int], resident: set[int], budget: int
) -> None:
    chosen = units_to_prefetch(upcoming, sizes.__getitem__, ahead, resident.__contains__, budget)
    assert len(set(chosen)) == len(chosen)
    assert not set(chosen) & (ahead | resident)


@given(orders, sizes, some_units, some_units, st.integers(0, 200))
def test_no_unit_overtakes_a_nearer_one(
    upcoming: list[int], sizes: list[int], ahead: set[int], resident: set[int], budget: int
) -> None:
    chosen = units_to_prefetch(upcoming, sizes.__getitem__, ahead, resident.__contains__, budget)
    wanted = [u for u in dict.fromkeys(upcoming) if u not in ahead | resident]
    assert chosen == wanted[: len(chosen)]
    left = budget - sum(sizes[u] for u in [*ahead, *chosen])
    if chosen != wanted:  # no more is left out than has to be
        assert sizes[wanted[len(chosen)]] > left


@given(orders, sizes, some_units, some_units, st.integers(0, 200))
def test_the_choice_is_a_pure_function(
    upcoming: list[int], sizes: list[int], ahead: set[int], resident: set[int], budget: int
) -> None:
    before = list(upcoming), set(ahead)
    arguments = (upcoming, sizes.__getitem__, ahead, resident.__contains__, budget)
    assert units_to_prefetch(*arguments) == units_to_prefetch(*arguments)
    assert (list(upcoming), set(ahead)) == before


def test_without_a_budget_nothing_that_has_a_size_is_gathered_ahead() -> None:
    assert units_to_prefetch([1, 2], lambda u: u, (), lambda u: False, 0) == []


def run_step(order: Order, units: list[int]) -> tuple[list[list[int] | None], ...]:
    """Visit the units forward and backward; return what was expected after each."""
    forward = [order.visit_forward(u) for u in units]
    order.begin_backward(units)
    backward = [order.visit_backward(u) for u in reversed(units)]
    order.end_step()
    return forward, backward


def tails(units: list[int]) -> list[list[int]]:
    return [units[i + 1 :] for i in range(len(units))]


@given(st.lists(unit_ids, min_size=1, max_size=12))
def test_the_order_of_one_step_is_expected_in_the_next_repeated_units_included(
    units: list[int],
) -> None:
    order = Order(range(8))
    run_step(order, units)
    forward, _ = run_step(order, units)
    assert forward == tails(units)


@given(st.lists(unit_ids, min_size=1, max_size=12), st.lists(unit_ids, min_size=1, max_size=12))
def test_a_changed_order_is_expected_one_step_later(old: list[int], new: list[int]) -> None:
    order = Order(range(8))
    for _ in range(2):
        run_step(order, old)
    run_step(order, new)
    forward, _ = run_step(order, new)
    assert forward == tails(new)


@given(st.lists(unit_ids, min_size=1, max_size=12))
def test_backward_is_expected_in_reverse_of_this_very_step(units: list[int]) -> None:
    _, backward = run_step(Order(range(8)), units)
    assert backward == tails(units[::-1])


@given(st.permutations(range(8)))
def test_the_first_step_is_expected_in_the_order_of_registration(units: list[int]) -> None:
    forward, _ = run_step(Order(units), units)
    assert forward == tails(units)


def test_a_unit_that_was_never_seen_is_expected_by_nobody_and_does_no_harm() -> None:
    order = Order([0, 1, 2])
    assert order.visit_forward(0) == [1, 2]
    assert order.visit_forward(7) is None
    assert order.visit_forward(1) == [2]


def test_a_unit_that_is_skipped_does_not_spoil_what_is_expected_after_it() -> None:
    order = Order([0, 1, 2, 3])
    order.visit_forward(0)
    assert order.visit_forward(2) == [3]


@given(orders, st.lists(unit_ids, min_size=1, max_size=12))
def test_evaluation_does_not_change_what_training_expects(
    evaluated: list[int], units: list[int]
) -> None:
    order = Order(range(8))
    run_step(order, units)
    for unit in evaluated:
        order.visit_forward(unit)
    order.end_step()
    forward, _ = run_step(order, units)
    assert forward == tails(units)


@given(st.lists(unit_ids, min_size=1, max_size=12))
def test_a_step_without_a_visit_forgets_nothing(units: list[int]) -> None:
    order = Order(range(8))
    run_step(order, units)
    order.begin_backward([])
    order.end_step()
    forward, _ = run_step(order, units)
    assert forward == tails(units)
