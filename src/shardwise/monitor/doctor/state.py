"""Rules about the state of a run: memory, the cost of offload, saves, numbers, and its end."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from shardwise.monitor import metrics as m
from shardwise.monitor.doctor.evidence import (
    Evidence,
    NotEnough,
    count_steps,
    figure,
    total,
)
from shardwise.monitor.findings import Change, Finding, make_finding
from shardwise.monitor.record import (
    Begin,
    End,
    LostUpdates,
    Memory,
    NonFinite,
    OtherSave,
    OutOfMemory,
    RunRecord,
    Save,
    SkippedSteps,
    StepLine,
)
from shardwise.names import name_of_unit
from shardwise.processes import describe_end, fate, own_process
from shardwise.quantities import format_bytes, format_duration

_FAILURES = m.RETRIES, m.OOMS  # of the allocator
_NEARLY_FULL, _FULL = 85.0, 92.0  # percent of the device
_MOST = 0.5
_UNUSED = 0.2  # of the device
_STEP_SHARE, _CPU_STEP_SHARE, _CPU_STEP_S = 0.25, 0.4, 0.05
_STALL = 0.03  # of the run
_STALL_S = 0.3  # of one line
_BUSY = 0.9
# 419 failures in 54 days of 16,384 accelerators: The Llama 3 Herd of Models, 2024, section 3.3.4.
_DEVICE_MTBF_S = 50_000 * 3600.0
_MOST_MTBF_S = 7 * 24 * 3600.0  # of people, disks and networks
_UNSAVED_S, _UNSAVED_TIMES = 1800.0, 4.0
_CUT_BY_NEXT = {0: ("optimizer_state", "param_shards"), 1: ("grad_full",), 2: ("param_full",)}
_SKIPPED = 0.05
_LEAST_SCALE, _FALLS = 1.0, 16.0
_SKIPPED_IN_A_ROW = 16
_LOST, _LOST_OF_WORST = 10.0, 50.0  # per cent
_MIN_LOOKS, _MAX_LOOKS = 3, 20  # lines with a look at updates
_NAMED = 3
_HANG_TIMES, _HANG_S = 5.0, 60.0
_MAX_SHOWN, _MAX_QUOTED = 4, 300  # ranks, and characters of each one's error


def _num_retries(e: Evidence) -> float:
    """Return how many retries and failures of the allocator the steady lines contain."""
    counts = [[line.metrics[n].max for line in e.lines if n in line.metrics] for n in _FAILURES]
    return sum(each[-1] - each[0] for each in counts if each)


def full_memory(e: Evidence) -> Finding | None:
    """Find a device that is nearly full, of activations or of the model's state."""
    percent, retries = e.memory_percent, _num_retries(e)
    if percent < _NEARLY_FULL and not retries:
        return None
    engine, other = sum(e.peak.device.values()), e.peak.other
    share = other / (engine + other or 1)
    evidence = {
        "memory, % of the device": percent,
        "retries of the allocator": retries,
        "engine's bytes at the peak": engine,
        "other bytes at the peak": other,
        "share of others": share,
    }
    if share > _MOST:
        is_recomputing = e.typical(m.RECOMPUTE_S, "max", 0.0)
        changes = [Change("activation_checkpointing", None, "blocks")] * (not is_recomputing)
        return make_finding("SW030", evidence | {"threshold": _MOST}, *changes, gain=other / 2)
    shards, stage = e.num_shards, e.facts.stage
    if stage == 3 or shards == 1 or percent < _FULL:
        return None
    gain = (1 - 1 / shards) * sum(e.peak.device.get(kind, 0) for kind in _CUT_BY_NEXT[stage])
    evidence |= {"threshold, %": _FULL, "stage": stage}
    return make_finding("SW005.higher", evidence, gain=gain, next=stage + 1, shards=shards)


def fragmentation(e: Evidence) -> Finding | None:
    """Find memory that the allocator holds without using it."""
    if e.is_cpu:
        return None  # no caching allocator
    reserved = e.typical(m.MAX_RESERVED_GIB, "max") * m.GIB
    unused = reserved - e.typical(m.MAX_ACTIVE_GIB, "max") * m.GIB
    share, retries = unused / e.facts.device_bytes, _num_retries(e)
    if share < _UNUSED and not (retries > 1 and share > _UNUSED / 2):
        return None
    evidence = {"reserved, bytes": reserved, "unused, bytes": unused, "share of the device": share}
    evidence |= {"threshold": _UNUSED, "retries of the allocator": retries}
    return make_finding("SW031", evidence, gain=(0.0, unused))


def cost_of_offload(e: Evidence) -> Finding | None:
    """Find steps dominated by offload: the optimizer's step, copies, reads and writes of files.

    If it is hidden behind computation, it costs an accelerator nothing. On a CPU it takes the cores
    that forward and backward compute on, so it counts too.
    """
    facts = e.facts
    if not facts.offload:
        return None
    whole_s, moves_state = e.step_s, "optimizer='device'" not in facts.offload
    waited_s = e.typical(m.STEP_WAIT_S, default=0.0)
    own_s = e.typical(m.OPTIMIZER_S) if moves_state else 0.0
    name = m.OFFLOAD_MS if e.is_cpu else m.OFFLOAD_EXPOSED_MS
    taken_s = own_s + e.typical(name, default=1e3 * waited_s) / 1e3
    most = _CPU_STEP_SHARE if e.is_cpu else _STEP_SHARE
    if taken_s < most * whole_s or (e.is_cpu and taken_s < _CPU_STEP_S):
        return None
    e.check_cores(taken_s)
    behind_s = e.typical(m.BACKGROUND_STEP_MS, default=0.0) / 1e3
    moved = [e.typical(m.TRANSFER_MS.format(kind), default=0.0) / 1e3 for kind in m.TRANSFERS]
    parts = {
        "the optimizer's step": own_s + max(behind_s, waited_s),
        "copies between device and host": sum(moved[:2]),
        "reads and writes of files": sum(moved[2:]),
    }
    largest, is_file = max(parts, key=parts.__getitem__), "nvme" in facts.offload
    is_step = largest == "the optimizer's step"
    evidence = {
        "offload, s/step": taken_s,
        "optimizer, s/step": own_s,
        "of that waited for behind, s/step": waited_s,
        "behind, s/step": behind_s,
        **{f"{kind}, s/step": seconds for kind, seconds in zip(m.TRANSFERS, moved, strict=True)},
        "share of the step": taken_s / whole_s,
        "threshold": most,
    }
    if sampled := [line for _, line in e.run.lines(Memory)]:  # one rank's newest step
        units = sampled[-1].units.get("files" if is_file else "host", {}).values()
        if state_bytes := sum(sum(kinds.values()) for kinds in units):
            evidence |= {"state there, bytes": state_bytes, "state, bytes/s": state_bytes / taken_s}
    return make_finding(
        "SW033" if is_file else "SW032.step" if is_step else "SW032.copies",
        evidence,
        gain=(taken_s / 2 if is_file or is_step else 0.0, taken_s),
        largest=largest,
        largest_s=parts[largest],
        optimizer=facts.optimizer,
        offload=facts.offload,
    )


# -- saves
def slow_saves(e: Evidence) -> Finding | None:
    """Find saves that the training thread waits for."""
    lines = [line for line in e.warm_lines if m.STALL_S in line.metrics]
    whole_s, stall_s = total(lines, m.STEP_S, "median"), total(lines, m.STALL_S)
    longest_s = max((total([line], m.STALL_S) for line in lines), default=0.0)
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return None
    e.check_cores(stall_s / count_steps(lines), lines=lines)
    behind_s = max(total(lines, m.SAVE_S) - stall_s, 0.0)
    case = "often" if behind_s > _BUSY * whole_s else "copy"
    case = "thread" if behind_s < stall_s else case
    slowest = max((figure(line, m.STALL_S) for line in lines), key=lambda stall: stall.max)
    evidence = {"stalls, s": stall_s, "longest in a line, s": longest_s}
    evidence |= {"behind the training, s": behind_s, "run, s": whole_s}
    evidence |= {"share": stall_s / whole_s, "threshold": _STALL}
    rank = slowest.max_rank if slowest.max > 2 * slowest.median else None
    gain, times = (stall_s - _STALL * whole_s) / count_steps(lines), 1 + behind_s / whole_s
    return make_finding(f"SW050.{case}", evidence, gain=gain, rank=rank, times=times)


def other_saves(e: Evidence) -> Finding | None:
    """Find saves by torch's own calls that the training waits for."""
    lines = e.warm_lines
    whole_s, began = total(lines, m.STEP_S, "median"), lines[0].step - lines[0].num_steps
    by_rank: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for rank, line in e.run.lines(OtherSave):
        if line.step > began:
            by_rank[rank].append((line.seconds, line.call))
    sums = {rank: sum(seconds for seconds, _ in saves) for rank, saves in by_rank.items()}
    if not sums:
        return None
    rank = max(sums, key=sums.__getitem__)
    stall_s, (longest_s, call) = sums[rank], max(by_rank[rank])
    if stall_s < _STALL * whole_s or longest_s < _STALL_S:
        return None
    is_one = len(by_rank) < e.facts.num_ranks
    evidence = {"stalls, s": stall_s, "longest, s": longest_s, "run, s": whole_s}
    evidence |= {"share": stall_s / whole_s, "threshold": _STALL}
    return make_finding(
        "SW050.torch",
        evidence,
        gain=(stall_s - _STALL * whole_s) / count_steps(lines),
        rank=rank if is_one else None,
        call=call,
        who=f"on rank {rank} " if is_one else "",
        others=", and the other ranks wait for that rank" if is_one else "",
    )


def no_saves(e: Evidence) -> Finding | None:
    """Find a run that would lose much work if it failed."""
    steps = e.run.steps[e.run.num_samples :]  # between samples there may be saves
    lines = [line for line in steps if m.STALL_S in line.metrics]
    if not lines:
        raise NotEnough("the time in saves")
    saves = [line for line in lines if figure(line, m.STALL_S).max or figure(line, m.SAVE_S).max]
    moments = [lines[0].at_s, *(line.at_s for line in saves), lines[-1].at_s]
    unsaved_s = max(later - at for at, later in pairwise(moments))
    stall_s = max((total([line], m.STALL_S) for line in saves), default=0.0)
    mtbf_s = min(_DEVICE_MTBF_S / e.facts.num_ranks, _MOST_MTBF_S)
    best_s = math.sqrt(2 * stall_s * mtbf_s)
    threshold_s = max(_UNSAVED_S, _UNSAVED_TIMES * best_s)
    if unsaved_s < threshold_s:
        return None
    step_s = (lines[-1].at_s - lines[0].at_s) / max(count_steps(lines[1:]), 1)
    evidence = {
        "longest time without a save, s": unsaved_s,
        "saves": len(saves),
        "mean time between failures, assumed, s": mtbf_s,
        "interval that loses least, s": best_s,
        "threshold, s": threshold_s,
    }
    saved = "no save for" if saves else "no save at all in"
    every = max(int(max(best_s, _UNSAVED_S / 2) / step_s), 1)
    unsaved = format_duration(unsaved_s)
    return make_finding("SW051", evidence, saved=saved, unsaved=unsaved, every=every)


# -- numbers
def half_precision(e: Evidence) -> Finding | None:
    """Find a loss scaler that continues to skip steps, or whose scale falls or is too low."""
    facts = e.facts
    if (in_a_row := _skipped_now(e)) is not None:
        return in_a_row
    scales = [
        line.metrics[m.LOSS_SCALE].min for line in e.run.steps if m.LOSS_SCALE in line.metrics
    ]
    autocast = any(figure(line, m.IN_HALF).max for line in e.run.steps if m.IN_HALF in line.metrics)
    is_half = any("float16" in u.dtype.replace("bfloat16", "") for u in facts.units)
    if not (autocast or is_half or scales):
        return None
    lines = e.lines_with(m.SKIPPED_STEPS)
    # With `fully_shard` a skipped step looks like a micro-batch without a window, unless the
    # scaler's own calls are known.
    usual = min(figure(line, m.SKIPPED_STEPS).max for line in lines)
    usual = usual if facts.reduces_units_alone and not scales else 0.0
    taken = count_steps(lines)
    skipped = total(lines, m.SKIPPED_STEPS) - usual * taken
    share = skipped / (skipped + taken)
    scales = scales or [v for n in lines for name, v in n.values.items() if "scale" in name and v]
    is_low = bool(scales) and scales[-1] < _LEAST_SCALE
    third = len(scales) // 3
    falls = third > 1 and min(scales[:third]) > _FALLS * max(scales[-third:])
    falls = falls and min(scales[third:-third]) > max(scales[-third:])
    if share <= _SKIPPED and not is_low and not falls:
        return None
    evidence = {"skipped steps": skipped, "share": share, "threshold": _SKIPPED, "steps": taken}
    if scales:
        evidence |= {"loss scale": scales[-1], "mean loss scale": fmean(scales)}
    low = f"; the loss scale is {scales[-1]:g}" if is_low else ""
    low = f"; the loss scale fell from {scales[0]:g} to {scales[-1]:g}" if falls else low
    return make_finding("SW040", evidence, low=low, all=f"{skipped + taken:.0f}")


def _skipped_now(e: Evidence) -> Finding | None:
    """Find a scaler that has skipped all steps of late, of which there may be no line at all."""
    newest = max(
        (line for _, line in e.run.lines(SkippedSteps)), key=lambda n: n.step, default=None
    )
    lines = [
        n for _, n in e.run.lines(SkippedSteps) if newest is not None and n.step == newest.step
    ]
    most = max(lines, key=lambda line: line.num_steps, default=None)
    last = e.run.steps[-1].step if e.run.steps else 0
    if most is None or most.num_steps < _SKIPPED_IN_A_ROW or last > most.step:
        return None
    evidence: dict[str, float] = {
        "skipped in a row": most.num_steps,
        "threshold": _SKIPPED_IN_A_ROW,
    }
    evidence |= {"loss scale": most.scale or 0.0, "step": most.step}
    return make_finding("SW040.all", evidence, scale=f"{most.scale or 0.0:g}")


def not_finite(e: Evidence) -> Finding | None:
    """Find logged values or gradients that are inf or nan: the first step, and the first ranks."""
    line = next(filter(_is_bad, e.run.steps), None)
    if line is None:
        return None
    since = line.bad_since or {
        name: {0: line.step} for name, v in line.values.items() if v is None or not math.isfinite(v)
    }
    first = min((s for steps in since.values() for s in steps.values() if s), default=line.step)
    names = [name for name, steps in since.items() if first in steps.values()]
    values = [name for name in names if name != m.BAD_GRADIENTS]
    # Gradients are means over ranks, so all ranks have it; a logged value shows the rank.
    uneven = [since[name] for name in values if set(since[name].values()) != {first}]
    ranks = sorted({rank for steps in uneven for rank, step in steps.items() if step == first})
    who = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}, not on others"
    looks = sorted((row for _, row in e.run.lines(NonFinite)), key=lambda row: row.step)
    look = next((row for row in looks if row.step >= first), NonFinite(0, ()))
    params = look.parameters
    gradients = f"gradients of {', '.join(params[:3])}" if params else "gradients"
    named, also = f"{gradients} are", ""
    if values:
        named = f"{', '.join(values)} {'is' if len(values) == 1 else 'are'}"
        also = f"; {gradients} are not either, at step {look.step}" if params else ""
    elif 0 < look.finite_step < first - 1:
        also = f"; step {look.finite_step} was the last in which they were checked and finite"
    return make_finding(
        "SW041",
        {"first bad step": first, "ranks that began": len(ranks)},
        unit=params[0] if params else None,
        rank=ranks[0] if len(ranks) == 1 else None,
        names=named,
        who=who if ranks else "",
        also=also,
        checkpoint=_last_finite(e.run),
    )


def _is_bad(line: StepLine) -> bool:
    found = (line.metrics.get(name) for name in (m.BAD_GRADIENTS, m.BAD_VALUES))
    is_counted = any(figure is not None and figure.max for figure in found)
    return is_counted or any(v is None or not math.isfinite(v) for v in line.values.values())


def _last_finite(run: RunRecord) -> str:
    """Return the newest checkpoint that all ranks found finite as they saved it."""
    if run.idle_s is None:  # while the run continues, only rank 0's lines are known
        return "a checkpoint that `shardwise doctor` names, as it was finite when it was saved"
    found: dict[str, dict[int, Save]] = defaultdict(dict)
    for rank, line in run.lines(Save):
        found[line.path][rank] = line
    finite = [
        (max(line.step for line in by_rank.values()), path)
        for path, by_rank in found.items()
        if len(by_rank) == run.facts.num_ranks
        and all(line.is_finite for line in by_rank.values())
        # A folder of another machine cannot be seen from here.
        and (Path(path).exists() or not Path(path).parent.exists())
    ]
    if not finite:
        return "a checkpoint with finite numbers; no existing one is known to have them"
    return f"{max(finite)[1]}, which all ranks found finite as they saved it"


def lost_updates(e: Evidence) -> Finding | None:
    """Find parameters in 16 bits without fp32 masters whose updates are rounded away."""
    facts = e.facts
    lines = [line for line in e.run.steps if m.LOST_SHARE in line.metrics][-_MAX_LOOKS:]
    if not lines and not any("16" in re.sub(r"\(.*?\)", "", u.dtype) for u in facts.units):
        return None
    if len(lines) < _MIN_LOOKS:
        have = f"{len(lines)}, and {_MIN_LOOKS} are needed"
        raise NotEnough(f"comparisons of parameters in 16 bits before and after a step: {have}")
    share = e.typical(m.LOST_SHARE, "max", lines=lines)
    worst = figure(lines[-1], m.LOST_OF_WORST_SHARE).max
    if share <= _LOST and worst <= _LOST_OF_WORST:
        return None
    shares: dict[str, float] = defaultdict(float)
    for by_name in {rank: line.shares for rank, line in e.run.lines(LostUpdates)}.values():
        for name, value in by_name.items():
            shares[name] = max(shares[name], value)
    names = sorted(shares, key=lambda name: (-shares[name], name))[:_NAMED]
    of_each = ", ".join(f"{name} {100 * shares[name]:.0f} %" for name in names)
    evidence = {
        "lost updates, %": share,
        "threshold, %": _LOST,
        "lost updates of the worst parameter, %": worst,
        "threshold of the worst parameter, %": _LOST_OF_WORST,
    }
    return make_finding(
        "SW042",
        evidence,
        unit=names[0] if names else None,
        names=f": {of_each}" if names else "",
        precision="MixedPrecisionPolicy(param_dtype=bf16)" if facts.reduces_units_alone else "bf16",
    )


def died(e: Evidence) -> Finding | None:
    """Find ranks that raised or were killed, and those whose communication failed after them.

    A rank that raised by itself is the cause before one that exited, since launchers kill the
    others. Ranks whose communication failed are the cause only if no other rank is known to be.
    """
    run, last_lines = e.run, e.run.end_lines
    ends = {rank: line for rank, line in last_lines.items() if isinstance(line, End)}
    failed = {rank: line for rank, line in ends.items() if line.error}
    stopped = [rank for rank, line in failed.items() if _is_by_choice(line)]
    failed = {rank: line for rank, line in failed.items() if rank not in stopped}
    own = {rank: line for rank, line in failed.items() if not line.follows}
    this = own_process()
    gone, causes = dict[int, str](), dict[int, str]()  # ranks that wrote no end and have exited
    for rank, begin in last_lines.items():
        if isinstance(begin, Begin) and begin.process:
            life, causes[rank] = fate(begin.process, this)
            if life == "dead":
                gone[rank] = begin.process.host
    if not (failed or gone) or (stopped and not own):  # a user's Ctrl-C ends all ranks
        return None
    last = run.steps[-1].step if run.steps else 0
    named: Sequence[int] = [*gone]
    changes: list[Change] = []
    early = [] if own or gone else _ended_early(ends)
    if early:
        named, step = early, min(ends[rank].step for rank in early)
        verdict = (
            f"{_list_ranks(early)} ended the loop after step {step} without an error, and "
            f"the other ranks went on: their communication failed in step {step + 1}"
        )
    elif own or not gone:
        # The first that failed in a step; errors outside of steps come after them.
        first = min(
            own or failed,
            key=lambda r: (failed[r].during is None, failed[r].unix_s or 0.0),
        )
        cause = _describe_error(failed[first])
        named = [rank for rank, line in failed.items() if _describe_error(line) == cause]
        verdict, changes = _describe_cause(run, first, named, failed[first])
    else:
        # Other ranks know of steps since the last line of figures.
        during = (line.during for line in failed.values())
        over = max([last, *(step - 1 for step in during if step is not None)])
        ways = defaultdict[str, list[int]](list)
        for rank in named:
            ways[describe_end(causes[rank] or _cause_seen(rank, failed.values()))].append(rank)
        who = {
            way: ("each of " if len(ranks) > 1 else "") + _list_ranks(ranks)
            for way, ranks in ways.items()
        }
        if len(ways) == 1:
            who = dict.fromkeys(ways, "each" if len(named) > 1 else "it")
        how = "; ".join(f"{who[way]} {way}" for way in ways)
        verdict = (
            f"{_list_ranks(named)} on {gone[named[0]]} died after step {over} and left no error: "
            f"{how}"
        )
    others = [rank for rank in failed if rank not in named]
    quoted = [_quote(rank, failed[rank]) for rank in others[:_MAX_SHOWN]]
    if gone and [*gone] != named:
        quoted.append(f"The processes of {_list_ranks([*gone])} exited and left no error.")
    return make_finding(
        "SW023",
        {
            "last line of figures, step": last,
            "ranks that raised": len(own),
            "ranks that are gone": len(gone),
            "ranks whose communication failed": len(failed) - len(own),
        },
        *changes,
        rank=named[0] if len(named) == 1 else None,
        verdict=verdict,
        why=" ".join(quoted) or "The run did not come to its end.",
    )


def _cause_seen(rank: int, ends: Iterable[End]) -> str:
    """Return how a rank ended as another rank saw it, which looked in time; "" if none did."""
    pattern = rf"rank {rank} \(process[^()]*\) has died: \D*(signal \d+ \(\w+\)|exit code \d+)"
    found = (re.search(pattern, end.message or "") for end in ends)
    return next((match[1] for match in found if match), "")


def _is_by_choice(line: End) -> bool:
    """Tell whether a program or its user stopped a run by an exception that says so."""
    name = line.error or ""
    is_stop = "Stop" in name and name not in ("StopIteration", "StopAsyncIteration")
    return name in ("KeyboardInterrupt", "GeneratorExit") or is_stop


def _ended_early(ends: Mapping[int, End]) -> list[int]:
    """Return the ranks whose loop was over while communication failed in a step of others.

    An error that has no step came after the loop, from an exchange with ranks that are in one.
    """
    during = [line.during for line in ends.values() if line.follows and line.during is not None]
    over = {rank: line.step for rank, line in ends.items() if not line.error or line.during is None}
    return [rank for rank, step in over.items() if during and step < min(during)]


def _describe_error(line: End) -> str:
    if not line.message:
        return str(line.error)
    return line.message if line.follows else f"{line.error}: {line.message}"


def _quote(rank: int, line: End) -> str:
    text = _describe_error(line)
    text = text if text.startswith("rank ") else f"rank {rank}: {text}"
    return text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}..."


def _describe_cause(
    run: RunRecord, first: int, named: Sequence[int], line: End
) -> tuple[str, list[Change]]:
    """Return the verdict about an error, and the change that helps if memory ran out."""
    step = line.step if line.during is None else line.during
    place = f"in step {step}"
    if line.phase not in (None, "outside"):
        of = "" if line.unit is None else f" of '{name_of_unit(line.unit)}'"
        place += f", in {line.phase}{of}"
    if line.follows:
        return f"communication failed {place} on rank {first}: {_describe_error(line)}", []
    for _, oom in run.lines(OutOfMemory, first):
        if oom.step == step:
            asks = "" if oom.asked_bytes is None else f" asking for {format_bytes(oom.asked_bytes)}"
            in_use, most = format_bytes(oom.in_use_bytes), format_bytes(oom.capacity_bytes)
            fixes = [Change("memory", None, fix.change) for fix in oom.fixes if fix.fits]
            held = f"{asks} with {in_use} in use of {most}"
            return f"rank {first} ran out of memory {place},{held}", fixes[:1]
    return f"{_list_ranks(named)} raised {_describe_error(line)}, {place}", []


def _list_ranks(ranks: Sequence[int]) -> str:
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_SHOWN else ""
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def no_step(e: Evidence) -> Finding | None:
    """Find a run that has not ended and writes no steps any more."""
    run = e.run
    if run.idle_s is None or any(isinstance(line, End) for line in run.end_lines.values()):
        return None
    if len(run.steps) < 3:
        raise NotEnough("lines of steps, which tell how long one takes")
    intervals = sorted(later.at_s - line.at_s for line, later in pairwise(run.steps))
    longest = intervals[int(0.99 * (len(intervals) - 1))]
    # Lines are written every few steps: of the first ones each has its own.
    per_step = longest / min(line.num_steps for line in run.steps)
    longest = max(longest, per_step * max(line.num_steps for line in run.steps))
    if run.idle_s < max(_HANG_TIMES * longest, _HANG_S):
        return None
    return make_finding(
        "SW022",
        {
            "idle, s": run.idle_s,
            "longest interval, s": longest,
            "threshold, intervals": _HANG_TIMES,
            "last step": run.steps[-1].step,
        },
        idle=format_duration(run.idle_s),
    )
