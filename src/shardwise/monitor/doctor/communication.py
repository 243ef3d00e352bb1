"""Rules about waits for communication: of all ranks, of pairs of ranks, of an axis."""

from collections.abc import Callable, Sequence
from statistics import median

from shardwise.monitor.doctor.evidence import (
    NotEnough,
    check_cores,
    core_wait_s,
    is_cpu,
    noise_s,
    num_shards,
    steady,
    step_s,
    typical,
)
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.metrics import (
    EXPOSED_MS,
    MAX_ACTIVE_SHARE,
    NUM_COLLECTIVES,
    WAITED_MS,
    axis_mib,
    axis_s,
)
from shardwise.monitor.record import RunFacts, RunRecord, StepLine

_EXPOSED = 15.0  # percent of the step
_CPU_COLLECTIVE_S = 0.02  # longer than a small one takes between processes of one host
_TIMES_CORE_WAIT = 2.0
_FITS = 70.0  # percent of the device
_SLOW_RATE, _MIN_AXIS_MIB = 0.3, 1.0
_SLOW_LINK, _TIMES_OTHERS, _LINK_LINES = 0.1, 3.0, 0.6
Pair = tuple[int, int]


def exposed_communication(run: RunRecord) -> Finding | None:
    """Find steps that wait for collectives, on the rank that waits least."""
    facts, lines = run.facts, steady(run)
    # A collective may run while the loop does other work; then the rank does not wait for it.
    exposed_s = min(typical(lines, name, "min") for name in (EXPOSED_MS, WAITED_MS)) / 1e3
    share = 100 * exposed_s / step_s(lines)
    collectives = typical(lines, NUM_COLLECTIVES, "max") or 1
    if share < _EXPOSED or exposed_s < noise_s(facts):
        return None
    if is_cpu(facts) and exposed_s / collectives < _CPU_COLLECTIVE_S:
        return None
    check_cores(run, lines, exposed_s, _TIMES_CORE_WAIT)
    evidence = {
        "exposed, % of the step": share,
        "exposed, s/step": exposed_s,
        "collectives in a step": collectives,
        "waits for a core, s/step": core_wait_s(lines),
        "threshold, %": _EXPOSED,
    }
    case, changes = "SW012", []
    if facts.stage == 3 and num_shards(facts) > 1 and (percent := _memory_at_stage_2(run, lines)):
        case = "SW005.lower"
        evidence |= {"memory at stage 2, % of the device": percent, "may be, %": _FITS}
    elif (hosts := len(set(facts.hosts))) > 1 and num_shards(facts) == facts.num_ranks:
        changes.append(Change("dp_replicate", 1, hosts))
    gain = exposed_s * (1 - _EXPOSED / share), exposed_s
    return make_finding(case, evidence, *changes, gain=gain, ms=1e3 * exposed_s)


def _memory_at_stage_2(run: RunRecord, lines: Sequence[StepLine]) -> float | None:
    """Return the percents of the device that would be used; None if they are too many.

    On a CPU it is None: ranks share the memory of the host with other processes.
    """
    facts = run.facts
    if is_cpu(facts):
        return None
    more = 100 * facts.full_bytes * (1 - 1 / num_shards(facts)) / facts.device_bytes
    percent = typical(lines, MAX_ACTIVE_SHARE, "max") + more
    return percent if percent < _FITS else None


def slow_axis(run: RunRecord) -> Finding | None:
    """Find an axis over which collectives are much slower; of accelerators, which time them."""
    facts = run.facts
    if is_cpu(facts):
        return _slow_by_waits(run)
    lines, rates = steady(run), {}
    for axis in facts.degrees:
        seconds = typical(lines, axis_s(axis), "min", 0.0)
        sent = typical(lines, axis_mib(axis), default=0.0)
        if sent >= _MIN_AXIS_MIB and seconds > 0:
            rates[axis] = (sent / seconds, seconds)
    if len(rates) < 2:
        return None
    fastest, slowest = max(rates, key=rates.__getitem__), min(rates, key=rates.__getitem__)
    (rate, seconds), best = rates[slowest], rates[fastest][0]
    exposed_s = typical(lines, EXPOSED_MS, "min") / 1e3
    lost_s = min(exposed_s, seconds * (1 - rate / best))
    if rate > _SLOW_RATE * best or lost_s < _EXPOSED / 100 * step_s(lines):
        return None
    return make_finding(
        "SW014.rates",
        {
            "slow, MiB/s": rate,
            "fast, MiB/s": best,
            "ratio": rate / best,
            "threshold": _SLOW_RATE,
            "s/step": seconds,
        },
        gain=(0.0, lost_s),
        slowest=slowest,
        fastest=fastest,
    )


def _waits_of_pairs(run: RunRecord) -> list[dict[Pair, float]]:
    """Return for each steady line the shorter of the two waits of each pair of ranks, in ms."""
    found = []
    for line in steady(run):
        rows, waits = line.waited_for, {}
        for one, row in rows.items():
            for other, ms in row.items():
                if one < other:
                    waits[one, other] = min(ms, rows.get(other, {}).get(one, 0.0))
        found.append(waits)
    if not any(found):
        raise NotEnough("waits between ranks, which only the gloo transport reports")
    return found


def slow_pair(run: RunRecord) -> Finding | None:
    """Find two ranks that wait for each other's messages while other pairs do not."""
    facts = run.facts
    if facts.num_ranks < 3:
        return None
    lines, whole_ms = steady(run), 1e3 * step_s(steady(run))
    least_ms = max(_SLOW_LINK * whole_ms, 1e3 * noise_s(facts))
    found: dict[Pair, list[tuple[float, float]]] = {}
    for waits in _waits_of_pairs(run):
        ranked = sorted(waits, key=lambda pair: -waits[pair])
        ms, others = [*(waits[pair] for pair in ranked[:2]), 0.0, 0.0][:2]
        if ms > least_ms and ms > _TIMES_OTHERS * others:
            found.setdefault(ranked[0], []).append((ms, others))
    pair = max(found, key=lambda each: len(found[each]), default=None)
    if pair is None or len(found[pair]) < _LINK_LINES * len(lines):
        return None
    ms, others = (median(values) for values in zip(*found[pair], strict=True))
    check_cores(run, lines, ms / 1e3)
    hosts = [facts.hosts[rank] for rank in pair if rank < len(facts.hosts)]
    return make_finding(
        "SW013",
        {
            "ms/step for each other": ms,
            "ms/step of the next pair": others,
            "share of the step": ms / whole_ms,
            "threshold": _SLOW_LINK,
            "other rank": pair[1],
        },
        gain=(ms - others) / 1e3,
        rank=pair[0],
        one=pair[0],
        hosts=f" ({' and '.join(hosts)})" if len(set(hosts)) > 1 else "",
    )


def _slow_by_waits(run: RunRecord) -> Finding | None:
    """Find pairs of ranks over one axis, or on different hosts, that wait longer than others."""
    lines, whole_ms = steady(run), 1e3 * step_s(steady(run))
    for which, is_far in _kinds_of_pairs(run.facts).items():
        apart, within = [], []
        for waits in _waits_of_pairs(run):
            far_first = sorted((ms for pair, ms in waits.items() if is_far(pair)), reverse=True)
            apart.append(far_first[1] if len(far_first) > 1 else 0.0)  # one pair is no axis
            within.append(max((ms for pair, ms in waits.items() if not is_far(pair)), default=0.0))
        far, near = median(apart), median(within)
        least = (_SLOW_LINK * whole_ms, 1e3 * noise_s(run.facts), _TIMES_OTHERS * near)
        if far >= max(*least, 1e3 * core_wait_s(lines)):
            return make_finding(
                "SW014.waits",
                {
                    "ms/step over it": far,
                    "ms/step of others": near,
                    "share of the step": far / whole_ms,
                    "threshold": _SLOW_LINK,
                },
                gain=(0.0, (far - near) / 1e3),
                which=which,
            )
    return None


def _kinds_of_pairs(facts: RunFacts) -> dict[str, Callable[[Pair], bool]]:
    """Return a predicate on pairs of ranks for each part of the network that may be slow."""
    found: dict[str, Callable[[Pair], bool]] = {}
    if 1 < len(set(facts.hosts)) < facts.num_ranks:
        found["on different hosts"] = lambda pair: facts.hosts[pair[0]] != facts.hosts[pair[1]]
    shards, copies = num_shards(facts), facts.degrees.get("replicate", 1)
    if min(shards, copies) > 1 and shards * copies == facts.num_ranks:
        found["of the replicate axis"] = lambda pair: pair[0] // shards != pair[1] // shards
        found["of the shard axis"] = lambda pair: pair[0] // shards == pair[1] // shards
    return found
