"""``from_deepspeed()``: a DeepSpeed config as arguments of ``shard()``, and what a loop needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError
from shardwise.interop.deepspeed.blocks import DEFAULT_CLIPPING, other_handlers, read_zero
from shardwise.interop.deepspeed.optimizers import OptimizerChoice, read_optimizer
from shardwise.interop.deepspeed.precisions import PrecisionChoice, read_precision
from shardwise.interop.deepspeed.reading import Handler, Reader
from shardwise.interop.deepspeed.report import Report
from shardwise.interop.deepspeed.schedules import TorchSchedule, check_options_of, read_schedule
from shardwise.interop.foreign_keys import DEEPSPEED, load_json
from shardwise.train.curves import Curve
from shardwise.train.optimizers import check_options, optimizer_class

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import LRScheduler

BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "train_batch_size": "global_batch",
}


@dataclass(frozen=True)
class Batch:
    """Samples of one rank in one forward pass, such passes per step, samples of a step over ranks.

    What is None follows from the others once the number of ranks is known, or is yours.
    """

    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None


def resolve(sizes: Mapping[str, int], world_size: int | None, source: str) -> Batch:
    """Let any two sizes give the third, as DeepSpeed does; alone, accumulation is 1.

    Without a number of ranks only what does not depend on it is decided.

    **Raises** ConfigError with the numbers where they contradict each other.
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


_AUTOS = {
    "train_micro_batch_size_per_gpu": "micro_batch= of from_deepspeed(), or your data loader",
    "gradient_accumulation_steps": "accumulation= of from_deepspeed(), or your loop",
    "train_batch_size": "global_batch= of from_deepspeed(), or it follows from the others",
    "gradient_clipping": f"{DEFAULT_CLIPPING:g}, DeepSpeed's default, or auto=",
}


_WRONG_VALUES = TypeError, ValueError, ArithmeticError, RuntimeError  # what classes of torch raise


@dataclass(frozen=True)
class DeepSpeedSettings:
    """What a DeepSpeed config says, for a loop with ``shard()``.

    ``batch`` has the three sizes; None is what the number of ranks, or the caller, decides;
    ``micro_batch``, ``accumulation`` and ``global_batch`` are the same, never None.
    ``gradient_clipping`` is the largest norm, 0 for none. ``activation_checkpointing`` is that
    block as it stands; it turns nothing on. ``report`` has every key of the file: ``print()`` it.
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

        **Raises** ConfigError where the file has none, leaves the learning rate to you, or has an
        argument that the class of torch refuses.
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

        **Raises** ConfigError where the file has none, an option that it needs is missing, or the
        class of torch refuses one.
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

            check_options_of(schedule.name, overrides, "scheduler()")
            make = getattr(lr_scheduler, schedule.name)
            try:
                made: LRScheduler = make(optimizer, **{**schedule.options, **overrides})
            except _WRONG_VALUES as error:
                raise self._refused("scheduler", make, error) from None
            return made
        from shardwise.interop.deepspeed.stepper import CurveScheduler

        return CurveScheduler(optimizer, schedule.given_too(overrides))

    def _refused(self, block: str, made: Any, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.report.source}: {block}: torch's {made.__name__} refuses its arguments: {error}"
        )

    def scaler(self, device_type: str | None = None) -> torch.amp.GradScaler:
        """Build torch's loss scaler; it does nothing where fp16 is off.

        ``device_type`` is that of the gradients (default: the accelerator, "cpu" without one). It
        and DeepSpeed's differ after an overflow: see Note [Two loss scalers].

        **Raises** ConfigError while "auto" leaves open whether fp16 is on.
        """
        import torch

        if self.precision.name is None:
            raise ConfigError(
                f'{self.report.source}: the precision is "auto", so nobody knows whether to scale; '
                'give auto={"fp16.enabled": True}, or the one that you mean, to from_deepspeed()'
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

    Every key is mapped, ignored with a reason, left to you ("auto"), or refused: ``report`` of
    what returns has them all. ``world_size`` is the number of ranks (default: of the process group,
    if there is one; without, sizes of a batch that depend on it stay None). ``micro_batch``,
    ``accumulation`` and ``global_batch`` stand for what the file leaves out or at "auto"; ``auto``
    has values for other keys at "auto", by their full names, such as ``optimizer.params.lr``.

    **Raises** ConfigError naming file and key: unknown, with the nearest known name; of a wrong
    type; contradicting another; or asking for what is not there.
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
    if world_size is None:
        world_size = _world_size()
    return read_content(content, source, world_size, given, auto or {})


def read_content(
    content: Mapping[str, Any],
    source: str,
    world_size: int | None,
    given: Mapping[str, int | None],
    auto: Mapping[str, Any],
    precision_else: str | None = None,
) -> DeepSpeedSettings:
    """Read what is loaded already; see `from_deepspeed`. Errors start with ``source``.

    ``precision_else`` is the precision where the file says none.
    """
    reader = Reader(source, auto)
    if world_size is not None:
        world_size = reader.integer("world_size", world_size, least=1)
    sizes = {n: reader.integer(n, size, least=1) for n, size in given.items() if size is not None}
    found: dict[str, Any] = {}
    precision = read_precision(reader, content, precision_else)

    def take_size(name: str, value: Any) -> None:
        size = reader.integer(name, value, least=1)
        ours = BATCH_KEYS[name]
        if sizes.setdefault(ours, size) != size:
            why = f"got {size}, and {ours}={sizes[ours]} as an argument; give one of them"
            raise reader.refusal(name, why)
        reader.mapped(name, value, ours)

    handlers: dict[str, Handler] = {
        **dict.fromkeys(BATCH_KEYS, take_size),
        "zero_optimization": lambda name, value: found.update(
            zero=read_zero(reader, value, precision.name)
        ),
        "optimizer": lambda name, value: found.update(optimizer=read_optimizer(reader, value)),
        "scheduler": lambda name, value: found.update(schedule=read_schedule(reader, value)),
        **other_handlers(reader, found),
    }
    rest = {k: v for k, v in content.items() if k not in ("fp16", "bf16", "bfloat16")}
    reader.walk(rest, "", DEEPSPEED, handlers, _AUTOS)
    _note_defaults(reader, found, content)
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


def _note_defaults(reader: Reader, found: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Tell what DeepSpeed does where the file says nothing, as far as it changes the steps."""
    if "zero" not in found:
        reader.add("default", "zero_optimization", None, "shard(stage=0)")
    if "gradient_clipping" not in found and content.get("gradient_clipping") != "auto":
        text = "DeepSpeed's default since 0.19; 0 turns clipping off"
        reader.add("default", "gradient_clipping", DEFAULT_CLIPPING, text)


def _world_size() -> int | None:
    """Return the size of the process group; without torch there is none."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())
