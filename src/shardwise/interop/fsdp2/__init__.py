"""``fully_shard`` with the signature and semantics of torch's, on Shardwise's engine.

Its modules have the same methods as those of `shard()`: `engine.module_methods`.
"""

from shardwise.engine.module_methods import FSDPModule
from shardwise.interop.fsdp2.api import fully_shard

__all__ = ["FSDPModule", "fully_shard"]
