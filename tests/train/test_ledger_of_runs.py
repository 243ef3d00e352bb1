"""The measured ledger of a run against the ledger of its plan: the same bytes, line by line."""

from pathlib import Path
from typing import Any

import pytest

from ranks import run_ranks
from resumes import train, write_text
from shardwise.cli.planned_run import plan_of_run
from shardwise.monitor.rank_lines import Memory
from shardwise.monitor.record import read_run
from shardwise.monitor.summary import memory_of

# Units that share a bucket, and so many of them that reductions are under way in later passes.
FLAGS: dict[str, Any] = {
    **{"dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "seq": 16, "micro_batch": 2, "steps": 3},
    **{"bucket_bytes": 100_000, "threads": 1, "sample_tokens": 0},
}


def run(rank: int, world_size: int, flags: dict[str, Any]) -> None:
    train(rank, world_size, flags)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_engines_memory_is_that_of_the_plan_line_by_line(
    stage: int, world_size: int, accumulation: int, tmp_path: Path
) -> None:
    check({"stage": stage, "accumulation": accumulation}, world_size, tmp_path)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    "coded",
    [
        *({"stage": 1, "gather": "int8"}, {"gather": "fp8"}, {"gather": "int4"}),
        *({"stage": 0, "reduce": "bf16-a2a"}, {"gather": "int8", "reduce": "int8-a2a"}),
        {"stage": 2, "reduce": "fp8-a2a", "accumulation": 2},
    ],
    ids=str,
)
def test_so_it_is_with_encodings(coded: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    check({"precision": "bf16", **coded}, world_size, tmp_path)


def check(more: dict[str, Any], world_size: int, tmp_path: Path) -> None:
    flags = {**FLAGS, **more, "output": tmp_path / "run"}
    run_ranks(run, world_size, {**flags, "data": write_text(tmp_path)})
    record = read_run(tmp_path / "run")
    (line,) = (line for _, line in record.lines(Memory, 0))
    memory = memory_of(0, line, is_process=True)
    plan, _ = plan_of_run(tmp_path / "run" / "config.yaml", record)
    planned = {k: n for k, n in plan.played.engines_peak.ledger.engines().items() if n}
    phase, unit, measured = memory.moments[memory.peak]
    assert measured == planned, (phase, unit)
    assert memory.units_at == memory.peak
