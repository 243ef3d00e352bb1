"""Names of a package that are imported on first use."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(
    package: str,
    homes: Mapping[str, str],
    before: Callable[[str], object] = lambda name: None,
    renamed: Mapping[str, str] | None = None,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package with names in modules.

    ``homes`` maps each name to its module. A submodule maps to itself; a name that differs in its
    module is "module:name". ``renamed`` maps old names, which are not listed, to their path below
    the package. ``before`` is called with a name before its import.
    """
    old = renamed or {}

    def get(name: str) -> Any:
        if name not in homes and name not in old:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        before(name)
        if name in old:
            module, _, attribute = f"{package}.{old[name]}".rpartition(".")
            return getattr(import_module(module), attribute)
        module, _, attribute = homes[name].partition(":")
        home = import_module(module)
        return home if module == f"{package}.{name}" else getattr(home, attribute or name)

    return get, lambda: sorted([*vars(import_module(package)), *homes])
