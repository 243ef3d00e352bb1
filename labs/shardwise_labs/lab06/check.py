"""The check of lab 6: what the reader says about one parameter, beside a step of the engine."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise.engine.api import engine_of
from shardwise_labs.given import LR, batch, loss_of, make_model, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.words import WrongAnswer, count_difference

STATIONS = {
    "Backward.on_backward",
    "Backward.on_unit_end",
    "Engine.after_forward",
    "Engine.before_forward",
    "Reductions.add",
    "Storage.free",
    "Storage.prepare_gather",
    "Unit.finish_unshard",
}
OURS, NAME = 2, "2.up"  # a unit in the middle, and a module in it


@dataclass
class _Step:
    """A sharded model that has made one step, and its second step up to the end of backward."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    rank: int

    @classmethod
    def of(cls, rank: int, shard: Callable[..., object]) -> "_Step":
        """Shard a model, and train one step, after which the engine knows the order of units."""
        model = make_model(is_plain=True)
        shard(model, units_of(model))
        step = cls(model, torch.optim.Adam(model.parameters(), lr=LR), rank)
        step.backward()
        step.optimizer.step()
        return step

    @property
    def units(self) -> list[Any]:
        """Return the units that have parameters."""
        return [unit for unit in engine_of(self.model).units if unit.params]

    @property
    def unit(self) -> Any:
        """Return the unit of our parameter."""
        found = [unit for unit in self.units if unit.name == str(OURS)]
        return found[0] if found else self.units[0]

    def backward(self) -> None:
        """Run forward and backward."""
        self.optimizer.zero_grad()
        loss_of(self.model, batch(self.rank, 0)).backward()


def _honest(model: torch.nn.Module, modules: list[torch.nn.Module]) -> None:
    shardwise.shard(model, units=modules, stage=3)


def _recorded(judge: Judge, step: _Step) -> list[str]:
    found = judge.call("record")(step.unit, step.backward)  # type: ignore[operator]
    if sys.getprofile() is not None:
        sys.setprofile(None)
        raise WrongAnswer("the profile goes on after the step: sys.setprofile(None) ends it")
    if not isinstance(found, list):
        raise WrongAnswer("record does not return a list")
    return found


@cache
def _truth(rank: int) -> tuple[_Step, list[str]]:
    """Return a sharded model, and the stations of the unit in a step; a process makes it once."""
    step = _Step.of(rank, _honest)
    own = {id(step.unit), *map(id, step.unit.storages)}
    found: list[str] = []

    def look(frame: Any, event: str, _argument: object) -> None:
        is_station = event == "call" and frame.f_code.co_qualname in STATIONS
        if is_station and any(id(value) in own for value in frame.f_locals.values()):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(look)
    step.backward()
    sys.setprofile(None)
    return step, found


def _traffic(step: _Step) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes sent in a step and the collectives, by kind."""
    before = shardwise.debug.stats(step.model)
    step.backward()
    after = shardwise.debug.stats(step.model)
    kinds = {"gather": "shard.all_gather", "reduce": "shard.reduce_scatter"}
    return (
        {k: after.sent_bytes[name] - before.sent_bytes[name] for k, name in kinds.items()},
        {
            k: after.num_collectives[name] - before.num_collectives[name]
            for k, name in kinds.items()
        },
    )


def run(judge: Judge) -> None:
    """Follow the parameter through a step, and count what the engine sends."""
    step = _Step.of(judge.rank, judge.call("shard"))  # type: ignore[arg-type]
    for number, name in enumerate(_recorded(judge, step), 1):
        judge.row(f"{number:>2}  {name}", "")
    for moment, (kind, shape) in judge.call("forms")(  # type: ignore[operator]
        step.model.get_submodule(NAME), step.backward
    ).items():
        judge.row(moment, f"{kind} {list(shape)}")
    sent, collectives = _traffic(step)
    judge.row("gathers in a step", f"{collectives['gather']:,}")
    judge.row("sent in gathers", f"{sent['gather']:,}")
    judge.row("sent in reductions", f"{sent['reduce']:,}")
    judge.row("full bytes at once", f"{shardwise.debug.stats(step.model).param_full_peak_bytes:,}")


def check(judge: Judge) -> None:
    """Compare the reader's functions with the engine."""
    with judge.judging("rows"):
        _judge_rows(judge)
    if not judge.has_met_all():
        return
    step, truth = _truth(judge.rank)
    for target, follow in (
        ("record", lambda: _judge_record(judge, step, truth)),
        ("path", lambda: _judge_path(judge, truth)),
        ("forms", lambda: _judge_forms(judge, step)),
        ("sent", lambda: _judge_sent(judge, step)),
    ):
        with judge.judging(target):
            follow()
        if not judge.has_met_all():
            return
    judge.facts |= {"first": truth[0], "second": truth[1], "kept": f"{_kept(step):,}"}


def _kept(step: _Step) -> int:
    """Return the bytes of full parameters between forward and backward."""
    loss = loss_of(step.model, batch(step.rank, 0))
    kept = shardwise.debug.stats(step.model).param_full_bytes
    loss.backward()
    return kept


def _judge_rows(judge: Judge) -> None:
    rows_of = judge.call("rows_of")
    for rows, ranks in ((128, 2), (7, 2), (7, 4), (2, 4), (9, 4)):
        chunks = torch.arange(rows).chunk(ranks)
        for rank in range(ranks):
            begin = sum(map(len, chunks[:rank]))
            want = (begin, begin + (len(chunks[rank]) if rank < len(chunks) else 0))
            got = rows_of(rows, rank, ranks)  # type: ignore[operator]
            if got != want:
                why = ""
                if isinstance(got, tuple) and len(got) == 2:
                    floor = rows // ranks
                    if got == (rank * floor, (rank + 1) * floor):
                        why = ": rounded down, the last rows have no owner"
                    elif got[1] > rows:
                        why = f": there are {rows} rows only"
                    elif got == (want[0], want[1] - 1):
                        why = ": the second number is the row after the last one"
                    elif got == (want[0], want[1] - want[0]):
                        why = ": the second number is a row, and not how many"
                judge.judge(
                    "rows",
                    f"{rows} rows on {ranks} ranks: rank {rank} has {got}, {want} expected{why}",
                )
                return
    judge.judge("rows", good="as torch.chunk, and as the engine")


def _judge_record(judge: Judge, step: _Step, truth: list[str]) -> None:
    got = _recorded(judge, step)
    problem = None
    if not got:
        problem = "nothing was recorded: is the step between the two calls, the name co_qualname?"
    elif len(truth) < len(got) <= 3 * len(truth):
        problem = f"{len(got)} stations, {len(truth)} expected: is 'return' recorded too?"
    elif len(got) > 3 * len(truth):
        problem = f"{len(got)} stations, {len(truth)} expected: those of other units are there"
    elif sorted(set(truth)) == sorted(got):
        problem = "each station is there once and sorted; they are wanted as they came"
    elif missing := [name for name in truth if name not in got]:
        problem = f"{missing[0]} is missing: compare the ids of ALL its arguments with `own`"
    elif got != truth:
        problem = f"{', '.join(got)}; in the step there were {', '.join(truth)}"
    judge.judge("record", problem, good=f"{len(truth)} stations of unit {OURS}")


def _judge_path(judge: Judge, truth: list[str]) -> None:
    got = judge.call("path")()  # type: ignore[operator]
    if not isinstance(got, list):
        raise WrongAnswer("path does not return a list")
    for number, (name, want) in enumerate(zip(got, truth, strict=False), 1):
        if name != want:
            why = ""
            if want == "Storage.prepare_gather":
                why = ": memory comes first, while another unit computes"
            elif want == "Storage.free":
                why = ": here nothing reads the full values any more"
            elif name == "Storage.free":
                why = ": the unit is freed after that"
            elif name == "Unit.finish_unshard":
                why = ": the wait is inside of what needs the values"
            judge.judge("path", f"station {number} is {want}, and not {name}{why}")
            return
    if len(got) != len(truth):
        raise WrongAnswer(f"{len(got)} stations, {len(truth)} in the step")
    judge.judge("path", good=f"{len(truth)} stations, as in the step")


def _judge_forms(judge: Judge, step: _Step) -> None:
    module = step.model.get_submodule(NAME)
    hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
    got = judge.call("forms")(module, step.backward)  # type: ignore[operator]
    if not isinstance(got, dict):
        raise WrongAnswer("forms does not return a dictionary")
    begin, end = (judge.rank * 64, (judge.rank + 1) * 64)
    cut = ("ShardTensor", (end - begin, 64))
    wants = {"rest": cut, "forward": ("Parameter", (128, 64)), "grad": cut}
    judge.facts = {"rest_class": cut[0], "rest_shape": str(list(cut[1]))}
    for moment, want in wants.items():
        if moment not in got:
            raise WrongAnswer(f'"{moment}" is missing')
        if got[moment] != want:
            said = f'"{moment}" is {got[moment]}, {want} expected'
            why = ""
            if moment == "forward":
                why = ": look while the unit is full, in a hook of the module"
            elif got[moment] == wants["forward"]:
                why = ": that is the full parameter in forward"
            raise WrongAnswer(said + why)
    linear = torch.nn.Linear(2, 2)
    plain = judge.call("forms")(linear, lambda: linear(torch.ones(2)).sum().backward())  # type: ignore[operator]
    if plain["grad"][0] != "Tensor":
        raise WrongAnswer(f'"grad" of a plain module is a {plain["grad"][0]}: look at weight.grad')
    left = len(module._forward_hooks) + len(module._forward_pre_hooks) - hooks
    judge.judge("forms", "the hook is still there after the step" if left else None, good="3 forms")


def _judge_sent(judge: Judge, step: _Step) -> None:
    sent, collectives = _traffic(step)
    own = [sum(p.sharded.to_local().nbytes for p in unit.params) for unit in step.units]
    both = [torch.tensor(own) for _ in range(judge.num_ranks)]
    dist.all_gather(both, torch.tensor(own))
    others = both[1 - judge.rank].tolist()
    tensors = sum(len(unit.params) for unit in step.units)
    got = judge.call("sent")(own, others, tensors)  # type: ignore[operator]
    if not isinstance(got, tuple) or len(got) != 2:
        raise WrongAnswer("sent does not return two numbers")
    judge.facts |= {"gathers of six units in a step": f"{collectives['gather']}"}
    known = {
        "the last unit stays full, and is gathered once": 2 * sum(own),
        "a unit is gathered for forward and again for backward": sum(own),
        "the FIRST unit is counted once; the last stays full": 2 * sum(own) - own[0],
        "a gather sends what this rank has, not what it gets": 2 * sum(others) - others[-1],
    }
    problem = count_difference("bytes in gathers", got[0], sent["gather"], known)
    known = {
        "a reduction sends what belongs to the other rank": sum(own) + 4 * tensors,
        "ranks with a gradient are counted in the same message": sum(others),
        "gradients are reduced once": 2 * sum(others) + 4 * tensors,
    }
    problem = problem or count_difference("bytes in reductions", got[1], sent["reduce"], known)
    good = f"{sent['gather']:,} and {sent['reduce']:,} bytes, as the engine counts"
    judge.judge("sent", problem, good=good)
