"""The way back: keys of `shardwise train` as a DeepSpeed config, or as accelerate's YAML."""

import math
from collections.abc import Mapping, Set
from typing import Any

from shardwise.errors import ConfigError
from shardwise.homes import resolve_offload
from shardwise.interop.deepspeed.homes import blocks_of
from shardwise.interop.deepspeed.report import Fate, Line, Report
from shardwise.interop.deepspeed.settings import BATCH_KEYS
from shardwise.optim.kinds import ARGUMENTS
from shardwise.train.config import TrainConfig
from shardwise.train.optimizers import OPTIMIZERS, is_own

_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_SCRIPT_FOR_ACCELERATE = "the script's: accelerate's file has no such key"
_SCRIPT = "the script's: model, data and loop are not in such a file"
_NO_KEY = "DeepSpeed has no such key"
_NOT_DEEPSPEEDS = {
    "layout": "DeepSpeed cuts flat ranges",
    "gather": "DeepSpeed has zero_quantized_weights, int8, at stage 3 alone",
    "reduce": "DeepSpeed has zero_quantized_gradients, int4, at stage 3 alone",
    "gather_block": _NO_KEY,
    "reduce_every": _NO_KEY,
    "activation_checkpointing": "call deepspeed.checkpointing in the model",
    "dp_replicate": "DeepSpeed has no hybrid shards; zero_hpz_partition_size is another thing",
    "units": "DeepSpeed gathers module by module",
    "ranks": "the launcher says it",
    "overlap_step": "DeepSpeed's step blocks",
    "bucket_bytes": "reduce_bucket_size counts elements of another buffer",
}
_NOT_ACCELERATES = {
    "accumulation": "give gradient_accumulation_steps to Accelerator()",
    "layout": "fully_shard cuts rows",
    "gather": "torch's fully_shard has none; Shardwise's takes Precision(gather=)",
    "reduce": "torch's fully_shard has none; Shardwise's takes Precision(reduce=)",
    "gather_block": "as gather",
    "reduce_every": "accelerate's no_sync decides it",
    "dp_replicate": "give parallelism_config to Accelerator()",
    "prefetch_bytes": "FSDP2 gathers the next unit ahead",
    "overlap_step": "FSDP2's step blocks",
    "bucket_bytes": "FSDP2 reduces unit by unit",
}


class _Notes:
    """What became of the keys that a run was given; those with defaults are passed over."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.lines: list[Line] = []

    def __call__(self, key: str, text: str, fate: Fate = "mapped") -> None:
        if key in self.config.model_fields_set:
            self.lines.append(Line(key, getattr(self.config, key), fate, text))

    def report(self, source: str, left_out: Mapping[str, str], otherwise: str) -> Report:
        """Say of every key that was not told why it is left out."""
        told = {line.key for line in self.lines}
        for key in [key for key in TrainConfig.model_fields if key not in told]:
            self(key, left_out.get(key, otherwise), "ignored")
        return Report(source, tuple(self.lines))


def to_deepspeed(config: TrainConfig, source: str) -> tuple[dict[str, Any], Report]:
    """Return a DeepSpeed config that means the same, and what became of each key of ours.

    Only keys that the run was given are reported; those with defaults are written where DeepSpeed
    would do something else.
    """
    note = _Notes(config)
    out: dict[str, Any] = {}
    for theirs, ours in BATCH_KEYS.items():
        if getattr(config, ours) is not None:
            out[theirs] = getattr(config, ours)
            note(ours, theirs)
    out["gradient_clipping"] = config.grad_clip
    note("grad_clip", "gradient_clipping")
    out["zero_optimization"] = _zero(config)
    note("stage", "zero_optimization.stage")
    for ours, theirs in _quantized(config):
        note(ours, f"zero_optimization.{theirs}, in blocks of its own")
        note("gather_block", "DeepSpeed chooses its blocks", "ignored")
    offloads, lost = blocks_of(config.offloaded, config.stage)
    out["zero_optimization"] |= offloads
    named = " and ".join(f"zero_optimization.{name}" for name in offloads) or "left out: none"
    note("offload", "; ".join((named, *lost)))
    note("prefetch_bytes", "zero_optimization.stage3_prefetch_bucket_size, in elements")
    out |= _precision(config)
    note("precision", config.precision if config.precision != "fp32" else "neither fp16 nor bf16")
    if config.precision == "fp16":
        note("loss_scale", "fp16.initial_scale_power, the nearest power of 2")
        note("loss_scale_window", "fp16.loss_scale_window")
    out["optimizer"] = _optimizer(config)
    if is_own(config.optimizer, config.optimizer_options or {}):
        note("optimizer_options", "optimizer, but moments and block: its state is fp32", "ignored")
    else:
        note("optimizer_options", "optimizer")
    for key in ("optimizer", "lr", "beta1", "beta2", "weight_decay"):
        note(key, "optimizer" if key != "weight_decay" else "optimizer, of all parameters there")
    _write_schedule(config, out, note)
    return out, note.report(source, _NOT_DEEPSPEEDS, _SCRIPT)


def _quantized(config: TrainConfig) -> list[tuple[str, str]]:
    """Return the encodings that DeepSpeed has too: our key, and its own."""
    found = [("gather", "zero_quantized_weights")] * (config.gather == "int8")
    found += [("reduce", "zero_quantized_gradients")] * (config.reduce == "int4-a2a")
    return found if config.stage == 3 else []


def _zero(config: TrainConfig) -> dict[str, Any]:
    block: dict[str, Any] = {"stage": config.stage}
    block |= {theirs: True for _, theirs in _quantized(config)}
    if config.prefetch_bytes is not None:
        elements = config.prefetch_bytes // _COMPUTE_BYTES[config.precision]
        block["stage3_prefetch_bucket_size"] = elements
    return block


def _precision(config: TrainConfig) -> dict[str, Any]:
    if config.precision == "fp32":
        return {}
    block: dict[str, Any] = {"enabled": True}
    if config.precision == "fp16":
        block["initial_scale_power"] = max(0, round(math.log2(config.loss_scale)))
        block |= {"loss_scale_window": config.loss_scale_window, "hysteresis": 1}
    found: dict[str, Any] = {config.precision: block}
    if config.stage > 0:  # DeepSpeed refuses it at stage 0
        found["data_types"] = {"grad_accum_dtype": "fp32"}
    return found


def _optimizer(config: TrainConfig) -> dict[str, Any]:
    title, arguments = OPTIMIZERS[config.optimizer]
    given = config.optimizer_options or {}
    options = {key: value for key, value in given.items() if key not in ARGUMENTS}
    params: dict[str, Any] = {"lr": config.lr}
    if "betas" in arguments:
        params["betas"] = [config.beta1, config.beta2]
    params["weight_decay"] = config.weight_decay
    params |= options
    if config.optimizer == "adam":
        params["adam_w_mode"] = False
    if config.optimizer in ("adam", "adamw") and options.keys() - {"eps"}:
        params["torch_adam"] = True  # its own kernels take no others
    return {"type": title, "params": params}


def _write_schedule(config: TrainConfig, out: dict[str, Any], note: _Notes) -> None:
    curve = config.curve
    if curve is not None:
        options = {k: config.lr if v is None else v for k, v in curve.given.items()}
        out["scheduler"] = {"type": curve.name, "params": options}
        note("schedule", "scheduler.type")
        note("schedule_options", "scheduler.params")
        note("steps", "scheduler.params.total_num_steps, where the curve has it")
    elif config.schedule == "constant" and not config.warmup_steps:
        note("schedule", "no scheduler")
    else:
        why = "DeepSpeed has no such curve; make the scheduler in the script"
        for key in ("schedule", "warmup_steps", "min_lr"):
            note(key, why, "ignored")
        if "schedule" not in config.model_fields_set:
            note("lr", "optimizer; the schedule, cosine by default, is left out")


def to_accelerate(
    config: TrainConfig, source: str, undecided: Set[str] = frozenset()
) -> tuple[dict[str, Any], Report]:
    """Return accelerate's YAML with an FSDP2 block, and what became of each key of ours.

    ``undecided`` are keys whose default nobody meant; what they would decide is left out.

    **Raises** ConfigError at stage 1, which FSDP does not have.
    """
    if config.stage == 1:
        raise ConfigError(
            f"{source}: stage: FSDP2 has no stage 1; set stage to 2 (the same numbers, less memory)"
        )
    note = _Notes(config)
    out: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if config.stage else "MULTI_GPU",
        "num_machines": 1,
    }
    if "precision" not in undecided:
        out["mixed_precision"] = "no" if config.precision == "fp32" else config.precision
    note("precision", "mixed_precision")
    if config.ranks is not None:
        out["num_processes"] = config.ranks
        note("ranks", "num_processes")
    if config.stage:
        out["fsdp_config"] = _fsdp(config)
        note("stage", "fsdp_config.fsdp_reshard_after_forward")
        note("units", "fsdp_config.fsdp_transformer_layer_cls_to_wrap")
        found = resolve_offload(config.offloaded)
        is_other = found is not None and found.moves_state and found != resolve_offload("cpu")
        only = ": all in host memory, as FSDP2 has no other home" if is_other else ""
        if found is not None and found.activations != "device":
            only += "; activations are left out, as FSDP2 keeps them on the device"
        note("offload", f"fsdp_config.fsdp_offload_params{only}")
        note("activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
    else:
        note("stage", "distributed_type: MULTI_GPU")
        note("units", "nothing is sharded", "ignored")
    return out, note.report(source, _NOT_ACCELERATES, _SCRIPT_FOR_ACCELERATE)


def _fsdp(config: TrainConfig) -> dict[str, Any]:
    offload = resolve_offload(config.offloaded)
    block: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": config.stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": offload is not None and offload.moves_state,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": config.activation_checkpointing,
    }
    if config.units:
        block["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.units)
    return block
