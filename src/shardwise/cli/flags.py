"""Flags of a command from the keys of a pydantic model: one optional flag per key."""

import inspect
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from typer.core import TyperCommand

from shardwise import terminal
from shardwise.errors import ConfigError
from shardwise.keys import flag_of, names_in, panel_of

_BAD_CONFIG = 2
_HELP_WIDTH, _HELP_COLUMN = 100, 30  # columns of the help at most; where the descriptions begin
_MAX_METAVAR = 40  # columns; longer lists of choices stand in the description


def run_with_flags(
    keys: type[BaseModel],
    argument: inspect.Parameter,
    arguments: Sequence[str],
    name: str,
    run: Callable[[Any, dict[str, Any]], int],
) -> int:
    """Parse one positional argument and flags of ``keys``; return the exit code of ``run``.

    ``run`` gets the positional argument and the given flags; its docstring is the help text.
    """
    return call_command(_command(keys, argument, run), arguments, name)


def parsed_flags(
    keys: type[BaseModel], argument: inspect.Parameter, arguments: Sequence[str], name: str
) -> tuple[Any, dict[str, Any]]:
    """Return the positional argument and the flags of ``keys`` that were given."""
    program = _program(_command(keys, argument, lambda value, flags: (value, flags)))
    found: tuple[Any, dict[str, Any]] = program(
        list(arguments), prog_name=name, standalone_mode=False
    )
    return found


def call_command(command: Callable[..., object], arguments: Sequence[str], name: str) -> int:
    """Call a function with ``arguments``, parsed by its signature; return the exit code.

    A ConfigError is printed to stderr and gives code 2.
    """
    try:
        return int(_program(command)(list(arguments), prog_name=name, standalone_mode=False) or 0)
    except ConfigError as error:
        terminal.complain(f"{name}: {error}\n")
        return _BAD_CONFIG


def positional(name: str, kind: object, description: str) -> inspect.Parameter:
    """Return the positional argument of a command; it may be left out."""
    argument = typer.Argument(help=description, show_default=False)
    return _parameter(name, kind, argument)


def print_json(facts: Mapping[str, object]) -> None:
    """Print facts for programs."""
    terminal.say(json.dumps(facts, indent=2) + "\n")


def _program(command: Callable[..., object]) -> Callable[..., Any]:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PanelCommand, context_settings={"max_content_width": _HELP_WIDTH})(command)
    return typer.main.get_command(app)


class PanelCommand(TyperCommand):
    """A command with plain-text help, its flags by panel, without truncated names or choices."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, in the order in which the flags stand."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_flag = param.param_type_name == "option"
                panel = getattr(param, "rich_help_panel", None) if is_flag else "Arguments"
                panels.setdefault(panel or "Options", []).append(record)
        wrapper = textwrap.TextWrapper(
            formatter.width, break_on_hyphens=False, break_long_words=False
        )
        wrapper.subsequent_indent = " " * _HELP_COLUMN
        for panel, records in panels.items():
            formatter.write(f"\n{panel}:\n")
            for name, text in records:
                begin = f"  {name}"
                if len(begin) + 2 > _HELP_COLUMN:
                    formatter.write(f"{begin}\n")
                    begin = ""
                wrapper.initial_indent = f"{begin:{_HELP_COLUMN}}"
                formatter.write(f"{wrapper.fill(text)}\n")


def _command(
    keys: type[BaseModel],
    argument: inspect.Parameter,
    run: Callable[[Any, dict[str, Any]], object],
) -> Callable[..., object]:
    """Return a function for typer, whose signature has a flag for each key."""

    def command(**values: Any) -> object:
        given = {key: value for key, value in values.items() if value is not None}
        return run(given.pop(argument.name, None), given)

    parameters = [argument, *(_flag(keys, key) for key in names_in(keys))]
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _flag(keys: type[BaseModel], key: str) -> inspect.Parameter:
    field = keys.model_fields[key]
    kind, metavar = _flag_type(field.annotation)
    text = str(field.description)
    if metavar and len(metavar) > _MAX_METAVAR:
        text, metavar = f"{text}: {', '.join(metavar.split('|'))}", "NAME"
    default = field.default
    if isinstance(default, bool):
        default = str(default).lower()
    elif isinstance(default, float):
        default = f"{default:g}"
    option = typer.Option(
        *([flag_of(key)] if key.endswith("_") else []),
        help=text + ("" if default is None else f" (default: {default})"),
        metavar=metavar,
        show_default=False,
        rich_help_panel=panel_of(keys, key),
    )
    return _parameter(key, kind, option)


def _parameter(name: str, kind: Any, option: object) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


def _flag_type(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the metavar.

    Numbers stay text, so that `check_keys` reports wrong ones of flags and files.
    """
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in (int, float):
        return str, annotation.__name__.upper()
    if origin is Annotated:
        return _flag_type(inner[0])
    if origin in (tuple, dict):
        return str, "NAME,..." if origin is tuple else "{NAME: VALUE, ...}"
    if origin is Literal:
        return type(inner[0]), "|".join(map(str, inner))
    kinds = [_flag_type(each) for each in inner if each is not type(None)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        return str, "|".join(metavar or kind.__name__.upper() for kind, metavar in kinds)
    return annotation, {str: "TEXT", Path: "PATH"}.get(annotation)
