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
from shardwise.trace_events import ChromeTrace

_LABELLED = ("unshard", "reduce")
_STREAMS: tuple[Stream, ...] = get_args(Stream)


def simulated_trace(simulated: Simulated, num_micro_batches: int | None = None) -> dict[str, Any]:
    """Return the trace of the ranks that were written down: a process each, a thread per stream.

    Times are whole nanoseconds. ``num_micro_batches``: those of the step, if fewer were simulated.
    """
    shown = simulated.num_micro_batches
    first = min(run.begin_s for run in simulated.ranks)
    trace = ChromeTrace(ticks_per_us=1000)
    for order, run in enumerate(simulated.ranks):
        slowest = " (slowest)" if order == 0 and len(simulated.ranks) > 1 else ""
        used = {run.program.ops[span.op].stream for span in run.spans}
        threads = {
            tid: f"{stream} axis" if stream in COMMUNICATING else stream
            for tid, stream in enumerate(_STREAMS)
            if stream in used
        }
        trace.name_process(run.rank, f"rank {run.rank}{slowest}", order, threads)
        for span in run.spans:
            _add_op(trace, run, span, first)
        _add_waits(trace, run, first)
        _add_arrows(trace, run, first)
    return trace.to_json(
        source="shardwise simulate",
        simulated_s=simulated.step_s,
        num_simulated_micro_batches=shown,
        num_micro_batches=shown if num_micro_batches is None else num_micro_batches,
        num_ranks=simulated.scenario.num_ranks,
    )


def _add_op(trace: ChromeTrace, run: RankRun, span: Span, first: float) -> None:
    """Add the span of one operation; of a collective, from the moment at which it was ready."""
    op = run.program.ops[span.op]
    args: dict[str, object] = {
        "unit": unit_name(run.program, op),
        "phase": op.phase,
        "micro_batch": op.micro_batch,
        **_work_args(op),
    }
    if span.start_s > span.ready_s:
        args["waited_for_ranks_us"] = (span.start_s - span.ready_s) * 1e6
    begin = _place(run, op, span.ready_s - first)
    end = _nanoseconds(span.end_s - first)
    trace.add_span(_name(run.program, op), category(op), begin, end, args)


def _place(run: RankRun, op: Op, at_s: float) -> tuple[int, int, int]:
    return run.rank, _STREAMS.index(op.stream), _nanoseconds(at_s)


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


def _add_waits(trace: ChromeTrace, run: RankRun, first: float) -> None:
    """Add spans in the gaps in which compute waits for a labelled collective."""
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
                args = {"phase": op.phase, "micro_batch": op.micro_batch}
                begin, end = _place(run, op, free - first), _nanoseconds(span.start_s - first)
                trace.add_span(name, "wait", begin, end, args)
        free = span.end_s


def _add_arrows(trace: ChromeTrace, run: RankRun, first: float) -> None:
    """Add an arrow from each gather to the first operation on compute that needs it."""
    ops = run.program.ops
    drawn: set[int] = set()
    for span in run.spans:
        op = ops[span.op]
        for j in op.after if op.stream == "compute" else ():
            if j not in drawn and category(ops[j]) == "all_gather":
                drawn.add(j)
                begin = _place(run, ops[j], run.spans[j].ready_s - first)
                end = _place(run, op, span.ready_s - first)
                trace.add_arrow("gather to use", run.rank * len(ops) + j, begin, end)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
