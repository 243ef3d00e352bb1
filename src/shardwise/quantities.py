"""Formatting and parsing of bytes, counts and durations."""

import re
from math import log2

from shardwise.errors import ConfigError

SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
SIZES |= {f"{k}I": 1 << (10 * i) for i, k in enumerate(("", "K", "M", "G", "T")) if k}
_SUFFIXES = {"k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_MAX_EXPONENT = 30


def format_bytes(num_bytes: float) -> str:
    """Write a byte count with a binary unit and three significant digits, e.g. ``1.50 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            break
        size /= 1024
    digits = ".0f" if unit == "B" or abs(size) >= 999.5 else ".3g"
    return f"{size:{digits}} {unit}"


class ByteUnit:
    """The largest binary unit of which a byte count has one; others are written in it too."""

    def __init__(self, num_bytes: float) -> None:
        power = min(int(log2(max(num_bytes, 1.0))) // 10, 4)
        self.size, self.name = 1024**power, ("B", "KiB", "MiB", "GiB", "TiB")[power]

    def write(self, num_bytes: float) -> str:
        """Write a count with two decimals and without the unit, e.g. ``1.50``."""
        size = num_bytes / self.size
        return "<0.01" if 0 < size < 0.005 else f"{size:,.{2 if self.size > 1 else 0}f}"


def format_gb(num_bytes: float) -> str:
    """Write a byte count in decimal gigabytes, as papers and data sheets do, e.g. ``1.61 GB``."""
    size = num_bytes / 1e9
    return f"{size:{'.0f' if abs(size) >= 999.5 else '.3g'}} GB"


def format_count(count: float) -> str:
    """Write a count with a decimal suffix, e.g. ``33.7 M``."""
    size = float(count)
    for suffix in ("", " k", " M", " G", " T"):
        if abs(size) < 1000 or suffix == " T":
            break
        size /= 1000
    return f"{size:.0f}" if suffix == "" else f"{size:.3g}{suffix}"


def format_duration(seconds: float) -> str:
    """Write a time in its two largest units, e.g. ``3 min 20 s``, ``2 h 5 min``, ``0.4 s``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for name, size, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60)):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {below}"
    return f"{whole // 60} min {whole % 60} s" if whole >= 60 else f"{whole} s"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as ``40GiB``, ``80GB`` or ``1e9``. **Raises** ValueError."""
    match = re.fullmatch(r"\s*\+?([0-9.]+(?:E[+-]?[0-9]+)?)\s*((?:[KMGT]I?)?)B?\s*", text.upper())
    try:
        if match is not None:
            return round(float(match[1]) * SIZES[match[2]])
    except (ValueError, OverflowError):
        pass
    raise ValueError("expected a size such as 40GiB or 80e9")


def parse_count(value: int | float | str, name: str = "params") -> int:
    """Return a count that is written as 7000000000, 7_000_000_000, 7e9, 7B, 1.3T or 350M.

    Exact: no floating point for text. Suffixes are k, M, B (or G) and T, in either case.

    **Raises** ConfigError, with the field, for other values than whole numbers.
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


def check_whole(value: object, name: str, limit: int, least: int = 1) -> None:
    """Check that a value is an integer of ``least`` to ``limit``.

    **Raises** ConfigError, naming the field.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: expected a whole number")
    if not least <= value <= limit:
        came = value if abs(value) < 10**_MAX_EXPONENT else f"a number beyond 1e{_MAX_EXPONENT}"
        raise ConfigError(f"{name}={came}: expected {least} to {limit:,}")
