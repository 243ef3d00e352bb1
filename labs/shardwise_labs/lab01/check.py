"""The check of lab 1: formulas, and a small model at each stage on two ranks."""

from collections.abc import Mapping

import torch

from shardwise_labs.given import numel_of, units_of
from shardwise_labs.judge import Judge
from shardwise_labs.words import WrongAnswer, count_difference, number_of
from shardwise_labs.zero import STAGES, Trained, measured_stages


def _formula(judge: Judge, numel: int, dp: int, **sizes: float) -> Mapping[str, float]:
    found = judge.call("bytes_per_rank")(numel, dp, **sizes)  # type: ignore[operator]
    if not isinstance(found, dict) or set(found) != set(STAGES):
        raise WrongAnswer(f"bytes_per_rank returns {found!r}; a dictionary of {STAGES} is expected")
    return {stage: number_of(f"bytes of {stage}", found[stage]) for stage in STAGES}


def run(judge: Judge) -> None:
    """Measure a model of 68,167 parameters on two ranks, beside the reader's formulas."""
    heads = ("formula", "held", "peak", "ratio", "sent")
    judge.row("", "{:>10} {:>10} {:>10} {:>6} {:>10}".format(*heads))
    for stage, trained in measured_stages(judge.rank, judge.solutions).items():
        numel, units = numel_of_plain(trained)
        formula = _formula(judge, numel, judge.num_ranks)[stage]
        judge.row(
            stage,
            f"{formula:>10,.0f} {trained.held:>10,} {trained.peak:>10,} "
            f"{trained.peak / formula:6.2f} {trained.sent:>10,}",
        )
    peak = judge.call("zero3_peak")(units, judge.num_ranks)  # type: ignore[operator]
    judge.row("your zero3_peak", f"{'':10} {'':10} {number_of('zero3_peak', peak):>10,.0f}")


def numel_of_plain(trained: Trained) -> tuple[int, list[int]]:
    """Return the number of parameters of the trained model, and those of its units."""
    units = [numel_of(unit) for unit in units_of(trained.model)]
    return sum(units), units


def check(judge: Judge) -> None:
    """Compare the reader's functions with the formulas and with the run."""
    with judge.judging("mixed"):
        mixed = judge.call("MIXED")
        want = {"param": 2, "grad": 2, "adam": 12}
        wrong = [] if not isinstance(mixed, dict) else [k for k in want if mixed.get(k) != want[k]]
        if not isinstance(mixed, dict):
            raise WrongAnswer("MIXED is not a dictionary")
        problem = None
        if wrong:
            got = mixed.get(wrong[0])
            problem = f'"{wrong[0]}" is {got} bytes, {want[wrong[0]]} expected'
            if wrong[0] == "adam" and got in (4, 8):
                problem += ": an fp32 master and two fp32 moments are 4 + 4 + 4"
        judge.judge("mixed", problem, good="2 + 2 + 12 bytes")
    with judge.judging("formula"):
        _judge_formula(judge)
    with judge.judging("stage"):
        _judge_stage(judge)
    with judge.judging("held"):
        _judge_held(judge)
    with judge.judging("peak"):
        _judge_peak(judge)


def _judge_formula(judge: Judge) -> None:
    sizes = {"param": 3.0, "grad": 5.0, "adam": 7.0}  # other than fp32, on another number of ranks
    got = _formula(judge, 1000, 10, **sizes)
    want = {"replicated": 15000.0, "zero1": 8700.0, "zero2": 4200.0, "zero3": 1500.0}
    known = {
        "replicated": {"this is divided by dp, but every rank holds all of it": 1500.0},
        "zero1": {
            "Adam's state is not divided": 15000.0,
            "zero1 divides Adam's state only, and gradients stay whole": 4200.0,
            "divided: parameters and gradients too, but zero1 divides Adam's state only": 1500.0,
            "you divide everything but Adam's state": 7800.0,
        },
        "zero2": {
            "gradients are not divided: this is zero1": 8700.0,
            "parameters are divided too: this is zero3": 1500.0,
            "Adam's state is not divided": 10500.0,
        },
        "zero3": {
            "parameters are not divided: this is zero2": 4200.0,
            "nothing is divided": 15000.0,
        },
    }
    problems = [count_difference(f"bytes at {s}", got[s], want[s], known[s]) for s in STAGES]
    judge.judge("formula", *problems, good="four stages, at three sizes of elements")


def _judge_stage(judge: Judge) -> None:
    lowest = judge.call("lowest_stage")
    for device, want in ((112e9, "replicated"), (80e9, "zero1"), (40e9, "zero2"), (20e9, "zero3")):
        got = lowest(7_000_000_000, 8, device)  # type: ignore[operator]
        if got != want:
            higher = got in STAGES and STAGES.index(got) > STAGES.index(want)
            why = "a lower stage fits and sends less" if higher else "that does not fit"
            where = f"7B on 8 ranks of {device / 1e9:.0f} GB"
            judge.judge("stage", f"{where}: {got!r}, {want!r} expected: {why}")
            return
    got = lowest(7_000_000_000, 8, 10e9)  # type: ignore[operator]
    problem = None if got is None else f"{got!r} for 10 GB, where nothing fits: None is expected"
    judge.judge("stage", problem, good="the lowest that fits, or None")


def _judge_held(judge: Judge) -> None:
    flat = torch.zeros(100)
    views = [flat[:40].view(8, 5), flat[40:90], flat]
    freed = torch.zeros(50)
    freed.untyped_storage().resize_(0)
    half = torch.zeros(30, dtype=torch.bfloat16)
    got = number_of("held_bytes", judge.call("held_bytes")([*views, half, freed]))  # type: ignore[operator]
    known = {
        "elements are counted, not bytes": 270.0,
        "elements of distinct memory are counted, not bytes": 130.0,
        "memory that views share is counted once for each view": 820.0,
        "`data_ptr()` and bytes of the tensor: a view may begin elsewhere; ask its storage": 860.0,
        "views count twice, and freed memory counts": 400.0 * 2 - 40 + 60 + 200,
        "every tensor is counted at 4 bytes, views twice": 4.0 * 270,
        "storage is counted once for each view of it": 1260.0,
    }
    judge.judge("held", count_difference("bytes", got, 460, known), good="each storage once")


def _judge_peak(judge: Judge) -> None:
    measured = measured_stages(judge.rank, judge.solutions)
    numel, units = numel_of_plain(measured["zero3"])
    formula = 16 * numel / judge.num_ranks
    judge.facts = {
        "peak": f"{measured['zero3'].peak:,}",
        "formula": f"{formula:,.0f}",
        "zero3_sent": f"{measured['zero3'].sent:,}",
        "zero1_sent": f"{measured['zero1'].sent:,}",
        "peak over formula": f"{measured['zero3'].peak / formula:.2f}",
    }
    got = number_of("zero3_peak", judge.call("zero3_peak")(units, judge.num_ranks))  # type: ignore[operator]
    known = {
        "this is the formula, without the unit that is full": formula,
        "one full copy of the largest unit is there, but three are needed": formula
        + 4 * max(units),
        "the packed copy of the gradients is missing": formula + 8 * max(units),
        "all units are full at once: one is, at a time": formula + 12 * numel,
        "elements are counted, not bytes": formula + 3 * max(units),
        "this is the smallest unit, and the largest decides": formula + 12 * min(units),
    }
    problem = count_difference("bytes at the peak", got, formula + 12 * max(units), known)
    judge.judge("peak", problem, good=f"{got:,.0f} bytes; the run's peak is {judge.facts['peak']}")
