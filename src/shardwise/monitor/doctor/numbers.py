"""Rules about numbers: skipped steps, values that are not finite, updates that round away."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from shardwise.monitor.doctor.evidence import NotEnough, steady_with, typical
from shardwise.monitor.findings import Finding, make_finding
from shardwise.monitor.metrics import (
    BAD_GRADIENTS,
    BAD_VALUES,
    IN_HALF,
    LOST_OF_WORST_SHARE,
    LOST_SHARE,
    SKIPPED_STEPS,
)
from shardwise.monitor.record import RunRecord, StepLine

_SKIPPED = 0.05
_LEAST_SCALE = 1.0
_LOST, _LOST_OF_WORST = 10.0, 50.0  # per cent
_MIN_LOOKS, _MAX_LOOKS = 3, 20  # lines with a look at updates
_NAMED = 3


def half_precision(run: RunRecord) -> Finding | None:
    """Find a loss scaler that continues to skip steps, or whose scale is too low."""
    facts = run.facts
    autocast = any(line.metrics[IN_HALF].max for line in run.steps if IN_HALF in line.metrics)
    if not autocast and not any("float16" in u.dtype.replace("bfloat16", "") for u in facts.units):
        return None
    lines = steady_with(run, SKIPPED_STEPS)
    # With `fully_shard` a skipped step looks like a micro-batch without a window.
    usual = min(line.metrics[SKIPPED_STEPS].max for line in lines)
    usual = usual if facts.reduces_units_alone else 0.0
    skipped = sum((line.metrics[SKIPPED_STEPS].max - usual) * line.num_steps for line in lines)
    taken = sum(line.num_steps for line in lines)
    share = skipped / (skipped + taken)
    scales = [v for line in lines for name, v in line.values.items() if "scale" in name and v]
    is_low = bool(scales) and scales[-1] < _LEAST_SCALE
    if share <= _SKIPPED and not is_low:
        return None
    evidence = {"skipped steps": skipped, "share": share, "threshold": _SKIPPED, "steps": taken}
    if scales:
        evidence |= {"loss scale": scales[-1], "mean loss scale": fmean(scales)}
    low = f"; the loss scale is {scales[-1]:g}" if is_low else ""
    return make_finding("SW040", evidence, low=low, all=f"{skipped + taken:.0f}")


def not_finite(run: RunRecord) -> Finding | None:
    """Find logged values or gradients that are inf or nan: the first step, and the first ranks."""
    line = next(filter(_is_bad, run.steps), None)
    if line is None:
        return None
    since = line.bad_since or {
        name: {0: line.step} for name, v in line.values.items() if v is None or not math.isfinite(v)
    }
    first = min((s for steps in since.values() for s in steps.values() if s), default=line.step)
    names = [name for name, steps in since.items() if first in steps.values()]
    values = [name for name in names if name != BAD_GRADIENTS]
    # Gradients are means over ranks, so all ranks have it; a logged value tells the rank.
    began = [
        {rank for rank, step in since[name].items() if step == first}
        for name in values
        if any(step != first for step in since[name].values())
    ]
    ranks = sorted(set.union(*began)) if began else []
    who = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}, not on others"
    looks = sorted(run.lines("non_finite"), key=lambda each: each[1]["step"])
    look: Mapping[str, Any] = next((row for _, row in looks if row["step"] >= first), {})
    params: list[str] = list(look.get("parameters", ()))
    gradients = f"gradients of {', '.join(params[:3])}" if params else "gradients"
    named, also = f"{gradients} are", ""
    if values:
        named = f"{', '.join(values)} {'is' if len(values) == 1 else 'are'}"
        also = f"; {gradients} are not either, at step {look['step']}" if params else ""
    elif 0 < (finite_step := int(look.get("finite_step", 0))) < first - 1:
        also = f"; step {finite_step} was the last in which they were checked and finite"
    return make_finding(
        "SW041",
        {"first bad step": first, "ranks that began": len(ranks)},
        unit=params[0] if params else None,
        rank=ranks[0] if len(ranks) == 1 else None,
        names=named,
        who=who if ranks else "",
        also=also,
        checkpoint=_last_finite(run),
    )


def _is_bad(line: StepLine) -> bool:
    names = (name for name in (BAD_GRADIENTS, BAD_VALUES) if name in line.metrics)
    values = line.values.values()
    return any(line.metrics[name].max for name in names) or any(
        value is None or not math.isfinite(value) for value in values
    )


def _last_finite(run: RunRecord) -> str:
    """Return the newest checkpoint that all ranks found finite as they saved it."""
    if run.idle_s is None:  # while the run continues, only rank 0's lines are known
        return "a checkpoint that `shardwise doctor` names, as it was finite when it was saved"
    found: dict[str, dict[int, bool]] = defaultdict(dict)
    newest: dict[str, int] = {}
    for rank, line in run.lines("save"):
        found[line["path"]][rank] = line["is_finite"]
        newest[line["path"]] = line["step"]
    finite = [
        path
        for path, by_rank in found.items()
        # A folder of another machine cannot be seen from here.
        if len(by_rank) == run.facts.num_ranks
        and all(by_rank.values())
        and (Path(path).exists() or not Path(path).parent.exists())
    ]
    if not finite:
        return "a checkpoint with finite numbers; no existing one is known to have them"
    path = max(finite, key=lambda each: newest[each])
    return f"{path}, which all ranks found finite as they saved it"


def lost_updates(run: RunRecord) -> Finding | None:
    """Find parameters in 16 bits without fp32 masters whose updates are rounded away."""
    facts = run.facts
    lines = [line for line in run.steps if LOST_SHARE in line.metrics][-_MAX_LOOKS:]
    if not lines and not any("16" in re.sub(r"\(.*?\)", "", u.dtype) for u in facts.units):
        return None
    if len(lines) < _MIN_LOOKS:
        have = f"{len(lines)}, and {_MIN_LOOKS} are needed"
        raise NotEnough(f"comparisons of parameters in 16 bits before and after a step: {have}")
    share, worst = typical(lines, LOST_SHARE, "max"), lines[-1].metrics[LOST_OF_WORST_SHARE].max
    if share <= _LOST and worst <= _LOST_OF_WORST:
        return None
    newest = {rank: line["shares"] for rank, line in run.lines("lost_updates")}
    shares: dict[str, float] = defaultdict(float)
    for name, value in (each for by_name in newest.values() for each in by_name.items()):
        shares[name] = max(shares[name], value)
    names = sorted(shares, key=lambda name: (-shares[name], name))[:_NAMED]
    of_each = ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in names)
    return make_finding(
        "SW042",
        {
            "lost updates, %": share,
            "threshold, %": _LOST,
            "lost updates of the worst parameter, %": worst,
            "threshold of the worst parameter, %": _LOST_OF_WORST,
        },
        unit=names[0] if names else None,
        names=f": {of_each}" if names else "",
        precision="MixedPrecisionPolicy(param_dtype=bf16)" if facts.reduces_units_alone else "bf16",
    )
