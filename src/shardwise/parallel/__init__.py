"""Parallelism over sequences, experts and pipelines; micro-batches in rounds."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.outer import Outer as Outer
    from shardwise.parallel.clipping import clip_grad_norm_ as clip_grad_norm_
    from shardwise.parallel.context import ContextParallel as ContextParallel
    from shardwise.parallel.experts import MixtureOfExperts as MixtureOfExperts
    from shardwise.parallel.experts import spread_experts as spread_experts
    from shardwise.parallel.local_steps import LocalSteps as LocalSteps
    from shardwise.parallel.routing import balance_experts as balance_experts
    from shardwise.parallel.tying import tie as tie
    from shardwise.parallel.uneven import join as join
    from shardwise.parallel.uneven import mean_loss as mean_loss

_HOMES = {
    "ContextParallel": "shardwise.parallel.context",
    "LocalSteps": "shardwise.parallel.local_steps",
    "MixtureOfExperts": "shardwise.parallel.experts",
    "Outer": "shardwise.outer",
    "balance_experts": "shardwise.parallel.routing",
    "clip_grad_norm_": "shardwise.parallel.clipping",
    "join": "shardwise.parallel.uneven",
    "mean_loss": "shardwise.parallel.uneven",
    "spread_experts": "shardwise.parallel.experts",
    "tie": "shardwise.parallel.tying",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
