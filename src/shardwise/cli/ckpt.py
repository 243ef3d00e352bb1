"""`shardwise ckpt`: look at checkpoints, verify them, export them, import other people's.

Exit codes: 0 all is well; 1 damage was found, or it failed; 2 it was asked for wrongly.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.errors import CheckpointError, ConfigError, ShardwiseError

if TYPE_CHECKING:
    from shardwise.checkpoint.read import Checkpoint
    from shardwise.checkpoint.source import Source

__all__ = ["app"]

_WRONG, _FAILED = 2, 1
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3, "T": 1000**4}
_UNITS |= {"KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}

app = typer.Typer(
    help="Inspect, verify, export and import checkpoints.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Path = Annotated[Path, typer.Argument(help="a checkpoint, or the folder of a run's checkpoints")]
_Json = Annotated[bool, typer.Option("--json", help="print JSON for programs; sizes in bytes")]
_Step = Annotated[int | None, typer.Option(min=0, help="the step; the newest if not given")]


class _To(StrEnum):
    hf = "hf"
    dcp = "dcp"


class _From(StrEnum):
    auto = "auto"
    hf = "hf"
    dcp = "dcp"
    deepspeed = "deepspeed"


_FORMATS = {"hf": "Hugging Face safetensors", "dcp": "torch DCP", "deepspeed": "DeepSpeed ZeRO"}


@app.command()
def inspect(
    path: _Path,
    as_json: _Json = False,
    tensors: Annotated[
        bool, typer.Option("--tensors", "--all", help="list every tensor of a checkpoint")
    ] = False,
) -> None:
    """Show what a checkpoint holds, or all checkpoints of a run. Reads no tensors."""
    with _told("inspect"):
        from shardwise.checkpoint.files import RealFiles
        from shardwise.cli.facts import checkpoint_facts, kind_of, run_facts

        files = RealFiles()
        is_run = kind_of(files, path) == "run"
        facts = run_facts(files, path) if is_run else checkpoint_facts(files, path, tensors)
        if as_json:
            _print_json(facts)
        else:
            from shardwise.cli.tables import open_console, show_checkpoint, show_run

            (show_run if is_run else show_checkpoint)(open_console(), facts)
        if not is_run and facts["damage"]:
            raise typer.Exit(_FAILED)


@app.command()
def verify(path: _Path, as_json: _Json = False) -> None:
    """Read every byte of a checkpoint, or of all of a run, and list all damage."""
    with _told("verify"):
        from time import perf_counter

        from shardwise.checkpoint.files import RealFiles
        from shardwise.checkpoint.verify import verify as verify_one
        from shardwise.cli.facts import checkpoints_at, disk_bytes, quick_state
        from shardwise.cli.progress import byte_bar
        from shardwise.cli.tables import open_console, show_verified

        files, console = RealFiles(), open_console()
        paths = checkpoints_at(files, path)
        manifests = [(p, quick_state(files, p)[0]) for p in paths]
        total_bytes = sum(disk_bytes(files, p, m) for p, m in manifests if m is not None)
        started_s = perf_counter()
        with byte_bar("verify", total_bytes) as progress:
            all_verified = [verify_one(files, one, progress) for one in paths]
        duration_s = perf_counter() - started_s
        facts = _verified_facts(path, all_verified, duration_s)
        if as_json:
            _print_json(facts)
        else:
            for verified in all_verified:
                show_verified(console, verified)
            console.print(_summary(facts), soft_wrap=True)
        if not facts["ok"]:
            raise typer.Exit(_FAILED)


@app.command()
def export(
    path: _Path,
    target: Annotated[Path, typer.Argument(help="the folder to make")],
    to: Annotated[
        _To, typer.Option(help="Hugging Face weights, or torch's distributed checkpoint")
    ] = _To.hf,
    step: _Step = None,
    dtype: Annotated[
        str | None, typer.Option(help="cast the weights: bf16, fp16, fp32 (hf only)")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="of one file, as 5GB or 512MiB (hf only; default 5GB)")
    ] = None,
    config_from: Annotated[
        Path | None, typer.Option(help="a model's folder: copy its config and tokenizer (hf only)")
    ] = None,
) -> None:
    """Write a checkpoint in a format of others, every byte checked on the way."""
    with _told("export"):
        if to is _To.dcp and (dtype or max_shard_size or config_from):
            raise ConfigError("--dtype, --max-shard-size and --config-from are for --to hf only")
        max_bytes = _parse_size(max_shard_size or "5GB")
        checkpoint = _open(path, step)
        try:
            if to is _To.hf:
                _export_weights(checkpoint, target, max_bytes, dtype, config_from)
            else:
                _export_state(checkpoint, target)
        finally:
            checkpoint.close()


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="the other checkpoint's folder or file")],
    target: Annotated[Path, typer.Argument(help="the folder to make")],
    from_: Annotated[_From, typer.Option("--from", help="its format")] = _From.auto,
    step: Annotated[
        int | None, typer.Option(min=0, help="of this step, as TARGET/step-...; else TARGET itself")
    ] = None,
    tag: Annotated[
        str | None, typer.Option(help="which of DeepSpeed's checkpoints; else what 'latest' names")
    ] = None,
) -> None:
    """Write a checkpoint of others as one of ours, which loads on any number of ranks."""
    with _told("import"):
        found = _format_of(source) if from_ is _From.auto else from_.value
        if tag is not None and found != "deepspeed":
            raise ConfigError(f"--tag is for DeepSpeed; {source} is {_FORMATS[found]}")
        _say(f"reading {source} as {_FORMATS[found]}")
        from shardwise.checkpoint.container import element_bytes
        from shardwise.checkpoint.files import RealFiles
        from shardwise.cli.progress import byte_bar
        from shardwise.convert.importing import import_source

        opened = _open_other(found, source, tag)
        total = sum(t.numel * element_bytes(t.dtype) for t in opened.tensors)
        with byte_bar("import", total) as progress:
            written = import_source(opened, target, files=RealFiles(), step=step, progress=progress)
        _say_written(written.path, len(opened.tensors), written.num_bytes)


# -- inspect and verify


def _verified_facts(path: Path, all_verified: list[Any], duration_s: float) -> dict[str, Any]:
    num_bytes = sum(v.num_bytes for v in all_verified)
    checkpoints = [
        {
            "path": str(v.path),
            "step": v.step,
            "ok": v.ok,
            "num_bytes": v.num_bytes,
            "num_files": v.num_files,
            "findings": [
                {"file": f.file, "tensor": f.tensor or None, "text": f.text} for f in v.findings
            ],
            "notes": list(v.notes),
        }
        for v in all_verified
    ]
    return {
        "path": str(path),
        "ok": all(v.ok for v in all_verified),
        "num_damaged": sum(not v.ok for v in all_verified),
        "num_bytes": num_bytes,
        "duration_s": duration_s,
        "bytes_per_s": round(num_bytes / duration_s),
        "checkpoints": checkpoints,
    }


def _summary(facts: dict[str, Any]) -> str:
    from shardwise.quantities import format_bytes

    count, damaged = len(facts["checkpoints"]), facts["num_damaged"]
    read = f"{format_bytes(facts['num_bytes'])} in {facts['duration_s']:.2f} s"
    speed = f"{format_bytes(facts['bytes_per_s'])}/s"
    what = "1 checkpoint" if count == 1 else f"{count} checkpoints"
    state = f"{damaged} damaged" if damaged else "every byte as it was saved"
    return f"{what}, {read}, {speed}: {state}" if count else "no checkpoint to verify"


# -- export


def _open(path: Path, step: int | None) -> Checkpoint:
    """Open a checkpoint, or of a run that step or the newest that passes the quick check."""
    from shardwise.checkpoint.files import RealFiles
    from shardwise.checkpoint.folder import check_quickly, step_name
    from shardwise.checkpoint.read import Checkpoint
    from shardwise.cli.facts import checkpoints_at, kind_of

    files = RealFiles()
    is_run = kind_of(files, path) == "run"
    if step is not None:
        one = path / step_name(step) if is_run else path
        if is_run and one not in checkpoints_at(files, path):
            raise ConfigError(f"{path} has no checkpoint of step {step}")
        manifest = check_quickly(files, one)[0]
        if manifest.step != step:
            raise ConfigError(f"{one} is of step {manifest.step}, not {step}")
        return Checkpoint(files, one, manifest)
    for one in checkpoints_at(files, path):
        try:
            return Checkpoint(files, one, check_quickly(files, one)[0])
        except CheckpointError as error:
            if not is_run:
                raise
            sys.stderr.write(f"passed over: {_shown(error)}\n")
    raise CheckpointError(f"{path}: there is no checkpoint in it that can be used")


def _export_weights(
    checkpoint: Checkpoint, target: Path, max_bytes: int, dtype: str | None, config: Path | None
) -> None:
    from shardwise.checkpoint.container import element_bytes
    from shardwise.checkpoint.files import RealFiles
    from shardwise.cli.progress import byte_bar
    from shardwise.convert.export import export_huggingface

    dtype = _DTYPES.get(dtype.lower(), dtype) if dtype is not None else None
    infos = [t for t in checkpoint.tensors if t.kind in ("param", "buffer")]
    # With a cast the bytes are known only as they are written.
    total = None if dtype else sum(t.numel * element_bytes(t.dtype) for t in infos)
    with byte_bar("export", total) as progress:
        done = export_huggingface(
            checkpoint,
            target,
            files=RealFiles(),
            max_shard_bytes=max_bytes,
            dtype=dtype,
            config_from=config,
            progress=progress,
        )
    _say_written(target, done.num_tensors, done.total_bytes)
    if config is None:
        _say("it has no config.json: put the model's beside it, or give --config-from")
    if checkpoint.tied:
        _say(f"left out, as they share a tensor that is there: {', '.join(checkpoint.tied)}")


def _export_state(checkpoint: Checkpoint, target: Path) -> None:
    from shardwise.checkpoint.container import element_bytes
    from shardwise.convert.export import export_dcp

    infos = [t for t in checkpoint.tensors if t.kind != "extra"]
    export_dcp(checkpoint, target)
    _say_written(target, len(infos), sum(t.numel * element_bytes(t.dtype) for t in infos))


def _parse_size(text: str) -> int:
    """Read a size such as 5GB, 512MiB or 1000000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", text.strip(), re.IGNORECASE)
    if match is None or match[2].upper() not in _UNITS:
        raise ConfigError(f"--max-shard-size {text!r}: expected a size such as 5GB or 512MiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


# -- import


def _format_of(source: Path) -> str:
    """Tell by their names what files lie there. **Raises** ConfigError when it is not sure."""
    try:
        names = [source.name] if source.is_file() else [p.name for p in source.iterdir()]
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from None
    patterns = {
        "hf": r"model\.safetensors(\.index\.json)?"
        if source.is_dir()
        else r".*\.(safetensors|json)",
        "dcp": r"\.metadata|.*\.distcp",
        "deepspeed": r"latest|global_step\d+|(zero_pp_rank_\d+_)?mp_rank_\d+_model_states\.pt",
    }
    if any(re.fullmatch(r"manifest\.json|rank\d{5,}\.json|step-\d{8,}", name) for name in names):
        raise ConfigError(f"{source} is a checkpoint of ours already: load it as it is")
    found = [f for f, p in patterns.items() if any(re.fullmatch(p, name) for name in names)]
    if len(found) == 1:
        return found[0]
    said = " and ".join(_FORMATS[f] for f in found) or "none of the formats that can be read"
    raise ConfigError(f"{source} looks like {said}: say which with --from hf, dcp or deepspeed")


def _open_other(name: str, path: Path, tag: str | None) -> Source:
    if name == "hf":
        from shardwise.convert.huggingface import open_huggingface

        return open_huggingface(path)
    if name == "dcp":
        from shardwise.convert.dcp import open_dcp

        return open_dcp(path)
    from shardwise.convert.deepspeed import open_deepspeed

    return open_deepspeed(path, tag)


# -- talking


@contextmanager
def _told(command: str) -> Iterator[None]:
    """Turn errors into a message and an exit code."""
    try:
        yield
    except (ShardwiseError, OSError) as error:
        sys.stderr.write(f"shardwise ckpt {command}: {_shown(error)}\n")
        raise typer.Exit(_WRONG if isinstance(error, ConfigError) else _FAILED) from None


def _say(text: str) -> None:
    sys.stdout.write(f"{_shown(text)}\n")


def _say_written(path: Path, num_tensors: int, num_bytes: int) -> None:
    from shardwise.quantities import format_bytes

    _say(f"wrote {path}: {num_tensors:,} tensors, {format_bytes(num_bytes)}")


def _shown(text: Any) -> str:
    from shardwise.cli.tables import printable

    return printable(text)


def _print_json(facts: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(facts, indent=2) + "\n")
