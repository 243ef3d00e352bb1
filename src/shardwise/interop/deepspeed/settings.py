"""``from_deepspeed()``: a DeepSpeed config as arguments of ``shard()`` and parts of a loop."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.blocks import (
    PRECISION_BLOCKS,
    OptimizerChoice,
    PrecisionChoice,
    TorchSchedule,
    check_schedule_options,
    choose_optimizer,
    choose_schedule,
    read_named,
    read_precision,
    read_zero,
)
from shardwise.interop.deepspeed.reader import Entry, Handler, Reader, Report
from shardwise.interop.foreign_keys import BATCH_KEYS, JsonMapping, JsonObject, load_json
from shardwise.train.curves import Curve
from shardwise.train.optimizers import check_options, optimizer_class

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

DEFAULT_CLIPPING = 1.0  # DeepSpeed's since 0.19; it was 0 before
_WRONG_VALUES = TypeError, ValueError, ArithmeticError, RuntimeError  # raised by classes of torch


@dataclass(frozen=True)
class Batch:
    """Samples per rank and forward pass, passes per step, and samples per step over all ranks.

    A size of None is decided by the caller, or follows from the number of ranks, not yet known.
    """

    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None


def resolve(sizes: Mapping[str, int], world_size: int | None, source: str) -> Batch:
    """Compute the third size from any two, as DeepSpeed does; accumulation defaults to 1.

    Without a number of ranks, sizes that depend on it stay None.

    **Raises** ConfigError with the numbers if they contradict each other.
    """
    micro, passes = sizes.get("micro_batch"), sizes.get("accumulation")
    whole = sizes.get("global_batch")
    if passes is None and (micro is None) != (whole is None):
        passes = 1
    if world_size is None:
        return Batch(micro, passes, whole)
    if whole is None:
        if micro is None or passes is None:
            return Batch(micro, passes, None)
        return Batch(micro, passes, micro * passes * world_size)
    if micro is None and passes is not None:
        micro = whole // (world_size * passes)
    elif passes is None and micro is not None:
        passes = whole // (world_size * micro)
    if micro is None or passes is None or micro * passes * world_size != whole or not whole:
        product = "" if micro is None or passes is None else f" = {micro * passes * world_size}"
        raise ConfigError(
            f"{source}: train_batch_size: expected train_micro_batch_size_per_gpu x "
            f"gradient_accumulation_steps x ranks = {micro} x {passes} x {world_size}"
            f"{product}, got {whole}; change one of them, or the number of ranks"
        )
    return Batch(micro, passes, whole)


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed config for a loop with ``shard()``.

    ``batch`` has the three sizes, None while undecided; ``micro_batch``, ``accumulation`` and
    ``global_batch`` are the same, never None. ``gradient_clipping`` is the largest norm, 0 turns
    clipping off. ``activation_checkpointing`` is the block of the file; it turns nothing on.
    ``report`` has every key of the file: ``print()`` it.
    """

    batch: Batch
    zero: Mapping[str, Any]
    precision: PrecisionChoice
    gradient_clipping: float
    optimizer_choice: OptimizerChoice | None
    schedule: Curve | TorchSchedule | None
    activation_checkpointing: Mapping[str, Any]
    report: Report = field(repr=False)

    @property
    def shard(self) -> dict[str, Any]:
        """Arguments of ``shard()``: ``shard(model, **settings.shard)``."""
        arguments: dict[str, Any] = dict(self.zero)
        if "prefetch_bytes" in arguments:
            from shardwise.config import Schedule

            arguments["schedule"] = Schedule(prefetch_bytes=arguments.pop("prefetch_bytes"))
        coded = {name: arguments.pop(name) for name in ("gather", "reduce") if name in arguments}
        if self.precision.bf16_master:
            import torch

            from shardwise.config import Precision

            dtype = torch.bfloat16
            arguments["precision"] = replace(Precision(dtype, dtype, dtype), **coded)
        elif coded:
            from shardwise.config import PRECISIONS

            named = PRECISIONS[self.precision.name or "fp32"]
            arguments["precision"] = replace(named, **coded)
        elif self.precision.name is not None:
            arguments["precision"] = self.precision.name
        return arguments

    @property
    def micro_batch(self) -> int:
        """Samples of one rank in one forward pass. **Raises** ConfigError while undecided."""
        return self._size("micro_batch")

    @property
    def accumulation(self) -> int:
        """Forward passes per step. **Raises** ConfigError while undecided."""
        return self._size("accumulation")

    @property
    def global_batch(self) -> int:
        """Samples of a step over all ranks. **Raises** ConfigError while undecided."""
        return self._size("global_batch")

    def _size(self, name: str) -> int:
        size: int | None = getattr(self.batch, name)
        if size is None:
            batch = self.batch
            others = (batch.micro_batch, batch.accumulation, batch.global_batch)
            ranks = ", or call that after init_process_group(), or with world_size="
            follows = sum(size is not None for size in others) == 2
            raise ConfigError(
                f"{self.report.source}: {name} is not decided: give {name}= to from_deepspeed()"
                f"{ranks if follows else ''}"
            )
        return size

    def optimizer(self, params: Iterable[Any], **overrides: Any) -> torch.optim.Optimizer:
        """Build the optimizer on parameters or groups of them; ``overrides`` win over the file.

        **Raises** ConfigError if the file has no optimizer, leaves the learning rate to you, or has
        an argument that the class of torch refuses.
        """
        choice = self.optimizer_choice
        if choice is None:
            raise ConfigError(
                f"{self.report.source}: it has no optimizer; make your own from model.parameters()"
            )
        if "lr" in choice.auto - overrides.keys():
            raise ConfigError(
                f'{self.report.source}: optimizer.params.lr is "auto"; give lr= to optimizer()'
            )
        if callable(getattr(params, "parameters", None)):
            kind = type(params).__name__
            raise ConfigError(f"optimizer(): expected parameters, got a {kind}; give .parameters()")
        check_options(choice.name, overrides, "optimizer()")
        make: Any = optimizer_class(choice.name)
        try:
            made: torch.optim.Optimizer = make(params, **{**choice.arguments, **overrides})
        except _WRONG_VALUES as error:
            raise self._refused("optimizer", make, error) from None
        return made

    def scheduler(self, optimizer: torch.optim.Optimizer, **overrides: Any) -> LRScheduler:
        """Build the scheduler; call its ``step()`` after each update. ``overrides`` are options.

        **Raises** ConfigError if the file has no scheduler, an option is missing, or the class of
        torch refuses one.
        """
        schedule = self.schedule
        if schedule is None:
            raise ConfigError(
                f"{self.report.source}: it has no scheduler; make your own from "
                "torch.optim.lr_scheduler, or do without"
            )
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"scheduler(): expected an optimizer of torch, got {optimizer!r}")
        if isinstance(schedule, TorchSchedule):
            from torch.optim import lr_scheduler

            check_schedule_options(schedule.name, overrides, "scheduler()")
            make = getattr(lr_scheduler, schedule.name)
            try:
                made: LRScheduler = make(optimizer, **{**schedule.options, **overrides})
            except _WRONG_VALUES as error:
                raise self._refused("scheduler", make, error) from None
            return made
        from shardwise.interop.deepspeed.curve_scheduler import CurveScheduler

        return CurveScheduler(optimizer, schedule.given_too(overrides))

    def _refused(self, block: str, made: Any, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.report.source}: {block}: torch's {made.__name__} refuses its arguments: {error}"
        )

    def scaler(self, device_type: str | None = None) -> torch.amp.GradScaler:
        """Build torch's loss scaler, disabled if fp16 is off.

        ``device_type`` is that of the gradients (default: the accelerator, "cpu" without one).
        Torch's scaler and DeepSpeed's differ after an overflow: see Note [Two loss scalers].

        **Raises** ConfigError if the file leaves the precision at "auto".
        """
        import torch

        if self.precision.name is None:
            raise ConfigError(
                f'{self.report.source}: the precision is "auto", so scaling is undecided; give '
                'auto={"fp16.enabled": True}, or the one that you mean, to from_deepspeed()'
            )
        if device_type is None:
            found = torch.accelerator.current_accelerator()
            has_one = found is not None and torch.accelerator.is_available()
            device_type = found.type if found is not None and has_one else "cpu"
        scale = self.precision.loss_scale
        if scale is None:
            return torch.amp.GradScaler(device_type, enabled=False)
        return torch.amp.GradScaler(
            device_type, init_scale=scale.init_scale, growth_interval=scale.growth_interval
        )

    def __str__(self) -> str:
        return str(self.report)


def from_deepspeed(
    config: Mapping[str, Any] | str | Path,
    *,
    world_size: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    auto: Mapping[str, Any] | None = None,
) -> DeepSpeedSettings:
    """Read a DeepSpeed config, a dict or the path of a JSON file.

    Every key is mapped, ignored with a reason, left to you ("auto"), or refused; ``report`` of the
    result has them all. ``world_size`` is the number of ranks (default: that of the process group;
    without one, batch sizes that depend on it stay None). ``micro_batch``, ``accumulation`` and
    ``global_batch`` give sizes that the file leaves out or at "auto". ``auto`` has values for other
    keys at "auto", by their full names, such as ``optimizer.params.lr``.

    **Raises** ConfigError that names file and key if a key is unknown (with the nearest known
    name), has a wrong type, contradicts another, or is not supported.
    """
    if not isinstance(config, Mapping | str | Path):
        raise ConfigError(f"config: expected a dict, or the path of a JSON file, got {config!r}")
    if auto is not None and not isinstance(auto, Mapping):
        raise ConfigError(
            f"auto: expected a dict of full names, such as {{'optimizer.params.lr': 1e-4}}, got "
            f"{auto!r}"
        )
    source = "config" if isinstance(config, Mapping) else str(config)
    content = config if isinstance(config, Mapping) else load_json(Path(config))
    given = {"micro_batch": micro_batch, "accumulation": accumulation, "global_batch": global_batch}
    distributed = sys.modules.get("torch.distributed")  # a process group means that torch is there
    if world_size is None and distributed is not None and distributed.is_available():
        world_size = distributed.get_world_size() if distributed.is_initialized() else None
    return read_content(content, source, world_size, given, auto or {})


def read_content(
    content: JsonMapping,
    source: str,
    world_size: int | None,
    given: Mapping[str, int | None],
    auto: JsonMapping,
    precision_else: str | None = None,
) -> DeepSpeedSettings:
    """Read a loaded file; see `from_deepspeed`. Errors start with ``source``.

    ``precision_else`` is the precision if the file sets none.
    """
    reader = Reader(source, auto)
    if world_size is not None:
        world_size = reader.entry("world_size", world_size).integer(least=1)
    sizes = {
        name: reader.entry(name, size).integer(least=1)
        for name, size in given.items()
        if size is not None
    }
    found: JsonObject = {}
    precision = read_precision(reader, content, precision_else)

    def take_size(entry: Entry) -> None:
        size, ours = entry.integer(least=1), BATCH_KEYS[entry.key]
        if sizes.setdefault(ours, size) != size:
            why = f"got {size}, and {ours}={sizes[ours]} as an argument; give one of them"
            raise entry.refusal(why)
        entry.mapped()

    def clipping(entry: Entry) -> None:
        found["gradient_clipping"] = float(entry.number(least=0))
        entry.mapped("the largest norm, for clip_grad_norm_()")

    def checkpointing(entry: Entry) -> None:
        found["activation_checkpointing"] = entry.mapping()
        entry.walk("activation_checkpointing", {})

    handlers: dict[str, Handler] = {
        **dict.fromkeys(BATCH_KEYS, take_size),
        "zero_optimization": lambda e: found.update(zero=read_zero(e, precision.name)),
        "optimizer": lambda e: found.update(optimizer=read_named(e, choose_optimizer, "AdamW")),
        "scheduler": lambda e: found.update(schedule=read_named(e, choose_schedule, "WarmupLR")),
        "gradient_clipping": clipping,
        "activation_checkpointing": checkpointing,
        "data_types": lambda e: e.walk("data_types", {"keep_in_fp32_modules": _refuse_modules}),
        "torch_autocast": lambda e: e.walk("torch_autocast", {}),
        "tensor_parallel": _refuse_tensor_parallel,
        "expert_parallel": partial(_refuse_enabled, "experts are sharded like all"),
        "data_efficiency": partial(_refuse_enabled, "sampling is the loader's"),
    }
    rest = {k: v for k, v in content.items() if k not in PRECISION_BLOCKS}
    reader.entry("", rest).walk("top", handlers)
    # DeepSpeed's defaults that change the steps.
    if "zero" not in found:
        reader.add("default", "zero_optimization", None, "shard(stage=0)")
    if "gradient_clipping" not in found and content.get("gradient_clipping") != "auto":
        text = "DeepSpeed's default since 0.19; 0 turns clipping off"
        reader.add("default", "gradient_clipping", DEFAULT_CLIPPING, text)
    return DeepSpeedSettings(
        batch=resolve(sizes, world_size, source),
        zero=found.get("zero", {"stage": 0}),
        precision=precision,
        gradient_clipping=found.get("gradient_clipping", DEFAULT_CLIPPING),
        optimizer_choice=found.get("optimizer"),
        schedule=found.get("schedule"),
        activation_checkpointing=found.get("activation_checkpointing", {}),
        report=reader.report(),
    )


def _refuse_modules(entry: Entry) -> None:
    if entry.value:
        raise entry.refusal('all parameters compute in one dtype; give "auto" or []')
    entry.ignored("an empty list")


def _refuse_tensor_parallel(entry: Entry) -> None:
    values = entry.mapping()
    inner = values.get("tp", values.get("tensor_parallel"))
    sizes = [values.get("autotp_size", 0), values.get("tp_size", 0)]
    sizes.append(inner.get("tp_size", 1) if isinstance(inner, Mapping) else 1)
    if any(isinstance(size, int) and size > 1 for size in sizes):
        raise entry.refusal("only data is parallel here; leave it out")
    entry.mapped("only data is parallel")


def _refuse_enabled(why: str, entry: Entry) -> None:
    if entry.mapping().get("enabled", False):
        raise entry.refusal(f"it is not supported: {why}; turn it off")
    entry.ignored("off")
