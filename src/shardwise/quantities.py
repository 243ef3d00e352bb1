"""Bytes, counts and durations, written for people: the one formatter of the project."""


def format_bytes(num_bytes: float) -> str:
    """Write a byte count with a binary unit and three significant digits, e.g. ``1.50 GiB``."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1023.5 or unit == "TiB":
            break
        size /= 1024
    digits = ".0f" if unit == "B" or abs(size) >= 999.5 else ".3g"
    return f"{size:{digits}} {unit}"


def format_count(count: int) -> str:
    """Write a count with a decimal suffix, e.g. ``33.7 M``."""
    size = float(count)
    for suffix in ("", " k", " M", " G"):
        if abs(size) < 1000 or suffix == " G":
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
