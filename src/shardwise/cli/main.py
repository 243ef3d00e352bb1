"""The commands of `shardwise`; each imports what it needs only when it runs."""

from __future__ import annotations

import typer

from shardwise.cli.ckpt import app as ckpt_app

__all__ = ["app", "main"]

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


def main() -> None:
    """Run the command line of this process."""
    app()
