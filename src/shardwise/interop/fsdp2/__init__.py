"""``fully_shard`` with the signature and the meaning of torch's, on Shardwise's engine.

Reading order: ``meshes`` (which axes, which placements), ``units`` (what a call asks for, as the
values of a unit), ``private`` (names of torch's objects that tools read), ``state`` (what a call
leaves on its modules), ``module`` (FSDPModule's methods), ``api``.
"""

from shardwise.interop.fsdp2.api import fully_shard
from shardwise.interop.fsdp2.module import FSDPModule

__all__ = ["FSDPModule", "fully_shard"]
