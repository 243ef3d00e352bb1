"""The doctor on real ranks: a sample of its faults and healthy runs; all in campaigns/doctor.py."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from faults import FAULTS, HEALTHY, train
from ranks import run_ranks
from shardwise.cli.main import app
from shardwise.monitor.doctor.rules import diagnose
from shardwise.monitor.record import read_run

SAMPLE = [
    *("copies only", "one unit", "tiny buckets", "slow link", "slow rank", "slow loader on a rank"),
    *("slow step on the host", "slow copies", "slow disk", "torch.save while others wait"),
    *("overflows", "bad batch on a rank", "bad gradients"),
]
HEALTHY_SAMPLE = ["stage 0 of 2", "stage 3 of 1", "stage 3 of 3", "accumulation", "fully_shard"]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_found_with_its_rank(name: str, tmp_path: Path) -> None:
    scenario = FAULTS[name]
    live = run_ranks(train, scenario.world_size, str(tmp_path), "fault", name)[0]
    told = diagnose(read_run(tmp_path))
    found = [(finding.code, finding.rank) for finding in told.findings]
    assert set(live) <= {scenario.code}
    without = {each.code: each.missing for each in told.abstentions}
    if not found and "cores of their own" in without.get(scenario.code, ""):
        return  # on a machine at work on something else it says so; records hold what it finds
    assert found == [(scenario.code, scenario.rank)]


@pytest.mark.parametrize("name", HEALTHY_SAMPLE)
def test_a_healthy_run_has_no_finding(name: str, tmp_path: Path) -> None:
    scenario = HEALTHY[name]
    live = run_ranks(train, scenario.world_size, str(tmp_path), "healthy", name)[0]
    assert not diagnose(read_run(tmp_path)).findings
    assert not live and not (tmp_path / "observed" / "findings.jsonl").read_text()


def test_the_command_tells_by_its_exit_code(tmp_path: Path) -> None:
    healthy, faulty, short = (tmp_path / name for name in ("healthy", "faulty", "short"))
    run_ranks(train, 1, str(healthy), "healthy", "stage 3 of 1")
    run_ranks(train, 3, str(faulty), "fault", "one unit")
    (short / "observed").mkdir(parents=True)
    facts = (healthy / "observed" / "run.json").read_text()
    (short / "observed" / "run.json").write_text(facts)
    call = CliRunner().invoke
    assert call(app, ["doctor", str(healthy)]).exit_code == 0
    assert call(app, ["doctor", str(short)]).exit_code == 2
    assert call(app, ["doctor", str(tmp_path)]).exit_code == 2
    shown = call(app, ["doctor", str(faulty)])
    assert shown.exit_code == 1 and "SW002" in shown.output and "+ units:" in shown.output
    told = json.loads(call(app, ["doctor", str(faulty), "--json"]).output)
    assert [finding["code"] for finding in told["findings"]] == ["SW002"]


def test_every_finding_is_explained() -> None:
    call = CliRunner().invoke
    shown = call(app, ["explain", "sw020"])
    assert shown.exit_code == 0 and "A straggler" in shown.output
    assert call(app, ["explain", "SW999"]).exit_code == 2
    assert {s.code for s in FAULTS.values()} <= set(call(app, ["explain"]).output.split())
