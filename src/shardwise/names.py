"""Names of units and lines of work."""

from collections.abc import Sequence

MAIN = "main"  # the line of the training thread, and of autograd's, which runs in its place


def name_of_unit(name: str) -> str:
    """Return a unit's name for display; the root unit's name is empty."""
    return name or "(root)"


def list_names(names: Sequence[str], most: int = 5) -> str:
    """Return e.g. ``'a', 'b' and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"'{name}'" for name in names[:most]) + more


def join_units(names: Sequence[str]) -> str:
    """Return one name for several units; a single unit's name is unchanged."""
    return names[0] if len(names) == 1 else ", ".join(map(name_of_unit, names))
