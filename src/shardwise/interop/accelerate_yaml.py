"""accelerate's YAML as keys of `shardwise train`, and back as an FSDP2 block.

The planner's reader of these files (``plan/foreign_settings``) does the reading; here its values
become keys, and every key of the file is reported.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.report import Fate, Line, Report
from shardwise.interop.deepspeed.train_keys import read_train_keys
from shardwise.plan.candidate import Offload
from shardwise.plan.foreign_keys import (
    ACCELERATE,
    ACCELERATE_DEEPSPEED,
    FSDP,
    PARALLELISM,
    load_keys,
)
from shardwise.plan.foreign_settings import ForeignSettings, read_accelerate
from shardwise.train.config import TrainConfig

__all__ = ["read_accelerate_keys", "to_accelerate"]

_BLOCKS = {
    "fsdp_config": FSDP,
    "deepspeed_config": ACCELERATE_DEEPSPEED,
    "parallelism_config": PARALLELISM,
}
_BECOMES = {
    "num_processes": "ranks",
    "num_machines": "replicas, where shards are hybrid",
    "mixed_precision": "precision",
    "distributed_type": "stage, where no block says it",
    "gradient_accumulation_steps": "accumulation",
    "fsdp_sharding_strategy": "stage",
    "fsdp_reshard_after_forward": "stage",
    "fsdp_transformer_layer_cls_to_wrap": "units; the decoder of `shardwise train` has others: "
    "leave them out there",
    "fsdp_offload_params": "state stays on the device",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "zero_stage": "stage",
    "deepspeed_config_file": "its own lines are below",
    "offload_optimizer_device": "state stays on the device",
    "offload_param_device": "state stays on the device",
    "gradient_clipping": "grad_clip",
    "parallelism_config_dp_replicate_size": "replicas",
    "parallelism_config_dp_shard_size": "ranks over replicas",
}
_SCRIPT = "the script's: accelerate's file has no such key"
_LEFT_OUT = {
    "accumulation": "give gradient_accumulation_steps to Accelerator()",
    "layout": "fully_shard cuts rows",
    "reduce_every": "accelerate's no_sync decides it",
    "replicas": "give parallelism_config to Accelerator()",
    "prefetch_bytes": "FSDP2 gathers the next unit ahead",
    "bucket_bytes": "FSDP2 reduces unit by unit",
}


def read_accelerate_keys(path: Path, ranks: int | None = None) -> tuple[dict[str, Any], Report]:
    """Read accelerate's YAML as keys of `shardwise train`; it may name a DeepSpeed JSON.

    ``ranks`` stands for ``num_processes`` where the file has none.

    **Raises** ConfigError naming file and key; also where state is to rest off the device.
    """
    content = load_keys(path)
    found = read_accelerate(path)  # refuses keys that nobody knows
    values = dict(found.values)
    _check(path, content, values.pop("offload", Offload()))
    lines = _lines(content, found)
    keys: dict[str, Any] = {}
    block = content.get("deepspeed_config") or {}
    file = block.get("deepspeed_config_file")
    if file is not None:
        known: dict[str, Any] = {
            name: values[name] for name in ("precision", "accumulation") if name in values
        }
        ranks = values.get("ranks", ranks)
        keys, inner = read_train_keys(path.parent / str(file), known, {}, ranks)
        keys = {**known, **keys}  # what the JSON leaves open is as this file says
        lines += inner.lines
    else:
        names = ("stage", "precision", "accumulation", "units", "replicas")
        keys |= {name: values[name] for name in names if name in values}
    if "gradient_clipping" in block and block["gradient_clipping"] != "auto":
        keys["grad_clip"] = _clipping(path, block["gradient_clipping"])
    if "activation_checkpointing" in values:
        keys["activation_checkpointing"] = values["activation_checkpointing"] == "full"
    if "units" in keys:
        keys["units"] = list(keys["units"])
    if values.get("ranks", ranks) is not None:
        keys["ranks"] = values.get("ranks", ranks)
    return keys, Report(str(path), tuple(lines))


def _clipping(path: Path, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(
            f"{path}: deepspeed_config.gradient_clipping: expected a number of 0 or more, "
            f"got {value!r}"
        )
    return float(value)


def _check(path: Path, content: Mapping[str, Any], offload: Offload) -> None:
    if str(content.get("mixed_precision")).lower() == "fp8":
        raise ConfigError(f"{path}: mixed_precision: fp8 is not supported; use bf16")
    for name in ("tp", "cp", "sp"):
        key = f"parallelism_config_{name}_size"
        size = (content.get("parallelism_config") or {}).get(key)
        if size not in (None, 1, "auto"):
            raise ConfigError(
                f"{path}: parallelism_config.{key}: only data is parallel here; expected 1, got "
                f"{size!r}"
            )
    homes = {offload.params, offload.optimizer}
    if "nvme" in homes:
        raise ConfigError(
            f"{path}: offload to NVMe: shard() keeps state on the device; leave it out. For the "
            "host there is shardwise.fully_shard(model, offload_policy=CPUOffloadPolicy())"
        )
    if "host" in homes:
        raise ConfigError(
            f"{path}: offload to the host: shard() keeps state on the device; call "
            "shardwise.fully_shard(model, offload_policy=CPUOffloadPolicy()) for that, or turn "
            "it off"
        )


def _lines(content: Mapping[str, Any], settings: ForeignSettings) -> list[Line]:
    found = []
    for key, value in content.items():
        if key in _BLOCKS and isinstance(value, Mapping):
            table = _BLOCKS[key]
            found += [_line(f"{key}.{k}", str(k), v, table[str(k)].run) for k, v in value.items()]
        elif key == "num_machines" and key in settings.ignored:
            found.append(Line(key, value, "ignored", "launching is torchrun's"))
        else:
            found.append(_line(key, key, value, ACCELERATE[key].run))
    return found


def _line(name: str, key: str, value: Any, reason: str) -> Line:
    fate: Fate = "ignored" if reason else "auto" if value == "auto" else "mapped"
    return Line(name, value, fate, reason or _BECOMES.get(key, "its keys"))


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
    lines: list[Line] = []

    def note(key: str, text: str, fate: Fate = "mapped") -> None:
        if key in config.model_fields_set:
            lines.append(Line(key, getattr(config, key), fate, text))

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
        note("activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
    else:
        note("stage", "distributed_type: MULTI_GPU")
        note("units", "nothing is sharded", "ignored")
    told = {line.key for line in lines}
    for key in TrainConfig.model_fields:
        if key not in told:
            note(key, _LEFT_OUT.get(key, _SCRIPT), "ignored")
    return out, Report(source, tuple(lines))


def _fsdp(config: TrainConfig) -> dict[str, Any]:
    block: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": config.stage == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": config.activation_checkpointing,
    }
    if config.units:
        block["fsdp_transformer_layer_cls_to_wrap"] = ",".join(config.units)
    return block
