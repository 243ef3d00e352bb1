"""Which units to gather ahead: a pure function of the expected order and a byte budget."""

from collections.abc import Callable, Collection, Sequence


def units_to_prefetch(
    upcoming: Sequence[int],
    full_bytes: Callable[[int], int],
    ahead: Collection[int],
    is_resident: Callable[[int], bool],
    budget_bytes: int,
) -> list[int]:
    """Return the units to start gathering now, in order.

    ``upcoming`` are the units expected next, nearest first. ``ahead`` were gathered ahead and not
    used yet, and count against the budget; resident units hold present values and cost nothing.
    Gathering stops at the first unit that does not fit: no later unit overtakes a nearer one.
    """
    left = budget_bytes - sum(full_bytes(unit) for unit in ahead)
    chosen: list[int] = []
    for unit in upcoming:
        if unit in ahead or unit in chosen or is_resident(unit):
            continue
        left -= full_bytes(unit)
        if left < 0:
            break
        chosen.append(unit)
    return chosen
