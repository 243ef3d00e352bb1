"""The commands of `shardwise`; each imports its file only when it runs."""

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated

import typer

from shardwise import terminal
from shardwise.cli.ckpt import app as ckpt_app
from shardwise.cli.lab import app as lab_app

_PASSED_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
}

app = typer.Typer(
    name="shardwise",
    help="Shard training state across ranks, with PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


app.add_typer(ckpt_app, name="ckpt")
app.add_typer(lab_app, name="lab")


def _show_version(is_asked: bool) -> None:
    if is_asked:
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


def _runner(where: str) -> Callable[[typer.Context], None]:
    """Return a command that hands its arguments on; ``where`` is imported when it runs."""

    def run(context: typer.Context) -> None:
        module, _, function = where.partition(":")
        found = getattr(import_module(f"shardwise.cli.{module}"), function)
        raise typer.Exit(found(context.args))

    return run


for _name, _where, _help in (
    ("train", "train:run_command", "Train a decoder on text, on local ranks or under torchrun."),
    (
        "convert",
        "convert:run_command",
        "Convert a DeepSpeed or accelerate file to a YAML, or back.",
    ),
    ("plan", "plan:run_plan", "Predict what fits and how fast it is, without a device."),
    ("simulate", "plan:run_simulate", "Simulate steps on thousands of ranks, and failures."),
    ("report", "report:run_command", "Draw observed runs as one HTML page."),
    ("top", "top:run_command", "Watch an observed run in the terminal."),
    ("doctor", "doctor:run_command", "Find what is wrong with an observed run, and remedies."),
    ("explain", "explain:run_command", "Explain a finding of `doctor` by its code."),
    ("bench", "bench:run_command", "Measure this machine with all its ranks, for the planner."),
):
    _passed_on = app.command(_name, help=_help, add_help_option=False, context_settings=_PASSED_ON)
    _passed_on(_runner(_where))


def main() -> None:
    """Run the command line of this process."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *about: terminal.escaped(plain(*about))
    app()
