"""Every key of a DeepSpeed JSON and of an accelerate YAML: its kind, and whether it has an effect.

A plan and a run each have a reason why a key has no effect for them; a key without a reason is one
that they read. A key that is not here is unknown to both.

**Source** DeepSpeed 0.19 ``runtime/zero/config.py``, ``runtime/config.py``; accelerate 1.15
``commands/config``, ``utils/launch.py``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shardwise import strict_json
from shardwise.errors import ConfigError
from shardwise.keys import check_object, near_miss, read_file, read_json, read_keys, shown

Kind = Literal["flag", "integer", "number", "word", "block", "any"]


@dataclass(frozen=True)
class Key:
    """One key: which kind of value it has, and why a plan or a run does without it.

    An empty reason: it is read. Kinds are checked for a run only.
    """

    kind: Kind
    plan: str
    run: str


def _table(*rows: tuple[Kind, str, str, str]) -> dict[str, Key]:
    """Make a table of (kind, why not for a plan, why not for a run, names)."""
    found = {name: Key(kind, p, run) for kind, p, run, names in rows for name in names.split()}
    for name in [n for n in found if n.startswith("*")]:
        found[name[1:]] = found[f"stage3_{name[1:]}"] = found.pop(name)
    return found


_NO_CHANGE = "it changes neither memory nor time of a step"
_NO_SWITCH = "Shardwise has no such switch"
_WHOLE_UNITS = "units are gathered and reduced whole, in the order of use"
_SAME_MEAN = "the mean has the same value"
_LOGS = "Shardwise does not log; `shardwise.debug.stats(model)` has bytes and collectives"
_NO_TRACE = "it does not change a step"
_ONE_DTYPE = "the precision is that of bf16 or fp16"
_UNIT_SIZES = "units are gathered whole and freed after their use; describe(model) shows them"
_BUCKETS = "a reduction starts at 1 MiB of gradients; shard(bucket_bytes=) changes that"
_PLUS_PLUS = "not in the engine; planned as if it were off"
_SAVING = "shardwise.save() writes every shard; `shardwise ckpt export` writes one whole model"
_PINNED = "host memory is page-locked always, where there is an accelerator; files are not"
_ONE_STEP = "what is offloaded steps unit by unit, behind the next forward pass"
_SCALE = "a loss scale takes no memory"
_BUFFERS = "three buffers, each for the state of the largest unit"
_MAPPED = "files of parameters are mapped into memory, and the system decides what stays there"
_BEHIND = "a unit's state is read ahead of its step and written behind it"
_YOURS = "torch.utils.checkpoint is the model's to call"
_CONFIGURES = (
    "it configures checkpointing and turns none on; give --activation-checkpointing full where the "
    "model calls it"
)

DEEPSPEED = _table(
    ("any", "", "", "train_micro_batch_size_per_gpu gradient_accumulation_steps train_batch_size "
     "fp16 bf16 bfloat16 optimizer zero_optimization"),
    ("flag", _SAME_MEAN, _SAME_MEAN, "prescale_gradients"),
    ("number", _SAME_MEAN, _SAME_MEAN, "gradient_predivide_factor"),
    ("any", "gradients are always the mean over ranks", "", "gradient_allreduce_op"),
    ("any", "gradients travel in the dtype that computed them", "", "communication_data_type"),
    ("word", "sequence parallelism is a number here", "there is no sequence parallelism",
     "seq_parallel_communication_data_type"),
    ("any", "a learning rate takes no memory", "", "scheduler"),
    ("any", "the norm is one scalar per rank", "", "gradient_clipping"),
    ("any", "gradients are summed in the reduce dtype of the precision", "", "data_types"),
    ("any", _ONE_DTYPE, "", "torch_autocast"),
    ("block", "saving is not part of a step", "shardwise.save() has no such switch: checkpoints "
     "load at any number of ranks", "checkpoint"),
    ("block", "disk bandwidth comes from the catalogue or a calibration",
     "threads of its own read and write files, past the system's cache where they can", "aio"),
    ("block", "a plan is that of eager execution",
     "DeepSpeed's own compiler; call torch.compile on the model", "compile"),
    ("any", _CONFIGURES, "", "activation_checkpointing"),
    ("any", "give --tp", "", "tensor_parallel"),
    ("any", "give --cp", "", "sequence_parallel_size"),
    ("any", _NO_CHANGE, "", "data_efficiency expert_parallel"),
    ("integer", _NO_CHANGE, _LOGS, "steps_per_print"),
    ("flag", _NO_CHANGE, _LOGS, "wall_clock_breakdown memory_breakdown dump_state"),
    ("word", _NO_CHANGE, _LOGS, "log_level"),
    ("block", _NO_CHANGE, _LOGS, "comms_logger flops_profiler timers tensorboard wandb csv_monitor "
     "comet monitor_config datastates_ckpt"),
    ("flag", _NO_CHANGE, _NO_TRACE, "disable_python_gc disable_allgather check_overflow"),
    ("flag", _NO_CHANGE, "the data loader is yours", "dataloader_drop_last"),
    ("integer", _NO_CHANGE, "DeepSpeed only warns about it", "vocabulary_size"),
    ("block", _NO_CHANGE, "`shardwise plan --search` is the counterpart", "autotuning"),
    ("block", _NO_CHANGE, "generate() works on a sharded model", "hybrid_engine"),
    ("any", _NO_CHANGE, "there are no pipelines", "pipeline"),
    ("block", _NO_CHANGE, "it is for inference", "weight_quantization"),
    ("flag", _NO_CHANGE, "any optimizer of the table works", "zero_allow_untested_optimizer"),
    ("flag", _NO_CHANGE, "any optimizer steps in host memory", "zero_force_ds_cpu_optimizer"),
    ("flag", _NO_CHANGE, "shardwise.accumulate() names the window",
     "managed_gradient_accumulation"),
    ("flag", _NO_CHANGE, "there are no expert groups", "use_data_before_expert_parallelism"),
    ("any", _NO_CHANGE, "give shard() a mesh", "data_parallel_group data_parallel_size"),
)  # fmt: skip
ZERO = _table(  # with a star: stage 3 has another name for it, with "stage3_" before
    ("any", "", "", "stage offload_param offload_optimizer cpu_offload cpu_offload_param "
     "*prefetch_bucket_size zero_quantized_weights zero_quantized_gradients"),
    ("flag", _NO_SWITCH, "always on here", "contiguous_gradients reduce_scatter overlap_comm "
     "ignore_unused_parameters"),
    ("flag", _NO_SWITCH, _NO_SWITCH, "use_multi_rank_bucket_allreduce allgather_partitions "
     "round_robin_gradients parameter_alignment memory_efficient_linear override_module_apply "
     "log_trace_cache_warnings enable_sanity_checks legacy_stage1 *use_all_reduce_for_fetch_params "
     "*allgather_sequential"),
    ("flag", _NO_SWITCH, "a checkpoint loads at any number of ranks, in full precision",
     "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint"),
    ("integer", _NO_SWITCH, "the step updates all shards at once, offloaded ones unit by unit",
     "sub_group_size"),
    ("flag", _NO_SWITCH, _SAVING,
     "*gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save"),
    ("flag", _NO_SWITCH, "Muon's momentum rests where `offload=` says",
     "save_muon_momentum_buffer_in_memory"),
    ("block", _NO_SWITCH, "units are found; shard(units=) changes them", "leaf_module"),
    ("flag", _NO_SWITCH, "torch.nn.utils.clip_grad_norm_() is yours to call", "compute_grad_norm"),
    ("flag", _NO_SWITCH, _PINNED, "cpu_offload_use_pin_memory"),
    ("integer", _WHOLE_UNITS, _BUCKETS, "reduce_bucket_size"),
    ("integer", _WHOLE_UNITS, _UNIT_SIZES, "allgather_bucket_size *param_persistence_threshold "
     "*model_persistence_threshold *max_live_parameters *max_reuse_distance "
     "*module_granularity_threshold"),
    ("integer", _PLUS_PLUS, "not there yet: every gather is from all ranks, as with 1",
     "zero_hpz_partition_size"),
    ("flag", _NO_SWITCH, "frozen parameters travel as trained ones do",
     "zero_quantized_nontrainable_weights"),
    ("any", _PLUS_PLUS, "", "zenflow"),
)  # fmt: skip
OFFLOAD_PARAM = _table(
    ("any", "", "", "device"),
    ("any", _NO_SWITCH, "", "nvme_path"),
    ("integer", _NO_SWITCH, _MAPPED, "buffer_count buffer_size max_in_cpu"),
    ("flag", _NO_SWITCH, _PINNED, "pin_memory"),
)  # fmt: skip
OFFLOAD_OPTIMIZER = _table(
    ("any", "", "", "device"),
    ("any", _NO_SWITCH, "", "nvme_path"),
    ("integer", _NO_SWITCH, _BUFFERS, "buffer_count buffer_size"),
    ("flag", _NO_SWITCH, _PINNED, "pin_memory"),
    ("flag", _NO_SWITCH, _BEHIND, "pipeline_read pipeline_write"),
    ("flag", _NO_SWITCH, "the first step makes the state, unit by unit", "fast_init"),
    ("flag", _NO_SWITCH, _ONE_STEP, "super_offload"),
    ("number", "", "", "ratio"),
    ("number", _NO_SWITCH, "the step has torch's threads; call torch.set_num_threads()",
     "cpuadam_cores_perc"),
)  # fmt: skip
FP16 = _table(
    ("any", "", "", "enabled"),
    ("flag", _SCALE, "inputs of a unit are always cast", "auto_cast"),
    ("any", _SCALE, "", "loss_scale initial_scale_power loss_scale_window hysteresis "
     "consecutive_hysteresis min_loss_scale"),
    ("any", _ONE_DTYPE, "", "fp16_master_weights_and_grads"),
)  # fmt: skip
BF16 = _table(
    ("any", "", "", "enabled"),
    ("flag", _NO_CHANGE, "gradients are summed as they come", "immediate_grad_update"),
    ("flag", _NO_CHANGE, "no step is skipped; look at the norm of the gradients",
     "check_grad_overflow"),
    ("any", _ONE_DTYPE, "", "bf16_master_weights_and_grads bf16_optimizer_states"),
)  # fmt: skip
ACTIVATION_CHECKPOINTING = _table(
    ("flag", "", "there are no tensor-parallel ranks to cut them over", "partition_activations"),
    ("flag", "", "call the model under torch.autograd.graph.save_on_cpu() for that",
     "cpu_checkpointing"),
    ("flag", "", _YOURS, "contiguous_memory_optimization synchronize_checkpoint_boundary profile"),
    ("integer", "", _YOURS, "number_checkpoints"),
)  # fmt: skip
DATA_TYPES = _table(
    ("any", "", "", "grad_accum_dtype keep_in_fp32_modules"),
    ("word", "", "the compute dtype is that of bf16 or fp16", "param_dtype"),
    ("word", "", "buffers keep their dtype", "buffer_dtype"),
)  # fmt: skip
TORCH_AUTOCAST = _table(
    ("any", "", "", "enabled"),
    ("word", "", "torch.autocast is yours to enter", "dtype"),
    ("any", "", "torch.autocast is yours to enter", "lower_precision_safe_modules"),
)  # fmt: skip
OPTIMIZER = _table(
    ("any", "", "", "type"),
    ("any", "", "", "params"),
    ("flag", "", "torch fuses by itself", "legacy_fusion"),
)  # fmt: skip
SCHEDULER = _table(("any", "", "", "type params"))

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
_ONLY_DATA = "only data is parallel"
_PARALLEL = "parallelism_config_"
ACCELERATE = _table(
    ("any", "", "", "num_processes num_machines mixed_precision distributed_type "
     "gradient_accumulation_steps fsdp_config deepspeed_config parallelism_config"),
    ("any", _HERE, _LAUNCH, "compute_environment debug enable_cpu_affinity machine_rank "
     "main_process_ip main_process_port main_training_function rdzv_backend same_network tpu_env "
     "tpu_use_cluster tpu_use_sudo tpu_name tpu_zone tpu_vm commands command_file use_cpu gpu_ids "
     "mpirun_config ipex_config"),
    ("any", _HERE, "the precision is that of mixed_precision", "downcast_bf16 fp8_config"),
    ("any", _HERE, "call torch.compile on the model", "dynamo_config dynamo_backend"),
    ("any", _HERE, _ONLY_DATA, "megatron_lm_config"),
)  # fmt: skip
PARALLELISM = _table(
    ("any", "", "", f"{_PARALLEL}dp_replicate_size {_PARALLEL}dp_shard_size"),
    ("any", "give --tp", _ONLY_DATA, f"{_PARALLEL}tp_size"),
    ("any", "give --cp", _ONLY_DATA, f"{_PARALLEL}cp_size {_PARALLEL}sp_size"),
    ("any", _HERE, _ONLY_DATA, " ".join(_PARALLEL + name for name in (
        "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length",
        "sp_seq_length_is_variable", "sp_attn_implementation"))),
)  # fmt: skip
FSDP = _table(
    ("any", "", "", "fsdp_sharding_strategy fsdp_reshard_after_forward fsdp_offload_params "
     "fsdp_transformer_layer_cls_to_wrap fsdp_activation_checkpointing"),
    ("any", _NO_SWITCH, _NO_SWITCH, "fsdp_version fsdp_auto_wrap_policy fsdp_min_num_params "
     "fsdp_backward_prefetch fsdp_backward_prefetch_policy fsdp_forward_prefetch "
     "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states fsdp_use_orig_params "
     "fsdp_state_dict_type"),
    ("any", _NO_SWITCH, "every parameter is sharded", "fsdp_ignored_modules"),
    ("any", _NO_SWITCH, "activations stay on the device", "fsdp_activation_checkpointing_offload"),
)  # fmt: skip
ACCELERATE_DEEPSPEED = _table(
    ("any", "", "", "zero_stage gradient_accumulation_steps deepspeed_config_file "
     "offload_optimizer_device offload_param_device"),
    ("any", _NO_CHANGE, "", "gradient_clipping"),
    ("any", _NO_CHANGE, _LAUNCH, "deepspeed_multinode_launcher deepspeed_hostfile "
     "deepspeed_exclusion_filter deepspeed_inclusion_filter"),
    ("any", _NO_CHANGE, "units are found", "deepspeed_moe_layer_cls_names"),
    ("any", _NO_CHANGE, "build the model under torch.device('meta')", "zero3_init_flag"),
    ("any", _NO_CHANGE, _SAVING, "zero3_save_16bit_model"),
    ("any", _NO_CHANGE, "", "offload_optimizer_nvme_path offload_param_nvme_path"),
)  # fmt: skip

# What accelerate itself refuses beside a `deepspeed_config_file`, where all this is said.
NOT_BESIDE_A_FILE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model"),
    *("offload_optimizer_device", "offload_param_device"),
    *("offload_optimizer_nvme_path", "offload_param_nvme_path"),
)


def unknown_key(source: object, prefix: str, key: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a key that nobody knows: removed, or misspelt."""
    if prefix + key in REMOVED:
        return ConfigError(
            f"{source}: {prefix}{key} is gone from DeepSpeed, and not here: {REMOVED[prefix + key]}"
        )
    return ConfigError(f"{source}: unknown key {shown(prefix + key)}{near_miss(key, known)}")


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of keys. **Raises** ConfigError; a key that stands twice is named."""
    return check_object(path, read_json(path))


def load_keys(path: Path) -> dict[str, Any]:
    """Read a file of keys that is JSON or YAML, whatever its name. **Raises** ConfigError."""
    if path.suffix != ".json":
        try:
            strict_json.parse(read_file(path))
        except ValueError:
            found = read_keys(path)
            if not found:
                raise ConfigError(f"{path}: expected `key: value` lines, got nothing") from None
            return found
    return load_json(path)
