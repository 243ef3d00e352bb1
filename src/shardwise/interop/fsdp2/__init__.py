"""``fully_shard`` with the signature and the meaning of torch's, on Shardwise's engine.

The methods of its modules are those of `shard()`'s: `engine.module_methods`.
"""

from shardwise.engine.module_methods import FSDPModule
from shardwise.interop.fsdp2.api import fully_shard

__all__ = ["FSDPModule", "fully_shard"]
