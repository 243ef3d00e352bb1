"""Runs with a fault in them, and healthy ones: for the tests of the doctor and its campaign.

Each scenario trains a tiny model on real ranks, observed. Injected delays are large against a step,
so that no verdict depends on how fast the machine is.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from models import Checkpointed, Stack
from shardwise import observe, shard
from shardwise.checkpoint.files import Writer
from shardwise.comm.point_to_point import _Messages
from shardwise.config import Schedule
from shardwise.offload.files import System
from shardwise.trace import Tracer
from trainer import sharded_by_block

STEPS = 10
ADAM = importlib.import_module("torch.optim.adam")  # AdamW's too


class OneUnit(nn.Module):
    """Layers in which no blocks are found."""

    def __init__(self):
        super().__init__()
        self.a, self.d = (nn.Linear(8, 8) for _ in range(2))
        self.b, self.c = nn.Linear(8, 80_000), nn.Linear(80_000, 8)

    def forward(self, x):
        return self.d(self.c(self.b(self.a(x))))


class FineBlock(nn.Module):
    """A block of six layers."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o, self.up, self.down = (nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        return x + self.down(self.up(self.o(self.q(x) + self.k(x) + self.v(x))))


class FineStack(Stack):
    block_class = FineBlock


class WideHead(Stack):
    """A block that is far larger than all others."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up = nn.Linear(8, 80_000)
        self.blocks[1].down = nn.Linear(80_000, 8)


class FewRows(nn.Module):
    """Weights of two long rows, which three ranks cannot share."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(40_000, 2) for _ in range(2))
        self.widen = nn.Linear(8, 4)

    def forward(self, x):
        wide = self.widen(x).mean(-1, keepdim=True).expand(-1, 40_000)
        return sum(block(wide) for block in self.blocks)


class Reader(Stack):
    """A model that is called with token ids, and takes 20 ms for each row of eight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, ids):
        time.sleep(0.02 * len(ids))
        return super().forward(self.embedding(ids))


class NormedBlock(nn.Module):
    """A block whose gains are 1.0 and whose matrix is small."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(48), nn.Linear(48, 48)
        with torch.no_grad():
            self.layer.weight.mul_(0.1)

    def forward(self, x):
        return x + self.layer(self.norm(x))


class Normed(nn.Module):
    """Blocks with norms, in 32 bits."""

    dtype = torch.float32

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(2))
        self.to(self.dtype)

    def forward(self, x):
        x = x.repeat(1, 6).to(self.blocks[0].layer.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return x.float()


class NormedIn16Bits(Normed):
    """The same in 16 bits: gains lose the updates of a usual learning rate, the matrix few."""

    dtype = torch.bfloat16


@dataclass(frozen=True)
class Scenario:
    """One run: how the model is sharded and trained, what is injected; what must be found.

    ``rank`` is the one that a finding must name; None where it names none.
    """

    code: str | None
    world_size: int = 3
    model: type[nn.Module] = Stack
    options: dict[str, Any] = field(default_factory=lambda: {"stage": 3})
    inject: Callable[[int, nn.Module], Any] = lambda rank, model: nullcontext()
    train: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None


# -- faults
def sleeps(rank, model, on=1):
    """Let one rank sleep in its forward pass."""
    return slowed(model.blocks[1].up, "forward", 0.3) if rank == on else nullcontext()


class SlowFile(io.BytesIO):
    """A file on a slow disk."""

    def write(self, data):
        time.sleep(0.05)
        return super().write(data)


class Late:
    """A message that comes later than it does."""

    def __init__(self, work, at_s):
        self._work, self._at_s = work, at_s

    def wait(self):
        time.sleep(max(self._at_s - time.monotonic(), 0))
        self._work.wait()


@contextmanager
def slow_links(rank, model, pairs=None, seconds=0.06):
    """Let messages between some pairs of ranks, or all, come late."""
    receive = _Messages.receive

    def slow(self, peer, tensor):
        begun = len(self.works)
        receive(self, peer, tensor)
        other = dist.get_process_group_ranks(self.axis.group)[peer]
        if pairs is None or {rank, other} in pairs:
            at_s = time.monotonic() + seconds
            self.works[begun:] = [Late(work, at_s) for work in self.works[begun:]]

    with mock.patch.object(_Messages, "receive", slow):
        yield


@contextmanager
def slowed(owner, name, seconds):
    """Let a function or a method take longer."""
    function = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(seconds)
        return function(*args, **kwargs)

    with mock.patch.object(owner, name, slow):
        yield


@contextmanager
def slow_copies(rank, model):
    """Let copies of slices to the device take long."""
    copies = Tracer.copies

    @contextmanager
    def slow(self, line, *args):
        with copies(self, line, *args):
            time.sleep(0.1 if line == "to_device" else 0.0)
            yield

    with mock.patch.object(Tracer, "copies", slow):
        yield


def slow_between(*pairs):
    return partial(slow_links, pairs=pairs, seconds=0.08)


def scheduled(stage, **options):
    return {"stage": stage, "schedule": Schedule(**options)}


HALF = {"scaler": 2000, "autocast": True, "steps": 14}
OFFLOAD = {"stage": 3, "offload": "cpu"}
KEPT = {"stage": 3, "precision": shardwise.Precision(torch.bfloat16)}
SAVES = {"save_every": 4, "wait": False}
FAULTS = {
    "copies only": Scenario("SW001", 2, options={"mesh": (2, 1)}),
    "parameters outside": Scenario("SW001", 2, train={"extra": 4096}),
    "one unit": Scenario("SW002", 3, OneUnit),
    "units too small": Scenario("SW003", 3, FineStack, {"stage": 3, "units": nn.Linear}),
    "one large unit": Scenario("SW004", 3, WideHead),
    "padding": Scenario("SW006", 3, FewRows),
    "tiny buckets": Scenario("SW010", 3, options=scheduled(2, bucket_bytes=1)),
    "huge buckets": Scenario("SW011", 3, options=scheduled(2, bucket_bytes=1 << 30)),
    "huge prefetch": Scenario("SW011", 3, options=scheduled(3, prefetch_bytes=1 << 30)),
    "slow network": Scenario("SW012", 3, inject=slow_links),
    "slow network of two": Scenario("SW012", 2, options={"stage": 2}, inject=slow_links),
    "slow link": Scenario("SW013", 3, inject=slow_between({0, 1}), rank=0),
    "slow link of four": Scenario("SW013", 4, inject=slow_between({1, 3}), rank=1),
    "slow axis": Scenario(
        "SW014", 4, options={"mesh": (2, 2)}, inject=slow_between({0, 2}, {1, 3})
    ),
    "slow rank": Scenario("SW020", 3, inject=sleeps, rank=1),
    "slow rank of two": Scenario(
        "SW020", 2, options={"stage": 0}, inject=lambda r, m: sleeps(r, m, 0), rank=0
    ),
    "slow loop on a rank": Scenario("SW020", 3, train={"loop_s": {2: 0.3}}, rank=2),
    "slow loop on a rank, the loss is averaged": Scenario(
        "SW020", 3, train={"loop_s": {1: 0.3}, "averages": True}, rank=1
    ),
    "slow loader": Scenario("SW021", 3, train={"data_s": dict.fromkeys(range(3), 0.2)}),
    "slow loader on a rank": Scenario("SW021", 3, train={"data_s": {1: 0.3}}, rank=1),
    "slow step on the host": Scenario(
        "SW032", 2, options=OFFLOAD, inject=lambda r, m: slowed(ADAM, "adam", 0.15)
    ),
    "slow copies": Scenario("SW032", 2, options=OFFLOAD, inject=slow_copies),
    "slow files": Scenario(
        "SW033",
        2,
        options={"stage": 3, "nvme": True},
        inject=lambda r, m: slowed(System, "read", 0.15),
    ),
    "overflows": Scenario(
        "SW040", 2, options={"stage": 2, "precision": "fp16"}, train={"scaler": 1, "steps": 24}
    ),
    "overflows under autocast": Scenario(
        "SW040", 2, options={"stage": 1}, train={"scaler": 1, "steps": 24, "autocast": True}
    ),
    "loader that stalls": Scenario("SW021", 2, train={"stalls": 3, "steps": 20}),
    "bad batch on a rank": Scenario("SW041", 3, train={"bad_batch": (1, 5)}, rank=1),
    "bad batch on a rank in a long line": Scenario(
        "SW041", 3, train={"bad_batch": (1, 24), "steps": 30, **SAVES, "save_every": 8}, rank=1
    ),
    "bad gradients": Scenario("SW041", 2, train={"bad_batch": (0, 7), "logs": False, "steps": 13}),
    "uneven batches": Scenario(
        "SW024", 3, Reader, train={"rows": lambda rank, step: 20 if rank == 1 else 5}, rank=1
    ),
    "batches that are uneven in turn": Scenario(
        "SW024", 3, Reader, train={"rows": lambda rank, step: 20 if step % 3 == rank else 5}
    ),
    "uneven batches of two, fully_shard": Scenario(
        "SW024",
        2,
        Reader,
        {"fully_shard": True},
        train={"rows": lambda rank, step: 15 - 10 * rank},
        rank=0,
    ),
    "updates that round away": Scenario("SW042", 3, NormedIn16Bits, KEPT),
    "updates that round away, fully_shard": Scenario(
        "SW042", 1, NormedIn16Bits, {"fully_shard": True}
    ),
    "torch.save while others wait": Scenario("SW050", 2, train={"torch_saves": True}, rank=0),
    "slow disk": Scenario(
        "SW050",
        2,
        inject=lambda r, m: slowed(Writer, "sync", 0.5),
        train=SAVES | {"wait": True},
    ),
}
HEALTHY = {
    **{
        f"stage {stage} of {n}": Scenario(None, n, options={"stage": stage})
        for stage in range(4)
        for n in (1, 2, 3)
    },
    "flat": Scenario(None, 3, Checkpointed, {"stage": 3, "layout": "flat"}),
    "bf16": Scenario(None, 2, options={"stage": 2, "precision": "bf16"}),
    "fp16": Scenario(
        None, 2, options={"stage": 3, "precision": "fp16"}, train={"scaler": 2000, "steps": 14}
    ),
    "accumulation": Scenario(None, 3, options={"stage": 2}, train={"micro_batches": 3}),
    "accumulation without a window": Scenario(
        None, 2, options={"stage": 1}, train={"micro_batches": 3, "window": False}
    ),
    "accumulation in half, fully_shard": Scenario(
        None, 2, options={"fully_shard": True}, train=HALF | {"micro_batches": 2, "window": False}
    ),
    "offload": Scenario(None, 2, options=OFFLOAD),
    "files": Scenario(None, 2, options={"stage": 3, "nvme": True}),
    "fully_shard": Scenario(None, 3, options={"fully_shard": True}),
    "fully_shard of one": Scenario(None, 1, options={"fully_shard": True}),
    "checkpointed fully_shard": Scenario(None, 2, Checkpointed, {"fully_shard": True}),
    "saves behind": Scenario(None, 2, train=SAVES),
    "batches that are long and short on all ranks": Scenario(
        None, 3, Reader, train={"rows": lambda rank, step: 2 + 6 * (step % 2)}
    ),
    "fp32 masters of norms": Scenario(None, 3, Normed, {"stage": 3, "precision": "bf16"}),
    "updates of 16 bits that arrive": Scenario(None, 2, NormedIn16Bits, KEPT, train={"lr": 0.1}),
    "copies of shards": Scenario(None, 4, options={"mesh": (2, 2)}),
    "no loader, no logs": Scenario(None, 3, train={"logs": False, "loads": False}),
    "many lines": Scenario(None, 2, Checkpointed, train={"steps": 40, "every": 4}),
}


# -- the run
def train(rank, world_size, output, group, name):
    """Train a scenario's run on this rank; return the codes that were found live."""
    from training_faults import TRAINING_FAULTS, TRAINING_HEALTHY  # it needs this module

    of_group = {"fault": FAULTS | TRAINING_FAULTS, "healthy": HEALTHY | TRAINING_HEALTHY}
    scenario = of_group[group][name]
    torch.manual_seed(0)
    model = _sharded(scenario.model(), dict(scenario.options), output)
    settings = {"steps": STEPS, "every": 10, **scenario.train}
    params = list(model.parameters())
    if "extra" in settings:
        params.append(nn.Parameter(torch.ones(settings["extra"])))
    optimizer = torch.optim.AdamW(params, lr=settings.get("lr", 1e-3))
    with ExitStack() as stack:
        run = stack.enter_context(observe(model, optimizer, output, every=settings["every"]))
        keeper = None
        if "save_every" in settings:
            keeper = shardwise.Checkpoints(Path(output) / "checkpoints", model, optimizer)
            stack.enter_context(keeper)
        stack.enter_context(scenario.inject(rank, model))
        settings.get("loop", _loop)(rank, model, optimizer, run, keeper, settings)
    return [finding.code for finding in run.findings]


def _sharded(model, options, output):
    if options.pop("fully_shard", False):
        return sharded_by_block(model)
    if "mesh" in options:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", options["mesh"], mesh_dim_names=names)
        options = {"stage": 3, "mesh": mesh[names]}
    if options.pop("nvme", False):
        Path(output).mkdir(parents=True, exist_ok=True)
        options["offload"] = f"nvme:{output}"
    return shard(model, **options)


def _batches(rank, settings):
    random = torch.Generator().manual_seed(rank)
    bad = settings.get("bad_batch")
    for step in range(1, settings["steps"] + 1):
        time.sleep(settings.get("data_s", {}).get(rank, 0.0))
        if settings.get("stalls") and step % settings["stalls"] == 0:
            time.sleep(0.3)
        if "rows" in settings:
            yield torch.arange(8).repeat(settings["rows"](rank, step), 1)
            continue
        x = torch.randn(4, 8, generator=random)
        yield x * float("nan") if bad == (rank, step) else x


def _loop(rank, model, optimizer, run, keeper, settings):
    growth = settings.get("scaler")
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth or 1, enabled=bool(growth))
    count = settings.get("micro_batches", 1)
    batches = _batches(rank, settings)
    for step, x in enumerate(run.data(batches) if settings.get("loads", True) else batches, 1):
        for number in range(count):
            last = number == count - 1
            window = settings.get("window", True)
            with shardwise.accumulate(model, last=last) if window else nullcontext():
                with torch.autocast("cpu", torch.float16, enabled=settings.get("autocast", False)):
                    loss = model(x).square().mean() / count
                scaler.scale(loss).backward()
        time.sleep(settings.get("loop_s", {}).get(rank, 0.0))
        if settings.get("averages"):
            dist.all_reduce(loss.detach())
        if settings.get("logs", True):
            run.log(loss=loss.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if settings.get("torch_saves") and step % 3 == 0:
            if rank == 0:
                torch.save({"step": step}, SlowFile())
            dist.barrier()
        if keeper is not None and step % settings["save_every"] == 0:
            keeper.save(step, wait=settings["wait"])
