"""The table of optimizers that can step on shards, with their arguments; imports no torch.

They are torch's elementwise optimizers. `shardwise.optim.AdamW` replaces torch's if an argument
sets the storage of its moments. Left out are those that need a whole matrix or the norm of a whole
parameter (Muon, Adafactor, Lamb), `Rprop`, which writes through masks, `LBFGS` and `SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shardwise.errors import ConfigError
from shardwise.keys import check_names
from shardwise.optim.kinds import ARGUMENTS, BLOCK, check_kind

if TYPE_CHECKING:
    import torch

_SHARDWISE_ADAMW = "lr betas eps weight_decay"
_ADAM = "lr betas eps weight_decay amsgrad foreach maximize capturable differentiable fused"
_COMMON = "lr eps weight_decay foreach maximize capturable differentiable"

# Name in lower case: (class in torch.optim, arguments after the parameters).
OPTIMIZERS: dict[str, tuple[str, tuple[str, ...]]] = {
    name.lower(): (name, tuple(arguments.split()))
    for name, arguments in {
        "AdamW": _ADAM,
        "Adam": _ADAM,
        "SGD": "lr momentum dampening weight_decay nesterov maximize foreach differentiable fused",
        "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps foreach maximize "
        "differentiable fused",
        "RMSprop": f"{_COMMON} alpha momentum centered",
        "Adadelta": f"{_COMMON} rho",
        "Adamax": f"{_COMMON} betas",
        "NAdam": f"{_COMMON} betas momentum_decay decoupled_weight_decay",
        "RAdam": f"{_COMMON} betas decoupled_weight_decay",
        "ASGD": "lr lambd alpha t0 weight_decay foreach maximize differentiable capturable",
    }.items()
}


def check_options(name: str, options: Mapping[str, object], where: str) -> None:
    """Raise ConfigError if an argument is not one of the optimizer's, with the nearest name."""
    title, arguments = OPTIMIZERS[name]
    check_names(options, arguments, where, f"argument {{!r}} of {title}")


def is_shardwise_adamw(name: str, options: Mapping[str, object]) -> bool:
    """True if options select `shardwise.optim.AdamW` instead of torch's."""
    return name == "adamw" and any(key in options for key in ARGUMENTS)


def check_run_options(name: str, options: Mapping[str, object], where: str) -> None:
    """Raise ConfigError as `check_options`, for a run, which may use `shardwise.optim.AdamW`."""
    if not is_shardwise_adamw(name, options):
        return check_options(name, options, where)
    known = (*_SHARDWISE_ADAMW.split(), *ARGUMENTS)
    check_names(options, known, where, "argument {!r} of shardwise.optim.AdamW")
    try:
        check_kind(options.get("moments", "fp32"), options.get("block", BLOCK))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def optimizer_class(
    name: str, options: Mapping[str, object] | None = None
) -> type[torch.optim.Optimizer]:
    """Return the class of a name of `OPTIMIZERS`: torch's, or `shardwise.optim.AdamW`."""
    import torch

    if is_shardwise_adamw(name, options or {}):
        from shardwise.optim import AdamW

        return AdamW
    optimizer: type[torch.optim.Optimizer] = getattr(torch.optim, OPTIMIZERS[name][0])
    return optimizer
