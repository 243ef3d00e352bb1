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
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from shardwise.errors import ConfigError
from shardwise.keys import check_names, near_miss, shown


class _Needed(Enum):
    """The type of a value that is not given yet. Copies and pickles keep its identity."""

    VALUE = "needed"


_NEEDED = _Needed.VALUE
_BASE = None  # the learning rate that the optimizer was made with
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

# Every option of every curve, with its default.
CURVES: dict[str, dict[str, object]] = {
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
        for missing in self.missing:
            raise ConfigError(
                f"scheduler {self.name}: {missing} is not given; set it in the file or pass "
                f"{missing}= to scheduler()"
            )
        options = self.options
        if self.name == "OneCycle":
            low, high = self._of("cycle_min_lr", group), self._of("cycle_max_lr", group)
            if (share := self._cycle_share(done)) is not None:
                return float(low + (high - low) * share)
            decay = self._decay("decay_lr_rate", done)
            return low if decay is None else float(low / decay)
        if self.name == "LRRangeTest":
            steps = done / options["lr_range_test_step_size"]
            interval = math.floor(steps) if options["lr_range_test_staircase"] else steps
            increase = 1 + options["lr_range_test_step_rate"] * interval
            return float(self._of("lr_range_test_min_lr", group) * increase)
        if self.name == "WarmupCosineLR":
            return base_lr * self._cosine_ratio(done - 1) if done else 0.0
        low, high = self._of("warmup_min_lr", group), self._of("warmup_max_lr", group)
        high = base_lr if high is _BASE else high
        return float(low + (high - low) * self._warmup_share(done - 1)) if done else float(low)

    def betas(self, done: int, group: int = 0) -> tuple[float, float] | None:
        """Return the betas that one cycle sets beside the rate, None for other curves."""
        if self.name != "OneCycle" or not self.options["cycle_momentum"]:
            return None
        low, high = self._of("cycle_min_mom", group), self._of("cycle_max_mom", group)
        if done == 0:
            return low, _BETA2
        if (share := self._cycle_share(done)) is not None:
            return high - (high - low) * share, _BETA2
        decay = self._decay("decay_mom_rate", done)
        return high * (1 if decay is None else decay), _BETA2

    @property
    def missing(self) -> list[str]:
        """Names of options that are not given yet."""
        return [name for name, value in self.options.items() if value is _NEEDED]

    @property
    def given(self) -> dict[str, object]:
        """The options that differ from their defaults."""
        defaults = CURVES[self.name]
        return {k: v for k, v in self.options.items() if v != defaults[k]}

    def without(self, names: Set[str]) -> Curve:
        """Return the curve with these options missing."""
        return Curve(self.name, {**self.options, **dict.fromkeys(names, _NEEDED)})

    def given_too(self, options: Mapping[str, object]) -> Curve:
        """Return the curve with these options as well. **Raises** ConfigError as `make_curve`."""
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

    def _warmup_share(self, counted: int) -> float:
        """Return the position between the lowest and the highest rate, 0 to 1, decay included."""
        num_steps = max(2, self.options["warmup_num_steps"])
        if counted < num_steps:
            if self.options["warmup_type"] == "log":
                return 1.0 / math.log(num_steps) * math.log(counted + 1)
            return float(counted / num_steps)
        if self.name == "WarmupLR":
            return 1.0
        total = self.options["total_num_steps"]
        return max(0.0, float(total - counted) / float(max(1.0, total - num_steps)))

    def _cosine_ratio(self, counted: int) -> float:
        num_steps = max(2, self.options["warmup_num_steps"])
        if counted < num_steps:
            low = self.options["warmup_min_ratio"]
            return float(low + self._warmup_share(counted) * (1.0 - low))
        total, low = self.options["total_num_steps"], self.options["cos_min_ratio"]
        progress = min(1.0, (counted - num_steps + 1) / max(1, total - num_steps))
        return max(0.0, low + (1.0 - low) * ((1 + math.cos(math.pi * progress)) / 2))

    def _halves(self) -> tuple[float, float]:
        first = float(self.options["cycle_first_step_size"])
        second = self.options["cycle_second_step_size"]
        return first, first if second is None else float(second)

    def _decay(self, name: str, done: int) -> float | None:
        """Return the factor of the decay after the cycle; None without a decay."""
        rate, steps = self.options[name], self.options["decay_step_size"]
        if math.isclose(steps, 0) or math.isclose(rate, 0):
            return None
        return float(1 + rate * float((done - sum(self._halves())) / steps))

    def _cycle_share(self, done: int) -> float | None:
        """Return the height in the cycle, 0 to 1 and back, maybe in stairs; None after its end."""
        first, second = self._halves()
        size, stairs = first + second, self.options["cycle_first_stair_count"]
        if done - 1 >= size:
            return None
        ratio = first / size
        x = 1.0 + done / size - math.floor(1 + done / size)
        share = x / ratio if x <= ratio else (x - 1) / (ratio - 1)
        if x > ratio and self.options["cycle_second_stair_count"] is not None:
            stairs = self.options["cycle_second_stair_count"]
        if stairs <= 0:
            return share
        place = done % size
        position = place * stairs / first if place <= first else (size - place) * stairs / second
        return float(math.floor(position) / stairs)


def make_curve(name: str, options: Mapping[str, object], where: str) -> Curve:
    """Check the options of a curve and fill in their defaults.

    **Raises** ConfigError that starts with ``where`` and names the option, with the nearest name.
    """
    if name not in CURVES:
        hint = near_miss(name, CURVES)
        raise ConfigError(f"{where}: expected one of {', '.join(CURVES)}, got {name!r}{hint}")
    known = CURVES[name]
    check_names(options, known, where, f"option {{!r}} of {name}")
    return Curve(name, known | {key: _checked(key, v, where) for key, v in options.items()})


def _checked(key: str, value: Any, where: str) -> object:
    if isinstance(value, list | tuple) and key in _PER_GROUP:
        return tuple(_checked(key, each, where) for each in value)
    if value is None and key in _MAY_BE_NONE:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_number = is_number and abs(value) <= sys.float_info.max  # neither NaN nor too large
    if key in _FLAGS:
        is_right, expected = isinstance(value, bool), "true or false"
    elif key == "warmup_type":
        is_right, expected = value in ("log", "linear"), "'log' or 'linear'"
    elif key in _WHOLE:
        is_right = is_number and value == int(value) and value >= _WHOLE[key]
        expected = f"a whole number, {_WHOLE[key]} or more"
        value = int(value) if is_right else value
    elif key == "cycle_first_step_size":
        is_right, expected = is_number and value > 0, "a number above 0"
    elif "size" in key or "count" in key:
        is_right, expected = is_number and value >= 0, "0 or more"
    else:
        is_right, expected = is_number, "a number"
    if not is_right:
        raise ConfigError(f"{where}: {key}: expected {expected}, got {shown(value)}")
    return value
