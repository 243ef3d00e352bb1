"""8-bit optimizers of other libraries on shards; skipped where these libraries are not installed.

Slices are multiples of the 256 elements of a block here, so that every block is the plain one's.
"""

import warnings

import pytest
import torch
from torch import nn

from ranks import on_ranks, run_ranks
from shardwise import load, save, shard
from shardwise.errors import CheckpointError, ShardError
from test_shard_tensor import LAYOUTS, STAGES


def bitsandbytes_adam(params):
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(list(params), lr=0.01)


def torchao_adam(params):
    from torchao.optim import AdamW8bit

    return AdamW8bit(params, lr=0.01)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 192), nn.Tanh(), nn.Linear(192, 64))


def train(model, optimizer):
    for step in range(3):
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()


def check_steps(rank, world_size, make):
    plain = make_model()
    train(plain, make(plain.parameters()))
    for stage in STAGES:
        for layout in LAYOUTS:
            model = shard(make_model(), stage=stage, layout=layout)
            optimizer = make(model.parameters())
            train(model, optimizer)
            assert any(
                value.dtype == torch.uint8 or type(value).__name__ != "Tensor"
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            )
            for name, value in plain.named_parameters():
                found = model.get_parameter(name).full_tensor()
                assert torch.equal(found, value), f"stage {stage}, {layout}: {name}"


@pytest.mark.parametrize("make", [bitsandbytes_adam, torchao_adam])
def test_8_bit_adams_make_the_plain_steps_where_slices_are_whole_blocks(make):
    pytest.importorskip(make.__name__.removesuffix("_adam"))
    for world_size in (1, 2):
        run_ranks(check_steps, world_size, make)


def check_saved(rank, world_size, folder, saves):
    model = shard(make_model(), stage=3)
    optimizer = bitsandbytes_adam(model.parameters())
    train(model, optimizer)
    if saves:
        save(folder, model, optimizer)
    values = [s["state1"].to_local().clone() for s in optimizer.state.values()]
    scales = [s["absmax1"].clone() for s in optimizer.state.values() if "absmax1" in s]
    try:
        load(folder, model, optimizer)
    except CheckpointError as error:
        return str(error)
    states = list(optimizer.state.values())
    assert all(torch.equal(s["state1"].to_local(), v) for s, v in zip(states, values, strict=True))
    kept = [s["absmax1"] for s in states if "absmax1" in s]
    assert scales and all(map(torch.equal, kept, scales))
    return ""


def test_8_bit_state_comes_back_on_as_many_ranks_and_is_refused_on_others(tmp_path):
    pytest.importorskip("bitsandbytes")
    assert run_ranks(check_saved, 2, tmp_path / "a", True) == ["", ""]
    for message in run_ranks(check_saved, 3, tmp_path / "a", False):
        assert "quantised in blocks of the slices that 2 ranks had at stage 3" in message


@on_ranks(1)
def test_a_compiled_step_over_shards_says_how_to_run_it_uncompiled():
    model = shard(nn.Linear(4, 4), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 4)).sum().backward()
    before = model.weight.full_tensor()
    warnings.simplefilter("ignore")  # what torch.compile imports is deprecated here and there
    with pytest.raises(Exception, match=r"torch.compile of SGD.step\(\) .*force_eager") as refused:
        torch.compile(optimizer.step)()
    assert ShardError.__name__ in str(refused.value)
    assert torch.equal(model.weight.full_tensor(), before)
    with torch.compiler.set_stance("force_eager"):
        torch.compile(optimizer.step)()
    assert not torch.equal(model.weight.full_tensor(), before)
