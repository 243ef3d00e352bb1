"""Counts as people write them, such as 7e9 or 1.3T, and the check that a count can be one."""

from shardwise.errors import ConfigError

_SUFFIXES = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_MAX_EXPONENT = 30


def parse_count(value: int | float | str, name: str = "params") -> int:
    """Return a count that is written as 7000000000, 7_000_000_000, 7e9, 7B, 1.3T or 350M.

    Exact: no floating point for text. Suffixes are k, M, B (or G) and T, in either case.

    **Raises** ConfigError, naming the field, for all that is no whole number.
    """
    number = None
    if isinstance(value, str):
        number = _parse(value.strip().lower())
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():  # neither NaN nor an infinity is
        number = int(value)
    if number is None:
        raise ConfigError(
            f"{name}={value!r}: expected a whole number, such as 7e9, 7B, 1.3T or 350M"
        )
    return number


def _parse(text: str) -> int | None:
    exponent = _SUFFIXES.get(text[-1:], 0)
    mantissa, e, power = (text[:-1].rstrip() if exponent else text).partition("e")
    whole, _, fraction = mantissa.partition(".")
    try:
        exponent += (int(power) if e else 0) - len(fraction)
        digits = int(whole + fraction)
    except ValueError:
        return None
    if not (fraction + "0").isdecimal() or abs(exponent) > _MAX_EXPONENT:
        return None
    if exponent >= 0:
        return digits * 10**exponent
    number, rest = divmod(digits, 10**-exponent)
    return None if rest else number


def check_whole(value: object, name: str, limit: int) -> None:
    """Check that a value is an integer of 1 to ``limit``.

    **Raises** ConfigError, naming the field.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected a whole number")
    if not 1 <= value <= limit:
        came = value if abs(value) < 10**_MAX_EXPONENT else f"a number beyond 1e{_MAX_EXPONENT}"
        raise ConfigError(f"{name}={came}: expected 1 to {limit:,}")
