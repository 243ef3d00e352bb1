"""``from_deepspeed()``: a DeepSpeed config as arguments of ``shard()`` and parts of a loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from shardwise.config import PRECISIONS, Precision, Schedule
from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.reading import (
    BETAS,
    DeepSpeedFile,
    Reading,
    TorchSchedule,
    check_schedule_options,
    resolve,
)
from shardwise.interop.foreign_keys import Entry, JsonMapping, JsonObject, Reader, Report, load_json
from shardwise.train.curves import SchedulerCurve
from shardwise.train.optimizers import check_options, optimizer_class

_WRONG_VALUES = TypeError, ValueError, ArithmeticError, RuntimeError  # raised by classes of torch


def from_deepspeed(
    config: JsonMapping | str | Path,
    *,
    world_size: int | None = None,
    micro_batch: int | None = None,
    accumulation: int | None = None,
    global_batch: int | None = None,
    auto: JsonMapping | None = None,
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
    if world_size is None and dist.is_available() and dist.is_initialized():
        world_size = dist.get_world_size()
    reader = Reader(source, auto)
    if world_size is not None:
        world_size = Entry(reader, "world_size", world_size).integer(least=1)
    given = {"micro_batch": micro_batch, "accumulation": accumulation, "global_batch": global_batch}
    for name, size in given.items():
        if size is not None:
            reader.values[name] = Entry(reader, name, size).integer(least=1)
    reading = DeepSpeedFile(content, reader).read()
    return DeepSpeedSettings(reading, resolve(reading.values, world_size, source))


@dataclass(frozen=True)
class DeepSpeedSettings:
    """A DeepSpeed config for a loop with ``shard()``.

    ``batch`` has the three sizes by name, None while undecided; the attributes ``micro_batch``,
    ``accumulation`` and ``global_batch`` are never None. ``report`` has every key of the file:
    ``print()`` it.
    """

    reading: Reading = field(repr=False)
    batch: Mapping[str, int | None]

    @property
    def report(self) -> Report:
        """The fate of each key of the file."""
        return self.reading.report

    @property
    def gradient_clipping(self) -> float:
        """The largest norm of all gradients; 0 turns clipping off."""
        return float(self._all["grad_clip"])

    @property
    def shard(self) -> JsonObject:
        """Arguments of ``shard()``: ``shard(model, **settings.shard)``."""
        found = self._all
        arguments: JsonObject = {k: found[k] for k in ("stage", "offload") if k in found}
        scheduled = {k: found[k] for k in ("prefetch_bytes", "nearby_ranks") if k in found}
        if scheduled:
            arguments["schedule"] = Schedule(**scheduled)
        coded = {name: found[name] for name in ("gather", "reduce") if name in found}
        name = found.get("precision")
        if "bf16_master" in found:
            dtype = torch.bfloat16
            arguments["precision"] = replace(Precision(dtype, dtype, dtype), **coded)
        elif coded:
            arguments["precision"] = replace(PRECISIONS[name or "fp32"], **coded)
        elif name is not None:
            arguments["precision"] = name
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

    def optimizer(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, object]],
        **overrides: object,
    ) -> torch.optim.Optimizer:
        """Build the optimizer on parameters or groups of them; ``overrides`` win over the file.

        **Raises** ConfigError if the file has no optimizer, leaves the learning rate to you, or has
        an argument that the class of torch refuses.
        """
        values = self.reading.values
        if "optimizer" not in values:
            raise self._error("it has no optimizer; make your own from model.parameters()")
        if "lr" in self.reading.auto - overrides.keys():
            raise self._error('optimizer.params.lr is "auto"; give lr= to optimizer()')
        if callable(getattr(params, "parameters", None)):
            kind = type(params).__name__
            raise ConfigError(f"optimizer(): expected parameters, got a {kind}; give .parameters()")
        check_options(values["optimizer"], overrides, "optimizer()")
        make = optimizer_class(values["optimizer"])
        arguments: JsonObject = {name: self._all[name] for name in ("lr", "weight_decay")}
        if BETAS[0] in values:
            arguments["betas"] = tuple(values[name] for name in BETAS)
        arguments |= {**values.get("optimizer_options", {}), **overrides}
        try:
            return make(params, **arguments)
        except _WRONG_VALUES as error:
            raise self._refused("optimizer", make, error) from None

    def scheduler(self, optimizer: torch.optim.Optimizer, **overrides: object) -> LRScheduler:
        """Build the scheduler; call its ``step()`` after each update. ``overrides`` are options.

        **Raises** ConfigError if the file has no scheduler, an option is missing, or the class of
        torch refuses one.
        """
        schedule = self.reading.schedule
        if schedule is None:
            raise self._error(
                "it has no scheduler; make your own from torch.optim.lr_scheduler, or do without"
            )
        if not hasattr(optimizer, "param_groups"):
            raise ConfigError(f"scheduler(): expected an optimizer of torch, got {optimizer!r}")
        if not isinstance(schedule, TorchSchedule):
            return CurveScheduler(optimizer, schedule.with_options(overrides))
        check_schedule_options(schedule.name, overrides, "scheduler()")
        make: type[LRScheduler] = getattr(lr_scheduler, schedule.name)
        options: JsonObject = {**schedule.options, **overrides}
        try:
            return make(optimizer, **options)
        except _WRONG_VALUES as error:
            raise self._refused("scheduler", make, error) from None

    def scaler(self, device_type: str | None = None) -> torch.amp.GradScaler:
        """Build torch's loss scaler, disabled if fp16 is off.

        ``device_type`` is that of the gradients (default: the accelerator, "cpu" without one).
        Torch's scaler and DeepSpeed's differ after an overflow: see Note [Two loss scalers].

        **Raises** ConfigError if the file leaves the precision at "auto".
        """
        found = self._all
        if "precision" not in found:
            raise self._error(
                'the precision is "auto", so scaling is undecided; give auto={"fp16.enabled": True}'
                ", or the one that you mean, to from_deepspeed()"
            )
        if device_type is None:
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            device_type = accelerator.type if accelerator is not None else "cpu"
        if found["precision"] != "fp16":
            return torch.amp.GradScaler(device_type, enabled=False)
        scale, interval = found["loss_scale"], found["loss_scale_window"]
        return torch.amp.GradScaler(device_type, init_scale=scale, growth_interval=interval)

    def __str__(self) -> str:
        return str(self.report)

    @property
    def _all(self) -> JsonObject:
        return {**self.reading.defaults, **self.reading.values}

    def _size(self, name: str) -> int:
        size = self.batch[name]
        if size is None:
            ranks = ", or call that after init_process_group(), or with world_size="
            follows = ranks if list(self.batch.values()).count(None) == 1 else ""
            raise self._error(f"{name} is not decided: give {name}= to from_deepspeed(){follows}")
        return size

    def _error(self, why: str) -> ConfigError:
        return ConfigError(f"{self.report.source}: {why}")

    def _refused(self, block: str, made: type[object], error: Exception) -> ConfigError:
        return self._error(f"{block}: torch's {made.__name__} refuses its arguments: {error}")


class CurveScheduler(LRScheduler):
    """Set each group's learning rate from a closed form.

    Call `step()` after each `optimizer.step()`, but, as in DeepSpeed, not after a step that a loss
    scaler skipped.

    **State** the number of steps taken, and the rates that the optimizer was made with.

    **Raises** ConfigError if the curve lacks an option, or an option's list has another length than
    the parameter groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, curve: SchedulerCurve) -> None:
        curve.check_groups(len(optimizer.param_groups))
        curve.learning_rate(0, 0.0)  # raises before anything changes
        self._curve = curve
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        """Return the rates of the next update, one per group. `step()` calls it."""
        done = self.last_epoch
        return [
            self._curve.learning_rate(done, base, group)
            for group, base in enumerate(map(float, self.base_lrs))
        ]

    def state_dict(self) -> JsonObject:
        """Return the number of steps and the first rates."""
        return {"last_epoch": self.last_epoch, "base_lrs": [float(lr) for lr in self.base_lrs]}

    def load_state_dict(self, state_dict: JsonObject) -> None:
        """Restore a state, and set the rates of the next update."""
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = int(state_dict["last_epoch"])
        rates = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = rates
