"""A DeepSpeed file as values under keys of ours: precision, ZeRO and offload, optimizer, scheduler.

Note [Two loss scalers]
~~~~~~~~~~~~~~~~~~~~~~~
Both skip the step after an overflow, halve the scale, and double it after a window of good steps.
DeepSpeed lets ``hysteresis - 1`` overflows pass before it halves, never goes below
``min_loss_scale``, waits one step more the first time, and never changes a static scale. Torch's
scaler does not. A run with overflows may therefore use other scales. A run without overflows takes
the same steps, as scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.offload_blocks import store_offload
from shardwise.interop.foreign_keys import (
    KEYS,
    RATES,
    REFUSED_OPTIMIZERS,
    TORCH_SCHEDULERS,
    Entry,
    Handler,
    JsonMapping,
    JsonObject,
    Reader,
    Report,
)
from shardwise.keys import check_names, near_miss
from shardwise.train.curves import CURVES, SchedulerCurve, make_curve
from shardwise.train.optimizers import OPTIMIZERS, check_options

SIZES = ("micro_batch", "accumulation", "global_batch")
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PRECISION_BLOCKS = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}  # one has an old name
BETAS = ("beta1", "beta2")
_USUAL_BETAS = (0.9, 0.999)  # torch's default
_SCALE = {"loss_scale": 65536.0, "loss_scale_window": 1000}
_DEFAULT_CLIPPING = 1.0  # DeepSpeed's since 0.19; it was 0 before
_LARGEST_POWER = 127
_NEVER = 2**31 - 1
_OLD_NAMES = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "gather_16bit_weights_on_model_save",
}
# Values of a curve's options at "auto"; scheduler() needs a value for all others.
_AUTO_OPTIONS = {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_type": "log"}


@dataclass(frozen=True)
class TorchSchedule:
    """A class of torch.optim.lr_scheduler, with its arguments."""

    name: str
    options: JsonMapping


@dataclass(frozen=True)
class Reading:
    """A DeepSpeed file that was read.

    ``values`` are the keys of ours that it sets, ``defaults`` DeepSpeed's values of others. A key
    in neither is left open. ``precision`` may be None too: it is at "auto". ``auto`` are arguments
    of the optimizer that the file leaves to you, by our keys.
    """

    values: JsonMapping
    defaults: JsonMapping
    auto: frozenset[str]
    schedule: SchedulerCurve | TorchSchedule | None
    report: Report


def resolve(sizes: Mapping[str, int], world_size: int | None, source: str) -> dict[str, int | None]:
    """Compute the third of the batch sizes from any two; accumulation defaults to 1.

    ``micro_batch`` counts samples per rank and forward pass, ``accumulation`` passes per step,
    ``global_batch`` samples per step over all ranks. A size is None if the caller decides it, or if
    it follows from the number of ranks, which is not known.

    **Raises** ConfigError with the numbers if they contradict each other.
    """
    micro, passes, whole = map(sizes.get, SIZES)
    if passes is None and (micro is None) != (whole is None):
        passes = 1
    if world_size is not None and whole is not None:
        if micro is None and passes is not None:
            micro = whole // (world_size * passes)
        elif passes is None and micro is not None:
            passes = whole // (world_size * micro)
        if micro is None or passes is None or micro * passes * world_size != whole or not whole:
            has_both = micro is not None and passes is not None
            product = f" = {(micro or 0) * (passes or 0) * world_size}" if has_both else ""
            raise ConfigError(
                f"{source}: train_batch_size: expected train_micro_batch_size_per_gpu x "
                f"gradient_accumulation_steps x ranks = {micro} x {passes} x {world_size}"
                f"{product}, got {whole}; change one of them, or the number of ranks"
            )
    elif world_size is not None and micro is not None and passes is not None:
        whole = micro * passes * world_size
    return dict(zip(SIZES, (micro, passes, whole), strict=True))


class DeepSpeedFile:
    """A loaded file while it is read. The order of keys is that of the table's rows.

    ``reader.values`` may have batch sizes that the caller gives. ``precision`` counts if the file
    does not say one.
    """

    def __init__(self, content: JsonMapping, reader: Reader, precision: object = None) -> None:
        self.content, self.reader = content, reader
        self.values, self.defaults = reader.values, reader.defaults
        self.auto: set[str] = set()
        self.schedule: SchedulerCurve | TorchSchedule | None = None
        self.is_on = self._decide_precision(precision)

    def read(self) -> Reading:
        """Read the file.

        **Raises** ConfigError that names the source, the key and the nearest known one.
        """
        reader, content = self.reader, self.content
        handlers: dict[str, Handler] = {
            "bf16.bf16_master_weights_and_grads": self._master,
            "bf16.bf16_optimizer_states": self._states,
            "zero_optimization": self._zero,
            "zero_optimization.prefetch_bucket_size": self._prefetch,
            "zero_optimization.stage3_prefetch_bucket_size": self._prefetch,
            "zero_optimization.zero_hpz_partition_size": self._nearby,
            "zero_optimization.zero_quantized_weights": self._quantized,
            "zero_optimization.zero_quantized_gradients": self._quantized,
            "optimizer.type": self._optimizer,
            "optimizer.params": partial(self._needs_type, "AdamW"),
            "scheduler.type": self._scheduler,
            "scheduler.params": partial(self._needs_type, "WarmupLR"),
            "tensor_parallel": _refuse_tensor_parallel,
        }
        for name, row in KEYS["fp16"].items():
            if not row.run and name != "enabled":
                handlers[f"fp16.{name}"] = partial(self._scale, name)
        reader.read(content, "top", handlers)
        # DeepSpeed's defaults that change the steps.
        if not reader.plans and content.get("zero_optimization") is None:
            reader.add("default", "zero_optimization", None, "shard(stage=0)")
        if content.get("zero_optimization") is None:
            self.defaults["stage"] = 0
        if "grad_clip" not in self.values:
            self.defaults["grad_clip"] = _DEFAULT_CLIPPING
            if content.get("gradient_clipping") != "auto" and not reader.plans:
                text = "DeepSpeed's default since 0.19; 0 turns clipping off"
                reader.add("default", "gradient_clipping", _DEFAULT_CLIPPING, text)
        auto = frozenset(self.auto)
        return Reading(self.values, self.defaults, auto, self.schedule, reader.report())

    # -- fp16, bf16

    def _decide_precision(self, otherwise: object) -> dict[str, object]:
        """Store the precision that the blocks decide; return whether each is on, or "auto"."""
        content, reader = self.content, self.reader
        if {"bf16", "bfloat16"} <= content.keys():
            raise reader.refusal("bfloat16", "it is the old name of bf16; give one of them")
        enabled: dict[str, object] = {}
        for name, kind in PRECISION_BLOCKS.items():
            block = content.get(name)
            if isinstance(block, Mapping) and block.get("enabled") is not None:
                enabled[kind] = reader.fill(f"{name}.enabled", block["enabled"])
        is_explicit = any(isinstance(value, bool) for value in enabled.values())
        if otherwise is not None and not any(value is True for value in enabled.values()):
            enabled = {kind: value for kind, value in enabled.items() if value != "auto"}
            enabled = {"bf16": otherwise == "bf16", "fp16": otherwise == "fp16", **enabled}
        is_on = {"bf16": False, "fp16": False, **enabled}
        on = [kind for kind, value in is_on.items() if value is True]
        if len(on) > 1:
            raise reader.refusal("fp16.enabled", "bf16 is on as well; turn one of them off")
        if on or "auto" not in is_on.values():
            (self.values if is_explicit else self.defaults)["precision"] = on[0] if on else "fp32"
        if on == ["fp16"] or (not on and is_on["fp16"] == "auto"):
            self.defaults.update(_SCALE)  # at "auto" for a caller who turns it on
        return is_on

    @property
    def _precision(self) -> str | None:
        found: str | None = {**self.defaults, **self.values}.get("precision")
        return found

    def _master(self, entry: Entry) -> None:
        if not entry.flag():
            entry.tell("mapped", "masters are fp32")
        elif self.is_on["bf16"] is not True:
            entry.tell("ignored", "bf16 is off")
        else:
            self.values["bf16_master"] = True
            entry.tell(
                "mapped", "shard(precision=Precision(bf16, bf16, bf16)), optimizer state too"
            )

    def _states(self, entry: Entry) -> None:
        has_masters = "bf16_master" in self.values
        if entry.flag() and not has_masters and self.is_on["bf16"] is True:
            raise entry.refusal("it needs bf16_master_weights_and_grads to be true")
        entry.tell("mapped", "optimizer state has the dtype of the masters")

    def _scale(self, name: str, entry: Entry) -> None:
        if self.is_on["fp16"] is False:
            entry.tell("ignored", "fp16 is off")
        elif name == "loss_scale" and (number := entry.number(least=0)):
            self.values.update(loss_scale=float(number), loss_scale_window=_NEVER)
            entry.tell("mapped", "GradScaler(init_scale=) that never grows; an overflow halves it")
        elif name == "loss_scale":
            entry.tell("mapped", "dynamic: torch's GradScaler")
        elif name not in ("initial_scale_power", "loss_scale_window"):
            entry.answer()
        elif self.values.get("loss_scale_window") == _NEVER:
            entry.tell("ignored", "loss_scale is static")
        elif name == "loss_scale_window":
            self.values["loss_scale_window"] = entry.integer(least=1)
            entry.tell("mapped", f"GradScaler(growth_interval={entry.integer()})")
        else:
            scale = self.values["loss_scale"] = 2.0 ** entry.integer(most=_LARGEST_POWER)
            entry.tell("mapped", f"GradScaler(init_scale={scale:g})")

    # -- zero_optimization

    def _zero(self, entry: Entry) -> None:
        if isinstance(entry.value, bool):
            self.values["stage"] = int(entry.value)
            return entry.tell("mapped", f"shard(stage={int(entry.value)})")
        block = entry.mapping()
        for name in block:
            plain = name.removeprefix("stage3_")
            for other in {plain, _OLD_NAMES.get(name, name)} - {name}:
                if other in block and (name in _OLD_NAMES or block[other] != block[name]):
                    why = f"{other} sets the same; leave one of them out"
                    raise self.reader.refusal(f"{entry.key}.{name}", why)
        entry.walk()
        if "stage" not in block and not self.reader.plans:
            self.reader.add("default", f"{entry.key}.stage", 0, "shard(stage=0)")
        if block.get("stage") != "auto":
            self.defaults["stage"] = 0
        store_offload(self.reader, {**self.defaults, **self.values}.get("stage"))
        return None

    def _prefetch(self, entry: Entry) -> None:
        kind = self._precision or ("bf16" if self.reader.plans else "fp32")  # as the defaults
        num_bytes = entry.integer(most=1 << 40) * COMPUTE_BYTES[kind]
        self.values["prefetch_bytes"] = num_bytes
        entry.tell("mapped", f"shard(schedule=Schedule({num_bytes}))")

    def _nearby(self, entry: Entry) -> None:
        stage = self.content["zero_optimization"].get("stage")
        if entry.integer(least=1) == 1:
            entry.tell("mapped", "every gather is from all ranks")
        elif str(stage) not in ("3", "auto"):
            entry.tell("ignored", "DeepSpeed gathers parameters at stage 3 alone")
        else:
            entry.store()

    def _quantized(self, entry: Entry) -> None:
        stage = self.content["zero_optimization"].get("stage")
        if entry.flag() and str(stage) not in ("3", "auto"):
            entry.tell("ignored", "DeepSpeed quantizes at stage 3 alone")
        else:
            entry.store()

    # -- optimizer, scheduler

    def _needs_type(self, example: str, params: Entry) -> None:
        """Raise ConfigError for parameters of nothing. `_params` reads them."""
        block = params.key.partition(".")[0]
        if self.content[block].get("type") is None:
            why = f"expected a name, such as {example}, for {params.key}"
            raise self.reader.refusal(f"{block}.type", why)

    def _params(self, entry: Entry) -> JsonObject:
        """Return the parameters beside a type, with the caller's values for "auto"."""
        title = entry.key.removesuffix(".type")
        block = self.content[title]
        path = f"{title}.params"
        params = Entry(self.reader, path, block.get("params") or {}).mapping()
        return {name: self.reader.fill(f"{path}.{name}", v) for name, v in params.items()}

    def _optimizer(self, kind: Entry) -> None:
        reader, name, params = self.reader, kind.word().lower(), self._params(kind)
        self.values["optimizer"] = name
        if reader.plans:
            return kind.tell("mapped")
        if name in REFUSED_OPTIMIZERS:
            raise kind.refusal(f"{kind.value}: {REFUSED_OPTIMIZERS[name]}")
        if name not in OPTIMIZERS:
            titles = [title for title, _ in OPTIMIZERS.values()]
            near = get_close_matches(name.replace("-", "_"), OPTIMIZERS, n=1)
            hint = f"; did you mean {OPTIMIZERS[near[0]][0]!r}?" if near else ""
            raise kind.refusal(f"expected one of {', '.join(titles)}, got {kind.value!r}{hint}")
        arguments: JsonObject = {}
        auto: set[str] = set()
        defaults = {"weight_decay": 0.0, "lr": RATES.get(name, 1e-3)}
        is_adam = name in ("adam", "adamw")
        if is_adam:  # AdamW unless adam_w_mode is false
            name = "adam" if name == "adam" and params.get("adam_w_mode") is False else "adamw"
            if name == "adamw" and params.get("torch_adam") is True:
                defaults["weight_decay"] = 0.01  # torch's default; that of DeepSpeed's own is 0
        title = OPTIMIZERS[name][0]
        kind.tell("mapped", f"torch.optim.{title}")
        for key, value in params.items():
            path, row = f"optimizer.params.{key}", KEYS["optimizer.params"].get(key)
            entry = Entry(reader, path, value, path, row)
            if is_adam and row is not None and (row.run or row.answers):
                entry.read()
            elif value == "auto":
                auto.add(key)
            else:
                arguments[key] = _argument(entry)
        try:
            check_options(name, {**arguments, **dict.fromkeys(auto)}, "optimizer.params")
        except ConfigError as error:
            raise ConfigError(f"{reader.source}: {error}") from None
        for key, value in arguments.items():
            reader.add("mapped", f"optimizer.params.{key}", value, f"{title}({key}=)")
        for key in sorted(auto):
            text = f"give {key}= to optimizer(), or auto="
            default = f"{defaults[key]:g}" if key in defaults else "torch's default"
            text += "" if key == "lr" else f"; {default} otherwise"
            reader.add("auto", f"optimizer.params.{key}", "auto", text)
        if "betas" in OPTIMIZERS[name][1]:
            defaults |= dict(zip(BETAS, _USUAL_BETAS, strict=True))
        self.values |= {"optimizer": name, **_as_keys(arguments)}
        self.defaults |= defaults
        self.auto = {*auto, *(BETAS if "betas" in auto else ())}
        return None

    def _scheduler(self, kind: Entry) -> None:
        """Read one of DeepSpeed's curves, or a scheduler of torch."""
        reader, name, params = self.reader, kind.word(), "scheduler.params"
        options = self._params(kind)
        if name in TORCH_SCHEDULERS:
            check_schedule_options(name, options, f"{reader.source}: {params}")
            kind.tell("mapped", f"torch.optim.lr_scheduler.{name}")
            for key, value in options.items():
                if value == "auto":
                    raise reader.refusal(f"{params}.{key}", "give a value by auto=")
                reader.add("mapped", f"{params}.{key}", value, f"{name}({key}=)")
            self.schedule = TorchSchedule(name, options)
            return
        if name not in CURVES:
            hint = near_miss(name, [*CURVES, *TORCH_SCHEDULERS])
            if name in ("OneCycle", "LRRangeTest"):
                hint = "; make OneCycleLR or CyclicLR of torch in a loop of your own"
            raise kind.refusal(f"expected one of {', '.join(CURVES)}, got {name!r}{hint}")
        auto = {key for key, value in options.items() if value == "auto"}
        filled = {k: _AUTO_OPTIONS.get(k, 1) if k in auto else v for k, v in options.items()}
        try:
            self.schedule = make_curve(name, filled, params).without(auto - _AUTO_OPTIONS.keys())
        except ConfigError as error:
            raise ConfigError(f"{reader.source}: {error}") from None
        kind.tell("mapped", "the same curve")
        for key, value in options.items():
            default = _AUTO_OPTIONS.get(key) or "the optimizer's learning rate"
            if key not in auto:
                reader.add("mapped", f"{params}.{key}", value, "an option of the curve")
            elif key in _AUTO_OPTIONS:
                reader.add("auto", f"{params}.{key}", "auto", f"{default}, or auto=")
            else:
                reader.add("auto", f"{params}.{key}", "auto", f"give {key}= to scheduler()")


def check_schedule_options(name: str, options: JsonMapping, where: str) -> None:
    """Raise ConfigError if an option is not one of the scheduler of torch."""
    check_names(options, TORCH_SCHEDULERS[name], where, f"option {{!r}} of {name}")


def _as_keys(arguments: JsonMapping) -> JsonObject:
    """Return an optimizer's arguments as keys of ours."""
    options = dict(arguments)
    keys: JsonObject = {key: options.pop(key) for key in ("lr", "weight_decay") if key in options}
    if "betas" in options:
        keys |= zip(BETAS, options.pop("betas"), strict=True)
    return {**keys, "optimizer_options": options} if options else keys


def _argument(entry: Entry) -> object:
    """Check one argument of an optimizer."""
    name, value = entry.key.rpartition(".")[2], entry.value
    if name == "betas":
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise entry.refusal(f"expected two numbers, got {value!r}")
        return tuple(Entry(entry.reader, entry.key, beta).number(least=0) for beta in value)
    if entry.row is not None and entry.row.kind == "flag":
        return None if value is None else entry.flag()
    return entry.number()


def _refuse_tensor_parallel(entry: Entry) -> None:
    values = entry.mapping()
    inner = values.get("tp", values.get("tensor_parallel"))
    sizes = [values.get("autotp_size", 0), values.get("tp_size", 0)]
    sizes.append(inner.get("tp_size", 1) if isinstance(inner, Mapping) else 1)
    if any(isinstance(size, int) and size > 1 for size in sizes):
        raise entry.refusal("only data is parallel here; leave it out")
    entry.tell("mapped", "only data is parallel")
