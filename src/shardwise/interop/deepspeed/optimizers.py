"""The block ``optimizer``: a class of torch.optim with its arguments."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.reading import Reader
from shardwise.interop.foreign_keys import OPTIMIZER
from shardwise.train.optimizers import OPTIMIZERS, check_options

_MATRICES = "it needs whole matrices, and a rank holds slices"
_NORMS = "it needs the norm of each whole parameter, and a rank holds slices"
_ONE_BIT = "compressed communication is gone from DeepSpeed too"
REFUSED = {
    "muon": f"{_MATRICES}; shard(layout='matrices') with shardwise.optim.Mixed steps torch's Muon",
    "lamb": f"{_NORMS}, and torch has no Lamb; AdamW works",
    "lion": "torch has no Lion; make your own optimizer from model.parameters()",
    **dict.fromkeys(
        ("muadam", "muadamw", "musgd"), "make it yourself with the package mup, after shard()"
    ),
    "onebitadam": f"{_ONE_BIT}; use Adam",
    "zerooneadam": f"{_ONE_BIT}; use Adam",
    "onebitlamb": f"{_ONE_BIT}; use AdamW",
    "adafactor": f"{_NORMS}; AdamW works",
    "lbfgs": "it calls the model several times per step; AdamW works",
    "rprop": "it writes through masks, which slices do not have; AdamW works",
    "sparseadam": "gradients are dense here; use Adam",
}

# What the class of torch takes when the file says nothing; DeepSpeed passes nothing on.
_RATES = {"adagrad": 1e-2, "rmsprop": 1e-2, "adadelta": 1.0, "adamax": 2e-3, "nadam": 2e-3}
_RATES["asgd"] = 1e-2
_OTHER_RATE = 1e-3
_FLAGS = {
    *("amsgrad", "nesterov", "maximize", "centered", "decoupled_weight_decay"),
    *("foreach", "fused", "capturable", "differentiable"),
}
_DEEPSPEEDS_OWN = {
    "set_grad_none": "zero_grad() is yours to call",
    "fp32_optimizer_states": "state has the dtype of the masters",
    "torch_adam": "it is torch's in any case",
}


@dataclass(frozen=True)
class OptimizerChoice:
    """``name`` is a row of ``OPTIMIZERS``; ``auto`` are arguments that the file leaves to you."""

    name: str
    arguments: Mapping[str, Any]
    auto: frozenset[str] = field(default=frozenset())


def read_optimizer(reader: Reader, block: Any) -> OptimizerChoice | None:
    """Return the class and its arguments.

    **Raises** ConfigError where torch has no such optimizer, or it cannot step on shards.
    """
    return reader.read_named("optimizer", block, OPTIMIZER, "AdamW", _choose)


def _choose(reader: Reader, kind: str, params: dict[str, Any]) -> OptimizerChoice:
    name = kind.lower()
    if name in REFUSED:
        raise reader.refusal("optimizer.type", f"{kind}: {REFUSED[name]}")
    if name not in OPTIMIZERS:
        titles = [title for title, _ in OPTIMIZERS.values()]
        near = get_close_matches(name.replace("-", "_"), OPTIMIZERS, n=1)
        hint = f"; did you mean {OPTIMIZERS[near[0]][0]!r}?" if near else ""
        raise reader.refusal(
            "optimizer.type", f"expected one of {', '.join(titles)}, got {kind!r}{hint}"
        )
    defaults: dict[str, Any] = {"weight_decay": 0.0}
    if name in ("adam", "adamw"):
        name, defaults = _which_adam(reader, name, params)
    title = OPTIMIZERS[name][0]
    reader.mapped("optimizer.type", kind, f"torch.optim.{title}")
    defaults["lr"] = _RATES.get(name, _OTHER_RATE)
    auto = frozenset(key for key, value in params.items() if value == "auto")
    arguments = {key: _value(reader, key, v) for key, v in params.items() if key not in auto}
    try:
        check_options(name, {**arguments, **dict.fromkeys(auto)}, "optimizer.params")
    except ConfigError as error:
        raise ConfigError(f"{reader.source}: {error}") from None
    for key, value in arguments.items():
        reader.mapped(f"optimizer.params.{key}", value, f"{title}({key}=)")
    for key in sorted(auto):
        text = f"give {key}= to optimizer(), or auto="
        default = f"{defaults[key]:g}" if defaults.get(key) is not None else "torch's default"
        text += "" if key == "lr" else f"; {default} otherwise"
        reader.add("auto", f"optimizer.params.{key}", "auto", text)
    return OptimizerChoice(name, {**defaults, **arguments}, auto)


def _which_adam(reader: Reader, name: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Take out what only DeepSpeed's Adams know: "Adam" is AdamW unless adam_w_mode is false."""
    prefix = "optimizer.params."
    mode = reader.flag(f"{prefix}adam_w_mode", params.get("adam_w_mode", True))
    plain = reader.flag(f"{prefix}torch_adam", params.get("torch_adam", False))
    if "adam_w_mode" in params:
        reader.mapped(f"{prefix}adam_w_mode", params.pop("adam_w_mode"), "the class of torch")
    if "max_grad_norm" in params:
        raise reader.refusal(f"{prefix}max_grad_norm", "use gradient_clipping at the top instead")
    if "bias_correction" in params:
        value = params.pop("bias_correction")
        if value != "auto" and not reader.flag(f"{prefix}bias_correction", value):
            raise reader.refusal(f"{prefix}bias_correction", "torch's Adams always correct it")
        reader.mapped(f"{prefix}bias_correction", value, "torch's Adams always correct it")
    for key, reason in _DEEPSPEEDS_OWN.items():
        if key in params:
            reader.ignored(f"{prefix}{key}", params.pop(key), reason)
    decoupled = name == "adamw" or mode
    decay = 0.01 if plain and decoupled else 0.0  # torch's AdamW has a default of its own
    return ("adamw" if decoupled else "adam"), {"weight_decay": decay}


def _value(reader: Reader, key: str, value: Any) -> Any:
    name = f"optimizer.params.{key}"
    if key == "betas":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise reader.refusal(name, f"expected two numbers, got {value!r}")
        return tuple(reader.number(name, item, least=0) for item in value)
    if key in _FLAGS:
        return None if value is None else reader.flag(name, value)
    return reader.number(name, value)
