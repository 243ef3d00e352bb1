"""Lightning: import this, and ``Trainer(strategy="shardwise")`` shards the LightningModule.

Reading order: ``checkpoints`` (the contents of Lightning's checkpoints), then ``strategy``, which
registers itself under ``shardwise`` and ``shardwise_stage_0`` to ``_3`` and has the callback that
observes ``fit``.
"""

from shardwise.interop.lightning.strategy import ObserveCallback, ShardwiseStrategy

__all__ = ["ObserveCallback", "ShardwiseStrategy"]
