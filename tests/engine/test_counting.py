"""`counting()`: what torch sends of its own over a model's axes, to the byte.

The oracle is the size of what each collective is given, by the formula of its kind.
"""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pipelines
import shardwise
from ranks import on_ranks
from shardwise.config import Units
from shardwise.debug import counting
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.parallel.routing import Routing
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.shapes import llama_shape

WIDTH, HIDDEN, ROWS, TOKENS = 12, 24, 2, 6
STREAM = 4 * ROWS * TOKENS * WIDTH  # bytes of what blocks hand on


class Pair(nn.Module):
    """A norm and two linear maps, as a feed-forward has them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def block_of(axes, *, by_sequence=False):
    """Return a block over "tp"; by sequence, what goes in and out is a part of the tokens."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if by_sequence:
        plan = {
            "norm": SequenceParallel(use_local_output=True),
            "up": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    torch.manual_seed(0)
    block = Pair()
    parallelize_module(block, axes["tp"], plan)
    if by_sequence:
        parallelize_module(block, axes["tp"], {"up": ColwiseParallel()})
    return block


def of_torch(counted, axis):
    """Return bytes and number of what was sent over an axis, by kind."""
    return {
        name.removeprefix(f"{axis}."): (sent, counted.num_collectives[name])
        for name, sent in counted.sent_bytes.items()
        if name.startswith(f"{axis}.")
    }


# -- each kind
@on_ranks(1, 2, 3)
def test_each_kind_of_collective_counts_what_this_rank_sends(rank, num_ranks):
    """Make each collective once over "tp", of 6 x num_ranks floats where it has that many."""
    axes = shardwise.Axes(tp=num_ranks, dp_shard=1)
    model = shardwise.shard(nn.Linear(2, 2), mesh=axes)
    group, mesh = axes["tp"].get_group(), axes["tp"]
    part, whole = torch.zeros(6), torch.zeros(6 * num_ranks)
    parts = list(whole.clone().chunk(num_ranks))
    ours = [rank + 1 + other for other in range(num_ranks)]  # rows for each rank
    theirs = [other + 1 + rank for other in range(num_ranks)]
    rows, arrived = torch.zeros(sum(ours), 3), torch.zeros(sum(theirs), 3)
    right, left = (rank + 1) % num_ranks, (rank - 1) % num_ranks
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def around():
        if num_ranks == 1:
            return
        ops = [
            dist.P2POp(dist.isend, part, group=group, group_peer=right),
            dist.P2POp(dist.irecv, part.clone(), group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    places = parts if rank == 0 else None
    other = dist.new_group([0])
    named, ops = group.group_name, torch.ops._c10d_functional
    wait = ops.wait_tensor
    # Bytes of what this rank sends to the others: a part to each, rows, or all from one rank.
    each, rows_sent = 4 * 6 * (num_ranks - 1), 12 * (sum(ours) - ours[rank])
    if_first, if_last = each * (rank == 0), 4 * 6 * (rank > 0)
    calls = [
        (2 * each, "all_reduce", lambda: dist.all_reduce(whole, group=group)),
        (each, "all_gather", lambda: gather(whole.clone(), part, group=group)),
        (each, "all_gather", lambda: dist.all_gather(parts, part, group=group)),
        (each, "reduce_scatter", lambda: scatter(part.clone(), whole, group=group)),
        *(
            (rows_sent, "all_to_all", call)
            for call in (
                lambda: dist.all_to_all_single(arrived, rows, theirs, ours, group),
                lambda: wait(ops.all_to_all_single(rows, theirs, ours, named)),
            )
        ),
        (each, "all_to_all", lambda: dist.all_to_all_single(whole.clone(), whole, group=group)),
        (if_first, "broadcast", lambda: dist.broadcast(part, group=group, group_src=0)),
        (if_first, "scatter", lambda: dist.scatter(part.clone(), places, group=group, group_src=0)),
        (if_last, "gather", lambda: dist.gather(part, places, group=group, group_dst=0)),
        (if_last, "reduce", lambda: dist.reduce(part, group=group, group_dst=0)),
        (4 * 6, "send", around),
        (2 * each, "all_reduce", lambda: wait(ops.all_reduce(whole, "sum", named))),
        (each, "all_gather", lambda: wait(ops.all_gather_into_tensor(part, num_ranks, named))),
        (
            *(each, "reduce_scatter"),
            lambda: wait(ops.reduce_scatter_tensor(whole, "sum", num_ranks, named)),
        ),
        (each, "all_gather", lambda: DTensor.from_local(part, mesh, [Shard(0)]).full_tensor()),
        (0, None, lambda: dist.barrier(group)),
        (0, None, lambda: rank == 0 and dist.all_reduce(whole, group=other)),
    ]
    for number, (sent, kind, call) in enumerate(calls):
        with counting(model) as counted:
            call()
        assert not [key for key in counted.sent_bytes if not key.startswith("tp.")], number
        wanted = {kind: (sent, 1)} if kind and num_ranks > 1 else {}
        assert of_torch(counted, "tp") == wanted, number


# -- tensor parallelism
@pytest.mark.parametrize("by", ["shard", "fully_shard"])
@pytest.mark.parametrize("by_sequence", [False, True])
@pytest.mark.parametrize(("num_ranks", "dp"), [(3, 1), (4, 2)])
@on_ranks()
def test_what_tensor_parallelism_sends_is_counted_by_kind(num_ranks, dp, by, by_sequence):
    """By the formula: two blocks; of each a sum of the stream forward, and one backward.

    By sequence the sum is scattered, and the stream gathered; norms have partial gradients then.
    """
    axes = shardwise.Axes(tp=num_ranks // dp, dp_shard=dp)
    model = nn.Sequential(*(block_of(axes, by_sequence=by_sequence) for _ in range(2)))
    if by == "shard":
        shardwise.shard(model, mesh=axes, units=Pair)
    else:
        for block in model:
            fully_shard(block, mesh=axes.data)
        fully_shard(model, mesh=axes.data)
    tokens = TOKENS // axes.tp if by_sequence else TOKENS

    def step():
        x = torch.randn(ROWS, tokens, WIDTH, requires_grad=True)
        model(x).sum().backward()
        model.zero_grad()

    step()
    before = shardwise.debug.stats(model)
    step()
    plain = shardwise.debug.stats(model)
    with shardwise.debug.counting(model) as counted:
        step()
    after = shardwise.debug.stats(model)
    own = {name: n - before.sent_bytes.get(name, 0) for name, n in plain.sent_bytes.items()}
    found, one = of_torch(counted, "tp"), STREAM * (axes.tp - 1) // axes.tp
    if by_sequence:
        assert found["all_gather"] == found["reduce_scatter"] == (4 * one, 4)
    else:
        assert found == {"all_reduce": (8 * one, 4)}
    of_axis = [
        {name: n for name, n in sent.items() if name.startswith("tp.")}
        for sent in (after.sent_bytes, counted.sent_bytes)
    ]
    assert of_axis[0] == of_axis[1]
    others = {k: n for k, n in counted.sent_bytes.items() if n and not k.startswith("tp.")}
    # Shardwise's own, each once, by the same messages as ever.
    assert others == {name: n for name, n in own.items() if n}
    assert torch._C._len_torch_dispatch_stack() == 0


@on_ranks(4)
def test_a_model_on_a_mesh_like_an_earlier_one_counts_what_goes_over_the_groups_of_that():
    """Count a gather of a product beside each of several models, whose groups are their own.

    DTensors keep what they have planned for an equal mesh, its groups too.
    """
    held, found = [], []
    for _ in range(3):
        axes = shardwise.Axes(tp=2)
        held.append(shardwise.shard(nn.Linear(2, 2), mesh=axes))
        with counting(held[-1]) as counted:
            (DTensor.from_local(torch.ones(3, 5), axes["tp"], [Shard(0)]) * 2).full_tensor()
        found.append(of_torch(counted, "tp"))
    assert found == 3 * [{"all_gather": (60, 1)}]


@on_ranks(4)
def test_an_axis_of_copies_and_one_of_shards_keep_their_names():
    axes = shardwise.Axes(dp_replicate=2, tp=2)
    model = shardwise.shard(nn.Linear(2, 2), mesh=axes)
    with counting(model) as counted:
        dist.all_reduce(torch.zeros(10), group=axes["tp"].get_group())
    found = dict(counted.sent_bytes)
    assert found == {"tp.all_reduce": 2 * 40 // 2}


# -- pipelines
CROSSING = [
    ("GPipe", "shard", 1),
    ("1F1B", "fully_shard", 1),
    ("Interleaved1F1B", "shard", 3),
    ("ZBVZeroBubble", "fully_shard", 2),
]


@pytest.mark.parametrize(
    ("schedule", "by", "crossing"), [each for each in CROSSING if each[0] in pipelines.THERE]
)
@on_ranks(2)
def test_a_stage_counts_what_it_sends_to_other_ranks(num_ranks, schedule, by, crossing):
    """By the formula: each border of stages on two ranks is crossed forward and backward.

    Both ranks send as much in all: what one sends forward, the other sends back.
    """
    pipeline = pipelines.pipeline_of(schedule, shardwise.Axes(pp=num_ranks), 4, by=by)
    optimizer = torch.optim.SGD(pipeline.params, lr=0.1)
    batch = pipelines.batch_of(0, 0)
    for _ in range(2):  # what the first one tells of shapes goes as messages, too
        with counting(pipeline.parts) as counted:
            pipeline.step(*batch)
        optimizer.zero_grad()
    stream = 4 * pipelines.ROWS // 4 * pipelines.LENGTH * pipelines.WIDTH
    num = 4 * crossing
    assert of_torch(counted, "pp") == {"send": (num * stream, num)}
    assert not [name for name in counted.sent_bytes if name.startswith("stages.")]


# -- what Shardwise counts itself
class Mixture(nn.Module):
    def __init__(self, routing):
        super().__init__()
        self.mixture = shardwise.parallel.MixtureOfExperts(WIDTH, HIDDEN, routing)

    def forward(self, x):
        made, balance = self.mixture(x)
        return made + balance


@on_ranks(3)
def test_what_shardwise_sends_is_not_counted_again(num_ranks):
    """A ring is torch's own attention: what it sends is counted where it is called."""
    axes = shardwise.Axes(ep=num_ranks, cp=num_ranks)
    shape = llama_shape(2, WIDTH, 3, 3, HIDDEN, 16)
    routing = Routing(num=2 * num_ranks, top_k=2, balanced=True)
    for method in ("gather", "heads", "ring"):
        torch.manual_seed(0)
        model = PlainDecoder(shape)
        for block in model.blocks:
            block.feed_forward = Mixture(routing)
        shardwise.parallel.spread_experts(model, axes)
        shardwise.shard(model, mesh=axes, units=Units(experts="*.experts"), stage=2)
        context = shardwise.parallel.ContextParallel(model, axes, method=method)
        ids = torch.randint(16, (ROWS, 2 * TOKENS), generator=torch.Generator().manual_seed(1))
        sent = []
        for counts in (False, False, True):  # the first one gathers parameters, which stay
            before = shardwise.debug.stats(model).sent_bytes
            with counting(model) if counts else nullcontext(), context.cut(ids) as (part, places):
                model(part, positions=places).sum().backward()
            after = shardwise.debug.stats(model).sent_bytes
            sent.append({name: n - before.get(name, 0) for name, n in after.items()})
            model.zero_grad()
        assert sent[1] == sent[2], method
        assert sent[1]["ep.all_to_all"] > 0
        assert ("cp.ring" in sent[1]) == (method == "ring")


@on_ranks(2)
def test_a_block_that_raises_leaves_nothing_behind_and_a_plain_model_is_refused():
    with pytest.raises(ConfigError) as refused, counting(nn.Linear(2, 2)):
        pass
    model = shardwise.shard(nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), counting(model):
        raise ZeroDivisionError
    assert torch._C._len_torch_dispatch_stack() == 0
    said = str(refused.value)
    assert "is not sharded" in said
