"""Names of a package that are imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str,
    homes: Mapping[str, str],
    before: Callable[[str], object] = lambda name: None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package with names in modules.

    ``homes`` maps each name to its module. A submodule maps to itself; a name that differs in its
    module is "module:name". ``before`` is called with a name before its import.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        before(name)
        module, _, attribute = homes[name].partition(":")
        home = import_module(module)
        return home if module == f"{package}.{name}" else getattr(home, attribute or name)

    return get, lambda: sorted([*vars(import_module(package)), *homes])
