"""State of a plain or DDP run, loaded by torch's own calls: cut, and trained on to the bit."""

import io

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import shardwise
from models import Stack
from oracle import assert_same_bits, plain_loop
from ranks import on_ranks, run_sizes
from shardwise.errors import ConfigError, ShardError
from shardwise.tensor.plain_state import cut_plain_state
from trainer import full, logged, make_steps, mean_square

BEFORE, AFTER = 2, 2

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adam, one by one": lambda p: torch.optim.Adam(p, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd without state": lambda p: torch.optim.SGD(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "radam": lambda p: torch.optim.RAdam(p),
    "asgd": lambda p: torch.optim.ASGD(p, t0=1),
    "two groups": lambda p: torch.optim.AdamW([{"params": p[:3], "lr": 0.1}, {"params": p[3:]}]),
}
# (how, optimizers): every optimizer at one stage, and two at each of the others.
FEW = ("adamw", "sgd")
# By number of ranks. The fused kernel rounds the last elements of a slice in another way.
NAMES = {
    1: {*FEW, "adam, fused"},
    2: {*FEW},
    3: {*OPTIMIZERS} - {"adam, fused"},
}
WAYS = {
    "stage 3": tuple(OPTIMIZERS),
    "stage 3, flat": FEW,
    "stage 2": FEW,
    "stage 1": FEW,
    "stage 0": FEW,
    "fully_shard": FEW,
}


class Odd(Stack):
    """A stack that has a parameter without dims too."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return super().forward(x * self.scale)


def plain_run(num_ranks, factory):
    """Return what a plain run saves half way, and where it ends, state included."""
    torch.manual_seed(0)
    model = Odd()
    steps = make_steps(num_ranks, BEFORE + AFTER)
    truth = plain_loop(model, steps[:BEFORE], mean_square, factory)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": truth.optimizer.state_dict()}, file)
    truth = plain_loop(model, steps[BEFORE:], mean_square, lambda _: truth.optimizer)
    return file.getvalue(), everything(model, truth.optimizer)


def everything(model, optimizer):
    found = {}
    for name, param in model.named_parameters():
        found[name] = full(param)
        for key, value in optimizer.state[param].items():
            if isinstance(value, Tensor):
                found[f"{name} {key}"] = full(value)
    return found


def sharded(how):
    torch.manual_seed(9)
    model = Odd()
    if how == "fully_shard":
        model.scale = nn.Parameter(model.scale[None])  # FSDP2 takes no scalars
        for block in model.blocks:
            shardwise.fully_shard(block)
        return shardwise.fully_shard(model)
    layout = "flat" if "flat" in how else "rows"
    return shardwise.shard(model, stage=int(how.split()[1][0]), layout=layout)


def load(how, model, optimizer, saved):
    state = torch.load(io.BytesIO(saved))
    if how == "fully_shard":
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
        )

        state["model"]["scale"] = state["model"]["scale"][None]
        for of_param in state["optimizer"]["state"].values():
            for key, value in of_param.items():
                if key != "step" and isinstance(value, Tensor) and not value.dim():
                    of_param[key] = value[None]
        set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
    else:
        model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def check_cut_values(optimizer, saved):
    cut_plain_state(optimizer)
    state = torch.load(io.BytesIO(saved))["optimizer"]["state"]
    params = optimizer.param_groups[0]["params"]
    for number, param in enumerate(params):
        for key, value in optimizer.state[param].items():
            expected = state[number][key]
            assert type(value) is Tensor if key == "step" else isinstance(value, DTensor)
            assert torch.equal(full(value), expected.view(value.shape)), (number, key)


def go_on(rank, world_size, runs):
    for how, names in WAYS.items():
        for name in names:
            if how not in ("stage 3", "stage 0", "fully_shard") and world_size != 2:
                continue
            if name not in NAMES[world_size]:
                continue
            saved, expected = runs[name]
            model = sharded(how)
            optimizer = OPTIMIZERS[name](list(model.parameters()))
            load(how, model, optimizer, saved)
            if how == "fully_shard" and world_size > 2:  # it sums in another order than the loop
                check_cut_values(optimizer, saved)
                continue
            for step in make_steps(world_size, BEFORE + AFTER)[BEFORE:]:
                mean_square(model, step[0][rank]).backward()
                optimizer.step()
                optimizer.zero_grad()
            actual = everything(model, optimizer)
            if how == "fully_shard":
                actual = {k: v.view(expected[k].shape) for k, v in actual.items()}
            try:
                assert_same_bits(actual, expected)
            except AssertionError as error:
                raise AssertionError(f"{how}, {name}: {error}") from error
            for param in model.parameters():
                for key, value in optimizer.state[param].items():
                    if isinstance(value, Tensor) and key not in ("step", "eta", "mu", "mu_product"):
                        assert type(value).__name__ in ("ShardTensor", "DTensor"), (how, key)
                        local, ours = value.to_local(), param.to_local()
                        assert local.shape == ours.shape
                        assert local.untyped_storage().nbytes() <= max(ours.nbytes, 4), (how, key)


def test_a_plain_runs_state_is_cut_and_the_run_goes_on_to_the_bit():
    sizes = (1, 2, 3)
    runs = {n: ({name: plain_run(n, OPTIMIZERS[name]) for name in NAMES[n]},) for n in sizes}
    run_sizes(go_on, runs)


@on_ranks(2)
def test_state_of_another_shape_is_refused_with_the_parameters_name():
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    theirs = torch.optim.AdamW(other.parameters())
    other(torch.ones(1, 4)).sum().backward()
    theirs.step()
    model = shardwise.shard(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    before = [full(p) for p in model.parameters()]
    optimizer.load_state_dict(theirs.state_dict())
    with pytest.raises(ConfigError, match=r"'exp_avg' of '1.weight' has shape \(2, 5\).*\(3, 5\)"):
        optimizer.step()
    assert all(torch.equal(a, full(p)) for a, p in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_a_save_right_after_such_a_load_is_cut_too(tmp_path):
    saved, _ = plain_run(2, OPTIMIZERS["adamw"])
    folder = tmp_path / "saved"
    model = sharded("stage 3")
    optimizer = OPTIMIZERS["adamw"](list(model.parameters()))
    load("stage 3", model, optimizer, saved)
    shardwise.save(folder, model, optimizer)
    again = sharded("stage 1")
    other = OPTIMIZERS["adamw"](list(again.parameters()))
    shardwise.load(folder, again, other)
    assert_same_bits(everything(again, other), everything(model, optimizer))
    assert all(hasattr(s["exp_avg"], "to_local") for s in other.state.values())


@on_ranks(1, 3)
def test_torchs_full_state_dicts_are_whole_plain_tensors(rank):
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    for how in ("stage 3", "stage 3, flat", "stage 0", "fully_shard"):
        model = sharded(how)
        optimizer = torch.optim.AdamW(model.parameters())
        mean_square(model, torch.ones(2, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected = everything(model, optimizer)
        for offload in (False, True):
            options = StateDictOptions(full_state_dict=True, cpu_offload=offload)
            weights = get_model_state_dict(model, options=options)
            state = get_optimizer_state_dict(model, optimizer, options=options)
            if offload and rank:
                assert not weights
                continue
            for name in dict(model.named_parameters()):
                assert type(weights[name]) is Tensor
                assert torch.equal(weights[name], expected[name]), (how, name)
                for key, value in state["state"][name].items():
                    assert type(value) is Tensor
                    assert torch.equal(value, expected[f"{name} {key}"]), (how, name, key)
            torch.save({"model": weights, "optimizer": state}, io.BytesIO())


@on_ranks(2)
def test_what_cannot_be_saved_from_slices_says_what_to_call(rank, tmp_path):
    from safetensors.torch import save_file

    folder, model = str(tmp_path), sharded("stage 3")
    for save in (
        lambda: save_file(model.state_dict(), f"{folder}/x"),
        lambda: torch.save(model, io.BytesIO()),
        lambda: torch.save(model.state_dict(), io.BytesIO()),
    ):
        with pytest.raises(RuntimeError, match=r"with shardwise\.gathered\(model\)"):
            save()
    with pytest.raises(ShardError, match="full_tensor"):
        model.head.weight.redistribute(placements=[torch.distributed.tensor.Shard(1)])
    with shardwise.gathered(model):
        save_file(model.state_dict(), f"{folder}/{rank}.safetensors")
        torch.save(model.state_dict(), io.BytesIO())


@on_ranks(1, 3)
def test_parameters_in_16_bits_that_are_stepped_without_masters_are_named(rank):
    """Step parameters in bfloat16, alone and under fp32 masters, and look at rank 0's log."""
    keeps = shardwise.Precision(torch.bfloat16)
    for make, is_warned in (
        (lambda: shardwise.shard(nn.LayerNorm(8).bfloat16(), precision=keeps), True),
        (lambda: shardwise.fully_shard(nn.LayerNorm(8).bfloat16()), True),
        (lambda: shardwise.shard(nn.LayerNorm(8), precision="bf16"), False),
    ):
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with logged() as said:
            for _ in range(2):
                x = torch.linspace(-1, 1, 8, dtype=torch.bfloat16)[None]
                model(x).square().sum().backward()
                optimizer.step()
        wanted = "SGD steps parameters in 16 bits without fp32 masters: 'weight', 'bias'"
        found = [text for text in said if wanted in text]
        assert len(found) == (is_warned and rank == 0), said
