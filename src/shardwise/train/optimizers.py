"""The optimizers of torch that step on shards, by name, with their arguments; imports no torch.

An optimizer is here if it works element by element. Not here: those that need a whole matrix or the
norm of a whole parameter (Muon, Adafactor, Lamb), `Rprop`, which writes through masks, `LBFGS` and
`SparseAdam`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardwise.keys import check_names

if TYPE_CHECKING:
    import torch

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


def check_options(name: str, options: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError where an argument is not one of the optimizer's, with the nearest name."""
    title, arguments = OPTIMIZERS[name]
    check_names(options, arguments, where, f"argument {{!r}} of {title}")


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class in torch.optim of a name of `OPTIMIZERS`."""
    import torch

    found: type[torch.optim.Optimizer] = getattr(torch.optim, OPTIMIZERS[name][0])
    return found
