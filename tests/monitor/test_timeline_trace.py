"""Timelines as Chrome trace JSON: the spans of the record, ranks as processes, lines as threads."""

import json
from collections import defaultdict
from itertools import pairwise

from records import write_record
from shardwise.monitor.record import FOLDER, Timeline, read_run
from shardwise.monitor.summary import recorded_trace


def spans_of(trace):
    """Return complete events by rank and the name of the thread, in order."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def test_the_spans_of_a_trace_are_those_of_the_record(tmp_path):
    record = read_run(write_record(tmp_path, num_ranks=3))
    trace = json.loads(json.dumps(recorded_trace(record)))
    found = spans_of(trace)
    begins = {e["args"]["step"]: e["ts"] for e in found[0, "steps"]}
    told = defaultdict(list)
    for rank, line in record.lines(Timeline):
        for name, phase, unit, begin_ms, length_ms, num_bytes in line.spans:
            told[rank, name].append((line.step, phase, unit, begin_ms, length_ms, num_bytes))
    assert set(told) == {key for key in found if key[1] != "steps"}
    for key, rows in told.items():
        assert len(rows) == len(found[key])
        for (step, phase, unit, begin_ms, length_ms, num_bytes), event in zip(
            rows, found[key], strict=True
        ):
            args = event["args"]
            assert (args["step"], args["phase"]) == (step, phase)
            assert args["unit"] == (unit or "(root)") and args.get("bytes", 0) == num_bytes
            assert abs(event["ts"] - begins[step] - 1e3 * begin_ms) < 0.11  # microseconds
            assert abs(event["dur"] - 1e3 * length_ms) < 0.21
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "rank 2"}


def test_no_two_spans_of_a_thread_overlap(tmp_path):
    """Not by rounding either, or Perfetto would draw one under the other."""
    folder = write_record(tmp_path) / FOLDER
    rows = [["main", "forward", "", n * 0.33333, 0.33334, 0] for n in range(50)]
    line = {"kind": "timeline", "step": 50, "seconds": 0.0167, "spans": rows}
    with (folder / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for events in spans_of(recorded_trace(read_run(tmp_path))).values():
        for one, other in pairwise(sorted(events, key=lambda e: e["ts"])):
            assert round(10 * (one["ts"] + one["dur"])) <= round(10 * other["ts"])


def test_steps_follow_each_other_and_begin_together_on_all_ranks(tmp_path):
    found = spans_of(recorded_trace(read_run(write_record(tmp_path))))
    steps = [found[rank, "steps"] for rank in (0, 1)]
    assert [e["name"] for e in steps[0]] == ["step 2", "step 12", "step 22", "step 32"]
    assert [e["ts"] for e in steps[0]] == [e["ts"] for e in steps[1]]
