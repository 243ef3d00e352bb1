"""The checks before a run starts, and the paths in its output; imports no torch."""

from pathlib import Path

from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name, steps_in
from shardwise.errors import ConfigError
from shardwise.homes import resolve_offload
from shardwise.keys import read_keys
from shardwise.train.config import TrainConfig
from shardwise.train.text import find_documents, load_tokenizer

_MAX_SHOWN = 8


def config_path(config: TrainConfig) -> Path:
    """Return the path of the decided keys of a run."""
    return config.output / "config.yaml"


def metrics_path(config: TrainConfig) -> Path:
    """Return the path of the metrics of a run."""
    return config.output / "metrics.jsonl"


def checkpoints_path(config: TrainConfig) -> Path:
    """Return the path of the checkpoints of a run."""
    return config.output / "checkpoints"


def resolve_batch(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return the config with accumulation and global_batch decided for a number of ranks.

    A resumed run keeps its global batch if no key sets another one. If its micro-batches do not
    divide evenly, accumulation is that of the ranks with the most: see Note [Samples of a step].

    **Raises** ConfigError if global_batch is no multiple of micro_batch, or of micro_batch x ranks
    where passes cannot have the weight 0 (pipelines, experts that are kept equally busy).
    """
    kept = ""
    if config.global_batch is None and config.accumulation is None and config.resume != "never":
        config = config.model_copy(update={"global_batch": _earlier_batch(config)})
        kept = f" as in {config_path(config)}"
    _, num_parts = config.axes.over(world_size).part_of_batch(0)
    per_micro_batch = config.micro_batch * num_parts
    ranks = "ranks" if num_parts == world_size else "data-parallel ranks"
    product = f"micro_batch {config.micro_batch} x {num_parts} {ranks}"
    if config.global_batch is None:
        accumulation = config.accumulation or 1
        update = {"accumulation": accumulation, "global_batch": accumulation * per_micro_batch}
        return config.model_copy(update=update)
    is_balanced = config.expert_balance > 0 or config.expert_bias  # over the tokens of all ranks
    needs_even = config.pp > 1 or (config.experts > 0 and is_balanced)
    factor, reason = per_micro_batch, product
    if not needs_even:
        factor, reason = config.micro_batch, f"micro_batch {config.micro_batch}"
    if config.global_batch % factor:
        raise ConfigError(
            f"global_batch: expected a multiple of {factor} ({reason}), got "
            f"{config.global_batch}{kept}; change global_batch, micro_batch or the number of ranks"
        )
    accumulation = -(-config.global_batch // per_micro_batch)
    if config.accumulation not in (None, accumulation):
        raise ConfigError(
            f"accumulation: global_batch {config.global_batch} over {product} needs "
            f"{accumulation}, got {config.accumulation}; leave accumulation or global_batch out"
        )
    return config.model_copy(update={"accumulation": accumulation})


def _earlier_batch(config: TrainConfig) -> int | None:
    """Return the global batch of the earlier run in the output, if there is one."""
    path = config_path(config)
    if not path.exists():
        return None
    global_batch = read_keys(path).get("global_batch")
    return global_batch if isinstance(global_batch, int) else None


def check_micro_batches(pp: int, accumulation: int) -> None:
    """Raise ConfigError if a pipeline has fewer micro-batches than stages."""
    if pp > 1 and accumulation < pp:
        raise ConfigError(
            f"accumulation: expected at least pp {pp}, as many micro-batches as stages, got "
            f"{accumulation}"
        )


def check_run(config: TrainConfig, world_size: int) -> TrainConfig:
    """Return the config with all keys decided; raise errors that would stop the run.

    **Raises** ConfigError if degrees or the batch do not divide, the data has no text, the
    tokenizer does not load, the vocabulary is too small, or activations are offloaded without
    activation checkpointing.
    """
    config = resolve_batch(config, world_size)
    check_micro_batches(config.pp, config.accumulation or 1)
    offload = resolve_offload(config.offloaded)
    if offload and offload.activations != "device" and not config.activation_checkpointing:
        raise ConfigError(
            "offload: activations='cpu' moves the inputs of checkpointed blocks, and none is; add "
            "activation_checkpointing: true (--activation-checkpointing), or leave it out"
        )
    find_documents(config.data)
    tokenizer = load_tokenizer(config.tokenizer)
    vocab = config.vocab or tokenizer.vocab
    if vocab < tokenizer.vocab:
        raise ConfigError(
            f"vocab: expected at least the tokenizer's size {tokenizer.vocab}, got {vocab}"
        )
    kv_heads = config.kv_heads or config.heads
    return config.model_copy(update={"vocab": vocab, "kv_heads": kv_heads})


def check_output(config: TrainConfig) -> None:
    """Raise ConfigError if a run would overwrite an earlier one, or cannot resume.

    With `resume: never`, the folder has checkpoints, or metrics and overwrite is false; with
    `resume: <step>`, it lacks that step, or has newer ones.
    """
    if config.resume == "auto":
        return
    folder, path = checkpoints_path(config), metrics_path(config)
    steps = steps_in(Files(), folder)
    if config.resume == "never":
        if steps:
            raise ConfigError(
                f"output: {folder} holds checkpoints of an earlier run (newest: step {steps[0]}); "
                "go on with --resume auto, choose another output, or move that folder "
                "(overwrite does not touch checkpoints)"
            )
        if not config.overwrite and path.exists() and path.stat().st_size > 0:
            raise ConfigError(
                f"output: {path} holds the metrics of an earlier run; "
                "choose another output, or set `overwrite: true` (--overwrite)"
            )
        return
    if config.resume not in steps:
        present = ", ".join(map(str, steps[:_MAX_SHOWN])) or "none"
        raise ConfigError(
            f"resume: {folder} has no checkpoint of step {config.resume}; it has {present}"
        )
    newer = [step_name(step) for step in steps if step > config.resume]
    if newer:
        raise ConfigError(
            f"resume: {folder} holds checkpoints after step {config.resume} ({newer[0]}), which "
            "the run would come upon; move them, or go on with --resume auto"
        )
