"""All rules, asked one after the other; what one finding explains is not told again."""

from collections.abc import Callable

from shardwise.monitor.doctor import (
    checkpoints,
    communication,
    ends,
    memory,
    numbers,
    ranks,
    units,
)
from shardwise.monitor.doctor.evidence import NotEnough
from shardwise.monitor.findings import Abstention, Diagnosis, Finding, worst_first
from shardwise.monitor.record import RunRecord

Rule = Callable[[RunRecord], list[Finding]]
RULES: tuple[tuple[Rule, tuple[str, ...]], ...] = (
    (units.not_sharded, ("SW001",)),
    (units.one_unit, ("SW002",)),
    (units.too_fine, ("SW003",)),
    (units.largest_unit, ("SW004",)),
    (units.padding, ("SW006",)),
    (communication.small_buckets, ("SW010",)),
    (communication.large_buckets, ("SW011",)),
    (communication.exposed_communication, ("SW012", "SW005")),
    (communication.slow_pair, ("SW013",)),
    (communication.slow_axis, ("SW014",)),
    (ranks.straggler, ("SW020",)),
    (ranks.data_loader, ("SW021",)),
    (ranks.uneven_batches, ("SW024",)),
    (ends.no_step, ("SW022",)),
    (ends.died, ("SW023",)),
    (memory.what_does_not_fit, ("SW030", "SW005")),
    (memory.fragmentation, ("SW031",)),
    (memory.cost_of_offload, ("SW032", "SW033")),
    (numbers.half_precision, ("SW040",)),
    (numbers.not_finite, ("SW041",)),
    (numbers.lost_updates, ("SW042",)),
    (checkpoints.slow_saves, ("SW050",)),
    (checkpoints.other_saves, ("SW050",)),
    (checkpoints.no_saves, ("SW051",)),
)
# A finding of the first kind explains one of the others, of the same rank where both name one.
_EXPLAINS = {
    "SW013": ("SW012", "SW020"),
    "SW014": ("SW012",),
    "SW021": ("SW020",),
    "SW023": ("SW022",),
    "SW024": ("SW012", "SW020"),
    "SW050": ("SW020",),
}


def diagnose(run: RunRecord) -> Diagnosis:
    """Ask every rule about a run."""
    found: list[Finding] = []
    abstentions: list[Abstention] = []
    judged: list[str] = []
    for rule, codes in RULES:
        try:
            found += rule(run)
            judged += codes
        except NotEnough as missing:
            abstentions += [Abstention(code, str(missing)) for code in codes]
    told = [f for f in found if not any(_explains(other, f) for other in found)]
    left_out = set(judged)
    kept = tuple(a for a in abstentions if a.code not in left_out)
    return Diagnosis(worst_first(told), kept, tuple(dict.fromkeys(judged)))


def _explains(cause: Finding, other: Finding) -> bool:
    if other.code not in _EXPLAINS.get(cause.code, ()):
        return False
    return cause.code not in ("SW021", "SW050") or cause.rank == other.rank
