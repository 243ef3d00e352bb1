"""``fully_shard`` with the signature and the meaning of torch's, on Shardwise's engine.

Reading order: ``meshes`` (which axes, which placements), ``settings`` (what differs per call),
``slot`` (one parameter), ``group`` (the unit of one call), ``reduce`` (its gradients), ``state``
(what a call leaves on its modules), ``module`` (FSDPModule's methods), ``api``.
"""

from shardwise.interop.fsdp2.api import fully_shard
from shardwise.interop.fsdp2.module import FSDPModule

__all__ = ["FSDPModule", "fully_shard"]
