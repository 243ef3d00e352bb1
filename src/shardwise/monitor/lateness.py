"""The steps for which other ranks waited for one rank, and the part of its step that was longer.

Note [Late steps]
~~~~~~~~~~~~~~~~~
A rank that does not wait for others is the one that others wait for. So of each step every rank
tells the seconds in each of its parts, without waits for other ranks. The rank with most of them
is late if it has clearly more than the rank in the middle, beyond its waits for a core: where cores
are short those fall on each rank in turn, and say nothing about its program. Sums of late seconds
find a rank that is slow in one step of ten, or at the begin of each epoch, which means of
steps hide.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwise.monitor import metrics as m
from shardwise.monitor.lines import Amount, Count, Name

# Parts of a step that are the rank's own, by their figure.
OWN_PARTS = (m.COMPUTE_S, m.DATA_S, m.OUTSIDE_S, m.STALL_S)
PARTS = (*OWN_PARTS, m.CORE_WAIT_S, m.COLLECTIONS)
_TICKS_PER_S = 10_000
_NOISE_S, _CPU_NOISE_S = 0.002, 0.02
_MOST_NUMBERS = 8192  # that all ranks send about a line
_LATE_SHARE = 0.1  # of a step
Parts = Mapping[str, Sequence[int]]  # ticks of each step


@dataclass(frozen=True)
class Late:
    """The steps of a line in which a rank was late, and its late seconds by cause.

    ``longest_s`` is the latest step's.
    """

    num_steps: Count
    seconds: Mapping[Name, Amount] = field(default_factory=dict)
    longest_s: Amount = 0.0


def noise_of(device: str) -> float:
    """Return the seconds of a step that say nothing: on a CPU a slice of a core's time."""
    return _CPU_NOISE_S if device == "cpu" else _NOISE_S


def parts_of(steps: Sequence[Mapping[str, float]], num_ranks: int) -> Parts:
    """Return the parts of steps that a rank sends: of all, or of the first ones of many."""
    steps = steps[: max(_MOST_NUMBERS // (num_ranks * len(PARTS)), 1)]
    rows = {name: [round(step.get(name, 0.0) * _TICKS_PER_S) for step in steps] for name in PARTS}
    return {name: row for name, row in rows.items() if any(row)}


def late_over_ranks(rows: Sequence[Parts], noise_s: float) -> dict[int, Late]:
    """Return the late steps of each rank that has any; ``rows`` are in rank order.

    Less than ``noise_s`` of a step is noise.
    """
    num_steps = max((len(row) for parts in rows for row in parts.values()), default=0)
    if len(rows) == 1 or not num_steps:
        return {}
    nothing = [0] * num_steps
    by_part = {name: [row.get(name, nothing) for row in rows] for name in PARTS}
    found: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    counts: dict[int, int] = defaultdict(int)
    longest: dict[int, float] = defaultdict(float)
    for step in range(num_steps):
        of_step = {name: [row[step] for row in part] for name, part in by_part.items()}
        own = [sum(of_step[name][rank] for name in OWN_PARTS) for rank in range(len(rows))]
        late = max(range(len(rows)), key=own.__getitem__)
        more = own[late] - _of_others(own, late) - of_step[m.CORE_WAIT_S][late]
        if more <= max(_LATE_SHARE * own[late], noise_s * _TICKS_PER_S):
            continue
        longer = {
            name: values[late] - _of_others(values, late)
            for name, values in of_step.items()
            if name != m.CORE_WAIT_S
        }
        cause = max(OWN_PARTS, key=longer.__getitem__)
        if longer[m.COLLECTIONS] > 0 and cause != m.DATA_S:  # inside of another part
            cause = m.COLLECTIONS
        found[late][cause] += more
        counts[late] += 1
        longest[late] = max(longest[late], more)
    return {
        rank: Late(
            counts[rank],
            {name: ticks / _TICKS_PER_S for name, ticks in causes.items()},
            longest[rank] / _TICKS_PER_S,
        )
        for rank, causes in found.items()
    }


def _of_others(values: Sequence[int], rank: int) -> float:
    return median(value for other, value in enumerate(values) if other != rank)
