"""The learning-rate curves of DeepSpeed's schedulers in closed form; imports no torch.

Note [Where a curve starts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A curve gives the rate of the optimizer update after ``done`` steps of the schedule, 0 for the first
update of a run. DeepSpeed counts from -1. The warm-ups therefore take two updates at their lowest
rate (the logarithm of 1 is 0), and one cycle starts at its lowest momentum before it jumps to the
highest. Both are kept, so that a run which changes engines follows the same curve.

**Source** DeepSpeed 0.19 ``runtime/lr_schedules.py``; the tests hold every step against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardwise.errors import ConfigError
from shardwise.keys import check_names, near_miss


class _Needed(Enum):
    """The type of a value that is not given yet. Copies and pickles keep its identity."""

    VALUE = "needed"


_NEEDED = _Needed.VALUE
_BASE = None  # the learning rate that the optimizer was made with
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

# Every option of every curve, with its default.
CURVES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": _BASE, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": _NEEDED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001,
        **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": _NEEDED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001,
        **_WARMUP},
    "OneCycle": {"cycle_min_lr": _NEEDED, "cycle_max_lr": _NEEDED, "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000, "cycle_second_step_size": None, "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None, "decay_step_size": 0, "cycle_momentum": True,
        "cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.0},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0, "lr_range_test_staircase": False},
}  # fmt: skip
_PER_GROUP = {
    *("warmup_min_lr", "warmup_max_lr", "cycle_min_lr", "cycle_max_lr"),
    *("cycle_min_mom", "cycle_max_mom", "lr_range_test_min_lr"),
}
_WHOLE = {"warmup_num_steps": 0, "total_num_steps": 1, "lr_range_test_step_size": 1}  # at least
_FLAGS = {"cycle_momentum", "lr_range_test_staircase"}
_MAY_BE_NONE = {"warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count"}
_BETA2 = 0.99  # DeepSpeed sets it beside a cycled momentum


@dataclass(frozen=True)
class Curve:
    """One schedule: ``name`` is a row of `CURVES`, ``options`` has a value for each of its options.

    While an option is `missing`, the curve can be shown but not evaluated.
    """

    name: str
    options: Mapping[str, Any]

    def learning_rate(self, done: int, base_lr: float, group: int = 0) -> float:
        """Return the rate of the update after ``done`` steps: see Note [Where a curve starts].

        ``base_lr`` is the optimizer's initial rate; ``group`` is the number of a parameter group.

        **Raises** ConfigError if an option is missing.
        """
        missing = self.missing
        if missing:
            raise ConfigError(
                f"scheduler {self.name}: {missing[0]} is not given; set it in the file or pass "
                f"{missing[0]}= to scheduler()"
            )
        if self.name == "OneCycle":
            return self._cycle_rate(done, group)
        if self.name == "LRRangeTest":
            steps = done / self.options["lr_range_test_step_size"]
            interval = math.floor(steps) if self.options["lr_range_test_staircase"] else steps
            increase = 1 + self.options["lr_range_test_step_rate"] * interval
            return float(self._of("lr_range_test_min_lr", group) * increase)
        if self.name == "WarmupCosineLR":
            return base_lr * self._cosine_ratio(done - 1) if done else 0.0
        low = self._of("warmup_min_lr", group)
        high = self._of("warmup_max_lr", group)
        high = base_lr if high is _BASE else high
        return float(low + (high - low) * self._warmup_share(done - 1)) if done else float(low)

    def betas(self, done: int, group: int = 0) -> tuple[float, float] | None:
        """Return the betas that one cycle sets beside the rate, None for other curves."""
        if self.name != "OneCycle" or not self.options["cycle_momentum"]:
            return None
        low, high = self._of("cycle_min_mom", group), self._of("cycle_max_mom", group)
        if done == 0:
            return low, _BETA2
        first, second = self._halves()
        if done - 1 < first + second:
            return high - (high - low) * self._cycle_share(done), _BETA2
        rate = self.options["decay_mom_rate"]
        factor = 1 + rate * self._decay_interval(done) if self._decays(rate) else 1
        return high * factor, _BETA2

    @property
    def missing(self) -> list[str]:
        """Names of options that are not given yet."""
        return [name for name, value in self.options.items() if value is _NEEDED]

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        defaults = CURVES[self.name]
        return {k: v for k, v in self.options.items() if v != defaults[k]}

    def without(self, names: Set[str]) -> Curve:
        """Return the curve with these options missing."""
        return Curve(self.name, {**self.options, **dict.fromkeys(names, _NEEDED)})

    def given_too(self, options: Mapping[str, Any]) -> Curve:
        """Return the curve with these options as well. **Raises** ConfigError as `make_curve`."""
        if not options:
            return self
        given = make_curve(self.name, options, f"scheduler {self.name}").options
        return Curve(self.name, {**self.options, **{name: given[name] for name in options}})

    def check_groups(self, num_groups: int) -> None:
        """Raise ConfigError if an option lists more or fewer values than ``num_groups``."""
        for name in sorted(_PER_GROUP & self.options.keys()):
            value = self.options[name]
            if isinstance(value, tuple) and len(value) != num_groups:
                raise ConfigError(
                    f"scheduler {self.name}: {name}: expected {num_groups} values, one for each "
                    f"parameter group of the optimizer, got {len(value)}"
                )

    def _of(self, name: str, group: int) -> Any:
        value = self.options[name]
        return value[group] if isinstance(value, tuple) else value

    def _rising_share(self, counted: int, num_steps: int) -> float:
        if self.options["warmup_type"] == "log":
            return 1.0 / math.log(num_steps) * math.log(counted + 1)
        return counted / num_steps

    def _warmup_share(self, counted: int) -> float:
        """Return the position between the lowest and the highest rate, 0 to 1, decay included."""
        num_steps = max(2, self.options["warmup_num_steps"])
        if counted < num_steps:
            return self._rising_share(counted, num_steps)
        if self.name == "WarmupLR":
            return 1.0
        total = self.options["total_num_steps"]
        return max(0.0, float(total - counted) / float(max(1.0, total - num_steps)))

    def _cosine_ratio(self, counted: int) -> float:
        num_steps = max(2, self.options["warmup_num_steps"])
        if counted < num_steps:
            low = self.options["warmup_min_ratio"]
            return float(low + self._rising_share(counted, num_steps) * (1.0 - low))
        total, low = self.options["total_num_steps"], self.options["cos_min_ratio"]
        progress = min(1.0, (counted - num_steps + 1) / max(1, total - num_steps))
        return max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * progress)) / 2))

    def _halves(self) -> tuple[float, float]:
        first = float(self.options["cycle_first_step_size"])
        second = self.options["cycle_second_step_size"]
        return first, first if second is None else float(second)

    def _cycle_rate(self, done: int, group: int) -> float:
        low, high = self._of("cycle_min_lr", group), self._of("cycle_max_lr", group)
        first, second = self._halves()
        if done - 1 < first + second:
            return float(low + (high - low) * self._cycle_share(done))
        rate = self.options["decay_lr_rate"]
        return float(low / (1 + rate * self._decay_interval(done))) if self._decays(rate) else low

    def _decays(self, rate: float) -> bool:
        return not (math.isclose(self.options["decay_step_size"], 0) or math.isclose(rate, 0))

    def _decay_interval(self, done: int) -> float:
        return float((done - sum(self._halves())) / self.options["decay_step_size"])

    def _cycle_share(self, done: int) -> float:
        """Return the height in the cycle, 0 to 1 and back, in stairs if the options say so."""
        first, second = self._halves()
        size, stairs = first + second, self.options["cycle_first_stair_count"]
        ratio = first / size
        x = 1.0 + done / size - math.floor(1 + done / size)
        share = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
        if x > ratio and self.options["cycle_second_stair_count"] is not None:
            stairs = self.options["cycle_second_stair_count"]
        if stairs <= 0:
            return share
        place = done % size
        position = place * stairs / first if place <= first else (size - place) * stairs / second
        return math.floor(position) / stairs


def make_curve(name: str, options: Mapping[str, Any], where: str) -> Curve:
    """Check the options of a curve and fill in their defaults.

    **Raises** ConfigError that starts with ``where`` and names the option, with the nearest name.
    """
    if name not in CURVES:
        hint = near_miss(name, CURVES)
        raise ConfigError(f"{where}: expected one of {', '.join(CURVES)}, got {name!r}{hint}")
    known = CURVES[name]
    check_names(options, known, where, f"option {{!r}} of {name}")
    given = {key: _checked(key, value, where) for key, value in options.items()}
    return Curve(name, {**known, **given})


def _checked(key: str, value: Any, where: str) -> Any:
    if key in _FLAGS:
        if not isinstance(value, bool):
            raise ConfigError(f"{where}: {key}: expected true or false, got {value!r}")
        return value
    if key == "warmup_type":
        if value not in ("log", "linear"):
            raise ConfigError(f"{where}: warmup_type: expected 'log' or 'linear', got {value!r}")
        return value
    if isinstance(value, Sequence) and not isinstance(value, str) and key in _PER_GROUP:
        return tuple(_number(key, item, where) for item in value)
    if value is None and key in _MAY_BE_NONE:
        return None
    number = _number(key, value, where)
    if key in _WHOLE:
        if number != int(number) or number < _WHOLE[key]:
            least = "0 or more" if _WHOLE[key] == 0 else "above 0"
            raise ConfigError(f"{where}: {key}: expected a whole number {least}, got {value!r}")
        return int(number)
    if key == "cycle_first_step_size" and number <= 0:
        raise ConfigError(f"{where}: {key}: expected a number above 0, got {value!r}")
    if ("size" in key or "count" in key) and number < 0:
        raise ConfigError(f"{where}: {key}: expected 0 or more, got {value!r}")
    return number


def _number(key: str, value: Any, where: str) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{where}: {key}: expected a number, got {value!r}")
    return value
