"""Hugging Face's ZeRO-3 JSON, all at "auto": our keys decide, and the report has their sources."""

import argparse
import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from programs import run_program
from shardwise.cli.main import call_command
from shardwise.cli.train import read_run
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import from_deepspeed
from shardwise.interop.foreign_keys import Report
from shardwise.interop.foreign_settings import read_train_keys
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.launch import RankPlace

convert = partial(call_command, "convert")
train = partial(call_command, "train")

# transformers' documentation, "DeepSpeed", ZeRO-3; with the schedulers that its Trainer fills in.
HUGGING_FACE: dict[str, Any] = {
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def hugging_face(schedule: str = "WarmupLR") -> dict[str, Any]:
    content = copy.deepcopy(HUGGING_FACE)
    for name in ("offload_optimizer", "offload_param"):
        content["zero_optimization"][name]["device"] = "none"
    if schedule == "WarmupDecayLR":
        content["scheduler"]["type"] = schedule
        content["scheduler"]["params"]["total_num_steps"] = "auto"
    return content


def write(folder: Path, content: dict[str, Any], name: str = "ds.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return path


def read(
    file: Path, flags: dict[str, Any], yaml_file: Path | None = None, ranks: int = 2
) -> tuple[TrainConfig, Report]:
    config, report = read_run(
        yaml_file, {**flags, "deepspeed": file}, RankPlace(0, ranks, 0, ranks)
    )
    assert report is not None
    return config, report


FLAGS = {"lr": "1e-4", "warmup_steps": "4", "steps": "20", "precision": "bf16", "micro_batch": "2"}


@pytest.mark.parametrize("schedule", ["WarmupLR", "WarmupDecayLR"])
def test_flags_fill_what_is_auto_and_the_curve_is_that_of_the_same_numbers(
    tmp_path: Path, schedule: str
) -> None:
    file = write(tmp_path, hugging_face(schedule))
    config, report = read(file, FLAGS)
    numbers = {"warmup_num_steps": 4, "warmup_max_lr": 1e-4}
    numbers |= {"total_num_steps": 20} if schedule == "WarmupDecayLR" else {}
    said = {"scheduler": {"type": schedule, "params": numbers}}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    scheduler = from_deepspeed(said).scheduler(optimizer)
    for step in range(1, 21):
        assert config.learning_rate(step) == scheduler.get_last_lr()[0]
        optimizer.step()
        scheduler.step()
    assert (config.precision, config.stage, config.micro_batch) == ("bf16", 3, 2)
    auto = report.auto
    assert auto["optimizer.params.lr"] == "lr: 0.0001, from --lr"
    assert auto["scheduler.params.warmup_num_steps"] == "warmup_steps: 4, from --warmup-steps"
    assert auto["bf16.enabled"] == 'precision: "bf16", from --precision'
    assert auto["train_micro_batch_size_per_gpu"] == "micro_batch: 2, from --micro-batch"
    assert auto["train_batch_size"] == "global_batch: 4, micro_batch x accumulation x ranks"
    assert auto["gradient_accumulation_steps"] == "accumulation: 1, its default"
    assert auto["optimizer.params.betas"] == "beta1: 0.9, its default; beta2: 0.95, its default"
    assert auto["gradient_clipping"] == "grad_clip: 1.0, its default"
    assert not report.of("default")


def leaves_at_auto(content: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for key, value in content.items():
        if isinstance(value, dict):
            found |= leaves_at_auto(value, f"{prefix}{key}.")
        elif value == "auto":
            found.add(prefix + key)
    return found


def test_without_flags_defaults_decide_and_every_auto_is_reported(tmp_path: Path) -> None:
    file = write(tmp_path, hugging_face("WarmupDecayLR"))
    config, report = read(file, {})
    ours = TrainConfig()
    for name in ("lr", "beta1", "beta2", "weight_decay", "precision", "micro_batch", "grad_clip"):
        assert getattr(config, name) == getattr(ours, name)
    assert config.loss_scale_window == 1000  # for a run that turns fp16 on
    # As Trainer's warmup_steps=0 does in DeepSpeed: a warm-up of 0 is one of 2.
    assert [config.learning_rate(step) for step in (1, 2, 3)] == [0.0, 0.0, ours.lr]
    told = report.auto | report.ignored
    assert leaves_at_auto(hugging_face("WarmupDecayLR")) <= told.keys()
    assert not [text for text in report.auto.values() if "from_deepspeed" in text or "()" in text]


def test_a_yaml_fills_what_is_auto_and_a_flag_wins_over_numbers_too(tmp_path: Path) -> None:
    keys = {"lr": 2e-4, "warmup_steps": 3, "optimizer_options": {"eps": 1e-6}, "stage": 2}
    own = write(tmp_path, keys, "run.yaml")
    content = hugging_face()
    content["zero_optimization"]["stage"] = "auto"
    config, report = read(write(tmp_path, content), {}, own)
    assert (config.lr, config.stage, config.optimizer_options) == (2e-4, 2, {"eps": 1e-6})
    assert config.curve is not None and config.curve.options["warmup_num_steps"] == 3
    assert report.auto["optimizer.params.lr"] == f"lr: 0.0002, from {own}"
    assert report.auto["zero_optimization.stage"] == f"stage: 2, from {own}"
    assert report.auto["optimizer.params.eps"] == "1e-06, from optimizer_options"

    content["optimizer"]["params"] = {"lr": 0.5, "eps": 1e-7, "amsgrad": True}
    content["scheduler"]["params"] = {"warmup_num_steps": 7, "warmup_type": "linear"}
    content["train_micro_batch_size_per_gpu"] = 3
    file = write(tmp_path, content)
    flags = {"lr": "0.25", "warmup_steps": "5", "optimizer_options": "{eps: 1e-5}"}
    config, report = read(file, {**flags, "micro_batch": "6"})
    assert config.curve is not None
    assert config.curve.given == {"warmup_num_steps": 5, "warmup_type": "linear"}
    assert config.optimizer_options == {"eps": 1e-5, "amsgrad": True}
    lines = {line.key: line for line in report.lines}
    assert lines["optimizer.params.lr"].value == 0.5  # as the file has it
    assert report.ignored["optimizer.params.lr"] == "lr: 0.25, from --lr"
    size = lines["train_micro_batch_size_per_gpu"]
    assert (size.value, size.text) == (3, "micro_batch: 6, from --micro-batch")


def test_a_flag_replaces_a_schedule_or_an_optimizer_with_its_options(tmp_path: Path) -> None:
    content = hugging_face()
    content["optimizer"]["params"]["eps"] = 1e-6
    content["scheduler"]["params"]["warmup_num_steps"] = 9
    file = write(tmp_path, content)
    config, report = read(file, {"schedule": "cosine", "warmup_steps": "2", "optimizer": "sgd"})
    assert (config.schedule, config.schedule_options, config.warmup_steps) == ("cosine", None, 2)
    assert (config.optimizer, config.optimizer_options) == ("sgd", None)
    assert report.ignored["scheduler.type"] == 'schedule: "cosine", from --schedule'
    assert report.ignored["optimizer.type"] == 'optimizer: "sgd", from --optimizer'
    content["scheduler"] = {"type": "StepLR", "params": {"step_size": 3}}
    assert read(write(tmp_path, content), {"schedule": "linear"})[0].schedule == "linear"


def test_options_of_two_files_contradict_each_other_one_by_one(tmp_path: Path) -> None:
    content = hugging_face()
    content["optimizer"]["params"] |= {"eps": 1e-6, "amsgrad": True}
    file = write(tmp_path, content)
    own = write(tmp_path, {"optimizer_options": {"foreach": False, "eps": 1e-6}}, "run.yaml")
    options = read(file, {}, own)[0].optimizer_options
    assert options == {"eps": 1e-6, "amsgrad": True, "foreach": False}
    own = write(tmp_path, {"optimizer_options": {"eps": 1e-3}}, "run.yaml")
    with pytest.raises(ConfigError, match=r"says \{'eps': 0.001\}, .* says \{'eps': 1e-06\}"):
        read(file, {}, own)


def test_a_number_that_nothing_else_says_is_asked_for_with_its_flag(tmp_path: Path) -> None:
    params = {"cycle_min_lr": "auto", "cycle_max_lr": 0.1, "cycle_first_step_size": 3}
    file = write(tmp_path, {"scheduler": {"type": "OneCycle", "params": params}})
    with pytest.raises(ConfigError, match=r"--schedule-options '\{cycle_min_lr: NUMBER\}'"):
        read(file, {})
    config, _ = read(file, {"schedule_options": "{cycle_min_lr: 0.01}"})
    assert config.schedule_options == {**params, "cycle_min_lr": 0.01}


def test_convert_writes_a_yaml_that_flags_still_fill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, hugging_face("WarmupDecayLR"))
    output = tmp_path / "run.yaml"
    assert convert([str(file), "-o", str(output), "--json"]) == 0
    told = json.loads(capsys.readouterr().err)
    assert told["auto"]["optimizer.params.lr"] == "lr: 0.0003, its default"
    assert "prefetch" in told["auto"]["zero_optimization.stage3_prefetch_bucket_size"]
    flags = {**FLAGS, "precision": "fp16"}  # its loss scaler is what the JSON says
    assert resolve_batch(load_config(output, flags), 2) == resolve_batch(read(file, flags)[0], 2)
    back = tmp_path / "back.json"
    full = write(tmp_path, {**yaml.safe_load(output.read_text()), "warmup_steps": 4}, "full.yaml")
    assert convert([str(full), "--to", "deepspeed", "-o", str(back)]) == 0
    params = json.loads(back.read_text())["scheduler"]["params"]
    assert params == {"warmup_num_steps": 4, "total_num_steps": 200, "warmup_max_lr": 3e-4}
    capsys.readouterr()
    assert convert([str(file), "--to", "accelerate", "--json"]) == 0
    written = capsys.readouterr()
    assert "mixed_precision" not in yaml.safe_load(written.out)
    assert "mixed_precision: left out" in json.loads(written.err)["auto"]["bf16.enabled"]


def test_the_offload_of_the_example_is_that_of_a_run_on_every_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, HUGGING_FACE)
    assert convert([str(file)]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["offload"] == "cpu"
    assert from_deepspeed(file).shard == {"stage": 3, "offload": "cpu"}
    homes = {
        "offload_param": {"params": "nvme:/x", "optimizer": "cpu"},
        "offload_optimizer": "nvme:/x",  # parameters stay in host memory
    }
    for name, value in homes.items():
        content = copy.deepcopy(HUGGING_FACE)
        content["zero_optimization"][name] = {"device": "nvme", "nvme_path": "/x"}
        keys, _ = read_train_keys(write(tmp_path, content), {}, {}, None)
        assert keys["offload"] == value
    content["zero_optimization"]["offload_param"] = {"device": "none"}
    content["zero_optimization"]["offload_optimizer"]["ratio"] = 0.25
    file = write(tmp_path, content)
    expected = {"optimizer": "nvme:/x", "fraction": 0.25}
    assert read(file, FLAGS)[0].offload == expected
    capsys.readouterr()
    assert convert([str(file)]) == 0
    keys = yaml.safe_load(capsys.readouterr().out)
    assert keys["offload"] == expected
    assert load_config(write(tmp_path, keys, "run.yaml"), {}).offload == expected
    config, report = read(file, {**FLAGS, "offload": "cpu"})
    assert config.offload == "cpu"
    name = "zero_optimization.offload_optimizer.device"
    assert report.ignored[name] == 'offload: "cpu", from --offload'


def test_nvme_without_a_folder_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = copy.deepcopy(HUGGING_FACE)
    content["zero_optimization"]["offload_param"] = {"device": "nvme"}
    file, output = write(tmp_path, content), tmp_path / "run"
    assert convert([str(file)]) == train(["--deepspeed", str(file), "--output", str(output)]) == 2
    named = "add zero_optimization.offload_param.nvme_path"
    assert capsys.readouterr().err.count(named) == 2 and not output.exists()


def test_in_python_each_undecided_number_is_asked_for_where_it_can_be_given(tmp_path: Path) -> None:
    content = hugging_face()
    content["zero_optimization"]["stage"] = "auto"
    settings = from_deepspeed(content, world_size=2)
    assert settings.shard == {}  # shard(model, stage=2, **settings.shard) is a call that works
    assert from_deepspeed(content, auto={"zero_optimization.stage": 2}).shard == {"stage": 2}
    with pytest.raises(ConfigError, match=r"give micro_batch= to from_deepspeed\(\)$"):
        _ = settings.micro_batch
    with pytest.raises(ConfigError, match="or with world_size="):
        _ = from_deepspeed(content, micro_batch=2, accumulation=1).global_batch
    optimizer = settings.optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(ConfigError, match="pass warmup_num_steps= to scheduler"):
        settings.scheduler(optimizer)
    assert settings.scheduler(optimizer, warmup_num_steps=0).get_last_lr() == [0.0]
    assert settings.gradient_clipping == 1.0
    assert "gradient_clipping" in settings.report.auto and not settings.report.of("default")


@pytest.mark.slow
def test_the_command_trains_with_the_json_and_its_flags(tmp_path: Path) -> None:
    file = write(tmp_path, hugging_face())
    small = {"dim": 16, "layers": 1, "heads": 2, "seq": 16, "sample_tokens": 0, "eval_windows": 0}
    own = write(tmp_path, {**small, "data": argparse.__file__, "steps": 5}, "run.yaml")
    flags = ["--lr", "0.5", "--warmup-steps", "3", "--output", str(tmp_path / "run")]
    ended = run_program("shardwise", "train", own, "--deepspeed", file, *flags)
    assert ended.returncode == 0, ended.stderr
    assert "warmup_steps: 3, from --warmup-steps" in ended.stdout
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    rates = [line["lr"] for line in lines]
    middle = 0.5 * torch.tensor(2.0, dtype=torch.float64).log() / torch.tensor(3.0).double().log()
    assert rates == pytest.approx([0.0, 0.0, middle.item(), 0.5, 0.5], rel=1e-12)
