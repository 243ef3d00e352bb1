"""`shardwise convert`: convert between DeepSpeed JSON, accelerate YAML and our YAML."""

from __future__ import annotations

import json
import sys
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml
from rich.text import Text

from shardwise import terminal
from shardwise.cli.tables import make_table
from shardwise.errors import ConfigError
from shardwise.interop.foreign_keys import KEYS, Report, load_keys
from shardwise.interop.foreign_settings import read_accelerate_keys, read_train_keys, tell_sources
from shardwise.interop.foreign_writing import to_accelerate, to_deepspeed
from shardwise.keys import check_keys, read_keys
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig

Form = Literal["shardwise", "deepspeed", "accelerate"]  # that a file of settings can have


def convert(
    file: Annotated[
        Path,
        typer.Argument(help="DeepSpeed JSON, accelerate YAML, or YAML of `shardwise train`"),
    ],
    to: Annotated[
        Form | None, typer.Option(help="what to write (default: shardwise, if it is not)")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="file to write; else stdout")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="number of ranks, where sizes of a batch follow from it"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the report as JSON, to stderr")
    ] = False,
) -> int:
    """Turn one file of settings into another form, and report on each key.

    The new file goes to stdout, or to --output; the report to stderr.
    """
    text, report = _convert(file, to, ranks)
    if output is None:
        terminal.say(text)
    else:
        try:
            with output.open("x", encoding="utf-8") as stream:
                stream.write(text)
        except OSError as error:
            raise ConfigError(f"{output}: cannot be written: {error.strerror}") from None
    if as_json:
        terminal.complain(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        show_report(report, to_stderr=True)
    return 0


def _convert(file: Path, to: Form | None, ranks: int | None) -> tuple[str, Report]:
    form = _form_of(file)
    if to is None:
        if form == "shardwise":
            raise ConfigError(f"{file}: it is ours already; give --to deepspeed or --to accelerate")
        to = "shardwise"
    if to == form:
        raise ConfigError(f"{file}: it is of the form {to} already")
    if form == "accelerate":
        keys, report = read_accelerate_keys(file, ranks)
    elif form == "deepspeed":
        keys, report = read_train_keys(file, {}, {}, ranks)
    else:
        keys, report = read_keys(file), Report(str(file), ())
    if form != "accelerate" and ranks is not None:
        keys = {**keys, "ranks": ranks}
    config = check_keys(TrainConfig, keys, {}, file, "train")
    if config.ranks is not None:
        config = resolve_batch(config, config.ranks)
    if form != "shardwise":
        named = str(file) if form == "accelerate" else None
        report = tell_sources(report, config, lambda key: named if key in keys else None)
    if to == "shardwise":
        return yaml.safe_dump(keys, sort_keys=False), report
    if to == "deepspeed":
        content, written = to_deepspeed(config, str(file))
        text = json.dumps(content, indent=2) + "\n"
    else:
        open_keys = {"precision"} - keys.keys() if form == "deepspeed" else set()
        if open_keys:  # the new file leaves a precision at "auto" open too
            text = "mixed_precision: left out, for accelerate's own flag to say"
            lines = (
                replace(x, text=text) if x.fate == "auto" and x.key.endswith(".enabled") else x
                for x in report.lines
            )
            report = Report(report.source, tuple(lines))
        content, written = to_accelerate(config, str(file), open_keys)
        text = yaml.safe_dump(content, sort_keys=False)
    if form == "shardwise":
        return text, written
    lost = (x for x in report.lines if x.fate in ("ignored", "auto"))  # not read, or left open
    return text, Report(report.source, (*written.lines, *lost))


def _form_of(file: Path) -> Form:
    """Return the form that has most of the file's keys."""
    content = load_keys(file)
    is_deepspeed = isinstance(content.get("optimizer"), dict)
    ambiguous = {"optimizer"} if is_deepspeed else set()
    known: dict[Form, Set[str]] = {
        "shardwise": TrainConfig.model_fields.keys() - ambiguous,
        "deepspeed": KEYS["top"].keys(),
        "accelerate": KEYS["accelerate"].keys(),
    }
    if file.suffix == ".json":  # decides a tie
        known = {"deepspeed": known.pop("deepspeed"), **known}
    return max(known, key=lambda form: len(known[form] & content.keys()))


def show_report(report: Report, to_stderr: bool = False) -> None:
    """Print the report on each key of a file, as tables."""
    console = terminal.open_console(sys.stderr if to_stderr else None)
    console.print(Text(terminal.printable(report.source), "bold"))
    for title, rows in report.sections():
        console.print(make_table(("key", "value", "what it is here"), rows, title))
