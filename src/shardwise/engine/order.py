"""The order in which units are used, learnt anew in every step.

Nothing here can be invalidated: a step that takes another path is recorded as it goes, and is the
prediction for the next one; a unit that the prediction does not hold is simply not preceded by a
prefetch.
"""

from collections.abc import Sequence


class Order:
    """Records which units ran forward, and predicts which come next in either direction."""

    def __init__(self, registration_order: Sequence[int]) -> None:
        self._forward = list(registration_order)
        self._backward: list[int] = []
        self.recorded: list[int] = []
        self._forward_at = -1
        self._backward_at = -1

    def visit_forward(self, unit: int, records: bool) -> list[int] | None:
        """Note that a unit runs forward; return the units expected after it, nearest first.

        None when the unit was not expected at all.
        """
        if records:
            self.recorded.append(unit)
        self._forward_at = _find(self._forward, unit, self._forward_at + 1)
        return None if self._forward_at < 0 else self._forward[self._forward_at + 1 :]

    def begin_backward(self) -> None:
        """Fix the backward prediction: this step's forward order, reversed."""
        self._backward = self.recorded[::-1]
        self._backward_at = -1

    def visit_backward(self, unit: int) -> list[int] | None:
        """Note that a unit's backward begins; return the units expected after it."""
        self._backward_at = _find(self._backward, unit, self._backward_at + 1)
        return None if self._backward_at < 0 else self._backward[self._backward_at + 1 :]

    def forget(self) -> None:
        """Drop what was recorded for a backward pass that will not come."""
        self.recorded = []

    def end_step(self) -> None:
        """Make what was recorded the prediction for the next step."""
        if self.recorded:
            self._forward, self.recorded = self.recorded, []
        self._forward_at = self._backward_at = -1


def _find(order: Sequence[int], unit: int, start: int) -> int:
    """Return the next place of ``unit`` at or after ``start``, else its first, else -1."""
    for begin in (start, 0):
        try:
            return order.index(unit, begin)
        except ValueError:
            continue
    return -1
