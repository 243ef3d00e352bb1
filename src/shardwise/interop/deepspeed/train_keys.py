"""What a DeepSpeed config says, in the keys of `shardwise train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.batch import KEYS as BATCH_KEYS
from shardwise.interop.deepspeed.report import Report
from shardwise.interop.deepspeed.schedules import TorchSchedule
from shardwise.interop.deepspeed.settings import DeepSpeedSettings, read_content
from shardwise.plan.foreign_keys import load_json
from shardwise.train.optimizers import OPTIMIZERS

_BETAS = (0.9, 0.999)  # torch's default, where the file has none
_FOLLOWS_STEPS = "total_num_steps"  # left out, it is the key `steps`


def read_train_keys(
    path: Path, known: Mapping[str, Any], decided: Mapping[str, Any], world_size: int | None
) -> tuple[dict[str, Any], Report]:
    """Read a DeepSpeed JSON as keys of `shardwise train`, with the report.

    ``known`` are keys that another file gives: they fill what this one leaves out or at "auto".
    ``decided`` are keys that win over it (flags).

    **Raises** ConfigError where the file is wrong, or says what a run of ours has no key for.
    """
    content = load_json(path)
    for theirs, ours in BATCH_KEYS.items():
        if ours in decided:
            content[theirs] = _whole(decided[ours])
        elif content.get(theirs) in (None, "auto") and ours in known:
            content[theirs] = _whole(known[ours])
    precision = {**known, **decided}.get("precision")
    precision = precision if precision in ("fp32", "bf16", "fp16") else None  # check_keys tells
    fills = {
        f"{block}.enabled": precision == block.replace("bfloat16", "bf16")
        for block in ("fp16", "bf16", "bfloat16")
        if precision is not None
        and isinstance(content.get(block), Mapping)
        and content[block].get("enabled") == "auto"
    }
    settings = read_content(content, str(path), world_size, {}, fills, precision)
    keys = train_keys_of(settings)
    unsaid = _unsaid(content) & known.keys()  # a default is no contradiction
    return {name: value for name, value in keys.items() if name not in unsaid}, settings.report


def _unsaid(content: Mapping[str, Any]) -> set[str]:
    """Return the keys that a file decides by saying nothing, or "auto"."""

    def says(*path: str) -> bool:
        found: Any = content
        for name in path:
            found = found.get(name) if isinstance(found, Mapping) else None
        return found not in (None, "auto")

    fp16 = content.get("fp16")
    is_static = says("fp16", "loss_scale") and bool(fp16 and fp16["loss_scale"])  # 0 is dynamic
    said = {
        "grad_clip": says("gradient_clipping"),
        "stage": isinstance(content.get("zero_optimization"), bool)
        or says("zero_optimization", "stage"),
        "schedule": says("scheduler", "type"),
        "precision": any(says(block, "enabled") for block in ("fp16", "bf16", "bfloat16")),
        "loss_scale": is_static or says("fp16", "initial_scale_power"),
        "loss_scale_window": is_static or says("fp16", "loss_scale_window"),
        "lr": says("optimizer", "params", "lr"),
        "weight_decay": says("optimizer", "params", "weight_decay"),
        "beta1": says("optimizer", "params", "betas"),
        "beta2": says("optimizer", "params", "betas"),
    }
    return {name for name, is_said in said.items() if not is_said}


def _whole(value: Any) -> Any:
    """Read a flag's text as a number; what is none is told by the keys' own check."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def train_keys_of(settings: DeepSpeedSettings) -> dict[str, Any]:
    """Return the keys of `shardwise train` that the settings decide; what is "auto" is left out."""
    source = settings.report.source
    keys: dict[str, Any] = dict(settings.zero)
    if settings.precision.bf16_master:
        raise ConfigError(
            f"{source}: bf16.bf16_master_weights_and_grads: `shardwise train` keeps masters in "
            "fp32; leave it out, or use from_deepspeed() in a loop of your own"
        )
    if settings.precision.name is not None:
        keys["precision"] = settings.precision.name
    if settings.precision.loss_scale is not None:
        keys["loss_scale"] = settings.precision.loss_scale.init_scale
        keys["loss_scale_window"] = settings.precision.loss_scale.growth_interval
    batch = settings.batch
    if batch.micro_batch is None and batch.global_batch is not None:
        raise ConfigError(
            f"{source}: train_micro_batch_size_per_gpu: it follows from train_batch_size and the "
            "number of ranks; give --ranks"
        )
    sizes = {name: getattr(batch, name) for name in BATCH_KEYS.values()}
    keys |= {name: size for name, size in sizes.items() if size is not None}
    keys["grad_clip"] = settings.gradient_clipping
    return keys | _optimizer_keys(settings) | _schedule_keys(settings)


def _optimizer_keys(settings: DeepSpeedSettings) -> dict[str, Any]:
    choice = settings.optimizer_choice
    if choice is None:
        return {}
    arguments = dict(choice.arguments)
    keys: dict[str, Any] = {"optimizer": choice.name}
    if "betas" in OPTIMIZERS[choice.name][1] and "betas" not in choice.auto:
        keys["beta1"], keys["beta2"] = arguments.pop("betas", _BETAS)
    for name in ("lr", "weight_decay"):
        value = arguments.pop(name)
        if name not in choice.auto:
            keys[name] = value
    if arguments:
        keys["optimizer_options"] = arguments
    return keys


def _schedule_keys(settings: DeepSpeedSettings) -> dict[str, Any]:
    schedule, source = settings.schedule, settings.report.source
    if schedule is None:  # DeepSpeed's optimizer alone keeps its rate
        return {"schedule": "constant"} if settings.optimizer_choice else {}
    if isinstance(schedule, TorchSchedule):
        raise ConfigError(
            f"{source}: scheduler.type: `shardwise train` has no {schedule.name}; use "
            "from_deepspeed() in a loop of your own"
        )
    missing = [name for name in schedule.missing if name != _FOLLOWS_STEPS]
    if missing:
        raise ConfigError(
            f"{source}: scheduler.params.{missing[0]}: a run needs a number, got 'auto'"
        )
    options = {k: v for k, v in schedule.given.items() if k not in schedule.missing}
    keys: dict[str, Any] = {"schedule": schedule.name}
    if options:
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        keys["schedule_options"] = listed
    return keys
