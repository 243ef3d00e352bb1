"""The keys of DeepSpeed's and accelerate's files, read from ``foreign_keys.toml``."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwise import strict_json
from shardwise.errors import ConfigError
from shardwise.keys import check_object, near_miss, read_file, read_json, read_keys, shown

JsonMapping = Mapping[str, Any]  # a block of a JSON or YAML file, read
JsonObject = dict[str, Any]  # the same, written


@dataclass(frozen=True)
class Key:
    """One row of the table. ``plan`` and ``run``: why the key has no effect there, "" if read."""

    kind: str
    plan: str
    run: str
    ours: tuple[str, ...]
    becomes: str
    auto: str
    answers: Mapping[str, tuple[str, str]]
    least: int


_DATA: JsonObject = tomllib.loads(
    files("shardwise.interop").joinpath("foreign_keys.toml").read_text("utf-8")
)

_UNSAID = "as if it were not there"


def _resolved(text: str) -> str:
    return str(_DATA["reasons"][text[1:]]) if text.startswith("@") else text


def _rows(section: str) -> Mapping[str, Key]:
    found = {}
    for name, row in _DATA[section].items():
        ours, why = row.get("ours", []), row.get("why", "")
        names = (ours,) if isinstance(ours, str) else tuple(ours)
        becomes = row.get("becomes", ", ".join(names))
        answers = {k: (fate, _resolved(text)) for k, (fate, text) in row.get("answers", {}).items()}
        is_open = becomes if section.startswith("accelerate") and becomes else _UNSAID
        found[name] = Key(
            kind=row.get("kind", "any"),
            plan=_resolved(row.get("plan", why)),
            run=_resolved(row.get("run", why)),
            ours=names,
            becomes=becomes,
            auto=_resolved(row.get("auto", is_open)),
            answers=answers,
            least=row.get("least", 0),
        )
        if "stage3" in row:
            found[f"stage3_{name}"] = found[name]
    return found


TORCH_SCHEDULERS: dict[str, tuple[str, ...]] = {
    name: (*options.split(), "last_epoch") for name, options in _DATA["torch_schedulers"].items()
}
RATES: dict[str, float] = _DATA["learning_rates"]
REFUSED_OPTIMIZERS: dict[str, str] = _DATA["refused_optimizers"]
REMOVED: dict[str, str] = _DATA["removed"]
NOT_WRITTEN: dict[str, dict[str, str]] = _DATA["not_written"]
_SECTIONS = {
    *("top", "zero_optimization", "fp16", "bf16", "activation_checkpointing", "data_types"),
    *("torch_autocast", "optimizer", "scheduler", "accelerate"),
}
KEYS: dict[str, Mapping[str, Key]] = {
    name: _rows(name) for name in _DATA if name.partition(".")[0] in _SECTIONS
}
OURS: dict[str, tuple[str, ...]] = {  # full name of a key of DeepSpeed's: keys of ours
    name if section == "top" else f"{section}.{name}": key.ours
    for section, rows in KEYS.items()
    if not section.startswith("accelerate")
    for name, key in rows.items()
    if key.ours
}
BATCH_KEYS = {
    name: ours
    for name, (ours, *_) in OURS.items()
    if ours in ("micro_batch", "accumulation", "global_batch")
}


def unknown_key(source: object, prefix: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that is not in the table: removed, or misspelt."""
    if prefix + key in REMOVED:
        return ConfigError(
            f"{source}: {prefix}{key} is gone from DeepSpeed, and not here: {REMOVED[prefix + key]}"
        )
    return ConfigError(f"{source}: unknown key {shown(prefix + key)}{near_miss(key, known)}")


def load_json(path: Path) -> JsonObject:
    """Read a JSON file of keys. **Raises** ConfigError, also if a key is repeated."""
    return check_object(path, read_json(path))


def load_keys(path: Path) -> JsonObject:
    """Read a file of keys that is JSON or YAML, whatever its name. **Raises** ConfigError."""
    if path.suffix != ".json":
        try:
            strict_json.parse(read_file(path))
        except ValueError:
            found = read_keys(path)
            if not found:
                raise ConfigError(f"{path}: expected `key: value` lines, got nothing") from None
            return found
    return load_json(path)
