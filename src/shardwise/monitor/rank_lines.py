"""The lines that single ranks write: timelines and memory of steps, saves, their begin and end.

A line is written with its kind and the fields of its class; an optional field that is None is left
out. Readers ignore keys and kinds that they do not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.keys import checked_value, shown
from shardwise.monitor.lines import Amount, Count, JsonLine, Name, Number, Rank
from shardwise.processes import Process

Kinds = Mapping[Name, Count]  # bytes by kind of memory
# Line of work, phase, unit, begin and length in milliseconds, bytes.
SpanRow = tuple[Name, Name, Name, Number, Amount, Count]


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
        """Check that there is a moment ``peak``, and units on the device."""
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


RankLine = (
    Begin | End | Timeline | Memory | NonFinite | LostUpdates | OutOfMemory | Save | OtherSave
)
KINDS: Mapping[str, type[RankLine]] = {
    "begin": Begin,
    "end": End,
    "timeline": Timeline,
    "memory": Memory,
    "non_finite": NonFinite,
    "lost_updates": LostUpdates,
    "out_of_memory": OutOfMemory,
    "save": Save,
    "other_save": OtherSave,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


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
