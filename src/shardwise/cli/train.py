"""`shardwise train`: flags from the keys of TrainConfig, then one rank or the launch of more."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise import terminal
from shardwise.cli.convert import show_report
from shardwise.cli.flags import run_with_flags
from shardwise.errors import CheckpointError, ConfigError, ReplicaError, ShardwiseError
from shardwise.keys import flag_of, read_keys, shown
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.launch import INTERRUPTED, RankPlace, StopRequest, launch_local_ranks

if TYPE_CHECKING:
    from shardwise.interop.foreign_keys import Report

_BAD_CONFIG, _FAILED = 2, 1
_MOST_RANKS = 10**8


def run_command(arguments: Sequence[str]) -> int:
    """Run `shardwise train` with its arguments; return the exit code."""
    try:
        place = read_place(os.environ)
    except ConfigError as error:
        terminal.complain(f"shardwise train: {error}\n")
        return _BAD_CONFIG
    # A rank listens before it imports torch: see Note [Ending on a signal].
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun, or our own
    stop = StopRequest.installed(has_launcher) if place is not None else None

    def run(
        config_file: Path | None, flags: Mapping[str, Any], deepspeed: Path | None = None
    ) -> int:
        return _train(config_file, flags, deepspeed, place, stop, ["train", *arguments])

    run.__doc__ = _train.__doc__
    file = Annotated[Path | None, typer.Argument(help="YAML file of keys", show_default=False)]
    argument = inspect.Parameter(
        "config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file
    )
    option = typer.Option(
        help="DeepSpeed JSON: keys for what the YAML and the flags leave open", show_default=False
    )
    deepspeed = inspect.Parameter(
        "deepspeed",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[Path | None, option],
    )
    return run_with_flags(TrainConfig, argument, arguments, "shardwise train", run, [deepspeed])


def read_place(environment: Mapping[str, str]) -> RankPlace | None:
    """Return the rank that torchrun, or our launcher, gave this process, or None."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None

    def read(name: str, default: int, most: int) -> int:
        text = environment.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
            raise ConfigError(
                f"{name}: expected a whole number up to {most}, got {shown(text)}; torchrun sets it"
            )
        return int(text)

    world_size = read("WORLD_SIZE", 1, _MOST_RANKS)
    rank = read("RANK", 0, world_size - 1)
    local_size = read("LOCAL_WORLD_SIZE", world_size, world_size)
    return RankPlace(rank, world_size, read("LOCAL_RANK", rank, local_size - 1), local_size)


def _train(
    config_file: Path | None,
    flags: Mapping[str, Any],
    deepspeed: Path | None,
    place: RankPlace | None,
    stop: StopRequest | None,
    arguments: Sequence[str],
) -> int:
    """Train the built-in decoder on text.

    Every key can be in the YAML file or a flag; flags win. Under torchrun this is
    one rank; otherwise `ranks` local ranks are launched. Ctrl-C ends all ranks after their step.
    """
    is_first = place is None or place.rank == 0
    try:
        if deepspeed is None:
            config, report = load_config(config_file, flags), None
        else:
            config, report = _with_deepspeed(config_file, flags, deepspeed, place)
        num_ranks = place.world_size if place is not None else config.ranks or 1
        if report is not None and (place.rank == 0 if place is not None else num_ranks == 1):
            show_report(report)
        return _start(config, num_ranks, place, stop, arguments)
    except KeyboardInterrupt:
        terminal.say("stopped before the first step, as asked\n")
        return INTERRUPTED
    except ShardwiseError as error:
        is_same = _is_same_on_all_ranks(error)
        if is_first or not is_same:
            where = f"rank {place.rank}: " if place is not None and not is_same else ""
            terminal.complain(f"shardwise train: {where}{error}\n")
        return _BAD_CONFIG if isinstance(error, ConfigError) else _FAILED


def _with_deepspeed(
    config_file: Path | None, flags: Mapping[str, Any], file: Path, place: RankPlace | None
) -> tuple[TrainConfig, Report]:
    """Merge both files, which must agree, and the flags, which win."""
    from shardwise.interop.foreign_settings import read_train_keys, tell_sources

    values = read_keys(config_file) if config_file is not None else {}
    if place is not None:
        num_ranks = place.world_size
    else:
        ranks = flags.get("ranks", values.get("ranks"))
        num_ranks = max(1, int(ranks)) if str(ranks).isdecimal() else 1
    found, report = read_train_keys(file, values, flags, num_ranks)
    config = load_config(config_file, flags, (file, found))

    def source_of(name: str) -> str | None:
        return flag_of(name) if name in flags else str(config_file) if name in values else None

    return config, tell_sources(report, resolve_batch(config, num_ranks), source_of)


def _is_same_on_all_ranks(error: ShardwiseError) -> bool:
    """Tell whether all ranks raise the same error, so that one prints it."""
    if isinstance(error, ConfigError):
        return True
    from shardwise.train.loop import NonFiniteLossError
    from shardwise.train.replay import ReplayError

    same = CheckpointError, ReplicaError, ReplayError, NonFiniteLossError
    return isinstance(error, same)


def _start(
    config: TrainConfig,
    num_ranks: int,
    place: RankPlace | None,
    stop: StopRequest | None,
    arguments: Sequence[str],
) -> int:
    from shardwise.train.checks import check_output, check_run

    if place is None:
        check_run(config, num_ranks)
        check_output(config)
        if num_ranks > 1:
            return launch_local_ranks(arguments, num_ranks)
        place = RankPlace(0, 1, 0, 1)
    stop = stop or StopRequest.installed()
    is_first = place.rank == 0
    from shardwise.train.loop import train
    from shardwise.train.summary import Predicted, format_result

    def say(line: str) -> None:
        if is_first:
            terminal.say(line + "\n")

    result = train(check_run(config, place.world_size), place, stop, say)
    if not result.stopped:
        predicted = Predicted(
            config.predicted_step_s, config.predicted_state_bytes, config.predicted_peak_bytes
        )
        say(format_result(result, predicted))
        return 0
    kept = result.saved_step == result.steps
    hint = "; it is saved, go on with --resume auto" if kept else ""
    reason = "the launcher is gone" if stop.is_orphan else "as asked"
    say(f"stopped after step {result.steps}, {reason}{hint}")
    return INTERRUPTED
