"""Rules about the training itself: numbers, gradients, rates, inputs, evaluation."""

from collections.abc import Sequence
from statistics import fmean, median

from shardwise.monitor import metrics as m
from shardwise.monitor.doctor.evidence import Evidence, Lines, NotEnough, count_steps, total
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.record import IdleScheduler, NoGradient, RunRecord, StepLine

_MIN_CHECKS = 3  # steps that were checked
_NORM_LINES, _NORM_TIMES, _BEYOND = 6, 20.0, 10.0
_FROZEN_BY_CHOICE = 0.5  # of the elements
_READS = 16
_EVALUATION, _EVALUATION_S = 0.4, 0.5  # of the run, and in all
_FEW_ROWS, _FIXED = 64, 0.5
_TOY_BYTES = 4 << 20
_RECOMPUTED, _ALL_BLOCKS, _ROOM = 0.15, 0.8, 50.0  # of the step; of forward; per cent
_LEAK_BYTES, _LEAK_PER_STEP, _LEAK_LINES = 16 << 20, 64 << 10, 6
_LINEAR, _LATER_HALF = 0.9, 0.35  # of the variance; of the growth
_NAMED = 3


# -- gradients
def growing_norm(e: Evidence) -> Finding | None:
    """Find gradient norms before clipping that grow and grow."""
    steps = e.run.steps
    series = [
        (line.step, line.metrics[m.GRAD_NORM].max) for line in steps if m.GRAD_NORM in line.metrics
    ]
    name, clipped_to = "the norm before clipping", 0.0
    if series:
        clipped_to = max(
            line.metrics[m.MAX_NORM].max for line in steps if m.MAX_NORM in line.metrics
        )
    else:
        name, series = _logged_norms(steps)
    if len(series) < _NORM_LINES:
        raise NotEnough("norms of gradients: of clip_grad_norm_, or logged as a value named norm")
    third = len(series) // 3
    early, middle, late = (
        median(value for _, value in part)
        for part in (series[:third], series[third : 2 * third], series[2 * third :])
    )
    is_growing = late > _NORM_TIMES * early and middle > early and late > 2 * middle
    if not is_growing or late < _BEYOND * clipped_to:
        return None
    evidence = {"early": early, "late": late, "times": late / (early or 1e-30)}
    evidence |= {"threshold, times": _NORM_TIMES, "clipped to": clipped_to}
    first, last = series[0][0], series[-1][0]
    clip = f"; clipping to {clipped_to:g} hides it" if clipped_to else ""
    return make_finding("SW043", evidence, name=name, first=first, last=last, clip=clip)


def _logged_norms(steps: Lines) -> tuple[str, list[tuple[int, float]]]:
    names = {name for line in steps for name in line.values_over_steps if "norm" in name.lower()}
    for name in sorted(names):
        lines = [line for line in steps if name in line.values_over_steps]
        return name, [(line.step, line.values_over_steps[name].mean) for line in lines]
    return "", []


def no_gradient(e: Evidence) -> Finding | None:
    """Find parameters of the optimizer that never get a gradient."""
    checks = _newest_checks(e.run)
    if len(checks) < _MIN_CHECKS:
        raise NotEnough(f"checks of the gradients: {len(checks)}, and {_MIN_CHECKS} are needed")
    newest, least = checks[-1], min(checks, key=lambda check: check.num_parameters)
    if not least.num_parameters or (not least.trained and least.share >= _FROZEN_BY_CHOICE):
        return None
    shared = [n for n in least.parameters if all(_may_have(n, check) for check in checks)]
    if not shared:
        return None
    evidence = {"parameters": least.num_parameters, "share of the elements": least.share}
    evidence |= {"of these, that require a gradient": least.trained, "step": newest.step}
    more = least.num_parameters - min(len(shared), _NAMED)
    names = ", ".join(shared[:_NAMED]) + (f" and {more} more" if more else "")
    case = "unused" if least.trained else "frozen"
    return make_finding(f"SW045.{case}", evidence, unit=shared[0], names=names)


def _newest_checks(run: RunRecord) -> Sequence[NoGradient]:
    by_step = {line.step: line for _, line in run.lines(NoGradient)}
    return [by_step[step] for step in sorted(by_step)[-_MIN_CHECKS:]]


def _may_have(name: str, check: NoGradient) -> bool:
    """Tell whether a check has a parameter; a line names only the first ones."""
    return name in check.parameters or check.num_parameters > len(check.parameters)


def kept_gradients(e: Evidence) -> Finding | None:
    """Find gradients of the step before that are there as the next backward pass begins."""
    lines = _checked(e, m.KEPT_GRADIENTS)
    if any(not line.metrics[m.KEPT_GRADIENTS].max for line in lines):
        return None
    evidence = {"checked steps with old gradients": len(lines), "checked": len(lines)}
    return make_finding("SW047", evidence, num=len(lines), step=lines[-1].step)


def _checked(e: Evidence, name: str) -> Sequence[StepLine]:
    """Return the newest lines with a figure of a checked step."""
    lines = [line for line in e.run.steps if name in line.metrics][-_MIN_CHECKS:]
    if len(lines) < _MIN_CHECKS:
        raise NotEnough(f"steps that were checked: {len(lines)}, and {_MIN_CHECKS} are needed")
    return lines


# -- modes and rates
def dropout_off(e: Evidence) -> Finding | None:
    """Find passes with gradients in which no dropout is on."""
    lines = _checked(e, m.DROPOUTS_OFF_SHARE)
    if min(line.metrics[m.DROPOUTS_OFF_SHARE].max for line in lines) < 100:
        return None
    figure = lines[-1].metrics[m.DROPOUTS_OFF_SHARE]
    evidence = {"dropouts that are off, %": figure.max, "checked steps": len(lines)}
    rank = figure.max_rank if figure.min < 100 and e.facts.num_ranks > 1 else None
    where = "" if rank is None else f" on rank {rank}"
    return make_finding("SW046", evidence, rank=rank, where=where, step=lines[-1].step)


def idle_scheduler(e: Evidence) -> Finding | None:
    """Find a learning rate scheduler that is never stepped."""
    found = [line for _, line in e.run.lines(IdleScheduler)]
    if not found:
        return None
    line = found[-1]
    rate = "an unknown rate" if line.rate is None else f"{line.rate:g}"
    evidence = {"steps": line.step, "learning rate": line.rate or 0.0}
    return make_finding("SW044", evidence, scheduler=line.scheduler, rate=rate)


# -- inputs and batches
def shared_inputs(e: Evidence) -> Finding | None:
    """Find ranks that read the same samples."""
    if not set(e.facts.degrees) <= {"replicate", "shard"}:
        return None  # ranks of one batch share it
    lines = [line for line in e.run.steps if m.SHARED_INPUTS_SHARE in line.metrics]
    new = [line for line in lines if line.metrics[m.SHARED_INPUTS_SHARE].max > 0]
    if len(lines) < _MIN_CHECKS:
        raise NotEnough(f"digests of inputs: {len(lines)}, and {_MIN_CHECKS} are needed")
    if len(new) < max(_MIN_CHECKS, 0.8 * len(lines)):
        return None
    everyone = all(line.metrics[m.SHARED_INPUTS_SHARE].min > 0 for line in new)
    evidence = {"checked steps with the same inputs": len(new), "checked steps": len(lines)}
    who = f"all {e.facts.num_ranks} ranks" if everyone else "two or more ranks"
    return make_finding("SW025", evidence, who=who, num=len(new))


def small_batches(e: Evidence) -> Finding | None:
    """Find steps whose time goes to work that does not depend on the batch."""
    if e.facts.full_bytes < _TOY_BYTES or e.facts.offload:
        return None
    rows = e.typical(m.ROWS, "max")
    # Means over all steps: in a single step another rank may be late by chance.
    steps = count_steps(e.lines)
    waits_s = min(total(e.lines, name, "min") for name in (m.EXPOSED_MS, m.WAITED_MS)) / 1e3
    fixed_s = (total(e.lines, m.OPTIMIZER_S, "min") + waits_s) / steps
    step_s = total(e.lines, m.STEP_S, "median") / steps
    if rows >= _FEW_ROWS or fixed_s < max(_FIXED * step_s, e.noise_s):
        return None
    e.check_cores(fixed_s)
    evidence = {"rows of a micro-batch": rows, "threshold, rows": _FEW_ROWS}
    evidence |= {"optimizer and waits, s/step": fixed_s, "share of the step": fixed_s / step_s}
    gain = fixed_s * (1 - rows / _FEW_ROWS)
    return make_finding("SW026", evidence, gain=(0.0, gain), share=fixed_s / step_s)


def many_reads(e: Evidence) -> Finding | None:
    """Find loops that read many values from the device in each step."""
    lines = _checked(e, m.READS)
    reads = median(line.metrics[m.READS].max for line in lines)
    if reads < _READS:
        return None
    evidence = {"reads in a pass": reads, "threshold": _READS}
    return make_finding("SW027", evidence, reads=reads)


# -- time and memory beside the steps
def long_evaluation(e: Evidence) -> Finding | None:
    """Find runs that spend much of their time in passes without gradients."""
    lines = [line for line in e.warm_lines if m.PAUSED_S in line.metrics]
    if not lines:
        raise NotEnough(f"the figure {m.PAUSED_S}")
    paused_s = total(lines, m.PAUSED_S)
    inside_s = sum(
        line.metrics[m.EVALUATION_S].max * line.num_steps
        for line in lines
        if m.EVALUATION_S in line.metrics
    )
    whole_s = total(lines, m.STEP_S, "median") + paused_s
    share = (paused_s + inside_s) / whole_s
    if share < _EVALUATION or paused_s + inside_s < _EVALUATION_S:
        return None
    evidence = {"evaluation, s": paused_s + inside_s, "run, s": whole_s, "share": share}
    evidence["threshold"] = _EVALUATION
    gain = (paused_s + inside_s - 0.1 * whole_s) / count_steps(lines)
    return make_finding("SW052", evidence, gain=(0.0, gain))


def needless_recomputation(e: Evidence) -> Finding | None:
    """Find blocks that are all computed again though their activations would fit."""
    recompute_s, forward_s = e.typical(m.RECOMPUTE_S), e.typical(m.FORWARD_S, default=0.0)
    percent = e.memory_percent
    is_long = recompute_s >= max(_RECOMPUTED * e.step_s, e.noise_s)
    if not is_long or recompute_s < _ALL_BLOCKS * forward_s or percent > _ROOM:
        return None
    evidence = {"recomputation, s/step": recompute_s, "share of the step": recompute_s / e.step_s}
    evidence |= {"threshold": _RECOMPUTED, "memory, % of the device": percent, "room, %": _ROOM}
    change = Change("activation_checkpointing", "all blocks", "every other block, or none")
    return make_finding("SW035", evidence, change, gain=(recompute_s / 2, recompute_s))


def memory_leak(e: Evidence) -> Finding | None:
    """Find memory that grows by about the same number of bytes in each step."""
    best: tuple[float, Finding] | None = None
    for name in (m.IN_USE_GIB, m.HOST_GIB):
        lines = [line for line in e.warm_lines if name in line.metrics]
        if len(lines) < _LEAK_LINES:
            continue
        points = [(float(line.step), line.metrics[name].max * m.GIB) for line in lines]
        slope, fit = _line_through(points)
        growth, steps = points[-1][1] - points[0][1], points[-1][0] - points[0][0]
        half = points[len(points) // 2]
        later = (points[-1][1] - half[1]) / growth if growth > 0 else 0.0
        expected = (points[-1][0] - half[0]) / steps
        is_steady = fit >= _LINEAR and later >= _LATER_HALF * 2 * expected
        if growth < _LEAK_BYTES or slope < _LEAK_PER_STEP or not is_steady:
            continue
        figures = [line.metrics[name] for line in lines]
        others = (figures[-1].min - figures[0].min) * m.GIB
        is_one = e.facts.num_ranks > 1 and others < growth / 3
        rank = figures[-1].max_rank if is_one else None
        evidence = {
            "bytes a step": slope,
            "growth, bytes": growth,
            "steps": steps,
        }
        evidence |= {"share of the variance on a line": fit, "threshold": _LINEAR}
        device = "host" if name == m.HOST_GIB or e.is_cpu else "device"
        who = "each rank" if rank is None else f"rank {rank}"
        finding = make_finding("SW034", evidence, gain=growth, rank=rank, who=who, of=device)
        if best is None or slope > best[0]:
            best = slope, finding
    if best is None and not any(m.IN_USE_GIB in line.metrics for line in e.warm_lines):
        raise NotEnough(f"the figure {m.IN_USE_GIB}")
    return None if best is None else best[1]


def _line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of the line of least squares, and its share of the variance."""
    mean_x, mean_y = (fmean(values) for values in zip(*points, strict=True))
    xx = sum((x - mean_x) ** 2 for x, _ in points)
    yy = sum((y - mean_y) ** 2 for _, y in points)
    xy = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return (xy / xx, xy * xy / (xx * yy)) if xx and yy else (0.0, 0.0)
