"""The doctor on real ranks: a sample of its faults and healthy runs; all in campaigns/doctor.py."""

import json
import os
import re
import signal

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import shardwise
from faults import FAULTS, HEALTHY, train
from models import Stack
from ranks import run_ranks, start_ranks
from shardwise import observe, shard
from shardwise.cli.main import app
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.record import read_run
from training_faults import TRAINING_FAULTS, TRAINING_HEALTHY

SAMPLE = [
    *("slow link", "slow loop on a rank, the loss is averaged"),
    *("slow copies", "torch.save while others wait", "bad gradients", "overflows"),
    "uneven batches of two, fully_shard",
    *("updates that round away, fully_shard", "bad batch on a rank in a long line"),
    *("the same data on all ranks", "zero_grad forgotten, fully_shard", "item() too often"),
    *("a scaler that skips every step", "layers outside of the graph"),
    *("dropout off after an evaluation", "a rate that is never stepped in epochs"),
    *("a norm that explodes behind torch's clipping", "nan only in the evaluation of a rank"),
]
HEALTHY_SAMPLE = [
    *("stage 3 of 3", "accumulation", "fully_shard", "updates of 16 bits that arrive"),
    *("frozen weights beside a head", "a rate for each step", "zeros, not None, fully_shard"),
]


def is_of_the_machine(code, evidence):
    """Tell whether a finding is that a rank waits for a core: true where other tests run too."""
    return code == "SW020" and "waits for a core, s/step" in evidence


def findings_of(folder):
    """Return what the doctor finds in a run, but for other work on its cores."""
    found = diagnose(read_run(folder)).findings
    return [each for each in found if not is_of_the_machine(each.code, each.evidence)]


def live_codes_of(folder):
    """Return the codes that were found live, but for other work on the cores."""
    lines = (folder / "observed" / "findings.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [each["code"] for each in found if not is_of_the_machine(each["code"], each["evidence"])]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_fault_is_found_with_its_rank(name, tmp_path):
    scenario = (FAULTS | TRAINING_FAULTS)[name]
    run_ranks(train, scenario.world_size, str(tmp_path), "fault", name)
    findings = findings_of(tmp_path)
    found = [(finding.code, finding.rank) for finding in findings]
    assert set(live_codes_of(tmp_path)) <= {scenario.code}
    without = {each.code: each.missing for each in diagnose(read_run(tmp_path)).abstentions}
    if not found and "a core for each rank" in without.get(scenario.code, ""):
        return  # on a machine at work on something else it says so; records hold what it finds
    assert found == [(scenario.code, scenario.rank)]
    if name.startswith("updates"):
        assert findings[0].unit == "blocks.0.norm.weight"
        assert "blocks.0.norm.weight 100 %, blocks.1.norm.weight 100 %" in findings[0].verdict
    if name.startswith("bad batch"):  # step 24 is saved too, after its bad step
        assert findings[0].evidence["first bad step"] == 24
        (change,) = findings[0].changes
        assert str(change.after).startswith(f"{tmp_path}/checkpoints/step-00000016, which all")


@pytest.mark.parametrize("name", HEALTHY_SAMPLE)
def test_a_healthy_run_has_no_finding(name, tmp_path):
    scenario = (HEALTHY | TRAINING_HEALTHY)[name]
    run_ranks(train, scenario.world_size, str(tmp_path), "healthy", name)
    assert not findings_of(tmp_path) and not live_codes_of(tmp_path)


def die(rank, world_size, output, how):
    """Let the last rank fail in step 3."""
    shardwise.debug.watch(5)
    model = shard(Stack(), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    is_last = rank == world_size - 1
    with observe(model, optimizer, output) as run:
        for step in range(1, 7):
            if step == 3 and is_last and how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if step == 3 and is_last and how == "ends early":
                break
            if step == 3 and is_last and how == "raises":
                raise ValueError("label 17 is none of 10")
            if step == 3 and is_last and how == "out of memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            if not (step == 3 and is_last and how == "skips"):
                dist.all_reduce(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=1.0)


@pytest.mark.parametrize(
    ("how", "world_size", "rank", "said"),
    [
        ("killed", 1, 0, "rank 0 on"),
        ("killed", 3, 2, "rank 2 on"),
        ("raises", 3, 2, "rank 2 raised ValueError: label 17 is none of 10, in step 3"),
        ("out of memory", 1, 0, "rank 0 ran out of memory in step 3, asking for 2 GiB"),
        ("ends early", 2, 1, "rank 1 ended the loop after step 2 without an error"),
        ("skips", 2, None, "torch's all_reduce of () float32 over ranks 0, 1"),
    ],
)
def test_a_run_that_died_is_a_critical_finding_with_its_cause(
    how, world_size, rank, said, tmp_path
):
    outcomes = start_ranks(die, world_size, str(tmp_path), how).wait()
    assert not all(outcome.ok for outcome in outcomes)
    shown = CliRunner().invoke(app, ["doctor", str(tmp_path), "--json"])
    assert shown.exit_code == 2
    (finding,) = json.loads(shown.output)["findings"]
    assert (finding["code"], finding["severity"]) == ("SW023", "critical")
    assert said in finding["verdict"] and (rank is None or finding["rank"] == rank)
    if how == "killed":  # the signal is known if a rank looked before the process was reaped
        assert re.search(r"it was killed by SIGKILL|is not known", finding["verdict"])


def stop(rank, world_size, output, how):
    """Train, and end without the end of ``with``, or by an exception that says so."""
    model = shard(Stack(), stage=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = observe(model, optimizer, output).start()
    for step in range(1, 13):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 12 and how == "program ends":
            run._exit()  # what Python calls at the end of a program
        if step == 12 and how == "exception":
            error = type("EarlyStopping", (Exception,), {})()
            assert not run.__exit__(type(error), error, None)


@pytest.mark.parametrize("how", ["exception", "program ends"])
def test_a_run_that_stops_by_choice_is_not_dead(how, tmp_path):
    assert all(outcome.ok for outcome in start_ranks(stop, 2, str(tmp_path), how).wait())
    assert "SW023" not in {finding.code for finding in diagnose(read_run(tmp_path)).findings}


def test_the_command_tells_by_its_exit_code(tmp_path):
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
    codes = {finding["code"] for finding in told["findings"]}
    assert codes - {"SW020"} == {"SW002"}  # a rank may wait for a core that other tests use


def test_every_finding_is_explained():
    call = CliRunner().invoke
    shown = call(app, ["explain", "sw020"])
    assert shown.exit_code == 0 and "A straggler" in shown.output
    assert call(app, ["explain", "SW999"]).exit_code == 2
    faults = FAULTS | TRAINING_FAULTS
    assert {s.code for s in faults.values()} <= set(call(app, ["explain"]).output.split())
