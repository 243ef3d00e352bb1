"""Keys of files and flags, checked against a pydantic model, with readable errors.

Note [Files of others]
~~~~~~~~~~~~~~~~~~~~~~
A file may be hostile. It is refused, within a second and a few MiB, for its size, its nesting, the
number of its keys, or the nodes that its aliases expand to. An error shows a value by `shown`,
which reads only as much of it as it prints.
"""

import json
import reprlib
from collections.abc import Collection, Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from shardwise import strict_json
from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

M = TypeVar("M", bound=BaseModel)
MAX_JSON_BYTES, MAX_YAML_BYTES = 1 << 22, 1 << 15  # YAML is read a hundred times slower
_MAX_KEYS = 2000  # in a file of keys, at all levels
_MAX_NODES = 8000  # of YAML, with aliases expanded
_MAX_DIGITS = 100
_MAX_ERRORS = 10  # that are shown of one file
_MAX_SHOWN = 100  # characters of a value
_PANELS = (  # of the help, in this order
    *("Model", "Experts", "Cluster", "Degrees", "Sharding", "Step", "Offload", "Batch"),
    *("Optimizer", "Data", "Checkpoints", "Files", "Search", "Scenario", "Plan", "Run", "Output"),
)


def key(default: Any, panel: str, description: str, **limits: Any) -> Any:
    """Define a key: its default, the panel of the help that it is shown in, its meaning.

    Its flag is ``--its-name``. A name that Python or pydantic has taken ends in an underscore,
    which the flag leaves out.
    """
    return Field(default, description=description, json_schema_extra={"panel": panel}, **limits)


def flag_of(name: str) -> str:
    """Return the flag of a key."""
    return f"--{name.rstrip('_').replace('_', '-')}"


def panel_of(model: type[BaseModel], name: str) -> str:
    """Return the panel of the help that a key is shown in."""
    extra = model.model_fields[name].json_schema_extra
    return str(extra["panel"]) if isinstance(extra, dict) else ""


def names_in(model: type[BaseModel], *panels: str) -> list[str]:
    """Return the names of keys by panel: those of ``panels``, or all."""
    panels = panels or _PANELS
    return [n for panel in panels for n in model.model_fields if panel_of(model, n) == panel]


def read_options(value: object) -> dict[str, object] | None:
    """Take `{eps: 1e-8}` from a flag too; YAML leaves a number without a dot as text.

    **Raises** ValueError for other text and types.
    """
    if isinstance(value, str):
        try:
            value = _parse_yaml(value.encode())
        except (ValueError, yaml.YAMLError):
            raise ValueError("expected `{name: value, ...}`") from None
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("expected `{name: value, ...}`")
    return {str(name): _with_numbers(item) for name, item in value.items()} or None


def _with_numbers(value: object) -> object:
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
    values: Mapping[str, object],
    flags: Mapping[str, object],
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
        items = error.errors(include_url=False)
        lines = [_explain(model, item, path, flags, command) for item in items[:_MAX_ERRORS]]
        lines += [f"and {len(items) - _MAX_ERRORS} more"] * (len(items) > _MAX_ERRORS)
        raise ConfigError("\n".join(lines)) from None


def _explain(
    model: type[BaseModel],
    item: ErrorDetails,
    path: Path | None,
    flags: Mapping[str, object],
    command: str,
) -> str:
    """Describe one pydantic error: the place, the key, the expected and the actual value."""
    name = str(item["loc"][0]) if item["loc"] else ""
    where = f"flag {flag_of(name)}" if name in flags else f"{path or 'config'}"
    if item["type"] == "extra_forbidden":
        hint = near_miss(name, model.model_fields, f"; see `shardwise {command} --help`")
        return f"{where}: unknown key {shown(name)}{hint}"
    message = _expected(item)
    if not name:
        return f"{path}: {message}" if path is not None else message
    annotation = model.model_fields[name].annotation
    choices = [c for part in (annotation, *get_args(annotation)) for c in get_args(part)]
    words = [choice for choice in choices if isinstance(choice, str)]
    hint = near_miss(shown(item["input"]).strip("'"), words)
    return f"{where}: {name}: {message}, got {shown(item['input'])}{hint}"


def _expected(item: ErrorDetails) -> str:
    message = item["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return cut(message, 400)


def checked_value(kind: Any, value: object, where: str) -> Any:
    """Return a value of a JSON file as ``kind``, strictly; a class ignores unknown keys.

    **Raises** ConfigError with ``where``, the key, the expected and the actual value.
    """
    try:
        return _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        place = f": {'.'.join(map(str, item['loc']))}" if item["loc"] else ""
        is_missing = item["type"] == "missing"
        expected = "expected a value" if is_missing else _expected(item)
        got = "nothing" if is_missing or item["input"] is None else shown(item["input"])
        raise ConfigError(f"{where}{cut(place)}: {expected}, got {got}") from None


_adapter = cache(TypeAdapter[Any])


def near_miss(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return the end of an error about an unknown word: the nearest known word, if any."""
    is_word = len(word) <= _MAX_SHOWN
    return (did_you_mean(word.replace("-", "_"), words) if is_word else "") or otherwise


def check_names(given: Iterable[str], known: Collection[str], where: str, what: str) -> None:
    """Raise ConfigError for an unknown name, with the nearest known name, or all.

    ``what`` is a format of the name with its kind, such as ``"option {!r} of StepLR"``.
    """
    for name in given:
        if name not in known:
            hint = near_miss(name, known, f"; it has {', '.join(known)}")
            raise ConfigError(f"{where}: unknown {what.format(name)}{hint}")


def cut(text: str, most: int = _MAX_SHOWN) -> str:
    """Return a text, or as much of it as an error shows."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"


def shown(value: object) -> str:
    """Write a value as an error shows it: no more than a line, however large or nested it is."""
    if isinstance(value, str):
        more = f"... ({len(value):,} characters)" if len(value) > _MAX_SHOWN else ""
        return f"{value[:_MAX_SHOWN]!r}{more}"
    try:
        return cut(_SHORT.repr(value))
    except ValueError:  # Python writes no number of more than 4300 digits
        return f"a {type(value).__name__} of very many digits"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, _MAX_SHOWN, _MAX_SHOWN


def read_file(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the bytes of a file. **Raises** ConfigError: it cannot be read, or is too long."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # a NUL in its name
        raise ConfigError(f"{shown(str(path))}: cannot be read: {error}") from None
    if len(data) > max_bytes:
        raise ConfigError(
            f"{path}: it is longer than {max_bytes:,} bytes, which such a file never is"
        )
    return data


def read_json(path: Path) -> object:
    """Read a JSON file, with Python's infinities. **Raises** ConfigError."""
    data = read_file(path)
    try:
        return strict_json.parse(data, has_constants=True)
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {cut(str(error), 400)}") from None


def read_keys(path: Path) -> dict[str, object]:
    """Read the keys of a YAML file, unchecked. **Raises** ConfigError where it is not YAML."""
    data = read_file(path, MAX_YAML_BYTES)
    try:
        values = _parse_yaml(data)
    except (ValueError, yaml.YAMLError) as error:
        problem = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            where = f"line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"
            problem = f"{error.problem} ({where})"
        raise ConfigError(f"{path}: expected YAML: {cut(problem, 400)}") from None
    return check_object(path, {} if values is None else values, "`key: value` lines")


def check_object(path: Path, values: object, expected: str = "an object") -> dict[str, object]:
    """Return what a file of keys holds, its keys as text. **Raises** ConfigError."""
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected {expected}, got a {type(values).__name__} at the top")
    rest: list[dict[object, object] | list[object]] = [values]
    entries = 0
    while rest:
        entries += len(each := rest.pop())
        inner = each.values() if isinstance(each, dict) else each
        rest += [value for value in inner if isinstance(value, dict | list)]
    if entries > _MAX_KEYS:
        raise ConfigError(f"{path}: expected at most {_MAX_KEYS:,} keys, got {entries:,}")
    return {str(key): value for key, value in values.items()}


def _parse_yaml(data: bytes) -> object:
    """Return what YAML says. **Raises** ValueError, YAMLError. See Note [Files of others]."""
    if len(data) > MAX_YAML_BYTES:
        raise ValueError(f"more than {MAX_YAML_BYTES:,} bytes")
    try:
        return yaml.load(data.decode(), _Loader)
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        # PyYAML raises these for tags on unsuitable values, such as `!!int ""`
        raise ValueError(f"a value that its tag does not fit ({error})") from None


class _Loader(yaml.SafeLoader):
    """Reads plain values; refuses excessive aliases and duplicate keys."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # nodes and levels, aliases followed

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        begin = self.peek_event().start_mark
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > strict_json.MAX_DEPTH:
            raise _refused(f"it is nested deeper than {strict_json.MAX_DEPTH} levels", begin)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is None or (is_alias and node in self._sizes):
            return node
        if len(self._sizes) == _MAX_NODES:
            raise _refused(f"more than {_MAX_NODES:,} keys and values", begin)
        if is_alias:
            raise _refused("an alias refers to a value that contains it", begin)
        inner = [node.value] if isinstance(node, yaml.SequenceNode) else []
        inner = list(zip(*node.value, strict=True)) if isinstance(node, yaml.MappingNode) else inner
        sizes = [self._sizes[each] for row in inner for each in row]
        size = 1 + sum(n for n, _ in sizes), 1 + max((levels for _, levels in sizes), default=0)
        if size[0] > _MAX_NODES or size[1] > strict_json.MAX_DEPTH:
            raise _refused("it is too large or too deep once its aliases are expanded", begin)
        self._sizes[node] = size
        return node

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level > strict_json.MAX_DEPTH:  # the scanner runs ahead of `compose_node`
            raise _refused(
                f"it is nested deeper than {strict_json.MAX_DEPTH} levels", self.get_mark()
            )
        super().fetch_flow_collection_start(token)

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        seen: set[str] = set()
        for key, _ in node.value if node.id == "mapping" else ():
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise _refused(f"the key {shown(key.value)} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MAX_DIGITS:
            raise _refused(f"a number of {len(node.value):,} digits", node.start_mark)
        return super().construct_yaml_int(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refused(problem: str, mark: yaml.Mark) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
