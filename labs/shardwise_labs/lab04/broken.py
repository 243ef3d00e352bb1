"""Your ZeRO-2 with buckets: units wait, and a full bucket reduces them all. Find the wrong line.

`shardwise lab run 4 lab04_broken.py` shows its bytes.
"""

import torch
from torch import Tensor, nn

import lab04_zero2 as yours

BUCKET = 1 << 20  # elements that a bucket holds before it is reduced


class Unit(yours.Unit):
    def __init__(self, module: nn.Module, bucket: list["Unit"]):
        super().__init__(module)
        self.bucket = bucket

    def count_gradient(self) -> None:
        self.num_missing -= 1
        if self.num_missing == 0:
            self.bucket.append(self)
            if sum(unit.values.numel() for unit in self.bucket) >= BUCKET:
                reduce_all(self.bucket)


def reduce_all(bucket: list[Unit]) -> None:
    for unit in bucket:
        unit.reduce()
    bucket.clear()


class Zero2(yours.Zero2):
    def __init__(self, modules: list[nn.Module], lr: float):
        self.bucket: list[Unit] = []
        self.units = [Unit(module, self.bucket) for module in modules]
        shards = [unit.shard for unit in self.units]
        self.optimizer = torch.optim.Adam(shards, lr=lr, foreach=False)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        reduce_all(self.bucket)
