"""Rules about memory, the cost of offload, and saves."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import sqrt

from shardwise.monitor.doctor.evidence import (
    WARM_UP_LINES,
    NotEnough,
    check_cores,
    is_cpu,
    num_shards,
    peak_of,
    steady,
    step_s,
    typical,
)
from shardwise.monitor.findings import Change, Finding, make_finding
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
    SAVE_S,
    STALL_S,
    STEP_S,
    STEP_WAIT_S,
    TRANSFERS,
    transfers_ms,
)
from shardwise.monitor.record import RunRecord, StepLine
from shardwise.quantities import format_duration

_NEARLY_FULL, _FULL = 85.0, 92.0  # percent of the device
_MOST = 0.5
_UNUSED = 0.2  # of the device
_STEP_SHARE, _CPU_STEP_SHARE, _CPU_STEP_S = 0.25, 0.4, 0.05
_STALL = 0.03  # of the run
_STALL_S = 0.3  # of one line
_BUSY = 0.9
# 419 failures in 54 days of 16,384 accelerators: The Llama 3 Herd of Models, 2024, section 3.3.4.
_DEVICE_MTBF_S = 50_000 * 3600.0
_MOST_MTBF_S = 7 * 24 * 3600.0  # of people, disks and networks
_UNSAVED_S, _UNSAVED_TIMES = 1800.0, 4.0
_CUT_BY_NEXT = {0: ("optimizer_state", "param_shards"), 1: ("grad_full",), 2: ("param_full",)}


def _num_retries(lines: Sequence[StepLine]) -> float:
    """Return how many retries and failures of the allocator these lines contain."""
    total = 0.0
    for name in (RETRIES, OOMS):
        counts = [line.metrics[name].max for line in lines if name in line.metrics]
        total += counts[-1] - counts[0] if counts else 0.0
    return total


def full_memory(run: RunRecord) -> Finding | None:
    """Find a device that is nearly full, of activations or of the model's state."""
    facts, lines = run.facts, steady(run)
    # The ranks of a host share its memory.
    sharing = max(Counter(facts.hosts).values(), default=1) if is_cpu(facts) else 1
    percent, retries = sharing * typical(lines, MAX_ACTIVE_SHARE, "max"), _num_retries(lines)
    if percent < _NEARLY_FULL and not retries:
        return None
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
        is_recomputing = typical(lines, RECOMPUTE_S, "max", 0.0)
        changes = [Change("activation_checkpointing", None, "blocks")] * (not is_recomputing)
        return make_finding("SW030", evidence | {"threshold": _MOST}, *changes, gain=other / 2)
    shards, stage = num_shards(facts), facts.stage
    if stage == 3 or shards == 1 or percent < _FULL:
        return None
    cut = sum(moment["device"].get(kind, 0) for kind in _CUT_BY_NEXT[stage])
    evidence |= {"threshold, %": _FULL, "stage": stage}
    gain = (1 - 1 / shards) * cut
    return make_finding("SW005.higher", evidence, gain=gain, next=stage + 1, shards=shards)


def fragmentation(run: RunRecord) -> Finding | None:
    """Find memory that the allocator holds without using it."""
    facts = run.facts
    if is_cpu(facts):
        return None  # no caching allocator
    lines = steady(run)
    reserved = typical(lines, MAX_RESERVED_GIB, "max") * GIB
    unused = reserved - typical(lines, MAX_ACTIVE_GIB, "max") * GIB
    share, retries = unused / facts.device_bytes, _num_retries(lines)
    if share < _UNUSED and not (retries > 1 and unused > _UNUSED / 2 * facts.device_bytes):
        return None
    return make_finding(
        "SW031",
        {
            "reserved, bytes": reserved,
            "unused, bytes": unused,
            "share of the device": share,
            "threshold": _UNUSED,
            "retries of the allocator": retries,
        },
        gain=(0.0, unused),
    )


def cost_of_offload(run: RunRecord) -> Finding | None:
    """Find steps dominated by offload: the optimizer's step, copies, reads and writes of files.

    If it is hidden behind computation, it costs an accelerator nothing. On a CPU it takes the cores
    that forward and backward compute on, so it counts too.
    """
    facts = run.facts
    if not facts.offload:
        return None
    lines = steady(run)
    whole_s, moves_state = step_s(lines), "optimizer='device'" not in facts.offload
    waited_s = typical(lines, STEP_WAIT_S, default=0.0)
    own_s = typical(lines, OPTIMIZER_S) if moves_state else 0.0
    name = OFFLOAD_MS if is_cpu(facts) else OFFLOAD_EXPOSED_MS
    taken_s = own_s + typical(lines, name, default=1e3 * waited_s) / 1e3
    most = _CPU_STEP_SHARE if is_cpu(facts) else _STEP_SHARE
    if taken_s < most * whole_s or (is_cpu(facts) and taken_s < _CPU_STEP_S):
        return None
    check_cores(run, lines, taken_s)
    behind_s = typical(lines, BACKGROUND_STEP_MS, default=0.0) / 1e3
    moved = [typical(lines, transfers_ms(kind), default=0.0) / 1e3 for kind in TRANSFERS]
    parts = {
        "the optimizer's step": own_s + max(behind_s, waited_s),
        "copies between device and host": sum(moved[:2]),
        "reads and writes of files": sum(moved[2:]),
    }
    largest, is_file = max(parts, key=parts.__getitem__), "nvme" in facts.offload
    state_bytes = _bytes_in(run, "files" if is_file else "host")
    case = "step" if largest == "the optimizer's step" else "copies"
    return make_finding(
        "SW033" if is_file else f"SW032.{case}",
        {
            "offload, s/step": taken_s,
            "optimizer, s/step": own_s,
            "of that waited for behind, s/step": waited_s,
            "behind, s/step": behind_s,
            **{f"{kind}, s/step": seconds for kind, seconds in zip(TRANSFERS, moved, strict=True)},
            "share of the step": taken_s / whole_s,
            "threshold": most,
            **({"state there, bytes": state_bytes} if state_bytes else {}),
            **({"state, bytes/s": state_bytes / taken_s} if state_bytes else {}),
        },
        gain=(taken_s / 2 if is_file or case == "step" else 0.0, taken_s),
        largest=largest,
        largest_s=parts[largest],
        optimizer=facts.optimizer,
        offload=facts.offload,
    )


def _bytes_in(run: RunRecord, place: str) -> int:
    """Return the bytes of one rank's state in a place, of the newest sampled step; 0 if unknown."""
    newest: Mapping[str, Mapping[str, int]] = {}
    for _, line in run.lines("memory"):
        newest = line["units"].get(place, {})
    return sum(sum(kinds.values()) for kinds in newest.values())


def slow_saves(run: RunRecord) -> Finding | None:
    """Find saves that the training thread waits for."""
    steady(run)
    lines = [line for line in run.steps[WARM_UP_LINES:] if STALL_S in line.metrics]
    stalls = [line.metrics[STALL_S].max * line.num_steps for line in lines]
    whole_s, num_steps = _trained(lines)
    stall_s, longest_s = sum(stalls), max(stalls, default=0.0)
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return None
    save_s = sum(line.metrics[SAVE_S].max * line.num_steps for line in lines)
    behind_s = max(save_s - stall_s, 0.0)
    case = "often" if behind_s > _BUSY * whole_s else "copy"
    slowest = max(lines, key=lambda line: line.metrics[STALL_S].max).metrics[STALL_S]
    return make_finding(
        "SW050.thread" if behind_s < stall_s else f"SW050.{case}",
        {
            "stalls, s": stall_s,
            "longest in a line, s": longest_s,
            "behind the training, s": behind_s,
            "run, s": whole_s,
            "share": stall_s / whole_s,
            "threshold": _STALL,
        },
        gain=(stall_s - _STALL * whole_s) / num_steps,
        rank=slowest.max_rank if slowest.max > 2 * slowest.median else None,
        times=1 + behind_s / whole_s,
    )


def _trained(lines: Sequence[StepLine]) -> tuple[float, int]:
    """Return the seconds that some lines are about, and their steps."""
    seconds = sum(line.metrics[STEP_S].median * line.num_steps for line in lines)
    return seconds, sum(line.num_steps for line in lines)


def other_saves(run: RunRecord) -> Finding | None:
    """Find saves by torch's own calls that the training waits for."""
    steady(run)
    whole_s, num_steps = _trained(run.steps[WARM_UP_LINES:])
    began = run.steps[WARM_UP_LINES - 1].step
    saves = [each for each in run.lines("other_save") if each[1]["step"] > began]
    by_rank: dict[int, float] = defaultdict(float)
    for rank, line in saves:
        by_rank[rank] += line["seconds"]
    if not by_rank:
        return None
    rank, stall_s = max(by_rank.items(), key=lambda each: each[1])
    longest_s, call = max((line["seconds"], line["call"]) for at, line in saves if at == rank)
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return None
    is_one = len(by_rank) < run.facts.num_ranks
    return make_finding(
        "SW050.torch",
        {
            "stalls, s": stall_s,
            "longest, s": longest_s,
            "run, s": whole_s,
            "share": stall_s / whole_s,
            "threshold": _STALL,
        },
        gain=(stall_s - _STALL * whole_s) / num_steps,
        rank=rank if is_one else None,
        call=call,
        who=f"on rank {rank} " if is_one else "",
        others=", and the other ranks wait for that rank" if is_one else "",
    )


def no_saves(run: RunRecord) -> Finding | None:
    """Find a run that would lose much work if it failed."""
    lines = [line for line in run.steps if STALL_S in line.metrics]
    if not lines:
        raise NotEnough("the time in saves")
    saves = [line for line in lines if line.metrics[STALL_S].max or line.metrics[SAVE_S].max]
    moments = [lines[0].at_s, *(line.at_s for line in saves), lines[-1].at_s]
    unsaved_s = max(later - at for at, later in pairwise(moments))
    stall_s = max((line.metrics[STALL_S].max * line.num_steps for line in saves), default=0.0)
    mtbf_s = min(_DEVICE_MTBF_S / run.facts.num_ranks, _MOST_MTBF_S)
    best_s = sqrt(2 * stall_s * mtbf_s)
    threshold_s = max(_UNSAVED_S, _UNSAVED_TIMES * best_s)
    if unsaved_s < threshold_s:
        return None
    step_s = (lines[-1].at_s - lines[0].at_s) / max(sum(n.num_steps for n in lines[1:]), 1)
    return make_finding(
        "SW051",
        {
            "longest time without a save, s": unsaved_s,
            "saves": len(saves),
            "mean time between failures, assumed, s": mtbf_s,
            "interval that loses least, s": best_s,
            "threshold, s": threshold_s,
        },
        saved="no save for" if saves else "no save at all in",
        unsaved=format_duration(unsaved_s),
        every=max(int(max(best_s, _UNSAVED_S / 2) / step_s), 1),
    )
