"""Optimizers: `AdamW` with moments in fp32, bf16 or 8 bits, `Mixed`, and `gathering`."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.optim.adamw import AdamW as AdamW
    from shardwise.optim.mixed import Mixed as Mixed
    from shardwise.optim.whole_tensors import gathering as gathering

_HOMES = {
    "AdamW": "shardwise.optim.adamw",
    "Mixed": "shardwise.optim.mixed",
    "gathering": "shardwise.optim.whole_tensors",
}

__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
