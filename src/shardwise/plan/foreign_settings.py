"""Settings that people already have: a DeepSpeed JSON or an accelerate YAML, read for planning.

Every key of ``foreign_keys`` is planned, or has no effect on a plan and is listed with the reason.
One that is not there is an error that names the nearest key.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Offload, OffloadHome
from shardwise.plan.foreign_keys import (
    ACCELERATE,
    ACCELERATE_DEEPSPEED,
    DEEPSPEED,
    FSDP,
    NOT_BESIDE_A_FILE,
    PARALLELISM,
    ZERO,
    load_json,
    load_keys,
    plan_reasons,
    unknown_key,
)

_MOST = 1 << 40  # of windows or micro-batches; what is beyond is a slip
_MOST_MICRO_BATCH = 10**6
_FILLED_IN = "given by the flags or their defaults"
_COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass
class _Reading:
    """One file being read: where errors point to, and what was found so far."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)

    def walk(
        self,
        block: Mapping[str, Any],
        prefix: str,
        planned: Mapping[str, Callable[[Any], None]],
        no_effect: Mapping[str, str],
    ) -> None:
        """Take every key of a block; ``"auto"`` is left to whoever fills it in."""
        for key, value in block.items():
            if key in no_effect:
                self.ignored[prefix + key] = no_effect[key]
            elif key not in planned:
                raise unknown_key(self.path, prefix, key, [*planned, *no_effect])
            elif value == "auto" or value is None:
                self.ignored[prefix + key] = f"{value}: {_FILLED_IN}"
            else:
                try:
                    planned[key](value)
                except ConfigError:
                    raise
                except (TypeError, ValueError, AttributeError, KeyError):
                    raise ConfigError(
                        f"{self.path}: {prefix}{key}: got {value!r}, which is not a value that "
                        "this key can have"
                    ) from None

    def count(self, name: str, key: str) -> Callable[[Any], None]:
        """Return what stores a positive whole number under ``name``."""

        def store(value: Any) -> None:
            is_whole = not isinstance(value, bool) and int(value) == float(value)
            most = _MOST_MICRO_BATCH if name == "micro_batch" else _MOST
            if not is_whole or not 0 < int(value) <= most:
                raise ConfigError(
                    f"{self.path}: {key}: expected a whole number above 0, at most {most:,}, "
                    f"got {value!r}"
                )
            if self.values.setdefault(name, int(value)) != int(value):
                raise ConfigError(
                    f"{self.path}: {key}: got {value!r} here and {self.values[name]} in another "
                    "place; leave one of them out"
                )

        return store


@dataclass(frozen=True)
class ForeignSettings:
    """What a file says, in the names of ``Candidate`` and of the command; and what it leaves out.

    ``values`` may hold ``stage``, ``precision``, ``micro_batch``, ``accumulation``,
    ``global_batch``, ``optimizer``, ``offload``, ``prefetch_bytes``, ``units``, ``ranks``,
    ``replicas``,
    ``activation_checkpointing``. ``ignored`` has the reason for each key without effect.
    """

    path: Path
    values: Mapping[str, Any]
    ignored: Mapping[str, str]


def read_deepspeed(path: Path) -> ForeignSettings:
    """Read a DeepSpeed JSON. **Raises** ConfigError naming the key and the nearest known one."""
    reading = _Reading(path)
    _read_deepspeed(reading, load_json(path))
    return ForeignSettings(path, reading.values, reading.ignored)


def read_accelerate(path: Path) -> ForeignSettings:
    """Read an accelerate YAML, and the DeepSpeed JSON that it may name."""
    named = load_keys(path)
    reading = _Reading(path)
    planned: dict[str, Callable[[Any], None]] = {
        "num_processes": reading.count("ranks", "num_processes"),
        "num_machines": reading.count("nodes", "num_machines"),
        "mixed_precision": lambda v: _set_precision(reading, _word(v)),
        "distributed_type": lambda v: _set_distributed(reading, _word(v).upper()),
        "gradient_accumulation_steps": reading.count("accumulation", "gradient_accumulation_steps"),
        "fsdp_config": lambda v: _read_fsdp(reading, v),
        "deepspeed_config": lambda v: _read_accelerate_deepspeed(reading, v),
        "parallelism_config": lambda v: _read_parallelism(reading, v),
    }
    ordered = sorted(named.items(), key=lambda item: item[0].endswith("_config"))
    reading.walk(dict(ordered), "", planned, plan_reasons(ACCELERATE))
    nodes = reading.values.pop("nodes", None)
    if nodes is not None:
        reading.ignored["num_machines"] = "the devices of a node are given by --gpus-per-node"
    return ForeignSettings(path, reading.values, reading.ignored)


def _word(value: Any) -> str:
    """Return a word; YAML reads an unquoted ``no`` as False."""
    return "no" if value is False else str(value)


def _flag(value: Any) -> bool:
    """Return true or false; accelerate takes both as text too."""
    said = {"true": True, "false": False}.get(str(value).lower())
    if said is None:
        raise ValueError(f"{value!r} is neither")
    return said


def _read_deepspeed(reading: _Reading, content: Mapping[str, Any]) -> None:
    values = reading.values
    named = values.get("precision")  # by the file of accelerate that names this one
    planned: dict[str, Callable[[Any], None]] = {
        "train_micro_batch_size_per_gpu": reading.count(
            "micro_batch", "train_micro_batch_size_per_gpu"
        ),
        "gradient_accumulation_steps": reading.count("accumulation", "gradient_accumulation_steps"),
        "train_batch_size": reading.count("global_batch", "train_batch_size"),
        "fp16": lambda v: _set_if_enabled(reading, "fp16", v, named),
        "bf16": lambda v: _set_if_enabled(reading, "bf16", v, named),
        "bfloat16": lambda v: _set_if_enabled(reading, "bf16", v, named),
        "optimizer": lambda v: values.update(optimizer=str(v["type"]).lower()),
        "zero_optimization": lambda v: _read_zero(reading, {"stage": 1} if v is True else v),
    }
    blocks = [content.get(name) for name in ("fp16", "bf16", "bfloat16")]
    if not any(isinstance(b, Mapping) and b.get("enabled") == "auto" for b in blocks):
        values.setdefault("precision", "fp32")
    values.setdefault("stage", 0)
    ordered = sorted(content.items(), key=lambda item: item[0] == "zero_optimization")
    reading.walk(dict(ordered), "", planned, plan_reasons(DEEPSPEED))


def _read_zero(reading: _Reading, block: Mapping[str, Any]) -> None:
    values = reading.values

    def prefetch(value: Any) -> None:
        if not 0 <= int(value) <= _MOST:
            raise ConfigError(f"{reading.path}: prefetch: expected 0 or more, got {value!r}")
        precision = values.get("precision", "bf16")  # as the flags' default is
        values["prefetch_bytes"] = int(value) * _COMPUTE_BYTES[precision]

    planned: dict[str, Callable[[Any], None]] = {
        "stage": lambda v: _set_stage(reading, v),
        "prefetch_bucket_size": prefetch,
        "stage3_prefetch_bucket_size": prefetch,
        "offload_param": lambda v: _set_offload(reading, "params", v["device"]),
        "offload_optimizer": lambda v: _set_offload(
            reading, "optimizer", v["device"], float(v.get("ratio", 1.0))
        ),
        "cpu_offload": lambda v: _set_offload(reading, "optimizer", "cpu" if _flag(v) else "none"),
        "cpu_offload_param": lambda v: _set_offload(
            reading, "params", "cpu" if _flag(v) else "none"
        ),
    }
    reading.walk(block, "zero_optimization.", planned, plan_reasons(ZERO))


def _read_accelerate_deepspeed(reading: _Reading, block: Mapping[str, Any]) -> None:
    file = block.get("deepspeed_config_file")
    beside = [k for k in NOT_BESIDE_A_FILE if block.get(k) is not None]
    if file is not None and beside:
        raise ConfigError(
            f"{reading.path}: deepspeed_config.{beside[0]}: {file} decides it, and accelerate "
            "refuses both; say it there and leave it out here"
        )
    planned: dict[str, Callable[[Any], None]] = {
        "zero_stage": lambda v: _set_stage(reading, v),
        "gradient_accumulation_steps": reading.count("accumulation", "gradient_accumulation_steps"),
        "offload_optimizer_device": lambda v: _set_offload(reading, "optimizer", v),
        "offload_param_device": lambda v: _set_offload(reading, "params", v),
        "deepspeed_config_file": lambda v: _read_deepspeed(
            reading, load_json(reading.path.parent / str(v))
        ),
    }
    reading.walk(block, "deepspeed_config.", planned, plan_reasons(ACCELERATE_DEEPSPEED))


def _read_fsdp(reading: _Reading, block: Mapping[str, Any]) -> None:
    values = reading.values
    strategies = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3}
    strategies["HYBRID_SHARD_ZERO2"] = 2
    strategies |= {str(i + 1): s for i, s in enumerate(strategies.values())}

    def reshard(value: Any) -> None:
        name = str(value).upper()
        stages = {**strategies, "TRUE": 3, "FALSE": 2}
        if name not in stages:
            near = difflib.get_close_matches(name, stages, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(
                f"{reading.path}: fsdp_config: expected one of {', '.join(strategies)}, got "
                f"{value!r}{hint}"
            )
        values["stage"] = stages[name]
        if name in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
            if "nodes" in values:
                values["replicas"] = values.pop("nodes")
            else:
                why = "num_machines is not given; give the number of nodes by --replicas"
                reading.ignored["fsdp_config.HYBRID_SHARD"] = why

    def units(value: Any) -> None:
        values["units"] = tuple(name.strip() for name in str(value).split(","))

    def checkpointing(value: Any) -> None:
        values["activation_checkpointing"] = "full" if _flag(value) else "none"

    planned: dict[str, Callable[[Any], None]] = {
        "fsdp_sharding_strategy": reshard,
        "fsdp_reshard_after_forward": reshard,
        "fsdp_transformer_layer_cls_to_wrap": units,
        "fsdp_offload_params": lambda v: _offload_both(reading) if _flag(v) else None,
        "fsdp_activation_checkpointing": checkpointing,
    }
    reading.walk(block, "fsdp_config.", planned, plan_reasons(FSDP))


def _read_parallelism(reading: _Reading, block: Mapping[str, Any]) -> None:
    """Read accelerate's mesh: replicas of shard groups; its product is the number of ranks."""
    sizes = _Reading(reading.path)
    prefix = "parallelism_config."
    planned: dict[str, Callable[[Any], None]] = {
        f"parallelism_config_{name}": sizes.count(name, f"{prefix}parallelism_config_{name}")
        for name in ("dp_replicate_size", "dp_shard_size")
    }
    reading.walk(block, prefix, planned, plan_reasons(PARALLELISM))
    replicas = sizes.values.get("dp_replicate_size")
    num_shards, ranks = sizes.values.get("dp_shard_size"), reading.values.get("ranks")
    others = [block.get(f"parallelism_config_{name}_size") for name in ("tp", "cp", "sp")]
    product = math.prod(s for s in (replicas, num_shards, *others) if isinstance(s, int))
    if num_shards is not None and ranks is not None and product != ranks:
        raise ConfigError(
            f"{reading.path}: parallelism_config: expected sizes whose product is num_processes "
            f"{ranks}, got {product}"
        )
    if replicas is not None:
        reading.count("replicas", f"{prefix}parallelism_config_dp_replicate_size")(replicas)


def _offload_both(reading: _Reading) -> None:
    """FSDP's offload keeps shards and optimizer state on the host."""
    _set_offload(reading, "params", "cpu")
    _set_offload(reading, "optimizer", "cpu")


def _set_stage(reading: _Reading, value: Any) -> None:
    if isinstance(value, bool) or int(value) not in (0, 1, 2, 3):
        raise ConfigError(f"{reading.path}: stage: expected 0, 1, 2 or 3, got {value!r}")
    reading.values["stage"] = int(value)


def _set_distributed(reading: _Reading, kind: str) -> None:
    stages = {"DEEPSPEED": 2, "FSDP": 3, "MULTI_GPU": 0, "MULTI_CPU": 0, "NO": 0}
    if kind not in stages:
        raise ConfigError(
            f"{reading.path}: distributed_type: expected one of {', '.join(stages)}, got {kind!r}"
        )
    reading.values.setdefault("stage", stages[kind])


def _set_precision(reading: _Reading, name: str) -> None:
    precision = {"no": "fp32", "bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}.get(name.lower())
    if precision is None:
        raise ConfigError(
            f"{reading.path}: mixed_precision: expected no, bf16, fp16 or fp8, got {name!r}"
        )
    reading.values["precision"] = precision


def _set_if_enabled(
    reading: _Reading, precision: str, block: Mapping[str, Any], named: str | None
) -> None:
    enabled = block.get("enabled")
    # on where another is named, or off where it is named itself
    if named is not None and enabled is (named != precision):
        raise ConfigError(
            f"{reading.path}: mixed_precision: it means {named}, and the DeepSpeed file says "
            f"{precision}.enabled = {str(enabled).lower()}; change one of them"
        )
    if enabled == "auto":
        reading.ignored[f"{precision}.enabled"] = f"auto: {_FILLED_IN}"
    elif enabled is True:
        reading.values["precision"] = precision


def _set_offload(reading: _Reading, what: str, device: Any, fraction: float = 1.0) -> None:
    homes = {"none": "device", "cpu": "host", "nvme": "nvme"}
    if str(device) not in homes:
        raise ConfigError(
            f"{reading.path}: offload of the {what}: expected none, cpu or nvme, got {device!r}"
        )
    if not 0 <= fraction <= 1:
        raise ConfigError(f"{reading.path}: ratio: expected 0 to 1, got {fraction!r}")
    home = cast("OffloadHome", homes[str(device)])
    old: Offload = reading.values.get("offload", Offload())
    if what == "params":
        new = Offload(home, old.optimizer, old.optimizer_fraction)
    else:
        new = Offload(old.params, home, fraction)
    reading.values["offload"] = new
