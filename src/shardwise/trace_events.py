"""Chrome traces, which Perfetto opens: processes, threads, spans and arrows as JSON.

**Source** Trace Event Format (Google, the trace-event profiling tool): JSON object form, complete
events X, metadata events M, flow events s and f; times in microseconds.
"""

from collections.abc import Mapping

Place = tuple[int, int, int]  # process, thread, time


class ChromeTrace:
    """A trace under construction.

    Times are whole ticks, ``ticks_per_us`` of them in a microsecond, so that consecutive spans do
    not overlap by rounding.
    """

    def __init__(self, ticks_per_us: int) -> None:
        self._ticks_per_us = ticks_per_us
        self._events: list[dict[str, object]] = []

    def name_process(self, pid: int, name: str, order: int, threads: Mapping[int, str]) -> None:
        """Name a process and its threads, which are shown in the order of their numbers."""

        def add(kind: str, tid: int, **args: object) -> None:
            base = {"name": kind, "ph": "M", "pid": pid, "tid": tid, "ts": 0}
            self._events.append({**base, "args": args})

        add("process_name", 0, name=name)
        add("process_sort_index", 0, sort_index=order)
        for tid, thread in threads.items():
            add("thread_name", tid, name=thread)
            add("thread_sort_index", tid, sort_index=tid)

    def add_span(
        self, name: str, category: str, begin: Place, end: int, args: Mapping[str, object]
    ) -> None:
        """Add a span of a thread from a place to a time."""
        pid, tid, at = begin
        base = {"name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid}
        times = {"ts": at / self._ticks_per_us, "dur": (end - at) / self._ticks_per_us}
        self._events.append({**base, **times, "args": args})

    def add_arrow(self, name: str, number: int, begin: Place, end: Place) -> None:
        """Add an arrow between two spans; ``number`` is unique in the trace."""
        for phase, (pid, tid, at) in (("s", begin), ("f", end)):
            base = {"name": name, "cat": "flow", "ph": phase, "id": number, "pid": pid, "tid": tid}
            binding = {"bp": "e"} if phase == "f" else {}
            self._events.append({**base, "ts": at / self._ticks_per_us, **binding})

    def to_json(self, **other: object) -> dict[str, object]:
        """Return the trace as values of JSON, with other data about it."""
        return {"displayTimeUnit": "ms", "otherData": other, "traceEvents": self._events}
