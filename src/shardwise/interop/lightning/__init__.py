"""Lightning: import this, and ``Trainer(strategy="shardwise")`` shards the LightningModule.

Reading order: ``checkpoints`` (what ``trainer.save_checkpoint`` writes and a resume reads), then
``strategy``, which registers itself under ``shardwise`` and ``shardwise_stage_0`` to ``_3``;
``observing`` (a callback that observes ``fit``).
"""

from shardwise.interop.lightning.observing import ObserveCallback
from shardwise.interop.lightning.strategy import ShardwiseStrategy

__all__ = ["ObserveCallback", "ShardwiseStrategy"]
