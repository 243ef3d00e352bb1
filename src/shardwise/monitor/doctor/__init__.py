"""The doctor: rules that judge an observed run, a row for each."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from shardwise.monitor.doctor import communication, ends, memory, numbers, ranks, sharding
from shardwise.monitor.doctor.evidence import NotEnough, several_ranks
from shardwise.monitor.findings import Abstention, Diagnosis, Finding, worst_first
from shardwise.monitor.record import RunFacts, RunRecord


class _Rule(NamedTuple):
    """A row: the codes that a rule finds, the rule, and the runs that it is asked about."""

    codes: tuple[str, ...]
    find: Callable[[RunRecord], Finding | None]
    applies_to: Callable[[RunFacts], bool] = lambda facts: True


_RULES = (
    _Rule(("SW001",), sharding.not_sharded, several_ranks),
    _Rule(("SW002",), sharding.one_unit, several_ranks),
    _Rule(("SW003",), sharding.too_fine, several_ranks),
    _Rule(("SW004",), sharding.largest_unit, several_ranks),
    _Rule(("SW006",), sharding.padding),
    _Rule(("SW010",), sharding.small_buckets, several_ranks),
    _Rule(("SW011",), sharding.large_bucket, several_ranks),
    _Rule(("SW011",), sharding.large_prefetch, several_ranks),
    _Rule(("SW012", "SW005"), communication.exposed_communication, several_ranks),
    _Rule(("SW013",), communication.slow_pair, several_ranks),
    _Rule(("SW014",), communication.slow_axis, several_ranks),
    _Rule(("SW020",), ranks.straggler, several_ranks),
    _Rule(("SW021",), ranks.data_loader),
    _Rule(("SW024",), ranks.uneven_batches, several_ranks),
    _Rule(("SW022",), ends.no_step),
    _Rule(("SW023",), ends.died),
    _Rule(("SW030", "SW005"), memory.full_memory),
    _Rule(("SW031",), memory.fragmentation),
    _Rule(("SW032", "SW033"), memory.cost_of_offload),
    _Rule(("SW040",), numbers.half_precision),
    _Rule(("SW041",), numbers.not_finite),
    _Rule(("SW042",), numbers.lost_updates),
    _Rule(("SW050",), memory.slow_saves),
    _Rule(("SW050",), memory.other_saves),
    _Rule(("SW051",), memory.no_saves),
)
# A finding of the first code explains one of the others, of the same rank if both name one.
_EXPLAINS = {
    "SW013": ("SW012", "SW020"),
    "SW014": ("SW012",),
    "SW021": ("SW020",),
    "SW023": ("SW022",),
    "SW024": ("SW012", "SW020"),
    "SW050": ("SW020",),
}


def diagnose(run: RunRecord) -> Diagnosis:
    """Judge a run by all rules; leave out findings that another one explains.

    **Cost** some 100 microseconds for a run of a few hundred lines.
    """
    found: list[Finding] = []
    abstentions: list[Abstention] = []
    judged: list[str] = []
    for rule in _RULES:
        try:
            finding = rule.find(run) if rule.applies_to(run.facts) else None
            judged += rule.codes
        except NotEnough as missing:
            abstentions += [Abstention(code, str(missing)) for code in rule.codes]
            continue
        if finding is not None:
            found.append(replace(finding, step=run.steps[-1].step if run.steps else None))
    kept = [f for f in found if not any(_explains(other, f) for other in found)]
    missing_of = tuple(each for each in abstentions if each.code not in judged)
    return Diagnosis(worst_first(kept), missing_of, tuple(dict.fromkeys(judged)))


def _explains(cause: Finding, other: Finding) -> bool:
    if other.code not in _EXPLAINS.get(cause.code, ()):
        return False
    return cause.code not in ("SW021", "SW050") or cause.rank == other.rank
