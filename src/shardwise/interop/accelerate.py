"""A subclass of accelerate's ``Accelerator`` for models of `shard` and `fully_shard`.

Note [A sharded model under accelerate]
accelerate would wrap the model in DistributedDataParallel, gather nothing when it saves, and pickle
the optimizer on the first rank. So a sharded model is prepared like one for evaluation (autocast
and torch.compile, no wrapping), ``no_sync`` becomes the window of `accumulate`, and ``save_state``
saves model and optimizer as a checkpoint beside accelerate's files. accelerate handles models and
optimizers that are not sharded.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsFloat

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.save_load import NOTHING, collect_on_all_ranks, load, save
from shardwise.engine import api
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.interop.observed_loop import is_number
from shardwise.monitor.observer import Observation, observe
from shardwise.parallel.accumulate import accumulate
from shardwise.parallel.clipping import clip_grad_norm_
from shardwise.tensor.inner import gather_whole
from shardwise.tensor.plain_state import owner_of
from shardwise.tensor.replaced import params_of
from shardwise.versions import load_neighbour

load_neighbour("accelerate", "shardwise.interop.accelerate")
from accelerate import Accelerator as _Accelerator  # noqa: E402  # absent, the line above says what to do
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

FOLDER = "shardwise"  # inside the folder of save_state; further sharded models get a number
_OWN_ENGINES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(_Accelerator):
    """accelerate's Accelerator, which leaves sharded models sharded.

    Call ``shard(model)`` or `fully_shard` first, build the optimizer, then call ``prepare``. Launch
    with torchrun or ``accelerate launch``, without FSDP, DeepSpeed or Megatron in its config.
    """

    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._observation: Observation | None = None
        self._hidden: list[AcceleratedOptimizer] = []  # in save_state, load_state
        self.register_save_state_pre_hook(self._save_sharded)
        self.register_load_state_pre_hook(self._load_sharded)

    def prepare(self, *args: object, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does; return a sharded model unchanged.

        **Raises** ConfigError if accelerate is configured to shard too, does not see the ranks, or
        gets an optimizer without a parameter of the models, as if the model was sharded later.
        """
        sharded = [a for a in args if isinstance(a, nn.Module) and is_sharded(a)]
        if sharded and self.distributed_type in _OWN_ENGINES:
            raise ConfigError(
                f"Accelerator: its distributed_type is {self.distributed_type.value}, but the "
                "model is sharded already; take FSDP, DeepSpeed and Megatron out of its config"
            )
        for model in sharded:
            num_ranks = engine_of(_inner(model)).comm.control.num_ranks
            if num_ranks != self.num_processes:
                raise ConfigError(
                    f"Accelerator: it sees {self.num_processes} processes, and the model is "
                    f"sharded over {num_ranks}; without an accelerator device it needs "
                    "Accelerator(cpu=True) to see them"
                )
        known = {id(p) for a in args if isinstance(a, nn.Module) for p in a.parameters()}
        for optimizer in (a for a in args if isinstance(a, torch.optim.Optimizer)):
            if sharded and not known & {id(p) for p in params_of(optimizer)}:
                raise ConfigError(
                    f"prepare(): no parameter of the {type(optimizer).__name__} belongs to the "
                    "models; if it was built before the model was sharded, build it afterwards, "
                    "from model.parameters(); else prepare it in a call of its own"
                )
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Prepare one model. See Note [A sharded model under accelerate].

        **Raises** ConfigError for a model with a sharded part, which has no accumulation window,
        and for one of torch's own ``fully_shard``.
        """
        if is_sharded(model):
            return super().prepare_model(model, device_placement=False, evaluation_mode=True)
        if api.has_sharded_parts(model):
            raise ConfigError(
                f"prepare(): a part of this {type(model).__name__} is sharded; give shard(), or "
                "fully_shard() in its last call, and prepare() the same module"
            )
        cut_elsewhere = any(isinstance(p, DTensor) for p in model.parameters())
        config = getattr(self, "parallelism_config", None)  # it may explain the DTensors
        is_known = self.distributed_type in _OWN_ENGINES or bool(config and config.tp_enabled)
        if cut_elsewhere and not evaluation_mode and not is_known:
            raise ConfigError(
                f"prepare(): the parameters of this {type(model).__name__} are DTensors, as "
                "torch's own fully_shard() makes them, and accelerate would wrap it in "
                "DistributedDataParallel; use shardwise.fully_shard, or leave it out of prepare(): "
                "it trains as it is, and torch.distributed.checkpoint saves it"
            )
        return super().prepare_model(model, device_placement, evaluation_mode)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Run a micro-batch before the last one of a step."""
        with accumulate(_inner(model), last=False) if is_sharded(model) else super().no_sync(model):
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Make the backward pass inside the last of its window."""
        stock = _Accelerator.trigger_sync_in_backward
        with accumulate(_inner(model), last=True) if is_sharded(model) else stock(model):
            yield

    def clip_grad_norm_(
        self,
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip by the norm of all gradients over all ranks and meshes."""
        params = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if not any(owner_of(p) is not None for p in params):
            norm: torch.Tensor = super().clip_grad_norm_(params, max_norm, norm_type)
            return norm
        self.unscale_gradients()
        return clip_grad_norm_(params, max_norm, norm_type)

    def observe(self, output: str | Path | None = None, **options: Any) -> Observation:
        """Observe the steps of the prepared sharded model, with its optimizers.

        Use ``with accelerator.observe("runs/a") as run`` around the loop, on every rank;
        ``options`` are those of `shardwise.observe`. Values of ``accelerator.log`` are kept too.

        **Raises** ConfigError if not exactly one sharded model was prepared.
        """
        sharded = [_inner(m) for m in self._models if is_sharded(m)]
        if len(sharded) != 1:
            raise ConfigError(
                f"observe(): {len(sharded)} sharded models were prepared, expected one; prepare it "
                "with its optimizer first, and of several observe each by "
                "shardwise.observe(model, optimizer)"
            )
        ids = {id(p) for p in sharded[0].parameters()}
        own = [o.optimizer for o in self._optimizers if ids & {id(p) for p in params_of(o)}]
        self._observation = observe(sharded[0], own, output, **options)
        return self._observation

    def log(self, values: dict[str, SupportsFloat], *args: object, **kwargs: object) -> None:
        """Log to accelerate's trackers, and to the observation."""
        super().log(values, *args, **kwargs)
        if self._observation is not None:
            self._observation.log(**{k: float(v) for k, v in values.items() if is_number(v)})

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, object]:
        """Return the full state dict on the CPU of the main process, an empty one on other ranks.

        Every rank calls it, as ``save_model`` does.

        **Cost** one gather per parameter, one in memory at a time; the main process keeps all.
        """
        if not is_sharded(model):
            return dict(super().get_state_dict(model, unwrap))
        state = _inner(model).state_dict(keep_vars=True)
        fulls: dict[int, object] = {}
        for value in state.values():
            if id(value) not in fulls:  # tied parameters stay one tensor
                full = _full(value)
                fulls[id(value)] = full if self.is_main_process else None
        return {k: fulls[id(v)] for k, v in state.items()} if self.is_main_process else {}

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: object
    ) -> str:
        """Save everything that was prepared; sharded models and their optimizers as checkpoints.

        Every rank calls it. All ranks write the checkpoints, in the subfolder ``shardwise``; they
        load on any number of ranks.

        **Raises** StateError in the middle of an accumulation window, before anything is written
        or deleted.
        """
        with self._hidden_optimizers():
            for _, model, optimizer in self._pairs(self._models, ""):
                target = Path(output_dir or ""), "save_state()"
                collect_on_all_ranks(model, optimizer, NOTHING, target)  # raises as `save` would
            return str(super().save_state(output_dir, safe_serialization, **kwargs))

    def load_state(self, input_dir: str | None = None, *args: object, **kwargs: object) -> None:
        """Load a state of `save_state` into the prepared objects. Every rank calls it.

        **Raises** CheckpointError on all ranks if one lacks the folder, or its content does not
        fit.
        """
        sharded = [_inner(m) for m in self._models if is_sharded(m)]
        if sharded:
            on_all_ranks(engine_of(sharded[0]).comm.control, lambda: self._check_folder(input_dir))
        with self._hidden_optimizers():
            super().load_state(input_dir, *args, **kwargs)

    def _check_folder(self, input_dir: str | None) -> None:
        """Raise CheckpointError if this rank lacks the folder."""
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
        elif self.project_configuration.automatic_checkpoint_naming:
            folder = Path(self.project_dir, "checkpoints")
        else:
            return  # accelerate raises on all ranks
        if not folder.is_dir() or (input_dir is None and not any(folder.iterdir())):
            raise CheckpointError(
                f"load_state: {folder} has no saved state; give the folder that save_state() wrote"
            )

    @contextmanager
    def _hidden_optimizers(self) -> Iterator[None]:
        """Hide the optimizers of sharded models from accelerate, which would pickle them."""
        every = self._optimizers
        self._hidden = [o for o in every if any(owner_of(p) is not None for p in params_of(o))]
        self._optimizers = [o for o in every if o not in self._hidden]
        try:
            yield
        finally:
            self._optimizers, self._hidden = every, []

    def _save_sharded(
        self, models: list[nn.Module], weights: list[object], output_dir: str
    ) -> None:
        """Save the sharded models, and remove their weights from accelerate's list."""
        for path, model, optimizer in self._pairs(models, output_dir):
            save(path, model, optimizer, replace=True)
        weights[:] = [w for w, m in zip(weights, models, strict=True) if not is_sharded(m)]

    def _load_sharded(self, models: list[nn.Module], input_dir: str) -> None:
        """Load the sharded models, and remove them from accelerate's list."""
        for path, model, optimizer in self._pairs(models, input_dir):
            load(path, model, optimizer, restore_generators=False)  # accelerate restores its own
        models[:] = [m for m in models if not is_sharded(m)]

    def _pairs(
        self, models: list[nn.Module], folder: str
    ) -> Iterator[tuple[Path, nn.Module, torch.optim.Optimizer | None]]:
        """Yield each sharded model with its folder and its optimizer."""
        sharded = [_inner(m) for m in models if is_sharded(m)]
        for number, model in enumerate(sharded):
            ids = {id(p) for p in model.parameters()}
            own = [o for o in self._hidden if ids & {id(p) for p in params_of(o)}]
            if len(own) > 1:
                raise ConfigError(
                    f"save_state, load_state: {len(own)} optimizers were prepared for one sharded "
                    "model; use one optimizer with several parameter groups"
                )
            name = f"{FOLDER}_{number}" if number else FOLDER
            yield Path(folder) / name, model, own[0].optimizer if own else None  # of the wrapper


def is_sharded(model: nn.Module) -> bool:
    """Tell whether ``shard()`` or `fully_shard` was called on the module, compiled or not."""
    return api.is_sharded(_inner(model))


def _inner(model: nn.Module) -> nn.Module:
    found: nn.Module = model.__dict__.get("_modules", {}).get("_orig_mod", model)
    return found


def _full(value: Any) -> object:
    if (owner := owner_of(value)) is not None:
        return gather_whole(value._local_tensor, owner.cut, owner.name).cpu()
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value
