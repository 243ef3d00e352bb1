"""`shardwise train` as a process: help, errors, two ranks end to end, signals.

How processes are started is in `programs`; ../test_wheel.py launches ranks as a user does.
"""

import argparse
import os
import re
import signal
import time
from pathlib import Path
from typing import get_args

import pytest
import yaml

from commands import run_alone
from programs import is_running, run_program, start_program
from ranks import HANG_S
from resumes import lines_of
from shardwise.cli.train import _shorten_warmup, read_place, read_run
from shardwise.errors import ConfigError
from shardwise.train.launch import RankPlace, StopRequest

SOURCES = Path(__file__).parents[2] / "src"
TINY = "dim: 32\nlayers: 2\nheads: 2\nseq: 32\nmicro_batch: 2\nsample_tokens: 4\neval_windows: 3\n"


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY + f"data: {argparse.__file__}\noutput: {tmp_path / 'run'}\n")
    return path


def test_importing_the_command_line_imports_nothing_heavy():
    assert run_alone() == ("", set())


def test_help_names_every_flag_and_choice_in_full_within_80_columns():
    """In a pipe, as here: a name that is cut or broken would be missing."""
    from shardwise.keys import flag_of
    from shardwise.train.config import TrainConfig

    done = run_program("shardwise", "train", "--help")
    assert done.returncode == 0
    words = done.stdout.replace("|", " ").replace(",", " ").split()
    for key, field in TrainConfig.model_fields.items():
        assert flag_of(key) in words
        choices = [each for part in get_args(field.annotation) for each in get_args(part)]
        for choice in [*get_args(field.annotation), *choices]:
            assert not isinstance(choice, str) or choice in words, (key, choice)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_a_place_is_read_from_what_torchrun_sets():
    environment = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert read_place(environment) == RankPlace(3, 4, 1, 2)
    assert read_place({}) is None
    agent = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with pytest.raises(ConfigError, match="--max-restarts needs TORCH_DISABLE_SHARE_RDZV"):
        read_place(environment | agent)
    assert read_place(environment | agent | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is not None


@pytest.mark.slow
def test_two_ranks_train_end_to_end(tiny):
    flags = ("--ranks", 2, "--steps", 6, "--eval-every", 3, "--check-gradients")
    done = run_program("shardwise", "train", tiny, *flags, launches=True)
    out, err = done.stdout, done.stderr
    assert done.returncode == 0, err
    assert re.fullmatch(r"(step .* left\n)*step 6 of 6: loss .* tokens/s, took .*\n", err), err
    run = tiny.parent / "run"
    lines = lines_of(run)
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "eval_loss" in line] == [3, 6]
    assert all(line["state_bytes"] > 0 and line["sent_bytes"] > 0 for line in steps)
    assert steps[-1]["tokens"] == 6 * 2 * 2 * 32
    assert yaml.safe_load((run / "config.yaml").read_text())["global_batch"] == 4
    assert "21 gradients are those of one process with the whole batch" in out
    assert "unigram entropy" in out and "plain data parallelism" in out
    assert f"report        shardwise report {run}" in out

    again = run_program("shardwise", "train", tiny)
    assert (again.returncode, "holds the metrics of an earlier run" in again.stderr) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "flags", "hint"),
    [
        (signal.SIGINT, ["--save-every", 90_000], "; it is saved, go on with --resume auto"),
        (signal.SIGTERM, [], ""),
    ],
)
def test_a_signal_ends_all_ranks_after_their_step(tiny, number, flags, hint):
    job = start_training(tiny, *flags)
    os.killpg(job.pid, number)
    code, out, err = job.finish()
    last = max(line["step"] for line in lines_of(tiny.parent / "run"))
    told = re.fullmatch(r"(step .* left\n)*step ([\d,]+) of 100,000: loss .*, took .*\n", err)
    assert code == 130 and told is not None and told[2] == f"{last:,}", err
    assert out.strip() == f"stopped after step {last}, as asked{hint}"
    assert (tiny.parent / "run/checkpoints" / f"step-{last:08d}").exists() is bool(flags)


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tiny):
    job = start_training(tiny)
    other, victim = job.ranks
    os.kill(other, signal.SIGSTOP)  # it would fail too, and perhaps be seen first
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{victim}").exists())
    os.kill(other, signal.SIGCONT)
    code, _, err = job.finish()
    assert code == 1
    assert "was killed by SIGKILL" in err


def start_training(tiny, *flags):
    """Start two ranks that train for long; return them after a step."""
    flags = ("--ranks", 2, "--steps", 100_000, *flags)
    job = start_program(tiny.parent, "shardwise", "train", tiny, *flags, launches=True)
    path = tiny.parent / "run" / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.stat().st_size > 0)
    return job


def wait_until(condition):
    deadline = time.monotonic() + HANG_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.mark.slow
def test_the_ranks_of_a_killed_launcher_save_and_end(tiny):
    job = start_training(tiny, "--save-every", 90_000)
    ranks = job.ranks
    assert len(ranks) == 2
    os.kill(job.pid, signal.SIGKILL)
    assert job.finish()[0] == -signal.SIGKILL
    wait_until(lambda: not any(is_running(rank) for rank in ranks))
    out, err = job.printed()
    assert all(line.startswith("step ") for line in err.splitlines()), err
    last = max(line["step"] for line in lines_of(tiny.parent / "run"))
    assert f"stopped after step {last}, the launcher is gone; it is saved" in out
    assert (tiny.parent / "run/checkpoints" / f"step-{last:08d}" / "manifest.json").exists()


def test_only_a_rank_that_has_a_launcher_cares_who_its_parent_is():
    assert not StopRequest().requested
    assert not StopRequest(os.getppid()).requested
    assert StopRequest(os.getpid()).requested


@pytest.mark.parametrize("steps", [2, "2"])
def test_steps_below_the_warmup_of_a_file_shorten_it(tmp_path, steps):
    file = tmp_path / "run.yaml"
    file.write_text("steps: 50\nwarmup_steps: 20\n")
    flags, line = _shorten_warmup(file, {"steps": steps})
    config, _ = read_run(file, flags, None)
    assert (config.steps, config.warmup_steps) == (2, 2)
    assert line == f"warmup_steps: 20 in {file}, shortened to 2, as --steps says\n"
    assert _shorten_warmup(file, {"steps": 20}) == ({"steps": 20}, "")


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("steps: 5\nwarmup_steps: 6\n", {}),
        ("steps: 5\nwarmup_steps: 6\n", {"steps": 2}),
        ("steps: 50\nwarmup_steps: 20\n", {"steps": 2, "warmup_steps": 3}),
    ],
)
def test_a_warmup_longer_than_its_own_run_is_refused(tmp_path, text, flags):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    flags, line = _shorten_warmup(file, flags)
    with pytest.raises(ConfigError, match="warmup_steps: expected at most steps"):
        read_run(file, flags, None)
    assert not line
