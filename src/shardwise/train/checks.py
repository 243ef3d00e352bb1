"""What would stop a run, found before anything is started; imports no torch."""

from __future__ import annotations

from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.train.config import TrainConfig, resolve_batch
from shardwise.train.text import find_documents, load_tokenizer

__all__ = ["check_output", "check_run", "metrics_path"]


def metrics_path(config: TrainConfig) -> Path:
    """Return where the metrics of a run go."""
    return config.output / "metrics.jsonl"


def check_run(config: TrainConfig, world_size: int) -> TrainConfig:
    """Find what would stop a run before anything is started; return the config fully decided.

    Raises:
        ConfigError: the batch does not divide, there is no text, the tokenizer does not load, the
            vocabulary is too small.
    """
    config = resolve_batch(config, world_size)
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
    """Refuse to write over the metrics of an earlier run.

    Raises:
        ConfigError: the file has content and overwrite is false.
    """
    path = metrics_path(config)
    if not config.overwrite and path.exists() and path.stat().st_size > 0:
        raise ConfigError(
            f"output: {path} holds the metrics of an earlier run; "
            "choose another output, or set `overwrite: true` (--overwrite)"
        )
