"""Lightning: import this, and ``Trainer(strategy="shardwise")`` shards the LightningModule.

The strategy registers itself under ``shardwise`` and ``shardwise_stage_0`` to ``_3``.
"""

from shardwise.interop.lightning.strategy import ObserveCallback, ShardwiseStrategy

__all__ = ["ObserveCallback", "ShardwiseStrategy"]
