"""Rules about waits of ranks: for communication, for late ranks, for batches."""

from collections import defaultdict
from collections.abc import Callable
from statistics import median

from shardwise.monitor import metrics as m
from shardwise.monitor.doctor.evidence import (
    Evidence,
    Lines,
    NotEnough,
    Which,
    count_steps,
    figure,
    total,
)
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.record import RunFacts, StepLine

_EXPOSED = 15.0  # percent of the step
_CPU_COLLECTIVE_S = 0.02  # longer than a small one takes between processes of one host
_TIMES_CORE_WAIT = 2.0
_FITS = 70.0  # percent of the device
_SLOW_RATE, _MIN_AXIS_MIB = 0.3, 1.0
_SLOW_LINK, _TIMES_OTHERS, _LINK_LINES = 0.1, 3.0, 0.6
_SKEW = 0.1  # of the step
_CORE_NOISE = 0.3  # of the waits for a core
_LATE_STEPS = 12  # at least, before a rank may be late in fewer than half of them
_LATE_LINES, _LATE_SHARE = 3, 0.25  # of those judged: fewer may be chance
_EXPLAINS = 0.5  # of the skew, by the phase that takes longest on the rank
_LATE_OF_RUN, _DOMINATES, _ALMOST_ALL = 0.04, 3.0, 0.8
_UNEVEN_WEIGHTS = 0.25
_DATA = 0.1  # of the step
_SLOW_LINES = 0.2  # of the lines
_CAUSES = {
    m.COMPUTE_S: "computing",
    m.DATA_S: "waiting for data",
    m.OUTSIDE_S: "outside of the model (the loop itself, logging, evaluation, garbage collection)",
    m.OPTIMIZER_S: "in the optimizer's step",
    m.STALL_S: "in saves",
    m.CORE_WAIT_S: "waiting for a core, which other processes use",
    m.COLLECTIONS: "in Python's garbage collection (gc.collect(), or many objects)",
}
Pair = tuple[int, int]


def exposed_communication(e: Evidence) -> Finding | None:
    """Find steps that wait for collectives, on the rank that waits least."""
    facts = e.facts
    # A collective may run while the loop does other work; then the rank does not wait for it.
    exposed_s = min(e.typical(name, "min") for name in (m.EXPOSED_MS, m.WAITED_MS)) / 1e3
    share = 100 * exposed_s / e.step_s
    collectives = e.typical(m.NUM_COLLECTIVES, "max") or 1
    if share < _EXPOSED or exposed_s < e.noise_s:
        return None
    if e.is_cpu and exposed_s / collectives < _CPU_COLLECTIVE_S:
        return None
    e.check_cores(exposed_s, _TIMES_CORE_WAIT)
    evidence = {
        "exposed, % of the step": share,
        "exposed, s/step": exposed_s,
        "collectives in a step": collectives,
        "waits for a core, s/step": e.core_wait_s,
        "threshold, %": _EXPOSED,
    }
    case, changes = "SW012", []
    # On a CPU ranks share the host's memory with other processes.
    may_keep = facts.stage == 3 and e.num_shards > 1 and not e.is_cpu
    more = 100 * facts.full_bytes * (1 - 1 / e.num_shards) / (facts.device_bytes or 1)
    if may_keep and (percent := e.typical(m.MAX_ACTIVE_SHARE, "max") + more) < _FITS:
        case = "SW005.lower"
        evidence |= {"memory at stage 2, % of the device": percent, "may be, %": _FITS}
    elif (hosts := len(set(facts.hosts))) > 1 and e.num_shards == facts.num_ranks:
        changes.append(Change("dp_replicate", 1, hosts))
    gain = exposed_s * (1 - _EXPOSED / share), exposed_s
    return make_finding(case, evidence, *changes, gain=gain, ms=1e3 * exposed_s)


def slow_axis(e: Evidence) -> Finding | None:
    """Find an axis over which collectives are much slower; of accelerators, which time them."""
    if e.is_cpu:
        return _slow_by_waits(e)
    rates = []
    for axis in e.facts.degrees if e.lines else ():
        seconds = e.typical(m.AXIS_S.format(axis), "min", 0.0)
        sent = e.typical(m.AXIS_MIB.format(axis), default=0.0)
        if sent >= _MIN_AXIS_MIB and seconds > 0:
            rates.append((sent / seconds, seconds, axis))
    if len(rates) < 2:
        return None
    (rate, seconds, slowest), (best, _, fastest) = min(rates), max(rates)
    lost_s = min(e.typical(m.EXPOSED_MS, "min") / 1e3, seconds * (1 - rate / best))
    if rate > _SLOW_RATE * best or lost_s < _EXPOSED / 100 * e.step_s:
        return None
    evidence = {"slow, MiB/s": rate, "fast, MiB/s": best, "ratio": rate / best}
    evidence |= {"threshold": _SLOW_RATE, "s/step": seconds}
    gain = 0.0, lost_s
    return make_finding("SW014.rates", evidence, gain=gain, slowest=slowest, fastest=fastest)


def _waits_of_pairs(e: Evidence) -> list[dict[Pair, float]]:
    """Return for each steady line the shorter of the two waits of each pair of ranks, in ms."""
    found = []
    for line in e.lines:
        rows, waits = line.waited_for, {}
        for one, row in rows.items():
            for other, ms in row.items():
                if one < other:
                    waits[one, other] = min(ms, rows.get(other, {}).get(one, 0.0))
        found.append(waits)
    if not any(found):
        raise NotEnough("waits between ranks, which only the gloo transport reports")
    return found


def slow_pair(e: Evidence) -> Finding | None:
    """Find two ranks that wait for each other's messages while other pairs do not."""
    facts = e.facts
    if facts.num_ranks < 3:
        return None
    whole_ms = 1e3 * e.step_s
    least_ms = max(_SLOW_LINK * whole_ms, 1e3 * e.noise_s)
    found: dict[Pair, list[tuple[float, float]]] = {}
    for waits in _waits_of_pairs(e):
        ranked = sorted(waits, key=lambda pair: -waits[pair])
        ms, others = [*(waits[pair] for pair in ranked[:2]), 0.0, 0.0][:2]
        if ms > least_ms and ms > _TIMES_OTHERS * others:
            found.setdefault(ranked[0], []).append((ms, others))
    pair = max(found, key=lambda each: len(found[each]), default=None)
    if pair is None or len(found[pair]) < _LINK_LINES * len(e.lines):
        return None
    ms, others = (median(values) for values in zip(*found[pair], strict=True))
    e.check_cores(ms / 1e3)
    hosts = [facts.hosts[rank] for rank in pair if rank < len(facts.hosts)]
    where = f" ({' and '.join(hosts)})" if len(set(hosts)) > 1 else ""
    evidence = {"ms/step for each other": ms, "ms/step of the next pair": others}
    evidence |= {"share of the step": ms / whole_ms, "threshold": _SLOW_LINK, "other rank": pair[1]}
    gain, one = (ms - others) / 1e3, pair[0]
    return make_finding("SW013", evidence, gain=gain, rank=one, one=one, hosts=where)


def _slow_by_waits(e: Evidence) -> Finding | None:
    """Find pairs of ranks over one axis, or on different hosts, that wait longer than others."""
    whole_ms = 1e3 * e.step_s
    for which, is_far in _kinds_of_pairs(e.facts).items():
        far_ms, near_ms = [], []
        for waits in _waits_of_pairs(e):
            far_first = sorted((ms for pair, ms in waits.items() if is_far(pair)), reverse=True)
            far_ms.append(far_first[1] if len(far_first) > 1 else 0.0)  # one pair is no axis
            near_ms.append(max((ms for pair, ms in waits.items() if not is_far(pair)), default=0.0))
        far, near = median(far_ms), median(near_ms)
        least = _SLOW_LINK * whole_ms, 1e3 * e.noise_s, _TIMES_OTHERS * near, 1e3 * e.core_wait_s
        if far >= max(least):
            evidence = {"ms/step over it": far, "ms/step of others": near}
            evidence |= {"share of the step": far / whole_ms, "threshold": _SLOW_LINK}
            gain = 0.0, (far - near) / 1e3
            return make_finding("SW014.waits", evidence, gain=gain, which=which)
    return None


def _kinds_of_pairs(facts: RunFacts) -> dict[str, Callable[[Pair], bool]]:
    """Return a predicate on pairs of ranks for each part of the network that may be slow."""
    found: dict[str, Callable[[Pair], bool]] = {}
    if 1 < len(set(facts.hosts)) < facts.num_ranks:
        found["on different hosts"] = lambda pair: facts.hosts[pair[0]] != facts.hosts[pair[1]]
    shards, copies = facts.degrees.get("shard", 1), facts.degrees.get("replicate", 1)
    if min(shards, copies) > 1 and shards * copies == facts.num_ranks:
        found["of the replicate axis"] = lambda pair: pair[0] // shards != pair[1] // shards
        found["of the shard axis"] = lambda pair: pair[0] // shards == pair[1] // shards
    return found


# -- late ranks and batches
def _of_others(facts: RunFacts) -> tuple[Which, Which]:
    """Return which figures tell the longest and the usual value of all ranks but one."""
    return ("max", "min") if facts.num_ranks == 2 else ("median", "median")


def _has_unknown_axes(facts: RunFacts) -> bool:
    """Tell whether ranks differ by more than their data: by pipeline stages, experts and others."""
    return not set(facts.degrees) <= {"replicate", "shard"}


def straggler(e: Evidence) -> Finding | None:
    """Find the rank that waits least while all others wait, in all steps or in some."""
    facts = e.facts
    if (finding := _by_core_waits(e) or _by_late_steps(e)) is not None:
        return finding
    others, usual = _of_others(facts)
    all_lines, lines, share = _late_lines(e, others)
    if not lines:
        return None
    whole_s = e.typical(m.STEP_S, lines=all_lines)
    least_s = e.typical(m.WAITED_MS, "min", lines=lines) / 1e3
    skew_s = e.typical(m.WAITED_MS, others, lines=lines) / 1e3 - least_s
    rank = e.same_rank(m.WAITED_MS, "min", lines)
    if rank is None or share * skew_s < max(_SKEW * whole_s, e.noise_s):
        return None
    longer = {
        name: e.typical(name, "max", lines=lines) - e.typical(name, usual, lines=lines)
        for name in _CAUSES
        if all(name in line.metrics for line in lines) and e.same_rank(name, "max", lines) == rank
    }
    cause = max(longer, key=lambda name: longer[name], default=None)
    e.check_cores(skew_s, _TIMES_CORE_WAIT, lines)
    if cause is None or longer[cause] < _EXPLAINS * skew_s:
        if e.is_cpu or _has_unknown_axes(facts):
            raise NotEnough(f"the phase that takes longer on rank {rank}, for which others wait")
        cause = None
    evidence = {
        "skew, s/step": share * skew_s,
        "share of the step": share * skew_s / whole_s,
        "share of late lines": share,
        "threshold": _SKEW,
        "waits itself, s/step": least_s,
        **{f"longer: {name}": seconds for name, seconds in longer.items() if seconds > 0},
    }
    return make_finding(
        "SW020",
        evidence,
        gain=share * skew_s,
        rank=rank,
        number=rank,
        host=facts.hosts[rank] if rank < len(facts.hosts) else "an unknown host",
        late_s=skew_s,
        often="each step" if share == 1 else f"{share:.0%} of the steps",
        doing=f": it is {longer[cause]:.3g} s longer {_CAUSES[cause]}" if cause else "",
    )


def latest_rank(e: Evidence, *causes: str) -> tuple[int, float, int] | None:
    """Return the rank that others wait for clearly more than for any other, if there is one.

    With it come the seconds in all, and the number of steps; see Note [Late steps].
    """
    seconds, counts = e.late_seconds(*causes)
    if not seconds or _has_unknown_axes(e.facts):
        return None
    rank, *rest = sorted(seconds, key=lambda each: -seconds[each])
    late_s, count = seconds[rank], counts[rank]
    second_s = max((seconds[other] for other in rest), default=0.0)
    steps, whole_s = _size_of(e.warm_lines)
    is_rare = count < (_LATE_LINES if steps >= _LATE_STEPS else max(_LATE_LINES, steps / 2))
    is_rare = is_rare or late_s < _LATE_OF_RUN * whole_s
    # A thread of the rank that waits for a core may hold a lock that the training waits for.
    noise_s = max(e.noise_s, _CORE_NOISE * e.core_wait_s if e.is_cpu else 0.0)
    if is_rare or late_s < _DOMINATES * second_s or late_s / count < noise_s:
        return None
    return rank, late_s, count


def _by_late_steps(e: Evidence) -> Finding | None:
    found = latest_rank(e)
    if found is None:
        return None
    rank, late_s, count = found
    causes: dict[str, float] = defaultdict(float)
    for line in e.warm_lines:
        if rank in line.late:
            for cause, seconds in line.late[rank].seconds.items():
                causes[cause] += seconds
    worst, (steps, whole_s) = max(causes, key=causes.__getitem__), _size_of(e.warm_lines)
    if worst == m.DATA_S:
        return None  # the rule about loaders names the rank
    evidence = {
        "late, s": late_s,
        "share of the run": late_s / whole_s,
        "threshold": _LATE_OF_RUN,
        "late steps": count,
        "steps": steps,
        **{f"longer: {name}": seconds for name, seconds in causes.items()},
    }
    # Almost every step is each step.
    often = "each step" if count > _ALMOST_ALL * steps else f"{count} of {steps} steps"
    return _straggler(e, evidence, rank, late_s / count, often, worst, gain=late_s / steps)


def _size_of(lines: Lines) -> tuple[int, float]:
    """Return the number of steps, and their seconds without waits for a core."""
    whole_s = total(lines, m.STEP_S, "median")
    waits = [line for line in lines if m.CORE_WAIT_S in line.metrics]
    return count_steps(lines), max(whole_s - total(waits, m.CORE_WAIT_S, "median"), whole_s / 2)


def _by_core_waits(e: Evidence) -> Finding | None:
    """Find one rank that waits for a core while the others do not: other work is on its cores."""
    if e.facts.num_ranks == 1 or not e.is_cpu:
        return None
    lines = e.lines_with(m.CORE_WAIT_S)
    rank, (_, usual) = e.same_rank(m.CORE_WAIT_S, "max", lines), _of_others(e.facts)
    most_s, usual_s = e.core_wait_s, e.typical(m.CORE_WAIT_S, usual)
    is_long = most_s >= max(_SKEW * e.step_s, e.noise_s)
    if rank is None or not is_long or most_s < _DOMINATES * usual_s:
        return None
    late_s = most_s - usual_s
    # The observer's own thread may wait for a core, and the training not for it.
    waited_s = (e.typical(m.WAITED_MS, usual) - e.typical(m.WAITED_MS, "min")) / 1e3
    if waited_s < _EXPLAINS * late_s or e.same_rank(m.WAITED_MS, "min") != rank:
        return None
    evidence = {"waits for a core, s/step": most_s, "others, s/step": usual_s}
    evidence |= {"share of the step": most_s / e.step_s, "threshold": _SKEW}
    evidence["others wait for the rank, s/step"] = waited_s
    return _straggler(e, evidence, rank, late_s, "each step", m.CORE_WAIT_S, gain=late_s)


def _straggler(
    e: Evidence,
    evidence: dict[str, float],
    rank: int,
    late_s: float,
    often: str,
    cause: str,
    gain: float,
) -> Finding:
    hosts = e.facts.hosts
    return make_finding(
        "SW020",
        evidence,
        gain=gain,
        rank=rank,
        number=rank,
        host=hosts[rank] if rank < len(hosts) else "an unknown host",
        late_s=late_s,
        often=often,
        doing=f": it is longer {_CAUSES[cause]}" if cause in _CAUSES else "",
    )


def _late_lines(e: Evidence, others: Which) -> tuple[Lines, Lines, float]:
    """Return the lines that are judged, those in which a rank is waited for, and their share.

    If most lines are late, all of them count as late, so that the typical one is judged.
    """
    lines = e.lines_with(m.WAITED_MS)

    def is_late(line: StepLine) -> bool:
        waited = figure(line, m.WAITED_MS)
        skew_s = (getattr(waited, others) - waited.min) / 1e3
        return bool(skew_s >= max(_SKEW * figure(line, m.STEP_S).median, e.noise_s))

    late = [line for line in lines if is_late(line)]
    if len(late) > len(lines) / 2:
        return lines, lines, 1.0
    if len(late) < max(_LATE_LINES, _LATE_SHARE * len(lines)):
        return lines, [], 0.0
    return lines, late, len(late) / len(lines)


def uneven_batches(e: Evidence) -> Finding | None:
    """Find waits for ranks whose batches have more tokens, the same rank's or another's each time.

    The expected wait is the time to compute for the tokens that the longest batch has more.
    """
    facts = e.facts
    if _has_unknown_axes(facts):
        return None
    lines = [line for line in e.lines if m.TOKENS_BEHIND_SHARE in line.metrics]
    if not lines:
        raise NotEnough("tokens of each step (a model that is called with token ids)")
    others, usual = _of_others(facts)
    whole_s = e.typical(m.STEP_S, lines=lines)
    waited_s = e.typical(m.WAITED_MS, others, lines=lines) / 1e3
    behind = e.typical(m.TOKENS_BEHIND_SHARE, others, lines=lines) / 100
    expected_s = behind * e.typical(m.COMPUTE_S, usual, lines=lines)
    rank = e.same_rank(m.TOKENS_BEHIND_SHARE, "min", lines)
    is_other = rank is not None and e.same_rank(m.WAITED_MS, "min", lines) != rank
    seconds, _ = e.late_seconds(m.COMPUTE_S)
    if late_s := sum(seconds.values()) / max(count_steps(e.warm_lines), 1):
        waited_s, is_other = (
            late_s,
            rank is not None and max(seconds, key=seconds.__getitem__) != rank,
        )
    core_s = _TIMES_CORE_WAIT * e.core_wait_s if e.is_cpu and not late_s else 0.0
    is_long = waited_s >= max(_SKEW * whole_s, e.noise_s, core_s)
    if behind < _SKEW or (is_other and is_long):
        return None
    if not is_long or expected_s < _EXPLAINS * waited_s:
        return _uneven_weights(e, lines, behind, rank)
    if not late_s:
        e.check_cores(waited_s, _TIMES_CORE_WAIT, lines)
    most = e.typical(m.TOKENS, "max", lines=lines)
    which = f"the batches of rank {rank} have {most:.0f} tokens a step,"
    if rank is None:
        which = "the longest batch of a step, on another rank each time, has"
    evidence = {
        "tokens that the longest batch has more, share": behind,
        "threshold": _SKEW,
        "most tokens of a rank, per step": most,
        "fewest tokens of a rank, per step": e.typical(m.TOKENS, "min", lines=lines),
        "waited, s/step": waited_s,
        "computed meanwhile for more tokens, s/step": expected_s,
    }
    gain, share = min(expected_s, waited_s) * (1 - 1 / facts.num_ranks), waited_s / whole_s
    return make_finding("SW024", evidence, gain=gain, rank=rank, which=which, share=share)


def _uneven_weights(e: Evidence, lines: Lines, behind: float, rank: int | None) -> Finding | None:
    """Find one rank that always has more tokens: means of means weigh its tokens less."""
    if rank is None or behind < _UNEVEN_WEIGHTS:
        return None
    most, least = (e.typical(m.TOKENS, which, lines=lines) for which in ("max", "min"))
    evidence = {"most tokens of a rank, per step": most, "fewest tokens of a rank, per step": least}
    evidence |= {"tokens that the longest batch has more, share": behind}
    evidence["threshold"] = _UNEVEN_WEIGHTS
    return make_finding("SW024.weights", evidence, rank=rank, number=rank, times=most / least)


def data_loader(e: Evidence) -> Finding | None:
    """Find steps that wait for their batch."""
    lines = [line for line in e.lines if m.DATA_S in line.metrics]
    if not any(figure(line, m.DATA_S).max for line in lines):
        raise NotEnough("batches that come through run.data(...)")
    if (late := latest_rank(e, m.DATA_S)) is not None:
        late_rank, late_s, count = late
        steps, run_s = _size_of(e.warm_lines)
        evidence = {"data, s/step": late_s / steps, "late steps": count, "steps": steps}
        evidence |= {"share of the step": late_s / run_s, "threshold": _LATE_OF_RUN}
        waiting = f"rank {late_rank} waits"
        return make_finding("SW021", evidence, gain=late_s / steps, rank=late_rank, waiting=waiting)
    # A mean, as a loader may stall at every few batches; but not of one line alone.
    steps = count_steps(lines)
    data_s, whole_s = total(lines, m.DATA_S) / steps, total(lines, m.STEP_S, "median") / steps
    slow = [n for n in lines if figure(n, m.DATA_S).max > _DATA * figure(n, m.STEP_S).median]
    if data_s < max(_DATA * whole_s, e.noise_s) or len(slow) < _SLOW_LINES * len(lines):
        return None
    e.check_cores(data_s, lines=lines)
    # Of two ranks the median is the mean of both.
    compared: tuple[Which, ...] = ("min",) if e.facts.num_ranks == 2 else ("min", "median")
    are_others_fast = all(e.typical(m.DATA_S, each, lines=lines) < data_s / 3 for each in compared)
    is_one = e.facts.num_ranks > 1 and are_others_fast
    rank = e.same_rank(m.DATA_S, "max", slow) if is_one else None
    waiting = "ranks wait" if rank is None else f"rank {rank} waits"
    evidence = {
        "data, s/step": data_s,
        "on the rank in the middle, s/step": e.typical(m.DATA_S, lines=lines),
        "share of the step": data_s / whole_s,
        "threshold": _DATA,
    }
    gain = data_s - _DATA * whole_s, data_s
    return make_finding("SW021", evidence, gain=gain, rank=rank, waiting=waiting)
