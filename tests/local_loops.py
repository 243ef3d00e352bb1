"""A plain program with two loops, which `LocalSteps` must equal: replicas, and an outer step."""

import copy

import torch

from block_codes import decoded
from oracle import plain_loop

BLOCK = 256


def group_of(name, streams):
    """Say in which group of `Stack`'s units a parameter is: the root, then blocks 0, 1, 2."""
    unit = int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0
    return unit % streams


def is_due(group, step, every, streams):
    """Say at which steps a group is synchronised: in the window's parts, one after the other."""
    return step % every == -((-(group + 1) * every) // streams) % every


def mean(tensors):
    """Sum in order; divide once."""
    total = tensors[0].clone()
    for each in tensors[1:]:
        total = total + each
    return total / len(tensors)


def coded_mean(tensors):
    """Encode each addend and the mean, in blocks of whole shares; one share where it fits."""
    flat = [t.reshape(-1) for t in tensors]
    share = -(-flat[0].numel() // (len(flat) * BLOCK)) * BLOCK
    padded = [torch.cat([t, t.new_zeros(share * len(flat) - t.numel())]) for t in flat]
    found = mean([torch.from_numpy(decoded(t.tolist(), "int8", BLOCK)) for t in padded])
    return torch.from_numpy(decoded(found.tolist(), "int8", BLOCK))[: flat[0].numel()]


class TwoLoops:
    """Replicas in plain loops, and every few steps an outer step by torch's SGD."""

    def __init__(self, model, num_replicas, optimizer, every, outer=None, streams=1):
        self.models = [copy.deepcopy(model) for _ in range(num_replicas)]
        self.optimizers = [optimizer(list(each.parameters())) for each in self.models]
        self.every, self.outer, self.streams, self.num_steps = every, outer, streams, 0
        self.anchor = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.sgd = {}
        if outer is not None:
            how = {"lr": outer.lr, "momentum": outer.momentum, "nesterov": outer.momentum > 0}
            for group in range(streams):
                held = [p for n, p in self.anchor.items() if group_of(n, streams) == group]
                self.sgd[group] = torch.optim.SGD(held, **how) if held else None

    def step(self, micro_batches, loss, **how):
        """Take one step of every replica with its ranks' batches, then the outer step if due."""
        size = len(micro_batches[0]) // len(self.models)
        for number, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            mine = [each[number * size :][:size] for each in micro_batches]
            plain_loop(model, [mine], loss, lambda _, o=optimizer: o, **how)
        self.num_steps += 1
        for group in range(self.streams):
            if is_due(group, self.num_steps, self.every, self.streams):
                self.synchronize(group)

    @torch.no_grad()
    def synchronize(self, group):
        """Bring the replicas' parameters of one group together."""
        replicas = [dict(model.named_parameters()) for model in self.models]
        names = [n for n in self.anchor if group_of(n, self.streams) == group]
        for name in names:
            values = [params[name] for params in replicas]
            if self.outer is None:
                self.anchor[name].copy_(mean(values))
        if self.outer is not None:
            differences = [[self.anchor[n] - params[n] for n in names] for params in replicas]
            for name, found in zip(names, self.means(differences), strict=True):
                self.anchor[name].grad = found
        if self.outer is not None and names:
            self.sgd[group].step()
        for name in names:
            for params in replicas:
                params[name].copy_(self.anchor[name])

    def means(self, differences):
        """Return the mean over replicas of each parameter's difference."""
        return [mean(list(each)) for each in zip(*differences, strict=True)]


class CodedLoops(TwoLoops):
    """The differences of each unit are sent as codes of 8 bits, and so is their mean."""

    def synchronize(self, group):
        self.names = [n for n in self.anchor if group_of(n, self.streams) == group]
        super().synchronize(group)

    def means(self, differences):
        found = {}
        for unit in range(4):
            inside = [i for i, n in enumerate(self.names) if group_of(n, 4) == unit]
            flat = [torch.cat([each[i].reshape(-1) for i in inside]) for each in differences]
            parts = coded_mean(flat).split([differences[0][i].numel() for i in inside])
            for i, part in zip(inside, parts, strict=True):
                found[i] = part.view(differences[0][i].shape)
        return [found[i] for i in range(len(self.names))]
