"""DeepSpeed's and accelerate's files and the keys of `shardwise train`: read and written.

`read_train_keys` reads a DeepSpeed JSON as keys of a run, and `tell_sources` reports where each
number of the run came from. `to_deepspeed` and `to_accelerate` write a run's keys as such files.
"""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.homes import OffloadLike, folders_of, resolve_offload
from shardwise.interop.deepspeed.blocks import (
    COMPUTE_BYTES,
    PRECISION_BLOCKS,
    TorchSchedule,
    offload_keys,
)
from shardwise.interop.deepspeed.reader import Fate, Line, Report, shown
from shardwise.interop.deepspeed.settings import DeepSpeedSettings, read_content
from shardwise.interop.foreign_keys import (
    BATCH_KEYS,
    NOT_WRITTEN,
    OURS,
    JsonMapping,
    JsonObject,
    load_json,
)
from shardwise.keys import flag_of, read_options
from shardwise.optim.kinds import ARGUMENTS
from shardwise.precisions import plain_precision
from shardwise.train.config import TrainConfig
from shardwise.train.curves import CURVES
from shardwise.train.optimizers import OPTIMIZERS, is_own

_BETAS = (0.9, 0.999)  # torch's default
_PARAMS, _OPTIONS = "optimizer.params.", "scheduler.params."
SourceOf = Callable[[str], str | None]

# -- a DeepSpeed file, read


def read_train_keys(
    path: Path, known: JsonMapping, decided: JsonMapping, world_size: int | None
) -> tuple[JsonObject, Report]:
    """Read a DeepSpeed JSON as keys of `shardwise train`, with the report.

    ``known`` are keys of another file: they fill what this one leaves out or at "auto". ``decided``
    are keys that win over it (flags). A key that stays at "auto" is left out, or is "auto" in
    ``schedule_options``, so its default decides.

    **Raises** ConfigError if the file is wrong, or a run has no counterpart of a key.
    """
    said = load_json(path)
    content = _with_open_warmup(said, known, decided)
    for theirs, ours in BATCH_KEYS.items():
        is_open = content.get(theirs) in (None, "auto")
        if ours in decided or (ours in known and is_open):
            size = decided.get(ours, known.get(ours))
            is_text = isinstance(size, str) and size.isdecimal()  # of a flag
            content[theirs] = int(str(size)) if is_text else size
    named = plain_precision({**known, **decided}.get("precision"))
    precision = str(named) if named in COMPUTE_BYTES else None  # `check_keys` raises for others
    fills = {
        f"{block}.enabled": precision == kind
        for block, kind in PRECISION_BLOCKS.items()
        if precision is not None and _value_at(content, f"{block}.enabled") == "auto"
    }
    settings = read_content(content, str(path), world_size, {}, fills, precision)
    keys = _keys_of(settings, {**known, **decided}, decided)
    unsaid = {name for names in OURS.values() for name in names} - _said_keys(content)
    keys = {name: value for name, value in keys.items() if name not in unsaid & known.keys()}
    return keys, _with_said_values(settings.report, said)


def _value_at(content: JsonMapping, path: str) -> Any:
    """Return the value of a full name, None if a block on the way is not there."""
    found: Any = content
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _said_keys(content: JsonMapping) -> set[str]:
    """Return the keys of ours that the file sets. A default of DeepSpeed's sets none."""
    paths = [path for path in OURS if not path.startswith(_OPTIONS)]
    said = {path: _value_at(content, path) for path in (*paths, "bfloat16.enabled")}
    found = {
        ours
        for theirs, value in said.items()
        if value not in (None, "auto") and not isinstance(value, Mapping)
        for ours in OURS[theirs.replace("bfloat16", "bf16")]
    }
    is_static = _value_at(content, "fp16.loss_scale") not in (None, "auto", 0)
    return found | ({"loss_scale", "loss_scale_window"} if is_static else set())


def _with_open_warmup(content: JsonObject, known: JsonMapping, decided: JsonMapping) -> JsonObject:
    """Leave the warm-up's length at "auto" if the key `warmup_steps` decides it."""
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


def _with_said_values(report: Report, content: JsonMapping) -> Report:
    """Return the report with the file's own values, where keys of ours stood in for them."""

    def corrected(line: Line) -> Line:
        value = _value_at(content, line.key)
        if value == "auto" and line.fate == "mapped":
            return replace(line, value=value, fate="auto")
        if line.key not in BATCH_KEYS or line.value == value:
            return line
        return replace(line, value=value, fate="default" if value is None else line.fate)

    return Report(report.source, tuple(map(corrected, report.lines)))


def _keys_of(settings: DeepSpeedSettings, known: JsonMapping, decided: JsonMapping) -> JsonObject:
    """Return the keys of `shardwise train` that the settings decide."""
    source, precision, batch = settings.report.source, settings.precision, settings.batch
    keys: JsonObject = dict(settings.zero)
    if "offload" in keys:
        keys["offload"] = offload_keys(keys["offload"])
    if precision.bf16_master:
        raise ConfigError(
            f"{source}: bf16.bf16_master_weights_and_grads: `shardwise train` keeps masters in "
            "fp32; leave it out, or use from_deepspeed() in a loop of your own"
        )
    if precision.name is not None:
        keys["precision"] = precision.name
    if precision.loss_scale is not None:
        keys["loss_scale"] = precision.loss_scale.init_scale
        keys["loss_scale_window"] = precision.loss_scale.growth_interval
    if batch.micro_batch is None and batch.global_batch is not None:
        raise ConfigError(
            f"{source}: train_micro_batch_size_per_gpu: it follows from train_batch_size and the "
            "number of ranks; give --ranks"
        )
    sizes = {name: getattr(batch, name) for name in BATCH_KEYS.values()}
    keys |= {name: size for name, size in sizes.items() if size is not None}
    keys["grad_clip"] = settings.gradient_clipping
    if (choice := settings.optimizer_choice) is not None:
        arguments = dict(choice.arguments)
        keys["optimizer"] = choice.name
        if "betas" in OPTIMIZERS[choice.name][1] and "betas" not in choice.auto:
            keys["beta1"], keys["beta2"] = arguments.pop("betas", _BETAS)
        for name in ("lr", "weight_decay"):
            value = arguments.pop(name)
            if name not in choice.auto:
                keys[name] = value
        if arguments and decided.get("optimizer", choice.name) == choice.name:
            keys["optimizer_options"] = arguments
    return keys | _schedule_keys(settings, known, decided)


def _schedule_keys(
    settings: DeepSpeedSettings, known: JsonMapping, decided: JsonMapping
) -> JsonObject:
    schedule, source = settings.schedule, settings.report.source
    if schedule is None:  # without a scheduler DeepSpeed's optimizer keeps its rate
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
    try:
        theirs = read_options(known.get("schedule_options")) or {}
    except ValueError:
        theirs = {}  # `check_keys` raises
    filled = {"total_num_steps", *options, *theirs}  # without it, it is the key `steps`
    missing = [name for name in schedule.missing if name not in filled]
    if missing:
        raise ConfigError(
            f"{source}: scheduler.params.{missing[0]}: a run needs a number, and no other key says "
            f"it; write it there, or give --schedule-options '{{{missing[0]}: NUMBER}}'"
        )
    keys: JsonObject = {"schedule": schedule.name}
    if options:
        listed = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        keys["schedule_options"] = listed
    return keys


# -- where each number came from

_UNSET = {
    "global_batch": "micro_batch x accumulation x ranks",
    "accumulation": "1, or what global_batch asks for",
    "prefetch_bytes": "the largest unit is gathered ahead",
}


def tell_sources(report: Report, config: TrainConfig, source_of: SourceOf) -> Report:
    """Return the report with the value and source of each key that the file did not decide.

    ``source_of`` takes a key of `shardwise train` and returns its flag, the file that sets it, or
    None if its default decides.
    """
    lines = (_with_source(line, config, source_of) for line in report.lines)
    return Report(report.source, tuple(lines))


def _with_source(line: Line, config: TrainConfig, source_of: SourceOf) -> Line:
    names = OURS.get(line.key.replace("bfloat16.", "bf16."), ())
    decided = {name for name in names if source_of(name) == flag_of(name)}
    if line.key == f"{_OPTIONS}warmup_max_lr" and line.fate != "auto":
        decided = set()  # its peak is not that of --lr
    if not decided and line.fate != "auto":
        return line
    if names:
        text = "; ".join(_one(name, getattr(config, name), source_of(name)) for name in names)
        return replace(line, text=text, fate="ignored" if line.fate == "mapped" else line.fate)
    name = line.key.rpartition(".")[2]
    if line.key.startswith(_PARAMS):
        text = _option(name, config.optimizer_options, "optimizer_options", "torch's default")
        return replace(line, text=text)
    if line.key.startswith(_OPTIONS):
        default = shown(config.curve.options[name]) if config.curve is not None else "no effect"
        text = _option(name, config.schedule_options, "schedule_options", default)
        return replace(line, text=text)
    return line


def _one(name: str, value: object, source: str | None) -> str:
    if source is not None:
        return f"{name}: {shown(value)}, from {source}"
    if value is None:
        return f"{name}: {_UNSET.get(name, 'unset')}"
    follows = name == "global_batch" or (name == "accumulation" and value != 1)
    return f"{name}: {shown(value)}, {_UNSET[name] if follows else 'its default'}"


def _option(name: str, options: JsonMapping | None, key: str, default: str) -> str:
    if options is not None and options.get(name, "auto") != "auto":
        return f"{shown(options[name])}, from {key}"
    return f"{default}; {key} changes it"


# -- files, written

_SCRIPT = {
    "deepspeed": "the script's: model, data and loop are not in such a file",
    "accelerate": "the script's: accelerate's file has no such key",
}


class _Notes:
    """Reports on the keys that a run was given, not on those with defaults."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self.lines: list[Line] = []

    def __call__(self, key: str, text: str, fate: Fate = "mapped") -> None:
        if key in self.config.model_fields_set:
            self.lines.append(Line(key, getattr(self.config, key), fate, text))

    def report(self, source: str, library: str) -> Report:
        """Return the report; keys without a note were not written."""
        noted = {line.key for line in self.lines}
        for key in [key for key in TrainConfig.model_fields if key not in noted]:
            self(key, NOT_WRITTEN[library].get(key, _SCRIPT[library]), "ignored")
        return Report(source, tuple(self.lines))


def to_deepspeed(config: TrainConfig, source: str) -> tuple[JsonObject, Report]:
    """Return a DeepSpeed config with the same meaning, and a report on each key of ours.

    Only keys that the run was given are reported. A default is written if DeepSpeed's differs.
    """
    note = _Notes(config)
    out: JsonObject = {}
    for theirs, ours in BATCH_KEYS.items():
        if getattr(config, ours) is not None:
            out[theirs] = getattr(config, ours)
            note(ours, theirs)
    out["gradient_clipping"] = config.grad_clip
    note("grad_clip", "gradient_clipping")
    zero: JsonObject = {"stage": config.stage}
    out["zero_optimization"] = zero
    note("stage", "zero_optimization.stage")
    for ours, kind, what in (("gather", "int8", "weights"), ("reduce", "int4-a2a", "gradients")):
        if config.stage == 3 and getattr(config, ours) == kind:
            zero[f"zero_quantized_{what}"] = True
            note(ours, f"zero_optimization.zero_quantized_{what}, in blocks of its own")
            note("gather_block", "DeepSpeed chooses its blocks", "ignored")
    if config.prefetch_bytes is not None:
        elements = config.prefetch_bytes // COMPUTE_BYTES[config.precision]
        zero["stage3_prefetch_bucket_size"] = elements
    offloads, lost = _offload_blocks(config.offloaded, config.stage)
    zero |= offloads
    named = " and ".join(f"zero_optimization.{name}" for name in offloads) or "left out: none"
    note("offload", "; ".join((named, *lost)))
    note("prefetch_bytes", "zero_optimization.stage3_prefetch_bucket_size, in elements")
    if config.precision != "fp32":
        block: JsonObject = {"enabled": True}
        if config.precision == "fp16":
            block["initial_scale_power"] = max(0, round(math.log2(config.loss_scale)))
            block |= {"loss_scale_window": config.loss_scale_window, "hysteresis": 1}
        out[config.precision] = block
        if config.stage > 0:  # DeepSpeed refuses it at stage 0
            out["data_types"] = {"grad_accum_dtype": "fp32"}
    note("precision", config.precision if config.precision != "fp32" else "neither fp16 nor bf16")
    if config.precision == "fp16":
        note("loss_scale", "fp16.initial_scale_power, the nearest power of 2")
        note("loss_scale_window", "fp16.loss_scale_window")
    _write_optimizer(config, out, note)
    _write_schedule(config, out, note)
    return out, note.report(source, "deepspeed")


def _offload_blocks(asked: OffloadLike, stage: int) -> tuple[JsonObject, list[str]]:
    """Return DeepSpeed's blocks for an offload, and notes on parts that they leave out."""
    offload = resolve_offload(asked)
    lost = []
    if offload is not None and offload.activations != "device":
        lost.append("activations are left out: deepspeed.checkpointing has cpu_checkpointing")
    if offload is None or not offload.moves_state:
        return {}, lost

    def block(place: str) -> JsonObject:
        folders = folders_of(place)
        where = {"device": "nvme", "nvme_path": folders[0]} if folders else {"device": place}
        return {**where, "pin_memory": True}

    blocks = {"offload_optimizer": block(offload.optimizer)}
    if stage == 3 and offload.params != "device":
        blocks["offload_param"] = block(offload.params)
    elif folders_of(offload.params):
        lost.append("params stay out of files, where DeepSpeed has them at stage 3 alone")
    if offload.fraction < 1 and stage == 3:
        blocks["offload_optimizer"]["ratio"] = offload.fraction
    elif offload.fraction < 1:
        lost.append("fraction is left out, as DeepSpeed has ratio at stage 3 alone")
    if folders_of(offload.grads):
        lost.append("grads are left out, as DeepSpeed has no key for them")
    if any(len(folders_of(place)) > 1 for place in (offload.params, offload.optimizer)):
        lost.append("of several folders the first is written")
    return blocks, lost


def _write_optimizer(config: TrainConfig, out: JsonObject, note: _Notes) -> None:
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
    out["optimizer"] = {"type": title, "params": params}
    if is_own(config.optimizer, given):
        note("optimizer_options", "optimizer, but moments and block: its state is fp32", "ignored")
    else:
        note("optimizer_options", "optimizer")
    for key in ("optimizer", "lr", "beta1", "beta2", "weight_decay"):
        note(key, "optimizer" if key != "weight_decay" else "optimizer, of all parameters there")


def _write_schedule(config: TrainConfig, out: JsonObject, note: _Notes) -> None:
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
) -> tuple[JsonObject, Report]:
    """Return accelerate's YAML with an FSDP2 block, and a report on each key of ours.

    ``undecided`` keys are left out: another file leaves them open.

    **Raises** ConfigError at stage 1, which FSDP does not have.
    """
    if config.stage == 1:
        raise ConfigError(
            f"{source}: stage: FSDP2 has no stage 1; set stage to 2 (the same numbers, less memory)"
        )
    note = _Notes(config)
    out: JsonObject = {
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
    if not config.stage:
        note("stage", "distributed_type: MULTI_GPU")
        note("units", "nothing is sharded", "ignored")
        return out, note.report(source, "accelerate")
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
    note("stage", "fsdp_config.fsdp_reshard_after_forward")
    note("units", "fsdp_config.fsdp_transformer_layer_cls_to_wrap")
    is_other = moves_state and offload != resolve_offload("cpu")
    only = ": all in host memory, as FSDP2 has no other home" if is_other else ""
    if offload is not None and offload.activations != "device":
        only += "; activations are left out, as FSDP2 keeps them on the device"
    note("offload", f"fsdp_config.fsdp_offload_params{only}")
    note("activation_checkpointing", "fsdp_config.fsdp_activation_checkpointing")
    return out, note.report(source, "accelerate")
