"""`shardwise train --deepspeed` on two ranks: the losses of the same run from our own YAML."""

import argparse
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from programs import run_program
from shardwise.cli.main import call_command

convert = partial(call_command, "convert")
train = partial(call_command, "train")

RUN: dict[str, Any] = {
    **{"dim": 32, "layers": 2, "heads": 2, "seq": 32, "steps": 6, "sample_tokens": 0},
    **{"eval_windows": 0, "data": argparse.__file__, "ranks": 2},
}
DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.03},
    },
    "scheduler": {
        "type": "OneCycle",
        "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
OURS: dict[str, Any] = {
    **{"stage": 2, "precision": "fp32", "micro_batch": 2, "accumulation": 2, "global_batch": 8},
    **{"grad_clip": 0.5, "lr": 0.01, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.03},
    "optimizer_options": {"eps": 1e-6},
    "schedule": "OneCycle",
    "schedule_options": {
        **{"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-2, "cycle_first_step_size": 3},
    },
}


def write(folder: Path, name: str, content: dict[str, Any]) -> Path:
    path = folder / name
    text = json.dumps(content) if name.endswith(".json") else yaml.safe_dump(content)
    path.write_text(text)
    return path


def run(*arguments: object, num_ranks: int | None = None) -> str:
    done = run_program("shardwise", "train", *arguments, num_ranks=num_ranks, launches=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[tuple[float, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["loss"], line["lr"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_two_ranks_train_with_the_losses_of_the_same_settings_in_our_yaml(tmp_path: Path) -> None:
    file = write(tmp_path, "ds.json", DEEPSPEED)
    shape = write(tmp_path, "shape.yaml", RUN)
    whole = write(tmp_path, "whole.yaml", {**RUN, **OURS})
    converted = tmp_path / "converted.yaml"
    assert convert([str(file), "--ranks", "2", "-o", str(converted)]) == 0
    assert yaml.safe_load(converted.read_text()) == {**OURS, "optimizer": "adamw", "ranks": 2}
    out = run(shape, "--deepspeed", file, "--ranks", 2, "--output", tmp_path / "theirs")
    run(whole, "--output", tmp_path / "ours", num_ranks=2)
    theirs, ours = metrics(tmp_path / "theirs"), metrics(tmp_path / "ours")
    assert theirs == ours and len(theirs) == 6
    rates = [0.001, 0.001 + 0.019 / 3, 0.001 + 0.019 * 2 / 3, 0.02]
    assert [lr for _, lr in theirs[:4]] == pytest.approx(rates)
    assert len(re.findall("steps_per_print", out)) == 1  # the report, once
    decided = [
        yaml.safe_load((tmp_path / n / "config.yaml").read_text()) for n in ("theirs", "ours")
    ]
    assert {**decided[0], "output": None} == {**decided[1], "output": None}


@pytest.mark.slow
def test_flags_win_over_the_file_and_the_file_over_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {**DEEPSPEED, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    content["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}
    file = write(tmp_path, "ds.json", content)
    shape = write(tmp_path, "shape.yaml", {**RUN, "ranks": 1})
    flags = ["--lr", "0.25", "--accumulation", "1", "--stage", "3", "--steps", "2"]
    out = run(shape, "--deepspeed", file, *flags, "--output", tmp_path / "run")
    assert "taken over" in out
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["lr"], config["accumulation"], config["stage"]) == (0.25, 1, 3)
    assert (config["micro_batch"], config["optimizer"], config["grad_clip"]) == (8, "sgd", 0.5)
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    ("yaml_keys", "content", "flags", "named"),
    [
        ({"stage": 3}, {}, [], r"stage: \S+ says 3, \S+ says 2; change one, or give --stage"),
        ({}, {"train_micro_batch_size_per_gpu": 3}, [], r"3 x 2 x 1 = 6, got 8"),
        ({}, {}, ["--micro-batch", "3"], r"3 x 2 x 1 = 6, got 8"),
        ({}, {"zero_optimization": {"stge": 1}}, [], "did you mean 'stage'"),
        ({}, {}, ["--micro-batch", "many"], "micro"),
    ],
)
def test_contradictions_are_named_before_anything_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    yaml_keys: dict[str, Any],
    content: dict[str, Any],
    flags: list[str],
    named: str,
) -> None:
    file = write(tmp_path, "ds.json", {**DEEPSPEED, **content})
    shape = write(tmp_path, "shape.yaml", {**RUN, "ranks": 1, **yaml_keys})
    output = tmp_path / "run"
    code = train([str(shape), "--deepspeed", str(file), *flags, "--output", str(output)])
    assert code == 2
    assert re.search(named, capsys.readouterr().err)
    assert not output.exists()


def test_a_file_that_agrees_is_no_contradiction(tmp_path: Path) -> None:
    from shardwise.interop.foreign_settings import read_train_keys
    from shardwise.train.config import load_config

    file = write(tmp_path, "ds.json", DEEPSPEED)
    shape = write(tmp_path, "shape.yaml", {**RUN, "stage": 2, "lr": "1e-2", "micro_batch": 2})
    keys, _ = read_train_keys(file, {"micro_batch": 2}, {}, 2)
    assert load_config(shape, {}, (file, keys)).lr == 0.01


def test_what_the_deepspeed_file_does_not_say_is_the_yamls_to_say(tmp_path: Path) -> None:
    from shardwise.interop.foreign_settings import read_train_keys
    from shardwise.keys import read_keys
    from shardwise.train.config import load_config

    content = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "bf16": None}
    file = write(tmp_path, "ds.json", content)
    ours = {"schedule": "cosine", "stage": 1, "precision": "bf16", "grad_clip": 0.1, "beta2": 0.9}
    both = write(tmp_path, "run.yaml", ours)
    keys, _ = read_train_keys(file, read_keys(both), {}, 1)
    config = load_config(both, {}, (file, keys))
    assert {name: getattr(config, name) for name in ours} == ours
    assert (config.lr, config.weight_decay, config.beta1) == (0.5, 0.0, 0.9)
    silent = {"zero_optimization": {"overlap_comm": True}, "fp16": {"enabled": False}}
    file = write(tmp_path, "ds.json", {**content, **silent})
    keys, _ = read_train_keys(file, read_keys(both), {}, 1)
    config = load_config(both, {}, (file, keys))
    assert {name: getattr(config, name) for name in ours} == ours
    file = write(tmp_path, "ds.json", content)
    alone, _ = read_train_keys(file, {}, {}, 1)
    assert (alone["schedule"], alone["stage"], alone["grad_clip"]) == ("constant", 0, 1.0)
