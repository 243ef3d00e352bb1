"""Checks of a sharded model: against one process, and between ranks."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.check.compare_ranks import check_replicas as replicas
    from shardwise.check.one_process import check_gradients as gradients
    from shardwise.check.written import check_writes as writes

_HOMES = {
    "gradients": "shardwise.check.one_process:check_gradients",
    "replicas": "shardwise.check.compare_ranks:check_replicas",
    "writes": "shardwise.check.written:check_writes",
}
__all__ = ["gradients", "replicas", "writes"]
__getattr__, __dir__ = lazily(__name__, _HOMES)
