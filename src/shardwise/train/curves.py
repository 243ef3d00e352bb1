"""The learning-rate curves of DeepSpeed's schedulers in closed form; imports no torch.

Note [Where a curve starts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
A curve gives the rate of the optimizer update after ``done`` steps of the schedule, 0 for the first
update of a run. DeepSpeed counts from -1. The warm-ups therefore take two updates at their lowest
rate (the logarithm of 1 is 0). That is kept, so that a run which changes engines follows the same
curve.

**Source** DeepSpeed 0.19 ``runtime/lr_schedules.py``; the tests hold every step against it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.keys import check_names, near_miss, shown

_NEEDED = ...  # a value that is not given yet; copies and pickles keep its identity
_BASE = None  # the learning rate that the optimizer was made with
_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}

# Every option of every curve, with its default.
CURVES: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": _BASE, **_WARMUP},
    "WarmupDecayLR": {"total_num_steps": _NEEDED, "warmup_min_lr": 0.0, "warmup_max_lr": 0.001,
        **_WARMUP},
    "WarmupCosineLR": {"total_num_steps": _NEEDED, "warmup_min_ratio": 0.0, "cos_min_ratio": 0.0001,
        **_WARMUP},
}  # fmt: skip
_PER_GROUP = {"warmup_min_lr", "warmup_max_lr"}
_WHOLE = {"warmup_num_steps": 0, "total_num_steps": 1}  # at least


@dataclass(frozen=True)
class SchedulerCurve:
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
        if self.name == "WarmupCosineLR":
            return base_lr * self._cosine_ratio(done - 1) if done else 0.0
        low, high = self._of("warmup_min_lr", group), self._of("warmup_max_lr", group)
        high = base_lr if high is _BASE else high
        return float(low + (high - low) * self._warmup_share(done - 1)) if done else float(low)

    @property
    def missing(self) -> list[str]:
        """Names of options that are not given yet."""
        return [name for name, value in self.options.items() if value is _NEEDED]

    @property
    def given(self) -> dict[str, object]:
        """The options that differ from their defaults."""
        defaults = CURVES[self.name]
        return {k: v for k, v in self.options.items() if v != defaults[k]}

    def without(self, names: Set[str]) -> SchedulerCurve:
        """Return the curve with these options missing."""
        return SchedulerCurve(self.name, {**self.options, **dict.fromkeys(names, _NEEDED)})

    def with_options(self, options: Mapping[str, object]) -> SchedulerCurve:
        """Return the curve with these options as well. **Raises** ConfigError as `make_curve`."""
        given = make_curve(self.name, options, f"scheduler {self.name}").options
        return SchedulerCurve(
            self.name, {**self.options, **{name: given[name] for name in options}}
        )

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


def make_curve(name: str, options: Mapping[str, object], where: str) -> SchedulerCurve:
    """Check the options of a curve and fill in their defaults.

    **Raises** ConfigError that starts with ``where`` and names the option, with the nearest name.
    """
    if name not in CURVES:
        hint = near_miss(name, CURVES)
        raise ConfigError(f"{where}: expected one of {', '.join(CURVES)}, got {name!r}{hint}")
    known = CURVES[name]
    check_names(options, known, where, f"option {{!r}} of {name}")
    return SchedulerCurve(
        name, known | {key: _checked(key, v, where) for key, v in options.items()}
    )


def _checked(key: str, value: Any, where: str) -> object:
    if isinstance(value, list | tuple) and key in _PER_GROUP:
        return tuple(_checked(key, item, where) for item in value)
    if value is None and key == "warmup_max_lr":
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_number = is_number and abs(value) <= sys.float_info.max  # neither NaN nor too large
    if key == "warmup_type":
        is_right, expected = value in ("log", "linear"), "'log' or 'linear'"
    elif key in _WHOLE:
        is_right = is_number and value == int(value) and value >= _WHOLE[key]
        expected = f"a whole number, {_WHOLE[key]} or more"
        value = int(value) if is_right else value
    else:
        is_right, expected = is_number, "a number"
    if not is_right:
        raise ConfigError(f"{where}: {key}: expected {expected}, got {shown(value)}")
    return value
