"""What the engine runs, under the checking device: nothing is used before its stream is ordered.

Each scenario is trained under the device, and what it finds fails it; every third is trained
plainly too, with the same bits. With one and two ranks collectives are made as on NCCL, with three
as on gloo. Then waits and orders are taken out of the engine one by one, and each must be found.
"""

import gc
import re
from contextlib import contextmanager, nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from checking_device import CheckingDevice, StreamError
from models import Stack
from ranks import on_ranks, run_ranks, run_sizes
from scenarios import each_recomputed, each_twice, freeze, made, used_by_the_root
from shardwise import Offload, Precision, accumulate, gathered, optim, overlap, shard
from shardwise.comm import coalesced, collectives, point_to_point
from shardwise.comm.collectives import Comm
from shardwise.config import Schedule
from shardwise.device import follow_current
from shardwise.engine.reductions import Reduction
from shardwise.offload import activations, home
from shardwise.offload.activations import _OffloadedInput
from shardwise.offload.staging import StagingBuffers
from shardwise.step.background import BackgroundStep
from shardwise.step.unit_step import UnitStep
from shardwise.unit import sums
from shardwise.unit.storage import Storage
from shardwise.unit.sums import _StorageSum
from shardwise.unit.unit import Unit
from trainer import full, sharded_by_block

CPU = torch.device("cpu")
momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=0.1)


def muon(params):
    """Step the matrices, and leave the rest as it is."""
    return torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.1)


def behind(params):
    """Step behind the next forward pass."""
    return overlap(momentum(params))


def train(model, rank, micro_batches=2, steps=2, on_own_stream=False, make_optimizer=momentum):
    """Train; return losses, norms, this rank's slices of gradients, and parameters in full.

    ``on_own_stream``: forward and backward are on another stream than the optimizer's step.
    """
    time = collectives.time_of(CPU)
    stream = time.new_stream() if on_own_stream else time.current_stream()
    optimizer = make_optimizer(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(steps):
        for number in range(micro_batches):
            is_last = number == micro_batches - 1
            is_ours = not hasattr(model, "set_requires_gradient_sync")
            if not is_ours:
                model.set_requires_gradient_sync(is_last)
            window = accumulate(model, last=is_last) if is_ours else nullcontext()
            with follow_current(time, stream), window:
                loss = model(torch.randn(3, 8, generator=generator)).square().mean()
                loss.backward()
            time.current_stream().wait(stream.record())
            found.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append(full(torch.as_tensor(norm)))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [grad.to_local().detach().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(torch.ones(2, 8)))
    return found + [full(p) for p in model.parameters()]


class Shared(Stack):
    """Blocks that run again, and take what another one takes too, with its graph."""

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = self.blocks[0](x)
        both = x + 1  # which autograd does not save for itself
        for block in self.blocks[1:]:
            x = checkpoint(lambda x, y, block=block: block(x + y), x, both, use_reentrant=False)
        return self.head(x)


def variously(blocks, x):
    """Run blocks twice, and read their weights from outside, before and after."""
    return each_twice(blocks, used_by_the_root(blocks, x))


class Stops(Stack):
    """Without gradients it ends after its first block, with the next one gathered ahead."""

    def forward(self, x):
        return super().forward(x) if torch.is_grad_enabled() else self.blocks[0](x)


class Routed(Stack):
    """Each rank has a head of its own, so gradients are there on some ranks only."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))

    def forward(self, x):
        return self.heads[dist.get_rank()](super().forward(x))


def sharded(
    rank,
    world_size,
    make=Stack,
    wrap=shard,
    replicas=1,
    on_own_stream=False,
    make_optimizer=momentum,
    steps=2,
    **options,
):
    if replicas > 1:
        replicas = min(replicas, world_size)
        shape, names = (replicas, world_size // replicas), ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return train(wrap(make(), **options), rank, 2, steps, on_own_stream, make_optimizer)


def change_at_home(rank, world_size):
    """Change the slices on the host as soon as a pass without gradients has read them."""
    model = shard(Stack(), offload="cpu")
    found = []
    with torch.no_grad():
        for _ in range(2):
            found.append(model(torch.ones(2, 8)))
            for p in model.parameters():
                p.mul_(0.5)
    return found


def drop(rank, world_size):
    """Let a model go whose reductions are under way; its slices, and their means, are at home."""
    model = shard(Stack(), schedule=Schedule(bucket_bytes=1), offload="cpu")
    loss = model(torch.ones(2, 8)).sum()
    loss.backward()
    value = loss.detach()
    del model, loss  # its graph would keep the model
    gc.collect()
    return [value]


def along_the_longer_dim(param):
    """Cut a matrix along its second dim where any number of ranks divides it."""
    return Shard(1) if param.ndim > 1 and param.shape[1] == 8 else None


def in_a_schedule(rank, world_size, wrap, **options):
    """Run a schedule, which divides the gradients at once: its last reductions must be over.

    See pytorch#144535, a race between both.
    """
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("pp", "dp"))
    model = wrap(Stack(), **options)
    stage = PipelineStage(model, 0, 1, CPU, group=mesh["pp"].get_group())
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
    optimizer = momentum(model.parameters())
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(2):
        schedule.step(torch.randn(4, 8, generator=generator), target=torch.ones(4, 5))
        for p in model.parameters():
            p.grad.div_(2).mul_(2)
        found += [p.grad.to_local().detach().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return found + [full(p) for p in model.parameters()]


def between_steps(rank, world_size):
    """Read and change parameters between steps; cut a pass short; leave one without backward."""
    model = shard(Stack())
    found = train(model, rank, steps=1)
    with gathered(model, writeback=True):
        for p in model.parameters():
            p.data.mul_(0.5)
    model(torch.ones(2, 8))
    hook = model.head.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(2, 8))
    hook.remove()
    return found + train(model, rank, micro_batches=1)


def coded(kind):
    return {"precision": Precision(torch.bfloat16, torch.float32, gather=kind)}


HOME = {"offload": "cpu"}
AWAY = {"offload": Offload(activations="cpu")}
BEHIND = {"make_optimizer": behind, "steps": 3}
BY_BLOCK = {"wrap": sharded_by_block}
OFFLOADED = {**BY_BLOCK, "offload_policy": CPUOffloadPolicy()}
IN_BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
AGAIN = {"make": made(each_recomputed)}
AGAIN_REENTRANT = {"make": made(partial(each_recomputed, reentrant=True))}
STREAM = {"on_own_stream": True}
ON_DEVICE = "slices at home, stepped on the device by AdamW"
STEPPED_ON_DEVICE = {
    "AdamW": adamw,
    "momentum": momentum,
    "8 bits": partial(optim.AdamW, lr=0.1, moments="8bit", block=16),
}
CODED = ((1, "int4"), (2, "fp8"), (3, "int8"))
# By name: how a model is made, sharded and trained.
ROWS = {
    **{f"stage {n}": {"stage": n} for n in range(4)},
    **{f"stage {n}, slices at home": {"stage": n, **HOME} for n in range(4)},
    **{
        f"stage {n}, slices at home, stepped behind": {"stage": n, **HOME, **BEHIND}
        for n in range(4)
    },
    **{f"stage {n}, bf16": {"stage": n, "precision": "bf16", "layout": "flat"} for n in (1, 3)},
    **{
        f"stage {n}, slices at home, bf16": {"stage": n, "precision": "bf16", **HOME}
        for n in (1, 3)
    },
    **{f"stage {n}, matrices": {"stage": n, "layout": "matrices"} for n in (1, 3)},
    "slices at home, matrices, bf16": {"layout": "matrices", "precision": "bf16", **HOME},
    "matrices stepped whole": {"layout": "matrices", "make_optimizer": muon},
    "a reduction per unit": {"schedule": Schedule(bucket_bytes=1), "make_optimizer": adamw},
    **{f"stage {n}, gathered as {kind}": {"stage": n, **coded(kind)} for n, kind in CODED},
    **{
        f"stage {n}, slices at home, gathered as {kind}": {"stage": n, **coded(kind), **HOME}
        for n, kind in CODED
    },
    "by block, gathered as fp8": {**BY_BLOCK, "mp_policy": Precision(gather="fp8")},
    **{f"stage {n}, replicas": {"stage": n, "replicas": 2} for n in (0, 3)},
    "no prefetch": {"schedule": Schedule(prefetch_bytes=0)},
    "slices at home, prefetch of all": {"schedule": Schedule(1 << 30, bucket_bytes=1), **HOME},
    "reduced every step": {"schedule": Schedule(reduce_every="step")},
    "checkpointing": AGAIN,
    "checkpointing, reentrant": AGAIN_REENTRANT,
    "various uses": {"make": made(variously, change=freeze("blocks.1"))},
    "ends early": {"make": Stops},
    "ranks differ": {"make": Routed, "stage": 2},
    "by block": BY_BLOCK,
    "by block, replicas": {**BY_BLOCK, "replicas": 2},
    "by block, kept after forward": {
        **BY_BLOCK,
        **{"reshard_after_forward": False, "make_optimizer": adamw},
    },
    "by block, bf16": {**BY_BLOCK, **IN_BF16},
    "by block, offloaded": OFFLOADED,
    "by block, offloaded, bf16": {**OFFLOADED, **IN_BF16},
    "by block, offloaded, stepped behind": {**OFFLOADED, **BEHIND},
    "by block, cut along other dims": {**BY_BLOCK, "shard_placement_fn": along_the_longer_dim},
    "by block, spread over two ranks": {**BY_BLOCK, "reshard_after_forward": 2},
    "by block, checkpointing": {**BY_BLOCK, **AGAIN},
    "by block, inputs on the host": {
        **{**BY_BLOCK, **AGAIN},
        "offload_policy": Offload(activations="cpu"),
    },
    **{f"stage {n}, on a stream": {"stage": n, **STREAM} for n in (1, 3)},
    "slices at home, on a stream": {**HOME, **STREAM},
    "by block, on a stream": {**BY_BLOCK, **STREAM},
    **{
        f"slices at home, stepped on the device by {name}": {
            **{"make_optimizer": of, "steps": 3},
            "offload": Offload("cpu", "cpu", "cpu", step_on="device"),
        }
        for name, of in STEPPED_ON_DEVICE.items()
    },
    "inputs on the host": {**AGAIN, **AWAY},
    "inputs on the host, reentrant": {**AGAIN_REENTRANT, **AWAY},
    "inputs on the host, on a stream": {**AGAIN, **AWAY, **STREAM},
    "inputs on the host, shared": {"make": Shared, **AWAY},
}
SCENARIOS = {
    **{name: partial(sharded, **row) for name, row in ROWS.items()},
    "between steps": between_steps,
    "slices at home are changed": change_at_home,
    "dropped with reductions under way": drop,
    **{f"stage {n}, in a schedule": partial(in_a_schedule, wrap=shard, stage=n) for n in (2, 3)},
    "by block, in a schedule": partial(in_a_schedule, wrap=sharded_by_block),
}


@contextmanager
def transport(module):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "_transport", lambda axis, device: module)
        yield


def check_scenario(rank, world_size, name, is_nccl, twice=True):
    by = coalesced if is_nccl else point_to_point
    torch.manual_seed(0)
    with transport(point_to_point if world_size == 2 else by):  # two ranks sum in one order only
        plain = SCENARIOS[name](rank, world_size) if twice else None
    torch.manual_seed(0)
    with transport(by), CheckingDevice() as device:
        checked = SCENARIOS[name](rank, world_size)
    for number, (a, b) in enumerate(zip(checked, plain or checked, strict=True)):
        assert torch.equal(a, b), (name, number)
    assert device.num_operations > 100
    assert world_size == 1 or device.num_collectives > 5


FOUR_RANKS = ["stage 3, replicas", "by block, spread over two ranks"]


ON_ONE_AXIS = [name for name in SCENARIOS if name != FOUR_RANKS[1]]
# What others have the parts of: `make soak CAMPAIGN=matrices` has them too.
COMPOSED = {
    *("stage 2", "stage 0, slices at home", "stage 2, slices at home", "stage 1, bf16"),
    *("stage 3, slices at home, bf16", "stage 1, matrices", "stage 1, gathered as int4"),
    *("stage 2, slices at home, gathered as fp8", "stage 3, slices at home, gathered as int8"),
    *("stage 2, in a schedule", "stage 1, on a stream", "inputs on the host, on a stream"),
    *("stage 0, slices at home, stepped behind", "stage 2, slices at home, stepped behind"),
    *("slices at home, stepped on the device by momentum", "inputs on the host, reentrant"),
    *("by block, offloaded, bf16", "by block, on a stream", "slices at home, matrices, bf16"),
    *("stage 2, gathered as fp8", "by block, checkpointing"),
}


@pytest.mark.parametrize("name", [name for name in ON_ONE_AXIS if name not in COMPOSED])
def test_everything_is_ordered_before_it_is_used(name):
    """On one rank every third of them."""
    assert set(ON_ONE_AXIS) > COMPOSED
    third = ON_ONE_AXIS.index(name) % 3 == 0
    run_sizes(check_scenario, dict.fromkeys((1, 2) if third else (2,), (name, True, third)))


@pytest.mark.parametrize("name", ["stage 1", "stage 3", "stage 3, slices at home"])
def test_everything_is_ordered_before_it_is_used_on_gloo(name):
    run_ranks(check_scenario, 3, name, False)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_everything_is_ordered_before_it_is_used_over_two_axes(name):
    run_ranks(check_scenario, 4, name, True)


# Mistakes, each put into the engine: what is patched, in which scenario, and what must be found.


def blind(owner, name):
    """Wait in a function as ever, so that gloo's results are right, but unseen by the device."""
    call = getattr(owner, name)

    def make(device):
        def called(*args, **kwargs):
            with device.blind():
                return call(*args, **kwargs)

        return owner, name, called

    return make


def replaced(owner, name, by):
    return lambda device: (owner, name, by)


def beside(time, stream):
    """Use a stream without ordering it after the current one."""
    return stream.use()


MISTAKES = {
    "parameters are read before they are gathered": (
        blind(Unit, "finish_unshard"),
        "stage 3",
        r"the compute stream, reads .* while allgather_into_tensor_coalesced_",
    ),
    "parameters are freed while they are gathered": (
        blind(Unit, "reshard"),
        "ends early",
        r"memory \(storage.py:\d+\) of .* was freed while allgather_into_tensor_coalesced_",
    ),
    "means are read before they are reduced": (
        blind(Reduction, "wait"),
        "stage 3",
        r"the compute stream, writes .* while reduce_scatter_tensor_coalesced_",
    ),
    "means of fully_shard are read before they are reduced": (
        blind(sums.RunningSum, "wait"),
        "by block, offloaded",
        r"the compute stream, writes .* while reduce_scatter_tensor_coalesced_",
    ),
    "a schedule divides means that are not reduced yet": (
        blind(sums.RunningSum, "wait"),
        "by block, in a schedule",
        r"div_ .*, on the compute stream, .* while reduce_scatter_tensor_coalesced_",
    ),
    "means are gathered before they are summed over replicas": (
        blind(Comm, "all_reduce"),
        "stage 0, replicas",
        r"while reduce_scatter_tensor_coalesced_",
    ),
    "the host steps before the means are at home": (
        blind(_StorageSum, "wait_evicted"),
        "stage 3, slices at home",
        r"on the host, reads .* while copy_ \(home.py:\d+\), on the evict stream, writes it",
    ),
    "a buffer of means is used again while it is evicted": (
        blind(_StorageSum, "wait_evicted"),
        "stage 1, slices at home",
        r"reduce_scatter_tensor_coalesced_ .* writes .* while copy_ .* the evict stream, reads it",
    ),
    "means are evicted before they are reduced": (
        replaced(home, "follow_current", beside),
        "stage 3, slices at home",
        r"on the evict stream, reads .* while div_|_foreach_div_ .* the compute stream, writes it",
    ),
    "slices are fetched into memory that may be in use": (
        replaced(home, "follow_current", beside),
        "stage 3, slices at home",
        r"copy_ \(home.py:\d+\), on the fetch stream, uses .* while the allocation",
    ),
    "slices are gathered before they are fetched": (
        replaced(home.Home, "after_fetch", lambda home: nullcontext()),
        "stage 3, slices at home",
        r"allgather_into_tensor_coalesced_ .* reads .* while copy_ .* the fetch stream, writes it",
    ),
    "slices change while they are fetched": (
        blind(Storage, "finish_fetch"),
        "slices at home are changed",
        r"on the host, writes .* while copy_ .* on the fetch stream, reads it",
    ),
    "slices are fetched before they are stepped": (
        blind(Unit, "finish_steps"),
        "stage 3, slices at home, stepped behind",
        r"on the fetch stream, reads .* on the thread that steps, writes it",
    ),
    "a step on the device begins before its gradients have come": (
        blind(StagingBuffers, "run"),
        ON_DEVICE,
        r"on stream \d+, (reads|writes) .* copy_ \(staging.py:\d+\), on stream \d+, writes it",
    ),
    "what was stepped on the device goes back too early": (
        blind(StagingBuffers, "_evict"),
        ON_DEVICE,
        r"copy_ \(staging.py:\d+\), on stream \d+, reads .* on stream \d+, writes it",
    ),
    "memory of a lane is filled before what was in it has left": (
        blind(StagingBuffers, "_fetch"),
        ON_DEVICE,
        r"copy_ \(staging.py:\d+\), on stream \d+, writes .* while .* on stream \d+, reads it",
    ),
    "slices are fetched before they are back from their step": (
        blind(UnitStep, "put_back"),
        ON_DEVICE,
        r"while copy_ \(staging.py:\d+\), on stream \d+, writes it",
    ),
    "inputs are evicted before they are computed": (
        blind(_OffloadedInput, "start_evict"),
        "inputs on the host",
        r"copy_ .*, on the evict stream, reads .* the compute stream, writes it",
    ),
    "inputs are freed while they are evicted": (
        blind(_OffloadedInput, "free"),
        "inputs on the host",
        r"memory .* was freed while copy_ \(activations.py:\d+\), on the evict stream, uses it",
    ),
    "inputs of two blocks are freed while they are evicted": (
        blind(_OffloadedInput, "cancel_evict"),
        "inputs on the host, shared",
        r"was freed while copy_ \(activations.py:\d+\), on the evict stream, uses it",
    ),
    "inputs are computed with before they are fetched": (
        blind(_OffloadedInput, "unpack"),
        "inputs on the host",
        r"on the compute stream, reads .* while copy_ .*, on the fetch stream, writes it",
    ),
    "inputs are fetched into memory that may be in use": (
        replaced(activations, "follow_current", beside),
        "inputs on the host",
        r"copy_ \(activations.py:\d+\), on the fetch stream, uses .* while the allocation",
    ),
    "slices are cast on the host before they are stepped": (
        blind(BackgroundStep, "wait"),
        "stage 3, slices at home, stepped behind",
        r"on the host, .* while .* on the thread that steps, (writes|reads) it",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks(2)
def test_a_mistake_in_the_engine_is_found(rank, world_size, name):
    make, scenario, _ = MISTAKES[name]
    device = CheckingDevice()
    with (
        transport(coalesced),
        pytest.raises(StreamError),
        device,
        pytest.MonkeyPatch.context() as patch,  # undone first, as the device patches the same
    ):
        patch.setattr(*make(device))
        SCENARIOS[scenario](rank, world_size)
    errors = device.errors
    assert any(re.search(MISTAKES[name][2], error) for error in errors), errors[:10]
