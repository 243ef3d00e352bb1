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
from shardwise.plan.timing.breakdown import COMMUNICATING, RankRun, category, unit_name
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
        _add_ops(trace, run, first)
    return trace.to_json(
        source="shardwise simulate",
        simulated_s=simulated.step_s,
        num_simulated_micro_batches=shown,
        num_micro_batches=shown if num_micro_batches is None else num_micro_batches,
        num_ranks=simulated.scenario.num_ranks,
    )


def _add_ops(trace: ChromeTrace, run: RankRun, first: float) -> None:
    """Add the operations of one rank, what its compute waits for, and arrows from its gathers.

    A span of a collective begins at the moment at which it was ready. An arrow goes from a gather
    to the first operation on compute that needs it.
    """
    program, ops, spans = run.program, run.program.ops, run.spans
    free, drawn = run.begin_s, set[int]()

    def place(op: Op, at_s: float) -> tuple[int, int, int]:
        return run.rank, _STREAMS.index(op.stream), round((at_s - first) * 1e9)

    for span in spans:
        op, (_, ready_s, start_s, end_s) = ops[span.op], span
        args: dict[str, object] = {
            "unit": unit_name(program, op),
            "phase": op.phase,
            "micro_batch": op.micro_batch,
            **_work_args(op),
        }
        if start_s > ready_s:
            args["waited_for_ranks_us"] = (start_s - ready_s) * 1e6
        end = place(op, end_s)[2]
        trace.add_span(_name(program, op), category(op), place(op, ready_s), end, args)
        if op.stream != "compute":
            continue
        if start_s > free and op.after:
            cause = ops[max(op.after, key=lambda j: spans[j].end_s)]
            if cause.phase in _LABELLED and isinstance(cause.work, Collective):
                name = f"shardwise.wait_{cause.phase}({unit_name(program, cause)})"
                args = {"phase": op.phase, "micro_batch": op.micro_batch}
                trace.add_span(name, "wait", place(op, free), place(op, start_s)[2], args)
        free = end_s
        for j in op.after:
            if j not in drawn and category(ops[j]) == "all_gather":
                drawn.add(j)
                begin, end_of = place(ops[j], spans[j].ready_s), place(op, ready_s)
                trace.add_arrow("gather to use", run.rank * len(ops) + j, begin, end_of)


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
