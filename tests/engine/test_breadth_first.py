"""`layer_by_layer()`: one gather per unit for all micro-batches, and the bits of accumulation."""

import gc
import signal
import threading
import weakref
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from models import Block, Checkpointed, OddModel, Stack
from ranks import on_ranks
from same_runs import same_runs
from shardwise import Axes, accumulate, shard
from shardwise.config import Schedule, Units
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import ConfigError, StateError
from shardwise.parallel import clip_grad_norm_
from shardwise.unit.states import ParamState
from trainer import full_grads, sharded_by_block

layer_by_layer = partial(accumulate, order="breadth_first")

NUM = 3  # micro-batches


class Dropping(Block):
    def forward(self, x):
        return x + self.down(nn.functional.dropout(self.up(x), 0.5, self.training))


class Twice(Stack):
    """One block runs twice, around another one."""

    def forward(self, x):
        first, second, _ = self.blocks
        return self.head(first(second(first(x))))


def batches_of(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(4, 8, generator=generator) for _ in range(NUM)]


def loss_of(model, x):
    out = model(x)
    return (out.float() if out.dtype == torch.bfloat16 else out).square().mean() / NUM


def vertically(model, batches):
    loss = layer_by_layer(model, partial(loss_of, model), batches)
    loss.backward()
    return loss.detach()


def one_by_one(model, batches):
    losses = []
    for number, x in enumerate(batches):
        with accumulate(model, last=number == len(batches) - 1):
            losses.append(loss_of(model, x))
            losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


def train(rank, way):
    """Take two clipped steps; return losses, and parameters at the end."""
    make, passes = way
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(2):
        losses.append(passes(model, batches_of(rank, step)))
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = [*losses, *(p.detach().full_tensor() for p in model.parameters())]
    return [each.float() for each in found]


def kept(model, batches):
    """Accumulate as torch's own interface does: gradients stay until the last one."""
    losses = []
    for number, x in enumerate(batches):
        model.set_requires_gradient_sync(number == len(batches) - 1)
        losses.append(loss_of(model, x))
        losses[-1].backward()
    return sum(losses[1:], losses[0]).detach()


def ways(folder):
    """Return ways to shard, each with what to compare with, and how that accumulates."""
    every_step = partial(shard, schedule=Schedule(reduce_every="step"))
    cells = product((0, 1, 2, 3), ("fp32", "bf16"))
    for number, (stage, precision) in enumerate(cells):
        kind, layout = (
            (Stack, Checkpointed)[(number // 2 + number) % 2],
            ("rows", "flat")[number % 2],
        )
        options = {"stage": stage, "layout": layout, "precision": precision}
        make = lambda kind=kind, options=options: every_step(kind(), **options)  # noqa: E731
        yield make, make, one_by_one
    for offload, precision in (("cpu", "bf16"), (f"nvme:{folder}", "fp32")):
        make = partial(lambda **options: every_step(Stack(), **options), precision=precision)
        yield partial(make, offload=offload), make, one_by_one
    inside = lambda: every_step(CheckpointedInside())  # noqa: E731
    yield inside, inside, one_by_one
    for policy in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        make = partial(lambda **options: sharded_by_block(Stack(), **options), **policy)
        yield make, make, kept


class CheckpointedInside(Stack):
    """The reentrant way, inside a unit's forward, where no hook sees what is computed again."""

    class _Block(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=True)

    block_class = _Block

    def forward(self, x):
        return super().forward(x.requires_grad_())


@on_ranks(1, 3)
def test_losses_and_steps_have_the_bits_of_an_accumulation_window(rank, tmp_path):
    for make, plain, accumulated in ways(tmp_path):
        same_runs(partial(train, rank), ((make, vertically), (plain, accumulated)))


def counts_of(model, run):
    before = stats(model)
    run()
    after = stats(model)
    return (
        Counter(after.num_collectives) - Counter(before.num_collectives),
        Counter(after.sent_bytes) - Counter(before.sent_bytes),
    )


@pytest.mark.parametrize("kind", [Stack, Checkpointed])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(3)
def test_all_micro_batches_together_gather_and_reduce_what_one_does(rank, kind, precision):
    for stage in range(4):
        model = shard(kind(), stage=stage, precision=precision, schedule=Schedule(bucket_bytes=0))
        batches = batches_of(rank, 0)
        one_by_one(model, batches[:1])  # what comes once
        for p in model.parameters():
            p.grad = None
        alone = counts_of(model, lambda m=model, b=batches: one_by_one(m, b[:1]))
        peak = stats(model).param_full_peak_bytes
        found = counts_of(model, lambda m=model, b=batches: vertically(m, b))
        apart = counts_of(model, lambda m=model, b=batches: one_by_one(m, b))
        assert found[0] == alone[0], (stage, found, alone)
        if precision == "fp32":  # else sums in fp32 are sent as such
            assert found[1] == alone[1]
        assert stats(model).param_full_peak_bytes == peak
        if stage == 3:
            gathers = alone[0]["shard.all_gather"]
            assert gathers == 4 + 3 - 1  # the root and the last block stay for backward
            assert apart[0]["shard.all_gather"] == NUM * gathers


@on_ranks(1, 3)
def test_slices_on_the_host_are_fetched_once_for_all_micro_batches(rank):
    from shardwise.offload.home import Home

    model = shard(Stack(), offload="cpu")
    fetched = []
    plain = Home.start_fetch

    def counted(self, places, slices):
        fetched.append(sum(s.nbytes for s in slices))
        return plain(self, places, slices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Home, "start_fetch", counted)
        found = []
        for run in (vertically, one_by_one):
            for num in (1, NUM):
                model.zero_grad()
                engine_of(model).finish_steps()
                with torch.no_grad():
                    next(model.parameters()).add_(0)  # the root is not fresh
                fetched.clear()
                run(model, batches_of(rank, 0)[:num])
                found.append(sum(fetched))
    assert found[0] == found[1] == found[2] > 0
    assert found[3] > found[2]


class Watched(Block):
    """Notes each call, and how many of its inner tensors are alive then."""

    log: list[tuple[int, int, int]]
    alive: "weakref.WeakSet[Tensor]"

    def forward(self, x):
        inner = torch.tanh(self.up(x))
        if torch._C._current_graph_task_id() != -1:
            self.log.append((self.number, int(x.shape[0]), len(self.alive)))
            self.alive.add(inner)
        return x + self.down(inner)


class WatchedStack(Checkpointed):
    block_class = Watched

    def __init__(self):
        super().__init__()
        self.log = []
        alive = weakref.WeakSet()
        for number, block in enumerate(self.blocks):
            block.number, block.log, block.alive = number, self.log, alive


@on_ranks(1, 3)
def test_backward_takes_the_units_in_turn_and_recomputes_one_block_at_a_time():
    model = shard(WatchedStack())
    batches = [torch.randn(rows, 8) for rows in (2, 3, 4)]
    for _ in range(2):
        model.log.clear()
        vertically(model, batches)
        calls = [(block, rows) for block, rows, _ in model.log]
        assert calls == [(block, rows) for block in (2, 1, 0) for rows in (2, 3, 4)]
        assert [alive for _, _, alive in model.log] == [0] * 9


@on_ranks(1, 3)
def test_parameters_used_at_several_places_get_the_same_gradient_up_to_rounding(rank):
    """Tied weights get gradients at both ends of the model, in float64 all but equal."""
    tokens = [torch.randint(0, 11, (2, 5)) for _ in range(NUM)]
    inputs = [x.double() for x in batches_of(rank, 0)]
    for make, batches in ((OddModel, tokens), (Twice, inputs)):
        results = []
        for passes in (vertically, one_by_one):
            torch.manual_seed(0)
            model = shard(make().double(), stage=3)
            passes(model, batches)
            grads = full_grads(model)
            results.append({name: grad for name, grad in grads.items() if grad is not None})
        torch.testing.assert_close(*results, rtol=1e-13, atol=1e-15)


@on_ranks(1, 3)
def test_an_accumulation_window_works_around_it(rank):
    batches = batches_of(rank, 0) + batches_of(rank, 1)

    def run(vertical):
        model = shard(Stack(), precision="bf16", schedule=Schedule(reduce_every="step"))
        if vertical:
            for part, last in ((batches[:NUM], False), (batches[NUM:], True)):
                with accumulate(model, last=last):
                    vertically(model, part)
        else:
            one_by_one(model, batches)
        return [p.grad.full_tensor() for p in model.parameters()]

    same_runs(run, (True, False))


@on_ranks(1)
def test_each_micro_batch_draws_for_itself_and_recomputes_what_it_has_drawn():
    results, states = [], []
    for kind in (Stack, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        model.blocks = nn.ModuleList(Dropping() for _ in range(3))
        model = shard(model)
        torch.manual_seed(7)
        vertically(model, [torch.ones(4, 8)] * NUM)
        states.append(torch.get_rng_state())
        results.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *results))  # what is recomputed draws what was drawn
    torch.manual_seed(7)
    first = loss_of(model, torch.ones(4, 8)).detach()
    states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    torch.manual_seed(7)
    seen = []

    def forward(x):
        seen.append(loss_of(model, x))
        return seen[-1]

    layer_by_layer(model, forward, [torch.ones(4, 8)] * NUM)
    assert torch.equal(seen[-1].detach(), first)  # the first is called last
    assert len({float(loss.detach()) for loss in seen}) == NUM  # each draws for itself
    before = torch.get_rng_state()
    layer_by_layer(model, partial(loss_of, model.eval()), [torch.ones(4, 8)] * 2)
    assert torch.equal(before, torch.get_rng_state())  # where nobody draws, nothing is drawn


@on_ranks(1, 3)
def test_what_torch_keeps_for_the_callers_thread_holds_in_forward(rank, world_size):
    model = shard(Stack())
    batches = batches_of(rank, 0)
    packed = []
    with torch.no_grad():
        counts = counts_of(model, lambda: layer_by_layer(model, partial(loss_of, model), batches))
        assert not layer_by_layer(model, partial(loss_of, model), batches).requires_grad
        expected = sum(loss_of(model, x) for x in reversed(batches))
        assert counts[0]["shard.all_gather"] == 4 * (world_size > 1)
        torch.testing.assert_close(
            layer_by_layer(model, partial(loss_of, model), batches), expected
        )

    def forward(x):
        assert torch.is_autocast_enabled("cpu")
        assert torch.empty(()).device.type == "meta"
        assert model(x).dtype == torch.bfloat16
        return model(x).float().sum()

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor

    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        with torch.device("meta"):
            layer_by_layer(model, forward, batches)
        assert torch.ones(2, requires_grad=True).exp().requires_grad
    assert len(packed) > NUM * 3


class Failing(Block):
    calls_left = -1

    def forward(self, x):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyError("no such key")
        return super().forward(x)


@on_ranks(1, 3)
def test_an_error_ends_all_micro_batches_and_says_which_one_it_was(rank, world_size):
    torch.manual_seed(0)
    model = Stack()
    model.blocks[1].__class__ = Failing
    shard(model, schedule=Schedule(reduce_every="step"))
    batches = batches_of(rank, 0)
    vertically(model, batches)
    expected = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()

    def forward(x, wrong):
        is_second = x is batches[1]
        if is_second and wrong == "at once":
            raise KeyError("no such key")
        y = model(x)
        if is_second and wrong == "late":
            raise KeyError("no such key")
        if is_second and wrong == "backward":
            y.sum().backward()
        if is_second and wrong == "once more":
            y = model(x)
        return y if wrong == "shape" else y.square().mean() / NUM

    for wrong in ("at once", "inside", "late"):
        model.blocks[1].calls_left = 2 if wrong == "inside" else -1
        with pytest.raises(KeyError, match="no such key") as caught:
            layer_by_layer(model, lambda x, w=wrong: forward(x, w), batches)
        assert "micro-batch 2 of 3" in caught.value.__notes__[0]
        after = engine_of(model).units[1:3]
        assert all(unit.gather.state is not ParamState.FULL for unit in after)
        assert not [t for t in threading.enumerate() if "micro-batch" in t.name]
    with pytest.raises(StateError, match=r"backward\(\) inside of the forward"):
        layer_by_layer(model, lambda x: forward(x, "backward"), batches)
    with pytest.raises(StateError, match=r"2 runs unit '\(root\)' where micro-batch 3 is through"):
        layer_by_layer(model, lambda x: forward(x, "once more"), batches)
    with pytest.raises(ConfigError, match=r"returned \[4, 5\] for micro-batch 1 of 3"):
        layer_by_layer(model, lambda x: forward(x, "shape"), batches)
    with pytest.raises(ConfigError, match="one micro-batch or more"):
        layer_by_layer(model, lambda x: forward(x, ""), [])
    with pytest.raises(ConfigError, match="not sharded"):
        layer_by_layer(Stack(), lambda x: x, batches)
    vertically(model, batches)
    assert all(map(torch.equal, (p.grad.full_tensor() for p in model.parameters()), expected))
    optional = shard(Stack(), units=Units(optional=["Block"]))
    with pytest.raises(StateError, match=r"some ranks may skip unit .blocks.0."):
        layer_by_layer(optional, partial(loss_of, optional), batches)
    stage = shard(Stack(), mesh=Axes(pp=world_size))
    if world_size > 1:
        with pytest.raises(StateError, match="a stage of a pipeline, whose schedule"):
            layer_by_layer(stage, partial(loss_of, stage), batches)


class Interrupted(Exception):
    pass


@on_ranks(1)
def test_an_interrupt_ends_all_micro_batches_and_none_is_kept(rank):
    def raise_it(*_):
        raise Interrupted

    model = shard(Stack())
    batches = [x.clone() for x in batches_of(rank, 0)]
    before = signal.signal(signal.SIGUSR1, raise_it)
    try:
        with pytest.raises(Interrupted):
            layer_by_layer(
                model,
                lambda x: (signal.raise_signal(signal.SIGUSR1), loss_of(model, x))[1],
                batches,
            )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not [t for t in threading.enumerate() if "micro-batch" in t.name]
    gc.collect()
    gc.disable()
    try:
        vertically(model, batches)
        alive = [weakref.ref(x) for x in batches]
        del batches
        assert not any(ref() is not None for ref in alive)  # nor by a cycle of references
    finally:
        gc.enable()
