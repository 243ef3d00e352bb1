"""The record of an observed run: its folder, and the lines and values in it.

Note [The folder of a run]
~~~~~~~~~~~~~~~~~~~~~~~~~~
``OUTPUT/observed/run.json`` has the settings of the run (`RunFacts`), written once by rank 0.
``steps.jsonl`` has a line for each few steps, every figure over all ranks, by rank 0.
``rank-N.jsonl`` has the lines that only that rank can write: timelines and memory of single steps,
its begin and end, each with its kind and the fields of its class; an optional field that is None is
left out. Readers ignore keys and kinds that they do not know. Users read the files with other
tools, so keys keep their meaning; ``format`` counts up if one does not.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import Field

from shardwise.checkpoint.files import replacing
from shardwise.errors import ConfigError
from shardwise.keys import checked_value, read_json, shown
from shardwise.monitor.lateness import Late
from shardwise.monitor.lines import (
    MAX_RANKS,
    Amount,
    Count,
    JsonLine,
    Logged,
    Name,
    Rank,
    SpanRow,
    read_lines,
    read_newest,
    read_samples,
)
from shardwise.monitor.metrics import OverRanks, OverSteps
from shardwise.processes import Process
from shardwise.unit_facts import UnitFacts

FORMAT = 1
FOLDER = "observed"
DETAILS = ("timeline", "memory")  # kinds of lines of single steps, which are long
_MOST_LINES = 240  # over all ranks that a live reader keeps
_TAIL_BYTES = 1 << 22  # of a file that it reads
# Of lines over all ranks that are read of a run that is over: the last ones, and samples.
_TAIL_OF_LONG_BYTES, _NUM_SAMPLES, _SAMPLE_BYTES = 16 << 20, 64, 64 << 10
_LATE_TIMES, _LATE_S = 4.0, 30.0  # usual gaps without new figures, and at least so many seconds
Kinds = Mapping[Name, Count]  # bytes by kind of memory
_Reader = Callable[[Path], Iterable[JsonLine]]


@dataclass(frozen=True)
class RunFacts:
    """The settings of a run, written once by rank 0.

    ``degrees`` are the sizes of the mesh's axes by name, ``hosts`` are by rank. ``command`` is the
    program of rank 0 with its arguments. ``peak_flops`` is
    the device's rate in the dtype of the computation, None if unknown. ``flops_per_token`` counts
    the products with this rank's weights in a forward and backward pass. ``unsharded_bytes`` counts
    trained parameters that belong to no unit. With ``reduces_units_alone`` each unit is reduced by
    itself, as `fully_shard` does, regardless of ``bucket_bytes``.
    """

    stage: Annotated[int, Field(ge=0, le=3)]
    degrees: Mapping[Name, Annotated[int, Field(ge=1, le=MAX_RANKS)]]
    num_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    device: Name
    device_bytes: Count
    bucket_bytes: Count
    prefetch_bytes: Count | None
    units: tuple[UnitFacts, ...]
    hosts: tuple[Name, ...] = ()
    peak_flops: Amount | None = None
    flops_per_token: Amount = 0.0
    versions: Mapping[Name, Name] = field(default_factory=dict)
    started: Name = ""
    optimizer: Name = ""
    offload: Name = ""
    command: Name = ""
    unsharded_bytes: Count = 0
    reduces_units_alone: bool = False
    format: int = FORMAT

    @property
    def full_bytes(self) -> int:
        """Bytes of all parameters, in the master dtype."""
        return sum(unit.full_bytes for unit in self.units)

    @property
    def padding_share(self) -> float:
        """Padding as a share of the parameters' bytes."""
        return sum(u.padding_bytes for u in self.units) / (self.full_bytes or 1)


@dataclass(frozen=True)
class StepLine:
    """The figures of ``num_steps`` steps up to ``step``, over all ranks; means of the steps.

    ``at_s`` counts from the start. ``values`` are the last values that rank 0's loop has logged,
    ``values_over_steps`` those logged in these steps. ``metrics_over_steps`` are the figures that
    rank 0 has of every step: time, tokens, MFU. ``waited_for[rank][other]`` are the milliseconds of
    each step that a rank waits for another one's messages: the few longest, if the transport
    reports them. ``bad_since[name][rank]`` is the first step in which a value logged by a rank was
    not finite, 0 if all were finite; it has the names that are bad on any rank, and gradients by
    the name of their metric. ``late`` has the ranks that were late in some of these steps.
    """

    step: Count
    num_steps: Annotated[int, Field(ge=1, le=1 << 62)]
    at_s: Amount
    metrics: Mapping[Name, OverRanks]
    values: Mapping[Name, Logged] = field(default_factory=dict)
    waited_for: Mapping[Rank, Mapping[Rank, Amount]] = field(default_factory=dict)
    bad_since: Mapping[Name, Mapping[Rank, Count]] = field(default_factory=dict)
    values_over_steps: Mapping[Name, OverSteps] = field(default_factory=dict)
    metrics_over_steps: Mapping[Name, OverSteps] = field(default_factory=dict)
    late: Mapping[Rank, Late] = field(default_factory=dict)


# -- lines of single ranks
@dataclass(frozen=True)
class Begin:
    """A rank begins; its process, None in records of an earlier version."""

    step: Count
    process: Process | None = None


@dataclass(frozen=True)
class End:
    """A rank ends, with an error or without.

    ``follows`` tells that communication failed, usually because another rank had failed before.
    ``during``, ``phase`` and ``unit`` are the place of an error in a step.
    """

    step: Count
    error: Name | None
    unix_s: Amount | None = None
    message: Name | None = None
    follows: bool | None = None
    during: Count | None = None
    phase: Name | None = None
    unit: Name | None = None


@dataclass(frozen=True)
class Timeline:
    """The spans of one step."""

    step: Count
    seconds: Amount
    spans: Sequence[SpanRow]


@dataclass(frozen=True)
class Moment:
    """The memory of the device as a phase begins or ends; ``other`` is not the engine's."""

    phase: Name
    unit: Name
    device: Kinds
    other: Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]


@dataclass(frozen=True)
class Memory:
    """The memory of one step: each moment by kind, the one of index ``peak`` by unit too."""

    step: Count
    moments: Annotated[Sequence[Moment], Field(min_length=1)]
    peak: Count
    units: Mapping[Name, Mapping[Name, Kinds]]  # by place: device, host, files

    def __post_init__(self) -> None:
        """Check the index ``peak``, and that units are on the device."""
        if self.peak >= len(self.moments):
            raise ValueError(f"expected peak to be one of {len(self.moments)} moments")
        if "device" not in self.units:
            raise ValueError("expected units on the device")


@dataclass(frozen=True)
class NonFinite:
    """Gradients were not finite, of these parameters; ``finite_step`` had the last finite ones."""

    step: Count
    parameters: Sequence[Name]
    finite_step: Count = 0


@dataclass(frozen=True)
class LostUpdates:
    """The share of updates that round away, of the worst parameters."""

    step: Count
    shares: Mapping[Name, Annotated[float, Field(ge=0, le=1)]]


@dataclass(frozen=True)
class SkippedSteps:
    """A loss scaler has skipped so many steps in a row, the last one with this ``scale``."""

    step: Count
    num_steps: Count
    scale: Logged = None


@dataclass(frozen=True)
class NoGradient:
    """Parameters of the optimizer that have no gradient on any rank, or only zeros, in one step.

    ``share`` is that of their elements, ``trained`` how many of them need a gradient.
    """

    step: Count
    parameters: Sequence[Name]
    num_parameters: Count
    share: Annotated[float, Field(ge=0, le=1)]
    trained: Count


@dataclass(frozen=True)
class IdleScheduler:
    """The optimizer has a learning rate scheduler that was never stepped."""

    step: Count
    scheduler: Name
    rate: Logged = None


@dataclass(frozen=True)
class Fix:
    """One way to need less memory: a change of `shard()` or of the loop; bytes of this rank."""

    change: Name
    fits: bool
    saved_bytes: int = 0
    peak_bytes: int = 0
    cost: Name = ""


@dataclass(frozen=True)
class OutOfMemory:
    """Memory ran out; bytes of this rank's device.

    ``asked_bytes`` is the failed request, if known. ``blocks`` are the engine's largest: kind,
    unit, bytes.
    """

    step: Count
    asked_bytes: Count | None
    in_use_bytes: Count
    capacity_bytes: Count
    fixes: Sequence[Fix]
    rank: Rank = 0
    phase: Name = ""
    unit: Name = ""
    kinds: Kinds | None = None
    other_bytes: int = 0
    blocks: Sequence[tuple[Name, Name, int]] = ()


@dataclass(frozen=True)
class Save:
    """A checkpoint is on disk."""

    step: Count
    path: Annotated[str, Field(max_length=4096)]
    is_finite: bool


@dataclass(frozen=True)
class OtherSave:
    """The training waited for a save by a call of torch's."""

    step: Count
    call: Name
    seconds: Amount


@dataclass(frozen=True)
class Restart:
    """The run goes on from ``step`` after one that ended; ``parts_s`` is what that cost, in order.

    ``lost_steps`` were taken before and are taken again.
    """

    step: Count
    cause: Name
    lost_steps: Count
    from_memory: bool
    parts_s: Mapping[Name, Amount]


_Detail = Timeline | Memory | NonFinite | LostUpdates | OutOfMemory
_Training = SkippedSteps | NoGradient | IdleScheduler
RankLine = Begin | End | _Detail | _Training | Save | OtherSave | Restart
KINDS: Mapping[str, type[RankLine]] = {
    "begin": Begin,
    "end": End,
    "timeline": Timeline,
    "memory": Memory,
    "non_finite": NonFinite,
    "lost_updates": LostUpdates,
    "out_of_memory": OutOfMemory,
    "skipped_steps": SkippedSteps,
    "no_gradient": NoGradient,
    "idle_scheduler": IdleScheduler,
    "save": Save,
    "other_save": OtherSave,
    "restart": Restart,
}
_NAMES = {kind: name for name, kind in KINDS.items()}
L = TypeVar("L", bound=RankLine)


def keys_of(line: RankLine) -> JsonLine:
    """Return a line as it is written."""
    values = {f.name: getattr(line, f.name) for f in fields(line)}
    absent = {f.name for f in fields(line) if f.default is None and values[f.name] is None}
    return {"kind": _NAMES[type(line)]} | {k: v for k, v in values.items() if k not in absent}


def read_line(line: JsonLine, path: object) -> RankLine | None:
    """Return a line of a rank; None if its kind is unknown.

    **Raises** ConfigError if a value has a wrong type or range.
    """
    kind, where = line.get("kind", ""), f"{path}: step {shown(line['step'])}"
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: kind: expected text, got {shown(kind)}")
    if kind not in KINDS:
        return None
    found: RankLine = checked_value(KINDS[kind], line, f"{where}, {kind}")
    return found


# -- the whole record
@dataclass(frozen=True)
class RunRecord:
    """A run as it was recorded, with the lines of each rank as they were written.

    ``idle_s`` is the time since the last write when the record was read; None while it is made.
    The first ``num_samples`` of the ``steps`` are samples of a file that is too long to be read.
    """

    path: Path
    facts: RunFacts
    steps: tuple[StepLine, ...]
    by_rank: Mapping[int, tuple[RankLine, ...]]
    idle_s: float | None = None
    num_samples: int = 0

    @property
    def note(self) -> str | None:
        """A remark on lines that were not read; None if all were."""
        if not self.num_samples:
            return None
        first = self.steps[self.num_samples].step if self.steps[self.num_samples :] else "the end"
        return (
            f"steps.jsonl is long: all lines from step {first} on were read, and "
            f"{self.num_samples} lines before, at equal distances"
        )

    @property
    def end_lines(self) -> Mapping[int, Begin | End]:
        """The last line of its begin or end, by rank."""
        return {
            rank: line
            for rank, lines in self.by_rank.items()
            for line in lines
            if isinstance(line, Begin | End)
        }

    @property
    def ending(self) -> str | None:
        """The end that the run has written; None while it continues, or if it was killed."""
        ends = [line for line in self.end_lines.values() if isinstance(line, End)]
        errors = [line.error for line in ends if line.error]
        return f"it broke off: {errors[0]}" if errors else "it is over" if ends else None

    def lines(self, kind: type[L], rank: int | None = None) -> Iterator[tuple[int, L]]:
        """Yield the lines of one class, with their ranks."""
        for each, lines in self.by_rank.items():
            if rank is None or each == rank:
                yield from ((each, line) for line in lines if isinstance(line, kind))


def write_facts(folder: Path, facts: RunFacts) -> None:
    """Write ``run.json`` atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "run.json") as made:
        made.write_text(json.dumps(asdict(facts), indent=1) + "\n", encoding="utf-8")


def read_run(path: str | Path, newest: int | None = None) -> RunRecord:
    """Read the record of a run, which may still be written; a line cut short is left out.

    ``path`` is the run's output, or the folder in it. Of more than 20 MiB of lines over all ranks
    the last 16 are read, and samples of those before. With ``newest`` only so many last lines of
    each of `DETAILS` are read of every rank, as all of a long run may be gigabytes.

    **Raises** ConfigError if there is no record, or another version has written it.
    """
    own: _Reader = read_lines
    if newest is not None:
        own = partial(read_newest, count=newest, kinds=DETAILS)
    steps = partial(
        read_samples,
        tail_bytes=_TAIL_OF_LONG_BYTES,
        num_samples=_NUM_SAMPLES,
        sample_bytes=_SAMPLE_BYTES,
    )
    return _read(Path(path), steps, own)


def read_ends(path: str | Path) -> RunRecord:
    """Read the newest lines of a run that goes on: over all ranks, and of each rank and kind one.

    It works on every machine that sees the files. **Cost** the last 4 MiB of each file.

    **Raises** ConfigError as `read_run` does.
    """

    def steps(file: Path) -> tuple[Sequence[JsonLine], int]:
        return read_newest(file, count=_MOST_LINES, tail_bytes=_TAIL_BYTES), 0

    return _read(Path(path), steps, partial(read_newest, count=1, tail_bytes=_TAIL_BYTES))


def _read(
    run: Path, read_steps: Callable[[Path], tuple[Sequence[JsonLine], int]], read_own: _Reader
) -> RunRecord:
    folder = folder_of(run)
    facts, path, files = read_facts(folder, run), folder / "steps.jsonl", rank_files(folder)
    lines, num_samples = read_steps(path)
    steps = tuple(read_step(line, path) for line in lines)
    by_rank = {
        rank: tuple(line for each in read_own(file) if (line := read_line(each, file)) is not None)
        for rank, file in files
    }
    written = [folder / "run.json", *(file for _, file in files), *[path] * path.exists()]
    written_s = max(file.stat().st_mtime for file in written)
    idle_s = max(time.time() - written_s, 0.0)
    return RunRecord(run, facts, steps, by_rank, idle_s, num_samples)


def folder_of(path: str | Path) -> Path:
    """Return the folder of a run's record; ``path`` is that folder, or the run's output."""
    found = Path(path)
    return found if found.name == FOLDER else found / FOLDER


def rank_files(folder: Path) -> list[tuple[int, Path]]:
    """Return the files of ranks' own lines, in rank order."""
    files = ((file.stem.removeprefix("rank-"), file) for file in folder.glob("rank-*.jsonl"))
    return sorted((int(rank), file) for rank, file in files if rank.isdecimal())


def read_facts(folder: Path, run: Path) -> RunFacts:
    """Return the facts in ``run.json`` of a folder; ``run`` is the name of the run in errors.

    **Raises** ConfigError without that file, or if another version has written it.
    """
    path = folder / "run.json"
    if not path.is_file():
        raise ConfigError(
            f"{run}: no observed run, as there is no {path}. `with "
            "shardwise.observe(model, optimizer, output=...)` and `shardwise train` write one"
        )
    values = read_json(path)
    format_number = values.get("format", FORMAT) if isinstance(values, dict) else FORMAT
    if format_number != FORMAT:
        raise ConfigError(
            f"{path}: format {shown(format_number)}, and this version reads {FORMAT}; read it with "
            "the version that wrote it"
        )
    return checked_value(RunFacts, values, f"{path}: not the facts of a run")


def read_step(line: JsonLine, path: object = "steps.jsonl") -> StepLine:
    """Return a line of ``steps.jsonl``, without figures that are not finite on some rank.

    **Raises** ConfigError for wrong types.
    """
    found: StepLine = checked_value(StepLine, line, f"{path}: step {shown(line['step'])}")
    metrics = found.metrics.items()
    finite = {name: v for name, v in metrics if None not in (v.min, v.median, v.max)}
    return replace(found, metrics=finite)


# -- steps of a run
def over_steps(lines: Iterable[StepLine], name: str) -> OverRanks | None:
    """Return the medians of a figure over lines, and the ranks that have its extremes most often.

    None if no line has the figure.
    """
    found = [line.metrics[name] for line in lines if name in line.metrics]
    if not found:
        return None
    return OverRanks(
        statistics.median(value.min for value in found),
        statistics.median(value.median for value in found),
        statistics.median(value.max for value in found),
        statistics.mode(value.min_rank for value in found),
        statistics.mode(value.max_rank for value in found),
    )


def settled(lines: Sequence[StepLine]) -> Sequence[StepLine]:
    """Return the lines about the later half of the steps, without the slow first ones.

    That is not the later half of the lines, as each of the first few steps is a line.
    """
    if not lines:
        return lines
    middle = (lines[0].step - lines[0].num_steps + lines[-1].step) / 2
    return [line for line in lines if line.step > middle]


def gap_of(run: RunRecord) -> float | None:
    """Return the usual seconds between two lines; None before there are two."""
    late = [line.at_s for line in settled(run.steps)[-8:]]
    return (late[-1] - late[0]) / (len(late) - 1) if len(late) > 1 else None


def is_late(run: RunRecord) -> bool:
    """Tell whether new figures are long overdue: the run was killed, or it hangs."""
    gap_s = gap_of(run)
    if run.ending is not None or gap_s is None:
        return False
    return (run.idle_s or 0.0) > max(_LATE_TIMES * gap_s, _LATE_S)
