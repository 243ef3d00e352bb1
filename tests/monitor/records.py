"""Records of runs, written as `observe()` writes them, without a run."""

import json
import random
from dataclasses import asdict

from shardwise.monitor.findings import Change, Finding, Gain
from shardwise.monitor.metrics import (
    DATA_S,
    EXPOSED_SHARE,
    MAX_ACTIVE_GIB,
    OVERLAP_SHARE,
    SAVE_S,
    STALL_S,
    STEP_S,
    TOKENS_PER_S,
    OverRanks,
)
from shardwise.monitor.record import FOLDER, RunFacts, write_facts
from shardwise.unit_facts import UnitFacts

FORWARD, BACKWARD = "time_metrics/forward(s)", "time_metrics/backward(s)"
METRICS = (
    *(STEP_S, TOKENS_PER_S, EXPOSED_SHARE, OVERLAP_SHARE, MAX_ACTIVE_GIB, DATA_S),
    *("device/idle(%)", "comm/all_gather(ms)", "comm/reduce_scatter(ms)", "comm/sent(MiB)"),
    *("mfu(%)", "time_metrics/data_loading(%)", "offload/optimizer(ms)", "padding(%)"),
)


FINDINGS = (
    Finding(
        *("A9", "critical", "large", "verdict a", {"exposed_share": 0.25}, "why a"),
        changes=(Change("bucket_bytes", 1, "32MiB"),),
        gain=Gain(0.5, "s/step", "the plan", 0.75),
        rank=1,
    ),
    Finding("B1", "warning", "small", "verdict b", {"x": 2.0}, "why b"),
)


def facts(num_ranks=2, num_units=4, device="cpu", **other):
    """Return the facts of a run of layers that are alike, and a root; or with other values."""
    names = ["", *(f"layers.{i}" for i in range(num_units - 1))]
    units = tuple(
        UnitFacts(name, "Block", 2, 1000, 4000, 4000 // num_ranks, 8, "float32", "rows")
        for name in names
    )
    told = {
        **{"stage": 3, "degrees": {"shard": num_ranks}, "num_ranks": num_ranks, "device": device},
        **{"device_bytes": 80 << 30, "bucket_bytes": 1 << 20, "prefetch_bytes": None},
        "units": units,
        "hosts": tuple(f"host-{rank // 8}" for rank in range(num_ranks)),
        "started": "2026-01-01T00:00:00+00:00",
    }
    return RunFacts(**told | other)


def step_line(step, num_steps, metrics, **values):
    """Return one line of steps.jsonl."""
    told = {name: asdict(value) for name, value in metrics.items()}
    line = {"step": step, "num_steps": num_steps, "at_s": 0.5 * step, "metrics": told}
    return json.dumps({**line, "values": values}) + "\n"


def timeline(step, num_units, shift_ms=0.0):
    """Return a timeline in which gathers lie beside the units' forward and backward passes."""
    spans = [["main", "data", "", 0.0, 1.0, 0]]
    at = 1.0
    for phase in ("forward", "backward"):
        for i in range(num_units):
            spans.append(["shard.all_gather", "all_gather", f"layers.{i}", at, 1.5, 4096])
            spans.append(["main", "wait_unshard", f"layers.{i}", at, 0.25 + shift_ms, 0])
            spans.append(["main", phase, f"layers.{i}", at + 0.25 + shift_ms, 1.5 - shift_ms, 0])
            at += 1.75
    spans.append(["main", "step", "", at, 1.0, 0])
    return {"kind": "timeline", "step": step, "seconds": (at + 1.0) / 1e3, "spans": spans}


def memory(step, num_units, shard_bytes=1 << 20):
    """Return the memory of a step whose largest moment is in the last unit's backward pass."""
    moments = [
        {
            "phase": phase,
            "unit": f"layers.{i}",
            "device": {"param_shards": shard_bytes, "param_full": (i + 1) * 1000},
            "other": (i + 1) * (5000 if phase == "backward" else 3000),
        }
        for phase in ("forward", "backward")
        for i in range(num_units)
    ]
    units = {f"layers.{i}": {"param_shards": shard_bytes // num_units} for i in range(num_units)}
    places = {"device": units, "host": {}, "files": {}}
    peak = len(moments) - 1
    return {"kind": "memory", "step": step, "moments": moments, "peak": peak, "units": places}


def write_record(output, num_steps=40, num_ranks=2, every=1, num_units=4, device="cpu"):
    """Write a run whose loss falls and whose last rank is the slowest."""
    draw = random.Random(0)
    folder = output / FOLDER
    write_facts(folder, facts(num_ranks, num_units, device))
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(every, num_steps + 1, every):
            metrics = {}
            for name in METRICS:
                value = 10 * (1 + draw.random())
                metrics[name] = OverRanks(value, value + 1, value + 2, 0, num_ranks - 1)
            metrics[STEP_S] = OverRanks(0.5, 0.6, 0.7 + (step == every), 0, num_ranks - 1)
            metrics[FORWARD] = OverRanks(0.1, 0.1, 0.1, 0, 0)
            metrics[BACKWARD] = OverRanks(0.2, 0.2, 0.2, 0, 0)
            metrics[DATA_S] = OverRanks(0.0, 0.05, 0.1, 0, 1)
            saves = 4.0 / every if step % (10 * every) == 0 else 0.0
            metrics[SAVE_S] = OverRanks(saves, saves, saves, 0, 0)
            metrics[STALL_S] = OverRanks(saves / 8, saves / 8, saves / 8, 0, 0)
            file.write(step_line(step, every, metrics, loss=10 / step, lr=1e-3 * draw.random()))
    for rank in range(num_ranks):
        lines = [
            line
            for step in range(2, min(num_steps, 40) + 1, 10)
            for line in (memory(step, num_units), timeline(step, num_units, 0.1 * (rank == 0)))
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"rank-{rank}.jsonl").write_text(text)
    return output
