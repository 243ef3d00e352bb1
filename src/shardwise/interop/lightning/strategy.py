"""The Strategy by which a Lightning Trainer shards the LightningModule, and its callback.

Note [The step is a forward pass]
Lightning calls ``training_step`` and not ``forward``, but hooks on forward passes gather units, and
a LightningModule may use its own parameters in its step. So the step runs as the forward pass of
the sharded module, by the redirection of Lightning's own wrappers. With manual optimization it does
not: there backward and the optimizer run inside the step, and the submodules that the step calls
are units themselves.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.config import Precision, Schedule, ShardConfig, Units, resolve_config
from shardwise.engine.api import engine_of, is_sharded, shard
from shardwise.engine.renamed import move_renamed
from shardwise.engine.runtime import Engine
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2.api import fully_shard
from shardwise.interop.fsdp2.state import state_of
from shardwise.interop.lightning.checkpoints import (
    check_hyper_parameters,
    load_lightning,
    remove_lightning,
    save_lightning,
)
from shardwise.interop.observed_loop import PAUSE, ObservedLoop, is_number
from shardwise.layout.units import partition_into_units
from shardwise.parallel.accumulate import accumulate
from shardwise.stages import STAGES
from shardwise.versions import load_neighbour

if TYPE_CHECKING:
    from lightning import pytorch as pl

_pl = load_neighbour("lightning", "shardwise.interop.lightning").pytorch
_DDPStrategy: Any = _pl.strategies.DDPStrategy
_Callback: Any = _pl.Callback
_FITTING = _pl.trainer.states.TrainerFn.FITTING

_AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
# Lightning converts the module itself
_CONVERTED = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_DEFAULTS = {"stage": 3, "layout": "rows", "precision": "fp32", "schedule": None}
_SCHEDULED = ("reduce_every", "prefetch_bytes", "bucket_bytes")
_RENAMED = (*_SCHEDULED, "init")  # parameters of version 0.1


def _step_of(name: str, context: str) -> Callable[..., object]:
    """Return a method that runs a step of the module. See Note [The step is a forward pass]."""

    def step(strategy: Any, *args: object, **kwargs: object) -> object:
        module = strategy.lightning_module
        with getattr(strategy.precision_plugin, context)():
            if not module.automatic_optimization:
                return getattr(module, name)(*args, **kwargs)
            return strategy._forward_redirection(module, module, name, *args, **kwargs)

    return step


class ShardwiseStrategy(_DDPStrategy):
    """Shard the LightningModule's training state over all processes of the Trainer.

    ``options`` are those of `shard`: ``stage``, ``units``, ``layout``, ``schedule``. ``mesh`` is
    (replicas, shards) for hybrid sharding, or a `DeviceMesh`. The Trainer's ``precision`` decides
    the dtypes of shards too, unless ``precision`` is given here: "bf16-mixed" computes with bf16
    copies of fp32 shards, under autocast. All else (processes, samplers, logging) is as with
    Lightning's DDPStrategy.

    **Raises** ConfigError for an unknown option or an unsupported precision.
    """

    def __init__(
        self,
        *,
        mesh: tuple[int, int] | DeviceMesh | None = None,
        cluster_environment: object = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **options: Any,
    ) -> None:
        known = (*_DEFAULTS, "units")
        for name in options:
            if name not in (*known, *_RENAMED):
                raise ConfigError(
                    f"ShardwiseStrategy({name}=): there is no such option; expected one of mesh, "
                    f"cluster_environment, process_group_backend, timeout, {', '.join(known)}"
                )
        old = {name: options.pop(name) for name in _RENAMED if name in options}
        if old:
            moved = {"units": options.get("units"), "schedule": options.get("schedule")}
            move_renamed(moved, old, "ShardwiseStrategy")
            options |= {name: value for name, value in moved.items() if value is not None}
        self._options = options
        self._mesh = mesh
        self._asked_config()  # refuses a wrong value before any process is started
        waits = {} if timeout is None else {"timeout": timeout}
        super().__init__(
            cluster_environment=cluster_environment,
            process_group_backend=process_group_backend,
            **waits,
        )

    # -- start
    def setup_environment(self) -> None:
        """Start the process group and make the mesh."""
        if self._checkpoint_io is not None:
            raise ConfigError(
                f"plugins: {type(self._checkpoint_io).__name__} writes files of its own, and the "
                "strategy writes shards; leave the plugin out"
            )
        super().setup_environment()
        if isinstance(self._mesh, tuple):
            names = ("replicate", "shard")
            self._mesh = init_device_mesh(self.root_device.type, self._mesh, mesh_dim_names=names)

    def setup(self, trainer: Any) -> None:
        """Shard the module, unless it is sharded already; then make the optimizers."""
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == _FITTING
        if fitting and trainer.checkpoint_callbacks:
            check_hyper_parameters(self.lightning_module, trainer.datamodule)
        _close_calls(self.lightning_module)
        if is_sharded(self.lightning_module):
            self._check_settings(self.lightning_module)
        else:
            self.model = self._shard(self.lightning_module)
        if fitting:
            self._reset_optimizers_and_schedulers()
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: nn.Module) -> nn.Module:
        options = {**self._options, "precision": self._precision(), "mesh": self._mesh}
        if self._layer_sync:
            module = self._layer_sync.apply(module)
        module = self.precision_plugin.convert_module(module)
        module._apply(lambda t: t if t.is_meta else t.to(self.root_device))
        return shard(module, **options)

    def _precision(self) -> str | Precision:
        """Return the strategy's own precision, or the precision of shards for the Trainer's."""
        if "precision" in self._options:
            chosen: str | Precision = self._options["precision"]
            return chosen
        asked = self.precision_plugin.precision
        if asked in _AUTOCAST:
            return Precision(_AUTOCAST[asked], torch.float32, torch.float32, cast_inputs=False)
        if asked == "32-true" or asked in _CONVERTED:
            return Precision()
        raise ConfigError(
            f"Trainer(precision={asked!r}): expected one of 32-true, {', '.join(_CONVERTED)}, "
            f"{', '.join(_AUTOCAST)} with strategy='shardwise', or ShardwiseStrategy(precision=)"
        )

    def _asked_config(self) -> ShardConfig:
        return resolve_config(**{key: self._options.get(key, _DEFAULTS[key]) for key in _DEFAULTS})

    def _check_settings(self, module: nn.Module) -> None:
        """Refuse a module that was sharded before with other settings."""
        engine, options = engine_of(module), self._options
        asked, has = self._asked_config(), engine.config
        schedule, default = options.get("schedule") or Schedule(), Schedule()
        names = [n for n in _SCHEDULED if getattr(schedule, n) != getattr(default, n)]
        pairs: dict[str, tuple[object, object]] = {
            "layout": (asked.layout, has.layout),
            "stage": (asked.stage.number, has.stage.number),
            "precision": (asked.precision, _precision_of(engine, asked.precision)),
        }
        pairs = {n: pair for n, pair in pairs.items() if n in options}
        pairs |= {n: (getattr(schedule, n), getattr(has, n)) for n in names}
        if isinstance(self._mesh, DeviceMesh):  # setup_environment() has converted tuples
            pairs["mesh"] = tuple(self._mesh.shape), tuple(engine.comm.axes.mesh.shape)
        units = Units.of(options.get("units"))
        if units.modules is not None or units.optional:
            specs = partition_into_units(module, units.modules, units.optional)
            pairs["units"] = [s.name for s in specs], [u.name for u in engine.units]
        for name, (ours, there) in pairs.items():
            if ours != there:
                given = options.get(name, ours)  # a precision's name
                raise _stays(f"ShardwiseStrategy({name}={given!r})", there)
        wanted = self._precision()
        if isinstance(wanted, Precision) and "precision" not in options:
            self._check_precision(module, _precision_of(engine, wanted))
        if self._layer_sync and any(
            isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm)
            for m in module.modules()
        ):
            raise _stays("Trainer(sync_batchnorm=True)", "BatchNorm layers of each rank's own")

    def _check_precision(self, module: nn.Module, has: Precision) -> None:
        name = f"Trainer(precision={self.precision_plugin.precision!r})"
        if self._precision() != has:
            raise _stays(name, f"{has}; or name that in ShardwiseStrategy(precision=)")
        dtype = _CONVERTED.get(self.precision_plugin.precision)
        dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
        if dtype is not None and dtypes != {dtype}:
            raise _stays(name, f"parameters of {', '.join(sorted(map(str, dtypes)))}")

    # -- steps
    training_step = _step_of("training_step", "train_step_context")
    validation_step = _step_of("validation_step", "val_step_context")
    test_step = _step_of("test_step", "test_step_context")
    predict_step = _step_of("predict_step", "predict_step_context")

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Run a micro-batch that is not the last one before the step."""
        with accumulate(self.lightning_module, last=False):
            yield

    # -- checkpoints
    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load after `setup`, into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Restore the optimizers in `load_checkpoint`, not later."""
        return False

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Return nothing: `save_checkpoint` writes the module's shards itself."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, object]:
        """Return nothing: `save_checkpoint` writes the optimizers' shards itself."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, object], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has read the module's shards."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, object]) -> None:
        """Do nothing: `load_checkpoint` has read the optimizers' shards."""

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Save a checkpoint folder at the path, every rank its slices; see `save_lightning`."""
        if storage_options is not None:
            raise ConfigError(
                f"storage_options={storage_options!r}: shards go to a file system that all ranks "
                "see, which has no options; leave them out"
            )
        path = self._local(self.broadcast(filepath))
        save_lightning(path, self.lightning_module, self.optimizers, checkpoint)

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Load a checkpoint folder, or a file of another strategy; see `load_lightning`."""
        module = self.lightning_module
        fitting = module.trainer.state.fn == _FITTING
        return load_lightning(
            self._local(self.broadcast(checkpoint_path)),
            module,
            self.optimizers if fitting else [],
            strict=module.strict_loading,
            weights_only=weights_only,
        )

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint that this strategy wrote."""
        if self.is_global_zero:
            remove_lightning(self._local(filepath))

    def _local(self, path: str | Path) -> Path:
        if "://" in str(path):
            raise ConfigError(
                f"{path}: shards go to a file system that all ranks see; give a path, and copy "
                "finished checkpoints elsewhere"
            )
        return Path(path)

    # -- end
    def teardown(self) -> None:
        """Tear down Lightning's parts; the module stays sharded, on its device."""
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()


def _close_calls(module: nn.Module) -> None:
    """Call `fully_shard` on the module if its configure_model did so only on submodules.

    The module's other parameters are sharded too, and keep their dtype.
    """
    if is_sharded(module):
        return
    states = [state for m in module.modules() if (state := state_of(m)) is not None]
    if states:
        fully_shard(module, mesh=states[0].units[0].comm.axes.mesh)


def _precision_of(engine: Engine, wanted: Precision) -> Precision:
    """Return a model's precision; if its units differ, one that is not ``wanted``.

    A policy of `fully_shard` has no master dtype: parameters keep theirs. It also has its own rule
    of casting inputs. So both are taken from ``wanted``.
    """
    if not engine.rules.units_are_independent:
        return engine.config.precision
    found = []
    for unit in engine.units:
        dtypes = {p.sharded.dtype for p in unit.params if p.sharded.is_floating_point()}
        fits = dtypes == {wanted.master}
        master = wanted.master if fits else unit.precision.master
        if unit.params:
            found.append(replace(unit.precision, master=master, cast_inputs=wanted.cast_inputs))
    return next((each for each in found if each != wanted), wanted)


def _stays(asked: str, there: object) -> ConfigError:
    return ConfigError(
        f"{asked}: the module was sharded before with {there}, and stays so; make a new "
        "LightningModule"
    )


class ObserveCallback(ObservedLoop, _Callback):
    """Observe the steps of ``fit`` as `shardwise.observe` does; ``options`` are its own.

    For ``Trainer(strategy="shardwise", callbacks=[ObserveCallback("runs/a")])``. It records waits
    for batches, saves and the tokens of a batch. Every ``log_every_n_steps`` it records the loss
    and the module's logs, which waits for the device. Validation is left out. ``run`` is the
    observation; it is None before ``fit`` begins and after it ends.

    **Raises** ConfigError as training begins, if the module is not sharded.
    """

    _num_logged = 0  # steps

    def on_train_start(self, trainer: "pl.Trainer", pl_module: nn.Module) -> None:
        """Begin to observe."""
        self._num_logged = trainer.global_step
        self._begin(pl_module, trainer.optimizers, trainer.global_step)
        self._go_into("data")

    def on_train_batch_start(self, *_: object) -> None:
        """End the wait for a batch."""
        self._go_into("")

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: object, *_: object
    ) -> None:
        """Record the loss and logs after a step; count the wait for the next batch."""
        step = trainer.global_step
        if step != self._num_logged and step % trainer.log_every_n_steps == 0:
            self._num_logged = step
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if is_number(loss):  # Lightning divides it by the number of micro-batches
                self._log({"loss": float(loss) * trainer.accumulate_grad_batches})
            self._log(trainer.callback_metrics)
        self._go_into("data")

    def on_validation_start(self, *_: object) -> None:
        """Pause during validation."""
        self._go_into(PAUSE)

    def on_validation_end(self, *_: object) -> None:
        """Count the wait for the next batch."""
        self._go_into("data")

    def on_train_end(self, *_: object) -> None:
        """End the observation."""
        self._end()

    def on_exception(
        self, trainer: "pl.Trainer", pl_module: nn.Module, exception: BaseException
    ) -> None:
        """End the observation without the other ranks, which may be stopped."""
        self._end(exception)


_pl.strategies.StrategyRegistry.register(
    "shardwise", ShardwiseStrategy, "Shardwise, stage 3 (FSDP)", override=True, stage=3
)
for _stage in STAGES:
    _pl.strategies.StrategyRegistry.register(
        f"shardwise_stage_{_stage.number}",
        ShardwiseStrategy,
        f"Shardwise, ZeRO stage {_stage.number}",
        override=True,
        stage=_stage.number,
    )
