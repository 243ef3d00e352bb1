"""Your ZeRO-3 with several modules in a unit. Its peak is far too high. Find the wrong line.

`shardwise lab run 5 lab05_broken.py` shows its bytes.
"""

import torch
from torch import nn

import lab05_zero3 as yours

GROUP = 4  # modules between the first and the last one that form a unit


class Group(yours.ShardedUnit):
    def __init__(self, modules: list[nn.Module]):
        super().__init__(nn.ModuleList(modules))
        # Nothing calls a ModuleList, so the first module gathers, and the last one frees.
        modules[0].register_forward_pre_hook(lambda _module, _inputs: self.gather())
        modules[-1].register_forward_hook(lambda _module, _inputs, out: self.end_forward(out))


class Zero3(yours.Zero3):
    def __init__(self, modules: list[nn.Module], lr: float):
        middle = modules[1:-1]
        groups = [middle[start : start + GROUP] for start in range(0, len(middle), GROUP)]
        self.units = [Group(group) for group in (modules[:1], *groups, modules[-1:])]
        shards = [unit.shard for unit in self.units]
        self.optimizer = torch.optim.Adam(shards, lr=lr, foreach=False)
