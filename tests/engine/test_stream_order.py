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
from shardwise import Offload, Precision, accumulate, gathered, optim, overlap, shard
from shardwise.comm import coalesced, collectives, point_to_point
from shardwise.comm.collectives import Comm
from shardwise.config import Schedule
from shardwise.device import follow_current
from shardwise.engine.reductions import Reduction
from shardwise.offload import activations, home
from shardwise.offload.activations import _Input
from shardwise.offload.lane import Lane
from shardwise.step.background import BackgroundStep
from shardwise.step.unit_step import UnitStep
from shardwise.unit import sums
from shardwise.unit.storage import Storage
from shardwise.unit.sums import _Part
from shardwise.unit.unit import Unit
from trainer import sharded_by_block

CPU = torch.device("cpu")
SCENARIOS = {}
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
        found.append(full(norm))
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found += [grad.to_local().detach().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found.append(model(torch.ones(2, 8)))
    return found + [full(p) for p in model.parameters()]


def full(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
    return value.detach().clone()


class Checkpointed(Stack):
    """Blocks that run again in backward."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x):
        if not torch.is_grad_enabled():
            return super().forward(x)
        x = x.clone().requires_grad_()  # a reentrant one asks for it
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


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


class Various(Stack):
    """A frozen block, one that runs twice, and a parameter that is used outside its module."""

    def __init__(self):
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = super().forward(x)
        return x + self.blocks[0](x @ torch.ones(5, 8)) @ self.head.weight.T


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


def add(name, scenario):
    SCENARIOS[name] = scenario


def sharded(
    rank, world_size, make=Stack, on_own_stream=False, make_optimizer=momentum, steps=2, **options
):
    model = shard(make(), **options)
    return train(model, rank, 2, steps, on_own_stream, make_optimizer)


def at_home(rank, world_size, **options):
    return sharded(rank, world_size, offload="cpu", **options)


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


def hybrid(rank, world_size, replicas, **options):
    replicas = min(replicas, world_size)
    sizes = (replicas, world_size // replicas)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    return train(shard(Stack(), mesh=mesh, **options), rank)


def by_block(
    rank,
    world_size,
    make=Stack,
    hybrid=False,
    on_own_stream=False,
    make_optimizer=momentum,
    steps=2,
    **options,
):
    if hybrid:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=names)
    model = make()
    sharded_by_block(model, **options)
    return train(model, rank, 2, steps, on_own_stream, make_optimizer)


def along_the_longer_dim(param):
    """Cut a matrix along its second dim where any number of ranks divides it."""
    return Shard(1) if param.ndim > 1 and param.shape[1] == 8 else None


def in_a_schedule(rank, world_size, shards):
    """Run a schedule, which divides the gradients at once: its last reductions must be over.

    See pytorch#144535, a race between both.
    """
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("pp", "dp"))
    model = shards(Stack())
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


for stage in range(4):
    add(f"stage {stage}", partial(sharded, stage=stage))
    add(f"stage {stage}, slices at home", partial(at_home, stage=stage))
for stage in (1, 3):
    add(f"stage {stage}, bf16", partial(sharded, stage=stage, precision="bf16", layout="flat"))
    add(f"stage {stage}, slices at home, bf16", partial(at_home, stage=stage, precision="bf16"))
    add(f"stage {stage}, matrices", partial(sharded, stage=stage, layout="matrices"))
matrices_away = {"layout": "matrices", "precision": "bf16"}
add("slices at home, matrices, bf16", partial(at_home, **matrices_away))
add("matrices stepped whole", partial(sharded, layout="matrices", make_optimizer=muon))
add(
    "a reduction per unit",
    partial(sharded, schedule=Schedule(bucket_bytes=1), make_optimizer=adamw),
)
for stage, kind in ((1, "int4"), (2, "fp8"), (3, "int8")):
    coded = {"stage": stage, "precision": Precision(torch.bfloat16, torch.float32, gather=kind)}
    add(f"stage {stage}, gathered as {kind}", partial(sharded, **coded))
    add(f"stage {stage}, slices at home, gathered as {kind}", partial(at_home, **coded))
add("by block, gathered as fp8", partial(by_block, mp_policy=Precision(gather="fp8")))
for stage in (0, 3):
    add(f"stage {stage}, replicas", partial(hybrid, replicas=2, stage=stage))
add("no prefetch", partial(sharded, schedule=Schedule(prefetch_bytes=0)))
add(
    "slices at home, prefetch of all",
    partial(at_home, schedule=Schedule(prefetch_bytes=1 << 30, bucket_bytes=1)),
)
add("reduced every step", partial(sharded, schedule=Schedule(reduce_every="step")))
add("checkpointing", partial(sharded, make=partial(Checkpointed, False)))
add("checkpointing, reentrant", partial(sharded, make=partial(Checkpointed, True)))
add("various uses", partial(sharded, make=Various))
add("between steps", between_steps)
add("ends early", partial(sharded, make=Stops))
add("ranks differ", partial(sharded, make=Routed, stage=2))
add("slices at home are changed", change_at_home)
add("dropped with reductions under way", drop)
add("by block", by_block)
add("by block, replicas", partial(by_block, hybrid=True))
add(
    "by block, kept after forward",
    partial(by_block, reshard_after_forward=False, make_optimizer=adamw),
)
add(
    "by block, bf16",
    partial(by_block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
)
add("by block, offloaded", partial(by_block, offload_policy=CPUOffloadPolicy()))
add(
    "by block, offloaded, bf16",
    partial(
        by_block,
        offload_policy=CPUOffloadPolicy(),
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    ),
)
for stage in (2, 3):
    add(f"stage {stage}, in a schedule", partial(in_a_schedule, shards=partial(shard, stage=stage)))
add("by block, in a schedule", partial(in_a_schedule, shards=sharded_by_block))
for stage in (1, 3):
    add(f"stage {stage}, on a stream", partial(sharded, stage=stage, on_own_stream=True))
add("slices at home, on a stream", partial(at_home, on_own_stream=True))
add("by block, on a stream", partial(by_block, on_own_stream=True))
for stage in range(4):
    options = {"offload": "cpu", "make_optimizer": behind, "steps": 3}
    add(f"stage {stage}, slices at home, stepped behind", partial(sharded, stage=stage, **options))
STEPPED_ON_DEVICE = {
    "AdamW": adamw,
    "momentum": momentum,
    "8 bits": partial(optim.AdamW, lr=0.1, moments="8bit", block=16),
}
ON_DEVICE = "slices at home, stepped on the device by AdamW"
for name, of in STEPPED_ON_DEVICE.items():
    add(
        f"slices at home, stepped on the device by {name}",
        partial(
            sharded,
            offload=Offload("cpu", "cpu", "cpu", step_on="device"),
            make_optimizer=of,
            steps=3,
        ),
    )
add(
    "by block, offloaded, stepped behind",
    partial(by_block, offload_policy=CPUOffloadPolicy(), make_optimizer=behind, steps=3),
)
add("by block, cut along other dims", partial(by_block, shard_placement_fn=along_the_longer_dim))
add("by block, spread over two ranks", partial(by_block, reshard_after_forward=2))
add("by block, checkpointing", partial(by_block, make=partial(Checkpointed, False)))
inputs_away = {"offload": Offload(activations="cpu")}
for kind, reentrant in (("", False), (", reentrant", True)):
    options = {"make": partial(Checkpointed, reentrant)}
    add(f"inputs on the host{kind}", partial(sharded, **options, **inputs_away))
add("inputs on the host, on a stream", partial(SCENARIOS["inputs on the host"], on_own_stream=True))
add("inputs on the host, shared", partial(sharded, make=Shared, **inputs_away))
add(
    "by block, inputs on the host",
    partial(by_block, make=partial(Checkpointed, False), offload_policy=Offload(activations="cpu")),
)


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
    "parameters of fully_shard are read before they are gathered": (
        blind(Unit, "finish_unshard"),
        "by block",
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
        blind(_Part, "evicted"),
        "stage 3, slices at home",
        r"on the host, reads .* while copy_ \(home.py:\d+\), on the evict stream, writes it",
    ),
    "a buffer of means is used again while it is evicted": (
        blind(_Part, "evicted"),
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
        blind(Lane, "run"),
        ON_DEVICE,
        r"on stream \d+, (reads|writes) .* while copy_ \(lane.py:\d+\), on stream \d+, writes it",
    ),
    "what was stepped on the device goes back too early": (
        blind(Lane, "_take_back"),
        ON_DEVICE,
        r"copy_ \(lane.py:\d+\), on stream \d+, reads .* on stream \d+, writes it",
    ),
    "memory of a lane is filled before what was in it has left": (
        blind(Lane, "_bring"),
        ON_DEVICE,
        r"copy_ \(lane.py:\d+\), on stream \d+, writes .* while .* on stream \d+, reads it",
    ),
    "slices are fetched before they are back from their step": (
        blind(UnitStep, "put_back"),
        ON_DEVICE,
        r"while copy_ \(lane.py:\d+\), on stream \d+, writes it",
    ),
    "inputs are evicted before they are computed": (
        blind(_Input, "start_evict"),
        "inputs on the host",
        r"copy_ .*, on the evict stream, reads .* the compute stream, writes it",
    ),
    "inputs are freed while they are evicted": (
        blind(_Input, "give_up"),
        "inputs on the host",
        r"memory .* was freed while copy_ \(activations.py:\d+\), on the evict stream, uses it",
    ),
    "inputs of two blocks are freed while they are evicted": (
        blind(_Input, "stay"),
        "inputs on the host, shared",
        r"was freed while copy_ \(activations.py:\d+\), on the evict stream, uses it",
    ),
    "inputs are computed with before they are fetched": (
        blind(_Input, "unpack"),
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
