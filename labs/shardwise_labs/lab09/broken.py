"""Your mixed ZeRO-1 with a step that follows what the model computes with. Find the wrong line.

`shardwise lab run 9 lab09_broken.py` shows what its parameters do.
"""

import torch.distributed as dist

import lab09_precision as yours

__all__ = ["Scaler", "half_ulp"]
Scaler, half_ulp = yours.Scaler, yours.half_ulp


class MixedZero1(yours.MixedZero1):
    def step(self) -> None:
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        own = self.flat.values.chunk(num_ranks)[rank]
        self.master.data.copy_(own)
        super().step()
