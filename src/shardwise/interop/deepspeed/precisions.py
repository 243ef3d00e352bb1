"""The blocks ``fp16`` and ``bf16``: a precision of ``shard()`` and a loss scaler of torch.

Note [Two loss scalers]
~~~~~~~~~~~~~~~~~~~~~~~
Both skip the step after an overflow, halve the scale, and double it after a window of good steps.
DeepSpeed lets ``hysteresis - 1`` overflows pass before it halves, never goes below
``min_loss_scale``, and waits one step more the first time; a static scale it never changes. Torch's
scaler has none of that. A run that overflows may therefore use other scales; a run that does not
takes the same steps, as scales are powers of two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.interop.foreign_keys import BF16, FP16, Key

_NEVER = 2**31 - 1
_LARGEST_POWER = 127
_AUTO = 'the precision: give auto={{"{}.enabled": True}}, or False, to from_deepspeed()'


@dataclass(frozen=True)
class LossScale:
    """Arguments of torch's GradScaler; see Note [Two loss scalers]."""

    init_scale: float = 65536.0
    growth_interval: int = 1000


@dataclass(frozen=True)
class PrecisionChoice:
    """``name`` is a precision of ``shard()``, None while it is left to the caller.

    ``bf16_master``: what the optimizer updates is bf16 too.
    """

    name: str | None
    bf16_master: bool = False
    loss_scale: LossScale | None = None


def read_precision(
    reader: Reader, content: Mapping[str, Any], otherwise: str | None = None
) -> PrecisionChoice:
    """Read both blocks; DeepSpeed's old name for the second is taken too.

    ``otherwise`` is the precision where neither says ``enabled``; fp32 where that is None.

    **Raises** ConfigError where both are on, or one asks for what a scaler of torch cannot do.
    """
    found: dict[str, Any] = {}
    if {"bf16", "bfloat16"} <= content.keys():
        raise reader.refusal("bfloat16", "it is the old name of bf16; give one of them")
    blocks = {n: content[n] for n in ("bf16", "bfloat16", "fp16") if content.get(n) is not None}
    if any(isinstance(b, Mapping) and b.get("enabled") is True for b in blocks.values()):
        otherwise = None
    for name in blocks:
        if name == "fp16":
            _read_fp16(reader, content[name], found, otherwise == "fp16")
        else:
            _read_bf16(reader, name, content[name], found, otherwise == "bf16")
    fp16 = found.get("fp16", otherwise == "fp16")
    bf16 = found.get("bf16", otherwise == "bf16")
    if fp16 is True and bf16 is True:
        raise reader.refusal("fp16.enabled", "bf16 is on as well; turn one of them off")
    scale = LossScale(found.get("scale", 65536.0), found.get("window", 1000))
    if fp16 is True:
        return PrecisionChoice("fp16", loss_scale=scale)
    if bf16 is True:
        return PrecisionChoice("bf16", bf16_master=found.get("bf16_master", False))
    if fp16 == "auto":
        return PrecisionChoice(None, loss_scale=scale)  # for the caller who turns it on
    return PrecisionChoice(None if bf16 == "auto" else "fp32")


def _enabled(reader: Reader, kind: str, found: dict[str, Any]) -> Handler:
    def take(name: str, value: Any) -> None:
        found[kind] = reader.flag(name, value)
        text = f"shard(precision={kind!r}), masters and sums in fp32" if value else "off"
        reader.mapped(name, value, text)

    return take


def _read_bf16(
    reader: Reader, block: str, values: Any, found: dict[str, Any], otherwise: bool
) -> None:
    found["bf16"] = _at_first(values, otherwise)

    def master(name: str, value: Any) -> None:
        if not reader.flag(name, value):
            reader.mapped(name, value, "masters are fp32")
        elif found["bf16"] is not True:
            reader.ignored(name, value, "bf16 is off")
        else:
            found["bf16_master"] = True
            text = "shard(precision=Precision(bf16, bf16, bf16)), optimizer state too"
            reader.mapped(name, value, text)

    def states(name: str, value: Any) -> None:
        if reader.flag(name, value) and not found.get("bf16_master") and found["bf16"] is True:
            raise reader.refusal(name, "it needs bf16_master_weights_and_grads to be true")
        reader.mapped(name, value, "optimizer state has the dtype of the masters")

    handlers: dict[str, Handler] = {
        "enabled": _enabled(reader, "bf16", found),
        "bf16_master_weights_and_grads": master,
        "bf16_optimizer_states": states,
    }
    ordered = _in_order(reader.mapping(block, values), BF16)
    reader.walk(ordered, f"{block}.", BF16, handlers, {"enabled": _AUTO.format(block)})


def _at_first(values: Any, otherwise: bool) -> bool | str:
    """Return whether a block is on as long as its key ``enabled`` was not read."""
    says = values.get("enabled") if isinstance(values, Mapping) else None
    return otherwise if says is None else "auto"


def _read_fp16(reader: Reader, values: Any, found: dict[str, Any], otherwise: bool) -> None:
    """Read the block; ``found`` gets scale and window, and whether the scale is static."""
    found["fp16"] = _at_first(values, otherwise)

    def scale(name: str, value: Any) -> None:
        number = reader.number(name, value, least=0)
        if number == 0:
            reader.mapped(name, value, "dynamic: torch's GradScaler")
            return
        found.update(scale=float(number), window=_NEVER, static=True)
        reader.mapped(
            name, value, "GradScaler(init_scale=) that never grows; an overflow halves it"
        )

    def power(name: str, value: Any) -> None:
        exponent = reader.integer(name, value)
        if exponent > _LARGEST_POWER:
            raise reader.refusal(name, f"expected at most {_LARGEST_POWER}, got {value!r}")
        dynamic(name, value, "scale", 2.0**exponent, f"GradScaler(init_scale={2.0**exponent:g})")

    def window(name: str, value: Any) -> None:
        steps = reader.integer(name, value, least=1)
        dynamic(name, value, "window", steps, f"GradScaler(growth_interval={steps})")

    def dynamic(name: str, value: Any, what: str, number: float, text: str) -> None:
        if "static" in found:
            reader.ignored(name, value, "loss_scale is static")
        else:
            found[what] = number
            reader.mapped(name, value, text)

    def master(name: str, value: Any) -> None:
        if reader.flag(name, value):
            raise reader.refusal(name, "masters are fp32 under fp16; leave it out")
        reader.mapped(name, value, "masters are fp32")

    def when_on(take: Handler) -> Handler:
        off = lambda name, value: reader.ignored(name, value, "fp16 is off")  # noqa: E731
        return lambda name, value: (off if found["fp16"] is False else take)(name, value)

    takers: dict[str, Handler] = {
        "loss_scale": scale,
        "initial_scale_power": power,
        "loss_scale_window": window,
        "hysteresis": partial(_hysteresis, reader),
        "consecutive_hysteresis": reader.ignoring(reader.flag, "torch's scaler has no hysteresis"),
        "min_loss_scale": reader.ignoring(
            partial(reader.number, least=0), "torch's scaler has no lower bound"
        ),
        "fp16_master_weights_and_grads": master,
    }
    handlers = {name: when_on(take) for name, take in takers.items()}
    handlers["enabled"] = _enabled(reader, "fp16", found)
    ordered = _in_order(reader.mapping("fp16", values), FP16)
    reader.walk(ordered, "fp16.", FP16, handlers, {"enabled": _AUTO.format("fp16")})


def _hysteresis(reader: Reader, name: str, value: Any) -> None:
    if reader.integer(name, value, least=1) == 1:
        reader.mapped(name, value, "every overflow halves the scale")
    else:
        reader.ignored(name, value, "torch's scaler halves at every overflow, as with 1")


def _in_order(values: Mapping[str, Any], table: Mapping[str, Key]) -> dict[str, Any]:
    """Put known keys in the table's order: what follows depends on ``enabled``, ``loss_scale``."""
    known = {name: values[name] for name in table if name in values}
    return {**known, **values}
