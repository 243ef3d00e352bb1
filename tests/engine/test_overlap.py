"""`overlap()`: steps in the background are the plain ones to the bit; who asks for them waits."""

import copy
import gc
import itertools
import random
import re
import threading
import time
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from models import Stack
from rank_tables import each_of
from ranks import HANG_S, run_ranks
from shardwise import Offload, accumulate, fully_shard, gathered, load, optim, overlap, save, shard
from shardwise.check import replicas as check_replicas
from shardwise.debug import stats
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError, ShardError, StateError
from shardwise.step import overlap as module
from shardwise.step.local_step import Apart
from trainer import SPREAD

OPTIMIZERS = {
    "adamw": ("AdamW", {}),
    "fused": ("AdamW", {"fused": True}),
    "foreach": ("AdamW", {"foreach": True, "amsgrad": True, "maximize": True}),
    "tensor lr": ("Adam", {"lr": torch.tensor(0.05), "foreach": False}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "sgd": ("SGD", {"lr": 0.1}),
    **{n.lower(): (n, {}) for n in ("Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")},
    "asgd": ("ASGD", {"lr": 0.1, "t0": 2}),
    "own": ("shardwise", {}),
    "own in bf16": ("shardwise", {"moments": "bf16"}),
    "own in 8 bits": ("shardwise", {"moments": "8bit", "block": 16}),
}


def assert_same(found, expected):
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), number


def by_block(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def settings():
    """Return ways to shard: of every stage, both layouts, and torch's interface."""
    ways = [lambda model, o=options: shard(model, **o) for options in SPREAD]
    return [*ways, by_block]


def make_optimizer(name, model):
    kind, options = OPTIMIZERS[name]
    params = list(model.parameters())
    groups = [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}]
    options = copy.deepcopy({"lr": 0.05, **options})  # a learning rate may be a tensor
    of = optim.AdamW if kind == "shardwise" else getattr(torch.optim, kind)
    return of(groups, **options)


def train(model, optimizer, steps=4, clip=0.1, first=0):
    """Train with two micro-batches, clipping and a schedule; return losses and norms."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    found = []
    for step in range(first, first + steps):
        for last in (False, True):
            with accumulate(model, last=last):
                loss = model(torch.linspace(-1, step + 1, 24).view(3, 8)).square().mean()
                loss.backward()
            found.append(loss.detach())
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            found.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def everything(model, optimizer):
    optimizer.state_dict()  # waits for codes too, which are plain tensors
    found = [p.full_tensor() for p in model.parameters()]
    for param in model.parameters():
        for _, value in sorted(optimizer.state[param].items()):
            if isinstance(value, Tensor):
                is_cut = hasattr(value, "full_tensor")
                found.append(value.full_tensor() if is_cut else value.clone())
    return found


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


def takes_the_plain_steps(rank, world_size, every=False):
    """AdamW in every setting and the other optimizers in one each, or all in all.

    Every fourth of the others on several ranks, which cost ten times as much, else on one.
    """
    ways = settings()
    there = [*OPTIMIZERS]
    if not every:
        others = there[1:]
        on_several = others[1::4]
        there[1:] = on_several if world_size > 1 else [n for n in others if n not in on_several]
    for number, name in enumerate(there):
        for wrap in ways if every or not number else ways[(number + world_size) % len(ways) :][:1]:
            runs = []
            for overlaps in (False, True):
                torch.manual_seed(0)
                model = wrap(Stack())
                optimizer = make_optimizer(name, model)
                if overlaps:
                    assert overlap(optimizer, threads=1) is overlap(optimizer) is optimizer
                with counted() as threads:
                    losses = train(model, optimizer, 3)
                runs.append((losses, everything(model, optimizer), optimizer.state_dict()))
                units = sum(unit.is_trained for unit in engine_of(model).units)
                assert threading.get_ident() not in threads
                assert len(threads) == (2 * units if overlaps else 0)  # the first step is plain
            (plain, plain_all, plain_dict), (ours, ours_all, ours_dict) = runs
            assert_same(ours, plain)
            assert_same(ours_all, plain_all)
            assert [*ours_dict["state"]] == [*plain_dict["state"]]
            for state, other in zip(
                ours_dict["state"].values(), plain_dict["state"].values(), strict=True
            ):
                assert {k: type(v) for k, v in state.items()} == {
                    k: type(v) for k, v in other.items()
                }


OFFLOADS = [
    "cpu",
    Offload(optimizer="cpu"),
    Offload(params="cpu", optimizer="cpu", fraction=0.5),
    Offload(optimizer="cpu", fraction=0.5),
]


def steps_offloaded_units_behind(rank, world_size, every=False):
    """Train on the device, and with state at two of four places at each stage, or at all."""
    for stage in range(4):
        runs = []
        precision = ("fp32", "bf16")[(stage + (world_size > 1)) % 2]
        dealt = OFFLOADS if every else OFFLOADS[(stage + (world_size > 1)) % 2 :: 2]
        for offload in (None, *dealt):
            torch.manual_seed(0)
            model = shard(Stack(), stage=stage, precision=precision, offload=offload)
            optimizer = make_optimizer("adamw", model)
            called = []
            optimizer.register_step_pre_hook(lambda *_, c=called: c.append("before"))
            optimizer.register_step_post_hook(lambda *_, c=called: c.append("after"))
            with counted() as threads:
                runs.append(train(model, optimizer, 3) + everything(model, optimizer))
            assert called == ["before", "after"] * 3
            units = engine_of(model).units
            assert len(threads) == (offload is not None) * 2 * sum(u.is_trained for u in units)
            if offload is None:
                continue
            away = [unit.home is not None for unit in units]
            assert away == sorted(away)
            assert all(away) == (offload == "cpu" or offload.fraction == 1) and any(away)
            assert_same(runs[-1], runs[0])
            copies = sum(s.memory.copy_bytes for unit in units for s in unit.storages)
            stays = offload != "cpu" and offload.params == "device"
            assert (copies > 0) == (stays and stage == 3 and world_size > 1)


def with_delays(rank, world_size, steps):
    rng = random.Random(rank)
    for wrap in (settings()[3], by_block):
        runs = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = wrap(Stack())
            optimizer = make_optimizer("momentum", model)
            if overlaps:
                overlap(optimizer)
            with counted(lambda: time.sleep(rng.random() * 0.002)):
                losses = train(model, optimizer, steps)
            runs.append(losses + everything(model, optimizer))
        assert_same(*runs)


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


def waits_for_no_more(rank, world_size):
    for wrap in (settings()[3], by_block):
        torch.manual_seed(0)
        model = wrap(Stack())
        optimizer = overlap(make_optimizer("adamw", model))
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


def sees_the_step(rank, world_size, folder, every=False):
    """Take each action in one way to shard, in another on one rank than on several, or in all."""
    ways = [*settings()[3:], settings()[0]]
    for number, wrap in enumerate(ways):
        first = (number + 1 + 2 * (world_size > 1)) % 4
        for action in ACTIONS if every else ACTIONS[first::4]:
            seen = []
            for overlaps in (False, True):
                torch.manual_seed(0)
                model = wrap(Stack())
                if action is copy_and_run and wrap is by_block:
                    continue  # copied neither here nor by torch's own
                optimizer = make_optimizer("adamw", model)
                if overlaps:
                    overlap(optimizer)
                train(model, optimizer, 1)
                model(torch.ones(2, 8)).sum().backward()
                with counted(lambda: time.sleep(0.003)):
                    optimizer.step()
                    if action not in (keep_gradients, zero_gradients, step_again):
                        optimizer.zero_grad()
                    place = folder / f"{number} {action.__name__} {overlaps}"
                    seen.append(action(model, optimizer, place))
            if seen:
                assert_same(*seen)


USES = [
    lambda model, optimizer, folder: model(torch.ones(2, 8)),
    lambda model, optimizer, folder: model.blocks[1].up.bias + 1,
    lambda model, optimizer, folder: save(folder, model, optimizer, step=2),
    lambda model, optimizer, folder: optimizer.step(),
    lambda model, optimizer, folder: optimizer.state_dict(),
]


def fails(rank, world_size, folder):
    told = []
    for number, wrap in enumerate((settings()[3], by_block)):
        torch.manual_seed(0)
        model = wrap(Stack())
        optimizer = overlap(make_optimizer("adamw", model))
        train(model, optimizer, 1)
        save(folder / str(number), model, optimizer, step=1)
        right = everything(model, optimizer)
        model(torch.ones(2, 8)).sum().backward()
        turn = iter(range(4))
        with counted(lambda turn=turn: 1 / 0 if next(turn) == 2 else None):
            optimizer.step()
            optimizer.zero_grad()
            for use in USES:
                with pytest.raises((ShardError, CheckpointError)) as error:
                    use(model, optimizer, folder / "never")
                told.append(str(error.value))
        load(folder / str(number), model, optimizer)
        assert_same(everything(model, optimizer), right)
        train(model, optimizer, 1)
    return told


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_that_fails_is_told_to_all_who_ask_until_a_load(world_size, tmp_path):
    for rank, told in enumerate(run_ranks(fails, world_size, tmp_path)):
        assert len(told) == 2 * len(USES)
        for use, text in zip(USES * 2, told, strict=True):
            who = "[0-2]" if use is USES[2] else str(rank)  # all hear of a save that failed
            why = r"the optimizer's step, which ran in the background, failed: ZeroDivisionError: "
            assert re.search(rf"rank {who}, unit 'blocks\.1': {why}", text), text


def refused(rank, world_size):
    model = shard(Stack())
    with pytest.raises(ConfigError, match="Adafactor is not known to work element by element"):
        overlap(torch.optim.Adafactor(model.parameters()))
    with pytest.raises(ConfigError, match="threads=0: expected 1 or more, or None"):
        overlap(torch.optim.SGD(model.parameters()), threads=0)
    with pytest.raises(ConfigError, match=r"are gone.*use overlap\(optimizer\)"):
        overlap(torch.optim.SGD(model.parameters()), in_backward=True)


def scaled(rank, world_size):
    """One step overflows and is skipped; a closure is called; a parameter is of no unit."""
    runs = []
    for overlaps in (False, True):
        torch.manual_seed(0)
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
        runs.append([*everything(model, optimizer), alone.detach(), torch.tensor(scales)])
    assert_same(*runs)


def old_graphs(rank, world_size):
    """Run a graph of before the step after it: all ranks refuse, whose threads are late or not."""
    told = []
    for options in ({"stage": 3}, {"stage": 1}, {"stage": 0}):
        torch.manual_seed(0)
        model = shard(Stack(), **options)
        optimizer = overlap(make_optimizer("fused", model))
        train(model, optimizer, 1)
        first, second = (model(torch.ones(2, 8)).sum() for _ in range(2))
        first.backward()
        with counted(lambda: time.sleep(0.02 * (rank + 1))):
            optimizer.step()
            with pytest.raises(StateError) as error:
                second.backward()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_graph_of_before_the_step_is_refused_on_all_ranks_alike(world_size):
    first, *others = run_ranks(old_graphs, world_size)
    assert len(first) == 3 and all(text == first[0] for text in first)
    assert all(told == first for told in others)


def plain_cases(rank, world_size):
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

    for change in (shared_gradient, pinned, without_state, by_hand):
        runs = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            model = by_block(Stack()) if change is by_hand else shard(Stack(), stage=1)
            optimizer = make_optimizer("adamw", model)
            if overlaps:
                overlap(optimizer)
            if change is by_hand:  # of a model that has not run
                by_hand(model, optimizer)
                optimizer.step()
                before = 0
            else:
                train(model, optimizer, 2)
                model(torch.ones(2, 8)).sum().backward()
                before = 1
            change(model, optimizer)
            with counted() as threads:
                optimizer.step()
                assert len(optimizer.state) == 14
                now = [t for t in threads if t == threading.get_ident()]
                if change is shared_gradient:
                    assert len(now) == (4 if overlaps else 0)
                elif before:
                    assert not threads
                if change is pinned:
                    model.blocks[0].reshard()
                runs.append(everything(model, optimizer))
        assert_same(*runs)


def lives_as_ever(rank, world_size):
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
    sharded = by_block(Stack())
    ours = overlap(make_optimizer("adamw", sharded))
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


def call_hooks_at_the_first_step(rank, world_size):
    """A hook of the user's that raises before a step means that there is none."""
    runs = []
    for offload in (None, "cpu"):
        torch.manual_seed(0)
        model = shard(Stack(), offload=offload)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        seen = []
        left = [1]

        def refuse_once(*_, left=left):
            if left:
                raise KeyError(left.pop())

        def look(*_, model=model, seen=seen):
            seen += [param.full_tensor().clone() for param in model.parameters()]

        optimizer.register_step_pre_hook(refuse_once)
        optimizer.register_step_post_hook(look)
        for step in range(3):
            model(torch.linspace(-1, step + 1, 24).view(3, 8)).square().mean().backward()
            try:
                optimizer.step()
            except KeyError:
                assert step == 0
            optimizer.zero_grad()
        runs.append(seen + everything(model, optimizer))
    assert_same(*runs)


def load_while_another_steps(rank, world_size, folder):
    """Two optimizers share units; the step of one fails, that of the other takes a while."""
    torch.manual_seed(0)
    model = shard(Stack(), offload="cpu")
    params = [*model.parameters()]
    optimizers = [torch.optim.SGD(params[::2], lr=0.05), torch.optim.AdamW(params[1::2], lr=0.05)]
    save(folder / "saved", model)
    saved = [param.full_tensor().clone() for param in params]
    plain = Apart.__call__

    def step(self):
        if isinstance(self._like, torch.optim.SGD):
            raise ArithmeticError("no step today")
        time.sleep(0.1)
        plain(self)

    with pytest.MonkeyPatch.context() as patch:
        for number in range(2):
            if number:
                patch.setattr(Apart, "__call__", step)
            model(torch.linspace(-1, 1, 24).view(3, 8)).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        load(folder / "saved", model)
        for optimizer in optimizers:
            vars(optimizer)["_shardwise_overlap"]._thread.shutdown()  # all that it had to do
        assert_same([param.full_tensor() for param in params], saved)


SCENARIOS = {
    # Every optimizer in every setting in `make soak CAMPAIGN=matrices`.
    "steps in the background have the bits of plain ones": (takes_the_plain_steps, (1, 3)),
    "offloaded units step behind from the second step on": (steps_offloaded_units_behind, (1, 3)),
    # A thousand steps of each in `make soak CAMPAIGN=matrices`.
    "delays in the thread neither change a bit nor hang": (with_delays, ((3, 12),)),
    "a read waits for its own unit and metadata for none": (waits_for_no_more, (1, 3)),
    "whatever comes after a step sees it whole": (sees_the_step, (1, 3)),
    "what cannot be stepped apart is refused": (refused, (1,)),
    "loss scaling skips and steps as ever": (scaled, (1, 3)),
    "steps that cannot wait are made at once": (plain_cases, (1, 3)),
    "an overlapped optimizer lives and ends as ever": (lives_as_ever, (1,)),
    "hooks see the first step of an offloaded model too": (call_hooks_at_the_first_step, (1, 2)),
    "a load after a failed step waits for the others": (load_while_another_steps, (1, 2)),
}


@each_of(SCENARIOS)
def test_overlapped_steps(run, tmp_path):
    run(tmp_path)
