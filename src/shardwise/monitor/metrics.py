"""The figures of one step of one rank, and how ranks compare.

Source of the names that it has too: torchtitan 0.3.0, components/metrics.py.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.monitor.lines import MAX_LOGGED, Extreme, Figure, Rank
from shardwise.monitor.spans import OUTSIDE, Interval, Span, length, length_outside, union
from shardwise.names import MAIN

GIB, MIB = 2**30, 2**20
# Phases in which the training thread, or the device's stream, does nothing but wait for others.
WAITS = ("wait_unshard", "wait_reduce", "exchange")
# Phases in which nothing is computed for the model, on the line that computes.
IDLE = (*WAITS, "wait_step", OUTSIDE, "data", "save", "load")
STEP_S = "time_metrics/end_to_end(s)"
DATA_S, DATA_SHARE = "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"
EXPOSED_MS, EXPOSED_SHARE = "comm/exposed(ms)", "comm/exposed(%)"
OVERLAP_SHARE, IDLE_SHARE = "comm/overlap(%)", "device/idle(%)"
ALL_GATHER_MS, REDUCE_SCATTER_MS = "comm/all_gather(ms)", "comm/reduce_scatter(ms)"
OUTSIDE_S, OPTIMIZER_S = "time_metrics/outside(s)", "time_metrics/optimizer(s)"
COMPUTE_S, RECOMPUTE_S = "time_metrics/compute(s)", "time_metrics/recompute(s)"
STALL_S, SAVE_S, LOAD_S = "checkpoint/stall(s)", "checkpoint/save(s)", "checkpoint/load(s)"
# Copies of offloaded state by kind, which are lines of their own.
TRANSFERS = ("to_device", "to_host", "disk_read", "disk_write")
BACKGROUND_STEP_MS, STEP_WAIT_S = "offload/optimizer(ms)", "offload/waits_for_step(s)"
OFFLOAD_MS, OFFLOAD_EXPOSED_MS = "offload/beside(ms)", "offload/exposed(ms)"
TOKENS, TOKENS_BEHIND_SHARE = "tokens/per_step", "tokens/behind_longest(%)"
TOKENS_PER_S, MFU_SHARE = "throughput(tps)", "mfu(%)"
SENT_MIB, NUM_COLLECTIVES = "comm/sent(MiB)", "comm/num_collectives"
MAX_ACTIVE_GIB, MAX_RESERVED_GIB = "memory/max_active(GiB)", "memory/max_reserved(GiB)"
MAX_ACTIVE_SHARE = "memory/max_active(%)"
RETRIES, OOMS = "memory/num_alloc_retries", "memory/num_ooms"
PADDING_SHARE = "padding(%)"
CORE_WAIT_S = "host/waits_for_core(s)"
WAITED_MS = "comm/waited(ms)"
SKIPPED_STEPS = "optimizer/skipped_steps"
IN_HALF = "numbers/autocast_to_float16"
BAD_VALUES, BAD_GRADIENTS = "numbers/non_finite_values", "numbers/non_finite_gradients"
LOST_SHARE, LOST_OF_WORST_SHARE = "numbers/lost_updates(%)", "numbers/lost_updates_of_worst(%)"

_SECONDS_OF = {  # of the line that computes
    DATA_S: ("data",),
    OUTSIDE_S: (OUTSIDE,),
    OPTIMIZER_S: ("step",),
    STEP_WAIT_S: ("wait_step",),
    STALL_S: ("save",),
    LOAD_S: ("load",),
    "time_metrics/forward(s)": ("forward",),
    RECOMPUTE_S: ("recompute",),
    "time_metrics/backward(s)": ("backward",),
}


def pace(step_s: float, num_tokens: int) -> dict[str, float]:
    """Return what is known of a step whose spans nobody has looked at."""
    return {STEP_S: step_s, **({TOKENS_PER_S: num_tokens / step_s} if num_tokens else {})}


def step_metrics(spans: Sequence[Span], step_s: float) -> dict[str, float]:
    """Return what the spans of one step come to, in the units that the names tell.

    Seconds that overlap count once: sums of spans would count them twice. Exposed communication is
    what goes on while nothing is computed. Of a device that was timed, the device's spans count.
    """
    computes = "device" if any(span.line == "device" for span in spans) else MAIN
    seconds: dict[str, float] = defaultdict(float)
    comm: dict[str, list[Interval]] = defaultdict(list)
    busy: list[Interval] = []
    steps: list[Interval] = []
    away: list[Interval] = []  # of copies of offloaded state, steps behind, waits for them
    axes: dict[str, float] = defaultdict(float)
    sent = num_collectives = 0
    for line, phase, _, begin_s, end_s, num_bytes in spans:
        if line == computes:
            seconds[phase] += end_s - begin_s
            if phase not in IDLE:
                busy.append((begin_s, end_s))
            if phase in ("step", "wait_step"):
                (steps if phase == "step" else away).append((begin_s, end_s))
        elif "." in line:
            comm[phase].append((begin_s, end_s))
            axis = line.partition(".")[0]
            axes[axis_s(axis)] += end_s - begin_s
            axes[axis_mib(axis)] += num_bytes / MIB
            sent += num_bytes
            num_collectives += 1
        elif line not in (MAIN, "device"):
            seconds[f"behind {phase}"] += end_s - begin_s
            if phase != "save":
                away.append((begin_s, end_s))
    busy = union(busy)
    whole = union(when for kind in comm.values() for when in kind)
    # What blocks without work of its own is communication too: small exchanges between ranks.
    comm_s = length(whole) + seconds["exchange"]
    exposed_s = length_outside(whole, busy) + seconds["exchange"]
    found = {name: sum(seconds[p] for p in phases) for name, phases in _SECONDS_OF.items()}
    found |= {
        DATA_SHARE: 100 * found[DATA_S] / step_s,
        COMPUTE_S: length(busy),
        ALL_GATHER_MS: 1e3 * length(comm["all_gather"]),
        REDUCE_SCATTER_MS: 1e3 * length(comm["reduce_scatter"]),
        WAITED_MS: 1e3 * sum(seconds[phase] for phase in WAITS),
        EXPOSED_MS: 1e3 * exposed_s,
        EXPOSED_SHARE: 100 * exposed_s / step_s,
        OVERLAP_SHARE: 100 * (1 - exposed_s / comm_s) if comm_s else 100.0,
        SENT_MIB: sent / MIB,
        NUM_COLLECTIVES: num_collectives,
        IDLE_SHARE: 100 * (1 - length([*busy, *whole]) / step_s),
        BACKGROUND_STEP_MS: 1e3 * seconds["behind step"],
        SAVE_S: seconds["behind save"] + found[STALL_S],
    }
    if away:
        found[OFFLOAD_MS] = 1e3 * length_outside(away, steps)
        found[OFFLOAD_EXPOSED_MS] = 1e3 * length_outside(away, busy)
    for kind in TRANSFERS:
        if (taken_s := seconds.get(f"behind {kind}")) is not None:
            found[transfers_ms(kind)] = 1e3 * taken_s
    return found | axes


def transfers_ms(kind: str) -> str:
    """Return the name of the milliseconds of one of `TRANSFERS`; one after the other."""
    return f"offload/{kind}(ms)"


def axis_s(axis: str) -> str:
    """Return the name of the seconds of collectives over an axis; one after the other."""
    return f"comm/{axis}(s)"


def axis_mib(axis: str) -> str:
    """Return the name of what is sent over an axis."""
    return f"comm/{axis}_sent(MiB)"


@dataclass(frozen=True)
class OverRanks:
    """One figure over all ranks: its extremes and who has them."""

    min: Figure
    median: Figure
    max: Figure
    min_rank: Rank
    max_rank: Rank


def over_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, OverRanks]:
    """Return every figure over the ranks that tell it; ``rows`` are in rank order."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {}
    for name in names:
        told = [(row[name], rank) for rank, row in enumerate(rows) if name in row]
        (low, low_rank), (high, high_rank) = min(told), max(told, key=lambda each: each[0])
        middle = statistics.median(value for value, _ in told)
        found[name] = OverRanks(low, middle, high, low_rank, high_rank)
    return found


@dataclass(frozen=True)
class OverSteps:
    """One figure over the steps of a line: its finite values, and how many are not finite.

    ``min_step`` and ``max_step`` are the first steps with the extremes. Values beyond `MAX_LOGGED`
    count as not finite.
    """

    min: Extreme
    mean: Extreme
    max: Extreme
    min_step: int
    max_step: int
    non_finite: int = 0


def summarize_steps(steps: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, OverSteps]:
    """Return every figure that is finite in one of the steps; ``steps`` are numbered, in order."""
    found = {}
    for name in dict.fromkeys(name for _, values in steps for name in values):
        told = [(values[name], step) for step, values in steps if name in values]
        finite = [each for each in told if abs(each[0]) <= MAX_LOGGED]
        if not finite:
            continue
        (low, low_step), (high, high_step) = min(finite), max(finite, key=lambda each: each[0])
        mean = statistics.fmean(value for value, _ in finite)
        num_bad = len(told) - len(finite)
        found[name] = OverSteps(low, mean, high, low_step, high_step, num_bad)
    return found


def tokens_over_ranks(tokens: Sequence[list[int]]) -> list[dict[str, float]]:
    """Return by rank the tokens of a step, and how many more the longest batch of each step has.

    ``tokens`` are by rank and step; one number stands for all steps. Empty where a rank has none.
    """
    num_steps = max(map(len, tokens))
    rows = [row * num_steps if len(row) == 1 else row for row in tokens]
    if not all(map(sum, rows)):
        return []
    longest = sum(map(max, zip(*rows, strict=True)))
    return [
        {TOKENS: statistics.fmean(row), TOKENS_BEHIND_SHARE: 100 * (longest / sum(row) - 1)}
        for row in rows
    ]


def mean_of(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each figure over the steps that tell it."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: statistics.fmean(step[name] for step in steps if name in step) for name in names}
