"""Long work without a terminal: a line on stderr every 30 s and one at the end, by an own clock."""

import json
import re
import sys

import pytest
import torch

import shardwise
from shardwise import progress as progress_lines
from shardwise.cli.main import app
from shardwise.progress import byte_bar, run_bar, share_bar, step_bar
from shardwise.quantities import format_duration


class Clock:
    """A clock that the test turns."""

    def __init__(self):
        self.now_s = 1000.0

    def __call__(self):
        return self.now_s


def lines_of(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""  # what programs read stays as it is
    return captured.err.splitlines()


def test_a_run_says_every_30_seconds_where_it_is_and_once_more_at_its_end(capsys):
    clock = Clock()
    with run_bar(1000, shown=True, num_done=900, clock=clock) as advance:
        for step in range(901, 1001):
            clock.now_s += 1
            advance(f"loss {step / 1000:.3f}", "1,234 tokens/s", "state 1 GiB", "peak 2 GiB")
    assert lines_of(capsys) == [
        "step 930 of 1,000: loss 0.930, 1,234 tokens/s, 1 min 10 s left",
        "step 960 of 1,000: loss 0.960, 1,234 tokens/s, 40 s left",
        "step 990 of 1,000: loss 0.990, 1,234 tokens/s, 10 s left",
        "step 1,000 of 1,000: loss 1.000, 1,234 tokens/s, took 1 min 40 s",
    ]


def test_a_run_that_breaks_off_says_how_far_it_came(capsys):
    clock = Clock()
    with pytest.raises(ZeroDivisionError), run_bar(10, shown=True, clock=clock) as advance:
        advance("loss 1.000", "2 tokens/s")
        clock.now_s += 4
        raise ZeroDivisionError
    assert lines_of(capsys) == ["step 1 of 10: loss 1.000, 2 tokens/s, took 4.0 s"]
    with run_bar(10, shown=True, num_done=10, clock=clock):
        pass  # nothing was left to do
    with run_bar(10, shown=False, clock=clock) as advance:  # of another rank
        clock.now_s += 100
        advance("loss 1.000")
    assert lines_of(capsys) == []


def test_bytes_steps_and_shares_are_told_in_lines_when_they_take_long(capsys):
    clock = Clock()
    with byte_bar("verify", 100 << 20, clock) as progress:
        for _ in range(5):
            clock.now_s += 20
            progress(20 << 20)
    with step_bar("plans", clock) as step:
        for number in range(1, 5):
            clock.now_s += 40
            step(number, 4)
    with share_bar(True, clock) as share:
        for label in ("matmul", "links"):
            share(label, 0.5)
            clock.now_s += 40
        share("done", 1.0)
    assert lines_of(capsys) == [
        "verify: 40 MiB of 100 MiB, 1 MiB/s, 1 min 0 s left",
        "verify: 80 MiB of 100 MiB, 1 MiB/s, 20 s left",
        "verify: 100 MiB of 100 MiB, 1 MiB/s, took 1 min 40 s",
        "plans: 1 of 4, 2 min 0 s left",
        "plans: 2 of 4, 1 min 20 s left",
        "plans: 3 of 4, 40 s left",
        "plans: 4 of 4, 0.0 s left",
        "plans: 4 of 4, took 2 min 40 s",
        "links: 50%, 40 s left",
        "done: 100%, 0.0 s left",
        "done: 100%, took 1 min 20 s",
    ]


def test_what_is_done_sooner_is_not_worth_a_line(capsys):
    clock = Clock()
    with byte_bar("verify", None, clock) as progress, byte_bar("load", None, clock) as load:
        clock.now_s += 29
        progress(1)
        load(1)
    assert lines_of(capsys) == []
    with byte_bar("export", None, clock) as progress, byte_bar("load", None, clock) as load:
        clock.now_s += 32
        progress(1 << 20)
        load(1 << 30)
    assert lines_of(capsys) == [
        "export: 1 MiB, 32 KiB/s",
        "load: 1 GiB, 32 MiB/s",
        "load: 1 GiB, 32 MiB/s, took 32 s",
        "export: 1 MiB, 32 KiB/s, took 32 s",
    ]


@pytest.mark.parametrize("end", [OSError("broken pipe"), ValueError("closed"), None])
def test_a_log_that_nobody_reads_any_more_does_not_end_the_work(monkeypatch, end):
    class Closed:
        def write(self, text):
            assert end is not None
            raise end

    monkeypatch.setattr(sys, "stderr", None if end is None else Closed())
    clock = Clock()
    with run_bar(3, shown=True, clock=clock) as advance:
        for _ in range(3):
            clock.now_s += 60
            advance("loss 1.000")


def test_durations_have_their_two_largest_units():
    times = {0.04: "0.0 s", 9.94: "9.9 s", 9.96: "10 s", 59.6: "1 min 0 s", 3599: "59 min 59 s"}
    times |= {3600: "1 h 0 min", 7530: "2 h 5 min", 90_000: "1 d 1 h"}
    assert {seconds: format_duration(seconds) for seconds in times} == times


def test_the_commands_tell_their_lines_on_stderr_and_their_json_on_stdout(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(progress_lines, "INTERVAL_S", 0.0)  # every advance is worth a line
    model = torch.nn.Linear(4, 3)
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        shardwise.save(tmp_path / "one", shardwise.shard(model, stage=3))
    finally:
        torch.distributed.destroy_process_group()

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            app([str(a) for a in arguments])
        assert ended.value.code == 0
        return capsys.readouterr()

    out, err = run("ckpt", "verify", tmp_path / "one", "--json")
    assert json.loads(out)["ok"] is True
    assert re.search(r"^verify: .* of .*/s, took ", err, re.MULTILINE)
    _, err = run("ckpt", "export", tmp_path / "one", tmp_path / "hf")
    assert re.search(r"^export: 60 B of 60 B, .*took ", err, re.MULTILINE)
    _, err = run("ckpt", "import", tmp_path / "hf", tmp_path / "back")
    assert re.search(r"^import: 60 B of 60 B, .*took ", err, re.MULTILINE)
    model_file = tmp_path / "tiny.yaml"
    model_file.write_text("dim: 8\nlayers: 1\nheads: 1\nseq: 8\nmicro_batch: 1\n")
    small = (model_file, "--ranks", "2", "--json", "--layout", "rows", "--bucket-bytes", "0")
    fixed = ("--stage", "3", "--precision", "fp32", "--prefetch-bytes", "0", "--micro-batch", "1")
    out, err = run("plan", *small, *fixed, "--search")
    assert json.loads(out) and re.search(r"^plans: (\d+) of \1, took ", err, re.MULTILINE)
    out, err = run("simulate", *small, *fixed, "--sweep", "2,4")
    assert json.loads(out) and "simulating: 1 of 2, " in err


@pytest.mark.parametrize("variable", ["TTY_COMPATIBLE", "FORCE_COLOR"])
def test_where_a_terminal_shows_a_bar_there_are_no_lines(variable, monkeypatch, capsys):
    monkeypatch.setenv(variable, "1")  # rich takes what it writes to for a terminal
    clock = Clock()
    for total in (4 << 20, None):
        with byte_bar("load", total, clock) as progress:
            clock.now_s += 60
            progress(2 << 20)
            progress(2 << 20)
        shown = capsys.readouterr().err
        assert "MiB" in shown and "took" not in shown
    with byte_bar("load", None, shown=False) as progress:
        progress(1)
    assert capsys.readouterr() == ("", "")
