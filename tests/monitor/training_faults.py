"""Faults of training loops, and healthy loops that look like them, in the form of `faults`."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from faults import OFFLOAD, Reader, Scenario, slowed
from models import Stack
from shardwise.device import MemoryFigures
from shardwise.monitor import gatherer, memory

STEPS = 34


class Dropped(Stack):
    """A stack with dropout."""

    p = 0.1

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(self.p)

    def forward(self, x):
        return super().forward(self.dropout(x))


class NeverDropped(Dropped):
    p = 0.0


class Detached(Stack):
    """The first block is outside of the graph."""

    def forward(self, x):
        with torch.no_grad():
            x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class Sometimes(Stack):
    """A branch that is used in every second pass."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def forward(self, x):
        self.number += 1
        x = self.blocks[0](x)
        x = self.blocks[1](x) if self.number % 2 else x + 0 * self.blocks[1](x)
        return self.head(self.blocks[2](x))


class Slow(nn.Linear):
    """A layer that takes 15 ms in each pass."""

    def forward(self, x):
        time.sleep(0.015)
        return super().forward(x)


class Recomputed(nn.Module):
    """Slow layers, all of which are computed again."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Slow(8, 8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Wide(nn.Module):
    """A model of 40 MB, which a step of the optimizer takes long for."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1600, 1600) for _ in range(4))

    def forward(self, x):
        x = x.repeat(1, 200)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Ids(Stack):
    """A model that is called with token ids."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)

    def forward(self, ids):
        return super().forward(self.embedding(ids))


# -- loops
def batches(rank, step):
    random = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 8, generator=random)


def same_batches(rank, step):
    return batches(0, step)


def one_batch(rank, step):
    return batches(0, 0)


def ids(rank, step, rows=None):
    random = torch.Generator().manual_seed(1000 * rank + step)
    count = int(torch.randint(3, 8, (), generator=random)) if rows is None else rows(rank)
    return torch.randint(0, 16, (count, 8), generator=random)


def nothing(**_):
    """Do nothing."""


def loop(
    rank,
    model,
    optimizer,
    run,
    keeper,
    settings,
    *,
    batch=batches,
    epochs=1,
    steps=STEPS,
    on_batch=nothing,
    on_loss=nothing,
    on_grads=nothing,
    on_step=nothing,
    on_epoch=nothing,
    zeros=True,
    zeros_at="end",
    set_to_none=True,
    scheduler=None,
    scaler=None,
    factor=lambda step: 1.0,
):
    """Train; each ``on_`` is called with all that the loop has."""
    rates = None if scheduler is None else scheduler(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=False) if scaler is None else scaler()
    numbers = itertools.count(1)
    zero = partial(optimizer.zero_grad, set_to_none=set_to_none) if zeros else nothing
    here = {"rank": rank, "model": model, "optimizer": optimizer, "run": run, "rates": rates}
    for epoch in range(epochs):

        def loaded(epoch=epoch):
            for _ in range(steps // epochs):
                step = next(numbers)
                on_batch(**here, step=step, epoch=epoch)
                yield step, batch(rank, step)

        for step, x in run.data(loaded()):
            if zeros_at == "begin":
                zero()
            loss = model(x).square().mean() * factor(step)
            on_loss(**here, step=step, loss=loss)
            if zeros_at == "middle":
                zero()
            scaler.scale(loss).backward()
            on_grads(**here, step=step)
            scaler.step(optimizer)
            scaler.update()
            if zeros_at == "end":
                zero()
            run.log(loss=loss.item())
            on_step(**here, step=step, x=x, loss=loss)
        on_epoch(**here, epoch=epoch)


def made(
    model=Stack, ranks=2, code=None, rank=None, inject=None, options=None, train=None, **of_loop
):
    """Return a scenario whose loop is `loop`."""
    settings = {"loop": partial(loop, **of_loop), **(train or {})}
    inject = inject or (lambda rank, model: nullcontext())
    return Scenario(code, ranks, model, options or {"stage": 2}, inject, settings, rank)


def slow_in_eight(*ranks):
    def act(rank, step, **_):
        time.sleep(0.25 if rank in ranks and step % 8 == 0 else 0.0)

    return act


@contextmanager
def slow_forward_in_eight(rank, model, on=1):
    """Let a forward pass in eight of one rank take long."""
    layer, numbers = model.blocks[1].up, itertools.count(1)
    forward = layer.forward

    def slow(*args):
        time.sleep(0.25 if rank == on and next(numbers) % 8 == 0 else 0.0)
        return forward(*args)

    with mock.patch.object(layer, "forward", slow):
        yield


KEPT = []  # for the leaks
OBJECTS = []


def collect_garbage(rank, step, **_):
    """Collect among many objects on one rank, every few steps."""
    if rank == 1 and not OBJECTS:
        OBJECTS.extend([n] for n in range(600_000))
        gc.disable()
    if rank == 1 and step % 4 == 0:
        gc.collect()
    if step == STEPS:
        OBJECTS.clear()
        gc.enable()


def leak(rank, step, on=(0, 1, 2), **_):
    if step == 1:
        KEPT.clear()
    if rank in on:
        KEPT.append(torch.ones(1 << 18))


BURN = "import os\nos.sched_setaffinity(0, {%d})\nwhile os.getppid() == %d: pass"


@contextmanager
def busy_core(rank, model):
    """Let each rank have a core, and let rank 0 share its own with four other processes."""
    cores = sorted(os.sched_getaffinity(0))
    burners, begun = [], cores[: 1 if len(cores) < 2 else 2]
    os.sched_setaffinity(0, {begun[rank % len(begun)]})
    if rank == 0:
        program = [sys.executable, "-c", BURN % (begun[0], os.getpid())]
        burners = [subprocess.Popen(program) for _ in range(4)]
        time.sleep(1)  # until they run
    dist.barrier()
    try:
        yield
    finally:
        os.sched_setaffinity(0, set(cores))
        for process in burners:
            process.kill()
            process.wait()


def work(rank, step, **_):
    """Use a core for 60 ms of its time."""
    until_s = time.thread_time() + 0.06
    while time.thread_time() < until_s:
        pass


@contextmanager
def small_memory(rank, model, percent=95.0, engine=0.2):
    """Let the process nearly fill a device, of which the engine has a part."""
    whole = memory_bytes(model)

    def figures(device):
        peak = int(whole / engine)
        return MemoryFigures(peak, peak, int(peak * 100 / percent))

    with (
        mock.patch.object(gatherer, "memory_figures", figures),
        mock.patch.object(memory, "memory_in_use_bytes", lambda device: int(whole / engine)),
    ):
        yield


def memory_bytes(model):
    return 5 * sum(p.numel() * 4 for p in model.parameters())


def evaluates(seconds, every=4, pauses=True, on=(0, 1, 2), switches=True, back=True):
    """Evaluate now and then."""

    def act(rank, model, run, step, x, **_):
        if step % every:
            return
        if switches:
            model.eval()
        with run.paused() if pauses else nullcontext(), torch.no_grad():
            model(x)
            if not pauses:
                with slowed(model.head, "forward", seconds):
                    model(x)
            elif rank in on:
                time.sleep(seconds)
        if switches and back:
            model.train()

    return act


def clips(function, max_norm=1.0):
    def act(model, **_):
        function(model.parameters(), max_norm)

    return act


def reads_norms(model, **_):
    for _ in range(8):
        for param in model.blocks.parameters():
            if param.grad is not None:
                param.grad.to_local().norm().item()


def freeze(rank, model):
    model.blocks[0].requires_grad_(False)
    return nullcontext()


def freeze_most(rank, model):
    model.blocks.requires_grad_(False)
    return nullcontext()


def evaluation_mode(rank, model):
    model.eval()
    return nullcontext()


def no_dropout_from(first):
    def act(model, step, **_):
        if step == first:
            model.dropout.p = 0.0

    return act


def logs_nan(on, at=16):
    def act(rank, run, step, **_):
        if step % 8 == 0:
            value = float("nan") if rank in on and step >= at else 1.0
            run.log(eval_loss=value)

    return act


def logs_nan_of_one(rank, run, step, **_):
    if rank == 0 and step % 8 == 0:
        run.log(eval_loss=float("nan") if step >= 16 else 1.0)


def epoch_stall(rank, step, epoch, seen=[], **_):  # noqa: B006 - of this process
    if rank == 1 and step % (STEPS // 4) == 1:
        time.sleep(0.4)


def cosine(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def steps_of(every):
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every)


def step_rates(rates, **_):
    rates.step()


def growing(step):
    return 1.4**step


SCALED = {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=500)}


@contextmanager
def overflows(rank, model, from_step=0, every=1):
    """Let gradients overflow in some steps."""
    numbers = itertools.count(1)
    forward = model.head.forward

    def bad(x):
        step = next(numbers)
        y = forward(x)
        return y * float("inf") if step > from_step and step % every == 0 else y

    with mock.patch.object(model.head, "forward", bad):
        yield


SLICED = {"stage": 3}
CLIP, TORCH_CLIP = shardwise.parallel.clip_grad_norm_, nn.utils.clip_grad_norm_
TRAINING_FAULTS = {
    "one slow forward in eight": made(ranks=3, code="SW020", rank=1, inject=slow_forward_in_eight),
    "one slow forward in eight of two": made(
        code="SW020", rank=0, inject=partial(slow_forward_in_eight, on=0), options=SLICED
    ),
    "a slow loop in one step of eight": made(
        ranks=3, code="SW020", rank=2, on_step=slow_in_eight(2), steps=48
    ),
    "garbage collection of a rank": made(code="SW020", rank=1, on_grads=collect_garbage),
    "another process on the cores of a rank": made(
        code="SW020", rank=0, inject=busy_core, on_grads=work, steps=24
    ),
    "evaluation on one rank while others wait": made(
        ranks=3, code="SW020", rank=0, on_step=lambda rank, step, **_: (
            time.sleep(0.3 if rank == 0 and step % 4 == 0 else 0.0), dist.barrier()
        ),
    ),
    "a slow optimizer on one rank": made(
        ranks=3, code="SW020", rank=1, on_grads=lambda rank, **_: time.sleep(0.1 * (rank == 1))
    ),
    "activations that dominate": made(code="SW030", inject=small_memory),
    "stage 0 that fills memory": made(
        code="SW005", inject=partial(small_memory, engine=0.9), options={"stage": 0}
    ),
    "a leak of a megabyte a step": made(code="SW034", on_step=leak, steps=44),
    "a leak on one rank": made(
        ranks=3, code="SW034", rank=1, on_step=partial(leak, on=(1,)), steps=44
    ),
    "a rate that is never stepped": made(code="SW044", scheduler=cosine),
    "a rate that is never stepped in epochs": made(code="SW044", scheduler=steps_of(1), epochs=4),
    "a loss scale that collapses": made(
        code="SW040", inject=partial(overflows, every=2), **SCALED, steps=40
    ),
    "a scaler that skips every step": made(code="SW040", inject=overflows, **SCALED),
    "a scaler that skips every step, fully_shard": made(
        code="SW040",
        inject=partial(overflows, from_step=4),
        options={"fully_shard": True},
        **SCALED,
    ),
    "a norm that explodes behind clipping": made(
        code="SW043", on_grads=clips(CLIP), factor=growing
    ),
    "a norm that explodes behind torch's clipping": made(
        code="SW043", on_grads=clips(TORCH_CLIP), factor=growing, options=SLICED
    ),
    "item() too often": made(code="SW027", on_grads=reads_norms),
    "evaluation too long": made(code="SW052", on_step=evaluates(0.5)),
    "evaluation too long, not paused": made(code="SW052", on_step=evaluates(0.5, pauses=False)),
    "everything recomputed": made(Recomputed, code="SW035"),
    "tiny batches": made(
        Wide, code="SW026", batch=lambda rank, step: batches(rank, step)[:1], steps=20,
        options={"stage": 0},
    ),
    "the same data on all ranks": made(ranks=3, code="SW025", batch=same_batches),
    "the same data on all ranks, fully_shard": made(
        code="SW025", batch=same_batches, options={"fully_shard": True}
    ),
    "layers frozen by accident": made(code="SW045", inject=freeze),
    "layers outside of the graph": made(Detached, code="SW045", options=SLICED),
    "dropout off": made(Dropped, code="SW046", inject=evaluation_mode),
    "dropout off after an evaluation": made(
        Dropped, code="SW046", on_step=evaluates(0.0, every=6, back=False)
    ),
    "dropout set to 0": made(Dropped, code="SW046", on_step=no_dropout_from(6)),
    "zero_grad forgotten": made(code="SW047", zeros=False),
    "zero_grad forgotten, fully_shard": made(
        code="SW047", zeros=False, options={"fully_shard": True}
    ),
    "tokens uneven": made(
        Ids, 3, "SW024", 1, batch=partial(ids, rows=lambda rank: 12 if rank == 1 else 6)
    ),
    "a loader that stalls at epochs on a rank": made(
        code="SW021", rank=1, epochs=4, on_batch=epoch_stall
    ),
    "nan only in the evaluation of a rank": made(
        ranks=3, code="SW041", rank=2, on_step=logs_nan((2,))
    ),
    "nan in an evaluation that one rank has": made(ranks=3, code="SW041", on_step=logs_nan_of_one),
}  # fmt: skip
TRAINING_HEALTHY = {
    "a rate for each step": made(scheduler=cosine, on_step=step_rates),
    "a rate for each epoch": made(scheduler=steps_of(2), epochs=4, on_epoch=step_rates),
    "a rate for the only epoch": made(scheduler=steps_of(2), on_epoch=step_rates),
    "no scheduler in four epochs": made(epochs=4),
    "clipping": made(on_grads=clips(CLIP), factor=lambda step: 50.0, options=SLICED),
    "clipping by torch": made(on_grads=clips(TORCH_CLIP, 0.01)),
    "clipping, fully_shard": made(on_grads=clips(TORCH_CLIP), options={"fully_shard": True}),
    "a loss that grows a little": made(on_grads=clips(CLIP), factor=lambda step: 1.03**step),
    "dropout": made(Dropped),
    "dropout, with evaluations": made(Dropped, on_step=evaluates(0.02)),
    "dropout of 0": made(NeverDropped, inject=evaluation_mode),
    "no dropout, in evaluation mode": made(inject=evaluation_mode),
    "evaluations": made(on_step=evaluates(0.05, every=8)),
    "evaluations that are not paused": made(on_step=evaluates(0.01, every=8, pauses=False)),
    "frozen weights beside a head": made(inject=freeze_most),
    "a branch that is used now and then": made(Sometimes),
    "zero_grad at the begin": made(zeros_at="begin"),
    "zero_grad before backward": made(zeros_at="middle"),
    "zeros, not None": made(set_to_none=False),
    "zeros, not None, fully_shard": made(set_to_none=False, options={"fully_shard": True}),
    "one batch again and again": made(batch=one_batch),
    "texts of many lengths": made(Ids, ranks=3, batch=ids),
    "texts of one length": made(Ids, batch=partial(ids, rows=lambda rank: 4)),
    "garbage collection on all ranks": made(on_step=lambda step, **_: step % 10 or gc.collect()),
    "a few reads in each step": made(
        on_grads=lambda model, loss=None, **_: [torch.ones(()).item() for _ in range(4)]
    ),
    "a loss scaler": made(**SCALED),
    "a loss scaler that finds its scale": made(
        inject=lambda rank, model: overflows_early(model), **SCALED, steps=44
    ),
    "a list that ends": made(on_step=lambda rank, step, **_: step < 6 and leak(rank, step)),
    "a loader that is a little slow": made(on_batch=lambda **_: time.sleep(0.004)),
    "three ranks at stage 1": made(ranks=3, options={"stage": 1}, steps=48),
    "offload with clipping": made(on_grads=clips(CLIP), options=OFFLOAD),
    "reads of tokens": made(Reader, batch=partial(ids, rows=lambda rank: 2), steps=20),
}  # fmt: skip


@contextmanager
def overflows_early(model):
    """Let gradients overflow in three of the first five steps."""
    numbers = itertools.count(1)
    forward = model.head.forward

    def bad(x):
        return forward(x) * (float("inf") if next(numbers) in (1, 2, 4) else 1.0)

    with mock.patch.object(model.head, "forward", bad):
        yield
