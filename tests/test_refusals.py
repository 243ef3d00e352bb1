"""What is refused, with which words, and that a refusal leaves everything as it was."""

import copy
import importlib
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise
from ranks import agreed, on_ranks
from shardwise import accumulate, describe, fully_shard, gathered, shard
from shardwise.config import Precision, Schedule, Units
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, ShardError, StateError
from trainer import SPREAD
from trainer import full as whole


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


TOKENS = torch.tensor([[0, 3, 6], [1, 2, 5]])


def loss_of(model):
    return model(TOKENS).square().sum()


def state_of(model):
    """Return what a refusal must not change: which objects, their values, their hooks."""
    found = []
    for module in model.modules():
        found += [id(p) for p in module._parameters.values()]
        found += [len(module._forward_hooks), len(module._forward_pre_hooks), sorted(vars(module))]
    found += [p.detach().clone() if not p.is_meta else None for p in model.parameters()]
    return found


def assert_unchanged(before, after):
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        same = torch.equal(whole(old), whole(new)) if isinstance(old, Tensor) else old == new
        assert same, "the refusal changed the model"


@contextmanager
def refused(model, match, error=ConfigError):
    before = state_of(model)
    with pytest.raises(error, match=match):
        yield
    assert_unchanged(before, state_of(model))


class OnAnotherDevice(torch.Tensor):
    """A tensor that says it is on a GPU, where there is none."""

    device = torch.device("cuda", 0)


@on_ranks(2)
def test_settings_out_of_range_are_refused_and_nothing_is_changed():
    model = Net()
    for stage in (5, 4, -1, "3", True, False, None, 2.5):
        with refused(model, r"stage=.*expected 0, 1, 2 or 3"):
            shard(model, stage=stage)
    with refused(model, r"layout='columns': expected 'rows' .* or 'matrices'"):
        shard(model, layout="columns")
    with refused(model, r"precision='fp8': expected one of 'fp32', 'bf16', 'fp16'"):
        shard(model, precision="fp8")
    for field in ("param", "master", "reduce"):
        with refused(model, rf"precision.{field}=torch.int64: expected a floating-point dtype"):
            shard(model, precision=Precision(**{field: torch.int64}))
    with refused(model, r"reduce_every='never': expected 'step' .* 'micro_batch'"):
        shard(model, schedule=Schedule(reduce_every="never"))
    with refused(model, r"prefetch_bytes=-1: expected 0 \(blocking\) or more"):
        shard(model, schedule=Schedule(-1))
    with refused(model, r"units: Layer matches no module; the model has Block, Embedding, Linear,"):
        shard(model, units=["Layer"])
    with refused(model, r"units: Conv1d matches no module"):
        shard(model, units=[nn.Conv1d])
    with refused(model, r"units: this Linear is not in the model; the model has"):
        shard(model, units=[nn.Linear(1, 1)])


@on_ranks(2)
def test_models_that_do_not_fit_are_refused_and_nothing_is_changed(world_size):
    blocks = nn.ModuleList([Block(), Block()])
    with refused(blocks, "ModuleList has no forward"):
        shard(blocks)
    table = nn.ModuleDict({"a": Block()})
    with refused(table, "ModuleDict has no forward"):
        shard(table)
    model = Net()
    inner = shard(Block())
    model.blocks[0] = inner
    with refused(model, r"its submodule 'blocks.0' is sharded already"):
        shard(model)
    with refused(inner, r"the model is sharded already; call shard\(\) once"):
        shard(inner)
    whole = shard(Net())
    with refused(whole.blocks[0], "sharded already"):
        shard(whole.blocks[0])
    with pytest.raises(ConfigError, match="sharded already, by shard"):
        fully_shard(whole)
    with pytest.raises(ConfigError, match=r"fully_shard\(\) was called on modules of it"):
        shard(fully_shard(Net()))
    mesh = init_device_mesh("cpu", (world_size,))
    model = Net()
    weight = distribute_tensor(model.embed.weight.detach(), mesh, [Shard(0)])
    model.embed.weight = nn.Parameter(weight)
    with pytest.raises(ConfigError, match=r"'embed.weight' is a DTensor.*Pass the axes"):
        shard(model)
    assert isinstance(model.embed.weight, nn.Parameter) and not model._forward_hooks
    model = Net()
    model.embed.weight = nn.Parameter(model.embed.weight.detach().as_subclass(OnAnotherDevice))
    with refused(model, r"different devices \(embed.weight on cuda:0; blocks.0.* on cpu\)"):
        shard(model)
    model = Net()
    model.extra = nn.Parameter(torch.empty(3, device="meta"))
    with refused(model, r"'\(root\)' \(Net\) is on the meta device and has no reset_parameters"):
        shard(model)
    model = Net()
    model.blocks.to("meta")
    for block in model.blocks:  # a module of the user's that cannot initialise itself
        block.extra = nn.Parameter(torch.empty(3, device="meta"))
    with refused(model, r"'blocks.0' \(Block\) is on the meta device and has no reset_.*init="):
        shard(model)
    with pytest.raises(ConfigError, match=r"this Net is not sharded; pass the module"):
        engine_of(Net())
    for call in (stats, describe):
        with pytest.raises(ConfigError, match="is not sharded"):
            call(whole.blocks[0])
    with pytest.raises(ConfigError, match="is not sharded"), accumulate(Net(), last=True):
        pass


@on_ranks(4)
def test_meshes_that_say_too_little_or_too_much_are_refused():
    model = Net()
    three = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    with refused(model, r"mesh: 3 axes \('pp', 'dp', 'tp'\); pass the one or two"):
        shard(model, mesh=three)
    with refused(model, r"mesh: 3 axes \(\)|mesh: 3 axes"):
        shard(model, mesh=init_device_mesh("cpu", (2, 2, 1)))
    with refused(model, "unexpected keyword argument 'shard_axes'.*shard_axis", TypeError):
        shard(model, mesh=three, shard_axes="dp")
    one = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    wrong = {
        r"shard_axis='dpp': the mesh has the axes \('dp',\)": {"mesh": one, "shard_axis": "dpp"},
        r"shard_axis='dp': name axes only together": {"shard_axis": "dp"},
        r"replicate_axis='pp': name shard_axis too": {"mesh": three, "replicate_axis": "pp"},
        r"expected two axes of the mesh .*first": {
            "mesh": three,
            "shard_axis": "pp",
            "replicate_axis": "dp",
        },
    }
    for text, settings in wrong.items():
        with pytest.warns(FutureWarning, match="_axis"), refused(model, text):
            shard(model, **settings)
    with pytest.warns(FutureWarning, match=r"shard\(shard_axis=\) is now a slice of the mesh"):
        shard(model, mesh=three, shard_axis="dp")
    assert describe(model).num_shards == 2 and describe(model).num_replicas == 1


@on_ranks(3)
def test_a_rank_outside_the_mesh_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    part = dist.device_mesh.DeviceMesh("cpu", [0, 1]) if mesh else None
    model = Net()
    if rank == 2:
        with refused(model, "mesh: rank 2 is not part of it"):
            shard(model, mesh=part)
    else:
        shard(model, mesh=part)


def test_without_a_process_group_sharding_is_refused_with_what_to_do():
    assert not dist.is_initialized()
    model = Net()
    with refused(model, r"there is no process group. Start with torchrun .*init_process_group"):
        shard(model)


# The window and the step.


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_a_gradient_in_an_open_window_is_refused_with_the_remedy(stage):
    model = shard(Net(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    uses = [
        optimizer.step,
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: parameters[0].grad.sum(),
        lambda: parameters[0].grad.full_tensor(),
        lambda: parameters[0].grad.clone(),
        lambda: parameters[0].grad * 2,
    ]
    values = [p.full_tensor() for p in parameters]
    with accumulate(model, last=False):
        loss_of(model).backward()
    for use in uses:
        with pytest.raises(StateError, match=r"not reduced yet.*accumulate\(model, last=True\)"):
            use()
    for param, value in zip(parameters, values, strict=True):
        assert torch.equal(param.full_tensor(), value)
    held = stats(model)
    assert held.grad_partial_bytes > 0 and held.grad_shard_bytes == 0
    with accumulate(model, last=True):
        loss_of(model).backward()
    twice = [p.grad.full_tensor() for p in parameters]
    optimizer.zero_grad()
    loss_of(model).backward()
    for param, grad in zip(parameters, twice, strict=True):
        assert torch.equal(grad, param.grad.full_tensor() * 2)


@pytest.mark.parametrize("stage", [0, 1])
@on_ranks(2)
def test_a_gradient_in_an_open_window_may_be_dropped(stage):
    """zero_grad inside a window forgets what was accumulated, both ways."""
    model = shard(Net(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    expected = [p.grad.full_tensor() for p in model.parameters()]
    for set_to_none in (True, False):
        for zero in (optimizer.zero_grad, model.zero_grad):
            zero(set_to_none=True)
            with accumulate(model, last=False):
                loss_of(model).backward()
            zero(set_to_none=set_to_none)
            assert stats(model).grad_partial_bytes == 0
            with accumulate(model, last=True):
                loss_of(model).backward()
            for param, grad in zip(model.parameters(), expected, strict=True):
                assert torch.equal(param.grad.full_tensor(), grad)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_a_step_between_forward_and_backward_is_refused(stage):
    model = shard(Net(), stage=stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    loss = loss_of(model)
    optimizer.step()
    with pytest.raises(StateError, match=r"between forward and backward .*run backward first"):
        loss.backward()
    optimizer.zero_grad()
    loss_of(model).backward()  # and the next step works
    optimizer.step()


# gathered().


@on_ranks(3)
def test_gathered_parameters_are_read_and_written_and_no_change_is_lost(rank, world_size):
    for options in (*SPREAD, {"stage": 1, "layout": "rows"}, {"layout": "matrices"}):
        torch.manual_seed(3)
        plain = Net()
        model = shard(copy.deepcopy(plain), **options)
        params = dict(model.named_parameters())
        with gathered(model) as inside:
            assert inside is model
            assert not any(p is params[n] for n, p in model.named_parameters())
            assert all(type(p) is nn.Parameter for p in model.parameters())
            for name, value in model.state_dict().items():
                assert type(value) is Tensor and torch.equal(value, plain.state_dict()[name])
            assert torch.equal(loss_of(model), loss_of(plain))
        assert all(p is params[n] for n, p in model.named_parameters())
        weight, bias = params["embed.weight"], params["blocks.1.0.bias"]
        with gathered(weight, bias) as (full_weight, full_bias):
            assert torch.equal(full_weight, plain.embed.weight)
            assert torch.equal(full_bias, plain.blocks[1][0].bias)
        with torch.no_grad():
            with gathered(weight, writeback=True) as (full,):
                full.mul_(2)
            assert torch.equal(whole(weight), plain.embed.weight * 2)
            with gathered(weight, writeback=True, source=1) as (full,):
                full.fill_(float(rank))
            assert torch.equal(whole(weight), torch.ones(7, 4))
            with gathered(model, writeback=True, source=1):
                if rank == 1:
                    model.embed.weight.fill_(7)
            assert torch.equal(whole(weight), torch.full((7, 4), 7.0))
        for what in (model, bias):
            with (
                pytest.raises(StateError, match=r"blocks.1.0.bias changed .*writeback=True"),
                torch.no_grad(),
                gathered(what) as found,
            ):
                if rank == world_size - 1:
                    (found[0] if what is bias else model.blocks[1][0].bias).add_(1)
            assert torch.equal(whole(bias), plain.blocks[1][0].bias)
        loss_of(model).backward()


@on_ranks(2)
def test_gathered_is_left_alone_by_an_error_and_refuses_what_is_no_parameter():
    model = shard(Net())
    params = list(model.parameters())
    values = [p.full_tensor() for p in params]
    with pytest.raises(KeyError, match="mine"), torch.no_grad(), gathered(model, writeback=True):
        model.embed.weight.zero_()
        raise KeyError("mine")
    assert list(map(id, model.parameters())) == list(map(id, params))
    assert all(torch.equal(p.full_tensor(), v) for p, v in zip(params, values, strict=True))
    loss_of(model).backward()  # the model works again
    with pytest.raises(ConfigError, match="name a sharded model, or some of its parameters"):
        gathered().__enter__()
    with pytest.raises(ConfigError, match="name one model, or parameters, not both"):
        gathered(model, params[0]).__enter__()
    with pytest.raises(ConfigError, match=r"argument 1 is a Tensor, not a parameter"):
        gathered(params[0], torch.ones(3)).__enter__()
    with pytest.raises(ConfigError, match=r"not a parameter.*full_tensor"):
        gathered(params[0].grad).__enter__()
    with pytest.raises(ConfigError, match=r"source=9\): expected a rank of the shard axis, 0 to 1"):
        gathered(params[0], writeback=True, source=9).__enter__()  # not at the end, changes made
    with pytest.raises((ConfigError, StateError)), gathered(model), gathered(model):
        pass


@on_ranks(2)
def test_a_model_whose_parameters_were_replaced_is_refused_and_nothing_is_lost():
    changes = {
        "half": lambda m: m.half(),
        "double": lambda m: m.to(torch.float64),
        "bfloat16": lambda m: m.bfloat16(),
        "meta": lambda m: m.to("meta"),
        "to_empty": lambda m: m.to_empty(device="cpu"),
        "assigned": lambda m: setattr(m.embed, "weight", nn.Parameter(torch.ones(7, 4))),
        "assign=True": lambda m: m.load_state_dict(
            {n: torch.ones(p.shape) for n, p in m.named_parameters()}, assign=True
        ),
    }
    for label, change in changes.items():
        model = shard(Net())
        values = {n: p.full_tensor() for n, p in model.named_parameters()}
        engine = engine_of(model)
        try:
            change(model)
            loss_of(model)
        except (StateError, ShardError) as error:
            text = str(error)
            assert "before shard()" in text.replace("\n", " "), f"{label}: {text}"
        else:
            assert label == "to_empty", f"{label} was neither refused nor done"
        params = [s for u in engine.units for s in u.params]
        if label not in ("to_empty", "meta"):
            for param in params:
                held = param.sharded.full_tensor()
                assert torch.equal(held, values[param.name]), (
                    f"{label}: {param.name} lost its values"
                )
    model = shard(Net())
    params = list(model.parameters())
    for same in (model.to("cpu"), model.float(), model.to(torch.float32), model.cpu()):
        assert same is model
    assert list(map(id, model.parameters())) == list(map(id, params))
    loss_of(model).backward()


# describe().


class Wide(nn.Module):
    """5 rows on 4 ranks: 3 rows of padding out of 5 in a rows layout."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 5, bias=False) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(8))


@pytest.mark.parametrize("layout", ["rows", "flat"])
@on_ranks(4)
def test_a_description_shows_every_unit_with_its_numbers_and_suggests_flat(layout):
    model = shard(Wide(), layout=layout, stage=2)
    seen = describe(model)
    assert (seen.stage, seen.num_shards, seen.num_replicas) == (2, 4, 1)
    assert seen.full_bytes == sum(p.numel() for p in model.parameters()) * 4 == (2 * 40 + 8) * 4
    root, first, _ = seen.units
    assert (root.name, first.name, first.class_name) == ("", "blocks.0", "Linear")
    assert (first.num_params, first.numel, first.full_bytes) == (1, 40, 160)
    padding = 3 * 8 * 4 if layout == "rows" else 0
    assert first.padding_bytes == padding and first.rank_bytes == (160 + padding) // 4
    assert first.padding_share == padding / 160 and root.padding_bytes == 0
    assert seen.rank_bytes == sum(u.rank_bytes for u in seen.units)
    text = agreed(str(seen))
    if layout == "flat":
        assert "would cost none" not in text and "flat: 160 B full, 40 B per rank" in text
        return
    assert text.startswith("stage 2 over 4 ranks: 88 parameters, 352 B full, ")
    assert "├─ blocks.0 [Linear]  1 parameters, 40 elements, float32, rows: 160 B full" in text
    assert "└─ blocks.1" in text and "padding 96 B (60.0%)" in text
    assert "'blocks.1': rows that do not divide by 4 cost 60.0% padding" in text
    assert 'layout="flat" would cost none' in text


def test_names_of_version_0_1_answer_and_warn_of_the_new_ones():
    for old, new in shardwise._RENAMED.items():
        module, _, name = new.partition(":")
        with pytest.warns(FutureWarning, match=f"shardwise.{old} is now shardwise"):
            found = getattr(shardwise, old)
        assert found is getattr(importlib.import_module(module), name)
        assert old not in dir(shardwise)


@on_ranks(1)
def test_parameters_of_version_0_1_do_what_the_new_ones_do():
    old = {"prefetch_bytes": 0, "bucket_bytes": 1, "reduce_every": "step", "optional": [Block]}
    with pytest.warns(FutureWarning, match=r"shard\(.*=\) is now (schedule|units)="):
        model = shard(Net(), **old)
    now = shard(Net(), schedule=Schedule(0, 1, "step"), units=Units(optional=[Block]))
    assert engine_of(model).config == engine_of(now).config
    settings = [[unit.settings for unit in engine_of(m).units] for m in (model, now)]
    assert settings[0] == settings[1]
    with pytest.raises(TypeError, match=r"'prefech_bytes'.*prefetch_bytes"):
        shard(Net(), prefech_bytes=0)
