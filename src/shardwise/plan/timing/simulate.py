"""Simulate the operations of a program in time.

An operation begins when its stream is free and its inputs have ended, so one pass over the program
in its order is enough.

Note [One rank stands for all]
Every rank of a group waits in each collective for the last one. So the rank whose device and links
are slowest decides when the step ends, and the step is the same if all ranks are as slow.

Note [Overlap is not free]
gloo's threads copy on the cores that compute, and NCCL's kernels take multiprocessors. One number,
``overlap``, is the share of that which is hidden: while an operation of the device or the host's
cores and a collective both run, each runs at 1 / (2 - overlap) of its normal rate. Started together
and equally long, two operations then take 2 - overlap times as long: 1 hides everything, 0 nothing,
and below 0 they take longer together than one after the other, as they empty each other's caches.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Op, Program, Stream
from shardwise.plan.timing.breakdown import COMMUNICATING, Simulated, Span, category

_WORKERS = ("compute", "cpu")


def simulate(
    program: Program, seconds: Callable[[Op], float], *, overlap: float = 1.0
) -> Simulated:
    """Run a program's operations on one rank, which stands for all.

    ``overlap``: 1 where computing and communicating do not slow each other down, see
    Note [Overlap is not free].

    **Raises** ConfigError: an operation's time or the overlap is out of range.
    """
    if not -1 <= overlap <= 1:
        raise ConfigError(f"overlap={overlap!r}: expected -1 to 1 (0: nothing is hidden, 1: all)")
    took = _contended_seconds(program.ops, _priced(program, seconds), overlap)
    spans: list[Span] = []
    free: dict[Stream, float] = {}
    for op, length_s in zip(program.ops, took, strict=True):
        start_s = free.get(op.stream, 0.0)
        for before in op.after:
            start_s = max(start_s, spans[before].end_s)
        free[op.stream] = start_s + length_s
        spans.append(Span(start_s, start_s + length_s))
    return Simulated(program, tuple(spans))


def _priced(program: Program, seconds: Callable[[Op], float]) -> list[float]:
    priced = []
    for index, op in enumerate(program.ops):
        took = seconds(op)
        if not (took >= 0 and math.isfinite(took)):
            raise ConfigError(
                f"seconds of operation {index} ({op.phase}, {category(op)}): expected 0 or more, "
                f"got {took!r}; check the hardware's figures"
            )
        priced.append(float(took))
    return priced


def _contended_seconds(
    ops: Sequence[Op], seconds: Sequence[float], overlap: float
) -> tuple[float, ...]:
    """Return how long each operation takes when it shares cores with what runs beside it.

    **Cost**: operations times streams.
    """
    if overlap == 1:
        return tuple(seconds)
    waiting: dict[Stream, deque[int]] = {}
    for index, op in enumerate(ops):
        waiting.setdefault(op.stream, deque()).append(index)
    left = list(seconds)
    begun, lasted = [math.nan] * len(ops), [0.0] * len(ops)
    ended: set[int] = set()
    running: dict[Stream, int] = {}
    now = 0.0
    while len(ended) < len(ops):
        for stream, queue in waiting.items():
            if stream not in running and queue and ended.issuperset(ops[queue[0]].after):
                running[stream] = queue.popleft()
                begun[running[stream]] = now
        both = any(s in running for s in _WORKERS) and any(s in running for s in COMMUNICATING)
        rate = 1 / (2 - overlap) if both else 1.0
        shared = _WORKERS + COMMUNICATING
        passed = min(left[i] / (rate if s in shared else 1) for s, i in running.items())
        now += passed
        for stream, index in list(running.items()):
            speed = rate if stream in shared else 1.0
            if left[index] / speed <= passed:
                lasted[index] = now - begun[index]
                ended.add(running.pop(stream))
            else:
                left[index] -= passed * speed
    return tuple(lasted)
