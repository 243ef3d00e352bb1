"""Your ZeRO-1 with another `Flat`. It has the right losses and takes too much memory.

`shardwise lab run 3 lab03_broken.py` shows its bytes. Find the wrong line.
"""

import torch
import torch.distributed as dist
from torch import nn

import lab03_zero1 as yours


class Flat(yours.Flat):
    def __init__(self, parameters: list[nn.Parameter], num_ranks: int):
        self.places, start = [], 0
        for p in parameters:
            self.places.append(slice(start, start + p.numel()))
            start += yours.padded(p.numel(), num_ranks * 2048)
        self.values, self.grads = torch.zeros(start), torch.zeros(start)
        for p, place in zip(parameters, self.places, strict=True):
            self.values[place] = p.data.flatten()
            p.data = self.values[place].view_as(p)
            p.grad = self.grads[place].view_as(p)


class Zero1(yours.Zero1):
    def __init__(self, model: nn.Module, lr: float):
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        self.flat = Flat(list(model.parameters()), num_ranks)
        size = self.flat.values.numel() // num_ranks
        self.shard = nn.Parameter(self.flat.values[rank * size : (rank + 1) * size])
        self.optimizer = torch.optim.Adam([self.shard], lr=lr, foreach=False)
