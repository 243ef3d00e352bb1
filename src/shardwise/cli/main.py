"""The commands of `shardwise`; each imports what it needs only when it runs."""

import warnings
from collections.abc import Callable
from importlib import import_module

import typer

from shardwise import terminal
from shardwise.cli.ckpt import app as ckpt_app

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
    pretty_exceptions_enable=False,
)


app.add_typer(ckpt_app, name="ckpt")


@app.callback()
def _commands() -> None:
    """Shard training state across ranks, with PyTorch."""


def _runner(where: str) -> Callable[[typer.Context], None]:
    """Return a command that hands its arguments on; ``where`` is imported when it runs."""

    def run(context: typer.Context) -> None:
        module, _, function = where.partition(":")
        found = getattr(import_module(f"shardwise.cli.{module}"), function)
        raise typer.Exit(found(context.args))

    return run


for _name, _where, _help in (
    ("train", "train:run_command", "Train the built-in decoder on text, over local ranks or under "
     "torchrun."),
    ("convert", "convert:run_command", "Turn a DeepSpeed JSON or accelerate's YAML into a YAML of "
     "`train`, or back."),
    ("plan", "plan:run_plan", "Tell what fits, how fast it will be and why, before a run and "
     "without a device."),
    ("simulate", "plan:run_simulate", "Play a step on thousands of ranks: stragglers, noise, "
     "failures, scaling curves."),
    ("report", "report:run_command", "Draw observed runs as one HTML page: curves, memory, "
     "timelines."),
    ("top", "top:run_command", "Watch an observed run that goes on, in the terminal."),
    ("doctor", "doctor:run_command", "Tell what is wrong with an observed run, why, and what to "
     "change."),
    ("explain", "explain:run_command", "Explain a finding of `doctor` by its code."),
    ("bench", "bench:run_command", "Measure this machine with all its ranks at once; the planner "
     "takes what it writes."),
):  # fmt: skip
    _passed_on = app.command(_name, help=_help, add_help_option=False, context_settings=_PASSED_ON)
    _passed_on(_runner(_where))


def main() -> None:
    """Run the command line of this process."""
    plain = warnings.formatwarning
    warnings.formatwarning = lambda *about: terminal.escaped(plain(*about))
    app()
