"""DeepSpeed and accelerate files read for planning: planned, ignored with a reason, or refused."""

import pytest

from foreign_runs import write
from shardwise.homes import Offload
from shardwise.interop.foreign_settings import read_accelerate, read_deepspeed

NAME = "accelerate.yaml"
ZERO3_OFFLOAD = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "train_batch_size": 256,
    "gradient_clipping": 1.0,
    "steps_per_print": 2000,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
    "scheduler": {"type": "WarmupLR", "params": {}},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 5e8,
        "stage3_prefetch_bucket_size": 5e7,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True, "ratio": 0.3},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme"},
    },
}


def unused(report):
    return report.ignored | report.auto


def test_every_key_of_a_deepspeed_file_is_planned_or_listed_with_a_reason(tmp_path):
    values, report = read_deepspeed(write(tmp_path, ZERO3_OFFLOAD))
    assert values == {
        "stage": 3,
        "precision": "bf16",
        "micro_batch": 4,
        "accumulation": 8,
        "global_batch": 256,
        "optimizer": "adamw",
        "prefetch_bytes": 100_000_000,
        "gather": "int8",
        "reduce": "int4-a2a",
        "offload": Offload("nvme", None, "cpu", 0.3),
    }
    assert set(unused(report)) == {
        "gradient_clipping",
        "steps_per_print",
        "scheduler",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.nvme_path",
    }
    assert all(unused(report).values())


FSDP = """
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
num_machines: 1
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_activation_checkpointing: true
  fsdp_offload_params: true
"""
OF_FSDP = {
    **{"stage": 2, "precision": "bf16", "ranks": 8, "units": ("LlamaDecoderLayer",)},
    **{"activation_checkpointing": "full", "offload": "cpu"},
}
PLAIN = "distributed_type: MULTI_GPU\nmixed_precision: {}\nnum_processes: 4\n"
HYBRID = "num_machines: {}\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: {}\n"
ALONE = "fsdp_config:\n  fsdp_sharding_strategy: HYBRID_SHARD\n"
MESH = "num_processes: 8\nparallelism_config:\n" + "".join(
    f"  parallelism_config_{name}_size: 2\n" for name in ("dp_replicate", "dp_shard", "tp")
)


@pytest.mark.parametrize(
    ("text", "planned", "unused_key", "remedy"),
    [
        (FSDP, OF_FSDP, None, ""),
        *((PLAIN.format(no), {"stage": 0, "precision": "fp32", "ranks": 4}, None, "")
          for no in ("'no'", "no")),
        *((HYBRID.format(2, name), {"stage": stage, "dp_replicate": 2, "ranks": 8}, None, "")
          for name, stage in (("HYBRID_SHARD_ZERO2", 2), ("5", 2), ("4", 3))),
        (HYBRID.format(4, "HYBRID_SHARD"), {"stage": 3, "dp_replicate": 4, "ranks": 8}, None, ""),
        (HYBRID.format(4, "FULL_SHARD"), {"stage": 3, "ranks": 8},
         "num_machines", "--gpus-per-node"),
        (ALONE, {"stage": 3}, "fsdp_config.HYBRID_SHARD", "--dp-replicate"),
        (MESH, {"dp_replicate": 2, "ranks": 8},
         "parallelism_config.parallelism_config_tp_size", "--tp"),
    ],
)  # fmt: skip
def test_an_accelerate_file_gives_stage_ranks_and_replicas(
    text, planned, unused_key, remedy, tmp_path
):
    values, report = read_accelerate(write(tmp_path, text, NAME))
    assert values == planned
    if unused_key is not None:
        assert remedy in unused(report)[unused_key]


def test_a_named_deepspeed_file_decides_even_by_saying_nothing(tmp_path):
    text = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    offload = Offload("nvme", None, "cpu", 0.3)
    for content, stage, where in (({}, 0, None), (ZERO3_OFFLOAD, 3, offload)):
        write(tmp_path, content)
        values, _ = read_accelerate(write(tmp_path, text, NAME))
        assert (values["stage"], values.get("offload")) == (stage, where)


def test_auto_and_checkpointing_are_left_to_the_flags_and_a_comment_is_no_key(tmp_path):
    batch = "train_micro_batch_size_per_gpu"
    content = {"_comment": "large", batch: "auto", "zero_optimization": {"stage": "auto"}}
    content["activation_checkpointing"] = {"partition_activations": True}
    values, report = read_deepspeed(write(tmp_path, content))
    assert not {"micro_batch", "stage", "activation_checkpointing"} & values.keys()
    assert "--activation-checkpointing full" in unused(report)["activation_checkpointing"]
    assert batch in unused(report)
    assert "flags" in unused(report)["zero_optimization.stage"]
    assert unused(report)["_comment"] == "a comment"


@pytest.mark.parametrize(
    ("fp16", "bf16", "precision"),
    [("auto", "auto", None), (False, "auto", None), ("auto", True, "bf16"), (False, False, "fp32")],
)
def test_a_precision_left_to_the_flags_is_not_fp32(tmp_path, fp16, bf16, precision):
    content = {
        "fp16": {"enabled": fp16},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000},
    }
    values, report = read_deepspeed(write(tmp_path, content))
    assert values.get("precision") == precision
    assert values["prefetch_bytes"] == (4000 if precision == "fp32" else 2000)
    listed = {"fp16.enabled": fp16, "bf16.enabled": bf16}
    assert unused(report).keys() == {key for key, value in listed.items() if value == "auto"}


@pytest.mark.parametrize("text", ["'false'", "'False'", "false"])
def test_a_flag_in_quotes_is_a_flag(tmp_path, text):
    keys = ("fsdp_activation_checkpointing", "fsdp_offload_params", "fsdp_reshard_after_forward")
    lines = "".join(f"  {key}: {text}\n" for key in keys)
    values, _ = read_accelerate(write(tmp_path, f"fsdp_config:\n{lines}", NAME))
    assert values == {"activation_checkpointing": "none", "stage": 2}
    on = f"fsdp_config:\n{lines}".replace("false", "true").replace("False", "True")
    values, _ = read_accelerate(write(tmp_path, on, NAME))
    assert values["activation_checkpointing"] == "full"
    assert values["offload"] == "cpu"
