"""The commands of `shardwise`; each imports what it needs only when it runs."""

from __future__ import annotations

import typer

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


@app.command("train", add_help_option=False, context_settings=_PASSED_ON)
def _train(context: typer.Context) -> None:
    """Train the built-in decoder on text, over local ranks or under torchrun."""
    from shardwise.cli.train import run_command

    raise typer.Exit(run_command(context.args))


@app.command("convert", add_help_option=False, context_settings=_PASSED_ON)
def _convert(context: typer.Context) -> None:
    """Turn a DeepSpeed JSON or accelerate's YAML into a YAML of `train`, or back."""
    from shardwise.cli.convert import run_command

    raise typer.Exit(run_command(context.args))


@app.command("plan", add_help_option=False, context_settings=_PASSED_ON)
def _plan(context: typer.Context) -> None:
    """Tell what fits, how fast it will be and why, before a run and without a device."""
    from shardwise.cli.plan import run_plan

    raise typer.Exit(run_plan(context.args))


@app.command("simulate", add_help_option=False, context_settings=_PASSED_ON)
def _simulate(context: typer.Context) -> None:
    """Play a step on thousands of ranks: stragglers, noise, failures, scaling curves."""
    from shardwise.cli.plan import run_simulate

    raise typer.Exit(run_simulate(context.args))


@app.command("bench", add_help_option=False, context_settings=_PASSED_ON)
def _bench(context: typer.Context) -> None:
    """Measure this machine with all its ranks at once; the planner takes what it writes."""
    from shardwise.cli.bench import run_command

    raise typer.Exit(run_command(context.args))


def main() -> None:
    """Run the command line of this process."""
    app()
