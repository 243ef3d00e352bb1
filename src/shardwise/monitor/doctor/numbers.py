"""Numbers that a training cannot go on with."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.monitor.doctor.evidence import NotEnough, finding, steady, typical
from shardwise.monitor.findings import Change, Finding
from shardwise.monitor.metrics import (
    BAD_GRADIENTS,
    BAD_VALUES,
    IN_HALF,
    LOST_OF_WORST_SHARE,
    LOST_SHARE,
    SKIPPED_STEPS,
)
from shardwise.monitor.record import RunFacts, RunRecord, StepLine

_SKIPPED = 0.05
_LEAST_SCALE = 1.0
_LOST, _LOST_OF_WORST = 10.0, 50.0  # per cent
_MIN_LOOKS, _MAX_LOOKS = 3, 20  # lines with a look at updates
_NAMED = 3


def half_precision(run: RunRecord) -> list[Finding]:
    """Find a loss scaler that goes on skipping steps, or that has no scale left."""
    autocast = any(line.metrics[IN_HALF].max for line in run.steps if IN_HALF in line.metrics)
    if not autocast and not _is_half(run.facts):
        return []
    lines = steady(run)
    told = [line for line in lines if SKIPPED_STEPS in line.metrics]
    if not told:
        raise NotEnough(f"the figure {SKIPPED_STEPS}")
    # `fully_shard` cannot tell a skipped step from a micro-batch without a window.
    usual = min(line.metrics[SKIPPED_STEPS].max for line in told)
    usual = usual if run.facts.reduces_units_alone else 0.0
    skipped = sum((line.metrics[SKIPPED_STEPS].max - usual) * line.num_steps for line in told)
    taken = sum(line.num_steps for line in told)
    share = skipped / (skipped + taken)
    scales = [v for line in lines for name, v in line.values.items() if "scale" in name and v]
    is_low = bool(scales) and scales[-1] < _LEAST_SCALE
    if share <= _SKIPPED and not is_low:
        return []
    evidence = {"skipped steps": skipped, "share": share, "threshold": _SKIPPED, "steps": taken}
    if scales:
        evidence |= {"loss scale": scales[-1], "mean loss scale": fmean(scales)}
    low = f"; the loss scale is {scales[-1]:g}" if is_low else ""
    return [
        finding(
            run,
            "SW040",
            f"{share:.0%} of the last {skipped + taken:.0f} steps were skipped, as gradients "
            f"overflowed{low}",
            evidence,
            "Work that is thrown away; the gradients do not fit the range of float16.",
            [Change("precision", "fp16", "bf16")],
        )
    ]


def not_finite(run: RunRecord) -> list[Finding]:
    """Find logged values or gradients that are inf or nan: the first step, and who began."""
    line = next(filter(_is_bad, run.steps), None)
    if line is None:
        return []
    since = line.bad_since or {
        name: {0: line.step} for name, v in line.values.items() if v is None or not math.isfinite(v)
    }
    first = min((s for told in since.values() for s in told.values() if s), default=line.step)
    names = [name for name, told in since.items() if first in told.values()]
    values = [name for name in names if name != BAD_GRADIENTS]
    # Gradients are means over ranks, so all have it; a value of a rank's own tells who began it.
    began = [
        {rank for rank, step in since[name].items() if step == first}
        for name in values
        if any(step != first for step in since[name].values())
    ]
    ranks = sorted(set.union(*began)) if began else []
    who = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}, not on others"
    parameters = ""
    named = sorted(run.lines("non_finite"), key=lambda each: each[1]["step"])
    told: Mapping[str, Any] = next((line for _, line in named if line["step"] >= first), {})
    params: Sequence[str] = told.get("parameters", ())
    if params:
        parameters = f"gradients of {', '.join(params[:3])}"
    if values:
        what = f"{', '.join(values)} {'is' if len(values) == 1 else 'are'} not finite"
        also = f"; {parameters} are not either, at step {told['step']}" if parameters else ""
    else:
        what, also = f"{parameters or 'gradients'} are not finite", ""
        finite_step = int(told.get("finite_step", 0))
        if 0 < finite_step < first - 1:
            also = f"; step {finite_step} was the last in which they were looked at and finite"
    return [
        finding(
            run,
            "SW041",
            f"{what} at step {first}{who if ranks else ''}{also}",
            {"first bad step": first, "ranks that began": len(ranks)},
            "The step makes the parameters so, and nothing that follows can be used.",
            [Change("resume", None, _last_finite(run))],
            unit=params[0] if params else None,
            rank=ranks[0] if len(ranks) == 1 else None,
        )
    ]


def lost_updates(run: RunRecord) -> list[Finding]:
    """Find parameters in 16 bits whose updates are rounded away, as they have no fp32 masters."""
    lines = [line for line in run.steps if LOST_SHARE in line.metrics][-_MAX_LOOKS:]
    if not lines and not any("16" in re.sub(r"\(.*?\)", "", u.dtype) for u in run.facts.units):
        return []
    if len(lines) < _MIN_LOOKS:
        have = f"{len(lines)}, and {_MIN_LOOKS} are needed"
        raise NotEnough(f"looks at what steps do to parameters in 16 bits: {have}")
    share, worst = typical(lines, LOST_SHARE, "max"), lines[-1].metrics[LOST_OF_WORST_SHARE].max
    if share <= _LOST and worst <= _LOST_OF_WORST:
        return []
    newest = {rank: line["shares"] for rank, line in run.lines("lost_updates")}
    shares: dict[str, float] = defaultdict(float)
    for name, value in (each for told in newest.values() for each in told.items()):
        shares[name] = max(shares[name], value)
    names = sorted(shares, key=lambda name: (-shares[name], name))[:_NAMED]
    of_each = ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in names)
    settings = "MixedPrecisionPolicy(param_dtype=bf16)" if run.facts.reduces_units_alone else "bf16"
    return [
        finding(
            run,
            "SW042",
            f"{share:.0f} % of the updates of parameters in 16 bits are rounded away"
            f"{f': {of_each}' if names else ''}",
            {
                "lost updates, %": share,
                "threshold, %": _LOST,
                "lost updates of the worst parameter, %": worst,
                "threshold of the worst parameter, %": _LOST_OF_WORST,
            },
            "An update below half a unit in the last place leaves an element as it was. No fp32 "
            "master adds such updates up.",
            [
                Change("model", "16 bits", "float32: its shards are the fp32 masters"),
                Change("precision", None, settings),
            ],
            unit=names[0] if names else None,
        )
    ]


def _is_bad(line: StepLine) -> bool:
    counts = [
        line.metrics[name].max for name in (BAD_GRADIENTS, BAD_VALUES) if name in line.metrics
    ]
    return any(counts) or any(v is None or not math.isfinite(v) for v in line.values.values())


def _last_finite(run: RunRecord) -> str:
    """Return the newest checkpoint that all ranks found finite as they saved it."""
    if run.idle_s is None:  # as it goes on, only rank 0's lines are known
        return "a checkpoint that `shardwise doctor` names, as it was finite when it was saved"
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    newest: dict[str, int] = {}
    for rank, line in run.lines("save"):
        found[line["path"]][rank] = line["is_finite"]
        newest[line["path"]] = line["step"]
    finite = [
        path
        for path, told in found.items()
        if len(told) == run.facts.num_ranks and all(told.values()) and _may_be_there(Path(path))
    ]
    if not finite:
        return "a checkpoint whose numbers are finite: of none that is there it is known"
    path = max(finite, key=lambda each: newest[each])
    return f"{path}, which all ranks found finite as they saved it"


def _may_be_there(path: Path) -> bool:
    """Tell whether a folder is there, or cannot be seen from here."""
    return path.exists() or not path.parent.exists()


def _is_half(facts: RunFacts) -> bool:
    return any("float16" in u.dtype.replace("bfloat16", "") for u in facts.units)
