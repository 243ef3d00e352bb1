"""Lightning: import this, and ``Trainer(strategy="shardwise")`` shards the LightningModule.

Reading order: ``checkpoints`` (what ``trainer.save_checkpoint`` writes and a resume reads), then
``strategy``, which registers itself under ``shardwise`` and ``shardwise_stage_0`` to ``_3``.
"""

from shardwise.interop.lightning.strategy import ShardwiseStrategy

__all__ = ["ShardwiseStrategy"]
