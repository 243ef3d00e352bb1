"""Keys of `shardwise train` written as a DeepSpeed JSON or accelerate's YAML.

What a key becomes is found in the file that is written, by the rows of the table that name the key.
Keys that no row has are explained by a remark here, or by the table's ``not_written``.
"""

import math
from collections.abc import Set

from shardwise.errors import ConfigError
from shardwise.homes import resolve_offload
from shardwise.interop.deepspeed.offload_blocks import offload_blocks
from shardwise.interop.deepspeed.reading import COMPUTE_BYTES
from shardwise.interop.foreign_keys import (
    NOT_WRITTEN,
    Fate,
    JsonObject,
    Line,
    Report,
    names_of,
    value_at,
)
from shardwise.optim.kinds import ARGUMENTS
from shardwise.train.config import TrainConfig
from shardwise.train.optimizers import OPTIMIZERS, is_shardwise_adamw

_SCRIPT = {
    "deepspeed": "the script's: model, data and loop are not in such a file",
    "accelerate": "the script's: accelerate's file has no such key",
}


class _Writer:
    """A file being written, with remarks on keys of ours, and their fate."""

    def __init__(self, config: TrainConfig, library: str) -> None:
        self.config, self.library = config, library
        self.out: JsonObject = {}
        self._remarks: dict[str, tuple[Fate, str]] = {}

    def mapped(self, key: str, text: str) -> None:
        """Remark on a key that the file has."""
        self._remarks[key] = "mapped", text

    def lost(self, key: str, text: str) -> None:
        """Remark on a key that the file has not."""
        self._remarks[key] = "ignored", text

    def report(self, source: str) -> Report:
        """Return the fate of each key that the run was given, not of those with defaults."""
        written: dict[str, list[str]] = {}
        for path, names in names_of(self.library).items():
            if value_at(self.out, path) is not None:
                for ours in names:
                    written.setdefault(ours, []).append(path)
        lines = []
        for key in TrainConfig.model_fields:
            if key not in self.config.model_fields_set:
                continue
            fate, text = self._remarks.get(key, ("mapped", ""))
            paths = ", ".join(written.get(key, ())) if fate == "mapped" else ""
            text = ", ".join(filter(None, (paths, text)))
            if not text:
                fate, text = "ignored", NOT_WRITTEN[self.library].get(key, _SCRIPT[self.library])
            lines.append(Line(key, getattr(self.config, key), fate, text))
        return Report(source, tuple(lines))


def to_deepspeed(config: TrainConfig, source: str) -> tuple[JsonObject, Report]:
    """Return a DeepSpeed config with the same meaning, and a report on each key of ours.

    Only keys that the run was given are reported. A default is written if DeepSpeed's differs.
    """
    writer = _Writer(config, "deepspeed")
    out = writer.out
    sizes = {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulation,
        "train_batch_size": config.global_batch,
    }
    out |= {theirs: size for theirs, size in sizes.items() if size is not None}
    out["gradient_clipping"] = config.grad_clip
    zero: JsonObject = {"stage": config.stage}
    out["zero_optimization"] = zero
    if config.stage == 3 and config.gather == "int8":
        zero["zero_quantized_weights"] = True
        writer.mapped("gather", "in blocks of its own")
        writer.lost("gather_block", "DeepSpeed chooses its blocks")
    if config.stage == 3 and config.reduce == "int4-a2a":
        zero["zero_quantized_gradients"] = True
        writer.mapped("reduce", "in blocks of its own")
        writer.lost("gather_block", "DeepSpeed chooses its blocks")
    if config.nearby_ranks is not None:
        zero["zero_hpz_partition_size"] = config.nearby_ranks
    if config.prefetch_bytes is not None:
        elements = config.prefetch_bytes // COMPUTE_BYTES[config.precision]
        zero["stage3_prefetch_bucket_size"] = elements
        writer.mapped("prefetch_bytes", "in elements")
    offloads, lost = offload_blocks(config.offloaded, config.stage)
    zero |= offloads
    writer.mapped("offload", "; ".join(("as blocks" if offloads else "left out: none", *lost)))
    if config.precision == "fp32":
        writer.mapped("precision", "neither fp16 nor bf16")
    else:
        block: JsonObject = {"enabled": True}
        if config.precision == "fp16":
            block["initial_scale_power"] = max(0, round(math.log2(config.loss_scale)))
            block |= {"loss_scale_window": config.loss_scale_window, "hysteresis": 1}
            writer.mapped("loss_scale", "the nearest power of 2")
        out[config.precision] = block
        if config.stage > 0:  # DeepSpeed refuses it at stage 0
            out["data_types"] = {"grad_accum_dtype": "fp32"}
    _write_optimizer(writer)
    if (curve := config.curve) is not None:
        options = {k: config.lr if v is None else v for k, v in curve.given.items()}
        out["scheduler"] = {"type": curve.name, "params": options}
        writer.mapped("schedule_options", "scheduler.params")
    elif config.schedule == "constant" and not config.warmup_steps:
        writer.mapped("schedule", "no scheduler")
    else:
        for key in ("schedule", "warmup_steps", "min_lr"):
            writer.lost(key, "DeepSpeed has no such curve; make the scheduler in the script")
        if "schedule" not in config.model_fields_set:
            writer.mapped("lr", "without the schedule, cosine by default")
    return out, writer.report(source)


def _write_optimizer(writer: _Writer) -> None:
    config = writer.config
    title, arguments = OPTIMIZERS[config.optimizer]
    given = config.optimizer_options or {}
    options = {key: value for key, value in given.items() if key not in ARGUMENTS}
    params: JsonObject = {"lr": config.lr}
    if "betas" in arguments:
        params["betas"] = [config.beta1, config.beta2]
    params["weight_decay"] = config.weight_decay
    params |= options
    if config.optimizer == "adam":
        params["adam_w_mode"] = False
    if config.optimizer in ("adam", "adamw") and options.keys() - {"eps"}:
        params["torch_adam"] = True  # DeepSpeed's own kernels take no others
    writer.out["optimizer"] = {"type": title, "params": params}
    writer.mapped("weight_decay", "of all parameters there")
    if is_shardwise_adamw(config.optimizer, given):
        why = "optimizer.params, but moments and block: its state is fp32"
        writer.lost("optimizer_options", why)
    else:
        writer.mapped("optimizer_options", "optimizer.params")


def to_accelerate(
    config: TrainConfig, source: str, undecided: Set[str] = frozenset()
) -> tuple[JsonObject, Report]:
    """Return accelerate's YAML with an FSDP2 block, and a report on each key of ours.

    ``undecided`` keys are left out: another file leaves them open.

    **Raises** ConfigError at stage 1, which FSDP does not have.
    """
    if config.stage == 1:
        raise ConfigError(
            f"{source}: stage: FSDP2 has no stage 1; set stage to 2 (the same numbers, less memory)"
        )
    writer = _Writer(config, "accelerate")
    out = writer.out
    out["compute_environment"] = "LOCAL_MACHINE"
    out["distributed_type"] = "FSDP" if config.stage else "MULTI_GPU"
    out["num_machines"] = 1
    if "precision" not in undecided:
        out["mixed_precision"] = "no" if config.precision == "fp32" else config.precision
    if config.ranks is not None:
        out["num_processes"] = config.ranks
    if not config.stage:
        writer.lost("units", "nothing is sharded")
        return out, writer.report(source)
    offload = resolve_offload(config.offloaded)
    moves_state = offload is not None and offload.moves_state
    out["fsdp_config"] = block = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": config.stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": moves_state,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": config.activation_checkpointing,
    }
    if config.units:
        block["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.units)
    only = []
    if moves_state and offload != resolve_offload("cpu"):
        only.append("all in host memory, as FSDP2 has no other home")
    if offload is not None and offload.activations != "device":
        only.append("activations are left out, as FSDP2 keeps them on the device")
    writer.mapped("offload", "; ".join(only))
    return out, writer.report(source)
