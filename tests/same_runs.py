"""Runs that must have the same bits: one model from one seed, in several settings."""

import copy

import torch
from torch import Tensor

from models import Stack
from shardwise import accumulate, optim, shard

OPTIMIZERS = {
    "adamw": ("AdamW", {}),
    "fused": ("AdamW", {"fused": True}),
    "foreach": ("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    "tensor lr": ("Adam", {"lr": torch.tensor(0.05), "foreach": False}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "sgd": ("SGD", {"lr": 0.1}),
    **{n.lower(): (n, {}) for n in ("Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")},
    "asgd": ("ASGD", {"lr": 0.1, "t0": 2}),
    "own": ("shardwise", {}),
    "own in bf16": ("shardwise", {"moments": "bf16"}),
    "own in 8 bits": ("shardwise", {"moments": "8bit", "block": 16}),
}


def make_optimizer(name, model):
    """Make an optimizer of two groups of parameters."""
    kind, options = OPTIMIZERS[name]
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}]
    options = copy.deepcopy({"lr": 0.05, **options})  # a learning rate may be a tensor
    of = optim.AdamW if kind == "shardwise" else getattr(torch.optim, kind)
    return of(groups, **options)


def train(model, optimizer, steps=4, clip=0.1, first=0):
    """Train with two micro-batches, clipping and a schedule; return losses and norms."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    found = []
    for step in range(first, first + steps):
        for last in (False, True):
            with accumulate(model, last=last):
                loss = loss_of(model, step)
                loss.backward()
            found.append(loss.detach())
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            found.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def loss_of(model, step):
    """Return the mean square of what a `Stack` makes of the step's batch."""
    return model(torch.linspace(-1, step + 1, 24).view(3, 8)).square().mean()


def everything(model, optimizer):
    """Return the parameters and the optimizer's state in full."""
    optimizer.state_dict()  # waits for codes too, which are plain tensors
    found = [p.full_tensor() for p in model.parameters()]
    for param in model.parameters():
        for _, value in sorted(optimizer.state[param].items()):
            if isinstance(value, Tensor):
                is_cut = hasattr(value, "full_tensor")
                found.append(value.full_tensor() if is_cut else value.clone())
    return found


def go_on(model, optimizer, steps=2, first=2):
    """Train on; return losses, norms and everything at the end."""
    return train(model, optimizer, steps, first=first) + everything(model, optimizer)


def same_runs(run, settings):
    """Call ``run`` with each setting, from one seed; check that all return the first one's bits."""
    expected = None
    for setting in settings:
        torch.manual_seed(0)
        found = run(setting)
        expected = found if expected is None else expected
        assert_same(found, expected, setting)


def assert_same(found, expected, what=""):
    """Compare two lists, bit by bit where they have tensors."""
    assert len(found) == len(expected), what
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        if isinstance(b, Tensor):
            assert a.dtype == b.dtype, (number, what)  # which torch.equal does not compare
            assert torch.equal(a, b), (number, what)
        else:
            assert a == b, (number, what)


def make(name, offload, stage=3, precision="fp32", kind=Stack):
    """Return a sharded model and its optimizer, from one seed."""
    torch.manual_seed(0)
    model = shard(kind(), stage=stage, precision=precision, offload=offload)
    return model, make_optimizer(name, model)
