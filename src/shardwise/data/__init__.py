"""The data of a run: which samples each rank takes, and token files that are mapped."""

from typing import TYPE_CHECKING

from shardwise.lazy import lazily

if TYPE_CHECKING:
    from shardwise.data.samples import Samples as Samples
    from shardwise.data.tokens import TokenFiles as TokenFiles

_HOMES = {"Samples": "shardwise.data.samples", "TokenFiles": "shardwise.data.tokens"}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazily(__name__, _HOMES)
