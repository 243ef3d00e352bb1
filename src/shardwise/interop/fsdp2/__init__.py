"""``fully_shard`` with the signature and the meaning of torch's, on Shardwise's engine.

Reading order: ``meshes`` (which axes, which placements), ``units`` (what a call asks for, as the
values of a unit), ``state`` (what a call leaves on its modules), ``module`` (their class), ``api``.
The methods of its modules are those of `shard()`'s: `engine.module_methods`.
"""

from shardwise.engine.module_methods import FSDPModule
from shardwise.interop.fsdp2.api import fully_shard

__all__ = ["FSDPModule", "fully_shard"]
