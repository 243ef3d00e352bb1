"""What a machine was measured to do: curves of seconds, written to a file and read back; no torch.

Note [Curves of seconds]
A curve says how long ONE operation of a given size takes, with all ranks of the machine at work at
once. Its low end is what an operation costs at least (a launch, a call, a round trip), its slope
the rate, so neither is fitted. Between two measured sizes it is straight in logarithms; below the
first it is constant, above the last it goes on at the last rate.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field

from shardwise.errors import ConfigError
from shardwise.keys import checked_value, read_json
from shardwise.spelling import did_you_mean

FORMAT = "shardwise-calibration"
VERSION = 2
Unit = Literal["flops", "bytes"]
_Size = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Sizes = Annotated[tuple[_Size, ...], Field(min_length=1)]
_Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Whole = Annotated[int, Field(ge=0)]
_Count = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class Curve:
    """Seconds of one operation by its size; see Note [Curves of seconds]."""

    unit: Unit
    sizes: _Sizes
    seconds: _Sizes

    def __post_init__(self) -> None:
        """Refuse what is no curve."""
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"expected as many seconds as sizes, {len(self.sizes)}")
        if any(b <= a for a, b in pairwise(self.sizes)):
            raise ValueError("expected sizes that grow")
        if any(b < a for a, b in pairwise(self.seconds)):
            raise ValueError("expected seconds that do not fall")

    @staticmethod
    def through(unit: Unit, points: Sequence[tuple[float, float]]) -> Curve:
        """Make a curve of measured (size, seconds) that never falls.

        Noise only adds, so an operation takes at most as long as a larger one was measured to.
        """
        shortest = math.inf
        kept = []
        for size, seconds in sorted(points, reverse=True):
            shortest = min(shortest, seconds)
            kept.append((float(size), shortest))
        sizes, durations = zip(*reversed(kept), strict=True)
        return Curve(unit, sizes, durations)

    def at(self, size: float) -> float:
        """Return the seconds of one operation of this size."""
        if size <= self.sizes[0]:
            return self.seconds[0]
        if size >= self.sizes[-1]:
            return self.seconds[-1] * size / self.sizes[-1]
        right = bisect_right(self.sizes, size)
        lo, hi = self.sizes[right - 1], self.sizes[right]
        share = math.log(size / lo) / math.log(hi / lo)
        first, second = self.seconds[right - 1], self.seconds[right]
        return first * (second / first) ** share

    @property
    def peak_rate(self) -> float:
        """Return the highest rate at a measured size, in units per second."""
        return max(size / seconds for size, seconds in zip(self.sizes, self.seconds, strict=True))


@dataclass(frozen=True)
class Host:
    """What was measured: the machine, its device and the software."""

    processor: str
    num_cores: _Whole
    memory_bytes: _Whole
    device: str
    device_memory_bytes: _Whole
    torch: str
    shardwise: str


@dataclass(frozen=True)
class Calibration:
    """What one machine does with ``num_ranks`` ranks at work on it at the same time.

    ``curves`` are by name: ``matmul.forward.float32``, ``all_gather.2`` and so on. ``overlap`` is
    the share of the shorter of a collective and a computation that is hidden when both run: 1 where
    a collective costs the computation nothing, 0 where the two take as long as one after the other,
    below 0 where they take longer together.
    ``message_s`` is what each further message of a collective adds, ``unit_forward_s`` and
    ``unit_backward_s`` what the engine's host code adds to a unit's pass, ``checkpoint_s`` what
    activation checkpointing adds to a block beside running it again. ``process_bytes`` is resident
    in a rank before it has a tensor; ``context_bytes`` is taken on the device by the driver and the
    communicators, outside of torch's allocator.
    """

    host: Host
    measured_at: str
    backend: str
    num_ranks: _Count
    threads_per_rank: _Count
    overlap: Annotated[float, Field(ge=-1, le=1, allow_inf_nan=False)]
    message_s: _Amount
    unit_forward_s: _Amount
    unit_backward_s: _Amount
    checkpoint_s: _Amount
    process_bytes: _Whole
    context_bytes: _Whole
    curves: dict[str, Curve]
    where: str = field(default="", compare=False)

    def curve(self, name: str) -> Curve:
        """Return the curve of this name. **Raises** ConfigError where it was not measured."""
        if name not in self.curves:
            hint = did_you_mean(name, self.curves) or "."
            raise ConfigError(
                f"calibration {self.where or self.measured_at}: {name!r} was not measured{hint} "
                "Measure again with `shardwise bench --calibrate`"
            )
        return self.curves[name]


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as JSON, with the unit of every number in its key."""
    path.write_text(json.dumps(to_json(calibration), indent=1) + "\n", encoding="utf-8")


def to_json(calibration: Calibration) -> dict[str, Any]:
    """Return what the file holds."""
    values = asdict(calibration)
    curves, _ = values.pop("curves"), values.pop("where")
    written = {
        name: {f"size_{curve['unit']}": list(curve["sizes"]), "seconds": list(curve["seconds"])}
        for name, curve in curves.items()
    }
    return {"format": FORMAT, "version": VERSION, **values, "curves": written}


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    **Raises** ConfigError, naming the file and the key: it cannot be read, it is no calibration or
    one of a later version, or a value is missing or makes no sense.
    """
    values = read_json(path)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: expected a calibration, as `shardwise bench --calibrate` writes it"
        )
    version = checked_value(_Count, values.get("version"), f"{path}: version")
    if version > VERSION:
        raise ConfigError(
            f"{path}: version: expected at most {VERSION}, got {version}; it was written by a "
            "later shardwise, so update this one or measure again"
        )
    if version < VERSION:
        raise ConfigError(
            f"{path}: version: expected {VERSION}, got {version}, whose sizes of attention's "
            "backward pass are counted in another way; measure again"
        )
    curves = values.get("curves")
    if isinstance(curves, dict):
        values["curves"] = {n: _with_unit(c, f"{path}: curves.{n}") for n, c in curves.items()}
    found: Calibration = checked_value(Calibration, values, str(path))
    return replace(found, where=str(path))


def _with_unit(curve: Any, where: str) -> dict[str, Any]:
    """Return a curve by the names of its fields; in the file the unit is a part of a key."""
    found = dict(curve) if isinstance(curve, dict) else {}
    unit = next((u for u in get_args(Unit) if f"size_{u}" in found), None)
    if unit is None:
        raise ConfigError(f"{where}: expected size_bytes or size_flops, and seconds")
    return {"unit": unit, "sizes": found[f"size_{unit}"], "seconds": found.get("seconds")}
