"""Files of DeepSpeed and accelerate for the commands: read, converted both ways, and trained by."""

import argparse
import copy
import json
import re
from functools import partial

import pytest
import torch
import yaml

from commands import call_command
from foreign_runs import HUGGING_FACE, hugging_face, leaves, write
from programs import run_program
from shardwise.cli.train import read_run
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed import from_deepspeed
from shardwise.interop.foreign_settings import read_accelerate_keys, read_train_keys
from shardwise.interop.foreign_writing import to_accelerate, to_deepspeed
from shardwise.keys import read_keys
from shardwise.train.checks import resolve_batch
from shardwise.train.config import TrainConfig, load_config
from shardwise.train.launch import RankPlace

convert = partial(call_command, "convert")
train = partial(call_command, "train")

ZERO_2 = {"zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 10}}


def write_both(folder, content, **named):
    """Write a DeepSpeed JSON, and accelerate's YAML that names it."""
    write(folder, content)
    block = {"deepspeed_config_file": "ds.json", **named.pop("deepspeed_config", {})}
    content = {"num_processes": 2, "deepspeed_config": block, **named}
    return write(folder, content, "accelerate.yaml")


@pytest.mark.parametrize(
    "content",
    [{}, {"bf16": {}}, {"bf16": {"enabled": "auto"}}, {"fp16": {"enabled": False}}],
)
@pytest.mark.parametrize("named", ["bf16", "BF16"])
def test_the_precision_of_accelerates_file_holds_where_the_json_says_none(tmp_path, content, named):
    path = write_both(tmp_path, {**ZERO_2, **content}, mixed_precision=named)
    keys, report = read_accelerate_keys(path)
    assert (keys["precision"], keys["prefetch_bytes"]) == ("bf16", 20)
    assert report.mapped["mixed_precision"] == "precision"


def test_fp16_of_accelerates_file_brings_the_scale_of_the_json(tmp_path):
    path = write_both(tmp_path, {"bf16": {"enabled": "auto"}}, mixed_precision="fp16")
    keys, _ = read_accelerate_keys(path)
    assert (keys["precision"], keys["loss_scale"]) == ("fp16", 65536.0)
    path = write_both(tmp_path, {"fp16": {"initial_scale_power": 4}}, mixed_precision="fp16")
    keys, report = read_accelerate_keys(path)
    assert (keys["precision"], keys["loss_scale"]) == ("fp16", 16.0)
    assert "fp16.initial_scale_power" in report.mapped


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"fp16": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True}}, "no"),
        ({"bf16": {"enabled": False}}, "bf16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16"),
    ],
)
def test_two_precisions_in_two_files_are_refused(tmp_path, content, named):
    path = write_both(tmp_path, content, mixed_precision=named)
    with pytest.raises(ConfigError, match=r"mixed_precision: it means .* the DeepSpeed file says"):
        read_accelerate_keys(path)


def test_accumulation_of_accelerates_file_fills_the_json(tmp_path):
    content = {**ZERO_2, "gradient_accumulation_steps": "auto", "train_batch_size": 24}
    keys, _ = read_accelerate_keys(write_both(tmp_path, content, gradient_accumulation_steps=3))
    assert (keys["micro_batch"], keys["accumulation"], keys["global_batch"]) == (4, 3, 24)
    path = write_both(tmp_path, {"gradient_accumulation_steps": 4}, gradient_accumulation_steps=3)
    with pytest.raises(
        ConfigError, match="gradient_accumulation_steps: got 4 here and accumulation=3 in"
    ):
        read_accelerate_keys(path)


@pytest.mark.parametrize(
    "beside",
    [
        {"zero_stage": 3},
        {"gradient_accumulation_steps": 4},
        {"gradient_clipping": 0.5},
        {"offload_param_device": "none"},
        {"zero3_save_16bit_model": True},
    ],
)
def test_what_accelerate_refuses_beside_a_json_is_refused(tmp_path, beside):
    path = write_both(tmp_path, ZERO_2, deepspeed_config=beside)
    with pytest.raises(ConfigError, match=f"{next(iter(beside))}: ds.json decides it"):
        read_accelerate_keys(path)


def test_accelerates_mesh_becomes_replicas_and_more_than_data_is_refused(tmp_path):
    path = tmp_path / "accelerate.yaml"
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 4, "tp_size": 1, "cp_size": 1}

    def read(ranks, **others):
        block = {f"parallelism_config_{k}": v for k, v in {**sizes, **others}.items()}
        named = {"fsdp_config": {"fsdp_version": 2}, "num_machines": 2, "num_processes": ranks}
        path.write_text(yaml.safe_dump({**named, "parallelism_config": block}))
        return read_accelerate_keys(path)

    keys, report = read(8)
    assert (keys["dp_replicate"], keys["ranks"]) == (2, 8)
    assert "parallelism_config.parallelism_config_dp_shard_size" in report.mapped
    assert "num_machines" in report.ignored  # the mesh decides the replicas
    with pytest.raises(ConfigError, match="product is num_processes 6, got 8"):
        read(6)
    for name in ("tp_size", "cp_size", "sp_size"):
        with pytest.raises(ConfigError, match=f"parallelism_config_{name}: only data is parallel"):
            read(16, **{name: 2})


FSDP_BLOCK = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_reshard_after_forward": "FALSE"}}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.001}}
FORMS = [
    ("default_config.json", FSDP_BLOCK, "accelerate"),
    ("accelerate.yaml", {"mixed_precision": "no", "num_processes": 2}, "accelerate"),
    ("ds_config.conf", {**ZERO_2, "optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.json", {"optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.conf", {"optimizer": OPTIMIZER}, "deepspeed"),
    ("ds.json", {"zero_optimisation": {}}, "zero_optimization"),
    ("run.json", {"optimizer": "sgd", "lr": 0.001}, "shardwise"),
    ("run.yaml", {"stagee": 3}, "shardwise"),
]


@pytest.mark.parametrize(("name", "content", "form"), FORMS)
def test_a_form_is_told_by_its_keys_not_by_its_name(tmp_path, capsys, name, content, form):
    path = tmp_path / name
    path.write_text(json.dumps(content) if not name.endswith("yaml") else yaml.safe_dump(content))
    target = form if form in ("deepspeed", "accelerate", "shardwise") else "shardwise"
    assert convert([str(path), "--to", target]) == 2
    wanted = f"of the form {target} already" if target == form else f"did you mean '{form}'"
    assert wanted in capsys.readouterr().err


# `shardwise convert`: files that are read can be written again; losses are reported.

OURS = [
    {"stage": 3, "precision": "bf16", "micro_batch": 2, "accumulation": 3, "prefetch_bytes": 4000},
    {"stage": 0, "precision": "fp32", "optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
    {"stage": 2, "precision": "fp16", "loss_scale": 1024.0, "loss_scale_window": 50},
    {"stage": 1, "optimizer": "adam", "optimizer_options": {"amsgrad": True, "eps": 1e-6}},
    {"schedule": "WarmupLR", "schedule_options": {"warmup_num_steps": 7}, "lr": 0.5},
    {"schedule": "WarmupCosineLR", "schedule_options": {"cos_min_ratio": 0.2}, "steps": 30},
    {"steps": 30, "schedule": "WarmupDecayLR", "grad_clip": 0.0, "weight_decay": 0.3},
    {"optimizer": "adagrad", "beta1": 0.9, "global_batch": 16, "micro_batch": 8},
    {"stage": 3, "gather": "int8", "reduce": "int4-a2a"},
]


@pytest.mark.parametrize("given", OURS)
def test_ours_written_for_deepspeed_and_read_again_is_the_same_run(tmp_path, given):
    config = TrainConfig(**{"schedule": "constant", **given})
    content, report = to_deepspeed(config, "run.yaml")
    told = {line.key for line in report.lines}
    assert told == config.model_fields_set
    path = write(tmp_path, content)
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


TO_O = "  offload_optimizer_device: nvme\n  offload_optimizer_nvme_path: /o\n"
TO_P = "  offload_param_device: nvme\n  offload_param_nvme_path: /p\n"
ACCELERATE = [
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
    *(
        (f"deepspeed_config:\n  zero_stage: 3\n{text}", {"offload": offload})
        for text, offload in (
            (TO_O, {"optimizer": "nvme:/o"}),
            (TO_P, {"params": "nvme:/p", "optimizer": "cpu"}),
            (TO_O + TO_P, {"params": "nvme:/p", "optimizer": "nvme:/o"}),
            (TO_O + "  offload_param_device: cpu\n", "nvme:/o"),
        )
    ),
]


@pytest.mark.parametrize(("text", "expected"), ACCELERATE)
def test_accelerates_blocks_become_keys_and_every_key_is_told(tmp_path, text, expected):
    path = write(tmp_path, "num_processes: 4\nmixed_precision: bf16\n" + text, "accelerate.yaml")
    keys, report = read_accelerate_keys(path)
    assert expected.items() <= keys.items()
    assert (keys["ranks"], keys["precision"]) == (4, "bf16")
    hints = [line.text for line in report.lines if line.key.endswith("cls_to_wrap")]
    assert all("leave them out for `shardwise train`" in hint for hint in hints)
    content = yaml.safe_load(path.read_text())
    flat = {
        f"{key}.{inner}" if inner else key
        for key, value in content.items()
        for inner in (value if isinstance(value, dict) else [""])
    }
    assert {line.key for line in report.lines} == flat
    TrainConfig(**keys)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_ours_written_for_accelerate_and_read_again_keeps_its_sharding(tmp_path, stage):
    sharded = {"units": ("Block", "Head"), "activation_checkpointing": True} if stage else {}
    config = TrainConfig(stage=stage, precision="bf16", ranks=4, lr=0.5, **sharded)
    content, report = to_accelerate(config, "run.yaml")
    path = write(tmp_path, content, "accelerate.yaml")
    keys, _ = read_accelerate_keys(path)
    again = TrainConfig(**keys)
    for key in ("stage", "precision", "ranks", "units", "activation_checkpointing"):
        assert getattr(again, key) == getattr(config, key), key
    assert "lr" in report.ignored and {line.key for line in report.lines} == config.model_fields_set


def test_accelerate_itself_takes_what_is_written(tmp_path):
    pytest.importorskip("accelerate", reason="needs accelerate, an extra")
    from accelerate.commands.config.config_args import ClusterConfig

    for stage in (0, 3):
        content, _ = to_accelerate(TrainConfig(stage=stage, ranks=2, units=("Block",)), "run.yaml")
        path = tmp_path / f"{stage}.yaml"
        path.write_text(yaml.safe_dump(content))
        loaded = ClusterConfig.from_yaml_file(str(path))
        assert loaded.num_processes == 2 and loaded.mixed_precision == "no"


def test_accelerates_deepspeed_file_brings_optimizer_and_schedule(tmp_path):
    content = {
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_optimization": {"stage": 2},
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
    }
    named = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 4}
    path = write_both(tmp_path, content, **named)
    keys, report = read_accelerate_keys(path)
    assert keys == {
        **{"stage": 2, "precision": "bf16", "grad_clip": 1.0, "optimizer": "adamw", "lr": 0.5},
        **{"micro_batch": 2, "accumulation": 2, "global_batch": 16, "beta1": 0.9, "beta2": 0.999},
        **{"schedule": "WarmupLR", "schedule_options": {"warmup_num_steps": 5}, "ranks": 4},
    }
    assert report.auto.keys() == {"bf16.enabled", "optimizer.params.weight_decay"}


WRONG = [
    ("distributed_typ: FSDP", "did you mean 'distributed_type'"),
    ("distributed_type: TPUS", "expected one of"),
    ("num_processes: 0", "expected a whole number, 1 to"),
    ("mixed_precision: fp8", "fp8 is not supported"),
    ("fsdp_config: {fsdp_sharding_stratgy: x}", "did you mean 'fsdp_sharding_strategy'"),
    ("fsdp_config: {fsdp_sharding_strategy: FULL_SHRD}", "did you mean 'FULL_SHARD'"),
    ("fsdp_config: {fsdp_offload_params: maybe}", "_params: expected one of TRUE, FALSE"),
    ("fsdp_config: {fsdp_activation_checkpointing: 1}", "fsdp_activation_checkpointing"),
    ("parallelism_config: {parallelism_config_dp_size: 1}", "did you mean"),
    ("deepspeed_config: {zero_stage: 7}", "expected 0, 1, 2 or 3"),
    ("deepspeed_config: {gradient_clipping: lots}", "expected a number of 0 or more"),
    ("deepspeed_config: {zero_stage: 3, offload_param_device: nvme}", r"add \S+_param_nvme_path"),
    (
        "{gradient_accumulation_steps: 8, deepspeed_config: {gradient_accumulation_steps: 4}}",
        "got 4 here and accumulation=8 in another",
    ),
]


@pytest.mark.parametrize(("text", "named"), WRONG)
def test_a_wrong_key_of_an_accelerate_file_is_named_with_the_file(tmp_path, text, named):
    path = write(tmp_path, text, "accelerate.yaml")
    with pytest.raises(ConfigError, match=named) as caught:
        read_accelerate_keys(path)
    assert str(path) in str(caught.value)


def test_the_command_writes_a_file_that_train_reads_and_the_report_beside_it(tmp_path, capsys):
    source, ours, back = (tmp_path / name for name in ("ds.json", "run.yaml", "back.json"))
    content = {
        "train_batch_size": 8,
        "gradient_clipping": 0.5,
        "steps_per_print": 10,
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_optimization": {"stage": 2},
    }
    source.write_text(json.dumps(content))
    assert convert([str(source)]) == 2
    assert "give --ranks" in capsys.readouterr().err
    assert convert([str(source), "--ranks", "2", "-o", str(ours), "--json"]) == 0
    told = json.loads(capsys.readouterr().err)
    assert told["ignored"].keys() == {"steps_per_print"}
    config = load_config(ours, {})
    assert (config.micro_batch, config.optimizer, config.ranks) == (4, "sgd", 2)
    assert convert([str(ours), "--to", "deepspeed", "-o", str(back)]) == 0
    assert "ranks" in capsys.readouterr().err
    written = json.loads(back.read_text())
    assert written["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}
    assert written["gradient_clipping"] == 0.5
    assert convert([str(source), "--to", "accelerate", "--ranks", "2", "--json"]) == 0
    out, err = capsys.readouterr()
    written, told = yaml.safe_load(out), json.loads(err)
    assert written["fsdp_config"]["fsdp_reshard_after_forward"] is False
    assert told["mapped"].keys() == {"ranks", "stage", "precision"}
    assert written["mixed_precision"] == "bf16"
    assert {"optimizer", "grad_clip", "steps_per_print"} <= told["ignored"].keys()
    assert told["mapped"].keys().isdisjoint(told["ignored"])
    assert convert([str(source), "--ranks", "2", "-o", str(ours)]) == 2  # it is there
    assert convert([str(ours)]) == 2
    assert convert([str(source), "--to", "deepspeed"]) == 2
    err = capsys.readouterr().err
    assert "cannot be written" in err and "ours already" in err and "deepspeed already" in err


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}}, "no StepLR"),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "masters in fp32"),
        (
            {"scheduler": {"type": "OneCycle"}},
            "make OneCycleLR or CyclicLR of torch in a loop of your own",
        ),
    ],
)
def test_what_only_a_loop_of_ones_own_can_do_is_refused(tmp_path, content, named):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError, match=named):
        read_train_keys(path, {}, {}, 1)


def test_a_loss_scale_that_is_no_power_of_two_is_written_as_the_nearest():
    content, report = to_deepspeed(TrainConfig(precision="fp16", loss_scale=1000.0), "run.yaml")
    assert content["fp16"]["initial_scale_power"] == 10
    assert "nearest" in report.mapped["loss_scale"]


def test_how_moments_are_kept_is_left_out_of_a_deepspeed_config():
    options = {"moments": "8bit", "block": 64, "eps": 1e-6}
    content, report = to_deepspeed(TrainConfig(optimizer_options=options), "run.yaml")
    assert content["optimizer"]["type"] == "AdamW"
    assert content["optimizer"]["params"].keys() == {"lr", "betas", "weight_decay", "eps"}
    (line,) = (line for line in report.lines if line.key == "optimizer_options")
    assert line.fate == "ignored"


OFFLOADS = [
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
    tmp_path, stage, offload, expected, lost
):
    config = TrainConfig(stage=stage, offload=offload)
    content, report = to_deepspeed(config, "run.yaml")
    written = {k: v for k, v in content["zero_optimization"].items() if k.startswith("offload")}
    for name, block in written.items():
        home = block["nvme_path"] if block["device"] == "nvme" else block["device"]
        assert (home, block.get("ratio")) == (expected[name], {**expected, **block}.get("ratio"))
    assert written.keys() == expected.keys() - {"ratio"}
    assert lost in report.mapped["offload"] and (";" in report.mapped["offload"]) == bool(lost)
    path = write(tmp_path, content)
    keys, _ = read_train_keys(path, {}, {}, None)
    assert lost or keys["offload"] == offload


@pytest.mark.parametrize(("offload", "is_told"), [("cpu", False), ({"optimizer": "nvme:/a"}, True)])
def test_fsdp2_has_all_in_host_memory_or_nothing(offload, is_told):
    content, report = to_accelerate(TrainConfig(stage=3, offload=offload), "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is True
    assert ("no other home" in report.mapped["offload"]) == is_told
    content, _ = to_accelerate(TrainConfig(stage=3), "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is False
    config = TrainConfig(stage=3, offload={"activations": "cpu"})
    content, report = to_accelerate(config, "x.yaml")
    assert content["fsdp_config"]["fsdp_offload_params"] is False
    assert "activations are left out" in report.mapped["offload"]


# Hugging Face's ZeRO-3 JSON, all at "auto": our keys decide, and the report has their sources.


def read(file, flags, yaml_file=None, ranks=2):
    config, report = read_run(
        yaml_file, {**flags, "deepspeed": file}, RankPlace(0, ranks, 0, ranks)
    )
    assert report is not None
    return config, report


FLAGS = {"lr": "1e-4", "warmup_steps": "4", "steps": "20", "precision": "bf16", "micro_batch": "2"}


@pytest.mark.parametrize("schedule", ["WarmupLR", "WarmupDecayLR"])
def test_flags_fill_what_is_auto_and_the_curve_is_that_of_the_same_numbers(tmp_path, schedule):
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


def test_without_flags_defaults_decide_and_every_auto_is_reported(tmp_path):
    file = write(tmp_path, hugging_face("WarmupDecayLR"))
    config, report = read(file, {})
    ours = TrainConfig()
    for name in ("lr", "beta1", "beta2", "weight_decay", "precision", "micro_batch", "grad_clip"):
        assert getattr(config, name) == getattr(ours, name)
    assert config.loss_scale_window == 1000  # for a run that turns fp16 on
    # As Trainer's warmup_steps=0 does in DeepSpeed: a warm-up of 0 is one of 2.
    assert [config.learning_rate(step) for step in (1, 2, 3)] == [0.0, 0.0, ours.lr]
    told = report.auto | report.ignored
    at_auto = {k for k, v in leaves(hugging_face("WarmupDecayLR")).items() if v == "auto"}
    assert at_auto <= told.keys()
    assert not [text for text in report.auto.values() if "from_deepspeed" in text or "()" in text]


def test_a_yaml_fills_what_is_auto_and_a_flag_wins_over_numbers_too(tmp_path):
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
    assert config.curve.given == {"warmup_num_steps": 5, "warmup_type": "linear"}
    assert config.optimizer_options == {"eps": 1e-5, "amsgrad": True}
    lines = {line.key: line for line in report.lines}
    assert lines["optimizer.params.lr"].value == 0.5  # as the file has it
    assert report.ignored["optimizer.params.lr"] == "lr: 0.25, from --lr"
    size = lines["train_micro_batch_size_per_gpu"]
    assert (size.value, size.text) == (3, "micro_batch: 6, from --micro-batch")


def test_a_flag_replaces_a_schedule_or_an_optimizer_with_its_options(tmp_path):
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


def test_options_of_two_files_contradict_each_other_one_by_one(tmp_path):
    content = hugging_face()
    content["optimizer"]["params"] |= {"eps": 1e-6, "amsgrad": True}
    file = write(tmp_path, content)
    own = write(tmp_path, {"optimizer_options": {"foreach": False, "eps": 1e-6}}, "run.yaml")
    options = read(file, {}, own)[0].optimizer_options
    assert options == {"eps": 1e-6, "amsgrad": True, "foreach": False}
    own = write(tmp_path, {"optimizer_options": {"eps": 1e-3}}, "run.yaml")
    with pytest.raises(ConfigError, match=r"says \{'eps': 0.001\}, .* says \{'eps': 1e-06\}"):
        read(file, {}, own)


def test_a_number_that_nothing_else_says_is_asked_for_with_its_flag(tmp_path):
    params = {"total_num_steps": 9, "warmup_num_steps": 3, "cos_min_ratio": "auto"}
    file = write(tmp_path, {"scheduler": {"type": "WarmupCosineLR", "params": params}})
    with pytest.raises(ConfigError, match=r"--schedule-options '\{cos_min_ratio: NUMBER\}'"):
        read(file, {})
    config, _ = read(file, {"schedule_options": "{cos_min_ratio: 0.01}"})
    assert config.schedule_options == {**params, "cos_min_ratio": 0.01}


def test_convert_writes_a_yaml_that_flags_still_fill(tmp_path, capsys):
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


def test_the_offload_of_the_example_is_that_of_a_run_on_every_way(tmp_path, capsys):
    assert from_deepspeed(HUGGING_FACE).shard == {"stage": 3, "offload": "cpu"}
    moments = {"device": "nvme", "nvme_path": "/x", "ratio": 0.25}
    content = copy.deepcopy(HUGGING_FACE)
    content["zero_optimization"] |= {"offload_param": {}, "offload_optimizer": moments}
    file = write(tmp_path, content)
    expected = {"optimizer": "nvme:/x", "fraction": 0.25}
    assert read(file, FLAGS)[0].offload == expected
    assert convert([str(file)]) == 0
    keys = yaml.safe_load(capsys.readouterr().out)
    assert keys["offload"] == expected
    assert load_config(write(tmp_path, keys, "run.yaml"), {}).offload == expected
    config, report = read(file, {**FLAGS, "offload": "cpu"})
    assert config.offload == "cpu"
    name = "zero_optimization.offload_optimizer.device"
    assert report.ignored[name] == 'offload: "cpu", from --offload'


# `shardwise train --deepspeed` on two ranks: the losses of the same run from our own YAML.

NVME = {"device": "nvme"}
BOTH = {
    **{"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "offload_param": {**NVME, "nvme_path": "/x"},
}
RUN = {
    **{"dim": 32, "layers": 2, "heads": 2, "seq": 32, "steps": 6, "sample_tokens": 0},
    **{"eval_windows": 0, "data": argparse.__file__, "ranks": 2},
}
DEEPSPEED = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "steps_per_print": 5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.03},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 3}
        | {"warmup_type": "linear"},
    },
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
OURS = {
    **{"stage": 2, "precision": "fp32", "micro_batch": 2, "accumulation": 2, "global_batch": 8},
    **{"grad_clip": 0.5, "lr": 0.01, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.03},
    "optimizer_options": {"eps": 1e-6},
    "schedule": "WarmupLR",
    "schedule_options": {
        **{"warmup_min_lr": 1e-3, "warmup_max_lr": 2e-2, "warmup_num_steps": 3},
        "warmup_type": "linear",
    },
}


def run(*arguments, num_ranks=None):
    done = run_program("shardwise", "train", *arguments, num_ranks=num_ranks, launches=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["loss"], line["lr"]) for line in map(json.loads, lines)]


@pytest.mark.slow
def test_two_ranks_train_with_the_losses_of_the_same_settings_in_our_yaml(tmp_path):
    file = write(tmp_path, DEEPSPEED)
    shape = write(tmp_path, RUN, "shape.yaml")
    whole = write(tmp_path, {**RUN, **OURS}, "whole.yaml")
    converted = tmp_path / "converted.yaml"
    assert convert([str(file), "--ranks", "2", "-o", str(converted)]) == 0
    assert yaml.safe_load(converted.read_text()) == {**OURS, "optimizer": "adamw", "ranks": 2}
    out = run(shape, "--deepspeed", file, "--ranks", 2, "--output", tmp_path / "theirs")
    run(whole, "--output", tmp_path / "ours", num_ranks=2)
    theirs, ours = metrics(tmp_path / "theirs"), metrics(tmp_path / "ours")
    assert theirs == ours and len(theirs) == 6
    rates = [0.001, 0.001, 0.001 + 0.019 / 3, 0.001 + 0.019 * 2 / 3]
    assert [lr for _, lr in theirs[:4]] == pytest.approx(rates)
    assert len(re.findall("steps_per_print", out)) == 1  # the report, once
    decided = [
        yaml.safe_load((tmp_path / n / "config.yaml").read_text()) for n in ("theirs", "ours")
    ]
    assert {**decided[0], "output": None} == {**decided[1], "output": None}


@pytest.mark.parametrize(
    ("yaml_keys", "content", "flags", "named"),
    [
        ({"stage": 3}, {}, [], r"stage: \S+ says 3, \S+ says 2; change one, or give --stage"),
        ({}, {"train_micro_batch_size_per_gpu": 3}, [], r"3 x 2 x 1 = 6, got 8"),
        ({}, {}, ["--micro-batch", "3"], r"3 x 2 x 1 = 6, got 8"),
        ({}, {"zero_optimization": {"stge": 1}}, [], "did you mean 'stage'"),
        ({}, {"zero_optimization": {"stage": 3, "offload_param": NVME}}, [], "add .*_param.nvme_p"),
        (
            {"offload": {"optimizer": "cpu"}},
            {"zero_optimization": BOTH},
            [],
            r"offload: \S+ says .*:/x",
        ),
        ({}, {}, ["--micro-batch", "many"], "micro"),
    ],
)
def test_contradictions_are_named_before_anything_starts(
    tmp_path, capsys, yaml_keys, content, flags, named
):
    file = write(tmp_path, {**DEEPSPEED, **content})
    shape = write(tmp_path, {**RUN, "ranks": 1, **yaml_keys}, "shape.yaml")
    output = tmp_path / "run"
    code = train([str(shape), "--deepspeed", str(file), *flags, "--output", str(output)])
    assert code == 2
    assert re.search(named, capsys.readouterr().err)
    assert not output.exists()


def test_what_the_deepspeed_file_does_not_say_is_the_yamls_to_say(tmp_path):
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 0.5}}, "bf16": None}
    file = write(tmp_path, content)
    ours = {"schedule": "cosine", "stage": 1, "precision": "bf16", "grad_clip": 0.1, "beta2": 0.9}
    both = write(tmp_path, ours, "run.yaml")
    keys, _ = read_train_keys(file, read_keys(both), {}, 1)
    config = load_config(both, {}, (file, keys))
    assert {name: getattr(config, name) for name in ours} == ours
    assert (config.lr, config.weight_decay, config.beta1) == (0.5, 0.0, 0.9)
    silent = {"zero_optimization": {"overlap_comm": True}, "fp16": {"enabled": False}}
    file = write(tmp_path, {**content, **silent})
    keys, _ = read_train_keys(file, read_keys(both), {}, 1)
    config = load_config(both, {}, (file, keys))
    assert {name: getattr(config, name) for name in ours} == ours
    file = write(tmp_path, content)
    alone, _ = read_train_keys(file, {}, {}, 1)
    assert (alone["schedule"], alone["stage"], alone["grad_clip"]) == ("constant", 0, 1.0)
