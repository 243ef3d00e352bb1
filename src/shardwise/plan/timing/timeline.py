"""A simulated step as Chrome trace JSON, to be opened in Perfetto beside the trace of a real run.

Note [Names in the timeline]
A real run's spans are ``shardwise.<phase>(<unit>)``, so gathers are ``shardwise.unshard(...)`` here
too, reductions ``shardwise.reduce(...)``, and a gap in which compute waits for one of them is
``shardwise.wait_unshard(...)`` or ``shardwise.wait_reduce(...)`` of the unit that it waits for.
Operations that the engine does not label are named by phase and unit, e.g. ``forward layers.3``.

Source: Trace Event Format (Google, the trace-event profiling tool): JSON object form, complete
events X, metadata events M, flow events s and f; times in microseconds.
"""

from typing import Any, get_args

from shardwise.plan.step.program import Collective, Compute, Op, Program, Stream, Transfer
from shardwise.plan.timing.breakdown import COMMUNICATING, RankRun, Span, category, unit_name
from shardwise.plan.timing.simulate import Simulated

_LABELLED = ("unshard", "reduce")
_STREAMS: tuple[Stream, ...] = get_args(Stream)

Event = dict[str, Any]


def chrome_trace(simulated: Simulated, num_micro_batches: int | None = None) -> dict[str, Any]:
    """Return the trace of the ranks that were written down: a process each, a thread per stream.

    Times are whole nanoseconds, so that events which follow each other do not overlap by rounding.
    ``num_micro_batches``: those of the step, where fewer were simulated.
    """
    shown = simulated.num_micro_batches
    first = min(run.begin_s for run in simulated.ranks)
    events: list[Event] = []
    for order, run in enumerate(simulated.ranks):
        title = f"rank {run.rank}" + (
            " (slowest)" if order == 0 and len(simulated.ranks) > 1 else ""
        )
        events += _process_events(run, order, title)
        events += [e for span in run.spans for e in _span_events(run, span, first)]
        events += _wait_events(run, first)
        events += _flow_events(run, first)
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "source": "shardwise simulate",
            "simulated_s": simulated.step_s,
            "num_simulated_micro_batches": shown,
            "num_micro_batches": shown if num_micro_batches is None else num_micro_batches,
            "num_ranks": simulated.scenario.num_ranks,
        },
        "traceEvents": events,
    }


def _process_events(run: RankRun, order: int, title: str) -> list[Event]:
    def metadata(kind: str, tid: int, **args: object) -> Event:
        return {"name": kind, "ph": "M", "pid": run.rank, "tid": tid, "ts": 0, "args": args}

    used = {run.program.ops[span.op].stream for span in run.spans}
    events = [
        metadata("process_name", 0, name=title),
        metadata("process_sort_index", 0, sort_index=order),
    ]
    for tid, stream in enumerate(_STREAMS):
        if stream in used:
            name = f"{stream} axis" if stream in COMMUNICATING else stream
            events.append(metadata("thread_name", tid, name=name))
            events.append(metadata("thread_sort_index", tid, sort_index=tid))
    return events


def _span_events(run: RankRun, span: Span, first: float) -> list[Event]:
    """Return the event of one operation; of a collective, from the moment at which it was ready."""
    op = run.program.ops[span.op]
    args: dict[str, object] = {
        "unit": unit_name(run.program, op),
        "phase": op.phase,
        "micro_batch": op.micro_batch,
        **_work_args(op),
    }
    if span.start_s > span.ready_s:
        args["waited_for_ranks_us"] = (span.start_s - span.ready_s) * 1e6
    return [_slice(_name(run.program, op), category(op), run, op, span, first, args)]


def _slice(
    name: str, cat: str, run: RankRun, op: Op, span: Span, first: float, args: dict[str, object]
) -> Event:
    begin, end = _nanoseconds(span.ready_s - first), _nanoseconds(span.end_s - first)
    return {
        "name": name,
        "cat": cat,
        "ph": "X",
        "pid": run.rank,
        "tid": _STREAMS.index(op.stream),
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": args,
    }


def _name(program: Program, op: Op) -> str:
    unit = unit_name(program, op)
    if op.phase in _LABELLED and isinstance(op.work, Collective):
        return f"shardwise.{op.phase}({unit})"
    what = f"{op.phase} {category(op)}" if isinstance(op.work, Collective) else op.phase
    return f"{what} {unit or '(root)'}"


def _work_args(op: Op) -> dict[str, object]:
    match op.work:
        case Compute(costs):
            return {
                "flops": sum(cost.flops for cost in costs),
                "moved_bytes": sum(cost.moved_bytes for cost in costs),
                "num_ops": sum(cost.num_ops for cost in costs),
            }
        case Collective():
            return {
                "kind": op.work.kind,
                "axis": op.work.axis,
                "payload_bytes": op.work.payload_bytes,
                "sent_bytes": op.work.sent_bytes,
                "num_messages": op.work.num_messages,
            }
        case Transfer():
            return {"link": op.work.link, "num_bytes": op.work.num_bytes}


def _wait_events(run: RankRun, first: float) -> list[Event]:
    """Return what fills the gaps in which compute waits for a labelled collective."""
    events: list[Event] = []
    ops = run.program.ops
    free = run.begin_s
    for span in run.spans:
        op = ops[span.op]
        if op.stream != "compute":
            continue
        if span.start_s > free and op.after:
            cause = ops[max(op.after, key=lambda j: run.spans[j].end_s)]
            if cause.phase in _LABELLED and isinstance(cause.work, Collective):
                name = f"shardwise.wait_{cause.phase}({unit_name(run.program, cause)})"
                args: dict[str, object] = {"phase": op.phase, "micro_batch": op.micro_batch}
                gap = Span(span.op, free, free, span.start_s)
                events.append(_slice(name, "wait", run, op, gap, first, args))
        free = span.end_s
    return events


def _flow_events(run: RankRun, first: float) -> list[Event]:
    """Return an arrow from each gather to the first operation on compute that needs it."""
    events: list[Event] = []
    ops = run.program.ops
    drawn: set[int] = set()
    for span in run.spans:
        op = ops[span.op]
        if op.stream != "compute":
            continue
        for j in op.after:
            if j in drawn or category(ops[j]) != "all_gather":
                continue
            drawn.add(j)
            for phase, at, stream in (
                ("s", run.spans[j].ready_s, ops[j].stream),
                ("f", span.ready_s, op.stream),
            ):
                events.append(
                    {
                        "name": "gather to use",
                        "cat": "flow",
                        "ph": phase,
                        "id": run.rank * len(ops) + j,
                        "pid": run.rank,
                        "tid": _STREAMS.index(stream),
                        "ts": _nanoseconds(at - first) / 1000,
                        **({"bp": "e"} if phase == "f" else {}),
                    }
                )
    return events


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
