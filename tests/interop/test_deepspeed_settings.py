"""`from_deepspeed`: the fate of each key, and the errors for wrong ones."""

import inspect
import json
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise import Precision, shard
from shardwise.config import PRECISIONS, Schedule
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.settings import from_deepspeed
from shardwise.interop.foreign_keys import KEYS, RATES, REFUSED_OPTIMIZERS, TORCH_SCHEDULERS
from shardwise.train.optimizers import OPTIMIZERS, optimizer_class

WHOLE: dict[str, Any] = {
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


def test_a_config_becomes_the_arguments_of_a_loop() -> None:
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
        settings.gradient_clipping = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "coded"),
    [
        ("zero_quantized_weights", {"gather": "int8"}),
        ("zero_quantized_gradients", {"reduce": "int4-a2a"}),
    ],
)
def test_what_deepspeed_quantizes_is_encoded_at_the_stage_where_it_does(
    key: str, coded: dict[str, Any]
) -> None:
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


def leaves(block: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in block.items():
        inner = leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]
        found += inner
    return found


def test_the_report_has_every_key_of_the_file_once_with_its_fate(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(WHOLE))
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


HUGGING_FACE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto"),
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(
            ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"), "auto"
        ),
    },
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


def test_auto_is_left_to_the_caller_and_says_what_fills_it() -> None:
    settings = from_deepspeed(HUGGING_FACE, world_size=2)
    assert settings.shard == {"stage": 3}
    assert settings.batch["micro_batch"] is settings.batch["global_batch"] is None
    with pytest.raises(ConfigError, match="micro_batch is not decided"):
        _ = settings.micro_batch
    auto = settings.report.auto
    assert {"train_batch_size", "bf16.enabled", "optimizer.params.lr"} <= auto.keys()
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


def test_arguments_fill_auto_and_nothing_else() -> None:
    fills = {"bf16.enabled": True, "optimizer.params.lr": 0.25, "gradient_clipping": 0}
    settings = from_deepspeed(HUGGING_FACE, world_size=2, micro_batch=3, auto=fills)
    assert settings.shard["precision"] == "bf16"
    assert [*settings.batch.values()] == [3, 1, 6]
    assert settings.gradient_clipping == 0
    group = settings.optimizer([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert group["lr"] == 0.25
    with pytest.raises(ConfigError, match="steps_per_print: it is given in auto="):
        from_deepspeed(HUGGING_FACE, auto={"steps_per_print": 5})
    with pytest.raises(ConfigError, match="micro_batch: expected a whole number, 1 or more"):
        from_deepspeed({}, micro_batch=0)
    with pytest.raises(ConfigError, match="got 4 here and micro_batch=3 in another place"):
        from_deepspeed(WHOLE, micro_batch=3)


def test_sizes_that_need_the_number_of_ranks_wait_for_it() -> None:
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
def test_an_optimizer_is_torchs_equal(params: dict[str, Any], expected: type) -> None:
    settings = from_deepspeed({"optimizer": params})
    optimizer = settings.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is expected
    own = {"adam_w_mode", "torch_adam"}
    for key, value in params.get("params", {}).items():
        assert key in own or optimizer.param_groups[0][key] == value
    decay = 0.01 if params.get("params", {}).get("torch_adam") else 0.0
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_the_tables_of_optimizers_and_schedulers_are_those_of_torch() -> None:
    for name, (title, arguments) in OPTIMIZERS.items():
        made = inspect.signature(optimizer_class(name).__init__).parameters
        own = {"decoupled_weight_decay"} if name == "adam" else set()
        assert set(arguments) == set(made) - {"self", "params"} - own, title
        assert made["lr"].default == RATES.get(name, 1e-3), title
        assert name not in REFUSED_OPTIMIZERS
    for title in TORCH_SCHEDULERS:
        assert hasattr(torch.optim.lr_scheduler, title)
    settings = from_deepspeed({"scheduler": {"type": "StepLR", "params": {"step_size": 3}}})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert type(settings.scheduler(optimizer)) is torch.optim.lr_scheduler.StepLR


def test_fp16_becomes_a_scaler_of_torch_and_the_differences_are_named() -> None:
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


def test_bf16_masters_are_a_precision_of_their_own() -> None:
    block = {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True, "enabled": True}
    settings = from_deepspeed({"bfloat16": block, "zero_optimization": {"stage": 2}})
    bf16 = torch.bfloat16
    assert settings.shard == {"stage": 2, "precision": Precision(bf16, bf16, bf16)}


def zero(**keys: Any) -> dict[str, Any]:
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
        ({"sparse_gradients": False}, "gone from DeepSpeed"),
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
def test_what_is_wrong_is_refused_by_name(content: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        from_deepspeed(content, world_size=1)
    assert str(caught.value).startswith("config: ")


@pytest.mark.parametrize("kind", sorted(REFUSED_OPTIMIZERS))
def test_an_optimizer_that_cannot_step_on_shards_is_refused_with_the_reason(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type: ") as caught:
        from_deepspeed({"optimizer": {"type": kind, "params": {}}})
    assert REFUSED_OPTIMIZERS[kind] in str(caught.value)


def test_a_key_that_stands_there_twice_is_refused_and_a_missing_file_too(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        from_deepspeed(path)
    path.write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    with pytest.raises(ConfigError, match="'stage' stands twice") as caught:
        from_deepspeed(path)
    assert str(path) in str(caught.value)
    path.write_text("{")
    with pytest.raises(ConfigError, match="expected JSON"):
        from_deepspeed(path)


def test_integral_floats_are_whole_numbers_and_null_is_as_if_it_were_not_there() -> None:
    settings = from_deepspeed(
        {"train_micro_batch_size_per_gpu": 2.0, **zero(prefetch_bucket_size=1e3, stage="2")}
        | {"scheduler": None, "fp16": None, "communication_data_type": None},
        world_size=3,
    )
    assert settings.shard == {"stage": 2, "schedule": Schedule(4000), "precision": "fp32"}
    assert settings.global_batch == 6
    assert settings.report.ignored["scheduler"].startswith("null")
    assert from_deepspeed({"zero_optimization": True}).shard["stage"] == 1


def test_what_is_not_in_the_file_and_still_counts_is_told() -> None:
    settings = from_deepspeed({"_comment": "for the big machine"})
    assert settings.report.ignored == {"_comment": "a comment"}
    assert settings.report.of("default").keys() == {"zero_optimization", "gradient_clipping"}
    assert settings.gradient_clipping == 1.0 and settings.shard["stage"] == 0
    with pytest.raises(ConfigError, match="it has no optimizer"):
        settings.optimizer([])
    with pytest.raises(ConfigError, match="it has no scheduler"):
        settings.scheduler(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))


def test_every_key_of_the_tables_has_a_reason_or_a_reader() -> None:
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


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}
