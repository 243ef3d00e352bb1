"""Optimizers: `AdamW` with moments in fp32, bf16 or 8 bits, and `Mixed`."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.optim.adamw import AdamW as AdamW
    from shardwise.optim.mixed import Mixed as Mixed

_HOMES = {"AdamW": "shardwise.optim.adamw", "Mixed": "shardwise.optim.mixed"}

__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
