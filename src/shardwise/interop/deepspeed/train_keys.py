"""What a DeepSpeed config says, in the keys of `shardwise train`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.homes import offload_keys
from shardwise.interop.deepspeed.report import Fate, Line, Report
from shardwise.interop.deepspeed.schedules import TorchSchedule
from shardwise.interop.deepspeed.settings import BATCH_KEYS, DeepSpeedSettings, read_content
from shardwise.interop.foreign_keys import load_json
from shardwise.keys import read_options
from shardwise.precisions import plain_precision
from shardwise.train.curves import CURVES
from shardwise.train.optimizers import OPTIMIZERS

_BETAS = (0.9, 0.999)  # torch's default, where the file has none
_FOLLOWS_STEPS = "total_num_steps"  # left out, it is the key `steps`


def read_train_keys(
    path: Path, known: Mapping[str, Any], decided: Mapping[str, Any], world_size: int | None
) -> tuple[dict[str, Any], Report]:
    """Read a DeepSpeed JSON as keys of `shardwise train`, with the report.

    ``known`` are keys that another file gives: they fill what this one leaves out or at "auto".
    ``decided`` are keys that win over it (flags). What stays at "auto" is left out, or stands as
    "auto" in ``schedule_options``: the keys' own defaults decide.

    **Raises** ConfigError where the file is wrong, or says what a run of ours has no key for.
    """
    said = load_json(path)
    content = _with_open_warmup(said, known, decided)
    for theirs, ours in BATCH_KEYS.items():
        if ours in decided:
            content[theirs] = _whole(decided[ours])
        elif content.get(theirs) in (None, "auto") and ours in known:
            content[theirs] = _whole(known[ours])
    said_precision = plain_precision({**known, **decided}.get("precision"))
    is_one = said_precision in ("fp32", "bf16", "fp16")  # else check_keys tells
    precision = str(said_precision) if is_one else None
    fills = {
        f"{block}.enabled": precision == block.replace("bfloat16", "bf16")
        for block in ("fp16", "bf16", "bfloat16")
        if precision is not None
        and isinstance(content.get(block), Mapping)
        and content[block].get("enabled") == "auto"
    }
    settings = read_content(content, str(path), world_size, {}, fills, precision)
    keys = train_keys_of(settings, {**known, **decided}, decided)
    unsaid = _unsaid(content) & known.keys()  # a default is no contradiction
    keys = {name: value for name, value in keys.items() if name not in unsaid}
    return keys, _as_said(settings.report, said)


def _with_open_warmup(
    content: dict[str, Any], known: Mapping[str, Any], decided: Mapping[str, Any]
) -> dict[str, Any]:
    """Leave the warm-up's length at "auto" where the key `warmup_steps` is to decide it."""
    block = content.get("scheduler")
    if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
        return dict(content)
    params = block.get("params") or {}
    has_warmup = "warmup_num_steps" in CURVES.get(block["type"], {})
    if not has_warmup or not isinstance(params, Mapping):
        return dict(content)
    is_unsaid = params.get("warmup_num_steps") is None
    if "warmup_steps" in decided or ("warmup_steps" in known and is_unsaid):
        params = {**params, "warmup_num_steps": "auto"}
    return {**content, "scheduler": {**block, "params": params}}


def _as_said(report: Report, content: Mapping[str, Any]) -> Report:
    """Show values as the file has them, where keys of ours stood in for them."""

    def told(line: Line) -> Line:
        value: Any = content
        for name in line.key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value == "auto" and line.fate == "mapped":
            return replace(line, value=value, fate="auto")
        if line.key not in BATCH_KEYS or line.value == value:
            return line
        fate: Fate = "default" if value is None else line.fate
        return replace(line, value=value, fate=fate)

    return Report(report.source, tuple(told(line) for line in report.lines))


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


def _options_in(value: Any) -> Mapping[str, Any]:
    """Return options as a mapping; what is none is told by the keys' own check."""
    try:
        return read_options(value) or {}
    except ValueError:
        return {}


def _whole(value: Any) -> Any:
    """Read a flag's text as a number; what is none is told by the keys' own check."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def train_keys_of(
    settings: DeepSpeedSettings, known: Mapping[str, Any], decided: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of `shardwise train` that the settings decide; see `read_train_keys`."""
    source = settings.report.source
    keys: dict[str, Any] = dict(settings.zero)
    if "offload" in keys:
        keys["offload"] = offload_keys(keys["offload"])
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
    keys |= _optimizer_keys(settings) | _schedule_keys(settings, known, decided)
    if decided.get("optimizer", keys.get("optimizer")) != keys.get("optimizer"):
        keys.pop("optimizer_options", None)  # of the optimizer that a flag has replaced
    return keys


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


def _schedule_keys(
    settings: DeepSpeedSettings, known: Mapping[str, Any], decided: Mapping[str, Any]
) -> dict[str, Any]:
    schedule, source = settings.schedule, settings.report.source
    if schedule is None:  # DeepSpeed's optimizer alone keeps its rate
        return {"schedule": "constant"} if settings.optimizer_choice else {}
    if decided.get("schedule", schedule.name) != schedule.name:
        return {}
    if isinstance(schedule, TorchSchedule):
        raise ConfigError(
            f"{source}: scheduler.type: `shardwise train` has no {schedule.name}; use "
            "from_deepspeed() in a loop of your own, or give --schedule"
        )
    options = {k: v for k, v in schedule.given.items() if k not in schedule.missing}
    if "warmup_num_steps" in schedule.missing:
        options["warmup_num_steps"] = "auto"
    filled = {_FOLLOWS_STEPS, *options, *_options_in(known.get("schedule_options"))}
    missing = [name for name in schedule.missing if name not in filled]
    if missing:
        raise ConfigError(
            f"{source}: scheduler.params.{missing[0]}: a run needs a number, and no other key says "
            f"it; write it there, or give --schedule-options '{{{missing[0]}: NUMBER}}'"
        )
    keys: dict[str, Any] = {"schedule": schedule.name}
    if options:
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        keys["schedule_options"] = listed
    return keys
