"""Every key of a DeepSpeed JSON and of an accelerate YAML: its kind, and whether it has an effect.

One table for two readers. The planner (``foreign_settings``) and a run (``interop/deepspeed``) each
know why a key has no effect for them; a key without a reason is one that they read. A key that is
not here is unknown to both.

**Source** DeepSpeed 0.19 ``runtime/zero/config.py``, ``runtime/config.py``; accelerate 1.15
``commands/config``, ``utils/launch.py``.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import ConfigError

Kind = Literal["flag", "whole", "number", "word", "block", "any"]


@dataclass(frozen=True)
class Key:
    """One key: which kind of value it has, and why a plan or a run does without it.

    An empty reason: it is read. Kinds are checked for a run only.
    """

    kind: Kind
    plan: str
    run: str


def _keys(kind: Kind, plan: str, run: str, names: str) -> dict[str, Key]:
    return dict.fromkeys(names.split(), Key(kind, plan, run))


_NO_CHANGE = "it changes neither memory nor time of a step"
_NO_SWITCH = "Shardwise has no such switch"
_WHOLE_UNITS = "units are gathered and reduced whole, in the order of use"
_SAME_MEAN = "the mean has the same value"
_LOGS = "Shardwise does not log; `shardwise.stats(model)` has bytes and collectives"
_NO_TRACE = "it does not change a step"

DEEPSPEED: dict[str, Key] = {
    **_keys("any", "", "", "train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    **_keys("any", "", "", "train_batch_size fp16 bf16 bfloat16 optimizer zero_optimization"),
    **_keys("flag", _SAME_MEAN, _SAME_MEAN, "prescale_gradients"),
    **_keys("number", _SAME_MEAN, _SAME_MEAN, "gradient_predivide_factor"),
    **_keys("any", "gradients are always the mean over ranks", "", "gradient_allreduce_op"),
    **_keys(
        "any", "gradients travel in the dtype that computed them", "", "communication_data_type"
    ),
    **_keys(
        "word",
        "sequence parallelism is a number here",
        "there is no sequence parallelism",
        "seq_parallel_communication_data_type",
    ),
    **_keys("any", "a learning rate takes no memory", "", "scheduler"),
    **_keys("any", "the norm is one scalar per rank", "", "gradient_clipping"),
    **_keys("any", "gradients are summed in the reduce dtype of the precision", "", "data_types"),
    **_keys("any", "the precision is that of bf16 or fp16", "", "torch_autocast"),
    **_keys(
        "block",
        "saving is not part of a step",
        "shardwise.save() has no such switch: checkpoints load at any number of ranks",
        "checkpoint",
    ),
    **_keys(
        "block",
        "disk bandwidth comes from the catalogue or a calibration",
        "nothing is kept on a disk",
        "aio",
    ),
    **_keys(
        "block",
        "a plan is that of eager execution",
        "DeepSpeed's own compiler; call torch.compile on the model",
        "compile",
    ),
    **_keys(
        "any",
        "it configures checkpointing and turns none on; give "
        "--activation-checkpointing full where the model calls it",
        "",
        "activation_checkpointing",
    ),
    **_keys("any", "give --tensor-parallel", "", "tensor_parallel"),
    **_keys("any", "give --context-parallel", "", "sequence_parallel_size"),
    **_keys("any", _NO_CHANGE, "", "data_efficiency expert_parallel"),
    **_keys("whole", _NO_CHANGE, _LOGS, "steps_per_print"),
    **_keys("flag", _NO_CHANGE, _LOGS, "wall_clock_breakdown memory_breakdown dump_state"),
    **_keys("word", _NO_CHANGE, _LOGS, "log_level"),
    **_keys("block", _NO_CHANGE, _LOGS, "comms_logger flops_profiler timers"),
    **_keys(
        "block",
        _NO_CHANGE,
        _LOGS,
        "tensorboard wandb csv_monitor comet monitor_config datastates_ckpt",
    ),
    **_keys("flag", _NO_CHANGE, _NO_TRACE, "disable_python_gc disable_allgather check_overflow"),
    **_keys("flag", _NO_CHANGE, "the data loader is yours", "dataloader_drop_last"),
    **_keys("whole", _NO_CHANGE, "DeepSpeed only warns about it", "vocabulary_size"),
    **_keys("block", _NO_CHANGE, "`shardwise plan --search` is the counterpart", "autotuning"),
    **_keys("block", _NO_CHANGE, "generate() works on a sharded model", "hybrid_engine"),
    **_keys("any", _NO_CHANGE, "there are no pipelines", "pipeline"),
    **_keys("block", _NO_CHANGE, "it is for inference", "weight_quantization"),
    **_keys(
        "flag", _NO_CHANGE, "any optimizer of the table works", "zero_allow_untested_optimizer"
    ),
    **_keys("flag", _NO_CHANGE, "state stays on the device", "zero_force_ds_cpu_optimizer"),
    **_keys(
        "flag",
        _NO_CHANGE,
        "shardwise.accumulate() names the window",
        "managed_gradient_accumulation",
    ),
    **_keys("flag", _NO_CHANGE, "there are no expert groups", "use_data_before_expert_parallelism"),
    **_keys("any", _NO_CHANGE, "give shard() a mesh", "data_parallel_group data_parallel_size"),
}

_UNIT_SIZES = "units are gathered whole and freed after their use; describe(model) shows them"
_BUCKETS = "a reduction starts at 1 MiB of gradients; shard(bucket_bytes=) changes that"
_PLUS_PLUS = "not in the engine; planned as if it were off"
_SAVING = "shardwise.save() writes every shard; `shardwise ckpt export` writes one whole model"


def _stage3(kind: Kind, plan: str, run: str, names: str) -> dict[str, Key]:
    """Make keys that stage 3 also knows under another name."""
    return _keys(kind, plan, run, f"{names} " + " ".join(f"stage3_{n}" for n in names.split()))


ZERO: dict[str, Key] = {
    **_keys("any", "", "", "stage offload_param offload_optimizer cpu_offload cpu_offload_param"),
    **_stage3("any", "", "", "prefetch_bucket_size"),
    **_keys(
        "flag",
        _NO_SWITCH,
        "always on here",
        "contiguous_gradients reduce_scatter overlap_comm ignore_unused_parameters",
    ),
    **_keys(
        "flag",
        _NO_SWITCH,
        _NO_SWITCH,
        "use_multi_rank_bucket_allreduce allgather_partitions round_robin_gradients "
        "parameter_alignment memory_efficient_linear override_module_apply "
        "log_trace_cache_warnings enable_sanity_checks legacy_stage1",
    ),
    **_keys(
        "flag",
        _NO_SWITCH,
        "a checkpoint loads at any number of ranks, in full precision",
        "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
    ),
    **_keys("whole", _NO_SWITCH, "the step updates all shards at once", "sub_group_size"),
    **_stage3("flag", _NO_SWITCH, _SAVING, "gather_16bit_weights_on_model_save"),
    **_keys("flag", _NO_SWITCH, _SAVING, "stage3_gather_fp16_weights_on_model_save"),
    **_keys(
        "flag", _NO_SWITCH, "there is no Muon on shards", "save_muon_momentum_buffer_in_memory"
    ),
    **_keys("block", _NO_SWITCH, "units are found; shard(units=) changes them", "leaf_module"),
    **_keys(
        "flag", _NO_SWITCH, "torch.nn.utils.clip_grad_norm_() is yours to call", "compute_grad_norm"
    ),
    **_keys("flag", _NO_SWITCH, "nothing is on the host", "cpu_offload_use_pin_memory"),
    **_stage3(
        "flag", _NO_SWITCH, _NO_SWITCH, "use_all_reduce_for_fetch_params allgather_sequential"
    ),
    **_keys("whole", _WHOLE_UNITS, _BUCKETS, "reduce_bucket_size"),
    **_keys("whole", _WHOLE_UNITS, _UNIT_SIZES, "allgather_bucket_size"),
    **_stage3(
        "whole",
        _WHOLE_UNITS,
        _UNIT_SIZES,
        "param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance module_granularity_threshold",
    ),
    **_keys(
        "whole",
        _PLUS_PLUS,
        "not there yet: every gather is from all ranks, as with 1",
        "zero_hpz_partition_size",
    ),
    **_keys(
        "flag",
        _PLUS_PLUS,
        "not there yet: what travels is exact, as with false",
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients",
    ),
    **_keys("any", _PLUS_PLUS, "", "zenflow"),
}

# What DeepSpeed itself does not know any more, and what does its work here.
REMOVED: dict[str, str] = {
    "amp": "use bf16 or fp16",
    "sparse_gradients": "gradients of embeddings are reduced dense; leave it out",
    "elasticity": "a checkpoint of `shardwise.save` loads at any number of ranks; leave it out",
    "nebula": "saves are asynchronous with `shardwise.Checkpoints`; leave it out",
    "compression_training": "nothing does its work here; leave it out",
    "quantize_training": "nothing does its work here; leave it out",
    "eigenvalue": "it was of quantize_training; leave it out",
    "sparse_attention": "it is the model's to choose; leave it out",
    "graph_harvesting": "use torch.compile on the model; leave it out",
    "curriculum_learning": "order the data in the data loader; leave it out",
    "progressive_layer_drop": "drop layers in the model; leave it out",
    "zero_optimization.mics_shard_size": "give shard() a mesh of two axes (replicate, shard)",
    "zero_optimization.mics_hierarchical_params_gather": "give shard() a mesh of two axes",
    "zero_optimization.zeropp_loco_param": "what travels is exact; leave it out",
}

_HERE = "it changes neither memory nor time of a step here"
_LAUNCH = "launching is torchrun's, or --ranks"
ACCELERATE: dict[str, Key] = {
    **_keys("any", "", "", "num_processes num_machines mixed_precision distributed_type"),
    **_keys("any", "", "", "gradient_accumulation_steps fsdp_config deepspeed_config"),
    **_keys("any", "", "", "parallelism_config"),
    **_keys(
        "any",
        _HERE,
        _LAUNCH,
        "compute_environment debug enable_cpu_affinity machine_rank main_process_ip "
        "main_process_port main_training_function rdzv_backend same_network tpu_env "
        "tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm commands command_file use_cpu "
        "gpu_ids mpirun_config ipex_config",
    ),
    **_keys("any", _HERE, "the precision is that of mixed_precision", "downcast_bf16 fp8_config"),
    **_keys("any", _HERE, "call torch.compile on the model", "dynamo_config dynamo_backend"),
    **_keys("any", _HERE, "only data is parallel", "megatron_lm_config"),
}
_PARALLEL = "parallelism_config_"
PARALLELISM: dict[str, Key] = {
    **_keys("any", "", "", f"{_PARALLEL}dp_replicate_size {_PARALLEL}dp_shard_size"),
    **_keys("any", "give --tensor-parallel", "only data is parallel", f"{_PARALLEL}tp_size"),
    **_keys("any", "give --context-parallel", "only data is parallel", f"{_PARALLEL}cp_size"),
    **_keys("any", "give --context-parallel", "only data is parallel", f"{_PARALLEL}sp_size"),
    **_keys(
        "any",
        _HERE,
        "only data is parallel",
        " ".join(
            _PARALLEL + name
            for name in (
                *("cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length"),
                *("sp_seq_length_is_variable", "sp_attn_implementation"),
            )
        ),
    ),
}
FSDP: dict[str, Key] = {
    **_keys("any", "", "", "fsdp_sharding_strategy fsdp_reshard_after_forward"),
    **_keys("any", "", "", "fsdp_transformer_layer_cls_to_wrap fsdp_offload_params"),
    **_keys("any", "", "", "fsdp_activation_checkpointing"),
    **_keys(
        "any",
        _NO_SWITCH,
        _NO_SWITCH,
        "fsdp_version fsdp_auto_wrap_policy fsdp_min_num_params fsdp_backward_prefetch "
        "fsdp_backward_prefetch_policy fsdp_forward_prefetch fsdp_cpu_ram_efficient_loading "
        "fsdp_sync_module_states fsdp_use_orig_params fsdp_state_dict_type",
    ),
    **_keys("any", _NO_SWITCH, "every parameter is sharded", "fsdp_ignored_modules"),
    **_keys(
        "any",
        _NO_SWITCH,
        "activations stay on the device",
        "fsdp_activation_checkpointing_offload",
    ),
}
ACCELERATE_DEEPSPEED: dict[str, Key] = {
    **_keys("any", "", "", "zero_stage gradient_accumulation_steps deepspeed_config_file"),
    **_keys("any", "", "", "offload_optimizer_device offload_param_device"),
    **_keys("any", _NO_CHANGE, "", "gradient_clipping"),
    **_keys(
        "any",
        _NO_CHANGE,
        _LAUNCH,
        "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter "
        "deepspeed_inclusion_filter",
    ),
    **_keys("any", _NO_CHANGE, "units are found", "deepspeed_moe_layer_cls_names"),
    **_keys("any", _NO_CHANGE, "build the model under torch.device('meta')", "zero3_init_flag"),
    **_keys("any", _NO_CHANGE, _SAVING, "zero3_save_16bit_model"),
    **_keys(
        "any",
        _NO_CHANGE,
        "nothing is kept on a disk",
        "offload_optimizer_nvme_path offload_param_nvme_path",
    ),
}

# What accelerate itself refuses beside a `deepspeed_config_file`, where all this is said.
NOT_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
)


def plan_reasons(table: Mapping[str, Key]) -> dict[str, str]:
    """Return the keys without effect on a plan, each with its reason."""
    return {name: key.plan for name, key in table.items() if key.plan}


def unknown_key(source: object, prefix: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that nobody knows: removed, or misspelt."""
    if prefix + key in REMOVED:
        return ConfigError(
            f"{source}: {prefix}{key} is gone from DeepSpeed, and not here: {REMOVED[prefix + key]}"
        )
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"{source}: unknown key {prefix + key!r}{hint}")


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of keys. **Raises** ConfigError; a key that stands there twice is named."""
    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=lambda p: _once(path, p)
        )
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{path}: expected JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected an object, got {type(content).__name__}")
    return content


def load_keys(path: Path) -> dict[str, Any]:
    """Read a file of keys that is JSON or YAML, whatever its name. **Raises** ConfigError."""
    if path.suffix == ".json":
        return load_json(path)
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return load_yaml(path)
    return load_json(path)


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of keys. **Raises** ConfigError."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: expected YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(content).__name__}")
    return {str(key): value for key, value in content.items()}


def _once(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{path}: the key {twice!r} stands there twice in one block")
    return found
