"""The measured ledger of a run against the ledger of its plan: the same bytes, line by line."""

import pytest

from ranks import run_ranks
from resumes import train, write_text
from shardwise.cli.report import plan_of_run
from shardwise.monitor.record import Memory, read_run

# Units that share a bucket, and so many of them that reductions are under way in later passes.
FLAGS = {
    **{"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2, "steps": 3},
    **{"bucket_bytes": 100_000, "threads": 1, "sample_tokens": 0},
}


def run(rank, world_size, flags):
    train(rank, world_size, flags)


CASES = [  # each stage, and each format, in turns
    *((3, {"stage": stage, "accumulation": 1 + stage % 2}) for stage in range(4)),
    *((3, {"stage": stage, "accumulation": 2 - stage % 2}) for stage in (0, 3)),
    *((1, {"stage": stage, "accumulation": 1 + stage % 3}) for stage in (0, 1, 3)),
    (1, {"precision": "bf16", "stage": 1, "gather": "int8"}),
    (3, {"precision": "bf16", "gather": "fp8"}),
    (1, {"precision": "bf16", "gather": "int4"}),
    (3, {"precision": "bf16", "stage": 0, "reduce": "bf16-a2a"}),
    (1, {"precision": "bf16", "gather": "int8", "reduce": "int8-a2a"}),
    (3, {"precision": "bf16", "gather": "int8", "reduce": "int8-a2a"}),
    (3, {"precision": "bf16", "stage": 2, "reduce": "fp8-a2a", "accumulation": 2}),
]


@pytest.mark.parametrize(("world_size", "more"), CASES, ids=str)
def test_the_engines_memory_is_that_of_the_plan_line_by_line(world_size, more, tmp_path):
    flags = {**FLAGS, **more, "output": tmp_path / "run"}
    run_ranks(run, world_size, {**flags, "data": write_text(tmp_path)})
    record = read_run(tmp_path / "run")
    (line,) = (line for _, line in record.lines(Memory, 0))
    plan, _ = plan_of_run(tmp_path / "run" / "config.yaml", record)
    planned = {k: n for k, n in plan.played.engines_peak.ledger.engines().items() if n}
    peak = line.moments[line.peak]
    assert peak.device == planned, peak
    assert sum(peak.device.values()) == max(sum(m.device.values()) for m in line.moments)
