"""Norms and reductions of sharded tensors: complete before they are used, and one tensor after."""

import copy
import io
import math
import pickle
import warnings

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ranks import on_ranks
from roundings import assert_rounded_alike
from shardwise import accumulate, shard
from shardwise.debug import stats
from shardwise.errors import ShardError, StateError
from shardwise.parallel import clip_grad_norm_
from shardwise.tensor.totals import LazyNorm

WAYS = ((0, "rows"), (1, "rows"), (3, "rows"), (3, "flat"), (3, "matrices"))
SEVEN = torch.tensor(7.0)


def written_and_read(write):
    """Return a function that writes a norm and reads it by all names that it has."""

    def run(t):
        norm = t.norm()
        view, alias, detached = norm.view(1), norm, norm.detach()
        write(norm)
        assert float(view) == float(alias) == float(detached) == float(norm.data)
        return norm

    return run


def _of_list(write):
    def run(t):
        norms = torch._foreach_norm([t, t * 2])
        write(norms)
        return torch.stack(norms).sum() + norms[0]

    return run


def _by_view(write):
    def run(t):
        norm = t.norm()
        write(norm)
        return norm

    return run


def _of_stack(write):
    def run(t):
        first, second = t.norm(), (t * 2).norm()
        stacked = torch.stack([first, second])
        write(stacked)
        return stacked.norm() + 10 * first

    return run


WRITES = {
    "mul_": written_and_read(lambda n: n.mul_(2.0)),
    "clamp_": written_and_read(lambda n: n.clamp_(max=0.5)),
    "fill_": written_and_read(lambda n: n.fill_(7.0)),
    "copy_": written_and_read(lambda n: n.copy_(SEVEN)),
    "setitem": written_and_read(lambda n: n.__setitem__(..., 7.0)),
    "iadd": written_and_read(lambda n: n.__iadd__(1)),
    "itruediv": written_and_read(lambda n: n.__itruediv__(2)),
    "out": written_and_read(lambda n: torch.add(n, 1.0, out=n)),
    "out of plain": written_and_read(lambda n: torch.add(SEVEN, 1.0, out=n)),
    "lerp_": written_and_read(lambda n: n.lerp_(SEVEN, 0.25)),
    "copysign_": written_and_read(lambda n: n.copysign_(-SEVEN)),
    "zero_": written_and_read(lambda n: n.zero_()),
    "masked_fill_": written_and_read(lambda n: n.masked_fill_(n > 0, 3.0)),
    "ATen": written_and_read(lambda n: torch.ops.aten.mul_.Tensor(n, SEVEN)),
    "relu in place": written_and_read(lambda n: F.relu_(n.neg_())),
    "data": _by_view(lambda n: n.data.mul_(2.0)),
    "detach": _by_view(lambda n: n.detach().mul_(2.0)),
    "view": _by_view(lambda n: n.view(1).mul_(2.0)),
    "reshape": _by_view(lambda n: n.reshape(1).mul_(2.0)),
    "None": _by_view(lambda n: n[None].mul_(2.0)),
    "unsqueeze": _by_view(lambda n: n.unsqueeze(0)[0].fill_(7.0)),
    "expand": _by_view(lambda n: n.expand(3)[1].fill_(7.0)),
    "numpy": _by_view(lambda n: n.numpy().__setitem__(..., 7.0)),
    "set data": _by_view(lambda n: setattr(n, "data", SEVEN.clone())),
    "foreach mul_": _of_list(lambda ns: torch._foreach_mul_(ns, 2.0)),
    "foreach div_": _of_list(lambda ns: torch._foreach_div_(ns, [2.0, 3.0])),
    "foreach clamp_min_": _of_list(lambda ns: torch._foreach_clamp_min_(ns, 100.0)),
    "foreach maximum_": _of_list(lambda ns: torch._foreach_maximum_(ns, 100.0)),
    "foreach add_": _of_list(lambda ns: torch._foreach_add_(ns, ns, alpha=2.0)),
    "foreach copy_": _of_list(lambda ns: torch._foreach_copy_(ns, [SEVEN, SEVEN])),
    "foreach reciprocal_": _of_list(lambda ns: torch._foreach_reciprocal_(ns)),
    "foreach zero_": _of_list(lambda ns: torch._foreach_zero_(ns)),
    "one of a list": _of_list(lambda ns: ns[0].mul_(3.0)),
    "stack mul_": _of_stack(lambda s: s.mul_(2.0)),
    "stack element": _of_stack(lambda s: s[0].fill_(0.0)),
    "stack setitem": _of_stack(lambda s: s.__setitem__(0, 0.0)),
    "stack unbind": _of_stack(lambda s: s.unbind()[1].mul_(3.0)),
    "stack slice": _of_stack(lambda s: s[1:].mul_(3.0)),
    "stack flip": _of_stack(lambda s: s.flip(0).mul_(0)),
}

# Each reads a norm, most in a way that torch does not ask a subclass about.
READS = {
    "float": float,
    "item": lambda n: n.item(),
    "int": int,
    "bool": lambda n: bool(n > 1.0) + 1.0,
    "format": lambda n: float(f"{n:.4f}"),
    "repr": lambda n: float(repr(n)[7:-1]),
    "tolist": lambda n: n.tolist(),
    "numpy": lambda n: float(n.numpy()),
    "numpy array": lambda n: float(numpy.array([n, n]).sum()),
    "tensor": lambda n: _copied(torch.tensor, n),
    "tensor of list": lambda n: torch.tensor([n, n]).sum(),
    "as_tensor": torch.as_tensor,
    "Tensor": torch.Tensor,
    "new_tensor": lambda n: _copied(torch.ones(2).new_tensor, n),
    "full": lambda n: torch.full((2,), n).sum(),
    "full_like": lambda n: torch.full_like(torch.ones(2), n).sum(),
    "alpha": lambda n: torch.add(torch.ones(2), torch.ones(2), alpha=n).sum(),
    "value": lambda n: torch.addcmul(torch.ones(2), torch.ones(2), torch.ones(2), value=n).sum(),
    "foreach alpha": lambda n: torch._foreach_add([torch.ones(2)], [torch.ones(2)], alpha=n)[0][0],
    "leaky_relu": lambda n: F.leaky_relu(-torch.ones(2), n).sum(),
    "as_subclass": lambda n: n.as_subclass(Tensor),
    "deepcopy": copy.deepcopy,
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "save": lambda n: torch.load(io.BytesIO(_saved(n))),
    "dlpack": torch.from_dlpack,
    "dtype": lambda n: n.to(torch.float64),
    "setitem of plain": lambda n: _assigned(n),
    "parameter": lambda n: nn.Parameter(n) * 2,
}


def _copied(function, value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises clone()
        return function(value)


def _saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _assigned(value):
    plain = torch.zeros(2)
    plain[1] = value
    return plain.sum()


def each_way(ways=WAYS):
    """Yield a name, a whole tensor and the same one, cut: a parameter, its gradient, a state."""
    for stage, layout in ways:
        torch.manual_seed(0)
        model = nn.ParameterDict({"odd": torch.randn(9, 7), "last": torch.randn(1)})
        whole = [p.detach().clone() for p in model.parameters()]
        shard(nn.Sequential(model), stage=stage, layout=layout)
        for full, param in zip(whole, model.parameters(), strict=True):
            param.grad = full * 3
            label = f"stage {stage}, {layout}, {tuple(full.shape)}"
            yield f"{label}, parameter", full, param
            yield f"{label}, gradient", full * 3, param.grad
            yield f"{label}, state", full * 3, param.grad.clone()


@on_ranks(1, 3)
def test_what_is_written_into_a_norm_is_read_from_it_by_all_its_names():
    with torch.no_grad():
        for label, full, tensor in each_way(WAYS[2:]):
            if "parameter" not in label:
                continue
            for name, write in WRITES.items():
                expected, found = float(write(full)), float(write(tensor))
                assert_rounded_alike(found, expected, 400, f"{name}, {label}")


@on_ranks(2)
def test_every_way_to_read_a_norm_gets_the_whole_norm():
    with torch.no_grad():
        for label, full, tensor in each_way(WAYS[2:4]):
            if "parameter" not in label or "(9, 7)" not in label:
                continue
            for name, read in READS.items():
                expected, found = float(read(full.norm())), float(read(tensor.norm()))
                assert_rounded_alike(found, expected, 400, f"{name}, {label}")
            norm = tensor.norm()
            tensor.add_(tensor, alpha=norm)
            assert_rounded_alike(tensor.full_tensor(), full * (1 + full.norm()), 400, label)


@on_ranks(2)
def test_a_norm_is_reduced_once_and_only_when_a_value_is_read():
    model = shard(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 5)))
    for param in model.parameters():
        param.grad = torch.ones(param.shape)

    def num_sent():
        return stats(model).num_collectives.get("shard.scalars", 0)

    before = num_sent()
    norm = model[0].weight.grad.norm()
    stacked = torch.stack([norm, model[1].weight.grad.norm()])
    assert isinstance(stacked, LazyNorm) and norm.shape == () and stacked.dtype == torch.float32
    assert {norm: 1}[norm] == 1 and len(stacked) == 2 and not norm.requires_grad
    assert num_sent() == before
    assert float(norm) == float(norm * 1) == norm.item() and norm.mul_(2) is norm
    assert num_sent() == before + 1
    stacked.add_(1.0)
    assert stacked.tolist() == (stacked * 1).tolist()
    assert num_sent() == before + 2
    again = torch.stack([norm, model[1].weight.grad.norm()])
    assert_rounded_alike(again.norm().item(), math.sqrt(4 * 63 + 45), 200, "a written norm in it")
    assert num_sent() == before + 3
    for foreach in (True, False):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
    assert num_sent() == before + 5


ORDERS = (-3, -2.0, -1, -0.5, 0, 0.5, 1, 2, 3.0, math.inf, -math.inf)
NORMS = {
    "norm": lambda t, order: t.norm(order),
    "vector_norm": torch.linalg.vector_norm,
    "foreach": lambda t, order: torch._foreach_norm([t, t], order)[1],
    "total": lambda t, order: torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm([t, t * 2], order)), order
    ),
    "get_total_norm": lambda t, order: nn.utils.get_total_norm([t, t], order),
}


@on_ranks(1, 3)
def test_norms_of_every_order_are_whole_where_a_rank_has_nothing():
    with torch.no_grad():
        for label, full, tensor in each_way():
            if "state" in label:
                continue
            for order in ORDERS:
                for name, norm in NORMS.items():
                    what = f"{name} of order {order}, {label}"
                    expected, found = norm(full, order), norm(tensor, order)
                    assert found.dtype == expected.dtype, what
                    assert_rounded_alike(float(found), float(expected), 2000, what)
            for order in (None, "fro"):
                assert_rounded_alike(float(tensor.norm(order)), float(full.norm()), 400, label)


@on_ranks(2)
def test_clipping_by_a_norm_of_negative_order_counts_no_rank_without_elements():
    for order in (-2.0, -math.inf, 0.5):
        models = [nn.Linear(5, 1), nn.Linear(5, 1)]
        shard(models[1])
        for model in models:
            for param in model.parameters():
                param.grad = torch.arange(1, param.numel() + 1.0).view(param.shape)
        expected = nn.utils.clip_grad_norm_(models[0].parameters(), 0.01, order)
        found = clip_grad_norm_(models[1].parameters(), 0.01, order)
        assert_rounded_alike(float(found), float(expected), 200, f"order {order}")


@on_ranks(2)
def test_a_norm_that_torch_refuses_for_an_empty_tensor_is_refused():
    model = nn.ParameterDict({"nothing": torch.zeros(0, 2)})
    nothing = shard(nn.Sequential(model))[0]["nothing"]
    with torch.no_grad():
        for order in (-1, math.inf, -math.inf):
            with pytest.raises(RuntimeError, match="empty tensor"):
                nothing.norm(order)
        assert [float(nothing.norm(order)) for order in (0, 0.5, 2)] == [0.0, 0.0, 0.0]
        for reduce in (torch.amax, torch.min):
            with pytest.raises((RuntimeError, IndexError)):
                reduce(nothing)


REDUCED = ["sum", "mean", "max", "amax", "min", "amin", "all", "any", "count_nonzero"]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool"]


@on_ranks(1, 3)
def test_reductions_of_every_dtype_are_whole_where_a_rank_has_nothing():
    with torch.no_grad():
        for label, full, tensor in each_way():
            if "state" not in label:
                continue
            for name in DTYPES:
                dtype = getattr(torch, name)
                plain, cut = (full * 10).abs().to(dtype), (tensor * 10).abs().to(dtype)
                for reduce in REDUCED:
                    check_reduction(
                        getattr(torch, reduce), plain, cut, f"{reduce}, {name}, {label}"
                    )


def check_reduction(reduce, plain, cut, what):
    try:
        expected = reduce(plain)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            reduce(cut)
        return
    found = reduce(cut)
    assert type(found) is Tensor and found.dtype == expected.dtype, what
    if expected.dtype.is_floating_point and reduce in (torch.sum, torch.mean):
        at = torch.finfo(expected.dtype).eps * 8
        torch.testing.assert_close(found, expected, rtol=at, atol=0, msg=what)
    else:
        assert torch.equal(found, expected), what


@on_ranks(1, 3)
def test_extremes_of_large_integers_and_nans_are_exact():
    with torch.no_grad():
        for label, full, tensor in each_way():
            if "state" not in label:
                continue
            for sign in (1, -1):
                ends = torch.iinfo(torch.int64)
                plain, cut = full.mul(9).long(), tensor.mul(9).long()
                for start in ((1 << 60) + 1, ends.max - 100, ends.min + 100):
                    moved = [(t * 3 * sign) + start for t in (plain, cut)]
                    for reduce in (torch.amax, torch.amin, torch.max, torch.min, torch.sum):
                        expected, found = map(reduce, moved)
                        assert torch.equal(found, expected), f"{reduce.__name__}, {label}"
            broken = full.clone().view(-1)
            broken[0] = math.nan
            tensor.copy_(broken.view(full.shape))
            for reduce in (torch.amax, torch.amin, torch.sum, torch.mean, torch.norm):
                assert math.isnan(float(reduce(tensor))), label
            assert math.isnan(float(tensor.norm(-math.inf))), label


PARTIAL_USES = {
    "data": lambda g: g.data.mul_(2.0),
    "T": lambda g: g.T,
    "detach": lambda g: g.detach(),
    "tensor": lambda g: _copied(torch.tensor, g),
    "as_subclass": lambda g: g.as_subclass(Tensor),
    "out": lambda g: torch.add(torch.ones(2, 4), 1.0, out=g),
    "copy_": lambda g: g.copy_(torch.ones(2, 4)),
    "set data": lambda g: setattr(g, "data", torch.ones(2, 4)),
    "foreach": lambda g: torch._foreach_mul_([g], 2.0),
    "keyword": lambda g: torch.add(torch.ones(2, 4), other=g),
    "setitem": lambda g: g.__setitem__(0, 1.0),
    "numpy": lambda g: g.numpy(),
    "norm": lambda g: g.norm(),
    "deepcopy": copy.deepcopy,
}


@on_ranks(1, 2)
def test_a_gradient_that_is_not_reduced_is_neither_read_nor_written():
    for stage in (0, 1):
        model = shard(nn.Linear(4, 2), stage=stage)
        with accumulate(model, last=False):
            model(torch.ones(1, 4)).sum().backward()
        grad = model.weight.grad
        assert grad.shape == (2, 4) and grad.dtype == torch.float32 and grad.grad_fn is None
        assert "not reduced yet" in repr(grad) and not grad.requires_grad
        for name, use in PARTIAL_USES.items():
            with pytest.raises(StateError, match=r"not reduced yet|gradient"):
                use(grad)
                raise AssertionError(f"{name}, stage {stage}")
        model.zero_grad(set_to_none=False)


@on_ranks(1, 3)
def test_a_product_of_all_elements_is_over_all_ranks():
    model = shard(nn.Linear(4, 2), stage=3)
    with torch.no_grad():
        weight = torch.arange(1.0, 9.0).view(2, 4)
        model.weight.copy_(weight)
        torch.testing.assert_close(model.weight.prod(), weight.prod())
        assert (model.weight > 0).prod() == 1


@on_ranks(2)
def test_a_norm_over_sharded_and_plain_gradients_warns():
    model, plain = shard(nn.Linear(4, 2), stage=3), nn.Parameter(torch.ones(3))
    for param in (*model.parameters(), plain):
        param.grad = torch.ones(param.shape)
    with pytest.warns(UserWarning, match=r"parallel\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_([*model.parameters(), plain], 1.0)


@on_ranks(1, 2)
def test_a_draw_with_sharded_probabilities_draws_with_whole_ones():
    with torch.no_grad():
        for label, full, tensor in each_way():
            plain, sure = torch.empty(full.shape), (full > 0).float()
            plain.bernoulli_((tensor > 0).float())
            assert torch.equal(plain, sure), label
            if "state" in label:
                tensor.bernoulli_((tensor > 0).float())
                assert torch.equal(tensor.full_tensor(), sure), label


@on_ranks(2)
def test_a_sharded_tensor_is_not_reshaped_by_out_or_in_place():
    with torch.no_grad():
        for label, full, tensor in each_way():
            if "state" not in label or "(9, 7)" not in label:
                continue
            writes = (
                lambda t: torch.sum(torch.ones(3), dim=0, out=t),
                lambda t: torch.neg(torch.ones(1), out=t),
                lambda t: torch.exp(torch.ones(7), out=t),
                lambda t: torch.cumsum(torch.ones(3), 0, out=t),
                lambda t: t.t_(),
                lambda t: t.unsqueeze_(0),
                lambda t: t.resize_(3),
            )
            for write in writes:
                with pytest.raises(ShardError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's, of an output that it resizes
                    write(tensor)
                assert torch.equal(tensor.full_tensor(), full), label
            torch.add(tensor, full, out=tensor)
            assert torch.equal(tensor.full_tensor(), full * 2), label
