"""Which rank owns each matrix under layout ``matrices``, as `layout.owners` deals them."""

from collections.abc import Sequence
from math import prod

from shardwise.layout.segments import balanced
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import UnitFacts


def owners_in(
    units: Sequence[UnitFacts], candidate: Candidate, rank: int | None
) -> list[list[int | None]]:
    """Return who owns each parameter, as `layout.owners` has it; the rank with most may be 0.

    Pieces of tensors, and experts, which lie on axes of their own, have no owner.
    """
    found: list[list[int | None]] = [[None] * len(unit.params) for unit in units]
    if candidate.layout != "matrices" or candidate.tp > 1:
        return found
    places = [
        (number, place)
        for number, unit in enumerate(units)
        for place, p in enumerate(unit.params)
        if unit.experts_over is None and len(p.shape) == 2 and p.requires_grad
    ]
    numels = [prod(units[number].params[place].shape) for number, place in places]
    owners = balanced(numels, candidate.num_shards)
    loads = [0] * candidate.num_shards
    for owner, numel in zip(owners, numels, strict=True):
        loads[owner] += numel
    most = loads.index(max(loads)) if rank is None else 0
    swapped = {0: most, most: 0}
    for (number, place), owner in zip(places, owners, strict=True):
        found[number][place] = swapped.get(owner, owner)
    return found
