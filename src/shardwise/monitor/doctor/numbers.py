"""Numbers that a training cannot go on with."""

import math
from statistics import fmean

from shardwise.monitor.doctor.evidence import NotEnough, finding, steady
from shardwise.monitor.findings import Change, Finding
from shardwise.monitor.metrics import BAD_GRADIENTS, BAD_VALUES, IN_HALF, SKIPPED_STEPS
from shardwise.monitor.record import RunFacts, RunRecord

_SKIPPED = 0.05
_LEAST_SCALE = 1.0


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
    """Find logged values or gradients that are inf or nan."""
    found = _bad_gradients(run) or _bad_values(run)
    return [] if found is None else [found]


def _bad_values(run: RunRecord) -> Finding | None:
    for line in run.steps:
        names = [n for n, v in line.values.items() if v is None or not math.isfinite(v)]
        told = line.metrics.get(BAD_VALUES)
        if not names and (told is None or not told.max):
            continue
        rank = told.max_rank if told is not None and told.max and not told.min else None
        what = ", ".join(names) or "a logged value"
        who = "" if rank is None else f" on rank {rank}, not on all"
        return finding(
            run,
            "SW041",
            f"{what} is not finite at step {line.step}{who}",
            {"step": line.step, "values": told.max if told is not None else len(names)},
            "What follows from it is not finite either.",
            [Change("resume", None, f"a checkpoint from before step {line.step}")],
            rank=rank,
        )
    return None


def _bad_gradients(run: RunRecord) -> Finding | None:
    line = next((e for e in run.steps if (t := e.metrics.get(BAD_GRADIENTS)) and t.max), None)
    if line is None:
        return None
    told = line.metrics[BAD_GRADIENTS]
    named = sorted(run.lines("non_finite"), key=lambda each: each[1]["step"])
    parameters = list(named[0][1]["parameters"]) if named else []
    shown = f" of {', '.join(parameters[:3])}" if parameters else ""
    values = line.metrics.get(BAD_VALUES)
    # Gradients are means over ranks, so all have it; a loss of its own tells who began it.
    rank = values.max_rank if values is not None and values.max and not values.min else None
    who = "" if rank is None else f"; rank {rank} alone has logged a value that is not finite"
    return finding(
        run,
        "SW041",
        f"gradients{shown} are not finite at step {line.step}{who}",
        {"step": line.step, "parameters on a rank": told.max},
        "The step makes the parameters so, and nothing that follows can be used.",
        [Change("resume", None, f"a checkpoint from before step {line.step}")],
        unit=parameters[0] if parameters else None,
        rank=rank,
    )


def _is_half(facts: RunFacts) -> bool:
    return any("float16" in u.dtype.replace("bfloat16", "") for u in facts.units)
