"""``fully_shard`` with the signature and semantics of torch's, on Shardwise's engine.

Its modules have the same methods as those of `shard()`: `surface.methods`.
"""

from shardwise.interop.fsdp2.api import fully_shard
from shardwise.surface.methods import FSDPModule

__all__ = ["FSDPModule", "fully_shard"]
