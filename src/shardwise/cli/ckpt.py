"""`shardwise ckpt`: inspect, verify, export and import checkpoints.

Exit codes: 0 success; 1 damage was found, or an error; 2 wrong arguments.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import typer

from shardwise import terminal
from shardwise.checkpoint import files as disk
from shardwise.checkpoint.folder import choose, step_name
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.verify import Verified, check_quickly
from shardwise.checkpoint.verify import verify as verify_one
from shardwise.cli.facts import (
    checkpoint_facts,
    checkpoints_at,
    is_gone,
    kind_of,
    look_at,
    run_facts,
)
from shardwise.cli.flags import Command, print_json
from shardwise.cli.tables import show_checkpoint, show_run, show_verified
from shardwise.errors import CheckpointError, ConfigError, ShardwiseError
from shardwise.progress import byte_bar
from shardwise.quantities import format_bytes, parse_size

_DAMAGED = 1
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


class _Command(Command):
    """A command that reports errors of the system and of torch's readers too."""

    reports = (ShardwiseError, OSError, MemoryError, RuntimeError)


ckpt = typer.Typer(
    help="Inspect, verify, export and import checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

_Path = Annotated[Path, typer.Argument(help="a checkpoint, or the folder of a run's checkpoints")]
_Json = Annotated[bool, typer.Option("--json", help="print JSON for programs; sizes in bytes")]
_Step = Annotated[int | None, typer.Option(min=0, help="the step; the newest if not given")]


@ckpt.command(cls=_Command)
def inspect(
    path: _Path,
    as_json: _Json = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", "--all", help="list every tensor of a checkpoint")
    ] = False,
) -> None:
    """Show what a checkpoint holds, or all checkpoints of a run. Reads no tensors."""
    files, console = disk.Files(), terminal.open_console()
    if kind_of(files, path) == "run":
        run = run_facts(files, path)
        print_json(asdict(run)) if as_json else show_run(console, run)
        return
    facts = checkpoint_facts(files, path)
    print_json(facts.to_json(tensors)) if as_json else show_checkpoint(console, facts, tensors)
    if facts.saved.damage:
        raise typer.Exit(_DAMAGED)


@ckpt.command(cls=_Command)
def verify(path: _Path, as_json: _Json = False) -> None:
    """Verify every byte of a checkpoint, or of a run; list all damage."""
    files, console = disk.Files(), terminal.open_console()
    paths = checkpoints_at(files, path)
    results: list[Verified] = []
    removed: list[Path] = []  # by a run that is still writing
    errors: list[str] = []  # of checkpoints that could not be verified
    started_s = perf_counter()
    to_read = sum(look_at(files, one)[0].num_bytes or 0 for one in paths)
    with byte_bar("verify", to_read) as progress:
        for one in paths:
            try:
                verified = verify_one(files, one, progress)
            except CheckpointError as error:
                if not is_gone(files, one):
                    errors.append(str(error))
                    continue
                verified = None
            if verified is None or (verified.findings and is_gone(files, one)):
                removed.append(one)
            else:
                results.append(verified)
    duration_s = perf_counter() - started_s
    num_bytes = sum(verified.num_bytes for verified in results)
    num_damaged = sum(not verified.ok for verified in results)
    is_ok, rate = bool(results) and not num_damaged and not errors, round(num_bytes / duration_s)
    if as_json:
        facts = {
            "path": str(path),
            "ok": is_ok,
            "num_damaged": num_damaged,
            "num_bytes": num_bytes,
            "duration_s": duration_s,
            "bytes_per_s": rate,
            "checkpoints": [_verified_facts(verified) for verified in results],
            "removed_meanwhile": [str(gone) for gone in removed],
            "errors": errors,
        }
        print_json(facts)
    else:
        for verified in results:
            show_verified(console, verified)
        for gone in removed:
            _say(f"note: {gone.name} was removed meanwhile")
        what = "1 checkpoint" if len(results) == 1 else f"{len(results)} checkpoints"
        state = f"{num_damaged} damaged" if num_damaged else "every byte as it was saved"
        read = f"{format_bytes(num_bytes)} in {duration_s:.2f} s, {format_bytes(rate)}/s"
        _say(f"{what}, {read}: {state}" if results else "no checkpoint to verify")
    if errors:
        raise CheckpointError("; ".join(errors))
    if not is_ok:
        raise typer.Exit(_DAMAGED)


def _verified_facts(verified: Verified) -> dict[str, object]:
    findings = [{**asdict(item), "tensor": item.tensor or None} for item in verified.findings]
    facts = {**asdict(verified), "findings": findings, "path": str(verified.path)}
    return facts | {"ok": verified.ok}


@ckpt.command(cls=_Command)
def export(
    path: _Path,
    target: Annotated[Path, typer.Argument(help="the folder to make")],
    to: Annotated[
        Literal["hf", "dcp"],
        typer.Option(help="Hugging Face weights, or torch's distributed checkpoint"),
    ] = "hf",
    step: _Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="cast the weights: bf16, fp16, fp32 (hf only)")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="of one file, as 5GB or 512MiB (hf only; default 5GB)")
    ] = None,
    config_from: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="a model's folder: copy its config and tokenizer (hf only)",
        ),
    ] = None,
) -> None:
    """Export a checkpoint to another format; every byte is checked."""
    if to == "dcp" and (dtype or max_shard_size or config_from):
        raise ConfigError("--dtype, --max-shard-size and --config-from are for --to hf only")
    try:
        max_bytes = parse_size(max_shard_size or "5GB")
    except ValueError:
        why = "expected a size such as 5GB or 512MiB"
        raise ConfigError(f"--max-shard-size {max_shard_size!r}: {why}") from None
    with closing(_open(path, step)) as checkpoint:
        from shardwise.convert.export import export_dcp, export_huggingface  # with torch

        if to == "dcp":
            export_dcp(checkpoint, target)
            sizes = [t.num_bytes for t in checkpoint.tensors if t.kind != "extra"]
            _say_written(target, len(sizes), sum(sizes))
            return
        infos = [t for t in checkpoint.tensors if t.kind in ("param", "buffer")]
        # With a cast the total is unknown until the end.
        total = None if dtype else sum(t.num_bytes for t in infos)
        with byte_bar("export", total) as progress:
            done = export_huggingface(
                checkpoint,
                target,
                files=disk.Files(),
                max_shard_bytes=max_bytes,
                dtype=_DTYPES.get(dtype.lower(), dtype) if dtype is not None else None,
                config_from=config_from,
                progress=progress,
            )
        _say_written(target, done.num_tensors, done.total_bytes)
        if config_from is None:
            _say("it has no config.json: put the model's beside it, or give --config-from")
        if checkpoint.tied:
            _say(f"left out, as they share a tensor that is there: {', '.join(checkpoint.tied)}")


@ckpt.command("import", cls=_Command)
def import_(
    source: Annotated[
        Path, typer.Argument(exists=True, help="the other checkpoint's folder or file")
    ],
    target: Annotated[Path, typer.Argument(help="the folder to make")],
    from_: Annotated[
        Literal["auto", "hf", "dcp", "deepspeed"], typer.Option("--from", help="its format")
    ] = "auto",
    step: Annotated[
        int | None, typer.Option(min=0, help="of this step, as TARGET/step-...; else TARGET itself")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="which of DeepSpeed's checkpoints; else what 'latest' names")
    ] = None,
    strip_prefix: Annotated[
        str | None, typer.Option(help="drop this from the beginning of names, as 'module.'")
    ] = None,
) -> None:
    """Write a checkpoint of others as one of ours, which loads on any number of ranks."""
    from shardwise.convert.detect import FORMATS, open_any
    from shardwise.convert.importing import import_source, without_prefix

    form, opened = open_any(source, tag, None if from_ == "auto" else from_)
    _say(f"reading {source} as {FORMATS[form]}")
    if strip_prefix is not None:
        opened = without_prefix(opened, strip_prefix)
    total = sum(t.num_bytes for t in opened.tensors)
    with byte_bar("import", total) as progress:
        written = import_source(opened, target, files=disk.Files(), step=step, progress=progress)
    _say_written(written.path, len(opened.tensors), written.num_bytes)
    for place in opened.left_out:
        _say(f"left out: {place}, which is made of a class that is not read")


# -- export
def _open(path: Path, step: int | None) -> Checkpoint:
    """Open a checkpoint; of a run, that step, or the newest that passes the quick check."""
    files = disk.Files()
    is_run = kind_of(files, path) == "run"
    if step is not None:
        one = path / step_name(step) if is_run else path
        if is_run and one not in checkpoints_at(files, path):
            raise ConfigError(f"{path} has no checkpoint of step {step}")
        manifest = check_quickly(files, one)[0]
        if manifest.step != step:
            raise ConfigError(f"{one} is of step {manifest.step}, not {step}")
        return Checkpoint(files, one, manifest)
    if not is_run:
        return Checkpoint(files, path, check_quickly(files, path)[0])
    from shardwise.comm.control import SoloControl  # with torch

    skipped: dict[int, str] = {}
    chosen = choose(SoloControl(), files, path, skipped)
    for at in sorted(skipped, reverse=True):
        terminal.complain(f"passed over: {skipped[at]}\n")
    if chosen is None:
        raise CheckpointError(f"{path}: there is no checkpoint in it that can be used")
    return Checkpoint(files, chosen.path, chosen.manifest)


def _say(text: str) -> None:
    terminal.say(f"{text}\n")


def _say_written(path: Path, num_tensors: int, num_bytes: int) -> None:
    tensors = f"{num_tensors:,} tensor{'s' if num_tensors != 1 else ''}"
    _say(f"wrote {path}: {tensors}, {format_bytes(num_bytes)}")
