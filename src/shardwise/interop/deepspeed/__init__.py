"""A DeepSpeed JSON, read for `shard()`, `shardwise train` and a plan, and written from ours."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.interop.deepspeed.settings import from_deepspeed as from_deepspeed

__all__ = ["from_deepspeed"]
__getattr__, __dir__ = lazily(__name__, {"from_deepspeed": "shardwise.interop.deepspeed.settings"})
