"""Your way to shard, with units chosen so that the engine has nothing to free. Which line is wrong?

`shardwise lab run 6 lab06_broken.py` shows the path and the bytes.
"""

from torch import nn

import lab06_path as yours
import shardwise

__all__ = ["forms", "path", "record", "rows_of", "sent", "shard"]
forms, path, record, rows_of, sent = (
    yours.forms,
    yours.path,
    yours.record,
    yours.rows_of,
    yours.sent,
)


def shard(model: nn.Module, modules: list[nn.Module]) -> None:
    units = [model]
    shardwise.shard(model, units=units, stage=3)
