"""The order in which units are used, learnt anew in every step.

Nothing here can be invalidated: a step that takes another path is recorded as it goes, and is the
prediction for the next one; a unit that the prediction does not hold is simply not preceded by a
prefetch.
"""

from collections.abc import Iterable, Sequence
from typing import Any


class Order:
    """Predicts which units come next in either direction, from the order of the step before.

    ``forward`` is the order in which a forward pass is expected to need the units; ``seen`` that of
    the backward pass under way, or empty.
    """

    def __init__(self, registration_order: Sequence[int]) -> None:
        self.forward = list(registration_order)
        self._backward: list[int] = []
        self.seen: list[int] = []
        self._forward_at = -1
        self._backward_at = -1

    def visit_forward(self, unit: int) -> list[int] | None:
        """Note that a unit runs forward; return the units expected after it, nearest first.

        None when the unit was not expected at all.
        """
        self._forward_at = _find(self.forward, unit, self._forward_at + 1)
        return None if self._forward_at < 0 else self.forward[self._forward_at + 1 :]

    def begin_backward(self, forward: Sequence[int]) -> None:
        """Fix the backward prediction: the order of the forward pass before it, reversed."""
        self.seen = list(forward)
        self._backward = self.seen[::-1]
        self._backward_at = -1

    def visit_backward(self, unit: int) -> list[int] | None:
        """Note that a unit's backward begins; return the units expected after it."""
        self._backward_at = _find(self._backward, unit, self._backward_at + 1)
        return None if self._backward_at < 0 else self._backward[self._backward_at + 1 :]

    def end_step(self) -> None:
        """Make what was seen the prediction for the next step."""
        if self.seen:
            self.forward, self.seen = self.seen, []
        self._forward_at = self._backward_at = -1


def _find(order: Sequence[int], unit: int, start: int) -> int:
    """Return the next place of ``unit`` at or after ``start``, else its first, else -1."""
    for begin in (start, 0):
        try:
            return order.index(unit, begin)
        except ValueError:
            continue
    return -1


def in_forward_order(units: Iterable[Any]) -> list[Any]:
    """Return the units in the order in which each model's next forward pass needs them."""
    places: dict[int, tuple[int, dict[int, int]]] = {}
    for unit in units:
        if id(unit.scheduler) not in places:
            known = [] if unit.scheduler is None else unit.scheduler.order.forward  # it has not run
            order = {index: place for place, index in enumerate(known)}
            places[id(unit.scheduler)] = len(places), order

    def turn(unit: Any) -> tuple[int, int, int]:
        model, order = places[id(unit.scheduler)]
        return model, order.get(unit.index, len(order)), unit.index

    return sorted(units, key=turn)
