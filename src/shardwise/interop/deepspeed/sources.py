"""Where each number of a run came from: a flag, a file or a default, told in a config's report."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.interop.deepspeed.report import Line, Report, shown
from shardwise.interop.deepspeed.settings import BATCH_KEYS
from shardwise.keys import flag_of
from shardwise.train.config import TrainConfig

_OPTIMIZER, _SCHEDULER, _ZERO = "optimizer.params.", "scheduler.params.", "zero_optimization."
OURS: dict[str, tuple[str, ...]] = {
    **{theirs: (ours,) for theirs, ours in BATCH_KEYS.items()},
    "gradient_clipping": ("grad_clip",),
    **dict.fromkeys(("fp16.enabled", "bf16.enabled", "bfloat16.enabled"), ("precision",)),
    "fp16.initial_scale_power": ("loss_scale",),
    "fp16.loss_scale_window": ("loss_scale_window",),
    "optimizer.type": ("optimizer",),
    f"{_OPTIMIZER}lr": ("lr",),
    f"{_OPTIMIZER}betas": ("beta1", "beta2"),
    f"{_OPTIMIZER}weight_decay": ("weight_decay",),
    "scheduler.type": ("schedule",),
    f"{_SCHEDULER}warmup_num_steps": ("warmup_steps",),
    f"{_SCHEDULER}total_num_steps": ("steps",),
    f"{_SCHEDULER}warmup_max_lr": ("lr",),
    "zero_optimization": ("stage",),
    f"{_ZERO}stage": ("stage",),
    **{f"{_ZERO}offload_{kind}.device": ("offload",) for kind in ("optimizer", "param")},
    **{f"{_ZERO}{old}": ("offload",) for old in ("cpu_offload", "cpu_offload_param")},
    f"{_ZERO}prefetch_bucket_size": ("prefetch_bytes",),
    f"{_ZERO}stage3_prefetch_bucket_size": ("prefetch_bytes",),
}
_UNSET = {
    "global_batch": "micro_batch x accumulation x ranks",
    "accumulation": "1, or what global_batch asks for",
    "prefetch_bytes": "the largest unit is gathered ahead",
}
SourceOf = Callable[[str], str | None]


def tell_sources(report: Report, config: TrainConfig, source_of: SourceOf) -> Report:
    """Say of each key at "auto", and of each that a flag decides, what it is and where from.

    ``source_of`` takes a key of `shardwise train` and returns its flag, the file that says it, or
    None where it is left to its default.
    """
    return Report(report.source, tuple(_told(line, config, source_of) for line in report.lines))


def _told(line: Line, config: TrainConfig, source_of: SourceOf) -> Line:
    names = OURS.get(line.key, ())
    decided = {name for name in names if source_of(name) == flag_of(name)}
    if line.key == f"{_SCHEDULER}warmup_max_lr" and line.fate != "auto":
        decided = set()  # a peak of its own, which --lr leaves alone
    if not decided and line.fate != "auto":
        return line
    if names:
        text = "; ".join(_one(name, getattr(config, name), source_of(name)) for name in names)
        return replace(line, text=text, fate="ignored" if line.fate == "mapped" else line.fate)
    if line.key.startswith(_OPTIMIZER):
        name = line.key.removeprefix(_OPTIMIZER)
        return replace(line, text=_option(name, config.optimizer_options, "optimizer_options"))
    if line.key.startswith(_SCHEDULER):
        name = line.key.removeprefix(_SCHEDULER)
        default = shown(config.curve.options[name]) if config.curve is not None else "no effect"
        text = _option(name, config.schedule_options, "schedule_options", default)
        return replace(line, text=text)
    return line


def _one(name: str, value: Any, source: str | None) -> str:
    if source is not None:
        return f"{name}: {shown(value)}, from {source}"
    if value is None:
        return f"{name}: {_UNSET.get(name, 'unset')}"
    follows = name == "global_batch" or (name == "accumulation" and value > 1)
    return f"{name}: {shown(value)}, {_UNSET[name] if follows else 'its default'}"


def _option(
    name: str, options: dict[str, Any] | None, key: str, default: str = "torch's default"
) -> str:
    if options is not None and options.get(name, "auto") != "auto":
        return f"{shown(options[name])}, from {key}"
    return f"{default}; {key} changes it"
