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
from shardwise.keys import flag_of

_BAD_CONFIG = 2
_HELP_WIDTH, _HELP_COLUMN = 100, 30  # columns of the help at most; where the descriptions begin
_MAX_METAVAR = 40  # columns; longer lists of choices stand in the description


def run_with_flags(
    keys: type[BaseModel],
    argument: inspect.Parameter,
    arguments: Sequence[str],
    name: str,
    run: Callable[..., int],
    beside: Sequence[inspect.Parameter] = (),
) -> int:
    """Parse one positional argument and flags of ``keys``; return the exit code of ``run``.

    ``run`` gets the positional argument and the given flags; its docstring is the help text.
    ``beside`` are flags without a key, passed by name.
    """

    def command(**values: Any) -> int:
        given = {key: value for key, value in values.items() if value is not None}
        positional = given.pop(argument.name, None)
        others = {p.name: given.pop(p.name) for p in beside if p.name in given}
        return run(positional, given, **others)

    signature = _signature(keys, [argument, *beside])
    command.__doc__ = run.__doc__
    command.__signature__ = signature  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return call_command(command, arguments, name)


def parsed_flags(
    keys: type[BaseModel], argument: inspect.Parameter, arguments: Sequence[str], name: str
) -> tuple[Any, dict[str, Any]]:
    """Return the positional argument and the flags of ``keys`` that were given."""

    def command(**values: Any) -> None:
        found.update({key: value for key, value in values.items() if value is not None})

    found: dict[str, Any] = {}
    command.__signature__ = signature = _signature(keys, [argument])  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    _program(command)(list(arguments), prog_name=name, standalone_mode=False)
    return found.pop(argument.name, None), found


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
        indent = " " * _HELP_COLUMN
        for panel, records in panels.items():
            formatter.write(f"\n{panel}:\n")
            for name, text in records:
                wrapped = textwrap.fill(
                    text,
                    formatter.width,
                    initial_indent=indent,
                    subsequent_indent=indent,
                    break_on_hyphens=False,
                    break_long_words=False,
                )
                begin = f"  {name}"
                if len(begin) + 2 > _HELP_COLUMN:
                    formatter.write(f"{begin}\n{wrapped}\n")
                else:
                    formatter.write(f"{begin:{_HELP_COLUMN}}{wrapped.lstrip()}\n")


def _program(command: Callable[..., Any]) -> Callable[..., Any]:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=PanelCommand, context_settings={"max_content_width": _HELP_WIDTH})(command)
    return typer.main.get_command(app)


def call_command(command: Callable[..., int], arguments: Sequence[str], name: str) -> int:
    """Call a function with ``arguments``, parsed by its signature; return the exit code.

    A ConfigError is printed to stderr and gives code 2.
    """
    try:
        return int(_program(command)(list(arguments), prog_name=name, standalone_mode=False) or 0)
    except ConfigError as error:
        terminal.complain(f"{name}: {error}\n")
        return _BAD_CONFIG


def print_json(facts: Mapping[str, Any]) -> None:
    """Print facts for programs."""
    terminal.say(json.dumps(facts, indent=2) + "\n")


def _signature(keys: type[BaseModel], parameters: list[inspect.Parameter]) -> inspect.Signature:
    for key, field in keys.model_fields.items():
        extra = field.json_schema_extra
        panel = str(extra["panel"]) if isinstance(extra, dict) else None
        kind, metavar = _flag_type(field.annotation)
        text = str(field.description)
        if metavar and len(metavar) > _MAX_METAVAR:
            text, metavar = f"{text}: {', '.join(metavar.split('|'))}", "NAME"
        default = "" if field.default is None else f" (default: {_shown(field.default)})"
        option = typer.Option(
            *([flag_of(key)] if key.endswith("_") else []),
            help=text + default,
            metavar=metavar,
            show_default=False,
            rich_help_panel=panel,
        )
        annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(
                key, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
            )
        )
    return inspect.Signature(parameters)


def _flag_type(annotation: Any) -> tuple[Any, str | None]:
    """Return the type that typer parses, and the metavar.

    Numbers stay text, so that `check_keys` reports wrong ones of flags and files.
    """
    if annotation in (int, float):
        return str, annotation.__name__.upper()
    if get_origin(annotation) is tuple:
        return str, "NAME,..."
    if get_origin(annotation) is dict:
        return str, "{NAME: VALUE, ...}"
    options = [part for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) is not Literal and options:
        kinds = [_flag_type(option) for option in options]
        if len(kinds) == 1:
            return kinds[0]
        return str, "|".join(metavar or kind.__name__.upper() for kind, metavar in kinds)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        return type(choices[0]), "|".join(str(choice) for choice in choices)
    return annotation, {str: "TEXT", Path: "PATH"}.get(annotation)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
