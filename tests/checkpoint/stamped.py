"""A real sharded model with AdamW in which every element says which save it belongs to."""

import zlib
from collections import Counter
from functools import cache

import torch
from torch import nn

import shardwise
from shardwise import shard

SAVES = "ZABCDEFGH"  # Z is what stands in the model before a load


class Net(nn.Module):
    """Linear layers that hardly divide by the ranks, a scalar, and a buffer."""

    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, 5)
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(3, 2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def build(stage=3, layout="rows", width=13, depth=2, mesh=None, save=None):
    """Shard a model and give its optimizer state, as a step would; no backward pass is run.

    With ``save``, every element is one of that save.
    """
    # A scalar cannot be cut by rows over ranks that own less than one row: some ranks own nothing.
    model = shard(Net(width, depth), stage=stage, layout=layout, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        optimizer.state[param] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(param),
            "exp_avg_sq": torch.zeros_like(param),
        }
    if save is not None:
        stamp(model, optimizer, save)
    return model, optimizer


def _tensors(model, optimizer):
    """Yield (name, this rank's elements, [lo, hi) in the whole tensor) of all state."""
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        lo, hi = param._cut.lo, param._cut.hi
        yield name, param.to_local(), lo, hi
        for key, value in state.items():
            if key == "step":
                yield f"{name}.step", value, 0, 1
            else:
                yield f"{name}.{key}", value.to_local(), lo, hi
    for name, buffer in model.named_buffers():
        yield name, buffer, 0, buffer.numel()


@cache
def stamped_value(name, lo, hi, save):
    """Return elements [lo, hi) of a tensor of a save, exact in float32; only to be read."""
    base = torch.arange(lo, hi) % 65_521 + zlib.crc32(name.encode()) % 997
    return (base + 100_000 * SAVES.index(save)).float()


@torch.no_grad()
def stamp(model, optimizer, save):
    """Fill this rank's elements of all state with those of a save."""
    for name, data, lo, hi in _tensors(model, optimizer):
        data.copy_(stamped_value(name, lo, hi, save).view(data.shape))


@torch.no_grad()
def count(model, optimizer, saves="ZABC"):
    """Count this rank's elements by the save that they are of; "?" are of none."""
    found = Counter()
    for name, data, lo, hi in _tensors(model, optimizer):
        rest = hi - lo
        for save in saves:
            same = int((data.reshape(-1) == stamped_value(name, lo, hi, save)).sum())
            found[save] += same
            rest -= same
        found["?"] += rest
    return {save: number for save, number in found.items() if number}


def save_each(folder, model, optimizer, saves="AB"):
    """Save each as the next step, from 1."""
    for step, save in enumerate(saves, 1):
        stamp(model, optimizer, save)
        shardwise.save(folder, model, optimizer, step=step)
