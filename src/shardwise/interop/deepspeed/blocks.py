"""The blocks of a DeepSpeed file: precision, ZeRO and offload, optimizer, scheduler.

Note [Two loss scalers]
~~~~~~~~~~~~~~~~~~~~~~~
Both skip the step after an overflow, halve the scale, and double it after a window of good steps.
DeepSpeed lets ``hysteresis - 1`` overflows pass before it halves, never goes below
``min_loss_scale``, waits one step more the first time, and never changes a static scale. Torch's
scaler does not. A run with overflows may therefore use other scales. A run without overflows takes
the same steps, as scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from os import PathLike
from typing import Any, Literal, TypeVar

from shardwise.errors import ConfigError
from shardwise.homes import Offload, folders_of
from shardwise.interop.deepspeed.reader import Entry, Handler, Reader
from shardwise.interop.foreign_keys import (
    KEYS,
    RATES,
    REFUSED_OPTIMIZERS,
    TORCH_SCHEDULERS,
    JsonMapping,
    JsonObject,
)
from shardwise.keys import check_names, near_miss
from shardwise.train.curves import CURVES, Curve, make_curve
from shardwise.train.optimizers import OPTIMIZERS, check_options

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PRECISION_BLOCKS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # one has an old name
_T = TypeVar("_T")

# -- fp16, bf16

_NEVER = 2**31 - 1
_LARGEST_POWER = 127


@dataclass(frozen=True)
class LossScale:
    """Arguments of torch's GradScaler; see Note [Two loss scalers]."""

    init_scale: float = 65536.0
    growth_interval: int = 1000


@dataclass(frozen=True)
class PrecisionChoice:
    """``name`` is a precision of ``shard()``, None while it is left to the caller.

    With ``bf16_master`` the master weights are bf16 too.
    """

    name: str | None
    bf16_master: bool = False
    loss_scale: LossScale | None = None


def read_precision(
    reader: Reader, content: JsonMapping, otherwise: str | None = None
) -> PrecisionChoice:
    """Read the blocks ``fp16`` and ``bf16``, whose old name is ``bfloat16``.

    ``otherwise`` is the precision if neither says ``enabled``; None is fp32.

    **Raises** ConfigError if both are on, or one asks for what torch's scaler cannot do.
    """
    if {"bf16", "bfloat16"} <= content.keys():
        raise reader.refusal("bfloat16", "it is the old name of bf16; give one of them")
    blocks = {name: content[name] for name in PRECISION_BLOCKS if content.get(name) is not None}
    said = {n: b.get("enabled") if isinstance(b, Mapping) else None for n, b in blocks.items()}
    if any(value is True for value in said.values()):
        otherwise = None
    found = _Precision({kind: otherwise == kind for kind in ("bf16", "fp16")})
    for name, value in said.items():
        if value is not None:  # "auto" until it is read
            found.on[PRECISION_BLOCKS[name]] = "auto"
        found.read(reader.entry(name, blocks[name]), PRECISION_BLOCKS[name])
    is_fp16, is_bf16 = found.on["fp16"], found.on["bf16"]
    if is_fp16 is True and is_bf16 is True:
        raise reader.refusal("fp16.enabled", "bf16 is on as well; turn one of them off")
    scale = LossScale(found.scale, found.window)
    if is_fp16 is True:
        return PrecisionChoice("fp16", loss_scale=scale)
    if is_bf16 is True:
        return PrecisionChoice("bf16", bf16_master=found.bf16_master)
    if is_fp16 == "auto":
        return PrecisionChoice(None, loss_scale=scale)  # for a caller who turns it on
    return PrecisionChoice(None if is_bf16 == "auto" else "fp32")


@dataclass
class _Precision:
    """The values of both blocks so far; ``on`` tells whether each is on."""

    on: dict[str, bool | Literal["auto"]]
    bf16_master: bool = False
    scale: float = LossScale.init_scale
    window: int = LossScale.growth_interval
    is_static: bool = False

    def read(self, block: Entry, kind: str) -> None:
        """Read one block. Later rows depend on `enabled` and `loss_scale`: rows give the order."""
        handlers: dict[str, Handler] = {
            "bf16_master_weights_and_grads": self._master,
            "bf16_optimizer_states": self._states,
        }
        if kind == "fp16":
            handlers = {
                "loss_scale": self._loss_scale,
                "initial_scale_power": self._power,
                "loss_scale_window": self._window,
            }
            for name, row in KEYS["fp16"].items():
                if not row.run:
                    handlers[name] = partial(self._if_on, handlers.get(name))
        handlers["enabled"] = partial(self._enabled, kind)
        values = block.mapping()
        ordered = {name: values[name] for name in KEYS[kind] if name in values} | values
        block.reader.entry(block.key, ordered).walk(kind, handlers)

    def _enabled(self, kind: str, entry: Entry) -> None:
        self.on[kind] = entry.flag()
        entry.mapped(
            f"shard(precision={kind!r}), masters and sums in fp32" if entry.value else "off"
        )

    def _master(self, entry: Entry) -> None:
        if not entry.flag():
            entry.mapped("masters are fp32")
        elif self.on["bf16"] is not True:
            entry.ignored("bf16 is off")
        else:
            self.bf16_master = True
            entry.mapped("shard(precision=Precision(bf16, bf16, bf16)), optimizer state too")

    def _states(self, entry: Entry) -> None:
        if entry.flag() and not self.bf16_master and self.on["bf16"] is True:
            raise entry.refusal("it needs bf16_master_weights_and_grads to be true")
        entry.mapped("optimizer state has the dtype of the masters")

    def _if_on(self, handler: Handler | None, entry: Entry) -> None:
        if self.on["fp16"] is False:
            entry.ignored("fp16 is off")
        elif handler is not None:
            handler(entry)
        else:
            entry.answer()

    def _loss_scale(self, entry: Entry) -> None:
        if number := entry.number(least=0):
            self.scale, self.window, self.is_static = float(number), _NEVER, True
            entry.mapped("GradScaler(init_scale=) that never grows; an overflow halves it")
        else:
            entry.mapped("dynamic: torch's GradScaler")

    def _power(self, entry: Entry) -> None:
        exponent = entry.integer()
        if exponent > _LARGEST_POWER:
            raise entry.refusal(f"expected at most {_LARGEST_POWER}, got {entry.value!r}")
        if self.is_static:
            return entry.ignored("loss_scale is static")
        self.scale = 2.0**exponent
        entry.mapped(f"GradScaler(init_scale={self.scale:g})")

    def _window(self, entry: Entry) -> None:
        steps = entry.integer(least=1)
        if self.is_static:
            return entry.ignored("loss_scale is static")
        self.window = steps
        entry.mapped(f"GradScaler(growth_interval={steps})")


# -- zero_optimization, offload

_LARGEST_PREFETCH = 1 << 40
_OLD_NAMES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}


def read_zero(entry: Entry, precision: str | None) -> JsonObject:
    """Return ``stage``, ``prefetch_bytes``, ``offload``, ``gather`` and ``reduce``, if given."""
    if entry.value is None or isinstance(entry.value, bool):
        stage = 1 if entry.value else 0
        entry.mapped(f"shard(stage={stage})")
        return {"stage": stage}
    block, reader = entry.mapping(), entry.reader
    for name in block:
        plain = name.removeprefix("stage3_")
        for other in {plain, _OLD_NAMES.get(name, name)} - {name}:
            if other in block and (name in _OLD_NAMES or block[other] != block[name]):
                why = f"{other} sets the same; leave one of them out"
                raise reader.refusal(f"{entry.key}.{name}", why)
    found: JsonObject = {}
    homes = Homes(reader)
    size = COMPUTE_BYTES[precision or ("bf16" if reader.plans else "fp32")]  # as the defaults

    def take_stage(key: Entry) -> None:
        found["stage"] = key.stage()
        key.mapped(f"shard(stage={found['stage']})")

    def prefetch(key: Entry) -> None:
        elements = key.integer()
        if elements > _LARGEST_PREFETCH:
            raise key.refusal(f"expected at most {_LARGEST_PREFETCH:,}, got {key.value!r}")
        found["prefetch_bytes"] = elements * size
        key.mapped(f"shard(schedule=Schedule({found['prefetch_bytes']}))")

    def quantized(ours: str, kind: str, otherwise: str, key: Entry) -> None:
        if not key.flag():
            key.mapped(otherwise)
        elif str(block.get("stage")) not in ("3", "auto"):
            key.ignored("DeepSpeed quantizes at stage 3 alone")
        else:
            found[ours] = kind
            key.mapped(f"Precision({ours}={kind!r}), for shard()")

    handlers: dict[str, Handler] = {
        "stage": take_stage,
        "prefetch_bucket_size": prefetch,
        "stage3_prefetch_bucket_size": prefetch,
        "offload_param": partial(homes.read_block, "params"),
        "offload_optimizer": partial(homes.read_block, "optimizer"),
        "cpu_offload": partial(homes.note_flag, "optimizer"),
        "cpu_offload_param": partial(homes.note_flag, "params"),
        "zero_quantized_weights": partial(
            quantized, "gather", "int8", "parameters travel in the compute dtype"
        ),
        "zero_quantized_gradients": partial(
            quantized, "reduce", "int4-a2a", "gradients travel unencoded"
        ),
    }
    entry.walk("zero_optimization", handlers)
    if "stage" not in block:
        reader.add("default", f"{entry.key}.stage", 0, "shard(stage=0)")
    if block.get("stage") != "auto":
        found.setdefault("stage", 0)
    offload = homes.settle(found.get("stage"))
    return found if offload is None else {**found, "offload": offload}


HomeKind = Literal["params", "optimizer"]
_TITLES: dict[HomeKind, str] = {"params": "parameters", "optimizer": "the optimizer's state"}


class Homes:
    """Where a file offloads state: noted key by key, settled when the stage is known.

    DeepSpeed offloads parameters at stage 3 alone, and may leave the optimizer on the device then.
    Shardwise steps where the parameters are: the optimizer follows them to host memory.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._devices: dict[HomeKind, tuple[Entry, str]] = {}
        self._paths: dict[HomeKind, Entry] = {}
        self._ratio: Entry | None = None

    def read_block(self, kind: HomeKind, entry: Entry) -> None:
        """Read ``offload_param`` or ``offload_optimizer``."""
        handlers: dict[str, Handler] = {
            "device": partial(self.note_device, kind),
            "nvme_path": partial(self.note_path, kind),
            "ratio": self._note_ratio,
        }
        entry.walk(entry.key, handlers)

    def note_device(self, kind: HomeKind, entry: Entry) -> None:
        """Note the device; true means "cpu" and false "none"."""
        is_flag = isinstance(entry.value, bool)
        where = ("none", "cpu")[entry.value] if is_flag else entry.value
        word = Entry(self._reader, entry.key, where).word(("none", "cpu", "nvme"))
        self._devices[kind] = entry, word

    def note_flag(self, kind: HomeKind, entry: Entry) -> None:
        """Note an old key, whose value is true or false."""
        entry.flag()
        self.note_device(kind, entry)

    def note_path(self, kind: HomeKind, entry: Entry) -> None:
        """Note the folder of "nvme"."""
        given = entry.value
        text = str(given) if isinstance(given, PathLike) else given
        path = Entry(self._reader, entry.key, text)
        if not path.word() or "," in path.value:
            raise entry.refusal(f"expected a folder, without a comma, got {path.value!r}")
        self._paths[kind] = path

    def _note_ratio(self, entry: Entry) -> None:
        if not 0 <= entry.number() <= 1:
            raise entry.refusal(f"expected 0 to 1, got {entry.value!r}")
        self._ratio = entry

    def settle(self, stage: int | None) -> str | Offload | None:
        """Return ``offload`` and report on every key; None if the file moves no state.

        A plan has an offload if the file has a key of it. ``stage`` None means undecided.

        **Raises** ConfigError if state is to be in files without a folder, unless for a plan.
        """
        has_params = stage in (None, 3)
        params = self._place("params") if has_params else "device"
        said = self._place("optimizer")
        optimizer = "cpu" if said == "device" != params else said
        ratio = self._ratio
        fraction = float(ratio.value) if ratio is not None and said != "device" else 1.0
        offload: str | Offload | None = None
        if optimizer != "device":
            offload = Offload(params, None, optimizer, fraction)
            if fraction == 1 and (params == "cpu" or not has_params):
                offload = optimizer  # one word says the same
        self._report_devices(stage, offload, params, follows=said == "device" != params)
        for kind, path in self._paths.items():
            if folders_of(params if kind == "params" else said):
                path.mapped("the folder; its files have no names")
            else:
                path.ignored(f"{_TITLES[kind]}: not in files")
        if ratio is not None and said == "device":
            ratio.ignored("the optimizer's block offloads nothing")
        elif ratio is not None:
            ratio.mapped(f"fraction={fraction:g} of all that is offloaded, up to whole units")
        if offload is None and self._devices and self._reader.plans:
            return Offload()
        return offload

    def _place(self, kind: HomeKind) -> str:
        if kind not in self._devices:
            return "device"
        entry, where = self._devices[kind]
        if where != "nvme":
            return "device" if where == "none" else where
        if kind in self._paths:
            return f"nvme:{self._paths[kind].value}"
        if self._reader.plans:
            return "nvme"
        wanted = entry.key.replace("device", "nvme_path")
        raise entry.refusal(f"nvme needs a folder; add {wanted}, one on that disk")

    def _report_devices(
        self, stage: int | None, offload: str | Offload | None, params: str, follows: bool
    ) -> None:
        for kind, (entry, where) in self._devices.items():
            if kind == "params" and where != "none" and params == "device":
                why = f"full parameters stay on the device at stage {stage}, as in DeepSpeed"
                entry.ignored(why)
            elif kind == "optimizer" and where == "none" and follows:
                entry.ignored("it is in host memory: an optimizer steps where its parameters rest")
            elif where == "none":
                entry.mapped(f"on the device: {_TITLES[kind]}")
            else:
                also = "; the optimizer is in host memory too, where its parameters rest"
                spelled = repr(offload)
                if isinstance(offload, Offload):
                    keys = offload_keys(offload).items()
                    spelled = f"Offload({', '.join(f'{name}={value!r}' for name, value in keys)})"
                entry.mapped(f"shard(offload={spelled}){also if follows else ''}")


def offload_keys(offload: str | Offload) -> Any:
    """Return an offload as the key of `shardwise train`: a word, or what differs from defaults."""
    if isinstance(offload, str):
        return offload
    usual = {"grads": "cpu", "step_on": "host"}
    found = {x.name: getattr(offload, x.name) for x in fields(offload)}
    defaults = {x.name: x.default for x in fields(offload)}
    return {n: v for n, v in found.items() if v != defaults[n] and usual.get(n) != v}


# -- optimizer, scheduler

# Values of a curve's options at "auto"; scheduler() needs a value for all others.
_AUTO_OPTIONS = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_type": "log"}


@dataclass(frozen=True)
class OptimizerChoice:
    """``name`` is a row of ``OPTIMIZERS``; ``auto`` are arguments that the file leaves to you."""

    name: str
    arguments: JsonMapping
    auto: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True)
class TorchSchedule:
    """A class of torch.optim.lr_scheduler, with its arguments."""

    name: str
    options: JsonMapping


def read_named(
    entry: Entry, make: Callable[[Reader, Entry, JsonObject], _T], example: str
) -> _T | None:
    """Read a block of ``type`` and ``params`` by ``make``; None if it has no type."""
    title, reader, block = entry.key, entry.reader, entry.mapping()
    found: list[_T] = []

    def take_type(kind: Entry) -> None:
        kind.word()
        params = reader.entry(f"{title}.params", block.get("params") or {}).mapping()
        filled = {name: reader.fill(f"{title}.params.{name}", v) for name, v in params.items()}
        found.append(make(reader, kind, filled))

    def take_params(params: Entry) -> None:
        if "type" not in block:
            why = f"expected a name, such as {example}, for {params.key}"
            raise reader.refusal(f"{title}.type", why)

    entry.walk(title, {"type": take_type, "params": take_params})
    return found[0] if found else None


def choose_optimizer(reader: Reader, kind: Entry, params: JsonObject) -> OptimizerChoice:
    """Return a class of torch.optim and its arguments. **Raises** ConfigError."""
    name = kind.value.lower()
    if name in REFUSED_OPTIMIZERS:
        raise kind.refusal(f"{kind.value}: {REFUSED_OPTIMIZERS[name]}")
    if name not in OPTIMIZERS:
        titles = [title for title, _ in OPTIMIZERS.values()]
        near = get_close_matches(name.replace("-", "_"), OPTIMIZERS, n=1)
        hint = f"; did you mean {OPTIMIZERS[near[0]][0]!r}?" if near else ""
        raise kind.refusal(f"expected one of {', '.join(titles)}, got {kind.value!r}{hint}")
    defaults: JsonObject = {"weight_decay": 0.0}
    if name in ("adam", "adamw"):
        name, defaults["weight_decay"] = _choose_adam(reader, name, params)
    title = OPTIMIZERS[name][0]
    kind.mapped(f"torch.optim.{title}")
    defaults["lr"] = RATES.get(name, 1e-3)
    auto = frozenset(key for key, value in params.items() if value == "auto")
    entries = [
        reader.entry(f"optimizer.params.{key}", value)
        for key, value in params.items()
        if key not in auto
    ]
    arguments = {e.key.rpartition(".")[2]: _argument(e) for e in entries}
    try:
        check_options(name, {**arguments, **dict.fromkeys(auto)}, "optimizer.params")
    except ConfigError as error:
        raise ConfigError(f"{reader.source}: {error}") from None
    for key, value in arguments.items():
        reader.add("mapped", f"optimizer.params.{key}", value, f"{title}({key}=)")
    for key in sorted(auto):
        text = f"give {key}= to optimizer(), or auto="
        default = f"{defaults[key]:g}" if defaults.get(key) is not None else "torch's default"
        text += "" if key == "lr" else f"; {default} otherwise"
        reader.add("auto", f"optimizer.params.{key}", "auto", text)
    return OptimizerChoice(name, {**defaults, **arguments}, auto)


def _choose_adam(reader: Reader, name: str, params: JsonObject) -> tuple[str, float]:
    """Take out DeepSpeed's own arguments of Adam; return the name and the default weight decay.

    "Adam" is AdamW unless adam_w_mode is false.
    """
    prefix = "optimizer.params."
    mode = reader.entry(f"{prefix}adam_w_mode", params.get("adam_w_mode", True))
    is_decoupled = mode.flag() or name == "adamw"
    is_torchs = reader.entry(f"{prefix}torch_adam", params.get("torch_adam", False)).flag()
    if "adam_w_mode" in params:
        mode.mapped("the class of torch")
        del params["adam_w_mode"]
    if "max_grad_norm" in params:
        raise reader.refusal(f"{prefix}max_grad_norm", "use gradient_clipping at the top instead")
    if "bias_correction" in params:
        correction = reader.entry(f"{prefix}bias_correction", params.pop("bias_correction"))
        if correction.value != "auto" and not correction.flag():
            raise correction.refusal("torch's Adams always correct it")
        correction.mapped("torch's Adams always correct it")
    for key, row in KEYS["optimizer.params"].items():
        if row.run and key in params:
            reader.add("ignored", f"{prefix}{key}", params.pop(key), row.run)
    # 0.01 is the default of torch's AdamW; DeepSpeed's is 0
    return ("adamw" if is_decoupled else "adam"), 0.01 if is_torchs and is_decoupled else 0.0


def _argument(entry: Entry) -> object:
    """Check one argument of an optimizer."""
    name, value = entry.key.rpartition(".")[2], entry.value
    if name == "betas":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise entry.refusal(f"expected two numbers, got {value!r}")
        return tuple(Entry(entry.reader, entry.key, beta).number(least=0) for beta in value)
    row = KEYS["optimizer.params"].get(name)
    if row is not None and row.kind == "flag":
        return None if value is None else entry.flag()
    return entry.number()


def check_schedule_options(name: str, options: JsonMapping, where: str) -> None:
    """Raise ConfigError if an option is not one of the scheduler of torch."""
    check_names(options, TORCH_SCHEDULERS[name], where, f"option {{!r}} of {name}")


def choose_schedule(reader: Reader, kind: Entry, options: JsonObject) -> Curve | TorchSchedule:
    """Return one of DeepSpeed's curves, or a scheduler of torch. **Raises** ConfigError."""
    name, params = kind.value, "scheduler.params"
    if name in TORCH_SCHEDULERS:
        check_schedule_options(name, options, f"{reader.source}: {params}")
        kind.mapped(f"torch.optim.lr_scheduler.{name}")
        for key, value in options.items():
            if value == "auto":
                raise reader.refusal(f"{params}.{key}", "give a value by auto=")
            reader.add("mapped", f"{params}.{key}", value, f"{name}({key}=)")
        return TorchSchedule(name, options)
    if name not in CURVES:
        hint = near_miss(name, [*CURVES, *TORCH_SCHEDULERS])
        raise kind.refusal(f"expected one of {', '.join(CURVES)}, got {name!r}{hint}")
    auto = {key for key, value in options.items() if value == "auto"}
    filled = {k: _AUTO_OPTIONS.get(k, 1) if k in auto else v for k, v in options.items()}
    try:
        curve = make_curve(name, filled, params).without(auto - _AUTO_OPTIONS.keys())
    except ConfigError as error:
        raise ConfigError(f"{reader.source}: {error}") from None
    kind.mapped("the same curve")
    for key, value in options.items():
        if key not in auto:
            reader.add("mapped", f"{params}.{key}", value, "an option of the curve")
            continue
        text = f"give {key}= to scheduler()"
        if key in _AUTO_OPTIONS:
            default = _AUTO_OPTIONS[key]
            of_optimizer = "the optimizer's learning rate"
            text = f"{of_optimizer if default is None else default}, or auto="
        reader.add("auto", f"{params}.{key}", "auto", text)
    return curve
