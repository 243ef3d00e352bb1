"""Computing and communicating at once slow each other down where they share cores.

Note [Overlap is not free]
gloo's threads copy on the cores that compute, and NCCL's kernels take multiprocessors. One number,
``overlap``, says how much of that is hidden: while an operation of the device or the host's cores
and a collective both run, each goes at the rate 1 / (2 - overlap) of its own. Started together and
equally long, two operations then take 2 - overlap times as long: 1 hides everything, 0 nothing,
and below 0 they take longer together than one after the other, as they empty each other's caches.
The longer times are computed once, for a rank among equals; where ranks differ, they are an
approximation.
"""

import math
from collections import deque
from collections.abc import Sequence

from shardwise.plan.step.program import Op, Stream

_WORKERS = ("compute", "cpu")
_NETWORKS = ("shard", "replicate")


def contended_seconds(
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
        both = any(s in running for s in _WORKERS) and any(s in running for s in _NETWORKS)
        rate = 1 / (2 - overlap) if both else 1.0
        shared = _WORKERS + _NETWORKS
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
