"""`fully_shard` of models cut over tensor parallelism: gradients, norms, state dicts, collectives.

The model has what makes the two meet: a norm whose gradient every rank has a part of, and weights
that both cut, along one dim or along two.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import fully_shard
from trainer import full

WORDS, TOKENS, WIDTH, STEPS = 12, 4, 6, 2
BATCH = 3


class Net(nn.Module):
    """Words in, scores of words out; between them a part that works on pieces of sequences."""

    def __init__(self, hidden):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x + self.down(self.up(self.norm(x)).relu()))


def make(hidden):
    torch.manual_seed(0)
    return Net(hidden)


def parallel(model, tp):
    """Cut every layer over ``tp``; between the layers each rank has a piece of the sequences."""
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, tp, plan)


def along_the_other_dim(param):
    """Cut a matrix along the dim that tensor parallelism left whole."""
    if param.ndim == 2 and isinstance(param, DTensor) and param.placements[0].is_shard():
        return Shard(1 - param.placements[0].dim)
    return Shard(0)


def sharded(shards, model, mesh, **options):
    for part in (model.norm, [model.up, model.down]):
        shards(part, mesh=mesh, **options)
    return shards(model, mesh=mesh, **options)


def losses_of(model, optimizer, part, step):
    random = torch.Generator().manual_seed(10 * step + part)
    ids = torch.randint(WORDS, (BATCH, TOKENS), generator=random)
    optimizer.zero_grad()
    loss = model(ids).square().mean()
    loss.backward()
    return loss.detach()


def trains(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    part, group = mesh["dp"].get_local_rank(), mesh["dp"].get_group()
    cases = [
        {},  # rows of `up` and `head`, cut over tp, are cut over dp again, unevenly
        {"shard_placement_fn": along_the_other_dim, "reshard_after_forward": False},
    ]
    for options in cases:
        plain = make(10)
        models = [plain] + [
            sharded(shards, parallel(make(10), mesh["tp"]), mesh["dp"], **options)
            for shards in (fully_shard, torch_fully_shard)
        ]
        for ours, theirs in zip(models[1].parameters(), models[2].parameters(), strict=True):
            assert ours.placements == theirs.placements and ours.device_mesh == theirs.device_mesh
        for ours, theirs in zip(models[1].parameters(), plain.parameters(), strict=True):
            assert torch.equal(full(ours), theirs)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        for step in range(STEPS):
            wanted, *losses = (
                losses_of(m, o, part, step) for m, o in zip(models, optimizers, strict=True)
            )
            roundings = (step + 1) * of_gradient(WIDTH, 10, WIDTH, over=2 * BATCH * TOKENS)
            assert torch.equal(losses[0], losses[1])
            assert_rounded_alike(losses[0], wanted, roundings)
            for a, b, c in zip(*(m.parameters() for m in models), strict=True):
                assert b.grad.placements == b.placements
                assert torch.equal(full(b.grad), full(c.grad))
                dist.all_reduce(a.grad, group=group)
                assert_rounded_alike(full(b.grad), a.grad.div_(2), roundings)
            for norm_type in (1.0, 3.0, float("inf"), 2.0):
                clips(models, norm_type, roundings)
            for optimizer in optimizers:
                optimizer.step()
    loads_what_one_rank_had(*models[1:2], *optimizers[1:2])


def clips(models, norm_type, roundings):
    """torch's own clipping: the norm of one process, for one all-reduce per axis."""
    norms = []
    for model in models:
        with warnings.catch_warnings(), CommDebugMode() as mode:
            warnings.simplefilter("ignore", UserWarning)  # the mode's own, about inputs
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm_type)
        if isinstance(total, DTensor):
            sums = mode.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
            assert sums == total.device_mesh.ndim == 2
        norms.append(full(total))
    for norm in norms[1:]:
        assert_rounded_alike(norm, norms[0], roundings)


def loads_what_one_rank_had(model, optimizer):
    """Whole tensors of rank 0 become every rank's pieces again, of parameters and of moments."""
    expected = copy.deepcopy(get_model_state_dict(model))
    moments = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    whole = get_model_state_dict(model, options=options)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert bool(whole) == bool(state) == (dist.get_rank() == 0)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
            optimizer.state[param]["momentum_buffer"].zero_()
    set_model_state_dict(model, whole, options=options)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    for name, tensor in get_model_state_dict(model).items():
        assert tensor.placements == expected[name].placements
        assert torch.equal(tensor.to_local(), expected[name].to_local()), name
    found = get_optimizer_state_dict(model, optimizer)["state"]
    for name, entry in moments["state"].items():
        theirs, ours = entry["momentum_buffer"], found[name]["momentum_buffer"]
        assert torch.equal(ours.to_local(), theirs.to_local()), name


def one_data_parallel_rank_sends_nothing(rank):
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    models = [
        sharded(shards, parallel(make(12), mesh["tp"]), mesh["dp"], **options)
        for shards in (fully_shard, torch_fully_shard)
    ]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    for step in range(STEPS):
        counts = []
        for each, optimizer in zip(models, optimizers, strict=True):
            with warnings.catch_warnings(), CommDebugMode() as mode:
                warnings.simplefilter("ignore", UserWarning)
                losses_of(each, optimizer, 0, step)
            counts.append(dict(mode.get_comm_counts()))
            optimizer.step()
        assert counts[0] == counts[1], counts
        assert all(str(op).startswith("c10d_functional") for op in counts[0])  # those of DTensors
    for ours, theirs in zip(*(m.parameters() for m in models), strict=True):
        assert ours.device.type == "cpu"
        assert torch.equal(full(ours), full(theirs))


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, about its own
@on_ranks(4)
def test_gradients_norms_and_state_beside_tensor_parallelism_are_those_of_torchs_own(rank):
    trains(rank)
    one_data_parallel_rank_sends_nothing(rank)
