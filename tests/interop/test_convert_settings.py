"""`shardwise convert`: files that are read can be written again; losses are reported."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.cli.main import call_command
from shardwise.errors import ConfigError
from shardwise.interop.foreign_settings import read_accelerate_keys, read_train_keys
from shardwise.interop.foreign_writing import to_accelerate, to_deepspeed
from shardwise.train.config import TrainConfig, load_config

run_command = partial(call_command, "convert")

OURS: list[dict[str, Any]] = [
    {"stage": 3, "precision": "bf16", "micro_batch": 2, "accumulation": 3, "prefetch_bytes": 4000},
    {"stage": 0, "precision": "fp32", "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    {"stage": 2, "precision": "fp16", "loss_scale": 1024.0, "loss_scale_window": 50},
    {"stage": 1, "optimizer": "adam", "optimizer_options": {"amsgrad": True, "eps": 1e-6}},
    {"schedule": "WarmupLR", "schedule_options": {"warmup_num_steps": 7}, "lr": 0.5},
    {
        "schedule": "OneCycle",
        "schedule_options": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_momentum": False},
    },
    {"steps": 30, "schedule": "WarmupDecayLR", "grad_clip": 0.0, "weight_decay": 0.3},
    {"optimizer": "adagrad", "beta1": 0.9, "global_batch": 16, "micro_batch": 8},
    {"stage": 3, "gather": "int8", "reduce": "int4-a2a"},
]


@pytest.mark.parametrize("given", OURS)
def test_ours_written_for_deepspeed_and_read_again_is_the_same_run(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    config = TrainConfig(**{"schedule": "constant", **given})
    content, report = to_deepspeed(config, "run.yaml")
    told = {line.key for line in report.lines}
    assert told == config.model_fields_set
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    keys, _ = read_train_keys(path, {}, {}, None)
    again = TrainConfig(**{"steps": config.steps, **keys})
    compared = set(TrainConfig.model_fields) - {"beta1", "beta2", "schedule_options"}
    if config.precision != "fp16":
        compared -= {"loss_scale", "loss_scale_window"}
    if config.accumulation is None:
        compared -= {"accumulation"}
    for key in compared:
        assert getattr(again, key) == getattr(config, key), key
    assert again.curve == config.curve
    second, _ = to_deepspeed(again, "ds.json")
    assert second.pop("gradient_accumulation_steps", 1) == content.pop(
        "gradient_accumulation_steps", 1
    )
    assert second == content


ACCELERATE: list[tuple[str, dict[str, Any]]] = [
    (
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: true\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block,Head\n  fsdp_activation_checkpointing: true\n",
        {"stage": 3, "units": ["Block", "Head"], "activation_checkpointing": True},
    ),
    (
        "fsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n"
        "  fsdp_offload_params: false\n  fsdp_use_orig_params: true\n",
        {"stage": 2},
    ),
    (
        "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\nnum_machines: 2\n",
        {"dp_replicate": 2},
    ),
    (
        "deepspeed_config:\n  zero_stage: 1\n  gradient_accumulation_steps: 4\n"
        "  gradient_clipping: 0.5\n  offload_optimizer_device: none\n  zero3_init_flag: false\n",
        {"stage": 1, "accumulation": 4, "grad_clip": 0.5},
    ),
    ("distributed_type: MULTI_GPU\n", {"stage": 0}),
    ("fsdp_config:\n  fsdp_offload_params: true\n", {"offload": "cpu"}),
    (
        "deepspeed_config:\n  zero_stage: 2\n  offload_optimizer_device: cpu\n"
        "  offload_param_device: none\n",
        {"stage": 2, "offload": "cpu"},
    ),
]


def test_accelerates_nvme_paths_are_folders_of_an_offload(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    optimizer = "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /o\n"
    params = "  offload_param_device: nvme\n  offload_param_nvme_path: /p\n"
    expected: list[tuple[str, Any]] = [
        (optimizer, {"optimizer": "nvme:/o"}),
        (params, {"params": "nvme:/p", "optimizer": "cpu"}),
        (optimizer + params, {"params": "nvme:/p", "optimizer": "nvme:/o"}),
        (optimizer + "  offload_param_device: cpu\n", "nvme:/o"),
    ]
    for text, offload in expected:
        path.write_text(f"deepspeed_config:\n  zero_stage: 3\n{text}")
        keys, report = read_accelerate_keys(path)
        assert keys["offload"] == offload
        assert text.count(":") == len([key for key in report.mapped if "offload" in key])


@pytest.mark.parametrize(("text", "expected"), ACCELERATE)
def test_accelerates_blocks_become_keys_and_every_key_is_told(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("num_processes: 4\nmixed_precision: bf16\n" + text)
    keys, report = read_accelerate_keys(path)
    assert expected.items() <= keys.items()
    assert (keys["ranks"], keys["precision"]) == (4, "bf16")
    content = yaml.safe_load(path.read_text())
    flat = {
        f"{key}.{inner}" if inner else key
        for key, value in content.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert {line.key for line in report.lines} == flat
    TrainConfig(**keys)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ours_written_for_accelerate_and_read_again_keeps_its_sharding(
    tmp_path: Path, stage: int
) -> None:
    sharded = {"units": ("Block", "Head"), "activation_checkpointing": True} if stage else {}
    config = TrainConfig(stage=stage, precision="bf16", ranks=4, lr=0.5, **sharded)
    content, report = to_accelerate(config, "run.yaml")
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(content))
    keys, _ = read_accelerate_keys(path)
    again = TrainConfig(**keys)
    for key in ("stage", "precision", "ranks", "units", "activation_checkpointing"):
        assert getattr(again, key) == getattr(config, key), key
    assert "lr" in report.ignored and {line.key for line in report.lines} == config.model_fields_set


def test_accelerate_itself_takes_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate, an extra")
    from accelerate.commands.config.config_args import ClusterConfig

    for stage in (0, 3):
        content, _ = to_accelerate(TrainConfig(stage=stage, ranks=2, units=("Block",)), "run.yaml")
        path = tmp_path / f"{stage}.yaml"
        path.write_text(yaml.safe_dump(content))
        loaded = ClusterConfig.from_yaml_file(str(path))
        assert loaded.num_processes == 2 and loaded.mixed_precision == "no"


def test_accelerates_deepspeed_file_brings_optimizer_and_schedule(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        json.dumps(
            {
                "bf16": {"enabled": "auto"},
                "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": "auto"}},
                "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
                "zero_optimization": {"stage": 2},
                "train_batch_size": 16,
                "gradient_accumulation_steps": 2,
            }
        )
    )
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
        "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    )
    keys, report = read_accelerate_keys(path)
    assert keys == {
        "stage": 2,
        "precision": "bf16",
        "micro_batch": 2,
        "accumulation": 2,
        "global_batch": 16,
        "grad_clip": 1.0,
        "optimizer": "adamw",
        "beta1": 0.9,
        "beta2": 0.999,
        "lr": 0.5,
        "schedule": "WarmupLR",
        "schedule_options": {"warmup_num_steps": 5},
        "ranks": 4,
    }
    assert report.auto.keys() == {"bf16.enabled", "optimizer.params.weight_decay"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            "deepspeed_config:\n  zero_stage: 3\n  offload_param_device: nvme\n",
            "nvme needs a folder; add deepspeed_config.offload_param_nvme_path",
        ),
        ("mixed_precision: fp8\n", "fp8 is not supported"),
        ("fsdp_config:\n  fsdp_sharding_stratgy: x\n", "did you mean 'fsdp_sharding_strategy'"),
        ("deepspeed_config:\n  gradient_clipping: lots\n", "expected a number of 0 or more"),
    ],
)
def test_what_accelerate_asks_and_we_have_not_is_refused(
    tmp_path: Path, text: str, named: str
) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: FSDP\n" + text)
    with pytest.raises(ConfigError, match=named) as caught:
        read_accelerate_keys(path)
    assert str(path) in str(caught.value)


def test_the_command_writes_a_file_that_train_reads_and_the_report_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, ours, back = (tmp_path / name for name in ("ds.json", "run.yaml", "back.json"))
    content = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 2},
    }
    source.write_text(json.dumps(content))
    assert run_command([str(source)]) == 2
    assert "give --ranks" in capsys.readouterr().err
    assert run_command([str(source), "--ranks", "2", "-o", str(ours), "--json"]) == 0
    told = json.loads(capsys.readouterr().err)
    assert told["ignored"].keys() == {"steps_per_print"}
    config = load_config(ours, {})
    assert (config.micro_batch, config.optimizer, config.ranks) == (4, "sgd", 2)
    assert run_command([str(ours), "--to", "deepspeed", "-o", str(back)]) == 0
    assert "ranks" in capsys.readouterr().err
    written = json.loads(back.read_text())
    assert written["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
    assert written["gradient_clipping"] == 0.5
    assert run_command([str(source), "--to", "accelerate", "--ranks", "2"]) == 0
    out, err = capsys.readouterr()
    assert yaml.safe_load(out)["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert "steps_per_print" in err and "grad_clip" in err
    assert run_command([str(source), "--ranks", "2", "-o", str(ours)]) == 2  # it is there
    assert run_command([str(ours)]) == 2
    assert run_command([str(source), "--to", "deepspeed"]) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err and "ours already" in err and "deepspeed already" in err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}, "no StepLR"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "masters in fp32"),
        (
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_max_lr": 1, "cycle_min_lr": "auto"},
                }
            },
            "a run needs a number",
        ),
    ],
)
def test_what_only_a_loop_of_ones_own_can_do_is_refused(
    tmp_path: Path, content: dict[str, Any], named: str
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=named):
        read_train_keys(path, {}, {}, 1)


def test_a_loss_scale_that_is_no_power_of_two_is_written_as_the_nearest() -> None:
    content, report = to_deepspeed(TrainConfig(precision="fp16", loss_scale=1000.0), "run.yaml")
    assert content["fp16"]["initial_scale_power"] == 10
    assert "nearest" in report.mapped["loss_scale"]


def test_how_moments_are_kept_is_left_out_of_a_deepspeed_config() -> None:
    options = {"moments": "8bit", "block": 64, "eps": 1e-6}
    content, report = to_deepspeed(TrainConfig(optimizer_options=options), "run.yaml")
    assert content["optimizer"]["type"] == "AdamW"
    assert content["optimizer"]["params"].keys() == {"lr", "betas", "weight_decay", "eps"}
    (line,) = (line for line in report.lines if line.key == "optimizer_options")
    assert line.fate == "ignored"


OFFLOADS: list[tuple[int, Any, dict[str, Any], str]] = [
    (3, "cpu", {"offload_optimizer": "cpu", "offload_param": "cpu"}, ""),
    (2, "cpu", {"offload_optimizer": "cpu"}, ""),
    (3, "nvme:/a", {"offload_optimizer": "/a", "offload_param": "cpu"}, ""),
    (3, {"optimizer": "cpu"}, {"offload_optimizer": "cpu"}, ""),
    (3, {"optimizer": "nvme:/a", "fraction": 0.5}, {"offload_optimizer": "/a", "ratio": 0.5}, ""),
    (
        3,
        {"params": "nvme:/a", "optimizer": "nvme:/b"},
        {"offload_optimizer": "/b", "offload_param": "/a"},
        "",
    ),
    (3, {"optimizer": "nvme:/a,/b"}, {"offload_optimizer": "/a"}, "of several folders the first"),
    (2, {"optimizer": "cpu", "fraction": 0.5}, {"offload_optimizer": "cpu"}, "fraction is left"),
    (1, {"params": "nvme:/a", "optimizer": "cpu"}, {"offload_optimizer": "cpu"}, "params stay"),
    (3, {"grads": "nvme:/a", "optimizer": "cpu"}, {"offload_optimizer": "cpu"}, "grads are left"),
    (3, {"activations": "cpu"}, {}, "activations are left"),
]


@pytest.mark.parametrize(("stage", "offload", "expected", "lost"), OFFLOADS)
def test_an_offload_written_for_deepspeed_is_read_again_as_the_same(
    tmp_path: Path, stage: int, offload: Any, expected: dict[str, Any], lost: str
) -> None:
    config = TrainConfig(stage=stage, offload=offload)
    content, report = to_deepspeed(config, "run.yaml")
    written = {k: v for k, v in content["zero_optimization"].items() if k.startswith("offload")}
    for name, block in written.items():
        home = block["nvme_path"] if block["device"] == "nvme" else block["device"]
        assert (home, block.get("ratio")) == (expected[name], {**expected, **block}.get("ratio"))
    assert written.keys() == expected.keys() - {"ratio"}
    assert lost in report.mapped["offload"] and (";" in report.mapped["offload"]) == bool(lost)
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    keys, _ = read_train_keys(path, {}, {}, None)
    assert lost or keys["offload"] == offload


@pytest.mark.parametrize(("offload", "is_told"), [("cpu", False), ({"optimizer": "nvme:/a"}, True)])
def test_fsdp2_has_all_in_host_memory_or_nothing(offload: Any, is_told: bool) -> None:
    content, report = to_accelerate(TrainConfig(stage=3, offload=offload), "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is True
    assert ("no other home" in report.mapped["offload"]) == is_told
    content, _ = to_accelerate(TrainConfig(stage=3), "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is False
    config = TrainConfig(stage=3, offload={"activations": "cpu"})
    content, report = to_accelerate(config, "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is False
    assert "activations are left out" in report.mapped["offload"]
