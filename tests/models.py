"""Models for tests: tiny, of sizes that no world size divides."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_from_scratch as zero
from roundings import of_gradient


class Block(nn.Module):
    """A unit: like children of a ModuleList are found as units."""

    def __init__(self, width=8):
        super().__init__()
        self.up = nn.Linear(width, width + 3)
        self.down = nn.Linear(width + 3, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Three blocks and a head."""

    block_class: type[nn.Module] = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block_class() for _ in range(3))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Stack):
    """Each block is computed again in backward."""

    use_reentrant = False

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def stack_roundings(rows):
    """Count the roundings of a gradient of `Stack`; its last sum is over so many rows."""
    return of_gradient(*(8, 11) * 3, 8, over=rows)


class InnerBranchBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x, which):
        return x + self.experts[which](x)


class Experts(nn.Module):
    """Units whose experts run or not, rank by rank."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(InnerBranchBlock() for _ in range(2))

    def forward(self, x, which):
        for block in self.blocks:
            x = block(x, which)
        return x


def routed_loss(model, batch):
    return model(*batch).square().mean()


class OddModel(zero.TinyModel):
    """Sizes that no world size divides, tied weights, a scalar, and one that is never used."""

    def __init__(self, width=7):
        super().__init__(width=width, num_blocks=3)
        self.head.weight = self.embedding.weight
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.never_used = nn.Parameter(torch.zeros(5))

    def forward(self, tokens):
        return super().forward(tokens) * self.temperature


class NormedBlock(nn.Module):
    """A block to be cut by tensor parallelism; hidden rows divide by no number of ranks."""

    WIDTH, HIDDEN = 6, 7

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(self.WIDTH)
        self.up, self.down = nn.Linear(self.WIDTH, self.HIDDEN), nn.Linear(self.HIDDEN, self.WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class NormedStack(nn.Module):
    """Two such blocks and a head."""

    block_class: type[nn.Module] = NormedBlock
    outputs = 3

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(self.block_class(), self.block_class())
        self.head = nn.Linear(NormedBlock.WIDTH, self.outputs)

    def forward(self, x):
        return self.head(self.layers(x))
