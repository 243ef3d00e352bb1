"""`shardwise train`: flags from the keys of TrainConfig, then one rank or the launch of more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer

from shardwise import terminal
from shardwise.cli.convert import show_report
from shardwise.cli.flags import code_of, takes_keys
from shardwise.errors import CheckpointError, ConfigError, ReplicaError, ShardwiseError
from shardwise.interop.foreign_keys import Report
from shardwise.interop.foreign_settings import read_train_keys, tell_sources
from shardwise.keys import flag_of, key, read_keys, shown
from shardwise.train.checks import check_output, check_run, resolve_batch
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.launch import (
    INTERRUPTED,
    OWN_STORE,
    RankPlace,
    StopRequest,
    launch_local_ranks,
    leave,
)

_MOST_RANKS = 10**8


class TrainFlags(TrainConfig):
    """The keys of a run, and flags without a key in its file."""

    deepspeed: Path | None = key(
        None, "Files", "DeepSpeed JSON: keys for what the YAML and the flags leave open"
    )


@takes_keys(TrainFlags, "config_file", Path, "YAML file of keys")
def train(context: typer.Context, file: Path | None, flags: dict[str, object]) -> int:
    """Train the built-in decoder on text.

    Every key can be in the YAML file or a flag; flags win. Under torchrun this is
    one rank; otherwise `ranks` local ranks are launched. Ctrl-C ends all ranks after their
    step.
    """
    place = read_place(os.environ)
    has_launcher = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun, or our own
    stop = StopRequest.of_process(has_launcher) if place is not None else None
    try:
        with report_errors_once(place):
            flags, shortened = _shorten_warmup(file, flags)
            config, report = read_run(file, flags, place)
            num_ranks = place.world_size if place is not None else config.ranks or 1
            is_first = place.rank == 0 if place is not None else num_ranks == 1
            if is_first and shortened:
                terminal.say(shortened)
            if is_first and report is not None:
                show_report(report)
            if place is None:
                check_run(config, num_ranks)
                check_output(config)
                if num_ranks > 1:
                    if config.restarts:
                        os.environ[OWN_STORE] = "1"
                    arguments = ["train", *context.meta["arguments"]]
                    return launch_local_ranks(arguments, num_ranks, config.restarts)
            return _train(config, place or RankPlace(0, 1, 0, 1), stop or StopRequest.of_process())
    except KeyboardInterrupt:
        terminal.say("stopped before the first step, as asked\n")
        return INTERRUPTED


@contextmanager
def report_errors_once(place: RankPlace | None) -> Iterator[None]:
    """Report errors that all ranks raise on rank 0 only, and other errors with their rank.

    Without a launcher there is no ``place``, and every error is raised.
    """
    try:
        yield
    except ShardwiseError as error:
        is_same = isinstance(error, ConfigError)
        if not is_same:  # with torch
            from shardwise.train.integrity import ReplayError
            from shardwise.train.loop import NonFiniteLossError

            same = CheckpointError, ReplicaError, ReplayError, NonFiniteLossError
            is_same = isinstance(error, same)
        if place is None or (is_same and place.rank == 0):
            raise
        if not is_same:
            terminal.complain(f"rank {place.rank}: {error}\n")
        raise typer.Exit(code_of(error)) from None


def read_place(environment: Mapping[str, str]) -> RankPlace | None:
    """Return the rank that a launcher gave this process; None without a launcher.

    **Raises** ConfigError for a number that is none, and for restarts that would hang.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None

    def read(name: str, default: int, most: int) -> int:
        text = environment.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) <= most):
            raise ConfigError(
                f"{name}: expected a whole number up to {most}, got {shown(text)}; torchrun sets it"
            )
        return int(text)

    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise ConfigError(
            f"torchrun --max-restarts needs {OWN_STORE}=1 in its environment: ranks that are "
            "started again would find addresses of those before in its store, and hang"
        )
    world_size = read("WORLD_SIZE", 1, _MOST_RANKS)
    rank = read("RANK", 0, world_size - 1)
    local_size = read("LOCAL_WORLD_SIZE", world_size, world_size)
    return RankPlace(rank, world_size, read("LOCAL_RANK", rank, local_size - 1), local_size)


def read_run(
    file: Path | None, flags: dict[str, object], place: RankPlace | None
) -> tuple[TrainConfig, Report | None]:
    """Read a run's keys. A YAML and a DeepSpeed file must agree; flags win."""
    deepspeed = flags.pop("deepspeed", None)
    if not isinstance(deepspeed, Path):
        return load_config(file, flags), None
    values = read_keys(file) if file is not None else {}
    if place is not None:
        num_ranks = place.world_size
    else:
        ranks = str(flags.get("ranks", values.get("ranks")))
        num_ranks = max(1, int(ranks)) if ranks.isdecimal() else 1
    foreign_keys, report = read_train_keys(deepspeed, values, flags, num_ranks)
    config = load_config(file, flags, (deepspeed, foreign_keys))

    def source_of(name: str) -> str | None:
        return flag_of(name) if name in flags else str(file) if name in values else None

    return config, tell_sources(report, resolve_batch(config, num_ranks), source_of)


def _shorten_warmup(file: Path | None, flags: dict[str, object]) -> tuple[dict[str, object], str]:
    """Shorten the file's warm-up to a run that ``--steps`` makes shorter. Return a line about it.

    A file whose own warm-up is longer than its run stays as it is, and is refused.
    """
    if file is None or "steps" not in flags or "warmup_steps" in flags:
        return flags, ""
    values = read_keys(file)
    default = TrainConfig.model_fields["steps"].default
    warmup, whole, steps = values.get("warmup_steps"), values.get("steps", default), flags["steps"]
    text = str(steps)
    if not (isinstance(warmup, int) and isinstance(whole, int) and text.isdecimal()):
        return flags, ""  # `check_keys` raises
    if not 0 < int(text) < warmup <= whole:
        return flags, ""
    line = f"warmup_steps: {warmup} in {file}, shortened to {text}, as --steps says\n"
    return {**flags, "warmup_steps": int(text)}, line


def _train(config: TrainConfig, place: RankPlace, stop: StopRequest) -> int:
    from shardwise.train.integrity import ReplayError
    from shardwise.train.loop import train
    from shardwise.train.summary import format_result

    def say(line: str) -> None:
        if place.rank == 0:
            terminal.say(line + "\n")

    config = check_run(config, place.world_size)
    try:
        result = train(config, place, stop, say)
    except ReplayError as error:
        if config.on_fault == "leave" and leave(place, error.rank):
            terminal.complain(f"rank {place.rank}: this node leaves the run\n")
        raise
    if not result.stopped:
        say(format_result(result, config))
        return 0
    if place.world_size > place.local_world_size:
        stop.linger()
    kept = result.saved_step == result.steps
    hint = "; it is saved, go on with --resume auto" if kept else ""
    reason = "the launcher is gone" if stop.is_orphan else "as asked"
    say(f"stopped after step {result.steps}, {reason}{hint}")
    return INTERRUPTED
