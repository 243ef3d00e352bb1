"""Optimizers of our own: `AdamW`, whose moments rest in fp32, in bf16 or in 8 bits; `Mixed`.

Reading order: ``kinds`` (names, without torch), ``codes`` and ``rounding`` (numbers in few bits),
``slices`` (what a rank has of a parameter), ``moments``, ``step``, ``adamw``; ``mixed`` is apart.
"""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.optim.adamw import AdamW as AdamW
    from shardwise.optim.mixed import Mixed as Mixed

_HOMES = {"AdamW": "shardwise.optim.adamw", "Mixed": "shardwise.optim.mixed"}

__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
