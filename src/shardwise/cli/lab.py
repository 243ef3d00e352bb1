"""`shardwise lab`: labs of memory sharding, whose checks run the reader's code on real ranks."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from shardwise import terminal
from shardwise.cli.flags import Command
from shardwise.errors import ConfigError

_MISSED = 1

lab = typer.Typer(
    help="Learn ZeRO and FSDP: fill the gaps of a file, run it on ranks, have it checked.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Number = Annotated[int, typer.Argument(help="the lab's number", show_default=False)]
_File = Annotated[
    Path | None, typer.Argument(help="the file that you fill; by default in this folder")
]


def _desk() -> ModuleType:
    """Import the labs, which are a distribution of their own."""
    try:
        return import_module("shardwise_labs.desk")
    except ModuleNotFoundError as error:
        if error.name != "shardwise_labs":
            raise
        raise ConfigError(
            "the labs are not installed. They are the package shardwise-labs in the folder labs "
            "of Shardwise's repository: pip install ./labs"
        ) from error


@lab.command("list", cls=Command)
def list_labs() -> None:
    """List the labs, with the targets met so far."""
    terminal.say(_desk().list_labs(Path()) + "\n")


@lab.command(cls=Command)
def start(number: _Number) -> None:
    """Copy the lab's file with gaps into this folder."""
    terminal.say(_desk().start(number, Path()) + "\n")


@lab.command(cls=Command)
def read(
    number: _Number,
    step: Annotated[str | None, typer.Argument(help="such as build; without it, a list")] = None,
) -> None:
    """Read one step of the lab's page."""
    terminal.say(_desk().read(number, step) + "\n")


@lab.command(cls=Command)
def run(number: _Number, file: _File = None) -> None:
    """Run your file on ranks, and show the measured values."""
    terminal.say(_desk().run(number, file or Path(_desk().lab_of(number).file)) + "\n")


@lab.command(cls=Command)
def check(number: _Number, file: _File = None) -> None:
    """Check your file: targets met and missed, in words. The exit code is 1 if one is missed."""
    result = _desk().check(number, file or Path(_desk().lab_of(number).file))
    terminal.say(result.text() + "\n")
    if result.num_met < result.total:
        raise typer.Exit(_MISSED)


@lab.command(cls=Command)
def hint(
    number: _Number,
    gap: Annotated[int | None, typer.Option(help="the gap; the first that is not met")] = None,
) -> None:
    """Show the next of a gap's three hints."""
    terminal.say(_desk().hint(number, gap, Path()) + "\n")


@lab.command(cls=Command)
def show(
    number: _Number,
    yes: Annotated[bool, typer.Option("--yes", help="do not ask for a confirmation")] = False,
) -> None:
    """Show the solution, after a confirmation."""
    lab = _desk().lab_of(number)
    if yes or typer.confirm(f"Show the solution of lab {number}?"):
        terminal.say(lab.solution())
