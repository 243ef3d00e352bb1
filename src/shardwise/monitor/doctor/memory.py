"""What fills the device, what does not fit, and what it costs to have it elsewhere."""

from collections.abc import Mapping, Sequence

from shardwise.monitor.doctor.evidence import (
    NotEnough,
    core_wait_s,
    finding,
    is_cpu,
    num_shards,
    peak_of,
    ranks_per_host,
    steady,
    step_s,
    typical,
    typical_or,
)
from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import (
    BACKGROUND_STEP_MS,
    GIB,
    MAX_ACTIVE_GIB,
    MAX_ACTIVE_SHARE,
    MAX_RESERVED_GIB,
    OFFLOAD_EXPOSED_MS,
    OFFLOAD_MS,
    OOMS,
    OPTIMIZER_S,
    RECOMPUTE_S,
    RETRIES,
    STEP_WAIT_S,
    TRANSFERS,
    transfers_ms,
)
from shardwise.monitor.record import RunRecord, StepLine
from shardwise.quantities import format_bytes

_NEARLY_FULL, _FULL = 85.0, 92.0  # percent of the device
_MOST = 0.5
_UNUSED = 0.2  # of the device
_STEP_SHARE, _CPU_STEP_SHARE, _CPU_STEP_S = 0.25, 0.4, 0.05


def _used_percent(run: RunRecord, lines: Sequence[StepLine]) -> float:
    """Return the fullest device's use; the ranks of a host share its memory."""
    ranks = ranks_per_host(run.facts) if is_cpu(run.facts) else 1
    return ranks * typical(lines, MAX_ACTIVE_SHARE, "max")


def _retries(lines: Sequence[StepLine]) -> float:
    """Return how many retries and failures of the allocator came while these lines were told."""
    total = 0.0
    for name in (RETRIES, OOMS):
        told = [line.metrics[name].max for line in lines if name in line.metrics]
        total += told[-1] - told[0] if told else 0.0
    return total


def what_does_not_fit(run: RunRecord) -> list[Finding]:
    """Tell whether activations or the model's state fill a device that is nearly full."""
    lines = steady(run)
    percent, retries = _used_percent(run, lines), _retries(lines)
    if percent < _NEARLY_FULL and not retries:
        return []
    moment = peak_of(run)
    engine, other = sum(moment["device"].values()), moment["other"]
    share = other / (engine + other or 1)
    evidence = {
        "memory, % of the device": percent,
        "retries of the allocator": retries,
        "engine's bytes at the peak": engine,
        "other bytes at the peak": other,
        "share of others": share,
    }
    if share > _MOST:
        changes = [Change("micro_batch", None, "half as many rows, twice the accumulation")]
        if not typical_or(lines, RECOMPUTE_S, "max", 0.0):
            changes.insert(0, Change("activation_checkpointing", None, "blocks"))
        return [
            finding(
                run,
                "SW030",
                f"{format_bytes(other)} of the peak ({share:.0%}) are activations and temporaries, "
                f"{format_bytes(engine)} parameters, gradients and state",
                evidence | {"threshold": _MOST},
                "No stage cuts activations; their size is that of the micro-batch.",
                changes,
                Gain(other / 2, "bytes", "half the rows hold half the activations"),
            )
        ]
    facts = run.facts
    if facts.stage == 3 or num_shards(facts) == 1 or percent < _FULL:
        return []
    freed = _freed_by_next_stage(run, moment["device"])
    return [
        finding(
            run,
            "SW005",
            f"the device is {percent:.0f} % full, and stage {facts.stage} keeps whole what stage "
            f"{facts.stage + 1} cuts over {num_shards(facts)} ranks",
            evidence | {"threshold, %": _FULL, "stage": facts.stage},
            "Parameters, gradients and state fill most of it, not activations.",
            [Change("stage", facts.stage, facts.stage + 1)],
            Gain(freed, "bytes", "the kinds that the next stage cuts, at this run's peak"),
        )
    ]


def _freed_by_next_stage(run: RunRecord, held: dict[str, int]) -> float:
    kinds = {0: ("optimizer_state", "param_shards"), 1: ("grad_full",), 2: ("param_full",)}
    part = 1 - 1 / num_shards(run.facts)
    return part * sum(held.get(kind, 0) for kind in kinds[run.facts.stage])


def fragmentation(run: RunRecord) -> list[Finding]:
    """Find memory that the allocator holds and nobody uses."""
    facts = run.facts
    if is_cpu(facts):
        return []  # no caching allocator
    lines = steady(run)
    reserved = typical(lines, MAX_RESERVED_GIB, "max") * GIB
    unused = reserved - typical(lines, MAX_ACTIVE_GIB, "max") * GIB
    share, retries = unused / facts.device_bytes, _retries(lines)
    if share < _UNUSED and not (retries > 1 and unused > _UNUSED / 2 * facts.device_bytes):
        return []
    return [
        finding(
            run,
            "SW031",
            f"{format_bytes(unused)} are reserved and not allocated at the peak, {share:.0%} of "
            "the device",
            {
                "reserved, bytes": reserved,
                "unused, bytes": unused,
                "share of the device": share,
                "threshold": _UNUSED,
                "retries of the allocator": retries,
            },
            "The pieces fit no request, so the allocator asks for more or stops to clean up.",
            [Change("PYTORCH_CUDA_ALLOC_CONF", None, "expandable_segments:True")],
            Gain(0.0, "bytes", "reserved beyond allocated", unused),
        )
    ]


def cost_of_offload(run: RunRecord) -> list[Finding]:
    """Find steps that offload takes over: the optimizer's step, copies, reads and writes of files.

    What is hidden behind computing costs an accelerator nothing. On a CPU it takes the cores that
    forward and backward compute on, so it counts too.
    """
    facts = run.facts
    if not facts.offload:
        return []
    lines = steady(run)
    whole_s, moves_state = step_s(lines), "optimizer='device'" not in facts.offload
    waited_s = typical_or(lines, STEP_WAIT_S, "median", 0.0)
    own_s = typical(lines, OPTIMIZER_S) if moves_state else 0.0
    name = OFFLOAD_MS if is_cpu(facts) else OFFLOAD_EXPOSED_MS
    taken_s = own_s + typical_or(lines, name, "median", 1e3 * waited_s) / 1e3
    most = _CPU_STEP_SHARE if is_cpu(facts) else _STEP_SHARE
    if taken_s < most * whole_s or (is_cpu(facts) and taken_s < _CPU_STEP_S):
        return []
    if is_cpu(facts) and taken_s < core_wait_s(run, lines):
        raise NotEnough("cores of their own for the ranks: they wait for cores as much")
    behind_s = typical_or(lines, BACKGROUND_STEP_MS, "median", 0.0) / 1e3
    moved = [typical_or(lines, transfers_ms(kind), "median", 0.0) / 1e3 for kind in TRANSFERS]
    parts = {
        "the optimizer's step": own_s + max(behind_s, waited_s),
        "copies between device and host": sum(moved[:2]),
        "reads and writes of files": sum(moved[2:]),
    }
    evidence = {
        "offload, s/step": taken_s,
        "optimizer, s/step": own_s,
        "of that waited for behind, s/step": waited_s,
        "behind, s/step": behind_s,
        **{f"{kind}, s/step": seconds for kind, seconds in zip(TRANSFERS, moved, strict=True)},
        "share of the step": taken_s / whole_s,
        "threshold": most,
    }
    return [_finding_of_offload(run, evidence, max(parts, key=lambda part: parts[part]), parts)]


def _finding_of_offload(
    run: RunRecord, evidence: dict[str, float], largest: str, parts: Mapping[str, float]
) -> Finding:
    facts, taken_s = run.facts, evidence["offload, s/step"]
    is_file = "nvme" in facts.offload
    if state_bytes := _bytes_in(run, "files" if is_file else "host"):
        evidence |= {"state there, bytes": state_bytes, "state, bytes/s": state_bytes / taken_s}
    more = Change("accumulation", None, "twice as many micro-batches")
    gain = Gain(taken_s / 2, "s/step", "half as many steps for the same tokens", taken_s)
    if is_file:
        changes = [Change("offload", facts.offload, "cpu, as far as host memory goes"), more]
    elif largest == "the optimizer's step":
        own = Change("optimizer", facts.optimizer, "shardwise.optim.AdamW")
        changes = [own, Change("overlap_step", False, True), more]
    else:
        changes = [Change("offload", facts.offload, "a smaller fraction; params on the device")]
        gain = Gain(0.0, "s/step", "all that it takes", taken_s)
    where = "in files" if is_file else "in host memory"
    return finding(
        run,
        "SW033" if is_file else "SW032",
        f"offload takes {taken_s:.3g} s, {evidence['share of the step']:.0%} of the step, with "
        f"state {where}; most of it is {largest} ({parts[largest]:.3g} s)",
        evidence,
        "The device waits for it, or forward and backward have fewer cores meanwhile.",
        changes,
        gain,
    )


def _bytes_in(run: RunRecord, place: str) -> int:
    """Return the bytes of one rank's state in a place, of the newest sampled step; 0 if unknown."""
    try:
        peak_of(run)
    except NotEnough:
        return 0
    *_, (_, line) = run.lines("memory")
    return sum(sum(kinds.values()) for kinds in line["units"].get(place, {}).values())
