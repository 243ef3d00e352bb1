"""The timeline against the rules of the Trace Event Format and the names of the engine's spans."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.plan.model.tape import Cost
from shardwise.plan.step.program import Collective, Compute, LinkTransfer, Op, Program
from shardwise.plan.timing.simulate import simulate
from shardwise.plan.timing.timeline import simulated_trace

MATMUL = Compute((Cost("matmul", "bfloat16", 1000, 10, 2), Cost("memory", "bfloat16", 5, 30, 1)))
GATHER = Collective("all_gather", "shard", 800, 700)
PROGRAM = Program(
    ("", "layers.0"),
    (
        Op("shard", GATHER, 0, "unshard", 0),
        Op("shard", GATHER, 1, "unshard", 0),
        Op("compute", MATMUL, 0, "forward", 0, (0,)),
        Op("compute", MATMUL, 1, "forward", 0, (1,)),
        Op("compute", MATMUL, 1, "backward", 0, (1,)),
        Op("shard", Collective("reduce_scatter", "shard", 800, 700), 1, "reduce", 0, (4,)),
        Op("shard", Collective("all_reduce", "shard", 4, 4), 0, "clip", 0, (5,)),
        Op("compute", MATMUL, 0, "optimizer", 0, (6,)),
        Op("to_host", LinkTransfer("to_host", 64), 1, "offload", 0, (7,)),
    ),
)
STREAM_OF = {"compute": 0, "shard": 1, "replicate": 2, "to_device": 3, "to_host": 4}


def made(third=1 / 3):
    times = iter([2e-3, 3e-3, third, 1e-3, 2e-3, 4e-3, 1e-6, 1e-3, 5e-4])
    return simulate(PROGRAM, lambda _: next(times))


def check_format(trace):
    """Hold a trace against the rules for the kinds of events that it has."""
    slices = defaultdict(list)
    flows = defaultdict(list)
    named = set()
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"]
            begin = round(event["ts"] * 1000)
            slices[event["pid"], event["tid"]].append((begin, begin + round(event["dur"] * 1000)))
        elif event["ph"] == "M":
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            assert event["args"]
        else:
            assert event["ph"] in "sf"
            flows[event["id"]].append(event)
    assert set(slices) == named
    for times in slices.values():
        assert all(end <= begin for (_, end), (begin, _) in pairwise(sorted(times)))
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"]
        for end in (start, finish):
            begins = [begin for begin, _ in slices[end["pid"], end["tid"]]]
            assert round(end["ts"] * 1000) in begins  # an arrow is bound to a slice


def test_the_text_is_json_in_the_trace_event_format():
    trace = json.loads(json.dumps(simulated_trace(made())))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert trace["otherData"]["simulated_s"] == pytest.approx(made().step_s)
    assert trace["otherData"]["num_simulated_micro_batches"] == 1
    assert trace["otherData"]["num_micro_batches"] == 1
    assert simulated_trace(made(), 16)["otherData"]["num_micro_batches"] == 16
    check_format(trace)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 100))
def test_any_simulation_gives_a_trace_without_overlaps(third):
    check_format(simulated_trace(made(third)))


def slices_of(trace, stream):
    return [
        (e["name"], e["ts"], e["dur"])
        for e in sorted(trace["traceEvents"], key=lambda e: e["ts"])
        if e["ph"] == "X" and e["tid"] == STREAM_OF[stream]
    ]


def test_operations_carry_the_names_of_the_engines_spans():
    trace = simulated_trace(made(third=4e-3))
    assert slices_of(trace, "shard") == [
        ("shardwise.unshard()", 0, 2000),
        ("shardwise.unshard(layers.0)", 2000, 3000),
        ("shardwise.reduce(layers.0)", 9000, 4000),
        ("clip all_reduce (root)", 13000, 1),
    ]
    assert slices_of(trace, "compute") == [
        ("shardwise.wait_unshard()", 0, 2000),
        ("forward (root)", 2000, 4000),
        ("forward layers.0", 6000, 1000),
        ("backward layers.0", 7000, 2000),
        ("optimizer (root)", 13001, 1000),
    ]
    assert slices_of(trace, "to_host") == [("offload layers.0", 14001, 500)]
    # A wait has the name of what it waits for.
    names = [name for name, _, _ in slices_of(simulated_trace(made(third=1e-3)), "compute")]
    waits = ["shardwise.wait_unshard()", "shardwise.wait_unshard(layers.0)"]
    assert names[:4] == [waits[0], "forward (root)", waits[1], "forward layers.0"]


def test_arguments_say_how_much_an_operation_does():
    by_name = {
        e["name"]: e["args"] for e in simulated_trace(made())["traceEvents"] if e["ph"] == "X"
    }
    assert by_name["forward layers.0"] == {
        "unit": "layers.0",
        "phase": "forward",
        "micro_batch": 0,
        "flops": 1005,
        "moved_bytes": 40,
        "num_ops": 3,
    }
    assert by_name["shardwise.unshard(layers.0)"]["payload_bytes"] == 800
    assert by_name["shardwise.unshard(layers.0)"]["kind"] == "all_gather"
    assert by_name["offload layers.0"]["num_bytes"] == 64


def test_an_arrow_goes_from_each_gather_to_its_first_use():
    flows = [e for e in simulated_trace(made(third=4e-3))["traceEvents"] if e["ph"] in "sf"]
    assert [(e["ph"], e["tid"], e["ts"]) for e in flows] == [
        ("s", 1, 0),
        ("f", 0, 2000),
        ("s", 1, 2000),
        ("f", 0, 6000),
    ]
