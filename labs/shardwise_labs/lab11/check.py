"""The check of lab 11: places and functions one by one, then a step with three sets of degrees."""

from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise_labs.counting import Traffic
from shardwise_labs.judge import Judge
from shardwise_labs.words import WrongAnswer, count_difference, difference, tensor_of

WIDTH, HIDDEN, BLOCKS, MICRO, ROWS = 8, 16, 4, 4, 4
DEGREES = {"tensor x data": (1, 2, 2), "pipeline x data": (2, 2, 1), "pipeline x tensor": (2, 1, 2)}
NAMES = ("up", "down", "bias")
Weights = list[dict[str, Tensor]]


def _weights() -> Weights:
    generator = torch.Generator().manual_seed(11)
    shapes = {"up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN), "bias": (WIDTH,)}
    return [
        {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) / 4
            for name, shape in shapes.items()
        }
        for _ in range(BLOCKS)
    ]


def _micro(replica: int, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(30 + replica)
    data = torch.randn(MICRO, 2, rows, WIDTH, generator=generator, dtype=torch.float64)
    return [(each[0], each[1]) for each in data]


@cache
def _oracle(dp: int) -> Weights:
    """Return the mean gradients of all replicas' batches, in one process."""
    weights = [{n: w.requires_grad_() for n, w in block.items()} for block in _weights()]
    for replica in range(dp):
        for x, target in _micro(replica):
            for block in weights:
                hidden = torch.tanh(x @ block["up"].T)
                x = x + hidden @ block["down"].T + block["bias"]
            (((x - target) ** 2).mean() / MICRO / dp).backward()
    return [{n: w.grad for n, w in block.items()} for block in weights]  # type: ignore[misc]


def _part(name: str, whole: Tensor, part: int, tp: int) -> Tensor:
    """Return a rank's part of a weight: rows of up, columns of down, all of the bias."""
    if name == "bias":
        return whole
    return whole.chunk(tp, 0 if name == "up" else 1)[part]


def _place(rank: int, degrees: tuple[int, int, int]) -> tuple[int, int, int]:
    _pp, dp, tp = degrees
    return rank // (dp * tp), rank // tp % dp, rank % tp


@cache
def _group(ranks: tuple[tuple[int, ...], ...]) -> Any:
    """Return this rank's group of several that are made together; a process makes each once."""
    groups = {each: dist.new_group(list(each)) for each in ranks}
    return next(group for each, group in groups.items() if dist.get_rank() in each)


def _peers(places: list[tuple[int, ...]], axis: int) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ on one axis only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(place[:axis] + place[axis + 1 :], []).append(rank)
    return tuple(sorted(map(tuple, groups.values())))


@dataclass
class _Step:
    """A step on this rank: its gradients by block and name, its place, and what was sent."""

    grads: Weights
    place: tuple[int, int, int]
    peers: tuple[tuple[int, ...], ...]  # of tensor parallelism
    sent: dict[str, int]  # by axis


def _run(judge: Judge, degrees: tuple[int, int, int], is_theirs: bool, rows: int = ROWS) -> _Step:
    """Run a step; ranks are placed by the reader's function or by ours."""
    pp, _dp, tp = degrees
    of_theirs: Any = judge.call("coordinates")
    places = [tuple(of_theirs(r, *degrees)) if is_theirs else _place(r, degrees) for r in range(4)]
    stage, replica, part = places[judge.rank]
    tensor_peers, data_peers = _peers(places, 2), _peers(places, 1)
    tensor, data = _group(tensor_peers), _group(data_peers)
    block_of: Any = judge.call("Block")
    per_stage = BLOCKS // pp
    mine = _weights()[stage * per_stage : (stage + 1) * per_stage]
    blocks = [block_of(*(_part(n, w[n], part, tp).clone() for n in NAMES), tensor) for w in mine]
    module = nn.Sequential(*blocks)
    before, after = (
        places.index((stage + step, replica, part)) if 0 <= stage + step < pp else None
        for step in (-1, 1)
    )
    sent = {}
    with Traffic(judge.folder) as traffic:
        judge.call("run_stage")(module, before, after, _micro(replica, rows))  # type: ignore[operator]
        sent["pp"] = sum(call.sent for call in traffic.named("send", "isend"))
        sent["tp"] = sum(call.sent for call in traffic.named("all_reduce"))
        traffic.clear()
        judge.call("average")(list(module.parameters()), data)  # type: ignore[operator]
        sent["dp"] = traffic.sent
    found = [
        {n: getattr(block, n).grad for n in NAMES if getattr(block, n).grad is not None}
        for block in blocks
    ]
    return _Step(found, (stage, replica, part), tensor_peers, sent)


def _problem(judge: Judge, step: _Step, degrees: tuple[int, int, int]) -> str | None:
    pp, dp, tp = degrees
    stage, _replica, part = step.place
    per_stage = BLOCKS // pp
    for index, grads in reversed(list(enumerate(step.grads))):
        number = stage * per_stage + index
        for name in reversed(NAMES):
            want = _part(name, _oracle(dp)[number][name], part, tp)
            what = f"rank {judge.rank}, block {number}: the gradient of `{name}`"
            if name not in grads:
                return f"{what} is missing"
            known = {
                f"is exactly {MICRO:.3f} x: divide each micro-batch's loss": want * MICRO,
                f"is exactly {dp}.000 x: the mean was asked for": want * dp,
            }
            got = tensor_of(what, grads[name], tuple(want.shape))
            if problem := difference(what, got, want, known, within=1e-9):
                return problem
    return None


def run(judge: Judge) -> None:
    """Make a step with each set of degrees: its place, its peers, its bytes, and if it is right."""
    judge.row("", f"{'peers':>6}{'tensor':>8}{'data':>8}{'pipeline':>10}{'right':>7}")
    for name, degrees in DEGREES.items():
        step = _run(judge, degrees, is_theirs=True)
        (peers,) = (p for p in step.peers if judge.rank in p)
        tensor, data, pipeline = (f"{step.sent[axis]:,}" for axis in ("tp", "dp", "pp"))
        wrong = "no" if _problem(judge, step, degrees) else "yes"
        judge.row(
            name, f"{'-'.join(map(str, peers)):>6}{tensor:>8}{data:>8}{pipeline:>10}{wrong:>7}"
        )


def check(judge: Judge) -> None:
    """Compare the reader's functions with known values, and steps with one process."""
    torch.manual_seed(11)
    with judge.judging("places"):
        _judge_places(judge)
    for target, follow, good in (
        ("copy", _copy_problem, "the input's gradient comes from all parts"),
        ("sum", _sum_problem, "all parts have the output"),
        ("mean", _mean_problem, "the mean over ranks with other batches, and no others"),
    ):
        with judge.judging(target):
            judge.judge(target, follow(judge), good=good)
    if not judge.has_met_all():
        return
    with judge.judging("pipeline"):
        for before, after in ((None, 1), (0, None), (0, 2)):
            if problem := _stage_problem(judge, before, after):
                raise WrongAnswer(problem)
    if not judge.has_met_all():
        return
    step = _run(judge, DEGREES["tensor x data"], is_theirs=False)
    _judge_step(judge, "tensor", step, DEGREES["tensor x data"])
    if not judge.has_met_all():
        return
    for name in ("pipeline x data", "pipeline x tensor"):
        with judge.judging("pipeline"):
            piped = _run(judge, DEGREES[name], is_theirs=False)
            _judge_step(judge, "pipeline", piped, DEGREES[name])
        if not judge.has_met_all():
            return
    with judge.judging("sent"):
        _judge_sent(judge, step)


def _judge_step(judge: Judge, target: str, step: _Step, degrees: tuple[int, int, int]) -> None:
    with judge.judging(target):
        pp, dp, tp = degrees
        good = f"pp={pp}, dp={dp}, tp={tp}: gradients of one process"
        judge.judge(target, _problem(judge, step, degrees), good=good)


def _judge_places(judge: Judge) -> None:
    places: Any = judge.call("coordinates")
    for degrees in ((2, 2, 2), (2, 3, 4), (1, 2, 2), (3, 1, 2)):
        pp, dp, tp = degrees
        for rank in range(pp * dp * tp):
            got, want = places(rank, *degrees), _place(rank, degrees)
            if not isinstance(got, tuple) or len(got) != 3:
                raise WrongAnswer(f"coordinates returns {got!r}; three numbers are expected")
            if got != want:
                other = {
                    (
                        want[2],
                        want[1],
                        want[0],
                    ): "these are part, replica and stage: the other order",
                    (rank % pp, rank // pp % dp, rank // pp // dp): "the stage runs fastest here",
                    (rank // tp // dp, rank % dp, rank // dp % tp): "the replica runs fastest here",
                    (rank // (dp * tp), rank // tp, rank % tp): "the replica goes on past dp",
                }
                why = f": {other[got]}" if got in other else ""
                raise WrongAnswer(
                    f"rank {rank} with pp={pp}, dp={dp}, tp={tp} is {got}, {want} expected{why}"
                )
    judge.judge("places", good="each rank has a place of its own")


def _pair(judge: Judge) -> tuple[Any, list[int]]:
    """Return the group of two neighbours that this rank is in, and their ranks."""
    groups = _peers([_place(rank, (1, 2, 2)) for rank in range(4)], 2)
    (own,) = (each for each in groups if judge.rank in each)
    return _group(groups), list(own)


def _copy_problem(judge: Judge) -> str | None:
    group, ranks = _pair(judge)
    x = torch.arange(3.0, requires_grad=True)
    y = judge.call("Copy").apply(x, group)  # type: ignore[attr-defined]
    if problem := difference("the output of Copy", y.detach(), x.detach()):
        return problem
    weight = torch.full((3,), judge.rank + 1.0)
    given = weight.clone()
    with Traffic(judge.folder) as traffic:
        y.backward(given)
    want = torch.full((3,), float(sum(rank + 1 for rank in ranks)))
    known = {
        "is that through this rank's part alone: add those of the group": weight,
        "is the mean over the group; a sum was asked for": want / 2,
        "is the sum over all ranks, not over the group": torch.full((3,), 10.0),
    }
    if x.grad is None:
        return "the input gets no gradient through Copy"
    problem = difference("the gradient of Copy's input", x.grad, want, known)
    if not torch.equal(given, weight):
        problem = problem or "Copy changes the gradient that it was given: add in a clone"
    return problem or count_difference("bytes sent by Copy", traffic.sent, 12)


def _sum_problem(judge: Judge) -> str | None:
    group, ranks = _pair(judge)
    x = torch.full((3,), judge.rank + 1.0, requires_grad=True)
    before = x.detach().clone()
    with Traffic(judge.folder) as traffic:
        y = judge.call("Sum").apply(x, group)  # type: ignore[attr-defined]
    want = torch.full((3,), float(sum(rank + 1 for rank in ranks)))
    known = {
        "is this rank's summand alone": before,
        "is the mean over the group; a sum was asked for": want / 2,
        "is the sum over all ranks, not over the group": torch.full((3,), 10.0),
    }
    if not isinstance(y, Tensor):
        return "Sum returns no tensor"
    problem = difference("the output of Sum", y.detach(), want, known)
    if not torch.equal(x.detach(), before):
        problem = problem or "Sum changes its input: add in a clone"
    return problem or count_difference("bytes sent by Sum", traffic.sent, 12)


def _mean_problem(judge: Judge) -> str | None:
    places = [_place(rank, (1, 2, 2)) for rank in range(4)]
    groups = _peers(places, 1)
    (ranks,) = (each for each in groups if judge.rank in each)
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    parameters[0].grad = torch.full((4,), (judge.rank + 1.0) ** 2)
    with Traffic(judge.folder) as traffic:
        judge.call("average")(parameters, _group(groups))  # type: ignore[operator]
    total = float(sum((rank + 1) ** 2 for rank in ranks))
    known = {
        "is the sum, the mean was asked for: exactly 2.000 x": torch.full((4,), total),
        "is exactly 0.500 x: divide by the ranks with other batches only": torch.full(
            (4,), total / 4
        ),
        "is the mean over all ranks; parts of a tensor are not averaged": torch.full((4,), 7.5),
        "is this rank's alone": torch.full((4,), (judge.rank + 1.0) ** 2),
        "is the sum over all ranks, divided by dp": torch.full((4,), 15.0),
    }
    if parameters[0].grad is None:
        return "the gradient is gone"
    want = torch.full((4,), total / 2)
    what = f"the gradient on rank {judge.rank}, with others on ranks {list(ranks)},"
    problem = difference(what, parameters[0].grad, want, known)
    return problem or count_difference("bytes sent by average", traffic.sent, 16)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, -1.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _stage_problem(judge: Judge, before: int | None, after: int | None) -> str | None:
    """Run one stage alone; its neighbours' messages are known, and none is really sent."""
    stage, generator = _Scale(), torch.Generator().manual_seed(5)
    inputs, targets, grads = torch.randn(3, MICRO, 3, generator=generator)
    got: dict[int | None, int] = {before: 0, after: 0}
    sent: dict[int | None, list[Tensor]] = {before: [], after: []}

    def receive(tensor: Tensor, src: int | None = None, *_: object, **__: object) -> Any:
        source = inputs if src == before else grads
        with torch.no_grad():
            tensor.copy_(source[got[src] % MICRO])
        got[src] += 1
        return mock.MagicMock()

    def send(tensor: Tensor, dst: int | None = None, *_: object, **__: object) -> Any:
        sent[dst].append(tensor.detach().clone())
        return mock.MagicMock()

    names = {"recv": receive, "irecv": receive, "send": send, "isend": send}
    given = [
        (torch.zeros(3) if before is not None else x.clone(), target)
        for x, target in zip(inputs, targets, strict=True)
    ]
    with mock.patch.multiple(dist, **names):
        judge.call("run_stage")(stage, before, after, given)  # type: ignore[operator]
    where = f"a stage with `before` {before} and `after` {after}"
    for other, what in ((before, "inputs"), (after, "gradients")):
        if other is not None and got[other] != MICRO:
            return f"{where}: {got[other]} {what} received from rank {other}, {MICRO} expected"
    x = inputs.clone().requires_grad_()
    y = stage(x)
    weight = stage.weight.grad
    stage.weight.grad = None
    if after is None:
        ((y - targets) ** 2).mean(1).sum().div(MICRO).backward()
    else:
        y.backward(grads)
    wants = {before: x.grad, after: y.detach()}
    for other, want in wants.items():
        if other is not None and len(sent[other]) != MICRO:
            why = "" if sent[other] or other == after else ": does its input require a gradient?"
            return f"{where}: {len(sent[other])} messages to rank {other}, {MICRO} expected{why}"
        if other is not None and want is not None:
            message = torch.stack(sent[other])
            known = {
                "is in another order than the neighbour expects": want.flip(0),
                f"is exactly {MICRO}.000 x: divide each micro-batch's loss": want * MICRO,
            }
            problem = difference(f"{where}: what it sends to rank {other}", message, want, known)
            if problem and not torch.allclose(message, want):
                return problem
    if weight is None:
        return f"{where}: its parameters get no gradient"
    wanted = stage.weight.grad
    known = {f"is exactly {MICRO}.000 x: divide each micro-batch's loss": wanted * MICRO}  # type: ignore[operator]
    if after is not None:
        known["does not use the gradient that came: y.backward(grad)"] = inputs.sum(0)
        known["uses the gradients that came in another order"] = (inputs * grads.flip(0)).sum(0)
    return difference(f"{where}: its gradient", weight, wanted, known, within=1e-5)  # type: ignore[arg-type]


def _judge_sent(judge: Judge, step: _Step) -> None:
    pp_step = _run(judge, DEGREES["pipeline x data"], is_theirs=False)
    more = _run(judge, DEGREES["tensor x data"], is_theirs=False, rows=2 * ROWS)
    message = 8 * ROWS * WIDTH
    # One all-reduce of an activation in forward and one in backward, by block and micro-batch.
    # The first block's backward needs none if the input requires no gradient.
    want = 2 * BLOCKS * MICRO * message
    problem = None
    if step.sent["tp"] != want - MICRO * message:
        problem = count_difference("bytes over the tensor axis", step.sent["tp"], want)
    problem = problem or count_difference(
        "bytes over the pipeline", pp_step.sent["pp"], MICRO * message
    )
    judge.facts |= {
        "tp_sent": f"{step.sent['tp']:,}",
        "tp_sent_more": f"{more.sent['tp']:,}",
        "dp_sent": f"{pp_step.sent['dp']:,}",
        "pp_sent": f"{pp_step.sent['pp']:,}",
        "wrong": f"{_over_all(step):.2f}",
    }
    good = f"{step.sent['tp']:,} over tp, {pp_step.sent['pp']:,} over pp"
    judge.judge("sent", problem, good=good)


def _over_all(step: _Step) -> float:
    """Average a gradient over all ranks, as a counter-example; return its size beside the true."""
    mixed = step.grads[0]["up"].clone()
    dist.all_reduce(mixed)
    return float((mixed / 4).norm() / step.grads[0]["up"].norm())
