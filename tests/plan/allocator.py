"""What torch's CPU allocator gave out and took back, as the profiler saw it: an oracle for peaks.

The profiler knows the size of a block only if it saw it made, so a trace begins before the model
is built. What a thread of the transport frees (flags, scalars) is seen only when its address is
given out again: a few bytes too many until then.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd.profiler import profile, record_function


@dataclass
class AllocatorTrace:
    """Bytes that tensors hold on the CPU, change by change; complete when ``traced`` has ended.

    ``totals`` are (time in ns, bytes alive from then on). Windows are named with ``window``.
    """

    totals: list[tuple[int, int]] = field(default_factory=list)
    windows: dict[str, tuple[int, int]] = field(default_factory=dict)

    @contextmanager
    def window(self, name):
        """Name the time in which what is inside runs, e.g. one step."""
        with record_function(f"window {name}"):
            yield

    def before(self, name):
        """Return the bytes that were alive when the window began."""
        begin, _ = self.windows[name]
        return next((total for time, total in reversed(self.totals) if time < begin), 0)

    def peak(self, name):
        """Return the most bytes that were alive at once within the window."""
        begin, end = self.windows[name]
        inside = [total for time, total in self.totals if begin <= time <= end]
        return max([self.before(name), *inside])


@contextmanager
def traced(*, skips_transport=False):
    """Trace the allocator of this thread; build everything that counts inside.

    ``skips_transport``: what torch's own collectives allocate inside of themselves is left out.
    Gloo copies what it sums, and its threads free the copy, which no trace of this one sees.
    """
    trace = AllocatorTrace()
    with profile(use_device=None, profile_memory=True, use_kineto=True) as profiler:
        yield trace
    blocks = {}
    total = 0
    events = profiler.kineto_results.experimental_event_tree()
    for event in events:  # which grows
        events += event.children
    for event in sorted(events, key=lambda e: e.start_time_ns):
        kind, _ = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type != "cpu":
                continue
            if skips_transport and fields.alloc_size > 0 and _is_of_transport(event):
                continue
            if fields.alloc_size > 0:
                total -= blocks.pop(fields.ptr, 0)  # freed by a thread that is not watched
                blocks[fields.ptr] = fields.alloc_size
                total += fields.alloc_size
            else:
                total -= blocks.pop(fields.ptr, 0)
            trace.totals.append((event.start_time_ns, total))
        elif event.name.startswith("window "):
            span = (event.start_time_ns, event.end_time_ns)
            trace.windows[event.name.removeprefix("window ")] = span


def _is_of_transport(event):
    parent = event.parent
    while parent is not None and not parent.name.startswith("c10d::"):
        parent = parent.parent
    return parent is not None
