"""The check of lab 12: training that is killed and started again, as processes of this one."""

import io
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise_labs.given import LR, batch, loss_of, make_model, numel_of
from shardwise_labs.judge import Judge
from shardwise_labs.launcher import WAIT_S, Ended, launch, result
from shardwise_labs.reader import load
from shardwise_labs.words import WrongAnswer, difference, tensor_of

STEPS, EVERY, KILLED_IN, VICTIM, RANKS = 8, 2, 6, 1, 2
KEYS = ("values", "first", "second", "count", "random")


def _trainer(judge: Judge) -> Any:
    model = make_model()
    trainer = load(judge.solutions / "lab03_zero1.py").Zero1(model, LR)
    trainer.model, trainer.numel = model, numel_of(model)
    return trainer


def _losses(trainer: Any, rank: int, found: dict[int, str]) -> Callable[[int], Tensor]:
    """Return the loss of a step as a function; inputs have noise of the global generator."""

    def loss_of_step(step: int) -> Tensor:
        x, classes = batch(rank, step)
        loss = loss_of(trainer.model, (x + 0.1 * torch.randn(x.shape), classes))
        found[step] = loss.item().hex()
        return loss

    return loss_of_step


@dataclass(frozen=True)
class _Oracle:
    """The losses of each rank by step, and the values after training, never interrupted."""

    losses: list[dict[str, str]]
    values: list[float]


@cache
def _oracle(solutions: Path) -> _Oracle:
    def work(rank: int) -> object:
        torch.manual_seed(100 + rank)
        model, found = make_model(), dict[int, str]()
        trainer = load(solutions / "lab03_zero1.py").Zero1(model, LR)
        trainer.model = model
        loss_of_step = _losses(trainer, rank, found)
        for step in range(1, STEPS + 1):
            trainer.backward(loss_of_step(step))
            trainer.step()
        return [found, trainer.flat.values[: numel_of(model)].tolist()]

    ended = result(launch(RANKS, work, solutions))
    return _Oracle([each[0] for each in ended], ended[0][1])


def _train(
    judge: Judge, folder: Path, kill_in: int = 0, kill_in_save: int = 0, steps: int = STEPS
) -> list[Ended]:
    """Run the reader's `train`; the victim kills itself in a step, or in the middle of a save."""

    def work(rank: int) -> object:
        torch.manual_seed(100 + rank)
        trainer, found = _trainer(judge), dict[int, str]()
        loss_of_step, saves = _losses(trainer, rank, found), list[int]()
        whole_save, whole_sync, whole_rename = torch.save, os.fsync, os.rename

        def loss_or_death(step: int) -> Tensor:
            saved = step - 1
            if saved and saved % EVERY == 0 and not (folder / f"step-{saved:06}").exists():
                (folder / "early").touch()
            if step == kill_in and rank == VICTIM:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss_of_step(step)

        def torn(state: object, file: Any, *_: object, **__: object) -> None:
            saves.append(0)
            is_torn = len(saves) * EVERY >= kill_in_save
            if not is_torn or rank != VICTIM:
                whole_save(state, file)
                if is_torn:
                    (folder / "saved").touch()
                return
            buffer = io.BytesIO()
            whole_save(state, buffer)
            half = buffer.getvalue()[: len(buffer.getvalue()) // 2]
            if isinstance(file, str | os.PathLike):
                Path(file).write_bytes(half)
            else:
                file.write(half)
                file.flush()
            # The other rank still receives what this one sent before.
            end = time.monotonic() + WAIT_S / 4
            while not (folder / "saved").exists() and time.monotonic() < end:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)

        def sync(file: int) -> None:
            (folder / "synced").touch()
            whole_sync(file)

        def rename(old: Any, new: Any, **more: Any) -> None:
            time.sleep(0.05)  # for a rank that does not wait for it
            whole_rename(old, new, **more)

        saving = torn if kill_in_save else whole_save
        patches = {"fsync": sync, "rename": rename}
        with mock.patch.object(torch, "save", saving), mock.patch.multiple(os, **patches):
            judge.call("train")(trainer, folder, steps, EVERY, loss_or_death)  # type: ignore[operator]
        return found

    return launch(RANKS, work, judge.folder)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("step-*"))


def run(judge: Judge) -> None:
    """Kill rank 1 in a step, start again; kill it in a save, start again."""
    oracle = _oracle(judge.solutions)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ended = _train(judge, folder, kill_in=KILLED_IN)
        judge.row(f"rank {VICTIM} in step {KILLED_IN}", f"signal {ended[VICTIM].killed_by}")
        judge.row("checkpoints", " ".join(_names(folder)) or "none")
        found = result(_train(judge, folder))
        judge.row("started again at step", min(found[0], key=int))
        judge.row("steps done again", f"{KILLED_IN - int(min(found[0], key=int))}")
        wrong = sum(loss != oracle.losses[r][s] for r in range(2) for s, loss in found[r].items())
        judge.row("losses that differ", f"{wrong}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train(judge, folder, kill_in_save=2 * EVERY)
        judge.row("killed while saving step 4", " ".join(_names(folder)) or "none")
        found = result(_train(judge, folder))
        judge.row("started again at step ", min(found[0], key=int, default="none"))


def check(judge: Judge) -> None:
    """Compare functions with known files and slices, then kill and restart training."""
    with judge.judging("newest"):
        _judge_newest(judge)
    with judge.judging("recut"):
        _judge_recut(judge)
    if not judge.has_met_all():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with judge.judging("save"):
            _judge_save(judge, folder)
        if not judge.has_met_all():
            return
        with judge.judging("torn"):
            _judge_torn(judge)
        with judge.judging("losses"):
            _judge_losses(judge, folder)
        if judge.has_met_all():
            with judge.judging("ranks"):
                _judge_ranks(judge, folder)
            _count_without_moments(judge)


def _judge_newest(judge: Judge) -> None:
    newest = judge.call("newest")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if (found := newest(folder)) is not None:  # type: ignore[operator]
            raise WrongAnswer(f"{found} in an empty folder: None is expected")
        for each in ("step-000900", "step-001000", "step-000020", ".tmp-001100", "summary"):
            (folder / each).mkdir()
        os.utime(folder / "step-000020", (2e9, 2e9))  # copied later
        found = newest(folder)  # type: ignore[operator]
        if not isinstance(found, Path):
            raise WrongAnswer(f"newest returns {found!r}; a Path is expected")
        why = {
            ".tmp-001100": "a save that did not end is no checkpoint",
            "step-000020": "the highest step counts, and not the time of the file",
            "step-000900": "the highest step counts",
            "summary": "that is no checkpoint",
        }
        if found.name != "step-001000":
            said = f": {why[found.name]}" if found.name in why else ""
            raise WrongAnswer(f"newest gives {found.name}, step-001000 is the highest{said}")
    judge.judge("newest", good="the highest step that is whole")


def _judge_recut(judge: Judge) -> None:
    recut, numel = judge.call("recut"), 10
    real = torch.arange(1.0, numel + 1)
    for old, new in ((4, 3), (3, 4), (2, 2), (3, 3)):
        size, now = -(-numel // old), -(-numel // new)
        flat = torch.cat([real, torch.full((old * size - numel,), 99.0)])
        target = torch.cat([real, torch.zeros(new * now - numel)])
        for rank in range(new):
            got = recut([s.clone() for s in flat.split(size)], numel, rank, new)  # type: ignore[operator]
            what = f"from {old} ranks to {new}: the slice of rank {rank}"
            got, want = tensor_of(what, got, (now,)), target[rank * now : (rank + 1) * now]
            if 99.0 in got:
                raise WrongAnswer(f"{what} has elements that only made the old slices equal")
            known = {
                "is that of rank 0": target[:now],
                "is what this rank had before": flat[rank * size : (rank + 1) * size],
            }
            if problem := difference(what, got, want, known):
                raise WrongAnswer(problem)
            if got.untyped_storage().nbytes() > 4 * now:
                raise WrongAnswer(f"{what} is a view of all elements, which stay in memory: clone")
    judge.judge("recut", good="the same elements on any number of ranks")


def _judge_save(judge: Judge, folder: Path) -> None:
    ended = _train(judge, folder, kill_in=KILLED_IN)
    if not ended[VICTIM].killed_by:
        result(ended)
    names, wants = _names(folder), ["step-000002", "step-000004"]
    if names != wants:
        raise WrongAnswer(f"checkpoints after step 5: {names}, {wants} expected")
    for name in names:
        files = sorted(path.name for path in (folder / name).iterdir())
        if files != ["rank0.pt", "rank1.pt"]:
            raise WrongAnswer(f"{name} has {files}, ['rank0.pt', 'rank1.pt'] expected")
    if left := [path.name for path in folder.glob(".tmp-*")]:
        raise WrongAnswer(f"{left[0]} is left after the save: rename the folder, do not copy it")
    problem = None
    if not (folder / "synced").exists():
        problem = "the file is not synced: after a power cut its name may be there, without bytes"
    elif (folder / "early").exists():
        problem = "a rank left `save` before rank 0 had renamed the folder"
    judge.judge("save", problem, good="two checkpoints, each with a file of each rank")
    with judge.judging("state"):
        _judge_state(judge, folder / "step-000004")


def _judge_state(judge: Judge, folder: Path) -> None:
    size = -(-numel_of(make_model()) // RANKS)
    for rank in range(RANKS):
        state = torch.load(folder / f"rank{rank}.pt")
        if not isinstance(state, dict):
            raise WrongAnswer("the state is not a dictionary")
        for key in KEYS:
            if key not in state:
                raise WrongAnswer(f'"{key}" is missing in the state')
        for key in ("values", "first", "second"):
            tensor_of(f'"{key}" of rank {rank}', state[key], (size,))
            memory = state[key].untyped_storage().nbytes()
            if memory > 4 * size:
                said = f'"{key}" of rank {rank} is a view of {memory:,} bytes'
                raise WrongAnswer(f"{said}, and torch.save writes them all: clone")
        if int(state["count"]) != 4:
            raise WrongAnswer(f'"count" is {int(state["count"])} after 4 steps')
        if not state["second"].ge(0).all():
            raise WrongAnswer('"second" has negative elements: is it the first moment?')
        if torch.equal(state["first"], state["second"]):
            raise WrongAnswer('"first" and "second" are the same')
    judge.judge("state", good=f"{', '.join(KEYS)} of each rank")


def _judge_torn(judge: Judge) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _train(judge, folder, kill_in_save=2 * EVERY, steps=2 * EVERY)
        names = _names(folder)
        if "step-000004" in names:
            raise WrongAnswer(
                "rank 1 was killed while it saved step 4, and step-000004 is there: rename when "
                "all ranks have written"
            )
        left = [path for path in folder.glob(".tmp-*/rank*.pt") if _is_whole(path)]
        judge.facts = {"left": f"{len(left)}", "torn_from": f"{int(names[-1][5:])}"}
    judge.judge("torn", good="a save that was killed leaves no checkpoint; step 2 is the newest")


def _is_whole(path: Path) -> bool:
    try:
        torch.load(path)
    except Exception:
        return False
    return True


def _judge_losses(judge: Judge, folder: Path) -> None:
    found, oracle = result(_train(judge, folder)), _oracle(judge.solutions)
    for losses in found:
        steps = sorted(map(int, losses))
        if not steps or steps[0] != 5:
            raise WrongAnswer(f"training goes on with step {steps[:1]}, 5 expected")
    # The first step that differs on any rank has the cause.
    for step in steps:
        for rank, losses in enumerate(found):
            got, want = (float.fromhex(each[str(step)]) for each in (losses, oracle.losses[rank]))
            if got != want:
                first = "the values" if step == steps[0] else "the moments, or their count"
                noise = " or the random generator" if step == steps[0] else ""
                raise WrongAnswer(
                    f"rank {rank}, step {step}: the loss is {got:.9f}, {want:.9f} without a "
                    f"failure: {first}{noise} are not as they were"
                )
    judge.facts |= {"losses that differ after a restart": "0", "resumed": f"{2 * len(steps)}"}
    judge.judge("losses", good=f"{len(steps)} steps on each rank, to the bit")


def _judge_ranks(judge: Judge, folder: Path) -> None:
    oracle = _oracle(judge.solutions)

    def work(_rank: int) -> object:
        trainer = _trainer(judge)
        states = [torch.load(folder / f"step-{STEPS:06}" / f"rank{r}.pt") for r in range(RANKS)]
        judge.call("restore")(trainer, states, trainer.numel)  # type: ignore[operator]
        adam = trainer.optimizer.state[trainer.shard]
        for key in ("exp_avg", "exp_avg_sq"):
            tensor_of(key, adam[key], tuple(trainer.shard.shape))
        dist.barrier()
        return trainer.flat.values[: trainer.numel].tolist()

    for rank, values in enumerate(result(launch(RANKS + 1, work, judge.folder))):
        what = f"loaded on 3 ranks, rank {rank}: the values"
        start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
        known = {"are as before training: gather them": start}
        if problem := difference(what, torch.tensor(values), torch.tensor(oracle.values), known):
            raise WrongAnswer(problem)
    judge.facts |= {"moved": "0", "numel": f"{len(values):,}"}
    judge.judge("ranks", good="saved on 2 ranks, loaded on 3: the same values")


def _count_without_moments(judge: Judge) -> None:
    """Restart with moments of zero, as a counter-example."""
    restore, oracle = judge.call("restore"), _oracle(judge.solutions)

    def forgetful(trainer: Any, states: list[dict[str, Tensor]], numel: int) -> None:
        empty = [{**s, **{k: torch.zeros_like(s[k]) for k in ("first", "second")}} for s in states]
        restore(trainer, empty, numel)  # type: ignore[operator]

    with (
        tempfile.TemporaryDirectory() as name,
        mock.patch.object(judge.theirs, "restore", forgetful),
    ):
        _train(judge, Path(name), kill_in=KILLED_IN)
        found = result(_train(judge, Path(name)))
    wrong = sum(loss != oracle.losses[r][s] for r in range(RANKS) for s, loss in found[r].items())
    judge.facts |= {"differ": f"{wrong}"}
