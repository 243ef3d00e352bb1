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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ConfigError

FORMAT = "shardwise-calibration"
VERSION = 1
Unit = Literal["flops", "bytes"]


@dataclass(frozen=True)
class Curve:
    """Seconds of one operation by its size; see Note [Curves of seconds]."""

    unit: Unit
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

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
    num_cores: int
    memory_bytes: int
    device: str
    device_memory_bytes: int
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
    num_ranks: int
    threads_per_rank: int
    overlap: float
    message_s: float
    unit_forward_s: float
    unit_backward_s: float
    checkpoint_s: float
    process_bytes: int
    context_bytes: int
    curves: Mapping[str, Curve]
    where: str = field(default="", compare=False)

    def curve(self, name: str) -> Curve:
        """Return the curve of this name. **Raises** ConfigError where it was not measured."""
        if name not in self.curves:
            near = get_close_matches(name, self.curves, n=1)
            hint = f"; the nearest that was is {near[0]!r}" if near else ""
            raise ConfigError(
                f"calibration {self.where or self.measured_at}: {name!r} was not measured{hint}. "
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
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigError(
            f"{path}: expected a calibration, as `shardwise bench --calibrate` writes it"
        )
    reader = _Reader(str(path))
    version = reader.number("version", values.get("version"), whole=True)
    if version > VERSION:
        raise ConfigError(
            f"{path}: version: expected at most {VERSION}, got {version}; it was written by a "
            "later shardwise, so update this one or measure again"
        )
    return reader.calibration(values)


class _Reader:
    """Takes values out of JSON, and says which key of which file is wrong."""

    def __init__(self, where: str) -> None:
        self._where = where

    def fail(self, key: str, expected: str, got: Any) -> ConfigError:
        shown = "nothing" if got is None else repr(got)[:60]
        return ConfigError(f"{self._where}: {key}: expected {expected}, got {shown}")

    def calibration(self, values: Mapping[str, Any]) -> Calibration:
        found = self._curves(values.get("curves"))
        overlap = values.get("overlap")
        if not isinstance(overlap, int | float) or not -1 <= overlap <= 1:
            raise self.fail("overlap", "a share from -1 to 1", overlap)
        taken = self._fields(Calibration, values, {"host", "overlap", "curves", "where"})
        host = values.get("host")
        if not isinstance(host, dict):
            raise self.fail("host", "an object", host)
        measured = Host(**self._fields(Host, host, set(), "host."))
        return Calibration(host=measured, overlap=overlap, curves=found, where=self._where, **taken)

    def _fields(
        self, kind: type, values: Mapping[str, Any], apart: set[str], inside: str = ""
    ) -> dict[str, Any]:
        """Take every field of a class but those ``apart``, each as its type says."""
        taken: dict[str, Any] = {}
        for each in (e for e in fields(kind) if e.name not in apart):
            key, value, whole = f"{inside}{each.name}", values.get(each.name), each.type == "int"
            if each.type != "str":
                zero = each.name not in ("num_ranks", "threads_per_rank")
                taken[each.name] = self.number(key, value, whole=whole, zero=zero)
            elif isinstance(value, str):
                taken[each.name] = value
            else:
                raise self.fail(key, "text", value)
        return taken

    def number(self, key: str, value: Any, *, whole: bool = False, zero: bool = False) -> Any:
        kind = "whole number" if whole else "number"
        limit = "0 or more" if zero else "above 0"
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or (whole and value != int(value))
            or (value <= 0 and not (zero and value == 0))
        ):
            raise self.fail(key, f"a {kind} {limit}", value)
        return int(value) if whole else value

    def _curves(self, values: Any) -> dict[str, Curve]:
        if not isinstance(values, dict):
            raise self.fail("curves", "an object", values)
        return {name: self._curve(name, curve) for name, curve in values.items()}

    def _curve(self, name: str, values: Any) -> Curve:
        units: tuple[Unit, ...] = ("flops", "bytes")
        unit = next((u for u in units if isinstance(values, dict) and f"size_{u}" in values), None)
        if unit is None:
            raise self.fail(f"curves.{name}", "size_bytes or size_flops, and seconds", values)
        sizes = self._numbers(f"curves.{name}.size_{unit}", values[f"size_{unit}"])
        seconds = self._numbers(f"curves.{name}.seconds", values.get("seconds"))
        if len(sizes) != len(seconds):
            raise self.fail(f"curves.{name}.seconds", f"{len(sizes)} numbers", seconds)
        if any(b <= a for a, b in pairwise(sizes)):
            raise self.fail(f"curves.{name}.size_{unit}", "sizes that grow", sizes)
        if any(b < a for a, b in pairwise(seconds)):
            raise self.fail(f"curves.{name}.seconds", "seconds that do not fall", seconds)
        return Curve(unit, sizes, seconds)

    def _numbers(self, key: str, values: Any) -> tuple[float, ...]:
        if not isinstance(values, list) or not values:
            raise self.fail(key, "a list of numbers above 0", values)
        return tuple(self.number(key, value) for value in values)
