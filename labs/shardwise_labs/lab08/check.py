"""The check of lab 8: blocks and their order one by one, then training with moments in a file."""

import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardwise_labs.counting import Meter, Traffic
from shardwise_labs.given import LR, batch, loss_of, make_model, numel_of
from shardwise_labs.judge import Judge
from shardwise_labs.reader import load
from shardwise_labs.words import WrongAnswer, count_difference, difference, number_of

STEPS, SIZE = 3, 4096
PATIENCE_S = 1.0  # to wait for a read that should have begun on another thread


@dataclass
class _Trained:
    """Three steps: the values, bytes held at the end, and those moved in the last step."""

    values: Tensor
    held: int
    moved: int = 0
    reads: int = 0


@dataclass
class _Moved:
    """Bytes that went through os.pread and os.pwrite."""

    read: int = 0
    written: int = 0
    reads: int = 0


@contextmanager
def _counted() -> Iterator[_Moved]:
    moved, pread, pwrite, lock = _Moved(), os.pread, os.pwrite, threading.Lock()

    def read(file: int, count: int, place: int) -> bytes:
        data = pread(file, count, place)
        with lock:
            moved.read, moved.reads = moved.read + len(data), moved.reads + 1
        return data

    def write(file: int, data: bytes, place: int) -> int:
        moved.written += len(data)
        return pwrite(file, data, place)

    with mock.patch.object(os, "pread", read), mock.patch.object(os, "pwrite", write):
        yield moved


def _train(judge: Judge, steps: int = STEPS, rows: int = 1) -> _Trained:
    offloaded, model = judge.call("Offloaded"), make_model()
    with tempfile.TemporaryDirectory() as folder, Traffic(judge.folder):
        meter = Meter(*model.parameters())
        with meter, _counted() as moved:
            trainer = offloaded(model, LR, Path(folder, "moments"))  # type: ignore[operator]
            for step in range(steps):
                moved.read = moved.written = moved.reads = 0
                loss = loss_of(model, batch(judge.rank, step, rows))
                trainer.backward(loss)
                del loss
                trainer.step()
            held = meter.rested()
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        return _Trained(values, held, moved.read + moved.written, moved.reads)


@cache
def _zero1(rank: int, folder: Path, steps: int = STEPS) -> _Trained:
    """Train with lab 3's solution."""
    model = make_model()
    meter = Meter(*model.parameters())
    with meter, Traffic(folder):
        trainer = load(folder / "lab03_zero1.py").Zero1(model, LR)
        for step in range(steps):
            trainer.backward(loss_of(model, batch(rank, step)))
            trainer.step()
        held = meter.rested()
    return _Trained(torch.cat([p.detach().flatten() for p in model.parameters()]), held)


def run(judge: Judge) -> None:
    """Train with moments in memory and in a file."""
    kept, own = _zero1(judge.rank, judge.solutions), _train(judge)
    numel = -(-numel_of(make_model()) // judge.num_ranks)
    is_same = torch.equal(kept.values, own.values)
    judge.row("held, moments in memory", f"{kept.held:>10,}")
    judge.row("held, moments in a file", f"{own.held:>10,}")
    judge.row("moved in a step", f"{own.moved:>10,}")
    judge.row("moved, per element of a slice", f"{own.moved / numel:>10.2f}")
    judge.row("reads in a step", f"{own.reads:>10,}")
    judge.row("the bits of lab 3", f"{'yes' if is_same else 'no':>10}")


def check(judge: Judge) -> None:
    """Compare blocks with known ones, training with lab 3, and bytes with those that were moved."""
    with judge.judging("blocks"):
        _judge_blocks(judge)
    if judge.has_met_all():
        for target, name in (("step", "step_by_blocks"), ("ahead", "step_ahead")):
            with judge.judging(target):
                judge.judge(target, _step_problem(judge, name), good="as Adam on the whole slice")
        with judge.judging("tokens"):
            _judge_tokens(judge)
        if judge.has_met_all():
            with judge.judging("bits"):
                _judge_training(judge)


def _judge_blocks(judge: Judge) -> None:
    blocks = judge.call("blocks")
    for numel, size, want in (
        (10, 4, [(0, 4), (4, 8), (8, 10)]),
        (8, 4, [(0, 4), (4, 8)]),
        (3, 4, [(0, 3)]),
    ):
        found = blocks(numel, size)  # type: ignore[operator]
        if not isinstance(found, list):
            raise WrongAnswer(f"blocks returns {found!r}, which is no list")
        got = [tuple(each) for each in found]
        if got != want:
            why = ""
            if got[-1:] and got[-1][1] > numel:
                why = f": the last block ends at {got[-1][1]}, and there are {numel} elements"
            elif len(got) < len(want):
                why = ": the last elements are in no block"
            elif len(got) > len(want):
                why = ": the last block is empty"
            elif [(b, e - b) for b, e in want] == got:
                why = ": the second number is where a block ends, and not how long it is"
            elif [(b, e - 1) for b, e in want] == got:
                why = ": an end is the element after the last one"
            judge.judge("blocks", f"blocks({numel}, {size}) is {got}, {want} expected{why}")
            return
    judge.judge("blocks", good="every element in one block")


@dataclass
class _Watch:
    """The order of reads, steps and writes, and blocks in memory at once."""

    events: list[tuple[str, int]] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    here: int = 0
    most: int = 0
    is_ahead: bool = True
    is_beside: bool = True
    handed: int = 0  # reads given to another thread
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, kind: str, begin: int) -> None:
        """Add an event."""
        with self.changed:
            self.events.append((kind, begin))
            self.here += (kind == "read") - (kind == "write")
            self.most = max(self.most, self.here)
            if kind == "read":
                self.begun.add(begin)
            self.changed.notify_all()

    def hand(self, function: Any, begin: int) -> None:
        """Note that a call was handed to another thread; it begins when the thread gets to it."""
        with self.changed:
            self.begun.add(begin)
            if getattr(function, "__name__", "") == "read":
                self.handed += 1
                self.most = max(self.most, self.handed - self.num("adam"))

    def num(self, kind: str) -> int:
        """Return the number of events of a kind."""
        return sum(each == kind for each, _begin in self.events)

    def wait_for_step(self, begin: int) -> None:
        """Wait until the block at `begin` is stepped, or patience ends."""
        with self.changed:
            if not self.changed.wait_for(lambda: ("adam", begin) in self.events, PATIENCE_S):
                self.is_beside = False

    def wait_for(self, begin: int) -> None:
        """Wait until the read of a block has begun, or patience ends."""
        with self.changed:
            if not self.changed.wait_for(lambda: begin in self.begun, PATIENCE_S):
                self.is_ahead = False


def _step_problem(judge: Judge, name: str) -> str | None:
    numel, size, lr = 2500, 1000, 0.1
    generator = torch.Generator().manual_seed(8)
    values = torch.randn(numel, generator=generator)
    want, watch, step_by = values.clone(), _Watch(), judge.call(name)
    is_ahead = name == "step_ahead"
    store_class: Any = judge.call("Store")
    adam: Any = judge.call("adam")
    parameter = torch.nn.Parameter(want)
    optimizer = torch.optim.Adam([parameter], lr=lr, foreach=False)
    start = values.data_ptr()

    class Store(store_class):  # type: ignore[misc]
        def read(self, begin: int, end: int) -> Any:
            watch.note("read", begin)
            if is_ahead and watch.is_beside and begin:
                watch.wait_for_step(begin - size)
            return super().read(begin, end)

        def write(self, begin: int, moments: Any) -> None:
            watch.note("write", begin)
            super().write(begin, moments)

    def stepped(part: Tensor, *rest: Any) -> None:
        begin = (part.data_ptr() - start) // 4
        if is_ahead and watch.is_ahead and begin + size < numel:
            watch.wait_for(begin + size)
        watch.note("adam", begin)
        adam(part, *rest)

    whole_submit = ThreadPoolExecutor.submit

    def submit(pool: ThreadPoolExecutor, function: Any, /, *args: Any, **named: Any) -> Any:
        if args and isinstance(args[0], int):
            watch.hand(function, args[0])
        return whole_submit(pool, function, *args, **named)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(judge.theirs, "adam", stepped),
        mock.patch.object(ThreadPoolExecutor, "submit", submit),
    ):
        store = Store(Path(folder, "moments"), numel)
        for step in (1, 2):
            grad = torch.randn(numel, generator=generator)
            parameter.grad = grad.clone()
            optimizer.step()
            watch.events.clear()
            watch.begun.clear()
            watch.here = watch.most = watch.handed = 0
            step_by(values, grad, store, step, lr, size)  # type: ignore[operator]
            if problem := _order_problem(watch, is_ahead):
                return f"{name}: {problem}"
            what = f"{name}: after step {step} the slice"
            hint = "; were the moments of the step before written?" * (step == 2)
            if problem := difference(what, values, want):
                return problem + hint
    return None


def _order_problem(watch: _Watch, is_ahead: bool) -> str | None:
    names = {kind: [b for k, b in watch.events if k == kind] for kind in ("read", "adam", "write")}
    for kind, begins in names.items():
        if sorted(begins) != [0, 1000, 2000]:
            said = (
                "is read" if kind == "read" else "is written" if kind == "write" else "is stepped"
            )
            missing = [b for b in (0, 1000, 2000) if b not in begins]
            if missing:
                return f"the block at {missing[0]} {said} nowhere"
            return f"{len(begins)} blocks: a block {said} twice"
    for begin in (0, 1000, 2000):
        read, step, write = (watch.events.index((kind, begin)) for kind in names)
        if not read < step < write:
            return f"the block at {begin} is written before its step: the old moments are kept"
    if is_ahead and not watch.is_ahead:
        return "a block is stepped, and the read of the next one has not begun"
    if is_ahead and not watch.is_beside:
        return "the next block's read is waited for before this block's step: nothing overlaps"
    allowed = 2 if is_ahead else 1
    if watch.most > allowed:
        return f"{watch.most} blocks in memory at once, {allowed} allowed"
    return None


def _judge_tokens(judge: Judge) -> None:
    tokens = judge.call("tokens_to_hide")
    for flops, link, ranks in ((4e14, 25e9, 8), (1e14, 5e9, 2)):
        got = number_of("tokens_to_hide", tokens(flops, link, ranks))  # type: ignore[operator]
        want = 16 / ranks / link * flops / 6
        known = {
            "moments are read AND written": want / 2,
            "each rank moves its slice only": want * ranks,
            "a token costs 6 operations per parameter: forward 2, backward 4": want * 6,
            "forward is 2 of them, backward 4": want * 3,
            "the ranks divide the bytes, so they divide the tokens": want * ranks**2,
        }
        where = f"tokens at {flops:.0e} operations/s, {link / 1e9:g} GB/s and {ranks} ranks"
        if problem := count_difference(where, got, want, known):
            judge.judge("tokens", problem)
            return
    judge.judge("tokens", good="more tokens per step hide the copies, whatever the model")


def _judge_training(judge: Judge) -> None:
    calls, step_ahead = [], judge.call("step_ahead")

    def counted(*args: Any, **named: Any) -> None:
        calls.append(step_ahead)
        step_ahead(*args, **named)  # type: ignore[operator]

    with mock.patch.object(judge.theirs, "step_ahead", counted):
        own = _train(judge)
    n, numel = judge.num_ranks, -(-numel_of(make_model()) // judge.num_ranks)
    problem = None
    for steps in (1, STEPS):
        got = own.values if steps == STEPS else _train(judge, steps).values
        want = _zero1(judge.rank, judge.solutions, steps).values
        start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
        cuts = (each.split(numel) for each in (got, want, start))
        for owner, (part, wanted, before) in enumerate(zip(*cuts, strict=True)):
            what = f"after step {steps} rank {owner}'s slice on rank {judge.rank}"
            known = {"is as before: gather the slices after the step": before}
            found = difference(what, part, wanted, known)
            if found and steps > 1:
                found += "; step 1 was right: are gradients set to zero, and steps counted?"
            problem = problem or found
    if problem is None and len(calls) != STEPS:
        problem = f"right, but `step` called step_ahead {len(calls)} times in {STEPS} steps"
    judge.judge("bits", problem, good=f"{STEPS} steps, the bits of lab 3")
    with judge.judging("held"):
        held = 8 * n * numel
        known = {
            "the moments are in memory, too": held + 8 * numel,
            "the moments and a gradient are in memory, too": held + 12 * numel,
            "the gradient of the slice is kept": held + 4 * numel,
        }
        problem = count_difference(f"bytes held on rank {judge.rank}", own.held, held, known)
        good = f"{held:,} bytes: values and gradients, and no moments"
        judge.judge("held", problem, good=good)
    with judge.judging("moved"):
        needed = 16 * numel
        known = {
            "moments are read, and not written": needed // 2,
            "moments are moved twice in a step": 2 * needed,
        }
        problem = count_difference("bytes read and written in a step", own.moved, needed, known)
        judge.judge("moved", problem, good=f"{needed:,} bytes: 16 for each of {numel:,} elements")
    if judge.has_met_all():
        wide = _train(judge, 1, rows=8)
        with mock.patch.object(judge.theirs, "step_ahead", judge.call("step_by_blocks")):
            one_by_one = _train(judge, 1)
        judge.facts = {
            "ranks": f"{n}",
            "held": f"{own.held:,}",
            "zero1_held": f"{_zero1(judge.rank, judge.solutions).held:,}",
            "ahead_moved": f"{own.moved:,}",
            "moved": f"{one_by_one.moved:,}",
            "wide_moved": f"{wide.moved:,}",
            "bytes moved per element": f"{own.moved / numel:.0f}",
        }
