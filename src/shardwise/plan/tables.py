"""The planner's tables of figures: TOML files in ``data``, each read once."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def read_table(name: str) -> Mapping[str, Any]:
    """Return the tables of ``data/<name>.toml``, in the file's order."""
    return tomllib.loads(
        files("shardwise.plan").joinpath("data", f"{name}.toml").read_text("utf-8")
    )
