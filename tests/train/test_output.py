"""Files of a run: metrics, checkpoints before it, settings of a resume; the text at its end."""

import json
import math
from pathlib import Path

import pytest

from shardwise.errors import ConfigError
from shardwise.keys import names_in
from shardwise.monitor.lines import JsonLines
from shardwise.train.checks import check_output, checkpoints_path, metrics_path
from shardwise.train.config import TrainConfig
from shardwise.train.saves import find_changes
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
    with JsonLines(None) as metrics:  # of other ranks
        metrics.write(step=1)
    assert list(tmp_path.iterdir()) == [path.parent]


def test_an_earlier_run_is_not_written_over(tmp_path):
    config = TrainConfig(output=tmp_path)
    check_output(config)
    metrics_path(config).write_text("")
    check_output(config)
    metrics_path(config).write_text("{}\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl holds.*overwrite: true"):
        check_output(config)
    check_output(config.model_copy(update={"overwrite": True}))


def test_the_summary_compares_with_plain_data_parallelism_and_with_the_plan():
    result = RunResult(unigram_entropy=3.25, eval_loss=1.5, sample="def f\x1b[2J", wall_s=9.0)
    state = StateBytes(300, 300, 600, replicated_bytes=3200, num_params=200)
    for step, step_s in enumerate((9.0, 0.5, 0.4, 0.6), 1):  # the first time is not counted
        result.add_step(step, 5.0 - step, step_s, 100, state)
    result.state_bytes_of_ranks, result.peak_bytes_of_ranks = [1200, 1100], [2048, 2048]
    text = format_result(result, TrainConfig())
    for part in ("2.500 nats", "1.500 held out", "3.250", "16.0 bytes per parameter", "38%"):
        assert part in text
    assert "\x1b" not in text and "predicted" not in text
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


def test_metrics_after_the_resumed_step_are_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    kept = ['{"step": 1, "loss": 2.5}\n', '{"step": 2, "loss": 2.25}\n', '{"step": 1, "a": 0}\n']
    torn = ['{"step": 3}\n', "[]\n", '{"loss": 1}\n', '{"step": null}\n', '{"step": 2, "lo']
    path.write_text("".join([*kept, *torn]))
    with JsonLines(path, last_step=2) as metrics:
        assert path.read_text() == "".join(kept)
        metrics.write(step=3, loss=2.0)
    assert path.read_text() == "".join(kept) + '{"step": 3, "loss": 2.0}\n'
    assert list(tmp_path.iterdir()) == [path]
    with JsonLines(path):  # a new run
        assert path.read_text() == ""


def test_the_metrics_change_at_once(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')
    seen = []

    def replace(self, target):
        seen.append((self.read_text(), target.read_text()))
        raise OSError

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError):
        JsonLines(path, last_step=1)
    assert seen == [('{"step": 1}\n', '{"step": 1}\n{"step": 2}\n')]


def make_steps(config, *steps):
    for step in steps:
        (checkpoints_path(config) / f"step-{step:08d}").mkdir(parents=True)


@pytest.mark.parametrize("overwrite", [False, True])
def test_checkpoints_of_an_earlier_run_are_never_written_over(tmp_path, overwrite):
    config = TrainConfig(output=tmp_path, overwrite=overwrite)
    checkpoints_path(config).mkdir()
    check_output(config)
    make_steps(config, 3, 12)
    with pytest.raises(ConfigError, match=r"checkpoints holds .*newest: step 12.*--resume auto"):
        check_output(config)
    check_output(config.model_copy(update={"resume": "auto"}))
    assert len(list(checkpoints_path(config).iterdir())) == 2


def test_a_step_to_resume_from_must_be_there_and_the_newest(tmp_path):
    config = TrainConfig(output=tmp_path, resume=12)
    with pytest.raises(ConfigError, match="no checkpoint of step 12; it has none"):
        check_output(config)
    make_steps(config, 3, 12)
    metrics_path(config).write_text("{}\n")
    check_output(config)
    with pytest.raises(ConfigError, match="no checkpoint of step 4; it has 12, 3"):
        check_output(config.model_copy(update={"resume": 4}))
    with pytest.raises(ConfigError, match=r"after step 3 \(step-00000012\).*move them, or"):
        check_output(config.model_copy(update={"resume": 3}))


SAVED = {**TrainConfig().model_dump(mode="json"), "source": "abc"}


@pytest.mark.parametrize("key", ["dim", "layers", "heads", "kv_heads", "tied_head", "optimizer"])
def test_another_model_is_refused(key):
    with pytest.raises(ConfigError, match=f"^{key}: the checkpoint is of a model with {key}"):
        find_changes(SAVED, {**SAVED, key: 7}, 1, 1)


def test_every_key_that_changes_the_steps_is_told_in_a_line_of_its_own():
    now = {**SAVED, "lr": 0.5, "precision": "bf16", "seed": 3, "source": "def", "dropout": 0.1}
    assert find_changes(SAVED, now, 2, 4) == [
        "ranks: 2 -> 4",
        "dropout: 0.0 -> 0.1",
        "precision: fp32 -> bf16",
        "lr: 0.0003 -> 0.5",
        "seed: 0 -> 3",
        "data: the text files have changed since",
    ]


def test_every_key_is_refused_told_or_known_to_change_nothing():
    silent = {"eval_every", "prompt", "sample_tokens", "output", "overwrite", "ranks", "threads"}
    silent |= {"observe", "hang_timeout", "prefetch_bytes", "bucket_bytes", "loss_scale"}
    panels = ("Checkpoints", "Plan")
    silent |= set(names_in(TrainConfig, *panels))
    assert find_changes(SAVED, dict(SAVED), 2, 2) == []
    for key in TrainConfig.model_fields:
        try:
            told = bool(find_changes(SAVED, {**SAVED, key: "other"}, 1, 1))
        except ConfigError:
            told = True
        assert told is (key not in silent), key


def test_a_key_that_an_older_version_did_not_have_is_not_told_as_changed():
    new = ("dp_replicate", "units", "optimizer", "optimizer_options", "loss_scale_window")
    older = {key: value for key, value in SAVED.items() if key not in new}
    assert find_changes(older, {**SAVED, "dp_replicate": 1, "units": None}, 1, 1) == []
    assert find_changes(older, {**SAVED, "dp_replicate": 2}, 1, 1) == ["dp_replicate: 1 -> 2"]


def test_the_summary_tells_the_last_checkpoint_and_the_stall():
    result = RunResult(unigram_entropy=3.0, first_step=41, saved_step=60, save_stall_s=0.125)
    result.add_step(60, 2.0, 0.5, 100, StateBytes(1, 1, 1, 3, 1))
    text = format_result(result, TrainConfig())
    assert "checkpoints   the last of step 60; saving stopped training for 0.12 s in all" in text
    assert "resumed       from step 40, to step 60" in text
    assert text.startswith("1 steps")
