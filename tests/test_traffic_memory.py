"""Bytes: what a step sends, what a rank holds, and the peak, against formulas written here anew."""

import copy
import gc
import time
from collections import Counter
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import init_device_mesh

from models import Block
from ranks import on_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise import accumulate, describe, save, shard
from shardwise.config import Schedule
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import StateError

Shapes = list[tuple[int, ...]]
NUM_BLOCKS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x * self.scale


BLOCK = [(11, 8), (11,), (8, 11), (8,)]  # of 2, 3 and 4 ranks none divides all of them
ROOT = [(), (7, 8)]  # a module's own parameters come before its children's
UNITS = [ROOT, *[BLOCK] * NUM_BLOCKS]
TOKENS = torch.tensor([[0, 3, 6, 2], [1, 4, 5, 0]])


def owned(shapes, layout, num_ranks, rank):
    """Return how many elements of a unit a rank owns, padding left out."""
    if layout == "flat":
        total = sum(map(prod, shapes))
        share = -(-total // num_ranks)
        return min(share, max(total - rank * share, 0))
    found = 0
    for shape in shapes:
        rows = shape[0] if shape else 1
        share = -(-rows // num_ranks)
        found += min(share, max(rows - rank * share, 0)) * prod(shape[1:])
    return found


def padded(shapes, layout, num_ranks):
    """Return how many elements a rank's shard buffer of a unit has."""
    if layout == "flat":
        return -(-sum(map(prod, shapes)) // num_ranks)
    return sum(-(-(s[0] if s else 1) // num_ranks) * prod(s[1:]) for s in shapes)


def gather_bytes(units, layout, num_ranks, rank):
    """Every rank sends what it owns to each of the others."""
    return sum(owned(u, layout, num_ranks, rank) for u in units) * (num_ranks - 1) * 4


def reduce_bytes(units, layout, num_ranks, rank):
    """Every rank sends each of the others what that one owns."""
    peers = [r for r in range(num_ranks) if r != rank]
    return sum(owned(u, layout, num_ranks, peer) for u in units for peer in peers) * 4


def one_step(model, optimizer):
    model(TOKENS).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sent_in(model, run):
    """Return (bytes, collectives) by kind that ``run`` made this rank send."""
    before = stats(model)
    run()
    after = stats(model)
    sent = Counter(after.sent_bytes) - Counter(before.sent_bytes)
    return sent, Counter(after.num_collectives) - Counter(before.num_collectives)


def expected_traffic(stage, layout, num_ranks, rank, num_params):
    """Write the formula down: 2 x model for stages 0 to 2, 3 x model for stage 3 less what is kept.

    At stage 0 the mean gradient is gathered, at the others the parameters. At stage 3 the root and
    the last unit of the forward pass are gathered once only. One number for each parameter goes
    with its gradient, to every rank.
    """
    gathers = list(UNITS)
    if stage == 3:
        gathers += UNITS[1:-1]
    counts = num_params * (num_ranks - 1) * 4
    sent = {
        "shard.all_gather": gather_bytes(gathers, layout, num_ranks, rank),
        "shard.reduce_scatter": reduce_bytes(UNITS, layout, num_ranks, rank) + counts,
    }
    # The buckets of 1 MiB hold all of this model's gradients.
    num = {"shard.all_gather": len(gathers), "shard.reduce_scatter": 1}
    return ({k: v for k, v in sent.items() if v}, num) if num_ranks > 1 else ({}, {})


@on_ranks(1, 3)
def test_a_step_sends_the_bytes_of_the_formula_and_no_padding_in_so_many_collectives(
    rank, world_size
):
    for layout in ("rows", "flat"):
        for stage in (0, 1, 2, 3):
            for prefetch_bytes in (None, 0) if stage == 3 else (None,):
                torch.manual_seed(0)
                model = shard(
                    Net(),
                    stage=stage,
                    layout=layout,
                    schedule=Schedule(prefetch_bytes=prefetch_bytes),
                )
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                num_params = len(list(model.parameters()))
                one_step(model, optimizer)
                for _ in range(2):
                    found = sent_in(model, lambda: one_step(model, optimizer))  # noqa: B023
                    sent, num = expected_traffic(stage, layout, world_size, rank, num_params)
                    label = f"stage {stage}, {layout}, prefetch {prefetch_bytes}, rank {rank}"
                    num = {k: v for k, v in num.items() if v}
                    assert dict(found[0]) == sent, label
                    counted = {k: v for k, v in found[1].items() if world_size > 1}
                    assert counted == num, label


@on_ranks(4)
def test_a_hybrid_mesh_sends_the_slices_over_the_replicate_axis_once_per_window(rank):
    """Two replicas of two shards: the shard axis as ever, and an all-reduce of the slices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for stages, layout in (((1, 3), "rows"), ((0, 2, 3), "flat")):
        for stage in stages:
            model = shard(Net(), stage=stage, layout=layout, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            num_params = len(list(model.parameters()))
            one_step(model, optimizer)
            one_step(model, optimizer)
            sent, _ = sent_in(model, lambda: one_step(model, optimizer))  # noqa: B023
            on_shard = {k: v for k, v in sent.items() if k.startswith("shard.")}
            expected, _ = expected_traffic(stage, layout, 2, rank % 2, num_params)
            assert on_shard == expected, (stage, layout)
            # An all-reduce over two ranks sends each element once, from either. Shard buffers are
            # reduced as they lie, padding included; at stage 0 there are none.
            count = padded if stage else partial(owned, rank=rank % 2)
            slices = sum(count(u, layout, 2) for u in UNITS) * 4
            assert sent["replicate.all_reduce"] == slices + num_params * 4, (stage, layout)
            assert set(sent) <= {*expected, "replicate.all_reduce"}, sent
            if stage < 2:
                continue
            # A window sums over shards in each micro-batch, and over replicas once.
            window, _ = sent_in(model, lambda: one_window(model, optimizer))  # noqa: B023
            assert window["shard.reduce_scatter"] == 3 * sent["shard.reduce_scatter"]
            assert window["replicate.all_reduce"] == sent["replicate.all_reduce"]


def one_window(model, optimizer):
    for number in range(3):
        with accumulate(model, last=number == 2):
            model(TOKENS).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Skipping(Net):
    """Leaves the last block out, if it is told to."""

    skips = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks[: 2 if self.skips else None]:
            x = block(x)
        return x * self.scale


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(4)
def test_a_window_over_a_hybrid_mesh_can_be_dropped_and_is_all_in_its_mean(stage):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    plain = Skipping()
    model = shard(
        copy.deepcopy(plain), stage=stage, mesh=mesh, schedule=Schedule(reduce_every="micro_batch")
    )

    def micro_batch(number, last, skips=False):
        model.skips = skips
        with accumulate(model, last=last):
            model(TOKENS.roll(number)).square().mean().backward()

    def wanted(numbers, skipped=-1):
        plain.zero_grad()
        for number in numbers:
            plain.skips = number == skipped
            plain(TOKENS.roll(number)).square().mean().backward()
        return {name: param.grad for name, param in plain.named_parameters()}

    def has(grads):
        for name, param in model.named_parameters():
            roundings = of_gradient(*(8, 11) * 3, over=8 * 4)
            assert_rounded_alike(param.grad.full_tensor(), grads[name], roundings, name)

    micro_batch(0, last=False)
    first = next(model.parameters())
    assert first.grad is not None
    with pytest.raises(StateError, match="the accumulation window is still open"):
        first.grad.to_local()
    with pytest.raises(StateError, match="accumulation window"):
        save("/nowhere", model)
    model.zero_grad()  # drops what the first has left
    assert first.grad is None
    micro_batch(1, last=False)
    micro_batch(2, last=True)
    has(wanted([1, 2]))
    model.zero_grad()
    micro_batch(0, last=False)
    micro_batch(1, last=True, skips=True)  # one unit has a gradient of the first alone
    has(wanted([0, 1], skipped=1))
    model.zero_grad()
    for dropped in (f"blocks.{number}.down.weight" for number in range(NUM_BLOCKS)):
        micro_batch(0, last=False)
        model.get_parameter(dropped).grad = None  # of one parameter alone
        micro_batch(2, last=True)
        both = {n: None if g is None else g.clone() for n, g in wanted([0, 2]).items()}
        has({**both, dropped: wanted([2])[dropped]})
        model.zero_grad()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fresh memory is NaN
    late = model.blocks[0].down.weight
    late.requires_grad_(False)
    micro_batch(0, last=False)
    late.requires_grad_()
    micro_batch(1, last=True)
    both = {n: None if g is None else g.clone() for n, g in wanted([0, 1]).items()}
    has({**both, "blocks.0.down.weight": wanted([1])["blocks.0.down.weight"]})


# Persistent bytes.


def storage_bytes(tensors):
    """Return the bytes of the tensors' memory, each storage counted once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@on_ranks(1, 3)
def test_a_rank_holds_the_bytes_of_the_formula_and_its_padding(rank, world_size):
    """Each stage and layout in one precision on one rank, in the other on several."""
    numel = sum(prod(s) for u in UNITS for s in u)
    for layout in ("rows", "flat"):
        for stage in (0, 1, 2, 3):
            turn = (stage + (layout == "flat") + (world_size > 1)) % 2
            precision, param_size = (("fp32", 4), ("bf16", 2))[turn]
            model = shard(Net(), stage=stage, layout=layout, precision=precision)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            one_step(model, optimizer)
            model(TOKENS).square().sum().backward()
            params = list(model.parameters())
            grads = [p.grad._local_tensor for p in params]
            label = f"stage {stage}, {layout}, {precision}, rank {rank} of {world_size}"
            shards = sum(padded(u, layout, world_size) for u in UNITS)
            mine = sum(owned(u, layout, world_size, rank) for u in UNITS)
            full = shards * world_size
            replicated = stage == 0
            one_copy = stage < 3 or world_size == 1
            held = stats(model)
            assert held.param_shard_bytes == (full if replicated else shards) * 4, label
            aliased = one_copy and precision == "fp32"
            if aliased:
                extra = 0 if replicated else (full - shards) * 4
            else:
                extra = full * param_size if stage < 3 else 0
            assert held.param_full_bytes == extra, label
            engine = engine_of(model)
            leaves = [s.full for u in engine.units for s in u.params]
            locals_ = [p._local_tensor for p in params]
            measured = storage_bytes([*locals_, *leaves])
            assert measured == held.param_shard_bytes + held.param_full_bytes, label
            slices = numel if replicated else mine
            assert held.grad_shard_bytes == slices * 4, label
            assert storage_bytes(grads) == (full if replicated else shards) * 4, label
            assert held.grad_partial_bytes == 0, label
            state = [
                v._local_tensor
                for p in params
                for v in optimizer.state[p].values()
                if v.numel() > 1 and hasattr(v, "_local_tensor")
            ]
            scalars = [p for p in params if p.numel() == 1]
            state += [
                optimizer.state[p][k]._local_tensor
                for p in scalars
                for k in ("exp_avg", "exp_avg_sq")
            ]
            assert sum(t.nbytes for t in state) == 2 * slices * 4, label
            assert storage_bytes(state) == 2 * slices * 4, label


class Decoder(nn.Module):
    """Shapes as in a decoder: matrices, biases, norms, and a vocabulary that divides by nothing."""

    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(1009, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width, bias=False),
                    "up": nn.Linear(width, 8 * width // 3, bias=False),
                }
            )
            for _ in range(2)
        )


@on_ranks(2, 3, 4)
def test_padding_is_below_one_element_per_rank_in_flat_and_below_3_percent_in_rows(world_size):
    for layout in ("rows", "flat"):
        for unit in describe(shard(Decoder(96), layout=layout)).units:
            assert unit.padding_share < 0.03
            assert layout == "rows" or unit.padding_bytes // 4 < world_size


# The peak, and what is left behind.


def full_bytes(shapes, layout, num_ranks):
    return padded(shapes, layout, num_ranks) * num_ranks * 4


@on_ranks(2, 3)
def test_the_peak_of_full_parameters_is_the_root_a_unit_and_the_prefetch_budget(world_size):
    for layout in ("rows", "flat"):
        root, block = (full_bytes(u, layout, world_size) for u in (ROOT, BLOCK))
        for prefetch in (None, 0, 2 * block, 10**6):
            model = shard(Net(), stage=3, layout=layout, schedule=Schedule(prefetch_bytes=prefetch))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                one_step(model, optimizer)
            peak = stats(model).param_full_peak_bytes
            budget = block if prefetch is None else prefetch
            label = f"{layout}, prefetch {prefetch}"
            assert peak <= root + block + budget, label
            if prefetch == 0:
                assert peak == root + block, label
            assert stats(model).param_full_bytes == 0, label
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    model(TOKENS)
                assert stats(model).param_full_bytes == 0, label


def live_bytes(at_most=0):
    """Return the bytes of tensors; look again for a while as long as they are more than so many.

    The transport's threads let go of what they sent a moment after it arrived.
    """
    dist.barrier()
    for _ in range(40):
        time.sleep(0.05)
        if (found := _live_bytes()) <= at_most or not at_most:
            break
    return found


def _live_bytes():
    gc.collect()
    tensors = []
    for thing in gc.get_objects():
        try:
            if isinstance(thing, Tensor) and not (thing.is_meta or is_fake(thing)):
                tensors.append(getattr(thing, "_local_tensor", thing))
        except ReferenceError:
            continue
    return storage_bytes(tensors)


def num_calls_alive(model):
    """Count the forward calls whose graphs are alive."""
    return sum(len(progress.calls) for progress in engine_of(model).passes._progress)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@on_ranks(2)
def test_nothing_grows_from_step_to_step(stage):
    torch.manual_seed(0)
    model = shard(Net(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    seen = []
    for step in range(1, 21):
        with accumulate(model, last=False):
            model(TOKENS).square().sum().backward()
        one_step(model, optimizer)
        if step in (5, 20):
            held = live_bytes(at_most=seen[0][0] if seen else 0)
            seen.append((held, num_calls_alive(model)))
    assert seen[1][0] <= seen[0][0], f"stage {stage}: {seen}"
    assert seen[0][1] == seen[1][1] == 0


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_graph_that_is_dropped_without_backward_leaves_nothing_behind(stage):
    torch.manual_seed(0)
    model = shard(Net(), stage=stage)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        one_step(model, optimizer)
    before = live_bytes(), stats(model).param_full_bytes
    for _ in range(3):
        loss = model(TOKENS).sum()
        del loss
    one_step(model, optimizer)
    assert num_calls_alive(model) == 0
    after = live_bytes(at_most=before[0]), stats(model).param_full_bytes
    assert after[0] <= before[0] and after[1] == before[1], f"stage {stage}: {before}, {after}"


@on_ranks(2)
def test_a_window_holds_partial_gradients_where_the_step_reduces_and_slices_where_it_does_not(
    rank, world_size
):
    numel = sum(prod(s) for u in UNITS for s in u)
    for stage, every, is_partial in (
        (1, None, True),
        (1, "micro_batch", False),
        (2, None, False),
        (3, None, False),
        (3, "step", True),
    ):
        model = shard(Net(), stage=stage, schedule=Schedule(reduce_every=every))
        mine = sum(owned(u, "rows", world_size, rank) for u in UNITS) * 4
        for number in range(2):
            with accumulate(model, last=False):
                sent, _ = sent_in(model, lambda: model(TOKENS).square().sum().backward())  # noqa: B023
            _ = [p.grad for p in model.parameters()]  # what is under way is completed now
            held = stats(model)
            label = f"stage {stage}, {every}, micro-batch {number}"
            assert held.grad_partial_bytes == (numel * 4 if is_partial else 0), label
            assert held.grad_shard_bytes == (0 if is_partial else mine), label
            assert ("shard.reduce_scatter" in sent) != is_partial, label
        with accumulate(model, last=True):
            model(TOKENS).square().sum().backward()
        _ = [p.grad for p in model.parameters()]
        held = stats(model)
        assert (held.grad_partial_bytes, held.grad_shard_bytes) == (0, mine)
