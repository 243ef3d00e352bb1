"""What a finding's change would give, asked of the plans of both settings."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from records import facts
from shardwise.cli.planned_run import plan_of_run, with_planned_gains
from shardwise.monitor.findings import Change, Diagnosis, Finding, Gain
from shardwise.monitor.record import FOLDER, RunRecord, read_run, write_facts

SETTINGS = {"ranks": 2, "stage": 0, "dim": 64, "layers": 2, "heads": 4, "seq": 64, "micro_batch": 8}
READ_OFF = Gain(1.0, "bytes", "the run")


def record_of(folder: Path, device: str = "cpu", **settings: object) -> RunRecord:
    write_facts(folder / FOLDER, replace(facts(num_ranks=2, device=device), hosts=()))
    (folder / FOLDER / "steps.jsonl").touch()
    (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS | settings))
    return read_run(folder)


def diagnosis_of(*changes: Change) -> Diagnosis:
    finding = Finding("SW000", "warning", "a title", "a verdict", {}, "why", changes, READ_OFF)
    return Diagnosis((finding,))


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        ([Change("stage", 0, 3)], {"stage": 3}),
        ([Change("stage", 0, 2), Change("loader", None, "more workers")], {"stage": 2}),
        (
            [
                Change("activation_checkpointing", None, "blocks"),
                Change("micro_batch", None, "½ x"),
            ],
            {"activation_checkpointing": True},
        ),
    ],
)
def test_a_gain_in_memory_is_what_the_plans_of_both_files_differ_by(
    changes: list[Change], settings: dict[str, object], tmp_path: Path
) -> None:
    record, changed = record_of(tmp_path / "a"), record_of(tmp_path / "b", **settings)
    (finding,) = with_planned_gains(diagnosis_of(*changes), record).findings
    before, after = (
        plan_of_run(each.path / "config.yaml", each)[0].memory.expected_bytes
        for each in (record, changed)
    )
    assert before > after
    assert finding.gain is not None and finding.gain.unit == "bytes"
    assert finding.gain.low == before - after and "plans of both" in finding.gain.source


def test_seconds_are_told_only_of_the_device_that_the_run_had(tmp_path: Path) -> None:
    more_memory = diagnosis_of(Change("activation_checkpointing", True, False))
    settings = {"dim": 1024, "layers": 4, "activation_checkpointing": True}
    on_gpu = record_of(tmp_path / "gpu", "NVIDIA H100 80GB HBM3", **settings)
    (finding,) = with_planned_gains(more_memory, on_gpu).findings
    assert finding.gain is not None and finding.gain.unit == "s/step" and finding.gain.low > 0
    on_cpu = record_of(tmp_path / "cpu", **settings)
    (finding,) = with_planned_gains(more_memory, on_cpu).findings
    assert finding.gain == READ_OFF


@pytest.mark.parametrize(
    "change", [Change("precision", "fp16", "bfloat 16"), Change("stage", 3, 4)]
)
def test_what_no_plan_can_tell_keeps_the_gain_that_was_read_off_the_run(
    change: Change, tmp_path: Path
) -> None:
    (finding,) = with_planned_gains(diagnosis_of(change), record_of(tmp_path)).findings
    assert finding.gain == READ_OFF
    (tmp_path / "config.yaml").unlink()
    stage = diagnosis_of(Change("stage", 0, 3))
    assert with_planned_gains(stage, record_of(tmp_path / "other")).findings[0].gain != READ_OFF
    assert with_planned_gains(stage, read_run(tmp_path)).findings[0].gain == READ_OFF
