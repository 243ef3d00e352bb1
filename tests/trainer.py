"""The oracle's loop on ranks: a sharded model trained as users train, compared with the plain one.

`compare` runs inside the ranks. It trains the same model by the oracle and by `shardwise.shard`
with each of several settings, and checks losses, parameters, gradients (and which are None) and
optimizer state, bit by bit.
"""

import logging
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oracle import Grads, assert_same_bits, plain_loop
from shardwise import accumulate, fully_shard, shard
from shardwise.config import Schedule
from shardwise.engine.api import engine_of

Steps = Sequence[Sequence[Sequence[Any]]]  # steps[step][micro_batch][rank] is one batch
State = dict[str, dict[str, Any]]

# Over lists of parameters: the same bits as torch's loop over parameters, in fewer calls.
adamw = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)
adamw_loop = partial(adamw, foreach=False)
adamw_fused = partial(adamw, foreach=False, fused=True)
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)

STAGES = [{"stage": stage} for stage in range(4)]
LAYOUTS = [
    {"stage": stage, "layout": layout} for stage, layout in product(range(4), ("rows", "flat"))
]
# Every stage once, and both layouts where full parameters are freed.
SPREAD = [LAYOUTS[n] for n in (0, 3, 4, 6, 7)]
# Two halves: every stage once in each, with the other layout.
HALVES = [LAYOUTS[n] for n in (0, 3, 4, 7)], [LAYOUTS[n] for n in (1, 2, 5, 6)]
ENDS = [{"stage": 1}, {"stage": 3}, {"stage": 3, "layout": "flat"}]


def sample(turn):
    """Return both layouts where full parameters are freed, and one of the other settings in turn.

    For families of models, which together take every setting.
    """
    return [LAYOUTS[turn % 6], *LAYOUTS[6:]]


@dataclass(frozen=True)
class Trained:
    """What one run leaves: this rank's losses, and everything else in full."""

    losses: list[float]
    parameters: dict[str, Tensor]
    grads: list[Grads]
    state: State


def full(tensor):
    """Return a copy of the whole tensor, whatever it is cut into."""
    if tensor is None:
        return None
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def full_all(tensors):
    """Return what `full` would of each tensor: one collective for all of a dtype, not one each."""
    cut_up = [getattr(getattr(tensor, "_cut", None), "layout", None) for tensor in tensors]
    found = [full(t) if layout is None else None for t, layout in zip(tensors, cut_up, strict=True)]
    by_dtype = {}
    for number, layout in enumerate(cut_up):
        if layout is not None:
            by_dtype.setdefault(tensors[number].dtype, []).append(number)
    for numbers in by_dtype.values():
        wholes = _full_of_dtype([tensors[number] for number in numbers])
        for number, whole in zip(numbers, wholes, strict=True):
            found[number] = whole
    return found


def _full_of_dtype(tensors):
    cuts = [tensor._cut for tensor in tensors]
    axis = cuts[0].comm.axes.shard
    if axis.size == 1:
        return [full(tensor) for tensor in tensors]
    sizes = [[cut.layout.piece(cut.index, r).numel for cut in cuts] for r in range(axis.size)]
    mine = torch.cat([tensor.to_local().detach().reshape(-1) for tensor in tensors])
    assert mine.numel() == sum(sizes[axis.rank])
    row = mine.new_zeros(max(map(sum, sizes)))
    row[: mine.numel()] = mine
    rows = [torch.empty_like(row) for _ in range(axis.size)]
    dist.all_gather(rows, row, axis.group)
    parts = [row[: sum(size)].split(size) for row, size in zip(rows, sizes, strict=True)]
    return [
        torch.cat(pieces).view(cut.shape)
        for cut, pieces in zip(cuts, zip(*parts, strict=True), strict=True)
    ]


def full_parameters(model):
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, full_all(params), strict=True))


def full_grads(model):
    names, params = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, full_all([p.grad for p in params]), strict=True))


def full_state(model, optimizer):
    """Return the optimizer's state in full, by the parameters' names."""
    state = {
        name: dict(optimizer.state[p])
        for name, p in model.named_parameters()
        if p in optimizer.state
    }
    places = [(of, key) for of in state.values() for key in of if isinstance(of[key], Tensor)]
    for (of, key), whole in zip(places, full_all([of[key] for of, key in places]), strict=True):
        of[key] = whole
    return state


def backward_all(model, micro_batches, loss_fn, rank):
    """Run one step's micro-batches forward and backward; return this rank's mean loss."""
    total = 0.0
    for number, by_rank in enumerate(micro_batches):
        with accumulate(model, last=number == len(micro_batches) - 1):
            loss = loss_fn(model, by_rank[rank]) / len(micro_batches)
            loss.backward()
        total += loss.item()
    return total


def train(model, steps, loss_fn, optimizer_factory=adamw, **options):
    """Shard the model and train it, with torch's own optimizer."""
    return train_sharded(shard(model, **options), steps, loss_fn, optimizer_factory)


def train_sharded(model, steps, loss_fn, optimizer_factory=adamw):
    """Train a model that is sharded already."""
    optimizer = optimizer_factory(list(model.parameters()))
    losses, grads = [], []
    for micro_batches in steps:
        losses.append(backward_all(model, micro_batches, loss_fn, dist.get_rank()))
        grads.append(full_grads(model))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, full_parameters(model), grads, full_state(model, optimizer))


def train_plain(model, steps, loss_fn, optimizer_factory=adamw, **options):
    """Train the model by the oracle; the losses are those of this rank."""
    truth = plain_loop(model, steps, loss_fn, optimizer_factory, **options)
    losses = [by_rank[dist.get_rank()] for by_rank in truth.losses]
    return Trained(losses, truth.parameters, truth.grads, full_state(model, truth.optimizer))


def assert_same_grads(actual, expected):
    missing = {name for name, grad in actual.items() if grad is None}
    assert missing == {name for name, grad in expected.items() if grad is None}
    assert_same_bits(
        {name: grad for name, grad in actual.items() if grad is not None},
        {name: grad for name, grad in expected.items() if grad is not None},
    )


def assert_same_state(actual, expected):
    assert actual.keys() == expected.keys()
    for name, entries in expected.items():
        tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor)}
        assert_same_bits(
            {f"{name}/{k}": v for k, v in actual[name].items() if k in tensors},
            {f"{name}/{k}": v for k, v in tensors.items()},
        )


def assert_same_run(actual, expected):
    for number, (ours, theirs) in enumerate(zip(actual.grads, expected.grads, strict=True)):
        try:
            assert_same_grads(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"gradients of step {number}: {error}") from None
    assert actual.losses == expected.losses
    assert_same_bits(actual.parameters, expected.parameters)
    assert_same_state(actual.state, expected.state)


def float_batch(random):
    return torch.randn(3, 8, generator=random)


def token_batch(random):
    return torch.randint(256, (2, 9), generator=random)


def make_steps(num_ranks, num_steps=3, num_micro_batches=1, make_batch=float_batch):
    """Draw batches, the same on every rank."""
    random = torch.Generator().manual_seed(1)
    return [
        [[make_batch(random) for _ in range(num_ranks)] for _ in range(num_micro_batches)]
        for _ in range(num_steps)
    ]


def mean_square(model, batch):
    return model(batch).square().mean()


def sharded_by_block(model, by=fully_shard, **options):
    """Shard a model by calls of fully_shard, or torch's own: its blocks, and last itself."""
    for block in getattr(model, "blocks", ()):
        by(block, **options)
    return by(model, **options)


def reduces_each_micro_batch(options):
    default = "micro_batch" if options.get("stage", 3) >= 2 else "step"
    schedule = options.get("schedule") or Schedule()
    return (schedule.reduce_every or default) == "micro_batch"


def compare(
    rank,
    world_size,
    make_model,
    settings=STAGES,
    loss=mean_square,
    optimizer=adamw,
    batch=float_batch,
    steps=2,
    micro_batches=1,
    replicas=1,
    drawn=None,
):
    """Check that every setting takes the oracle's steps; raise one error with all that do not.

    In the second step units are gathered in the order that the first one showed.
    """
    if drawn is None:
        steps = make_steps(world_size, steps, micro_batches, batch)
    else:
        steps = drawn(world_size, micro_batches)
    truths = {}
    failures = []
    for options in settings:
        each = reduces_each_micro_batch(options) and micro_batches > 1
        if each not in truths:
            torch.manual_seed(0)
            how = {"reduce_each_micro_batch": each, "num_replicas": replicas}
            truths[each] = train_plain(make_model(), steps, loss, optimizer, **how)
        torch.manual_seed(0)
        trained = train(make_model(), steps, loss, optimizer, **options)
        try:
            assert_same_run(trained, truths[each])
        except AssertionError as error:
            failures.append(f"{options}: {error}")
    assert not failures, "\n".join(failures)


def events_of(model):
    """Start recording the model's collectives; the list that comes back grows as they are sent."""
    events = []
    engine_of(model).comm.traffic.events = events
    return events


@contextmanager
def logged(name="shardwise", level=None):
    """Collect what a logger is told, at a level of its own or at the one that it has."""
    texts = []
    log, handler = logging.getLogger(name), logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    before = log.level
    log.addHandler(handler)
    log.setLevel(before if level is None else level)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
