"""The metrics file, and the text printed at the end."""

import json
import math

import pytest

from shardwise.errors import ConfigError
from shardwise.monitor.lines import JsonLines
from shardwise.progress import run_bar
from shardwise.train.checks import check_output, metrics_path
from shardwise.train.config import TrainConfig
from shardwise.train.summary import (
    RunResult,
    StateBytes,
    compare,
    format_result,
)


def test_each_line_is_json_and_is_there_at_once(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    with JsonLines(path) as metrics:
        metrics.write(step=1, loss=2.5)
        assert json.loads(path.read_text()) == {"step": 1, "loss": 2.5}
        metrics.write(step=2, loss=2.0, grad_norm=math.inf)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1] == {"step": 2, "loss": 2.0, "grad_norm": None}


def test_other_ranks_write_nothing(tmp_path):
    with JsonLines(None) as metrics:
        metrics.write(step=1)
    assert not list(tmp_path.iterdir())


def test_an_earlier_run_is_not_written_over(tmp_path):
    config = TrainConfig(output=tmp_path)
    check_output(config)
    metrics_path(config).write_text("")
    check_output(config)
    metrics_path(config).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl holds.*overwrite: true"):
        check_output(config)
    check_output(config.model_copy(update={"overwrite": True}))


def test_the_progress_bar_is_silent_off_a_terminal(capsys):
    with run_bar(2, shown=True) as advance:
        advance("loss 1")
    assert capsys.readouterr().out.strip() == ""


def test_the_summary_compares_with_plain_data_parallelism():
    result = RunResult(unigram_entropy=3.25, eval_loss=1.5, sample="def f\x1b[2J", wall_s=9.0)
    state = StateBytes(300, 300, 600, replicated_bytes=3200, num_params=200)
    for step in (1, 2):
        result.add_step(step, 4.0 - step, 0.5, 100, state)
    result.state_bytes_of_ranks, result.peak_bytes_of_ranks = [1200, 1100], [2048, 2048]
    text = format_result(result, TrainConfig())
    for part in ("2.500 nats", "1.500 held out", "3.250", "16.0 bytes per parameter", "38%"):
        assert part in text
    assert "\x1b" not in text
    assert "predicted" not in text


def test_the_summary_tells_what_was_predicted_beside_what_was_measured():
    result = RunResult(unigram_entropy=3.25)
    for step, step_s in enumerate((9.0, 0.5, 0.4, 0.6), 1):  # the first one is not counted
        result.add_step(step, 2.0, step_s, 100, StateBytes(300, 300, 600, 3200, 200))
    result.state_bytes_of_ranks, result.added_bytes_of_ranks = [2048, 1024], [3072, 4096]
    config = TrainConfig(
        predicted_step_s=0.55, predicted_state_bytes=2048, predicted_peak_bytes=2048
    )
    lines = compare(config, result)
    assert lines == [
        "step time 0.55 s, measured 0.5 s (+10.0%)",
        "state 2 KiB, measured 2 KiB (+0.0%)",
        "peak 2 KiB, measured 4 KiB (-50.0%)",
    ]
    assert compare(TrainConfig(), result) == []
    assert all(line in format_result(result, config) for line in lines[:1])
