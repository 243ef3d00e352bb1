"""DeepSpeed's configs: the fate of each key, what a loop gets of them, and the errors."""

import copy
import inspect
import json
import pickle
import re
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

from foreign_runs import hugging_face, leaves, nested, write
from programs import run_as_in_the_gallery
from ranks import on_ranks
from shardwise import Offload, Precision, shard
from shardwise.config import PRECISIONS, Schedule
from shardwise.errors import ConfigError
from shardwise.homes import resolve_offload
from shardwise.interop.deepspeed.settings import from_deepspeed
from shardwise.interop.foreign_keys import (
    KEYS,
    NOT_WRITTEN,
    RATES,
    REFUSED_OPTIMIZERS,
    TORCH_SCHEDULERS,
)
from shardwise.interop.foreign_settings import read_train_keys
from shardwise.interop.foreign_writing import to_deepspeed
from shardwise.train.config import TrainConfig
from shardwise.train.curves import CURVES
from shardwise.train.optimizers import OPTIMIZERS, optimizer_class

# `from_deepspeed`: the fate of each key, and the errors for wrong ones.
WHOLE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "train_batch_size": 256,
    "gradient_clipping": 0.7,
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 3e-7},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "stage3_param_persistence_threshold": 1e5,
        "sub_group_size": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": {"device": "none", "pin_memory": True},
    },
}


def test_a_config_becomes_the_arguments_of_a_loop():
    settings = from_deepspeed(WHOLE, world_size=8)
    assert settings.shard == {"stage": 3, "schedule": Schedule(10**8), "precision": "bf16"}
    assert set(settings.shard) <= set(inspect.signature(shard).parameters)
    assert [*settings.batch.values()] == [4, 8, 256]
    assert (settings.micro_batch, settings.accumulation, settings.global_batch) == (4, 8, 256)
    assert settings.gradient_clipping == 0.7
    model = torch.nn.Linear(2, 2)
    optimizer = settings.optimizer(model.parameters())
    assert type(optimizer) is torch.optim.AdamW
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"]) == (3e-5, (0.8, 0.99), 1e-7)
    assert group["weight_decay"] == 3e-7
    assert settings.scheduler(optimizer).get_last_lr() == [0.0]
    assert not settings.scaler("cpu").is_enabled()
    with pytest.raises(FrozenInstanceError):
        settings.gradient_clipping = 1.0


@pytest.mark.parametrize(
    ("key", "coded"),
    [
        ("zero_quantized_weights", {"gather": "int8"}),
        ("zero_quantized_gradients", {"reduce": "int4-a2a"}),
    ],
)
def test_what_deepspeed_quantizes_is_encoded_at_the_stage_where_it_does(key, coded):
    for stage, is_on in ((3, True), (2, True), (3, False)):
        block = {key: is_on, "stage": stage}
        settings = from_deepspeed({"zero_optimization": block, "bf16": {"enabled": True}})
        precision = settings.shard["precision"]
        if stage == 3 and is_on:
            assert precision == replace(PRECISIONS["bf16"], **coded)
            assert settings.shard.keys() == {"stage", "precision"}
        else:
            assert precision == "bf16"
            assert (f"zero_optimization.{key}" in settings.report.ignored) == is_on


def test_hpz_becomes_neighbours_that_backward_gathers_from():
    for size, stage, expected in ((4, 3, 4), (1, 3, None), (4, 2, None)):
        block = {"stage": stage, "zero_hpz_partition_size": size}
        settings = from_deepspeed({"zero_optimization": block})
        schedule = settings.shard.get("schedule")
        assert (schedule and schedule.nearby_ranks) == expected
        assert ("zero_optimization.zero_hpz_partition_size" in settings.report.ignored) == (
            stage == 2
        )
    written, _ = to_deepspeed(TrainConfig(nearby_ranks=4), "run.yaml")
    assert written["zero_optimization"]["zero_hpz_partition_size"] == 4


def test_the_report_has_every_key_of_the_file_once_with_its_fate(tmp_path):
    path = write(tmp_path, WHOLE)
    settings = from_deepspeed(str(path), world_size=8)
    report = settings.report
    assert sorted(line.key for line in report.lines) == sorted(leaves(WHOLE))
    assert all(line.text for line in report.lines)
    assert str(path) in str(report) and str(settings) == str(report)
    for key in leaves(WHOLE):
        assert f"{key} = " in str(report)
    told = report.as_json()
    assert json.loads(json.dumps(told)) == told
    assert told["mapped"] == report.mapped and told["ignored"] == report.ignored
    assert "zero_optimization.stage" in report.mapped
    assert "1 MiB" in report.ignored["zero_optimization.reduce_bucket_size"]


PLAIN = hugging_face("WarmupDecayLR")


def test_auto_is_left_to_the_caller_and_says_what_fills_it():
    open_stage = hugging_face("WarmupDecayLR")
    open_stage["zero_optimization"]["stage"] = "auto"
    assert from_deepspeed(open_stage).shard == {}  # shard(model, stage=2, **settings.shard) works
    filled = from_deepspeed(open_stage, auto={"zero_optimization.stage": 2})
    assert filled.shard == {"stage": 2}
    with pytest.raises(ConfigError, match="or with world_size="):
        _ = from_deepspeed(PLAIN, micro_batch=2, accumulation=1).global_batch
    settings = from_deepspeed(PLAIN, world_size=2)
    assert settings.shard == {"stage": 3}
    assert settings.gradient_clipping == 1.0
    assert not settings.report.of("default")
    assert settings.batch["micro_batch"] is settings.batch["global_batch"] is None
    with pytest.raises(ConfigError, match=r"micro_batch is not decided: give .*\)$"):
        _ = settings.micro_batch
    auto = settings.report.auto
    assert {"train_batch_size", "bf16.enabled", "gradient_clipping"} <= auto.keys()
    assert all("auto=" in text or "()" in text or "gathered" in text for text in auto.values())
    params = [torch.nn.Parameter(torch.zeros(1))]
    with pytest.raises(ConfigError, match=r'lr is "auto"; give lr='):
        settings.optimizer(params)
    optimizer = settings.optimizer(params, lr=0.5)
    assert optimizer.param_groups[0]["weight_decay"] == 0.0  # of DeepSpeed, not of torch
    with pytest.raises(ConfigError, match="total_num_steps is not given"):
        settings.scheduler(optimizer)
    scheduler = settings.scheduler(optimizer, total_num_steps=10, warmup_num_steps=2)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert scheduler.get_last_lr() == [0.5]  # warmup_max_lr is the optimizer's


def test_arguments_fill_auto_and_nothing_else():
    fills = {"bf16.enabled": True, "optimizer.params.lr": 0.25, "gradient_clipping": 0}
    settings = from_deepspeed(PLAIN, world_size=2, micro_batch=3, auto=fills)
    assert settings.shard["precision"] == "bf16"
    assert [*settings.batch.values()] == [3, 1, 6]
    assert settings.gradient_clipping == 0
    group = settings.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert group["lr"] == 0.25
    with pytest.raises(ConfigError, match="steps_per_print: it is given in auto="):
        from_deepspeed(PLAIN, auto={"steps_per_print": 5})
    with pytest.raises(ConfigError, match="micro_batch: expected a whole number, 1 or more"):
        from_deepspeed({}, micro_batch=0)
    with pytest.raises(ConfigError, match="got 4 here and micro_batch=3 in another place"):
        from_deepspeed(WHOLE, micro_batch=3)


def test_sizes_that_need_the_number_of_ranks_wait_for_it():
    batch = from_deepspeed({"train_batch_size": 12, "gradient_accumulation_steps": 2}).batch
    assert [*batch.values()] == [None, 2, 12]
    with pytest.raises(ConfigError, match=r"4 x 8 x 4 = 128, got 256"):
        from_deepspeed(WHOLE, world_size=4)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"type": "Adam"}, torch.optim.AdamW),
        ({"type": "adam", "params": {"adam_w_mode": False}}, torch.optim.Adam),
        ({"type": "AdamW", "params": {"adam_w_mode": False}}, torch.optim.AdamW),
        ({"type": "Adam", "params": {"torch_adam": True, "amsgrad": True}}, torch.optim.AdamW),
        ({"type": "Adagrad", "params": {"lr_decay": 0.1}}, torch.optim.Adagrad),
        ({"type": "SGD", "params": {"momentum": 0.9, "nesterov": True}}, torch.optim.SGD),
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, torch.optim.RMSprop),
    ],
)
def test_an_optimizer_is_torchs_equal(params, expected):
    settings = from_deepspeed({"optimizer": params})
    optimizer = settings.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is expected
    own = {"adam_w_mode", "torch_adam"}
    for key, value in params.get("params", {}).items():
        assert key in own or optimizer.param_groups[0][key] == value
    decay = 0.01 if params.get("params", {}).get("torch_adam") else 0.0
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_the_tables_of_optimizers_and_schedulers_are_those_of_torch():
    for name, (title, arguments) in OPTIMIZERS.items():
        made = inspect.signature(optimizer_class(name).__init__).parameters
        own = {"decoupled_weight_decay"} if name == "adam" else set()
        assert set(arguments) == set(made) - {"self", "params"} - own, title
        assert made["lr"].default == RATES.get(name, 1e-3), title
        assert name not in REFUSED_OPTIMIZERS
    for title, options in TORCH_SCHEDULERS.items():
        made = inspect.signature(getattr(torch.optim.lr_scheduler, title)).parameters
        assert set(options) == set(made) - {"optimizer", "scale_fn"}, title  # which is a function
    settings = from_deepspeed({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert type(settings.scheduler(optimizer)) is torch.optim.lr_scheduler.StepLR


def test_fp16_becomes_a_scaler_of_torch_and_the_differences_are_named():
    block = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2}
    settings = from_deepspeed({"fp16": {**block, "min_loss_scale": 1}})
    assert settings.shard["precision"] == "fp16"
    scaler = settings.scaler("cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (4096.0, 500)
    assert {"fp16.hysteresis", "fp16.min_loss_scale"} <= settings.report.ignored.keys()
    static = from_deepspeed({"fp16": {"loss_scale": 128, "enabled": True, "loss_scale_window": 5}})
    scaler = static.scaler("cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (128.0, 2**31 - 1)
    off = from_deepspeed({"fp16": {"loss_scale": 128, "enabled": False}})
    assert off.shard["precision"] == "fp32" and not off.scaler("cpu").is_enabled()


def test_bf16_masters_are_a_precision_of_their_own():
    block = {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True, "enabled": True}
    settings = from_deepspeed({"bfloat16": block, "zero_optimization": {"stage": 2}})
    bf16 = torch.bfloat16
    assert settings.shard == {"stage": 2, "precision": Precision(bf16, bf16, bf16)}


def zero(**keys):
    return {"zero_optimization": {"stage": 3, **keys}}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"zero_optimisation": {}}, "did you mean 'zero_optimization'"),
        ({"train_micro_batch_size": 1}, "did you mean 'train_micro_batch_size_per_gpu'"),
        (zero(stge=2), r"'zero_optimization\.stge'; did you mean 'stage'"),
        (zero(offload_param={"devic": "cpu"}), "did you mean 'device'"),
        ({"fp16": {"enable": True}}, r"'fp16\.enable'; did you mean 'enabled'"),
        ({"bf16": {"enabled": "yes"}}, r"bf16\.enabled: expected true or false, got 'yes'"),
        ({"activation_checkpointing": {"partition": True}}, "mean 'partition_activations'"),
        (zero(stage=4), "stage: expected 0, 1, 2 or 3, got 4"),
        (zero(stage=True), "stage: expected 0, 1, 2 or 3, got True"),
        (zero(overlap_comm="yes"), "overlap_comm: expected true or false"),
        (zero(reduce_bucket_size="5e8"), "reduce_bucket_size: expected a whole number"),
        (zero(reduce_bucket_size=0.9), "expected a whole number, 0 or more, got 0.9"),
        (zero(prefetch_bucket_size=-1), "prefetch_bucket_size: expected a whole number"),
        (zero(prefetch_bucket_size=1, stage3_prefetch_bucket_size=2), "sets the same"),
        (zero(cpu_offload=True, offload_optimizer={}), "offload_optimizer sets the same"),
        (zero(offload_param={"device": "nvme"}), r"needs a folder; add .*offload_param\.nvme_path"),
        (zero(offload_optimizer={"device": "nvme", "nvme_path": None}), "nvme needs a folder"),
        (zero(offload_optimizer={"device": "nvme", "nvme_path": "/a,/b"}), "without a comma"),
        (zero(offload_optimizer={"device": "nvme", "nvme_path": 3}), "nvme_path: expected a word"),
        (zero(offload_optimizer={"device": "cpu", "ratio": 7}), "ratio: expected 0 to 1, got 7"),
        (zero(offload_param={"device": "gpu"}), "expected one of none, cpu, nvme, got 'gpu'"),
        (zero(zenflow={"topk_ratio": 0.1}), "approximates the step"),
        ({"zero_optimization": 3}, "expected a block of keys, got 3"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 is on as well"),
        ({"bf16": {}, "bfloat16": {}}, "old name of bf16"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "needs bf16_master"),
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "masters are fp32"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "expected a number of 0 or more"),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, "1 or more"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number of 0 or more"),
        ({"gradient_clipping": True}, "gradient_clipping: expected a number"),
        ({"train_batch_size": "many"}, "train_batch_size: expected a whole number"),
        ({"train_batch_size": 0}, "1 to .*, got 0"),
        ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
        ({"sequence_parallel_size": 2}, "only data is parallel"),
        ({"tensor_parallel": {"autotp_size": 4}}, "only data is parallel"),
        ({"torch_autocast": {"enabled": True}}, "enter torch.autocast"),
        ({"data_efficiency": {"enabled": True}}, "sampling is the loader's"),
        ({"amp": {"enabled": False}}, "use bf16 or fp16"),
        ({"sparse_gradients": False}, "newer DeepSpeed drops it"),
        ({"optimizer": {"type": "AdmW"}}, "did you mean 'AdamW'"),
        ({"optimizer": {"params": {"lr": 1}}}, r"optimizer\.type: expected a name"),
        ({"optimizer": {"type": "AdamW", "params": {"learning_rate": 1}}}, "unknown argument"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, "did you mean 'betas'"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "expected two numbers"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-4"}}}, "lr: expected a number"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "always correct"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": True}}}, "lr: expected a number"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": 1}}}, "expected true or false"),
        ({"optimizer": "AdamW"}, "expected a block of keys"),
        ({"scheduler": {"type": "WarmUpLR"}}, "did you mean 'WarmupLR'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}}, "num_steps'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "cosine"}}}, "'linear'"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": -1}}}, "0 or more"),
    ],
)
def test_what_is_wrong_is_refused_by_name(content, named):
    with pytest.raises(ConfigError, match=named) as caught:
        from_deepspeed(content, world_size=1)
    assert str(caught.value).startswith("config: ")


@pytest.mark.parametrize("kind", sorted(REFUSED_OPTIMIZERS))
def test_an_optimizer_that_cannot_step_on_shards_is_refused_with_the_reason(kind):
    with pytest.raises(ConfigError, match=r"optimizer\.type: ") as caught:
        from_deepspeed({"optimizer": {"type": kind, "params": {}}})
    assert REFUSED_OPTIMIZERS[kind] in str(caught.value)


def test_a_key_that_stands_there_twice_is_refused_and_a_missing_file_too(tmp_path):
    path = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        from_deepspeed(path)
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    with pytest.raises(ConfigError, match="'stage' is given twice") as caught:
        from_deepspeed(path)
    assert str(path) in str(caught.value)
    for text, named in (("{", "expected JSON"), ("[1]", "expected an object")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            from_deepspeed(path)


def test_integral_floats_are_whole_numbers_and_null_is_as_if_it_were_not_there():
    settings = from_deepspeed(
        {"train_micro_batch_size_per_gpu": 2.0, **zero(prefetch_bucket_size=1e3, stage="2")}
        | {"scheduler": None, "fp16": None, "communication_data_type": None},
        world_size=3,
    )
    assert settings.shard == {"stage": 2, "schedule": Schedule(4000), "precision": "fp32"}
    assert settings.global_batch == 6
    assert settings.report.ignored["scheduler"].startswith("null")
    assert from_deepspeed({"zero_optimization": True}).shard["stage"] == 1


def test_what_is_not_in_the_file_and_still_counts_is_told():
    settings = from_deepspeed({"_comment": "for the big machine"})
    assert settings.report.ignored == {"_comment": "a comment"}
    assert settings.report.of("default").keys() == {"zero_optimization", "gradient_clipping"}
    assert settings.gradient_clipping == 1.0 and settings.shard["stage"] == 0
    with pytest.raises(ConfigError, match="it has no optimizer"):
        settings.optimizer([])
    with pytest.raises(ConfigError, match="it has no scheduler"):
        settings.scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_every_key_of_the_tables_has_a_reason_or_a_reader():
    """A key without a reason must be taken: else the walk would have no handler for it."""
    for section in KEYS:
        if section.startswith("accelerate") or section.endswith(".params"):
            continue
        prefix = "" if section == "top" else f"{section}."
        for name in KEYS[section]:
            for value in (1, {}, "auto"):
                try:
                    told = from_deepspeed(nested(prefix + name, value)).report
                except ConfigError as error:
                    assert "unknown key" not in str(error) and prefix + name in str(error)
                else:
                    assert any(line.key == prefix + name for line in told.lines), name


# Settings of a DeepSpeed config as values: copied, checked again, and refused in our words.
AUTO = {"fp16": {"enabled": "auto", "initial_scale_power": 8}, "bf16": {"enabled": "auto"}}


def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


def test_a_scaler_waits_until_the_precision_is_decided():
    undecided = from_deepspeed(AUTO)
    with pytest.raises(ConfigError, match=r'auto=\{"fp16.enabled": True\}'):
        undecided.scaler("cpu")
    assert '{"fp16.enabled": True}' in undecided.report.auto["fp16.enabled"]
    decided = from_deepspeed(AUTO, auto={"fp16.enabled": True})
    assert decided.shard["precision"] == "fp16"
    assert decided.scaler("cpu").get_scale() == 256.0
    assert decided.scaler().is_enabled()  # the device is that of the accelerator
    assert not from_deepspeed(AUTO, auto={"bf16.enabled": True}).scaler("cpu").is_enabled()


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_settings_still_misses_what_is_auto(again):
    params = {"total_num_steps": "auto", "warmup_num_steps": 2}
    settings = from_deepspeed({"scheduler": {"type": "WarmupDecayLR", "params": params}})
    copied = again(settings)
    assert copied == settings
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    with pytest.raises(ConfigError, match="total_num_steps is not given"):
        copied.scheduler(optimizer)
    copied.scheduler(optimizer, total_num_steps=10)


SGD = {"optimizer": {"type": "SGD"}}
WARMS_UP = {"scheduler": {"type": "WarmupLR"}}


def scheduler_of(params, **overrides):
    optimizer = torch.optim.SGD(parameters(), lr=0.5)
    block = {"type": "StepLR", "params": params}
    from_deepspeed({"scheduler": block}).scheduler(optimizer, **overrides)


def optimizer_of(params, **overrides):
    from_deepspeed({"optimizer": {"type": "AdamW", "params": params}}).optimizer(
        parameters(), **overrides
    )


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: scheduler_of({"step_sze": 3}), "unknown option 'step_sze' .* mean 'step_size'"),
        (lambda: scheduler_of({"step_size": 3}, gama=0.1), "'gama' of StepLR; .* mean 'gamma'"),
        (lambda: scheduler_of({}), "StepLR refuses its arguments: .*step_size"),
        (lambda: optimizer_of({"lr": -1}), "AdamW refuses its arguments: Invalid learning rate"),
        (lambda: optimizer_of({"lr": 0.1}, wieght_decay=1), "did you mean 'weight_decay'"),
        (lambda: from_deepspeed({}, world_size=0), "world_size: expected a whole number, 1 or"),
        (lambda: from_deepspeed({}, world_size="2"), "world_size: expected .* got '2'"),
        (lambda: from_deepspeed({}, auto="lr"), "auto: expected a dict of full names"),
        (lambda: from_deepspeed(SGD).optimizer(torch.nn.Linear(1, 1)), "got a Linear; give .param"),
        (
            lambda: from_deepspeed(WARMS_UP).scheduler("x"),
            "expected an optimizer of torch, got 'x'",
        ),
        (lambda: from_deepspeed(None), "expected a dict, or the path .* got None"),
        (lambda: from_deepspeed([1]), r"expected a dict, or the path .* got \[1\]"),
    ],
)
def test_a_wrong_value_is_told_as_ours(build, named):
    with pytest.raises(ConfigError, match=named):
        build()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"zero_optimization": {"overlap_comm": True}, "gradient_clipping": "auto"}, set()),
        ({"zero_optimization": True}, {"stage"}),
        ({"zero_optimization": {"stage": 0}}, {"stage"}),
        ({"fp16": {"loss_scale": 0}, "bf16": {}, "scheduler": {}}, set()),
        ({"fp16": {"loss_scale": 64}}, {"loss_scale", "loss_scale_window"}),
        ({"fp16": {"enabled": True, "loss_scale_window": 9}}, {"precision", "loss_scale_window"}),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, {"lr", "optimizer"}),
    ],
)
def test_a_file_wins_over_another_where_its_own_key_has_a_value(tmp_path, content, said):
    path = write(tmp_path, content)
    known = dict.fromkeys(TrainConfig.model_fields, "of the other file") | {"precision": "fp16"}
    keys, _ = read_train_keys(path, known, {}, None)
    assert keys.keys() & known.keys() == said


def test_the_table_names_keys_of_a_run_and_known_kinds_and_fates():
    kinds = {
        "any",
        "flag",
        "integer",
        "count",
        "number",
        "word",
        "block",
        "stage",
        "names",
        "switch",
    }
    for section, rows in KEYS.items():
        for name, row in rows.items():
            where = f"{section}: {name}"
            assert row.kind in kinds, where
            assert {fate for fate, _ in row.answers.values()} <= {"mapped", "ignored", "refused"}
            assert set(row.ours) <= {*TrainConfig.model_fields, "dp_shard"}, where
    for library, reasons in NOT_WRITTEN.items():
        assert reasons.keys() <= TrainConfig.model_fields.keys(), library


# DeepSpeed's offload blocks: where a run of the same file keeps state, and the report.
def on(device, **others):
    return {"device": device, **({"nvme_path": "/fast"} if device == "nvme" else {}), **others}


CPU, FILES = on("cpu"), on("nvme", pin_memory=True)
OFFLOADS = [
    ({"offload_optimizer": CPU, "offload_param": CPU}, "cpu"),
    ({"offload_optimizer": CPU, "offload_param": CPU, "stage": 1}, "cpu"),
    ({"offload_optimizer": CPU, "stage": 2}, "cpu"),
    ({"offload_optimizer": CPU}, Offload(optimizer="cpu")),
    ({"offload_optimizer": CPU, "stage": "auto"}, Offload(optimizer="cpu")),
    ({"offload_optimizer": FILES}, Offload(optimizer="nvme:/fast")),
    ({"offload_optimizer": FILES, "stage": 1}, "nvme:/fast"),
    ({"offload_optimizer": FILES, "offload_param": CPU}, "nvme:/fast"),
    ({"offload_optimizer": CPU, "offload_param": FILES}, Offload("nvme:/fast", None, "cpu")),
    (
        {"offload_optimizer": FILES, "offload_param": on("nvme", nvme_path="/a")},
        Offload("nvme:/a", None, "nvme:/fast"),
    ),
    ({"offload_param": CPU}, "cpu"),
    ({"offload_param": FILES}, Offload("nvme:/fast", None, "cpu")),
    ({"offload_param": FILES, "stage": 2}, None),
    ({"offload_param": {"device": "nvme"}, "stage": 2}, None),
    ({"offload_optimizer": on("cpu", ratio=0.3)}, Offload(optimizer="cpu", fraction=0.3)),
    (
        {"offload_optimizer": on("cpu", ratio=0.3), "offload_param": CPU},
        Offload("cpu", None, "cpu", 0.3),
    ),
    ({"offload_optimizer": on("none", ratio=0.3, nvme_path="/fast"), "offload_param": CPU}, "cpu"),
    ({"offload_optimizer": on("none"), "offload_param": on("none")}, None),
    ({"cpu_offload": True, "stage": 2}, "cpu"),
    ({"cpu_offload": True, "cpu_offload_param": True}, "cpu"),
    ({"cpu_offload": False}, None),
]


@pytest.mark.parametrize(("block", "expected"), OFFLOADS)
def test_homes_of_state_become_an_offload_of_shard_and_every_key_is_told(block, expected):
    for ordered in (
        zero(**block),
        {"zero_optimization": {**block, "stage": block.get("stage", 3)}},
    ):
        settings = from_deepspeed(ordered)
        assert settings.shard.get("offload") == expected
        told = [line.key for line in settings.report.lines if line.fate != "default"]
        assert sorted(told) == sorted(leaves(ordered))
    resolve_offload(settings.shard.get("offload"))


def test_the_report_says_where_state_rests_that_the_file_would_have_elsewhere():
    report = from_deepspeed(zero(offload_param=on("nvme"), offload_optimizer=on("none"))).report
    name = "zero_optimization.offload_param.device"
    assert report.mapped[name].startswith(
        "shard(offload=Offload(params='nvme:/fast', optimizer='cpu')); the optimizer is in host"
    )
    other = "zero_optimization.offload_optimizer.device"
    assert "steps where its parameters rest" in report.ignored[other]
    report = from_deepspeed(zero(offload_param=on("cpu"), stage=2)).report
    assert "stay on the device at stage 2" in report.ignored[name]
    report = from_deepspeed(zero(offload_optimizer=on("none", ratio=0.3, nvme_path="/x"))).report
    assert report.ignored.keys() == {
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_optimizer.nvme_path",
    }
    block = on("nvme", ratio=0.5)
    report = from_deepspeed(zero(offload_optimizer=block)).report
    assert "fraction=0.5" in report.mapped["zero_optimization.offload_optimizer.ratio"]
    assert "Offload(optimizer='nvme:/fast', fraction=0.5)" in report.mapped[other]


@on_ranks(1)
def test_a_run_whose_file_says_nvme_has_the_bits_of_one_whose_state_stays(tmp_path):
    """Two steps of a model whose state lies in files are those of one on the device."""
    folder = str(tmp_path)
    files = {"device": "nvme", "nvme_path": folder}
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}
    found = []
    for block in ({}, {"offload_optimizer": {**files, "ratio": 0.5}, "offload_param": files}):
        settings = from_deepspeed({**content, **zero(**block)})
        torch.manual_seed(0)
        model = shard(
            torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), **settings.shard
        )
        optimizer = settings.optimizer(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(model(torch.ones(2, 4)))
    assert torch.equal(*found)


# The page about DeepSpeed configs: its tables are those of the code; its example runs.
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "deepspeed.md").read_text()
TABLES = {
    f"`{section.rpartition('.')[2]}`": KEYS[section]
    for section in KEYS
    if not section.startswith(("top", "accelerate", "optimizer", "scheduler"))
} | {"Top level": KEYS["top"]}


@pytest.mark.parametrize("title", TABLES)
def test_a_table_of_the_page_has_every_key_and_the_reason_of_the_code(title):
    table = TABLES[title]
    section = PAGE.split(f"### {title}\n")[1].split("\n### ")[0]
    rows = re.findall(r"^\| (`.*?`) \| (.*) \|$", section, re.MULTILINE)
    told = {name: text for names, text in rows for name in re.findall(r"`(\w+)`", names)}
    second_names = {
        n for n in table if n.startswith("stage3_") and n.removeprefix("stage3_") in table
    }
    assert set(told) == set(table) - second_names
    assert {n: t for n, t in told.items() if table[n].run} == {
        n: key.run for n, key in table.items() if key.run and n not in second_names
    }


def test_the_page_names_every_curve_and_optimizer():
    assert all(name in PAGE for name in CURVES)
    assert all(title in PAGE for title, _ in OPTIMIZERS.values())
    assert {"muon", "lamb", "lion", "muadam", "onebitadam"} <= REFUSED_OPTIMIZERS.keys()


@pytest.mark.slow
def test_the_example_learns_on_two_ranks():
    out = run_as_in_the_gallery("deepspeed_loop.py")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", out)]
    assert losses[-1] < losses[0] / 2
    assert out.count("zero_optimization.stage = 3") == 1
