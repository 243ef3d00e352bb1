"""The lines that single ranks write of a run, by kind, and the check of lines that were read.

Readers rely on what stands here. A file of a run may come from anybody: a line that is not so is
refused by file, step and key before anything reads it. Other keys and kinds pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WrapValidator

from shardwise.errors import ConfigError
from shardwise.keys import checked_value, shown
from shardwise.processes import Process

MAX_RANKS = 1 << 24
Count = Annotated[int, Field(ge=0, le=1 << 62)]
Rank = Annotated[int, Field(ge=0, lt=MAX_RANKS)]
# Those beyond are no measurement, and sums of them would be infinite.
Amount = Annotated[float, Field(ge=0, le=1e30)]
Figure = Annotated[
    float,
    Field(ge=-1e30, le=1e30),
    WrapValidator(lambda value, check: None if value is None else check(value)),  # not finite
]
Name = Annotated[str, Field(max_length=1000)]
# What a loop logs may be larger, but sums and squares of it are finite.
MAX_LOGGED = 1e100
Extreme = Annotated[float, Field(ge=-MAX_LOGGED, le=MAX_LOGGED)]
Logged = Annotated[
    float | None,
    AfterValidator(lambda value: value if value is None or abs(value) <= MAX_LOGGED else None),
]
_Kinds = dict[Name, Count]


@dataclass(frozen=True)
class _Timeline:
    step: Count
    seconds: Amount
    spans: list[tuple[Name, Name, Name, Figure, Amount, Count]]


@dataclass(frozen=True)
class _Moment:
    phase: Name
    unit: Name
    device: _Kinds
    other: Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]


@dataclass(frozen=True)
class _Units:
    device: dict[Name, _Kinds]
    host: dict[Name, _Kinds]
    files: dict[Name, _Kinds]


@dataclass(frozen=True)
class _Memory:
    step: Count
    moments: Annotated[list[_Moment], Field(min_length=1)]
    peak: Count
    units: _Units


@dataclass(frozen=True)
class _NonFinite:
    step: Count
    parameters: list[Name]
    finite_step: Count = 0


@dataclass(frozen=True)
class _LostUpdates:
    step: Count
    shares: Mapping[Name, Annotated[float, Field(ge=0, le=1)]]


@dataclass(frozen=True)
class _Begin:
    step: Count
    process: Process | None = None


@dataclass(frozen=True)
class _End:
    step: Count
    error: Name | None
    message: Name = ""
    follows: bool = False
    during: Count = 0
    phase: Name = ""
    unit: Name = ""
    unix_s: Amount = 0.0


@dataclass(frozen=True)
class _Save:
    step: Count
    path: Annotated[str, Field(max_length=4096)]
    is_finite: bool


@dataclass(frozen=True)
class _OtherSave:
    step: Count
    call: Name
    seconds: Amount


@dataclass(frozen=True)
class _Fix:
    change: Name
    fits: bool


@dataclass(frozen=True)
class _OutOfMemory:
    step: Count
    asked_bytes: Count | None
    in_use_bytes: Count
    capacity_bytes: Count
    fixes: list[_Fix]


def _has_peak(line: _Memory) -> _Memory:
    if line.peak >= len(line.moments):
        raise ValueError(f"expected peak to be one of {len(line.moments)} moments")
    return line


_KINDS: Mapping[str, Any] = {
    "timeline": _Timeline,
    "memory": Annotated[_Memory, AfterValidator(_has_peak)],
    "non_finite": _NonFinite,
    "lost_updates": _LostUpdates,
    "out_of_memory": _OutOfMemory,
    "begin": _Begin,
    "save": _Save,
    "other_save": _OtherSave,
    "end": _End,
}


def checked_line(line: Mapping[str, Any], path: object) -> Mapping[str, Any]:
    """Return a rank's line as it is. **Raises** ConfigError where its kind needs another value."""
    kind = line.get("kind", "")
    where = f"{path}: step {shown(line['step'])}"
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: kind: expected text, got {shown(kind)}")
    if kind in _KINDS:
        checked_value(_KINDS[kind], line, f"{where}, {kind}")
    return line
