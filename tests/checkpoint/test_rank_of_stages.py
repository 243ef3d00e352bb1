"""Stages of a pipeline, one of a rank or several, are saved, loaded and checked as one model."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import shardwise
from models import Block
from pipelines import NUM_BLOCKS, Net, batch_of, full, loss_of, pipeline_of, stage_of, whole_batch
from ranks import on_ranks, run_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.read import Checkpoint
from shardwise.convert.export import export_huggingface
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ReplicaError
from shardwise.interop.fsdp2 import fully_shard

LIST_OF_OPTIMIZERS = ("fully_shard",)  # the other way has one over all stages


def optimizers_of(parts, by):
    if by in LIST_OF_OPTIMIZERS:
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.01)


def as_list(optimizers):
    return optimizers if isinstance(optimizers, list) else [optimizers]


def values_of(parts, optimizers):
    """Return parameters, moments and buffers in full, by name."""
    found = {}
    for part in parts:
        found |= dict(part.named_buffers())
        for name, param in part.named_parameters():
            found[name] = full(param).clone()
            for each in as_list(optimizers):
                for key, value in each.state.get(param, {}).items():
                    found[f"{name}/{key}"] = full(value).clone()
    return found


def everything(mine, num_ranks):
    shown = [{}] * num_ranks
    torch.distributed.all_gather_object(shown, mine)
    return {name: tensor for each in shown for name, tensor in each.items()}


def a_v_of_stages(rank, num_ranks, folder, by):
    axes = shardwise.Axes(pp=2)
    dp = axes["dp_shard"]
    made = pipeline_of("ZBVZeroBubble", axes, 2, by=by, stage=3)
    optimizers = optimizers_of(made.parts, by)
    whole = Net()
    reference = torch.optim.AdamW(whole.parameters(), lr=0.01)
    made.step(*batch_of(0, dp.get_local_rank()))
    x, y = whole_batch(0, dp.size())
    loss_of(whole(x), y).backward()

    # One norm over all stages of all ranks.
    norm = shardwise.parallel.clip_grad_norm_(made.params, 0.1)
    wanted = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    torch.testing.assert_close(norm, wanted, rtol=1e-5, atol=0)
    for each in (*as_list(optimizers), reference):
        each.step()
        each.zero_grad()
    shardwise.check.replicas(made.parts, optimizers)

    shardwise.save(folder / "saved", made.parts, optimizers, step=1)
    saved = everything(values_of(made.parts, optimizers), num_ranks)
    assert {n for n in saved if "/" not in n} == {n for n, _ in whole.named_parameters()}

    # Into the other split, in which a rank has neighbours, and into one model over all ranks.
    other = pipeline_of("Interleaved1F1B", axes, 2, by="shard", stage=2)
    alone = shardwise.shard(Net(), units="Block")
    for parts, how in ((other.parts, "shard"), ([alone], "shard"), (made.parts, by)):
        theirs = optimizers_of(parts, how)
        with torch.no_grad():
            for param in (param for part in parts for param in part.parameters()):
                param.zero_()
        shardwise.load(folder / "saved", parts, theirs)
        loaded = values_of(parts, theirs)
        assert loaded
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())

    shardwise.save(folder / "trained", alone)

    # And back: of one model, into several stages of a rank, by the checkpoints of a run.
    shardwise.save(folder / "alone", alone, optimizers_of([alone], "shard"))
    with shardwise.Checkpoints(folder / "run", other.parts) as run:
        run.save(3, wait=True)
        assert run.load() is not None
    shardwise.load(folder / "alone", made.parts)
    loaded = values_of(made.parts, [])
    assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize(("num_ranks", "by"), [(4, "shard"), (2, "fully_shard")])
def test_a_rank_saves_and_loads_its_stages_as_one_model(num_ranks, by, tmp_path):
    run_ranks(a_v_of_stages, num_ranks, tmp_path, by)
    whole = Net()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    loaded = shardwise.load(tmp_path / "saved", whole, optimizer)
    assert not loaded.missing
    assert not loaded.unexpected
    assert all(optimizer.state[p]["exp_avg"].any() for p in whole.parameters())
    exported = [tmp_path / f"exported-{name}" for name in ("saved", "trained")]
    for path, target in zip(
        (next((tmp_path / "saved").glob("step-*")), tmp_path / "trained"), exported, strict=True
    ):
        export_huggingface(Checkpoint(Files(), path), target, files=Files())
    ours, theirs = (load_file(target / "model.safetensors") for target in exported)
    assert ours.keys() == theirs.keys()  # the same weights of stages and of one model
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    plain_parts = [stage_of(index, NUM_BLOCKS) for index in range(NUM_BLOCKS)]
    shardwise.load(tmp_path / "saved", plain_parts)
    stages = dict(pair for part in plain_parts for pair in part.named_parameters())
    assert all(torch.equal(stages[name], param) for name, param in whole.named_parameters())


class Named(nn.Module):
    """A stage with a parameter of a name that another stage has, too."""

    def __init__(self, value, own, *, table_last=False):
        super().__init__()
        made = {"table": torch.full((5, 3), value), own: torch.ones(4)}
        for name in sorted(made, key="table".__eq__) if table_last else made:
            self.register_parameter(name, nn.Parameter(made[name]))

    def forward(self, x):
        return x + self.table.sum()


@on_ranks(4)
def test_two_stages_with_one_name_and_other_values_are_refused(rank, num_ranks, tmp_path):
    axes = shardwise.Axes(pp=2)
    place = axes["pp"].get_local_rank()
    for layout in ("rows", "flat"):  # a table that is first on one stage, and second on the other
        model = Named(1.0, f"own_{place}", table_last=place == 1)
        model = shardwise.shard(model, mesh=axes, layout=layout)
        shardwise.save(tmp_path / f"alike_{layout}", model)
        if rank == num_ranks - 1:  # the last element of the table, in the last shard
            with torch.no_grad():
                local = dict(model.named_parameters())["table"].to_local().view(-1)
                local[-1:] += 1
        where = r"stage 0 \(ranks? .*\) and stage 1 \(ranks? .*\)"
        with pytest.raises(CheckpointError, match=rf"'table' has other values in {where}.*tie\(\)"):
            shardwise.save(tmp_path / f"apart_{layout}", model)
        assert not (tmp_path / f"apart_{layout}").exists()
        whole = nn.Module()
        whole.table = nn.Parameter(torch.zeros(5, 3))
        whole.own_0, whole.own_1 = (nn.Parameter(torch.zeros(4)) for _ in range(2))
        shardwise.load(tmp_path / f"alike_{layout}", whole)
        assert whole.table.detach().eq(1).all()


@on_ranks(2)
def test_stages_of_one_rank_are_one_model_with_one_tensor_of_a_name(rank, tmp_path):
    for values, fits in (((1.0, 1.0), True), ((1.0, 2.0), False)):
        parts = [shardwise.shard(Named(v, f"own_{n}")) for n, v in enumerate(values)]
        if fits:
            shardwise.save(tmp_path / "alike", parts)
            with torch.no_grad():
                for part in parts:
                    dict(part.named_parameters())["table"].zero_()
            shardwise.load(tmp_path / "alike", parts)
            assert all(full(dict(p.named_parameters())["table"]).eq(1).all() for p in parts)
        else:
            with pytest.raises(CheckpointError, match="'table' has other values in two stages of"):
                shardwise.save(tmp_path / "apart", parts)
    a_flipped_bit_is_named(parts, rank)
    with pytest.raises(ConfigError, match="an empty one"):
        shardwise.save(tmp_path / "none", [])
    with pytest.raises(ConfigError, match="must be sharded over one mesh"):
        shardwise.save(tmp_path / "none", [parts[0], shardwise.shard(Named(0.0, "x"), stage=1)])
    kinds = [torch.optim.SGD(parts[0].parameters()), torch.optim.AdamW(parts[1].parameters())]
    with pytest.raises(
        ConfigError, match=r"must be of one kind; got SGD, 1 groups, and AdamW, 1 groups"
    ):
        shardwise.save(tmp_path / "none", parts, kinds)
    other = [torch.optim.SGD(part.parameters(), lr=0.1 * n) for n, part in enumerate(parts)]
    with pytest.raises(ConfigError, match=r"'lr' of group 0 is 0\.0 .* and 0\.1 in another's"):
        shardwise.save(tmp_path / "none", parts, other)


def a_flipped_bit_is_named(parts, rank):
    copies = [shardwise.shard(Named(1.0, f"own_{n}"), stage=0) for n in range(2)]
    shardwise.check.replicas(copies)
    if rank == 0:  # of the second stage
        param = engine_of(copies[1]).units[-1].params[0]
        param.sharded.to_local().view(-1)[0] += 1
    with pytest.raises(ReplicaError, match=r"'table', value: ranks 0, 1 differ"):
        shardwise.check.replicas(copies)


# -- one stage of a rank

NUM_LAYERS = 4


class Layers(nn.Module):
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


class Whole(Layers):
    """The model of one process, with the buffers of all stages."""

    def __init__(self, splits):
        super().__init__()
        for begin in splits[1:]:
            self.register_buffer(f"seen_{begin}", torch.zeros(3))


def part_of(axes, splits, by):
    """Return this rank's stage; ``splits`` are where stages begin."""
    place = axes["pp"].get_local_rank()
    model = Layers(range(splits[place], [*splits, NUM_LAYERS][place + 1]))
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


@pytest.mark.parametrize(("num_ranks", "by"), [(2, "fully_shard"), (4, "shard")])
@on_ranks()
def test_stages_make_one_checkpoint_that_any_other_model_loads(num_ranks, by, tmp_path):
    axes = shardwise.Axes(pp=2)
    model = part_of(axes, [0, 2], by)
    optimizer = trained(model)
    shardwise.save(tmp_path / "saved", model, optimizer, extra={"step": 3})
    saved = everything(values_of([model], optimizer), num_ranks)

    # Stages that are split elsewhere, without a pipeline, and by the other way to shard.
    for splits, how in (([0, 3], "shard"), ([0, 2], "fully_shard"), ([0], "shard")):
        over = axes if len(splits) > 1 else shardwise.Axes()
        other = part_of(over, splits, how)
        others = torch.optim.AdamW(other.parameters(), lr=0.1)
        for name in [name for name, _ in other.named_buffers()]:
            delattr(other, name)  # of these splits
        other.register_buffer("seen_0", torch.zeros(3))
        other.register_buffer("seen_2", torch.zeros(3))
        shardwise.load(tmp_path / "saved", other, others)
        loaded = values_of([other], others)
        assert loaded.keys() <= saved.keys()
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())

    missing = part_of(axes, [0, 3], "shard")
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
    model = part_of(axes, [0, 2], "shard")
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
    model = Layers(range(2 * place, 2 * place + 2))
    for block in model.layers.values() if place == 1 else ():
        linears = [name for name, each in block.named_modules() if isinstance(each, nn.Linear)]
        parallelize_module(
            block, axes["tp"], {linears[0]: ColwiseParallel(), linears[-1]: RowwiseParallel()}
        )
    model = shardwise.shard(model, mesh=axes)
    assert engine_of(model).all_ranks.members == list(range(num_ranks))
    shardwise.save(tmp_path / "mixed", model)
    whole = Whole([0, 2])
    shardwise.load(tmp_path / "mixed", whole)
    wanted = dict(Layers().named_parameters())
    assert all(torch.equal(param, wanted[name]) for name, param in whole.named_parameters())


@on_ranks(4)
def test_replicas_of_a_stage_are_compared_with_each_other(rank):
    axes = shardwise.Axes(pp=2, dp_replicate=2)
    model = part_of(axes, [0, 1], "shard")
    optimizer = trained(model)
    shardwise.check.replicas(model, optimizer)
    if rank == 3:  # of the second stage
        param = engine_of(model).units[-1].params[0]
        param.sharded.to_local().view(-1)[0] += 1
    with pytest.raises(ReplicaError, match=r"'layers\.\d\.[\w.]+', value: ranks 2, 3 differ"):
        shardwise.check.replicas(model, optimizer)
