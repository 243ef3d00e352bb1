"""A simulated step as Chrome trace JSON, to be opened in Perfetto beside the trace of a real run.

Note [Names in the timeline]
A real run's spans are ``shardwise.<phase>(<unit>)``, so gathers are ``shardwise.unshard(...)`` here
too, reductions ``shardwise.reduce(...)``, and a gap in which compute waits for one of them is
``shardwise.wait_unshard(...)`` or ``shardwise.wait_reduce(...)`` of the unit that it waits for.
Operations that the engine does not label are named by phase and unit, e.g. ``forward layers.3``.

Source: Trace Event Format (Google, the trace-event profiling tool): JSON object form, complete
events X, metadata events M, flow events s and f; times in microseconds.
"""

from dataclasses import asdict
from typing import Any, get_args

from shardwise.plan.step.program import Collective, Compute, Op, Program, Stream
from shardwise.plan.timing.simulate import COMMUNICATING, Simulated, category
from shardwise.trace_events import ChromeTrace

_LABELLED = ("unshard", "reduce")
_STREAMS: tuple[Stream, ...] = get_args(Stream)


def simulated_trace(simulated: Simulated, num_micro_batches: int | None = None) -> dict[str, Any]:
    """Return the trace of a step: a process with a thread per stream.

    Times are whole nanoseconds. ``num_micro_batches``: those of the step, if fewer were simulated.
    """
    shown = simulated.num_micro_batches
    trace = ChromeTrace(ticks_per_us=1000)
    used = {op.stream for op in simulated.program.ops}
    threads = {
        tid: f"{stream} axis" if stream in COMMUNICATING else stream
        for tid, stream in enumerate(_STREAMS)
        if stream in used
    }
    trace.name_process(0, "rank 0", 0, threads)
    _add_ops(trace, simulated)
    return trace.to_json(
        source="shardwise simulate",
        simulated_s=simulated.step_s,
        num_simulated_micro_batches=shown,
        num_micro_batches=shown if num_micro_batches is None else num_micro_batches,
    )


def _add_ops(trace: ChromeTrace, simulated: Simulated) -> None:
    """Add the operations, what compute waits for, and arrows from gathers.

    An arrow goes from a gather to the first operation on compute that needs it.
    """
    program, ops, spans = simulated.program, simulated.program.ops, simulated.spans
    free, drawn = 0.0, set[int]()

    def place(op: Op, at_s: float) -> tuple[int, int, int]:
        return 0, _STREAMS.index(op.stream), round(at_s * 1e9)

    for op, (start_s, end_s) in zip(ops, spans, strict=True):
        args: dict[str, object] = {
            "unit": program.unit_names[op.unit],
            "phase": op.phase,
            "micro_batch": op.micro_batch,
            **_work_args(op),
        }
        begin, end = place(op, start_s), place(op, end_s)[2]
        trace.add_span(_name(program, op), category(op), begin, end, args)
        if op.stream != "compute":
            continue
        if start_s > free and op.after:
            cause = ops[max(op.after, key=lambda j: spans[j].end_s)]
            if cause.phase in _LABELLED and isinstance(cause.work, Collective):
                name = f"shardwise.wait_{cause.phase}({program.unit_names[cause.unit]})"
                args = {"phase": op.phase, "micro_batch": op.micro_batch}
                trace.add_span(name, "wait", place(op, free), begin[2], args)
        free = end_s
        for j in op.after:
            if j not in drawn and category(ops[j]) == "all_gather":
                drawn.add(j)
                trace.add_arrow("gather to use", j, place(ops[j], spans[j].start_s), begin)


def _name(program: Program, op: Op) -> str:
    unit = program.unit_names[op.unit]
    if op.phase in _LABELLED and isinstance(op.work, Collective):
        return f"shardwise.{op.phase}({unit})"
    what = f"{op.phase} {category(op)}" if isinstance(op.work, Collective) else op.phase
    return f"{what} {unit or '(root)'}"


def _work_args(op: Op) -> dict[str, object]:
    if not isinstance(op.work, Compute):
        return asdict(op.work)
    names = "flops", "moved_bytes", "num_ops"
    return {name: sum(getattr(cost, name) for cost in op.work.costs) for name in names}
