"""The planner's tables of figures: TOML files in ``data``, each read once and checked."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

from shardwise.errors import ConfigError

_Row = TypeVar("_Row")


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """Return the tables of ``data/<name>.toml``, in the file's order."""
    return tomllib.loads(
        files("shardwise.plan").joinpath("data", f"{name}.toml").read_text("utf-8")
    )


def make_row(kind: type[_Row], where: str, values: Mapping[str, Any]) -> _Row:
    """Make one row; ``where`` names its file and key.

    **Raises** ConfigError for keys that the row lacks or does not know.
    """
    known = {each.name: each for each in fields(kind)}  # type: ignore[arg-type]
    needed = {n for n, f in known.items() if f.default is f.default_factory is MISSING}
    wrong = sorted(needed - set(values)) + sorted(set(values) - set(known))
    if wrong:
        raise ConfigError(
            f"{where}: {', '.join(wrong)}: missing or unknown; expected {', '.join(needed)}, and "
            f"may have {', '.join(set(known) - needed)}"
        )
    return kind(**values)
