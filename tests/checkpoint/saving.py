"""Training runs for checkpoint tests: a model with every kind of state, trained under any setting.

The truth about a saved run is taken by gathering the slices, never from the checkpoint.
"""

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from ranks import HANG_S
from roundings import SMOOTH_EPS, of_gradient
from trainer import full_all

VOCABULARY, WIDTH, BATCH = 11, 6, 120  # every number of ranks of the tests divides the batch


class Cell(nn.Module):
    """A unit with odd sizes, a scalar, and a tensor of three dims."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.mix = nn.Parameter(torch.randn(3, 2, WIDTH) * 0.1)

    def forward(self, x):
        mixed = (x.unsqueeze(1) * self.mix.sum(0)).sum(1)
        return x + self.gain * self.down(torch.tanh(self.up(x))) + mixed


class Net(nn.Module):
    """Tied and frozen weights, fewer rows than ranks, buffers that differ between ranks."""

    def __init__(self, tied=True):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = nn.ModuleList(Cell() for _ in range(2))
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)
        self.few = nn.Parameter(torch.randn(2))
        self.never_used = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(4, WIDTH), requires_grad=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.register_buffer("counts", torch.arange(7) * 10**12)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens, norm=True):
        x = self.embedding(tokens).mean(1)
        for cell in self.cells:
            x = cell(x)
        if norm:
            x = self.norm(x.float()).to(x.dtype)
        x = x * self.few.sum() + self.frozen.mean(0)
        return self.head(x)


UNITS = {"found": None, "linear": [nn.Linear], "root": [Net]}


# A mean of three embeddings, two cells, two products, the head; then the batch and the loss.
NET_ROUNDINGS = of_gradient(3, *(6, 9, 3) * 2, 2, 4, WIDTH, over=BATCH + VOCABULARY)


@dataclass(frozen=True)
class Setting:
    """How a run is sharded."""

    num_ranks: int
    stage: int = 3
    layout: str = "rows"
    units: str = "found"
    precision: str = "fp32"
    num_replicas: int = 1

    def __str__(self):
        replicas = f"x{self.num_replicas}" if self.num_replicas > 1 else ""
        return (
            f"{self.num_ranks}{replicas}-{self.stage}-{self.layout}-{self.units}-{self.precision}"
        )


def all_settings(sizes=(1, 2, 3, 4, 5, 8)):
    """Return every size x stage x layout; partitions and precisions take turns."""
    found = []
    for number, (n, stage, layout) in enumerate(product(sizes, range(4), ("rows", "flat"))):
        units = tuple(UNITS)[(number + number // 8) % 3]
        found.append(Setting(n, stage, layout, units, "bf16" if number % 5 == 3 else "fp32"))
    return found


@dataclass
class Run:
    """One rank's objects of a run."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler

    @property
    def extra(self):
        return {"schedule": self.schedule, "scaler": self.scaler}


def adamw(model):
    options = {"lr": 0.02, "weight_decay": 0.1, "eps": SMOOTH_EPS}
    return torch.optim.AdamW(model.parameters(), **options, foreach=True)


def build(setting, seed=0, make_model=Net, make_optimizer=adamw):
    """Build and shard a model on the ranks of this call."""
    torch.manual_seed(seed)
    mesh = None
    if setting.num_replicas > 1:
        sizes = (setting.num_replicas, setting.num_ranks // setting.num_replicas)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = shardwise.shard(
        make_model(),
        stage=setting.stage,
        layout=setting.layout,
        units=UNITS[setting.units],
        precision=setting.precision,
        mesh=mesh,
    )
    return run_with(model, make_optimizer(model), scale=2.0**seed)


def run_with(model, optimizer, scale=3.0):
    """Return a run of a model, sharded or plain, and an optimizer."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))  # it makes its state on first use
    return Run(model, optimizer, schedule, scaler)


def plain(seed):
    """Return a run of a plain model in one process."""
    torch.manual_seed(seed)
    model = Net()
    return run_with(model, adamw(model))


def tokens_of(step, rank, num_ranks):
    """Return this rank's part of the step's global batch."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, 3), generator=torch.Generator().manual_seed(100 + step)
    )
    return tokens[rank::num_ranks]


def take_step(run, step, norm=True):
    """Train one step; return the loss over the global batch.

    Without ``norm`` the step is the same whatever the number of ranks: batch statistics are not.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    loss = run.model(tokens_of(step, rank, num_ranks), norm).float().pow(2).mean()
    loss.backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.schedule.step()
    run.scaler.update(run.scaler.get_scale() * 2)
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / num_ranks


def full(value):
    """Return a copy of the whole value, gathered if it is cut."""
    if not isinstance(value, Tensor):
        return value
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.detach().clone()


def truth_of(run):
    """Return all state, in full; every rank calls it, and buffers are this rank's own."""
    model, optimizer = run.model, run.optimizer
    named = dict(model.named_parameters(remove_duplicate=False))
    truth = {f"param {name}": p for name, p in named.items()}
    for name, p in named.items():
        for key, value in optimizer.state.get(p, {}).items():
            truth[f"state {name} {key}"] = value
    keys = [key for key, value in truth.items() if isinstance(value, Tensor)]
    truth |= dict(zip(keys, full_all([truth[key] for key in keys]), strict=True))
    truth |= {f"buffer {name}": full(b) for name, b in model.named_buffers() if name != "scratch"}
    for number, group in enumerate(optimizer.param_groups):
        truth |= {f"group {number} {k}": v for k, v in group.items() if k != "params"}
    truth |= {f"schedule {k}": v for k, v in run.schedule.state_dict().items()}
    truth |= {f"scaler {k}": v for k, v in run.scaler.state_dict().items()}
    return truth


def differences(actual, expected):
    """Return what is not the same, to the bit; nothing if all is."""
    found = [f"only here: {key}" for key in actual.keys() - expected.keys()]
    found += [f"missing: {key}" for key in expected.keys() - actual.keys()]
    for key in sorted(actual.keys() & expected.keys()):
        ours, theirs = actual[key], expected[key]
        if not same(ours, theirs):
            found.append(f"{key}: {ours} instead of {theirs}"[:300])
    return found


def same(a, b):
    """Tell whether two values have the same type and the same bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(bits(a), bits(b))
    return type(a) is type(b) and a == b


def bits(tensor):
    """Return the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def flip(path, at=-1):
    """Flip a bit of one byte of a file, by default of the last one, which is a tensor's."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def same_on_all_ranks(value):
    """Return a value that every rank has, having seen that it does."""
    of_all = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, value)
    assert of_all == [value] * len(of_all)
    return value


def until(holds):
    """Wait until something holds, as no test takes for ever."""
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def warns_on_rank_0(rank, match):
    """Expect a warning on rank 0 alone."""
    return pytest.warns(UserWarning, match=match) if rank == 0 else nullcontext()


def state_folder(root, setting):
    return root / str(setting)


def local_bytes(model):
    """Return the bytes of this rank's slices of the parameters."""
    return shardwise.debug.stats(model).param_shard_bytes
