"""Commands: flags from the keys of a pydantic model, help by panels, errors as exit codes."""

import inspect
import json
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import typer
from pydantic import BaseModel
from rich.console import RenderableType
from typer.core import TyperCommand

from shardwise import terminal
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.keys import flag_of, names_in, panel_of
from shardwise.train.launch import INTERRUPTED

_BAD_CONFIG, _FAILED = 2, 1
_HELP_WIDTH = 100  # columns of the help at most
_MAX_METAVAR = 40  # columns; longer lists of choices are in the description
_KEYWORD = inspect.Parameter.KEYWORD_ONLY

KeysCommand = Callable[[typer.Context, Any, dict[str, Any]], int]


def takes_keys(
    keys: type[BaseModel], name: str = "", kind: object = None, description: str = ""
) -> Callable[[KeysCommand], Callable[..., int]]:
    """Give a command a flag for each key, and perhaps a positional argument, which may be left out.

    It is called with the context, the argument and the given flags, unchecked.
    """

    def decorate(run: KeysCommand) -> Callable[..., int]:
        @wraps(run)
        def command(context: typer.Context, **values: object) -> int:
            given = {key: value for key, value in values.items() if value is not None}
            return run(context, given.pop(name, None), given)

        argument = typer.Argument(help=description, metavar=name.upper(), show_default=False)
        context = inspect.Parameter("context", _KEYWORD, annotation=typer.Context)
        flags = (_flag(keys, key) for key in names_in(keys))
        parameters = [context, *([_parameter(name, kind, argument)] if name else []), *flags]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def command_of(function: Callable[..., int]) -> "Command":
    """Make a command of a function, by its signature and docstring."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=Command, context_settings={"max_content_width": _HELP_WIDTH})(function)
    return cast(Command, typer.main.get_command(app))


def print_json(facts: Mapping[str, object]) -> None:
    """Print facts for programs."""
    terminal.say(json.dumps(facts, indent=2) + "\n")


def print_result(
    facts: Callable[[], Mapping[str, object]], view: Callable[[], RenderableType], as_json: bool
) -> None:
    """Print facts for programs, or their view for people."""
    if as_json:
        print_json(facts())
    else:
        terminal.open_console().print(view())


def check_target(name: str, path: Path | None) -> None:
    """Check before a long run that a flag's file can be written. **Raises** ConfigError."""
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"flag {flag_of(name)}: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"flag {flag_of(name)}: there is no folder {path.parent}; make it first")


def write_file(name: str, path: Path, text: str) -> None:
    """Write a flag's file. **Raises** ConfigError if the system refuses."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"flag {flag_of(name)}: {path}: {error.strerror}") from None


class Command(TyperCommand):
    """A command that returns its exit code, with plain-text help and its flags by panel.

    An error is printed to stderr after the command's name: a ConfigError gives code 2, others that
    the command ``reports`` give 1. ``context.meta["arguments"]`` are its arguments as written.
    """

    reports: tuple[type[Exception], ...] = (ShardwiseError,)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them as they are written."""
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> None:
        """Run the command and exit with its code."""
        try:
            code = super().invoke(ctx)
        except (typer.Exit, typer.Abort):  # these are RuntimeErrors too
            raise
        except KeyboardInterrupt:
            code = INTERRUPTED
        except self.reports as error:
            text = str(error)
            if isinstance(error, MemoryError):
                text = f"the memory of this machine is not enough: {text}".removesuffix(": ")
            terminal.complain(f"{ctx.command_path}: {text}\n")
            code = code_of(error)
        raise typer.Exit(code or 0)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel, in the order of the flags."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_flag = param.param_type_name == "option"
                panel = getattr(param, "rich_help_panel", None) if is_flag else "Arguments"
                panels.setdefault(panel or "Options", []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


def code_of(error: Exception) -> int:
    """Return the exit code of an error."""
    return _BAD_CONFIG if isinstance(error, ConfigError) else _FAILED


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
    names = {"output": ["--output", "-o"]}.get(key, [flag_of(key)] if key.endswith("_") else [])
    option = typer.Option(
        *names,
        help=text + ("" if default is None else f" (default: {default})"),
        metavar=metavar,
        show_default=False,
        rich_help_panel=panel_of(keys, key),
    )
    return _parameter(key, kind, option)


def _parameter(name: str, kind: Any, option: object) -> inspect.Parameter:
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, _KEYWORD, default=None, annotation=annotation)


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
    kinds = [_flag_type(kind) for kind in inner if kind is not type(None)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        return str, "|".join(metavar or kind.__name__.upper() for kind, metavar in kinds)
    return annotation, {str: "TEXT", Path: "PATH"}.get(annotation)
