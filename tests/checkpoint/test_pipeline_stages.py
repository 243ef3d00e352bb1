"""The stages of a pipeline are one model: one checkpoint, one check of replicas."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import shardwise
from models import Block
from ranks import on_ranks
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ReplicaError
from shardwise.interop.fsdp2 import fully_shard

NUM_LAYERS = 4


class Net(nn.Module):
    """A model, or the layers of it that one stage has, under the names of the whole."""

    def __init__(self, layers=range(NUM_LAYERS)):
        super().__init__()
        torch.manual_seed(0)
        blocks = {str(number): Block() for number in range(NUM_LAYERS)}
        self.layers = nn.ModuleDict({name: blocks[name] for name in map(str, layers)})
        self.register_buffer(f"seen_{layers[0]}", torch.full((3,), float(layers[0])))

    def forward(self, x):
        for block in self.layers.values():
            x = block(x)
        return x


class Whole(Net):
    """The model of one process, with the buffers of all stages."""

    def __init__(self, splits):
        super().__init__()
        for begin in splits[1:]:
            self.register_buffer(f"seen_{begin}", torch.zeros(3))


def stage_of(axes, splits, by):
    """Return this rank's stage; ``splits`` are where stages begin."""
    place = axes["pp"].get_local_rank()
    model = Net(range(splits[place], [*splits, NUM_LAYERS][place + 1]))
    if by == "shard":
        return shardwise.shard(model, mesh=axes, stage=2)
    for block in model.layers.values():
        fully_shard(block, mesh=axes)
    return fully_shard(model, mesh=axes)


def trained(model):
    """Take a step, each stage on a loss of its own: what it is does not matter here."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    return optimizer


def whole_tensors(model, optimizer):
    """Return this rank's parameters, moments and buffers in full."""
    found = dict(model.named_buffers())
    for name, param in model.named_parameters():
        state = optimizer.state.get(param, {})
        for key, value in {"": param, **{k: state[k] for k in sorted(state)}}.items():
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}/{key}"] = full.detach().clone()
    return found


@pytest.mark.parametrize(("num_ranks", "by"), [(2, "fully_shard"), (4, "shard")])
@on_ranks()
def test_stages_make_one_checkpoint_that_any_other_model_loads(num_ranks, by, tmp_path):
    axes = shardwise.Axes(pp=2)
    model = stage_of(axes, [0, 2], by)
    optimizer = trained(model)
    shardwise.save(tmp_path / "saved", model, optimizer, extra={"step": 3})
    saved = whole_tensors(model, optimizer)

    shown = [None] * num_ranks
    torch.distributed.all_gather_object(shown, saved)
    everything = {name: t for each in shown if each for name, t in each.items()}

    # Stages that are split elsewhere, without a pipeline, and by the other way to shard.
    for splits, how in (([0, 3], "shard"), ([0, 2], "fully_shard"), ([0], "shard")):
        over = axes if len(splits) > 1 else shardwise.Axes()
        other = stage_of(over, splits, how)
        others = torch.optim.AdamW(other.parameters(), lr=0.1)
        for name in [name for name, _ in other.named_buffers()]:
            delattr(other, name)  # of these splits
        other.register_buffer("seen_0", torch.zeros(3))
        other.register_buffer("seen_2", torch.zeros(3))
        shardwise.load(tmp_path / "saved", other, others)
        loaded = whole_tensors(other, others)
        assert loaded.keys() <= everything.keys()
        assert all(torch.equal(tensor, everything[name]) for name, tensor in loaded.items())

    missing = stage_of(axes, [0, 3], "shard")
    missing.register_buffer("unknown", torch.zeros(1))
    with pytest.raises(CheckpointError, match=r"1 missing there \(unknown\)"):
        shardwise.load(tmp_path / "saved", missing)

    alone = Whole([0, 2])
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    loaded = shardwise.load(tmp_path / "saved", alone, optimizer)
    assert not loaded.missing and not loaded.unexpected
    assert alone.seen_2.tolist() == [2.0] * 3
    assert all(optimizer.state[p]["exp_avg"].any() for p in alone.parameters())


@on_ranks(2)
def test_no_stage_waits_for_others_inside_its_pass_while_a_save_is_in_flight(rank, tmp_path):
    axes = shardwise.Axes(pp=2)
    model = stage_of(axes, [0, 2], "shard")
    optimizer = trained(model)
    x = torch.ones(2, 8)
    with shardwise.Checkpoints(tmp_path / "run", model, optimizer) as checkpoints:
        checkpoints.save(1)
        if rank == 1:  # a stage's pass begins when the stage before has ended its own
            torch.distributed.recv(x, 0)
        y = model(x)
        if rank == 0:
            torch.distributed.send(y.detach(), 1)
        y.square().mean().backward()
        checkpoints.check()


@on_ranks(4)
def test_all_ranks_are_found_where_one_stage_alone_is_tensor_parallel(num_ranks, tmp_path):
    axes = shardwise.Axes(pp=2, tp=2)
    place = axes["pp"].get_local_rank()
    model = Net(range(2 * place, 2 * place + 2))
    for block in model.layers.values() if place == 1 else ():
        linears = [name for name, each in block.named_modules() if isinstance(each, nn.Linear)]
        parallelize_module(
            block, axes["tp"], {linears[0]: ColwiseParallel(), linears[-1]: RowwiseParallel()}
        )
    model = shardwise.shard(model, mesh=axes)
    assert engine_of(model).everyone.members == list(range(num_ranks))
    shardwise.save(tmp_path / "mixed", model)
    whole = Whole([0, 2])
    shardwise.load(tmp_path / "mixed", whole)
    wanted = dict(Net().named_parameters())
    assert all(torch.equal(param, wanted[name]) for name, param in whole.named_parameters())


@on_ranks(4)
def test_replicas_of_a_stage_are_compared_with_each_other(rank):
    axes = shardwise.Axes(pp=2, dp_replicate=2)
    model = stage_of(axes, [0, 1], "shard")
    optimizer = trained(model)
    shardwise.check.replicas(model, optimizer)
    if rank == 3:  # of the second stage
        param = engine_of(model).units[-1].params[0]
        param.sharded.to_local().view(-1)[0] += 1
    with pytest.raises(ReplicaError, match=r"'layers\.\d\.[\w.]+', value: ranks 2, 3 differ"):
        shardwise.check.replicas(model, optimizer)
