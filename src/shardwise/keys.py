"""Keys that a file or flags give, checked against a pydantic model, with errors for people."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

M = TypeVar("M", bound=BaseModel)


def key(default: Any, panel: str, description: str, **limits: Any) -> Any:
    """Define a key: its default, the panel of the help that it is shown in, its meaning.

    Its flag is ``--its-name``. A name that Python or pydantic has taken ends in an underscore,
    which the flag leaves out.
    """
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


def flag_of(name: str) -> str:
    """Return the flag of a key."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def read_options(value: Any) -> dict[str, Any] | None:
    """Take `{eps: 1e-8}` from a flag too; YAML leaves a number without a dot as text.

    **Raises** ValueError where it is none of both.
    """
    if isinstance(value, str):
        try:
            value = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError("expected `{name: value, ...}`") from None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("expected `{name: value, ...}`")
    return {str(name): _with_numbers(item) for name, item in value.items()} or None


def _with_numbers(value: Any) -> Any:
    """Read text that is a number, as in a list of them, as the number."""
    if isinstance(value, list | tuple):
        return [_with_numbers(item) for item in value]
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def read_fields(value: Any) -> Any:
    """Read text that begins with a brace as fields; leave all else be. **Raises** ValueError."""
    is_fields = isinstance(value, str) and value.lstrip().startswith("{")
    return read_options(value) if is_fields else value


def check_keys(
    model: type[M],
    values: Mapping[str, Any],
    flags: Mapping[str, Any],
    path: Path | None,
    command: str,
) -> M:
    """Return the model with the flags put over the values of a file.

    **Raises** ConfigError: a line for each key that is unknown or whose value is not allowed, with
    where it came from and the nearest valid name.
    """
    try:
        return model.model_validate({**values, **flags})
    except ValidationError as error:
        lines = [_explain(model, item, path, flags, command) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def checked_value(kind: Any, value: Any, where: str) -> Any:
    """Return what a JSON file says, as ``kind``, strictly; a class passes over keys it has not.

    **Raises** ConfigError: ``where``, which key, what was expected, what came.
    """
    try:
        return TypeAdapter[Any](kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        place = f": {'.'.join(map(str, item['loc']))}" if item["loc"] else ""
        is_missing = item["type"] == "missing"
        expected = "expected a value" if is_missing else _expected(item)
        got = "nothing" if is_missing or item["input"] is None else repr(item["input"])[:60]
        raise ConfigError(f"{where}{place}: {expected}, got {got}") from None


def _expected(item: Any) -> str:
    message: str = item["msg"]
    return message.removeprefix("Value error, ").replace("Input should be", "expected")


def _explain(
    model: type[BaseModel], item: Any, path: Path | None, flags: Mapping[str, Any], command: str
) -> str:
    """Turn one pydantic error into: where, which key, what was expected, what came."""
    name = str(item["loc"][0]) if item["loc"] else ""
    where = f"flag {flag_of(name)}" if name in flags else f"{path or 'config'}"
    if item["type"] == "extra_forbidden":
        hint = near_miss(name, model.model_fields, f"; see `shardwise {command} --help`")
        return f"{where}: unknown key {name!r}{hint}"
    message = _expected(item)
    if not name:
        return f"{path}: {message}" if path is not None else message
    hint = near_miss(str(item["input"]), [str(choice) for choice in _choices(model, name)])
    return f"{where}: {name}: {message}, got {item['input']!r}{hint}"


def _choices(model: type[BaseModel], name: str) -> list[Any]:
    annotation = model.model_fields[name].annotation
    parts = [annotation, *get_args(annotation)]
    return [choice for part in parts for choice in get_args(part) if isinstance(choice, str)]


def near_miss(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about a word that is none of these: the nearest, if one is."""
    return did_you_mean(word.replace("-", "_"), words) or otherwise


def check_names(given: Iterable[str], known: Collection[str], where: str, what: str) -> None:
    """Raise ConfigError where a name is not known, with the nearest, or all that are.

    ``what`` is what it names and of what, such as ``"option {!r} of StepLR"``.
    """
    for name in given:
        if name not in known:
            hint = near_miss(name, known, f"; it has {', '.join(known)}")
            raise ConfigError(f"{where}: unknown {what.format(name)}{hint}")
