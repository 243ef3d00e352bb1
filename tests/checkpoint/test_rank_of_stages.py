"""A rank with several stages of a pipeline: they are saved, loaded, clipped and checked as one."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise
from inner import Checkpoint, Files
from pipelines import NUM_BLOCKS, Net, batch_of, full, loss_of, pipeline_of, stage_of, whole_batch
from ranks import on_ranks, run_ranks
from shardwise.convert.export import export_huggingface
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ReplicaError

LIST_OF_OPTIMIZERS = ("fully_shard",)  # the other way has one over all stages


def optimizers_of(parts, by):
    if by in LIST_OF_OPTIMIZERS:
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in parts]
    return torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=0.01)


def as_list(optimizers):
    return optimizers if isinstance(optimizers, list) else [optimizers]


def values_of(parts, optimizers):
    """Return parameters and moments in full, by name."""
    found = {}
    for part in parts:
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
    with pytest.raises(ConfigError, match="sharded alike"):
        shardwise.save(tmp_path / "none", [parts[0], shardwise.shard(Named(0.0, "x"), stage=1)])
    kinds = [torch.optim.SGD(parts[0].parameters()), torch.optim.AdamW(parts[1].parameters())]
    with pytest.raises(ConfigError, match=r"of one kind; here SGD, 1 groups, and AdamW, 1 groups"):
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
