"""Your offload with little memory. It moves the right bytes, and waits all the time. Which line?

`shardwise lab run 8 lab08_broken.py` counts the reads.
"""

from pathlib import Path

from torch import nn

import lab08_offload as yours

__all__ = ["Offloaded", "Store", "adam", "blocks", "step_ahead", "step_by_blocks"]
Store, adam, blocks = yours.Store, yours.adam, yours.blocks
step_ahead, step_by_blocks = yours.step_ahead, yours.step_by_blocks


class Offloaded(yours.Offloaded):
    def __init__(self, model: nn.Module, lr: float, path: Path, size: int = 4096):
        super().__init__(model, lr, path, size)
        self.size = 64
