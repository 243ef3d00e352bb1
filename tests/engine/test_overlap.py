"""`overlap()`: steps in the background are the plain ones to the bit; who asks for them waits."""

import copy
import gc
import itertools
import random
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from models import Stack
from ranks import HANG_S, agreed, on_ranks
from same_runs import (
    OPTIMIZERS,
    assert_same,
    everything,
    loss_of,
    make,
    make_optimizer,
    same_runs,
    train,
)
from shardwise import Offload, gathered, load, overlap, save, shard
from shardwise.check import replicas as check_replicas
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ShardError, StateError
from shardwise.step import overlap as module
from shardwise.step.local_step import OptimizerSubset
from trainer import SPREAD, sharded_by_block

# Ways to shard: of every stage, both layouts, and torch's interface.
WAYS = [*(partial(shard, **options) for options in SPREAD), sharded_by_block]
AT_STAGE_3 = WAYS[3], sharded_by_block


def overlapped(wrap, name="adamw", overlaps=True):
    """Return a `Stack` and its optimizer, overlapped or not."""
    model = wrap(Stack())
    optimizer = make_optimizer(name, model)
    return model, overlap(optimizer) if overlaps else optimizer


@contextmanager
def counted(before=lambda: None):
    """Count the units' steps by the thread that makes them; call something before each."""
    threads = []
    plain = module.part_of_step

    def part_of_step(*args):
        work, tensors = plain(*args)

        def step():
            threads.append(threading.get_ident())
            before()
            work()

        return step, tensors

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "part_of_step", part_of_step)
        yield threads


@on_ranks(1, 3)
def test_steps_in_the_background_have_the_bits_of_plain_ones(world_size, every=False):
    """AdamW in every setting and the other optimizers in one each, or all in all.

    Every fourth of the others on several ranks, which cost ten times as much, else on one.
    """
    there = [*OPTIMIZERS]
    if not every:
        others = there[1:]
        on_several = others[1::4]
        there[1:] = on_several if world_size > 1 else [n for n in others if n not in on_several]
    for number, name in enumerate(there):
        for wrap in WAYS if every or not number else WAYS[(number + world_size) % len(WAYS) :][:1]:
            same_runs(partial(count_steps, name, wrap), (False, True))


def count_steps(name, wrap, overlaps):
    """Return three steps' losses, the state and what each entry of it is."""
    model = wrap(Stack())
    optimizer = make_optimizer(name, model)
    if overlaps:
        assert overlap(optimizer, threads=1) is overlap(optimizer) is optimizer
    with counted() as threads:
        losses = train(model, optimizer, 3)
    found = losses + everything(model, optimizer)
    units = sum(unit.is_trained for unit in engine_of(model).units)
    assert threading.get_ident() not in threads
    assert len(threads) == (2 * units if overlaps else 0)  # the first step is plain
    state = optimizer.state_dict()["state"]
    return [*found, {number: {k: type(v) for k, v in of.items()} for number, of in state.items()}]


OFFLOADS = [
    "cpu",
    Offload(optimizer="cpu"),
    Offload(params="cpu", optimizer="cpu", fraction=0.5),
    Offload(optimizer="cpu", fraction=0.5),
]


@on_ranks(1, 3)
def test_offloaded_units_step_behind_from_the_second_step_on(world_size, every=False):
    """Train on the device, and with state at two of four places at each stage, or at all."""
    for stage in range(4):
        turn = (stage + (world_size > 1)) % 2
        dealt = OFFLOADS if every else OFFLOADS[turn::2]
        run = partial(count_steps_behind, world_size, stage, ("fp32", "bf16")[turn])
        same_runs(run, (None, *dealt))


def count_steps_behind(world_size, stage, precision, offload):
    model, optimizer = make("adamw", offload, stage, precision)
    called = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    with counted() as threads:
        found = train(model, optimizer, 3) + everything(model, optimizer)
    assert called == ["before", "after"] * 3
    units = engine_of(model).units
    assert len(threads) == (offload is not None) * 2 * sum(u.is_trained for u in units)
    if offload is not None:
        away = [unit.home is not None for unit in units]
        assert away == sorted(away)
        assert all(away) == (offload == "cpu" or offload.fraction == 1) and any(away)
        copies = sum(s.memory.copy_bytes for unit in units for s in unit.storages)
        stays = offload != "cpu" and offload.params == "device"
        assert (copies > 0) == (stays and stage == 3 and world_size > 1)
    return found


@on_ranks(3)
def test_delays_in_the_thread_neither_change_a_bit_nor_hang(rank, steps=6):
    rng = random.Random(rank)

    def run(wrap, overlaps):
        model, optimizer = overlapped(wrap, "momentum", overlaps)
        with counted(lambda: time.sleep(rng.random() * 0.002)):
            return train(model, optimizer, steps) + everything(model, optimizer)

    for wrap in AT_STAGE_3:
        same_runs(partial(run, wrap), (False, True))


@contextmanager
def held_back(from_unit):
    """Let the thread step so many units, and those after them only when the event is set."""
    gate, turn = threading.Event(), iter(range(1000))
    with counted(lambda: next(turn) < from_unit or gate.wait(HANG_S) or None):
        try:
            yield gate
        finally:
            gate.set()


def under_way(model):
    """Tell for each parameter whether a read would wait."""
    return ["_step_under_way" in vars(param) for param in model.parameters()]


@on_ranks(1, 3)
def test_a_read_waits_for_its_own_unit_and_metadata_for_none():
    for wrap in AT_STAGE_3:
        torch.manual_seed(0)
        model, optimizer = overlapped(wrap)
        train(model, optimizer, 1)
        model(torch.ones(2, 8)).sum().backward()
        before = [p.to_local().clone() for p in model.parameters()]
        with held_back(from_unit=2) as gate:  # the head and blocks[0] are stepped, in this order
            optimizer.step()
            optimizer.zero_grad()
            first, last = model.blocks[0].down.weight, model.blocks[2].down.weight
            changed = first.to_local()
            assert under_way(model) == [False] * 4 + [True] * 8 + [False] * 2
            assert last.shape == (8, 11) and last.dtype == torch.float32 and last.grad is None
            assert isinstance(last, type(first)) and isinstance(last, nn.Parameter)
            threading.Timer(0.05, gate.set).start()
            changed_too = last.to_local()
        assert not changed.numel() or not torch.equal(changed, before[2])
        assert not changed_too.numel() or not torch.equal(changed_too, before[10])
        model(torch.ones(2, 8))
        assert not any(under_way(model))
        assert {type(p) for p in model.blocks.parameters()} == {type(first)}


def read_in_full(model, optimizer, folder):
    with gathered(model):
        return [p.detach().clone() for p in model.parameters()]


def save_and_load(model, optimizer, folder):
    save(folder, model, optimizer, step=1)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load(folder, model, optimizer)
    return everything(model, optimizer)


def copy_and_run(model, optimizer, folder):
    copied = copy.deepcopy(model)
    return [copied(torch.ones(2, 8)).detach(), *(p.full_tensor() for p in copied.parameters())]


def load_own_state(model, optimizer, folder):
    optimizer.load_state_dict(copy.copy(optimizer.state_dict()))
    return everything(model, optimizer)


def evaluate(model, optimizer, folder):
    with torch.no_grad():
        return [model(torch.ones(2, 8))]


def change(model, optimizer, folder):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return everything(model, optimizer)


def keep_gradients(model, optimizer, folder):
    """The next backward adds to gradients that the thread may be reading."""
    model(torch.ones(2, 8)).sum().backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def zero_gradients(model, optimizer, folder):
    optimizer.zero_grad(set_to_none=False)
    return everything(model, optimizer) + [p.grad.full_tensor() for p in model.parameters()]


def step_again(model, optimizer, folder):
    for group in optimizer.param_groups:
        group["lr"] *= 2  # of the next step only
    optimizer.step()
    return everything(model, optimizer)


def look_at_replicas(model, optimizer, folder):
    check_replicas(model, optimizer)
    assert stats(model).param_shard_bytes > 0
    return everything(model, optimizer)


ACTIONS = [
    *(read_in_full, save_and_load, copy_and_run, load_own_state, evaluate, change),
    *(keep_gradients, zero_gradients, step_again, look_at_replicas),
]


@on_ranks(1, 3)
def test_whatever_comes_after_a_step_sees_it_whole(rank, world_size, tmp_path, every=False):
    """Take each action in one way to shard, in another on one rank than on several, or in all."""

    def run(action, number, wrap, overlaps):
        model, optimizer = overlapped(wrap, overlaps=overlaps)
        train(model, optimizer, 1)
        model(torch.ones(2, 8)).sum().backward()
        with counted(lambda: time.sleep(0.003)):
            optimizer.step()
            if action not in (keep_gradients, zero_gradients, step_again):
                optimizer.zero_grad()
            return action(model, optimizer, tmp_path / f"{number} {action.__name__} {overlaps}")

    for number, wrap in enumerate([*WAYS[3:], WAYS[0]]):
        first = (number + 1 + 2 * (world_size > 1)) % 4
        for action in ACTIONS if every else ACTIONS[first::4]:
            # A copy of torch's interface is made neither here nor by torch's own.
            if action is not copy_and_run or wrap is not sharded_by_block:
                same_runs(partial(run, action, number, wrap), (False, True))


USES = [
    lambda model, optimizer, folder: model(torch.ones(2, 8)),
    lambda model, optimizer, folder: model.blocks[1].up.bias + 1,
    lambda model, optimizer, folder: save(folder, model, optimizer, step=2),
    lambda model, optimizer, folder: optimizer.step(),
    lambda model, optimizer, folder: optimizer.state_dict(),
]


@on_ranks(1, 3)
def test_a_step_that_fails_is_told_to_all_who_ask_until_a_load(rank, tmp_path):
    why = "the optimizer's step, which ran in the background, failed: ZeroDivisionError: "
    for number, wrap in enumerate(AT_STAGE_3):
        torch.manual_seed(0)
        model, optimizer = overlapped(wrap)
        train(model, optimizer, 1)
        save(tmp_path / str(number), model, optimizer, step=1)
        right = everything(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        turn = iter(range(4))
        with counted(lambda turn=turn: 1 / 0 if next(turn) == 2 else None):
            optimizer.step()
            optimizer.zero_grad()
            for use in USES:
                who = "[0-2]" if use is USES[2] else str(rank)  # all hear of a save that failed
                said = rf"rank {who}, unit 'blocks\.1': {why}"
                with pytest.raises((ShardError, CheckpointError), match=said) as told:
                    use(model, optimizer, tmp_path / "never")
                assert use is USES[2] or "load() a checkpoint" in str(told.value)
        load(tmp_path / str(number), model, optimizer)
        assert_same(everything(model, optimizer), right)
        train(model, optimizer, 1)


@on_ranks(1)
def test_what_cannot_be_stepped_apart_is_refused():
    model = shard(Stack())
    with pytest.raises(ConfigError, match="Adafactor is not known to work element by element"):
        overlap(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ConfigError, match="threads=0: expected 1 or more, or None"):
        overlap(torch.optim.SGD(model.parameters()), threads=0)
    with pytest.raises(ConfigError, match=r"are gone.*use overlap\(optimizer\)"):
        overlap(torch.optim.SGD(model.parameters()), in_backward=True)


@on_ranks(1, 3)
def test_loss_scaling_skips_and_steps_as_ever():
    """One step overflows and is skipped; a closure is called; a parameter is of no unit."""
    warnings.filterwarnings("ignore", "AdamW trains sharded parameters and plain ones")

    def run(overlaps):
        model = shard(Stack(), precision="fp16")
        alone = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([*model.parameters(), alone], fused=True)
        scales = []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        if overlaps:
            overlap(optimizer)
        for step in range(14):
            loss = model(torch.full((2, 8), step / 8)).float().square().mean()
            scaler.scale(loss + alone.sum()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            if step and scales[-1] >= scales[-2]:
                optimizer.step(lambda: None)
            optimizer.zero_grad()
        pairs = list(itertools.pairwise(scales))
        assert any(a > b for a, b in pairs) and any(a < b for a, b in pairs)  # skipped, stepped
        return [*everything(model, optimizer), alone.detach(), scales]

    same_runs(run, (False, True))


@on_ranks(1, 3)
def test_a_graph_of_before_the_step_is_refused_on_all_ranks_alike(rank):
    for stage in (3, 1, 0):
        torch.manual_seed(0)
        model, optimizer = overlapped(partial(shard, stage=stage), "fused")
        train(model, optimizer, 1)
        first, second = (model(torch.ones(2, 8)).sum() for _ in range(2))
        first.backward()
        with counted(lambda: time.sleep(0.02 * (rank + 1))):
            optimizer.step()
            with pytest.raises(StateError) as error:
                second.backward()
        agreed(str(error.value))


@on_ranks(1, 3)
def test_steps_that_cannot_wait_are_made_at_once():
    """Steps that are made at once: each compared with a plain optimizer's."""

    def shared_gradient(model, optimizer):
        both = model.blocks[0].down.bias, model.blocks[1].down.bias
        both[0].grad = both[1].grad = both[0].detach().clone()

    def pinned(model, optimizer):
        model.blocks[0].unshard()

    def without_state(model, optimizer):
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})

    def by_hand(model, optimizer):
        for param in model.parameters():
            param.grad = torch.ones_like(param)

    def run(change, overlaps):
        is_by_hand = change is by_hand  # of a model that has not run
        wrap = sharded_by_block if is_by_hand else partial(shard, stage=1)
        model, optimizer = overlapped(wrap, overlaps=overlaps)
        if is_by_hand:
            by_hand(model, optimizer)
            optimizer.step()
        else:
            train(model, optimizer, 2)
            model(torch.ones(2, 8)).sum().backward()
        change(model, optimizer)
        with counted() as threads:
            optimizer.step()
            assert len(optimizer.state) == 14
            if change is shared_gradient:
                assert threads.count(threading.get_ident()) == (4 if overlaps else 0)
            elif not is_by_hand:
                assert not threads
            if change is pinned:
                model.blocks[0].reshard()
            return everything(model, optimizer)

    for change in (shared_gradient, pinned, without_state, by_hand):
        same_runs(partial(run, change), (False, True))


@on_ranks(1)
def test_an_overlapped_optimizer_lives_and_ends_as_ever():
    """Schedulers of before and after, threads, copies, and the end of an optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (False, True):
            model = shard(Stack())
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
            make = torch.optim.lr_scheduler.LambdaLR
            schedule = make(optimizer, lambda n: 0.5**n) if first else None
            overlap(optimizer, threads=1)
            schedule = schedule or make(optimizer, lambda n: 0.5**n)
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                schedule.step()
            assert optimizer.param_groups[0]["lr"] == 0.125
    threads = []
    begun = threading.Thread(target=lambda: threads.append(torch.get_num_threads()))
    begun.start()
    begun.join()
    assert threads == [torch.get_num_threads()]
    sharded, ours = overlapped(sharded_by_block)
    train(sharded, ours, 1)
    sharded(torch.ones(2, 8)).sum().backward()
    with counted(lambda: time.sleep(0.01)):
        ours.step()
        ours.zero_grad()
        copied = [copy.deepcopy(param) for param in sharded.parameters()]
        held = ours.state_dict()["state"]
    assert_same([c.to_local() for c in copied], [p.to_local() for p in sharded.parameters()])
    assert len(held) == 14
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(ours)
        del ours
        assert gone() is None  # without the garbage collector
    finally:
        gc.enable()


@on_ranks(1, 2)
def test_hooks_see_the_first_step_of_an_offloaded_model_too():
    """A hook of the user's that raises before a step means that there is none."""

    def run(offload):
        model, optimizer = make("adamw", offload)
        seen = []
        left = [1]

        def refuse_once(*_):
            if left:
                raise KeyError(left.pop())

        def look(*_):
            seen.extend(param.full_tensor().clone() for param in model.parameters())

        optimizer.register_step_pre_hook(refuse_once)
        optimizer.register_step_post_hook(look)
        for step in range(3):
            loss_of(model, step).backward()
            try:
                optimizer.step()
            except KeyError:
                assert step == 0
            optimizer.zero_grad()
        return seen + everything(model, optimizer)

    same_runs(run, (None, "cpu"))


@on_ranks(1, 2)
def test_a_load_after_a_failed_step_waits_for_the_others(tmp_path):
    """Two optimizers share units; the step of one fails, that of the other takes a while."""
    torch.manual_seed(0)
    model = shard(Stack(), offload="cpu")
    params = [*model.parameters()]
    optimizers = [torch.optim.SGD(params[::2], lr=0.05), torch.optim.AdamW(params[1::2], lr=0.05)]
    save(tmp_path / "saved", model)
    saved = [param.full_tensor().clone() for param in params]
    plain = OptimizerSubset.__call__

    def step(self):
        if isinstance(self._like, torch.optim.SGD):
            raise ArithmeticError("no step today")
        time.sleep(0.1)
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        for number in range(2):
            if number:
                patch.setattr(OptimizerSubset, "__call__", step)
            loss_of(model, 0).backward()
            for optimizer in optimizers:
                optimizer.step()
        load(tmp_path / "saved", model)
        for optimizer in optimizers:
            vars(optimizer)["_shardwise_overlap"]._thread.shutdown()  # all that it had to do
        assert_same([param.full_tensor() for param in params], saved)
