"""Norms and reductions of sharded tensors: of every order, of nothing, and written afterwards."""

import copy

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardwise import shard
from test_shard_tensor import LAYOUTS

ORDERS = (float("-inf"), -2, -1, -0.5, 0, 0.5, 1, 2, 3, float("inf"), None)
REDUCTIONS = ("sum", "mean", "prod", "max", "min", "amax", "amin", "all", "any", "count_nonzero")


def pair(layout, stage=3):
    """Return plain and sharded parameters; on two and more ranks some slices are empty."""
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 1))
    sharded = shard(copy.deepcopy(plain), stage=stage, layout=layout)
    return list(plain.parameters()), list(sharded.parameters())


def mul(n):
    n.mul_(2.0)


def assign(n):
    n[...] = 7.0


def into_out(n):
    torch.add(n, 1.0, out=n)


def foreach(n):
    torch._foreach_mul_([n], 3.0)


def through_views(n):
    n.view(1).add_(1.0)
    n[None][0] = n * 2
    n.detach().mul_(2.0)
    n.data.add_(0.5)


WRITES = (mul, assign, into_out, foreach, through_views)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 2)
def test_a_write_to_a_norm_is_kept_and_later_totals_see_it(layout):
    for stage in (0, 1, 3):
        plain, sharded = pair(layout, stage)
        for write in WRITES:
            results = []
            for params in (plain, sharded):
                with torch.no_grad():
                    norms = torch._foreach_norm(params)
                    before = torch.stack(norms)
                    write(norms[0])
                    after = torch.stack(norms)
                    total = torch.linalg.vector_norm(after)
                    stacked = torch.stack(torch._foreach_norm(params))
                    stacked[1] = 0.0
                    results.append([norms[0] + 0, before + 0, after + 0, total + 0, stacked.norm()])
            torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 3)
def test_norms_of_every_order_count_no_element_of_an_empty_slice(layout):
    plain, sharded = pair(layout)
    with torch.no_grad():
        for expected, param in zip(plain, sharded, strict=True):
            for order in ORDERS:
                want = expected.norm(order) if order is not None else expected.norm()
                got = param.norm(order) if order is not None else param.norm()
                torch.testing.assert_close(got + 0, want, rtol=1e-6, atol=0, msg=str(order))


@pytest.mark.parametrize("layout", LAYOUTS)
@on_ranks(1, 3)
def test_reductions_of_any_dtype_are_exact_where_a_rank_has_nothing(layout):
    plain, sharded = pair(layout)
    big = 2**53 + 1  # no double has this value
    with torch.no_grad():
        for expected, param in zip(plain, sharded, strict=True):
            values = {
                "float": (expected.detach(), param.detach()),
                "int": ((expected * 0).long() - big, (param * 0).to(torch.int64) - big),
                "bool": (expected > 0, param > 0),
                "nan": (expected * float("nan"), param * float("nan")),
            }
            for kind, (want, got) in values.items():
                for name in REDUCTIONS:
                    if (kind, name) in {("int", "mean"), ("bool", "mean"), ("int", "prod")}:
                        continue
                    left, right = getattr(got, name)(), getattr(want, name)()
                    torch.testing.assert_close(
                        left + 0 if left.dtype != torch.bool else left,
                        right,
                        rtol=0 if kind == "int" else 1e-5,
                        atol=0,
                        equal_nan=True,
                        msg=f"{kind} {name} {tuple(want.shape)}",
                    )


@on_ranks(2)
def test_a_norm_over_sharded_and_plain_gradients_warns():
    _, sharded = pair("rows")
    plain = nn.Parameter(torch.ones(3))
    for param in (*sharded, plain):
        param.grad = torch.ones(param.shape)
    with pytest.warns(UserWarning, match=r"parallel\.clip_grad_norm_"):
        nn.utils.clip_grad_norm_([*sharded, plain], 1.0)
