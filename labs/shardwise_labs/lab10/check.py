"""The check of lab 10: trainers of labs 4 and 5 with bad settings, and rules that judge them."""

import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise_labs.counting import Meter
from shardwise_labs.given import LR, batch, make_model, numel_of, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.lab10.provoked import ABOUT, ENGINE, USUAL, findings
from shardwise_labs.reader import load
from shardwise_labs.words import WrongAnswer, number_of
from shardwise_labs.zero import Trained, train

USUAL_BYTES = 100_000  # of a bucket, beside a model of 272,668 bytes
BUCKETS = {
    "tiny buckets": (1, "SW010"),
    "usual buckets": (USUAL_BYTES, None),
    "one huge bucket": (1 << 20, "SW011"),
}
WRAPPINGS = {
    "a unit per module": ([1, 1, 1, 1, 1, 1], None),
    "all blocks one unit": ([1, 4, 1], "SW004"),
    "one unit": ([6], "SW002"),
}


ROWS, DEVICE_BYTES = 256, 1_800_000
# Other numbers for the rules, with what is expected.
NUMBERS: dict[str, list[tuple[tuple[Any, ...], str | None]]] = {
    "bucket_finding": [
        (([60, 60, 60, 60], 130, 100), None),
        (([60, 60, 60], 180, 100), "SW011"),
        (([20, 20, 20], 100, 100), None),
    ],
    "wrapping_finding": [(([40, 30, 30],), None), (([60, 20, 20],), "SW004")],
}


@dataclass(frozen=True)
class Provoked:
    """A run with settings that may be bad, and the finding that names it."""

    unit_bytes: list[int]
    bucket_bytes: int | None
    finding: str | None
    trained: Trained

    @property
    def num_reductions(self) -> int:
        """Return the buckets that were reduced in one backward pass."""
        return self.trained.trainer.num_reductions  # type: ignore[attr-defined, no-any-return]


def _sizes(groups: list[list[nn.Module]]) -> list[int]:
    return [4 * sum(map(numel_of, group)) for group in groups]


def _bucketed(zero2: Any, bucket_bytes: int) -> Any:
    """Return a trainer of lab 4 that reduces units in buckets, and counts them."""

    class Unit(zero2.Unit):  # type: ignore[misc]
        def count_gradient(self) -> None:
            self.num_missing -= 1
            if self.num_missing == 0:
                self.trainer.collect(self)

    class Bucketed(zero2.Zero2):  # type: ignore[misc]
        def __init__(self, modules: list[nn.Module], lr: float) -> None:
            super().__init__(modules, lr)
            self.bucket: list[Unit] = []
            self.num_reductions = 0
            for unit in self.units:
                unit.__class__, unit.trainer = Unit, self

        def collect(self, unit: Any) -> None:
            self.bucket.append(unit)
            if sum(4 * each.values.numel() for each in self.bucket) >= bucket_bytes:
                self.flush()

        def flush(self) -> None:
            self.num_reductions += bool(self.bucket)
            for unit in self.bucket:
                unit.reduce()
            self.bucket.clear()

        def backward(self, loss: Tensor) -> None:
            self.num_reductions = 0
            super().backward(loss)
            self.flush()

    return Bucketed


def _wrapped(zero3: Any, counts: list[int]) -> Any:
    """Return a trainer of lab 5 whose units hold several modules."""

    class Group(zero3.ShardedUnit):  # type: ignore[misc]
        def __init__(self, modules: list[nn.Module]) -> None:
            super().__init__(nn.ModuleList(modules))
            modules[0].register_forward_pre_hook(lambda _module, _inputs: self.gather())
            modules[-1].register_forward_hook(lambda _module, _inputs, out: self.end_forward(out))

    class Wrapped(zero3.Zero3):  # type: ignore[misc]
        def __init__(self, modules: list[nn.Module], lr: float) -> None:
            self.units = [Group(group) for group in _groups(modules, counts)]
            self.optimizer = zero3.torch.optim.Adam(
                [unit.shard for unit in self.units], lr=lr, foreach=False
            )

    return Wrapped


def _groups(modules: list[nn.Module], counts: list[int]) -> list[list[nn.Module]]:
    found, start = [], 0
    for count in counts:
        found.append(modules[start : start + count])
        start += count
    return found


@cache
def _provoked(rank: int, folder: Path) -> dict[str, Provoked]:
    """Train with each of the settings; a process does it once."""
    zero2, zero3 = load(folder / "lab04_zero2.py"), load(folder / "lab05_zero3.py")
    modules = units_of(make_model(is_plain=True))
    found = {}
    for name, (bucket_bytes, finding) in BUCKETS.items():
        trainer = _bucketed(zero2, bucket_bytes)
        trained = _train(trainer, rank, folder)
        found[name] = Provoked(_sizes([[m] for m in modules]), bucket_bytes, finding, trained)
    for name, (counts, finding) in WRAPPINGS.items():
        trained = _train(_wrapped(zero3, counts), rank, folder)
        found[name] = Provoked(_sizes(_groups(modules, counts)), None, finding, trained)
    return found


@cache
def _activations() -> dict[str, tuple[int, int]]:
    """Return bytes of state and of activations at the peak: kept, and computed again."""
    found = {}
    for name, is_kept in (("activations kept", True), ("activations recomputed", False)):
        model = make_model(is_plain=True)
        meter = Meter(*model.parameters())
        with meter:
            x, classes = batch(0, 0, ROWS)
            for module in model.children():
                x = module(x) if is_kept else checkpoint(module, x, use_reentrant=False)
            nn.functional.cross_entropy(x, classes).backward()
        state = 8 * numel_of(model)  # parameters and gradients
        found[name] = (state, meter.peak - state)
    return found


def _train(trainer: Any, rank: int, folder: Path) -> Trained:
    return train(lambda model: trainer(units_of(model), LR), rank, folder, 2, is_plain=True)


def _finding(judge: Judge, run: Provoked) -> object:
    if run.bucket_bytes is None:
        return judge.call("wrapping_finding")(run.unit_bytes)  # type: ignore[operator]
    given = (run.unit_bytes, run.bucket_bytes, USUAL_BYTES)
    return judge.call("bucket_finding")(*given)  # type: ignore[operator]


def run(judge: Judge) -> None:
    """Train with bad settings: messages, the peak, and what the reader's rules say."""
    runs = _provoked(judge.rank, judge.solutions)
    judge.row("", f"{'calls':>6} {'peak':>10}   your rule")
    for name, run in runs.items():
        many = len(run.trained.calls) if run.bucket_bytes is None else run.num_reductions
        judge.row(name, f"{many:>6} {run.trained.peak:>10,}   {_finding(judge, run) or '-'}")
    if not hasattr(judge.theirs, "mend"):
        return  # the broken program has some of the rules only
    activation_finding: Any = judge.call("activation_finding")
    for name, (state, other) in _activations().items():
        said = activation_finding(state, other, DEVICE_BYTES) or "-"
        judge.row(name, f"{'-':>6} {state + other:>10,}   {said}")
    for name, (bad, finding) in ENGINE.items():
        told = USUAL | bad
        before = " ".join(findings(name, told)) or "-"
        mended = _mended(judge, told, finding)
        after = _layers_problem(told, mended) or " ".join(findings(name, mended)) or "-"
        judge.row(f"engine, {name}", f"doctor {before}, mended {after}")


def check(judge: Judge) -> None:
    """Compare the reader's rules with what the runs did."""
    runs = _provoked(judge.rank, judge.solutions)
    tiny, huge = runs["tiny buckets"].trained, runs["one huge bucket"].trained
    judge.facts = {
        "tiny_peak": f"{tiny.peak:,}",
        "huge_peak": f"{huge.peak:,}",
        "many_peak": f"{runs['a unit per module'].trained.peak:,}",
        "one_peak": f"{runs['one unit'].trained.peak:,}",
    }
    with judge.judging("count"):
        _judge_count(judge, runs)
    with judge.judging("buckets"):
        _judge_findings(judge, "buckets", [runs[name] for name in BUCKETS], list(BUCKETS))
    with judge.judging("wrapping"):
        _judge_findings(judge, "wrapping", [runs[name] for name in WRAPPINGS], list(WRAPPINGS))
    with judge.judging("saves"):
        _judge_saves(judge)
    with judge.judging("offload"):
        _judge_offload(judge)
    with judge.judging("activations"):
        _judge_activations(judge)
    with judge.judging("axis"):
        _judge_axis(judge)
    with judge.judging("mend"):
        _judge_mend(judge)


def _judge_count(judge: Judge, runs: dict[str, Provoked]) -> None:
    count = judge.call("num_reductions")
    for name in BUCKETS:
        run = runs[name]
        got = number_of("num_reductions(...)", count(run.unit_bytes, run.bucket_bytes))  # type: ignore[operator]
        if got != run.num_reductions:
            judge.judge("count", f"{name}: {run.num_reductions} in the run, {got:g} by your rule")
            return
    for units, bucket, want in (
        ([10, 40, 40, 40, 10], 45, 3),
        ([40, 10, 10], 20, 2),
        ([20, 20, 10], 20, 2),
        ([30, 30], 30, 2),
    ):
        got = number_of("num_reductions(...)", count(units, bucket))  # type: ignore[operator]
        if got != want:
            known = {
                "what is left in the last bucket is reduced too": want - 1,
                "a bucket is empty at the end, and is no reduction": want + 1,
            }
            why = next((f": {words}" for words, value in known.items() if got == value), "")
            said = f"units {units}, buckets of {bucket}: {got:g} reductions, {want} expected{why}"
            judge.judge("count", said)
            return
    judge.judge("count", good="as counted in three runs")


def _judge_findings(judge: Judge, target: str, runs: list[Provoked], names: list[str]) -> None:
    for name, run in zip(names, runs, strict=True):
        got = _finding(judge, run)
        if got != run.finding:
            why = "a healthy run is blamed" if run.finding is None else "the run shows it"
            judge.judge(target, f"{name}: {got}, {run.finding} expected: {why}")
            return
    name = "bucket_finding" if target == "buckets" else "wrapping_finding"
    rule: Any = judge.call(name)
    for given, want in NUMBERS[name]:
        got = rule(*given)
        if got != want:
            said = ", ".join(map(str, given))
            judge.judge(target, f"{name}({said}) is {got}, {want} expected")
            return
    judge.judge(target, good="two bad runs are named, and the healthy one is not")


def _judge_activations(judge: Judge) -> None:
    rule: Any = judge.call("activation_finding")
    (kept, recomputed), device = _activations().values(), DEVICE_BYTES
    cases = (
        ("activations are kept", *kept, device, "SW030"),
        ("activations are computed again", *recomputed, device, None),
        ("the device is large", *kept, 10 * device, None),
        ("the device is full of state", 90, 5, 100, None),
        ("85 of 100, most of it activations", 40, 45, 100, "SW030"),
    )
    for case, state, other, size, want in cases:
        got = rule(state, other, size)
        if got != want:
            said = f"{case}: {got}, {want} expected, of {state:,} and {other:,} in {size:,} bytes"
            judge.judge("activations", said)
            return
    good = f"{kept[1]:,} bytes of activations kept, {recomputed[1]:,} computed again"
    judge.judge("activations", good=good)


def _judge_axis(judge: Judge) -> None:
    rule: Any = judge.call("slow_axis")
    cases = (
        ("one axis is slow", {"shard": 9e9, "tp": 1e9}, {"shard": 1.0, "tp": 1.0}, "tp"),
        ("one axis sends more", {"shard": 9e9, "tp": 1e9}, {"shard": 9.0, "tp": 1.0}, None),
        ("0.4 as fast is not much slower", {"a": 5e9, "b": 2e9}, {"a": 1.0, "b": 1.0}, None),
        ("one axis", {"shard": 9e9}, {"shard": 1.0}, None),
        ("an axis sends nothing", {"shard": 9e9, "pp": 0.0}, {"shard": 1.0, "pp": 0.0}, None),
        ("two are slow", {"a": 9e9, "b": 1e9, "c": 2e9}, dict.fromkeys("abc", 1.0), "b"),
    )
    for case, sent, seconds, want in cases:
        got = rule(dict(sent), dict(seconds))
        if got != want:
            said = f"{case} ({sent} bytes in {seconds} s): {got}, {want} expected"
            judge.judge("axis", said)
            return
    judge.judge("axis", good="the axis with the fewest bytes per second, if it is far behind")


def _judge_mend(judge: Judge) -> None:
    for name, (bad, finding) in ENGINE.items():
        told = USUAL | bad
        mended = _mended(judge, told, finding)
        if problem := _layers_problem(told, mended):
            raise WrongAnswer(f"{name}: {problem}")
        if left := findings(name, mended):
            found = ", ".join(findings(name, told))
            raise WrongAnswer(f"{name}: the doctor found {found}, and now {', '.join(left)}")
        for key, value in mended.items():
            if value != told[key] and key != ABOUT[finding]:
                raise WrongAnswer(f"{name}: {key!r} was right, and is changed")
    good = f"the doctor of the engine finds nothing in {len(ENGINE)} mended runs"
    judge.judge("mend", good=good)


def _layers_problem(told: dict[str, Any], mended: dict[str, Any]) -> str | None:
    layers, units = sum(told["units"]), mended["units"]
    if sum(units) == layers and min(units, default=0) > 0:
        return None
    return f"{len(units)} units of {sum(units)} layers; the model has {layers}"


def _mended(judge: Judge, told: dict[str, object], finding: str) -> dict[str, Any]:
    mended = judge.call("mend")(copy.deepcopy(told), finding)  # type: ignore[operator]
    if not isinstance(mended, dict) or set(mended) != set(told):
        raise WrongAnswer(f"mend returns {mended!r}; settings with {', '.join(told)} are expected")
    return mended


def _judge_saves(judge: Judge) -> None:
    for save_s, failure_s in ((30.0, 36_000.0), (5.0, 400_000.0)):
        got = number_of("save_interval", judge.call("save_interval")(save_s, failure_s))  # type: ignore[operator]
        if got <= 0:
            raise WrongAnswer(f"save_interval is {got:g} s")
        best = (2 * save_s * failure_s) ** 0.5
        if abs(got - best) > 0.01 * best:
            lost, least = (100 * (save_s / t + t / 2 / failure_s) for t in (got, best))
            where = f"saves of {save_s:g} s, a failure every {failure_s / 3600:.0f} h"
            said = f"{got:,.0f} s lose {lost:.2f} % of the time, {best:,.0f} s lose {least:.2f} %"
            judge.judge("saves", f"{where}: {said}")
            return
    judge.judge("saves", good="the square root of 2 x save x failure")


def _judge_offload(judge: Judge) -> None:
    slowdown = judge.call("offload_slowdown")
    for step_s, moved, link, want in (
        (2.0, 20e9, 20e9, 1.0),
        (0.5, 20e9, 20e9, 2.0),
        (0.25, 14e9, 7e9, 8.0),
    ):
        got = number_of("offload_slowdown", slowdown(step_s, moved, link))  # type: ignore[operator]
        known = {
            "copies run beside the step, not after it": 1 + moved / link / step_s,
            "a step that hides its copies is not faster than before": moved / link / step_s,
            "this is the time of the step, not how many times as long": max(step_s, moved / link),
            "this is the time that it waits": max(0.0, moved / link - step_s),
        }
        if abs(got - want) > 1e-6:
            why = next((f": {w}" for w, value in known.items() if abs(got - value) < 1e-6), "")
            case = f"a step of {step_s:g} s, {moved / 1e9:g} GB at {link / 1e9:g} GB/s"
            judge.judge("offload", f"{case}: {got:g} x, {want:g} x expected{why}")
            return
    judge.judge("offload", good="1.0 if the step hides its copies, else copies over step")
