"""Encoded messages against `block_codes`, to the bit, on every rank.

Of gathers layers read what the encoding says. Of reductions each addend is encoded once, and summed
in rank order in float32.
"""

from functools import cache
from math import prod

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from block_codes import ODD_SHAPES, cuts_of, decoded, wire_bytes
from ranks import on_ranks
from shardwise import Precision, accumulate, describe, fully_shard, shard
from shardwise.check import gradients as check_gradients
from shardwise.codes import gather as gathering
from shardwise.codes import reduce as reducing
from shardwise.comm import coalesced, collectives
from shardwise.debug import stats
from shardwise.errors import ConfigError
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder
from shardwise.train.setup import shard_decoder

KINDS = ("int8", "fp8", "int4", "bf16")
BLOCK = 16


class Odd(nn.Module):
    """Shapes that no number of ranks divides: one row, none, several dims, one dim."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        for name, shape in ODD_SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.norm = nn.Parameter(torch.randn(19))
        self.seen = {}

    def forward(self, rank):
        self.seen = {n: p.detach().clone() for n, p in self.named_parameters(recurse=False)}
        total = torch.zeros(())
        for number, param in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * rank + number)
            weights = torch.randn(param.shape, generator=generator, dtype=param.dtype)
            total = total + (param * weights).float().sum()
        return total


def gradients(rank, dtype):
    """Return what one rank's gradients are, before anything is sent."""
    model = Odd().to(dtype)
    model(rank).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def encoded(grad, kind, cuts):
    """Return what arrives of a parameter or a gradient, in float32."""
    if grad.dim() < 2 or not grad.numel():
        return grad.float()
    if kind == "bf16":
        return grad.bfloat16().float()
    flat = decoded(grad.reshape(-1).float().numpy(), kind, BLOCK, cuts)
    return torch.from_numpy(np.ascontiguousarray(flat)).view(grad.shape)


@cache
def mean_of(ranks, kind, layout, dtype, num_shards):
    """Return the sum of what some ranks encode, in their order."""
    sums = {}
    for rank in ranks:
        grads = gradients(rank, dtype)
        cuts = cuts_of(layout, {n: tuple(g.shape) for n, g in grads.items()}, num_shards)
        for name, grad in grads.items():
            addend = encoded(grad, kind, cuts[name])
            sums[name] = sums[name] + addend if name in sums else addend
    return sums


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    (stage, layout, kind, dtype)
    for stage, layout, dtype in (
        *((0, "rows", FP32), (0, "flat", FP32), (1, "rows", FP32), (1, "flat", FP32)),
        *((2, "rows", BF16), (2, "flat", BF16), (3, "flat", BF16), (3, "rows", FP16)),
        *((3, "rows", FP32), (3, "matrices", FP32)),
    )
    for kind in KINDS
]


def record_exchanges(patch):
    """Send by NCCL's calls, on gloo; return the sizes that each all-to-all receives and sends."""
    patch.setattr(collectives, "_transport", lambda axis, device: coalesced)
    found = []
    exchange = dist.ProcessGroup.alltoall_base

    def record(group, into, out, *sizes):
        found.extend(sizes[:2])
        return exchange(group, into, out, *sizes)

    patch.setattr(dist.ProcessGroup, "alltoall_base", record)
    return found


@pytest.mark.parametrize(("num_ranks", "is_nccl"), [(1, False), (2, False), (3, False), (3, True)])
@on_ranks()
def test_layers_read_and_means_are_of_what_every_rank_encoded_to_the_bit(rank, num_ranks, is_nccl):
    """The shards themselves stay as they are, and so do tensors of one dim.

    pytorch/ao #3982, #3983: a crash where rows do not divide, or a rank has none.
    """
    start = {name: p.detach() for name, p in Odd().named_parameters()}
    with pytest.MonkeyPatch.context() as patch:
        exchanged = record_exchanges(patch) if is_nccl else []
        for codes in (gathering, reducing) if num_ranks > 2 else ():  # a few blocks at a time
            patch.setattr(codes, "CPU_CHUNK_NUMEL", 3 * BLOCK)
        # All over three ranks; of each kind and layout elsewhere.
        is_sampled = is_nccl or num_ranks < 3
        for stage, layout, kind, dtype in CASES[:: 3 if is_sampled else 1]:
            half, master = (None, None) if dtype is FP32 else (dtype, FP32)
            gathers = stage > 0 and kind != "bf16" and layout != "matrices"
            precision = Precision(
                half, master, reduce=f"{kind}-a2a", gather=kind if gathers else None, block=BLOCK
            )
            model = shard(Odd(), stage=stage, layout=layout, precision=precision)
            model(rank).backward()
            cuts = cuts_of(layout, {n: tuple(p.shape) for n, p in start.items()}, num_ranks)
            sums = mean_of(range(num_ranks), kind, layout, dtype, num_ranks)
            for name, param in model.named_parameters():
                what = stage, layout, kind, dtype, name
                assert torch.equal(param.full_tensor(), start[name]), what
                read = encoded(start[name], kind, cuts[name]) if gathers else start[name]
                assert torch.equal(model.seen[name], read.to(dtype)), what
                assert torch.equal(param.grad.full_tensor(), sums[name] / num_ranks), what
        assert bool(exchanged) == is_nccl
        for sizes in exchanged:
            assert [size == 0 for size in sizes] == [r == rank for r in range(num_ranks)]


@on_ranks(4)
def test_sums_over_replicas_are_encoded_once_more(rank, num_ranks):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stage, layout, kind in ((3, "rows", "int8"), (1, "flat", "fp8"), (0, "rows", "int8")):
        precision = Precision(reduce=f"{kind}-a2a", block=BLOCK)
        model = shard(Odd(), stage=stage, layout=layout, precision=precision, mesh=mesh)
        model(rank).backward()
        shapes = {n: tuple(p.shape) for n, p in Odd().named_parameters()}
        within = [mean_of(range(2 * r, 2 * r + 2), kind, layout, torch.float32, 2) for r in (0, 1)]
        for name, param in model.named_parameters():
            exact = sum(each[name] for each in within) / num_ranks
            error = (param.grad.full_tensor() - exact).abs().max() if exact.numel() else 0.0
            step = max(each[name].abs().max() for each in within) if exact.numel() else 0.0
            levels = 127 if kind == "int8" else 16  # half a step of the largest, of two addends
            assert error <= step / levels / num_ranks * 1.01, (stage, layout, kind, name)
            if len(shapes[name]) < 2:
                assert error == 0


@on_ranks(2)
def test_what_is_sent_are_codes_scales_and_little_more(rank, num_ranks):
    shapes = {n: tuple(p.shape) for n, p in Odd().named_parameters()}
    for kind in KINDS:
        precision = Precision(reduce=f"{kind}-a2a", block=BLOCK)
        model = shard(Odd(), stage=3, layout="matrices", precision=precision)
        model(rank).backward()
        owned = {
            n: p.grad.to_local().numel() == prod(s) and prod(s) > 0
            for (n, p), s in zip(model.named_parameters(), shapes.values(), strict=True)
        }
        sent = stats(model).sent_bytes["shard.reduce_scatter"]
        least = 0
        for name, shape in shapes.items():
            if len(shape) > 1 and not owned[name]:
                numel = prod(shape)
                least += 2 * numel if kind == "bf16" else wire_bytes(numel, kind, BLOCK)
        others = 19 * 4 + len(shapes) * 4 * num_ranks + 16 * (len(shapes) + 3) * num_ranks
        assert least <= sent <= least + others, (kind, sent, least)


@on_ranks(1, 3)
def test_fully_shard_encodes_its_reductions_alike(rank, num_ranks):
    for kind in KINDS:
        precision = Precision(reduce=f"{kind}-a2a", block=BLOCK)
        model = fully_shard(Odd(), mp_policy=precision)
        for _ in range(2):
            model(rank).backward()
        sums = mean_of(range(num_ranks), kind, "rows", torch.float32, num_ranks)
        for name, param in model.named_parameters():
            mean = sums[name] / num_ranks
            assert torch.equal(param.grad.full_tensor(), mean + mean), (kind, name)
        with pytest.raises(ConfigError, match=r"are encoded \(reduce="):
            model.set_custom_reduce_scatter(object())


@on_ranks(1, 3)
def test_encoded_reductions_go_with_offload_and_accumulation_and_hide_no_nan(rank, num_ranks):
    precision = Precision(reduce="int8-a2a", block=BLOCK)
    sums = mean_of(range(num_ranks), "int8", "rows", torch.float32, num_ranks)
    away = shard(Odd(), precision=precision, offload="cpu")
    away(rank).backward()
    for name, param in away.named_parameters():
        assert torch.equal(param.grad.full_tensor(), sums[name] / num_ranks), name
    once = shard(Odd(), stage=1, precision=precision)  # doubled first, and encoded once
    with accumulate(once, last=False):
        once(rank).backward()
    with accumulate(once, last=True):
        once(rank).backward()
    for name, param in once.named_parameters():
        assert torch.equal(param.grad.full_tensor(), 2 * sums[name] / num_ranks), name
    assert "; gradients sent as int8, blocks of 16" in str(describe(once))
    bad = shard(Odd(), precision=precision)
    (bad(rank) + torch.nan * bad.wide[0, 0] * (rank == num_ranks - 1)).backward()
    grad = dict(bad.named_parameters())["wide"].grad.full_tensor().flatten()
    assert grad[:BLOCK].isnan().all() and grad[BLOCK:].isfinite().all()
    with pytest.raises(ConfigError, match="choose a dtype as reduce= for the check"):
        check_gradients(
            lambda: nn.Linear(4, 4),
            torch.ones(num_ranks, 4),
            compose=lambda m: shard(m, precision=precision),
        )


def check_beside(exact, coded):
    """Check means over two ranks of addends that were each rounded to bf16 once, if matrices."""
    for name, mean in exact.items():
        error, largest = (coded[name] - mean).abs().max(), mean.abs().max()
        assert error <= 2.0**-8 * 2 * largest, name
        assert (error > 0) == (mean.dim() > 1), name


@on_ranks(4)
def test_encoded_reductions_go_beside_experts(rank, num_ranks):
    sizes = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "seq": 64, "experts": 4, "ep": 2}
    grads = []
    for reduce in (None, "bf16-a2a"):
        config = TrainConfig(**sizes, tp=2, reduce=reduce)
        torch.manual_seed(1)
        with torch.device("meta"):
            model = Decoder(config, 64)
        model = shard_decoder(config, config.axes.over(num_ranks), model)
        ids = torch.randint(64, (4, 64), generator=torch.Generator().manual_seed(rank // 2))
        model(ids, ids).backward()
        grads.append({n: p.grad.to_local() for n, p in model.named_parameters()})
    check_beside(*grads)


def test_a_format_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(
        ConfigError, match=r"precision\.reduce='int8-a2b': .*did you mean 'int8-a2a'"
    ):
        shard(nn.Linear(2, 2), precision=Precision(reduce="int8-a2b"))
