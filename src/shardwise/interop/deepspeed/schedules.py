"""The block ``scheduler``: one of DeepSpeed's five curves, or a scheduler of torch by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.reading import Reader
from shardwise.interop.foreign_keys import SCHEDULER
from shardwise.keys import check_names, near_miss
from shardwise.train.curves import CURVES, Curve, make_curve

_TORCHS: dict[str, tuple[str, ...]] = {  # and what each takes after the optimizer
    name: (*options.split(), "last_epoch")
    for name, options in {
        "StepLR": "step_size gamma",
        "MultiStepLR": "milestones gamma",
        "ConstantLR": "factor total_iters",
        "LinearLR": "start_factor end_factor total_iters",
        "ExponentialLR": "gamma",
        "PolynomialLR": "total_iters power",
        "CosineAnnealingLR": "T_max eta_min",
        "CosineAnnealingWarmRestarts": "T_0 T_mult eta_min",
        "CyclicLR": "base_lr max_lr step_size_up step_size_down mode gamma scale_mode "
        "cycle_momentum base_momentum max_momentum",
        "OneCycleLR": "max_lr total_steps epochs steps_per_epoch pct_start anneal_strategy "
        "cycle_momentum base_momentum max_momentum div_factor final_div_factor three_phase",
    }.items()
}
# What an option left at "auto" falls back to; for all others scheduler() wants a value.
_AUTO_FALLBACKS = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_type": "log"}


@dataclass(frozen=True)
class TorchSchedule:
    """A class of torch.optim.lr_scheduler, with its arguments."""

    name: str
    options: Mapping[str, Any]


def read_schedule(reader: Reader, block: Any) -> Curve | TorchSchedule | None:
    """Return the schedule. **Raises** ConfigError naming the option, with the nearest known one."""
    return reader.read_named("scheduler", block, SCHEDULER, "WarmupLR", _choose)


def check_options_of(name: str, options: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where an option is not one of the scheduler of torch, with the nearest."""
    check_names(options, _TORCHS[name], where, f"option {{!r}} of {name}")


def _choose(reader: Reader, name: str, options: dict[str, Any]) -> Curve | TorchSchedule:
    if name in _TORCHS:
        check_options_of(name, options, f"{reader.source}: scheduler.params")
        reader.mapped("scheduler.type", name, f"torch.optim.lr_scheduler.{name}")
        for key, value in options.items():
            if value == "auto":
                raise reader.refusal(f"scheduler.params.{key}", "give a value by auto=")
            reader.mapped(f"scheduler.params.{key}", value, f"{name}({key}=)")
        return TorchSchedule(name, options)
    if name not in CURVES:
        hint, known = near_miss(name, [*CURVES, *_TORCHS]), ", ".join(CURVES)
        raise reader.refusal("scheduler.type", f"expected one of {known}, got {name!r}{hint}")
    auto = {key for key, value in options.items() if value == "auto"}
    try:
        curve = make_curve(
            name,
            {key: _AUTO_FALLBACKS.get(key, 1) if key in auto else v for key, v in options.items()},
            "scheduler.params",
        )
    except ConfigError as error:
        raise ConfigError(f"{reader.source}: {error}") from None
    curve = curve.without(auto - _AUTO_FALLBACKS.keys())
    reader.mapped("scheduler.type", name, "the same curve")
    for key, value in options.items():
        if key not in auto:
            reader.mapped(f"scheduler.params.{key}", value, "an option of the curve")
        elif key in _AUTO_FALLBACKS:
            rest = _AUTO_FALLBACKS[key]
            what = "the optimizer's learning rate" if rest is None else rest
            reader.add("auto", f"scheduler.params.{key}", "auto", f"{what}, or auto=")
        else:
            reader.add("auto", f"scheduler.params.{key}", "auto", f"give {key}= to scheduler()")
    return curve
