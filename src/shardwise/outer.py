"""Settings of replicas that step separately (`parallel.local_steps`), and their bytes; no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

OuterName = Literal["average", "nesterov"]
StateFormat = Literal["fp32", "int8"]
BLOCK = 256  # elements that share a scale, in codes of messages and of momentum
_FORMATS = ("fp32", "int8")
_VALUE_BYTES, _SCALE_BYTES = 4, 4


@dataclass(frozen=True)
class Outer:
    """The outer step: SGD with Nesterov momentum on the difference of a window.

    ``momentum`` 0 keeps no momentum. ``state`` is the format of the momentum ("int8": a byte per
    element and a scale per 256). ``send`` is that of the differences on the wire.

    **Raises** ConfigError for a value that a field does not take.
    """

    lr: float = 0.7
    momentum: float = 0.9
    state: StateFormat = "fp32"
    send: StateFormat = "fp32"

    def __post_init__(self) -> None:
        """Check the values where they are written."""
        if not _is_number(self.lr) or not 0 < self.lr <= 10:
            raise ConfigError(f"outer.lr={self.lr!r}: expected a number above 0, such as 0.7")
        if not _is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigError(
                f"outer.momentum={self.momentum!r}: expected a number from 0 up to, but not, 1"
            )
        for field in ("state", "send"):
            if getattr(self, field) not in _FORMATS:
                raise ConfigError(
                    f"outer.{field}={getattr(self, field)!r}: expected 'fp32' or 'int8'"
                )

    def state_bytes(self, numel: int) -> int:
        """Return the bytes of anchor and momentum of so many elements of one unit."""
        momentum = numel * _VALUE_BYTES if self.momentum else 0
        if self.momentum and self.state == "int8":
            momentum = -(-numel // BLOCK) * (BLOCK + _SCALE_BYTES)
        return numel * _VALUE_BYTES + momentum


@dataclass(frozen=True)
class Windows:
    """How often replicas are synchronised, and how: the settings of `LocalSteps`.

    ``outer`` None averages parameters. ``streams`` groups of units have steps of their own.

    **Raises** ConfigError for a value that a field does not take.
    """

    every: int
    outer: Outer | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        """Check the values where they are written."""
        for what in ("every", "streams"):
            value = getattr(self, what)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{what}={value!r}: expected a number of 1 or more")
        if self.streams > self.every:
            raise ConfigError(
                f"streams={self.streams}: each group of units is synchronised at a step of its "
                f"own, and a window has {self.every}; give at most every={self.every}"
            )

    @classmethod
    def of_fields(cls, values: object) -> "Windows":
        """Return the settings that fields of a file say: a number alone is ``every``.

        ``outer`` is "average" or "nesterov"; lr, momentum, state and send are those of `Outer`.

        **Raises** ConfigError.
        """
        given: dict[str, Any] = dict(values) if isinstance(values, Mapping) else {"every": values}
        known = ("every", "outer", "lr", "momentum", "state", "send", "streams")
        for name in given:
            if name not in known:
                hint = did_you_mean(name, known) or f"; it has {', '.join(known)}"
                raise ConfigError(f"unknown field {name!r}{hint}")
        numbers: dict[str, Any] = {
            name: _whole(given.pop(name)) for name in ("every", "streams") if name in given
        }
        if "every" not in numbers:
            raise ConfigError("every: expected the number of steps of a window")
        kind = given.pop("outer", "nesterov" if given else "average")
        if kind == "average" and given:
            raise ConfigError(f"outer 'average' has no {min(given)}; give outer: nesterov")
        return cls(outer=outer_of(kind, **given), **numbers)

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a file that `of_fields` reads back to the same settings."""
        found: dict[str, object] = {"every": self.every, "outer": "average"}
        if self.outer is not None:
            found |= {"outer": "nesterov", **vars(self.outer)}
        return {**found, "streams": self.streams}

    def state_bytes(self, numel: int) -> int:
        """Return the bytes of outer state for so many elements of one unit."""
        return 0 if self.outer is None else self.outer.state_bytes(numel)

    def __str__(self) -> str:
        """Name the settings in one line."""
        return ", ".join(f"{name}={value}" for name, value in self.fields.items())


def outer_of(outer: object, **settings: Any) -> Outer | None:
    """Return an outer step by name or as it is; None averages. **Raises** ConfigError."""
    if isinstance(outer, Outer):
        return outer
    if outer not in ("average", "nesterov"):
        raise ConfigError(
            f"outer={outer!r}: expected 'average', 'nesterov' or a shardwise.parallel.Outer"
        )
    return Outer(**settings) if outer == "nesterov" else None


def _whole(value: object) -> object:
    """Return a number that a flag may have as text or as a float."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    is_whole = isinstance(value, float) and isfinite(value) and value == int(value)
    return int(value) if is_whole else value  # type: ignore[call-overload]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
