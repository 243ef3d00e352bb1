"""Assignments to ``p.data``, and writes through views of it: as in one process, or refused."""

import copy

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardwise import fully_shard, gathered, shard
from shardwise.errors import ShardError, StateError

HOW = {
    **{
        f"stage {stage} {layout}": {"stage": stage, "layout": layout}
        for stage in (0, 1, 3)
        for layout in ("rows", "flat", "matrices")
    },
    "stage 3 offload": {"stage": 3, "offload": "cpu"},
}


def pair(how):
    """Return the same model twice, plain and sharded; the third layer's bias has one element."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 1))
    return plain, shard(copy.deepcopy(plain), **HOW[how])


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.detach()


def assert_same(plain, sharded):
    for (name, expected), param in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(whole(param), expected.detach(), rtol=0, atol=0, msg=name)


def swap_averaged(model):
    """Evaluate with other weights and go back, in the form that most scripts have."""
    shadow = {name: torch.full(p.shape, 0.5) for name, p in model.named_parameters()}
    backup = {}
    for name, p in model.named_parameters():
        backup[name] = p.data
        p.data = shadow[name]
    seen = model(torch.ones(2, 5)).sum().item()
    for name, p in model.named_parameters():
        p.data = backup[name]
    return seen


def swap_states(model):
    """Keep `state_dict()`, which is over the parameters' memory, and assign other values."""
    kept = model.state_dict()
    for p in model.parameters():
        p.data = torch.zeros_like(p.data)
    return [whole(value).clone() for value in kept.values()]


def swap_two(model):
    first, second = model[0].weight, model[2].weight
    first.data, second.data = second.data, first.data


def swap_in_turn(model):
    """Two swaps one after the other, with an alias from before the first."""
    old = model[0].weight.detach()
    model[0].weight.data = model[2].weight.data.clone()
    newer = model[0].weight.data
    model[0].weight.data = torch.zeros(5, 5)
    return [whole(old).clone(), whole(newer).clone()]


def write_alias(model):
    """Write an old alias, which must not change the parameter any more."""
    alias = model[0].weight.data
    model[0].weight.data = torch.ones(5, 5)
    alias.mul_(3)
    return [whole(alias).clone()]


SWAPS = (swap_averaged, swap_states, swap_two, swap_in_turn, write_alias)


@pytest.mark.parametrize("how", HOW)
@on_ranks(1, 2)
def test_an_assignment_keeps_what_tensors_over_the_old_data_hold(how):
    for swap in SWAPS:
        plain, sharded = pair(how)
        expected, actual = swap(plain), swap(sharded)
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=swap.__name__)
        assert_same(plain, sharded)


@pytest.mark.parametrize("how", ["stage 0 rows", "stage 1 rows", "stage 3 flat"])
@on_ranks(2)
def test_memory_that_an_assignment_would_share_is_refused_by_the_next_pass(how):
    _, model = pair(how)
    x, first, second = torch.ones(2, 5), model[0].weight, model[2].weight
    second.data = first.data
    with pytest.raises(ShardError, match=r"'2\.weight'.*assigned from '0\.weight'"):
        model(x)
    second.data = first.data.clone()
    model(x)
    value = torch.ones(5, 5)
    first.data = value
    model(x)
    first.data = value
    value[0].mul_(2)
    with pytest.raises(ShardError, match="written since"):
        model(x)
    with pytest.raises(ShardError, match="was to become"):
        first.data = torch.ones(3)
    assert torch.equal(first.full_tensor(), torch.ones(5, 5))


WRITES = {
    "index": lambda p: p.data[1].zero_(),
    "assign": lambda p: p.detach()[:, 2:].__setitem__(slice(0, 2), 7.0),
    "view": lambda p: p.data.view(-1)[3:9].fill_(2.0),
    "transposed": lambda p: p.data.t()[1].mul_(3.0),
    "chunk": lambda p: p.detach().chunk(2)[1].add_(1.0),
    "out": lambda p: torch.add(p.data[0], 1.0, out=p.data[2]),
    "init": lambda p: nn.init.zeros_(p.data[:4]),
    "draw": lambda p: nn.init.normal_(p.data[2:]),
    "copy": lambda p: p.data[1:3].copy_(torch.full((2, 5), 4.0)),
    "list": lambda p: torch._foreach_mul_([p.data[0], p.data[4]], 2.0),
}


@pytest.mark.parametrize("how", ["stage 0 rows", *[h for h in HOW if "stage 3" in h]])
@on_ranks(1, 3)
def test_a_write_through_a_view_of_data_changes_the_parameter(how):
    plain, sharded = pair(how)
    for name, write in WRITES.items():
        for grad_mode in (True, False):
            for model in (plain, sharded):
                torch.manual_seed(3)
                with torch.set_grad_enabled(grad_mode):
                    write(model[0].weight)
            torch.testing.assert_close(
                whole(sharded[0].weight), plain[0].weight.detach(), rtol=0, atol=0, msg=name
            )
    torch.testing.assert_close(sharded(torch.ones(2, 5)), plain(torch.ones(2, 5)))


@on_ranks(2)
def test_a_view_has_the_present_values_after_a_step_and_the_old_ones_after_an_assignment():
    plain, sharded = pair("stage 3 rows")
    for model in (plain, sharded):
        view = model[0].weight.data[1]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        assert torch.equal(view + 0, whole(model[0].weight)[1])
        before = whole(view).clone() if model is plain else view.clone()
        model[0].weight.data = torch.zeros(5, 5)
        assert torch.equal(view + 0, before)
        view.fill_(9)
        assert not whole(model[0].weight).any()


@on_ranks(2)
def test_an_array_of_a_sharded_parameter_cannot_be_written():
    _, model = pair("stage 3 rows")
    with gathered(model):
        expected = model[0].weight.detach().clone()
    for array in (model[0].weight.detach().numpy(), model[0].weight.data[:3].numpy()):
        assert (array == expected[: len(array)].numpy()).all()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


@on_ranks(2)
def test_a_write_through_a_view_of_the_graphs_parameter_is_refused_by_the_next_pass():
    _, model = pair("stage 3 rows")
    x = torch.ones(2, 5)
    model(x).sum().backward()
    model[0].weight[0].detach().zero_()
    with pytest.raises(ShardError, match=r"'0\.weight' was written through a tensor"):
        model(x)
    model(x).sum().backward()


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(1, 2)
def test_an_assignment_under_a_view_of_a_view_keeps_its_values_or_is_refused(world_size, stage):
    torch.manual_seed(1)
    model = shard(nn.Sequential(nn.Linear(5, 5)), stage=stage)
    param = model[0].weight
    before = param.full_tensor().clone()
    for make in (
        lambda: param.data.view(-1)[3:9],
        lambda: param.detach().view(-1)[3:9],
        lambda: [param.data, param.data.view(-1)[3:9]][1],
    ):
        view = make()
        if stage:  # views are of gathered copies
            param.data = param.data * 0.5
            assert torch.equal(whole(view), before.view(-1)[3:9])
            param.data = before
            continue
        with pytest.raises(ShardError, match="made of another view"):
            param.data = param.data * 0.5
        assert torch.equal(param.full_tensor(), before)
        kept = view.clone()
        del view
        param.data = param.data * 0.5
        assert torch.equal(kept, before.view(-1)[3:9])
        param.data = before
    known = param.data.view(-1)
    param.data = param.data * 0.5
    assert torch.equal(whole(known), before.view(-1))


@on_ranks(1, 2)
def test_assignment_to_data_of_fully_shards_dtensor_raises_in_next_forward(rank, world_size):
    """torch's own fully_shard goes on with the old values, without a word."""
    layer = fully_shard(nn.Linear(4, 4, bias=False))
    x = torch.ones(1, 4)
    layer(x).sum().backward()
    old, new = layer.weight.full_tensor().clone(), layer.weight.detach() + 1
    layer.weight.data = new
    with pytest.raises(StateError, match=r"'weight': `p\.data = x` changes nothing in a DTensor"):
        layer(x)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.full_tensor(), old)
    with torch.no_grad():
        layer.weight.copy_(new)
    layer(x).sum().backward()
    assert torch.equal(layer.weight.full_tensor(), old + 1)
    layer.to(torch.float64)  # exchanges the parameters, and is no assignment
    layer(x.double()).sum().backward()
    assert torch.equal(layer.weight.full_tensor(), (old + 1).double())
