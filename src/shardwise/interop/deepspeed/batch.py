"""The three sizes of a batch, and how two of them give the third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError

KEYS = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "train_batch_size": "global_batch",
}


@dataclass(frozen=True)
class Batch:
    """Samples of one rank in one forward pass, such passes per step, samples of a step over ranks.

    What is None follows from the others once the number of ranks is known, or is yours.
    """

    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None


def resolve(sizes: Mapping[str, int], world_size: int | None, source: str) -> Batch:
    """Let any two sizes give the third, as DeepSpeed does; alone, accumulation is 1.

    Without a number of ranks only what does not depend on it is decided.

    **Raises** ConfigError with the numbers where they contradict each other.
    """
    micro, passes = sizes.get("micro_batch"), sizes.get("accumulation")
    whole = sizes.get("global_batch")
    if passes is None and (micro is None) != (whole is None):
        passes = 1
    if world_size is None:
        return Batch(micro, passes, whole)
    if whole is None:
        if micro is None or passes is None:
            return Batch(micro, passes, None)
        return Batch(micro, passes, micro * passes * world_size)
    if micro is None and passes is not None:
        micro = whole // (world_size * passes)
    elif passes is None and micro is not None:
        passes = whole // (world_size * micro)
    if micro is None or passes is None or micro * passes * world_size != whole or not whole:
        raise ConfigError(
            f"{source}: train_batch_size: expected train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x ranks = {micro} x {passes} x {world_size}"
            f"{_product(micro, passes, world_size)}, got {whole}; change one of them, or the "
            "number of ranks"
        )
    return Batch(micro, passes, whole)


def _product(micro: int | None, passes: int | None, world_size: int) -> str:
    if micro is None or passes is None:
        return ""
    return f" = {micro * passes * world_size}"
