"""The commands of `shardwise`; the file of a command is imported when it is called."""

import errno
import reprlib
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from shardwise import terminal

_COMMANDS = {  # each is a function in the file of its name
    "train": "Train a decoder on text, on local ranks or under torchrun.",
    "convert": "Convert a DeepSpeed or accelerate file to a YAML, or back.",
    "plan": "Predict what fits and how fast it is, without a device.",
    "simulate": "Simulate a step in time, numbers of ranks, and failures.",
    "report": "Draw observed runs as one HTML page.",
    "top": "Watch an observed run in the terminal.",
    "doctor": "Find what is wrong with an observed run, and remedies.",
    "explain": "Explain a finding of `doctor` by its code.",
    "bench": "Measure this machine with all its ranks, for the planner.",
    "ckpt": "Inspect, verify, export and import checkpoints.",
    "lab": "Learn ZeRO and FSDP: fill the gaps of a file, run it on ranks, have it checked.",
}


class _Commands(TyperGroup):
    """A group whose help imports no command."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; return None for an unknown name, for which typer suggests another."""
        if cmd_name not in _COMMANDS:
            self.commands = dict.fromkeys(_COMMANDS, TyperCommand(cmd_name))
            return None
        from shardwise.cli.flags import command_of

        command = getattr(import_module(f"shardwise.cli.{cmd_name}"), cmd_name)
        is_group = isinstance(command, typer.Typer)
        return typer.main.get_command(command) if is_group else command_of(command)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of all commands with their help."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


app = typer.Typer(
    name="shardwise",
    cls=_Commands,
    help="Shard training state across ranks, with PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_version(is_given: bool) -> None:
    if is_given:
        from platform import python_version

        from shardwise import __version__
        from shardwise.versions import installed_version

        torch = installed_version("torch") or "missing"
        typer.echo(f"shardwise {__version__} (torch {torch}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Shard training state across ranks, with PyTorch."""


def main() -> None:
    """Run the command line of this process."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *about: terminal.escaped(plain(*about))
    try:
        app()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        name = str(error.filename)
        typer.echo(
            f"shardwise: {reprlib.repr(name)} is no path: it has {len(name)} characters, and each "
            "part of a path has at most 255",
            err=True,
        )
        sys.exit(2)
