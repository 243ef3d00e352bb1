"""The figures of one step of one rank, and how ranks compare.

Source of the names that it has too: torchtitan 0.3.0, components/metrics.py.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from shardwise.monitor.lines import MAX_LOGGED, Extreme, Figure, Rank
from shardwise.monitor.spans import EVALUATION, OUTSIDE, Interval, Span, length, length_outside
from shardwise.names import MAIN

T = TypeVar("T")
GIB, MIB = 2**30, 2**20
# Phases in which the training thread, or the device's stream, only waits for other ranks.
WAITS = ("wait_unshard", "wait_reduce", "exchange")
# Phases of the computing line without computation for the model.
IDLE = (*WAITS, "wait_step", OUTSIDE, "data", "save", "load")
STEP_S = "time_metrics/end_to_end(s)"
DATA_S, DATA_SHARE = "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"
EXPOSED_MS, EXPOSED_SHARE = "comm/exposed(ms)", "comm/exposed(%)"
OVERLAP_SHARE, IDLE_SHARE = "comm/overlap(%)", "device/idle(%)"
ALL_GATHER_MS, REDUCE_SCATTER_MS = "comm/all_gather(ms)", "comm/reduce_scatter(ms)"
OUTSIDE_S, OPTIMIZER_S = "time_metrics/outside(s)", "time_metrics/optimizer(s)"
COMPUTE_S, RECOMPUTE_S = "time_metrics/compute(s)", "time_metrics/recompute(s)"
FORWARD_S, BACKWARD_S = "time_metrics/forward(s)", "time_metrics/backward(s)"
EVALUATION_S, PAUSED_S = "time_metrics/evaluation(s)", "time_metrics/paused(s)"
COLLECTIONS = "host/garbage_collections"
READS, DROPOUTS_OFF_SHARE = "host/reads_of_values", "numbers/dropouts_off(%)"
ROWS = "data/rows_of_a_pass"
KEPT_GRADIENTS = "numbers/kept_gradients"
GRAD_NORM, MAX_NORM = "numbers/gradient_norm", "numbers/clipped_to"
LEARNING_RATE, LOSS_SCALE = "optimizer/learning_rate", "optimizer/loss_scale"
SHARED_INPUTS_SHARE = "data/shared_inputs(%)"
IN_USE_GIB, HOST_GIB = "memory/in_use(GiB)", "memory/host(GiB)"
STALL_S, SAVE_S, LOAD_S = "checkpoint/stall(s)", "checkpoint/save(s)", "checkpoint/load(s)"
# Copies of offloaded state; each kind is a line of work.
TRANSFERS = ("to_device", "to_host", "disk_read", "disk_write")
BACKGROUND_STEP_MS, STEP_WAIT_S = "offload/optimizer(ms)", "offload/waits_for_step(s)"
OFFLOAD_MS, OFFLOAD_EXPOSED_MS = "offload/beside(ms)", "offload/exposed(ms)"
# Of one of `TRANSFERS`, and of the collectives over an axis: these follow each other.
TRANSFER_MS, AXIS_S, AXIS_MIB = "offload/{}(ms)", "comm/{}(s)", "comm/{}_sent(MiB)"
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

PHASES = (  # of the line that computes: name, figure, seconds in one of its unit, phases of spans
    ("forward", FORWARD_S, 1.0, ("forward",)),
    ("recompute", RECOMPUTE_S, 1.0, ("recompute",)),
    ("backward", BACKWARD_S, 1.0, ("backward",)),
    ("evaluation", EVALUATION_S, 1.0, (EVALUATION,)),
    ("waiting for others", WAITED_MS, 1e-3, WAITS),
    ("optimizer", OPTIMIZER_S, 1.0, ("step",)),
    ("data", DATA_S, 1.0, ("data",)),
    ("save", STALL_S, 1.0, ("save",)),
    ("load", LOAD_S, 1.0, ("load",)),
    ("outside", OUTSIDE_S, 1.0, (OUTSIDE,)),
)
_BY_UNIT = (FORWARD_S, RECOMPUTE_S, BACKWARD_S)  # phases that steps without details do not part
# Figures of a step that are known without its details.
OF_MAIN = (
    *(name for _, name, _, _ in PHASES if name not in _BY_UNIT),
    *(COMPUTE_S, DATA_SHARE, STEP_WAIT_S),
)
ENGINE = "engine"  # the part of a step outside of all phases: begins of gathers and reductions


def step_metrics(spans: Sequence[Span], step_s: float) -> dict[str, float]:
    """Return the figures of the spans of one step, in the units of their names.

    Seconds that overlap count once. Exposed communication is communication without computation
    beside it. If the device was timed, its spans count.
    """
    computes = "device" if any(span.line == "device" for span in spans) else MAIN
    seconds: dict[str, float] = defaultdict(float)
    comm: dict[str, list[Interval]] = defaultdict(list)
    busy: list[Interval] = []
    exchanges: list[Interval] = []
    steps: list[Interval] = []
    offload: list[Interval] = []  # copies of state, steps in the background, waits for them
    axes: dict[str, float] = defaultdict(float)
    sent = num_collectives = 0
    for span in spans:
        line, phase, when = span.line, span.phase, (span.begin_s, span.end_s)
        if line == computes:
            seconds[phase] += span.seconds
            if phase not in IDLE:
                busy.append(when)
            if phase == "exchange":
                exchanges.append(when)
            if phase in ("step", "wait_step"):
                (steps if phase == "step" else offload).append(when)
        elif "." in line:
            comm[phase].append(when)
            axis = line.partition(".")[0]
            axes[AXIS_S.format(axis)] += span.seconds
            axes[AXIS_MIB.format(axis)] += span.num_bytes / MIB
            sent += span.num_bytes
            num_collectives += 1
        elif line not in (MAIN, "device"):
            seconds[f"behind {phase}"] += span.seconds
            if phase != "save":
                offload.append(when)
    # Small exchanges between ranks, which block, are communication too.
    whole = [*exchanges, *(when for kind in comm.values() for when in kind)]
    comm_s = length(whole)
    exposed_s = length_outside(whole, busy)
    found = {name: sum(seconds[p] for p in of) / unit_s for _, name, unit_s, of in PHASES}
    found |= {
        DATA_SHARE: 100 * found[DATA_S] / step_s,
        COMPUTE_S: length(busy),
        ALL_GATHER_MS: 1e3 * length(comm["all_gather"]),
        REDUCE_SCATTER_MS: 1e3 * length(comm["reduce_scatter"]),
        STEP_WAIT_S: seconds["wait_step"],
        EXPOSED_MS: 1e3 * exposed_s,
        EXPOSED_SHARE: 100 * exposed_s / step_s,
        OVERLAP_SHARE: 100 * (1 - exposed_s / comm_s) if comm_s else 100.0,
        SENT_MIB: sent / MIB,
        NUM_COLLECTIVES: num_collectives,
        IDLE_SHARE: 100 * (1 - length([*busy, *whole]) / step_s),
        BACKGROUND_STEP_MS: 1e3 * seconds["behind step"],
        SAVE_S: seconds["behind save"] + found[STALL_S],
    }
    if offload:
        found[OFFLOAD_MS] = 1e3 * length_outside(offload, steps)
        found[OFFLOAD_EXPOSED_MS] = 1e3 * length_outside(offload, busy)
    for kind in TRANSFERS:
        if (taken_s := seconds.get(f"behind {kind}")) is not None:
            found[TRANSFER_MS.format(kind)] = 1e3 * taken_s
    return found | axes


def main_metrics(main_s: Mapping[str, float], step_s: float) -> dict[str, float]:
    """Return the figures `OF_MAIN` of a step without details; ``main_s`` are seconds by phase."""
    found = {
        name: sum(main_s.get(phase, 0.0) for phase in of) / unit_s
        for _, name, unit_s, of in PHASES
        if name not in _BY_UNIT
    }
    found[COMPUTE_S] = sum(seconds for phase, seconds in main_s.items() if phase not in IDLE)
    found[DATA_SHARE] = 100 * found[DATA_S] / step_s
    found[STEP_WAIT_S] = main_s.get("wait_step", 0.0)
    return found


@dataclass(frozen=True)
class OverRanks:
    """One figure over all ranks: its extremes and their ranks."""

    min: Figure
    median: Figure
    max: Figure
    min_rank: Rank
    max_rank: Rank


def over_ranks(rows: Sequence[Mapping[str, float]]) -> dict[str, OverRanks]:
    """Return every figure over the ranks that have it; ``rows`` are in rank order."""
    found = {}
    for name, by_rank in _by_name(enumerate(rows)).items():
        (low, low_rank), (high, high_rank) = min(by_rank), max(by_rank, key=lambda each: each[0])
        middle = statistics.median(value for value, _ in by_rank)
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
    for name, by_step in _by_name(steps).items():
        finite = [each for each in by_step if abs(each[0]) <= MAX_LOGGED]
        if not finite:
            continue
        (low, low_step), (high, high_step) = min(finite), max(finite, key=lambda each: each[0])
        mean = statistics.fmean(value for value, _ in finite)
        found[name] = OverSteps(low, mean, high, low_step, high_step, len(by_step) - len(finite))
    return found


def tokens_over_ranks(tokens: Sequence[list[int]]) -> list[dict[str, float]]:
    """Return by rank the tokens of a step, and the share by which the longest batch has more.

    ``tokens`` are by rank and step; one number is for all steps. Empty if a rank has no tokens.
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


def shared_inputs(digests: Sequence[Mapping[str, int]]) -> list[float | None]:
    """Return by rank the share of checked steps whose inputs another rank had too, per cent.

    ``digests`` are by rank and step; a digest of 0 has been seen before. None: not checked.
    """
    common = set.intersection(*(set(row) for row in digests))
    if not common or len(digests) == 1:
        return [None] * len(digests)
    num_new = [0] * len(digests)
    for step in common:
        of_step = [row[step] for row in digests]
        for rank, digest in enumerate(of_step):
            num_new[rank] += digest != 0 and of_step.count(digest) > 1
    return [100 * number / len(common) for number in num_new]


def mean_of(steps: Sequence[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the mean of each figure over the steps that have it; ``steps`` have weights."""
    found = _by_name(steps).items()
    return {name: statistics.fmean(*zip(*weighted, strict=True)) for name, weighted in found}


def _by_name(rows: Iterable[tuple[T, Mapping[str, float]]]) -> dict[str, list[tuple[float, T]]]:
    """Return the values of each figure in order, each with the label of its row."""
    found: dict[str, list[tuple[float, T]]] = defaultdict(list)
    for label, values in rows:
        for name, value in values.items():
            found[name].append((value, label))
    return found


class FigureRow(NamedTuple):
    """A row: the name of a metric, and how it is shown; over ranks it has a median and extremes."""

    metric: str
    name: str
    unit: str
    is_better: int = 0  # 1: higher, -1: lower

    @property
    def title(self) -> str:
        """The name with its unit."""
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def is_shown(self, value: OverRanks | None) -> bool:
        """Return whether a value says something: none of what need not be there says nothing."""
        return value is not None and bool(self.is_better or value.max)


FIGURES = (
    FigureRow(STEP_S, "step time", "s", -1),
    FigureRow(TOKENS_PER_S, "tokens per second, a rank", "", 1),
    FigureRow(MFU_SHARE, "MFU", "%", 1),
    FigureRow(EXPOSED_SHARE, "exposed communication", "% of a step", -1),
    FigureRow(OVERLAP_SHARE, "overlap of communication", "%", 1),
    FigureRow(IDLE_SHARE, "device idle", "% of a step", -1),
    FigureRow(DATA_SHARE, "waiting for data", "% of a step", -1),
    FigureRow(MAX_ACTIVE_GIB, "peak memory", "GiB", -1),
    FigureRow(ALL_GATHER_MS, "all-gathers", "ms a step"),
    FigureRow(REDUCE_SCATTER_MS, "reduce-scatters", "ms a step"),
    FigureRow(BACKGROUND_STEP_MS, "steps in the background", "ms a step"),
    FigureRow(TRANSFER_MS.format("to_device"), "copies to the device", "ms a step"),
    FigureRow(TRANSFER_MS.format("to_host"), "copies to the host", "ms a step"),
    FigureRow(TRANSFER_MS.format("disk_read"), "reads of offloaded state", "ms a step"),
    FigureRow(TRANSFER_MS.format("disk_write"), "writes of offloaded state", "ms a step"),
    FigureRow(SENT_MIB, "sent by a rank", "MiB a step"),
    FigureRow(NUM_COLLECTIVES, "collectives", "a step"),
    FigureRow(PADDING_SHARE, "padding", "% of the parameters"),
)
