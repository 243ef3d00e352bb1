"""Your restart with another loop. Nothing is wrong with its checkpoints. Find the wrong line.

`shardwise lab run 12 lab12_broken.py` kills it in step 6 of 8.
"""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

import lab12_restart as yours

__all__ = ["newest", "recut", "restore", "save", "state_of", "train"]
newest, recut, restore = yours.newest, yours.recut, yours.restore
save, state_of = yours.save, yours.state_of


def train(
    trainer: yours.Zero1, folder: Path, steps: int, every: int, loss_of: Callable[[int], Tensor]
) -> None:
    every = max(every, steps)
    yours.train(trainer, folder, steps, every, loss_of)
