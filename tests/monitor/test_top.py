"""`shardwise top`: what it tells of a run is what the files say, as they grow."""

import json
import os
import time
from functools import partial

import pytest

from commands import call_command, run_alone
from records import memory, step_line, write_record
from shardwise.cli.top import snapshot_of, sparkline
from shardwise.monitor.metrics import STEP_S, OverRanks
from shardwise.monitor.record import FOLDER, Memory, is_late, read_ends

run_command = partial(call_command, "top")


def add(path, text):
    with path.open("a") as file:
        file.write(text)


def line(step, **values):
    return step_line(step, 1, {STEP_S: OverRanks(1.0, 2.0, 3.0, 0, 1)}, **values)


def sampled(run):
    return {rank: told.step for rank, told in read_ends(run).lines(Memory)}


def was_written_before(run, seconds):
    written_s = time.time() - seconds
    for file in (run / FOLDER).iterdir():
        os.utime(file, (written_s, written_s))


def test_the_newest_memory_of_each_rank_is_shown(tmp_path):
    run = write_record(tmp_path, num_ranks=2)
    assert sampled(run) == {0: 32, 1: 32}
    add(run / FOLDER / "rank-1.jsonl", json.dumps(memory(50, 4)) + "\n")
    assert sampled(run) == {0: 32, 1: 50}


def test_a_run_without_news_is_late_unless_it_is_over(tmp_path):
    run = write_record(tmp_path)  # a line each half a second
    was_written_before(run, 20)
    assert not is_late(read_ends(run))
    was_written_before(run, 40)
    assert is_late(read_ends(run)) and read_ends(run).idle_s == pytest.approx(40, abs=5)
    add(run / FOLDER / "rank-0.jsonl", '{"kind": "end", "step": 40, "error": null}\n')
    was_written_before(run, 40)
    assert read_ends(run).ending == "it is over" and not is_late(read_ends(run))
    add(run / FOLDER / "rank-0.jsonl", '{"kind": "end", "step": 40, "error": "disk full"}\n')
    assert read_ends(run).ending == "it broke off: disk full"


def test_once_prints_a_snapshot_and_ends(tmp_path, capsys):
    run = write_record(tmp_path)
    assert run_command([str(run), "--once"]) == 0
    said = capsys.readouterr().out
    assert "step 40" in said and "2 x cpu, stage 3" in said
    row = next(text for text in said.splitlines() if text.strip().startswith("step time, s"))
    assert row.split()[3:8] == ["0.6", "0.5", "0", "0.7", "1"]
    assert "param shards" in said and "backward" in said
    row = next(text.split() for text in said.splitlines() if text.strip().startswith("loss"))
    assert row[2:] == ["0.25", "0.25", "to", "10"]  # the last, the lowest and the highest


def test_findings_of_a_run_are_told_while_it_goes_on(tmp_path, capsys):
    run = write_record(tmp_path)
    was_written_before(run, 4000)
    now = read_ends(run)
    codes = [finding["code"] for finding in snapshot_of(now)["findings"]]
    assert codes[:2] == ["SW022", "SW021"]  # critical, and a warning
    assert run_command([str(run), "--once"]) == 0
    assert "SW022 " in capsys.readouterr().out


def test_json_is_one_value_and_nothing_else(tmp_path, capsys):
    run = write_record(tmp_path)
    assert run_command([str(run), "--json"]) == 0
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert not said.err and told["step"] == 40 and told["num_ranks"] == 2
    assert told["metrics"][STEP_S] == {
        **{"min": 0.5, "median": 0.6, "max": 0.7},
        **{"min_rank": 0, "max_rank": 1},
    }
    assert told["values"]["loss"] == 0.25 and told["phases_s"]["backward"] == 0.2
    assert told["values_over_steps"] == {}  # a record of an earlier version has none


def test_a_run_whose_first_step_goes_on_says_so(tmp_path, capsys):
    run = write_record(tmp_path, num_steps=0)
    (run / FOLDER / "steps.jsonl").unlink()
    assert run_command([str(run), "--once"]) == 0
    assert "no step is over yet" in capsys.readouterr().out
    assert run_command([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 0


def test_a_sparkline_reaches_from_the_lowest_to_the_highest_block():
    assert sparkline([0, 3.5, 7]) == "▁▅█" and sparkline([2, 2]) == "▁▁" and sparkline([]) == ""


def test_no_command_about_a_record_loads_torch(tmp_path):
    run = write_record(tmp_path)
    assert "torch" not in run_alone(["top", "--once", run], ["report", run])[1]
