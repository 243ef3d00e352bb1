"""Units in one order on all ranks, whatever a rank runs.

Note [Ranks that skip layers]
Ranks need not run the same units (layerdrop, stochastic depth, a head per task, experts), and a
collective that one rank starts must be started by all, on NCCL in one order. Where full parameters
stay (stages 0 to 2), gathers and reductions therefore follow an order that all ranks share, not the
order in which a rank runs: a unit whose turn has not come waits, and one that does not run takes
part with zeros. The order is that of registration until the first backward pass is over, then the
one that rank 0 has seen in it. Where all ranks run all units in one order, nothing waits.
"""

from collections.abc import Iterable, Sequence


class Turns:
    """Hands units on in one order, whatever order they come in; once per pass."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = list(order)
        self._places = {index: place for place, index in enumerate(order)}
        self._next = 0
        self._here: set[int] = set()

    def begin(self) -> None:
        """Begin a pass: every unit is waited for, as a gradient may come late for any of them."""
        self._next = 0
        self._here.clear()

    def arrive(self, index: int) -> list[int]:
        """Note that a unit has come; return those whose turn it is now, in order.

        A unit that has had its turn, and comes again, is handed on at once.
        """
        if self._places[index] < self._next:
            return [index]
        self._here.add(index)
        begin = self._next
        while self._next < len(self._order) and self._order[self._next] in self._here:
            self._next += 1
        return self._order[begin : self._next]

    def waits(self, index: int) -> bool:
        """Tell whether the unit has come, and its turn has not."""
        return index in self._here and self._places[index] >= self._next

    def end(self) -> list[int]:
        """Return all whose turn has not come, in order, and end the pass."""
        rest = self._order[self._next :]
        self._next = len(self._order)
        return rest


def complete(order: Iterable[int], indices: Sequence[int]) -> list[int]:
    """Return ``order`` without repetitions, then those of ``indices`` that it does not hold."""
    return list(dict.fromkeys([*order, *indices]))
