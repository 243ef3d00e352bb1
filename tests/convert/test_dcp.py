"""Folders that dcp.save wrote: every element comes back, under its right name."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from convert.sources import check_slices, infos_of
from ranks import run_ranks
from shardwise.convert.dcp import open_dcp
from shardwise.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Net(torch.nn.Module):
    """Uneven on 2 and 3 ranks, with a buffer of each kind and a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.last = torch.nn.Linear(7, 1, bias=False)
        self.frozen = torch.nn.Parameter(torch.randn(4, 2), requires_grad=False)

    def forward(self, x):
        return self.last(self.norm(self.first(x))) + self.frozen.sum()


def train(model, optimizer):
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, 5, generator=generator)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def make_optimizer(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in trained if p.ndim == 1], "lr": 0.25},
    ]
    return torch.optim.AdamW(groups, lr=0.125)


def full(value):
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return tensor.detach().clone()


def save_fsdp(rank, world, folder, layout):
    """Save an FSDP2 model and its AdamW; return all of its tensors, gathered."""
    model = Net()
    for module in (model.first, model.last, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    optimizer = make_optimizer(model)
    train(model, optimizer)
    options = StateDictOptions(flatten_optimizer_state_dict=layout.startswith("flat"))
    weights, states = get_state_dict(model, optimizer, options=options)
    dcp.save(layouts(weights, states)[layout], checkpoint_id=folder)
    moments = {
        name: {key: full(value) for key, value in optimizer.state[parameter].items()}
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return {name: full(value) for name, value in weights.items()}, moments


def layouts(weights, states):
    extra = {"sampler": {"epoch": 3, "seeds": [1, 2], "rng": torch.arange(3)}, "tag": ("a", None)}
    return {
        "nested": {"model": weights, "optim": states, "user": extra},
        "deep": {"app": {"model": weights, "optimizer": states}, "user": extra},
        "flat under a key": {"model": weights, "optimizer": states, "user": extra},
        "flat, model at the top": {**weights, "optimizer": states, "user": extra},
        "flat, all at the top": {**weights, **states, "user": extra},
    }


@pytest.mark.parametrize(
    ("world", "layout"),
    list(zip((3, 2, 2, 1, 2), layouts({}, {}), strict=True)),
)
def test_fsdp_checkpoints_come_back_element_by_element(world, layout, tmp_path):
    weights, moments = run_ranks(save_fsdp, world, str(tmp_path / "c"), layout)[0]
    source = open_dcp(tmp_path / "c")
    infos = infos_of(source)
    assert set(infos) == {(name, "") for name in weights} | {
        (name, key) for name, states in moments.items() for key in states
    }
    for name, expected in weights.items():
        check_slices(source, infos[name, ""], expected)
        assert infos[name, ""].kind == ("buffer" if name.endswith("tracked") else "param")
    for name, states in moments.items():
        for key, expected in states.items():
            check_slices(source, infos[name, key], expected)
    assert source.step == 2
    groups = {
        tuple(sorted(g["params"])): (g["lr"], g["weight_decay"]) for g in source.optimizer.groups
    }
    assert groups == {
        ("first.weight", "last.weight"): (0.125, 0.5),
        ("first.bias", "norm.bias", "norm.weight"): (0.25, 0.01),
    }
    assert source.optimizer.groups[0]["betas"] == (0.9, 0.999)
    user = source.extra["user"]
    assert user["sampler"].pop("rng").tolist() == [0, 1, 2]
    assert user == {"sampler": {"epoch": 3, "seeds": [1, 2]}, "tag": ("a", None)}
    assert set(source.extra) == {"user"}


def save(folder, state):
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("key", [None, "model", "module"])
def test_a_model_alone_is_found(key, tmp_path):
    weights = get_model_state_dict(Net())
    source = open_dcp(save(tmp_path / "c", weights if key is None else {key: weights}))
    assert {info.name for info in source.tensors} == set(weights)
    assert source.optimizer is None
    assert source.step is None
    assert source.extra == {}


def test_of_two_models_the_optimizers_is_taken_and_the_other_is_extra(tmp_path):
    model, other = Net(), Net()
    optimizer = make_optimizer(model)
    train(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    folder = save(tmp_path / "c", {"ema": other.state_dict(), "model": weights, "optim": states})
    source = open_dcp(folder)
    check_slices(source, infos_of(source)["first.weight", ""], model.first.weight.detach())
    assert torch.equal(source.extra["ema"]["first.weight"], other.first.weight)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"w": torch.ones(2)}, "b": {"w": torch.ones(2)}}, "which of 'a', 'b' is the model"),
        ({"values": 3}, "no tensor in it"),
        (
            {"model": {"w": torch.ones(1)}, "a": {"param_groups": [{"params": ["w"]}]}}
            | {"b": {"param_groups": [{"params": ["w"]}]}},
            "several optimizers, at 'a', 'b'",
        ),
        (
            {"model": {"w": torch.ones(1)}, "o": {"param_groups": [{"params": [0], "lr": 1.0}]}},
            "numbers its parameters",
        ),
        (
            {"model": {"w": torch.ones(1)}, "o": {"param_groups": [{"params": ["x"], "lr": 1.0}]}},
            "updates 'x', but no model",
        ),
    ],
)
def test_what_cannot_be_told_is_refused_and_not_guessed(state, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        open_dcp(save(tmp_path / "c", state))


def test_a_folder_that_is_none_is_refused_in_words(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(CheckpointError, match="expected a folder written by"):
            open_dcp(folder)
