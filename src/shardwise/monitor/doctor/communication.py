"""What is sent, in which portions, and how long a step waits for it."""

from collections.abc import Callable, Sequence
from statistics import median

from shardwise.monitor.doctor.evidence import (
    NotEnough,
    core_wait_s,
    finding,
    is_cpu,
    noise_s,
    num_shards,
    steady,
    step_s,
    typical,
)
from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import (
    EXPOSED_MS,
    MAX_ACTIVE_SHARE,
    NUM_COLLECTIVES,
    WAITED_MS,
    axis_mib,
    axis_s,
)
from shardwise.monitor.record import RunFacts, RunRecord, StepLine
from shardwise.quantities import format_bytes
from shardwise.stages import DEFAULT_BUCKET_BYTES

EXPOSED = 15.0  # percent of the step
_CPU_COLLECTIVE_S = 0.02  # longer than a small one takes between processes of one host
_TIMES_CORE_WAIT = 2.0
_FITS = 70.0  # percent of the device
_SLOW_RATE, _MIN_AXIS_MIB = 0.3, 1.0
_SLOW_LINK, _TIMES_OTHERS, _LINK_LINES = 0.1, 3.0, 0.6
Pair = tuple[int, int]


def small_buckets(run: RunRecord) -> list[Finding]:
    """Find a bucket that makes many reductions of what would travel together."""
    facts = run.facts
    if facts.num_ranks == 1 or facts.reduces_units_alone:
        return []
    if facts.bucket_bytes >= DEFAULT_BUCKET_BYTES:
        return []
    now, then = (_num_buckets(facts, size) for size in (facts.bucket_bytes, DEFAULT_BUCKET_BYTES))
    if now < 2 * then or now < then + 2:
        return []
    return [
        finding(
            run,
            "SW010",
            f"{now} reductions in each backward pass, where {then} would do",
            {"reductions": now, "by default": then, "bucket_bytes": facts.bucket_bytes},
            "Units below a bucket's size share a reduction; with this bucket nearly every unit "
            "has its own.",
            [Change("bucket_bytes", facts.bucket_bytes, DEFAULT_BUCKET_BYTES)],
        )
    ]


def _num_buckets(facts: RunFacts, bucket_bytes: int) -> int:
    """Return how many reductions a backward pass starts, over all units."""
    count, held, is_open = 0, 0, False
    for unit in reversed(facts.units):
        held, is_open = held + unit.full_bytes, True
        if held >= bucket_bytes:
            count, held, is_open = count + 1, 0, False
    return count + is_open


def large_buckets(run: RunRecord) -> list[Finding]:
    """Find a bucket, or a prefetch budget, that takes the whole model."""
    facts = run.facts
    held = [unit.full_bytes for unit in facts.units if unit.num_params]
    if facts.num_ranks == 1 or len(held) < 3:
        return []
    evidence = {"bytes of all units": facts.full_bytes, "units": len(held)}
    found = []
    if facts.bucket_bytes > DEFAULT_BUCKET_BYTES and facts.bucket_bytes >= facts.full_bytes:
        found.append(
            finding(
                run,
                "SW011",
                f"a bucket of {format_bytes(facts.bucket_bytes)} takes all gradients "
                f"({format_bytes(facts.full_bytes)}): their reduction begins after backward",
                evidence | {"bucket_bytes": facts.bucket_bytes},
                "Nothing is left for it to hide behind, and all full gradients wait in memory.",
                [Change("bucket_bytes", facts.bucket_bytes, DEFAULT_BUCKET_BYTES)],
                Gain(
                    max(facts.full_bytes - max(held) - DEFAULT_BUCKET_BYTES, 0.0),
                    "bytes",
                    "full gradients beyond the largest unit and a bucket",
                ),
            )
        )
    budget = facts.prefetch_bytes or 0
    if facts.stage == 3 and budget >= facts.full_bytes / 2 and budget > 2 * max(held):
        ahead = min(budget, facts.full_bytes)
        found.append(
            finding(
                run,
                "SW011",
                f"prefetch_bytes of {format_bytes(budget)} gathers "
                f"{ahead / facts.full_bytes:.0%} of the model ahead of its use",
                evidence | {"prefetch_bytes": budget, "largest unit": max(held)},
                "One unit ahead hides a gather; more of them only fill memory.",
                [Change("prefetch_bytes", budget, None)],
                Gain(ahead - max(held), "bytes", "full parameters ahead beyond the largest unit"),
            )
        )
    return found


def exposed_communication(run: RunRecord) -> list[Finding]:
    """Find steps that wait for collectives, on the rank that waits least."""
    facts = run.facts
    if facts.num_ranks == 1:
        return []
    lines = steady(run)
    # What is under way while the loop does something of its own is not waited for.
    exposed_s = min(typical(lines, name, "min") for name in (EXPOSED_MS, WAITED_MS)) / 1e3
    share = 100 * exposed_s / step_s(lines)
    collectives = typical(lines, NUM_COLLECTIVES, "max") or 1
    waits_s = core_wait_s(run, lines)
    if share < EXPOSED or exposed_s < noise_s(facts):
        return []
    if is_cpu(facts):
        if exposed_s / collectives < _CPU_COLLECTIVE_S:
            return []
        if exposed_s < _TIMES_CORE_WAIT * waits_s:
            raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    evidence = {
        "exposed, % of the step": share,
        "exposed, s/step": exposed_s,
        "collectives in a step": collectives,
        "waits for a core, s/step": waits_s,
        "threshold, %": EXPOSED,
    }
    gain = Gain(exposed_s * (1 - EXPOSED / share), "s/step", "down to 15 % exposed", exposed_s)
    told = f"{share:.0f} % of the step ({1e3 * exposed_s:.1f} ms) is communication that nothing "
    if facts.stage == 3 and num_shards(facts) > 1 and (percent := _memory_at_stage_2(run, lines)):
        return [
            finding(
                run,
                "SW005",
                told + f"hides, and stage 2 would fit into {percent:.0f} % of the device",
                evidence | {"memory at stage 2, % of the device": percent, "may be, %": _FITS},
                "Stage 3 gathers parameters in forward and again in backward. Stage 2 keeps them.",
                [Change("stage", 3, 2)],
                gain,
            )
        ]
    hosts = len(set(facts.hosts))
    spans_hosts = hosts > 1 and num_shards(facts) == facts.num_ranks
    changes = [Change("dp_replicate", 1, hosts)] if spans_hosts else []
    changes.append(Change("micro_batch", None, "twice as many rows, or accumulation"))
    why = "There is not enough to compute beside the collectives, or they begin too late."
    return [finding(run, "SW012", told + "hides", evidence, why, changes, gain)]


def _memory_at_stage_2(run: RunRecord, lines: Sequence[StepLine]) -> float | None:
    """Return the percents of the device that would be used; None where they are too many.

    On a CPU ranks share the memory of the host, and none of it is the model's alone.
    """
    facts = run.facts
    if is_cpu(facts):
        return None
    more = 100 * facts.full_bytes * (1 - 1 / num_shards(facts)) / facts.device_bytes
    percent = typical(lines, MAX_ACTIVE_SHARE, "max") + more
    return percent if percent < _FITS else None


def slow_axis(run: RunRecord) -> list[Finding]:
    """Find an axis over which collectives are much slower; of accelerators, which time them."""
    facts = run.facts
    if facts.num_ranks == 1:
        return []
    if is_cpu(facts):
        return _slow_by_waits(run)
    lines, rates = steady(run), {}
    for axis in facts.degrees:
        try:
            seconds, sent = typical(lines, axis_s(axis), "min"), typical(lines, axis_mib(axis))
        except NotEnough:
            continue
        if sent >= _MIN_AXIS_MIB and seconds > 0:
            rates[axis] = (sent / seconds, seconds)
    if len(rates) < 2:
        return []
    fastest = max(rates, key=lambda axis: rates[axis][0])
    slowest = min(rates, key=lambda axis: rates[axis][0])
    (rate, seconds), best = rates[slowest], rates[fastest][0]
    exposed_s = typical(lines, EXPOSED_MS, "min") / 1e3
    lost_s = min(exposed_s, seconds * (1 - rate / best))
    if rate > _SLOW_RATE * best or lost_s < EXPOSED / 100 * step_s(lines):
        return []
    return [
        finding(
            run,
            "SW014",
            f"axis '{slowest}' moves {rate:,.0f} MiB/s, axis '{fastest}' {best:,.0f} MiB/s",
            {
                "slow, MiB/s": rate,
                "fast, MiB/s": best,
                "ratio": rate / best,
                "threshold": _SLOW_RATE,
                "s/step": seconds,
            },
            "As a rule an axis that goes over hosts; what it carries should be little.",
            [Change("dp_replicate", None, "over hosts"), Change("dp_shard", None, "within a host")],
            Gain(0.0, "s/step", "what the axis takes beyond the fastest one's rate", lost_s),
        )
    ]


def _mutual_waits(line: StepLine) -> dict[Pair, float]:
    """Return for each pair of ranks the shorter of the two waits for each other, milliseconds."""
    rows = line.waited_for
    return {
        (one, other): min(ms, rows.get(other, {}).get(one, 0.0))
        for one, row in rows.items()
        for other, ms in row.items()
        if one < other
    }


def _waits_of_pairs(run: RunRecord) -> list[dict[Pair, float]]:
    found = [_mutual_waits(line) for line in steady(run)]
    if not any(found):
        raise NotEnough("who waits for whom, which only the gloo transport tells")
    return found


def slow_pair(run: RunRecord) -> list[Finding]:
    """Find two ranks that wait for each other's messages, and others do not."""
    facts = run.facts
    if facts.num_ranks < 3:
        return []
    lines, whole_ms = steady(run), 1e3 * step_s(steady(run))
    least_ms = max(_SLOW_LINK * whole_ms, 1e3 * noise_s(facts))
    found: dict[Pair, list[tuple[float, float]]] = {}
    for waits in _waits_of_pairs(run):
        ranked = sorted(waits, key=lambda pair: -waits[pair])
        if not ranked:
            continue
        ms = waits[ranked[0]]
        others = waits[ranked[1]] if len(ranked) > 1 else 0.0
        if ms > least_ms and ms > _TIMES_OTHERS * others:
            found.setdefault(ranked[0], []).append((ms, others))
    pair = max(found, key=lambda each: len(found[each]), default=None)
    if pair is None or len(found[pair]) < _LINK_LINES * len(lines):
        return []
    ms, others = (median(values) for values in zip(*found[pair], strict=True))
    if ms < 1e3 * core_wait_s(run, lines) and is_cpu(facts):
        raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    one, other = pair
    where = _hosts_of(facts, pair)
    return [
        finding(
            run,
            "SW013",
            f"ranks {one} and {other}{where} wait {ms:.0f} ms of each step for each other's "
            f"messages, other pairs {others:.0f} ms",
            {
                "ms/step for each other": ms,
                "ms/step of the next pair": others,
                "share of the step": ms / whole_ms,
                "threshold": _SLOW_LINK,
                "other rank": other,
            },
            "Each is in time and waits for the other: the link between them is slow, or the way "
            "of one of them to it.",
            [Change("place of the ranks", f"{one} and {other}", "on hosts with a faster link")],
            Gain((ms - others) / 1e3, "s/step", "down to what other pairs wait"),
            rank=one,
        )
    ]


def _slow_by_waits(run: RunRecord) -> list[Finding]:
    """Find pairs of ranks over one axis, or on different hosts, that wait longer than others."""
    lines = steady(run)
    for what, is_far in _kinds_of_pairs(run.facts).items():
        apart, within = [], []
        for waits in _waits_of_pairs(run):
            far_first = sorted((ms for pair, ms in waits.items() if is_far(pair)), reverse=True)
            apart.append(far_first[1] if len(far_first) > 1 else 0.0)  # one pair is no axis
            within.append(max((ms for pair, ms in waits.items() if not is_far(pair)), default=0.0))
        far, near, whole_ms = median(apart), median(within), 1e3 * step_s(lines)
        if far < max(_SLOW_LINK * whole_ms, 1e3 * noise_s(run.facts)):
            continue
        if far < _TIMES_OTHERS * near or far < 1e3 * core_wait_s(run, lines):
            continue
        return [
            finding(
                run,
                "SW014",
                f"ranks {what} wait {far:.0f} ms of each step for each other's messages, others "
                f"{near:.0f} ms",
                {
                    "ms/step over it": far,
                    "ms/step of others": near,
                    "share of the step": far / whole_ms,
                    "threshold": _SLOW_LINK,
                },
                "What a slow part of the network carries should be little: shards within the fast "
                "one, copies over the slow one.",
                [
                    Change("dp_replicate", None, "over the slow links"),
                    Change("dp_shard", None, "over the fast ones"),
                ],
                Gain(0.0, "s/step", "down to what the others wait", (far - near) / 1e3),
            )
        ]
    return []


def _kinds_of_pairs(facts: RunFacts) -> dict[str, Callable[[Pair], bool]]:
    """Return, for each part of the network that may be slow, which pairs of ranks go over it."""
    found: dict[str, Callable[[Pair], bool]] = {}
    if 1 < len(set(facts.hosts)) < facts.num_ranks:
        found["on different hosts"] = lambda pair: facts.hosts[pair[0]] != facts.hosts[pair[1]]
    shards, copies = num_shards(facts), facts.degrees.get("replicate", 1)
    if min(shards, copies) > 1 and shards * copies == facts.num_ranks:
        found["of the replicate axis"] = lambda pair: pair[0] // shards != pair[1] // shards
        found["of the shard axis"] = lambda pair: pair[0] // shards == pair[1] // shards
    return found


def _hosts_of(facts: RunFacts, pair: Pair) -> str:
    names = [facts.hosts[rank] for rank in pair if rank < len(facts.hosts)]
    return f" ({' and '.join(names)})" if len(set(names)) > 1 else ""
