"""transformers' `Trainer` for sharded models: its own loop, and checkpoints of every rank.

Note [What is changed of Trainer]
The loop, the batches, accumulation, clipping, evaluation, the callbacks and the schedule are
transformers' own. Changed are the methods that save and load: the weights are gathered layer by
layer into the usual files, and beside them, in the folder ``shardwise`` of each checkpoint, every
rank writes its slices of master weights and optimizer state, from which `Trainer` goes on to the
bit, on any number of ranks. A model that is not sharded takes the methods of transformers.
A sharded one carries the mark of Note [Sharded at load time], with which transformers would refuse
checkpoints to go on from; here it is not seen.
"""

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
    TRAINING_ARGS_NAME,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shardwise.checkpoint.save_load import load, save
from shardwise.engine.api import has_sharded_parts, is_sharded
from shardwise.errors import CheckpointError, ConfigError
from shardwise.interop.peft import load_adapter, save_adapter
from shardwise.interop.transformers.loading import load_weights
from shardwise.interop.transformers.observing import ObserveCallback
from shardwise.interop.transformers.prepared import prepare
from shardwise.interop.transformers.saving import save_weights
from shardwise.parallel.clipping import clip_grad_norm_
from shardwise.versions import load_neighbour

FOLDER = "shardwise"  # in each checkpoint: the slices of master weights and optimizer state


def _is_sharded_by_transformers(trainer: Any) -> bool:
    return vars(trainer).get("_loaded_in_shards", False) and not is_sharded(trainer.model)


def _note_mark(trainer: Any, is_marked: bool) -> None:  # Trainer assigns it in __init__
    trainer._loaded_in_shards = is_marked


class _Sharded:
    """The methods that differ. See Note [What is changed of Trainer]."""

    def __init__(self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
        load_neighbour("accelerate", wanted_by="transformers.Trainer")
        settings = args[0] if args else kwargs.get("args")
        if is_sharded(model):
            prepare(model)
            for name in ("fsdp", "deepspeed"):
                if getattr(settings, name, None):
                    raise ConfigError(
                        f"TrainingArguments.{name}={getattr(settings, name)!r}: the model is "
                        "sharded already; leave this argument out"
                    )
        elif model is not None and has_sharded_parts(model):
            raise ConfigError(
                f"model: a part of this {type(model).__name__} is sharded; give shard(), or "
                "fully_shard() in its last call, the whole model, wrappers and adapters included"
            )
        super().__init__(model, *args, **kwargs)  # type: ignore[call-arg]

    is_distributed_loading_by_transformers = property(_is_sharded_by_transformers, _note_mark)

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Train; tell callbacks that observe when it raises, which Trainer does not."""
        with ExitStack() as ends:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ObserveCallback):
                    ends.enter_context(callback)
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def call_model_init(self: Any, trial: Any = None) -> Any:
        """Prepare a model that ``model_init`` sharded."""
        model = super().call_model_init(trial)  # type: ignore[misc]
        return prepare(model) if is_sharded(model) else model

    def _prepare_for_training(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Let accelerate put autocast on the model, as on others, but not wrap it."""
        model = self.model
        if is_sharded(model):
            prepare(model)  # it may have been sharded after Trainer got it
            if not getattr(model, "_is_accelerate_prepared", False):
                self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse an optimizer that would train none of the shards."""
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        if is_sharded(self.model):
            own = {id(p) for p in self.model.parameters()}
            groups = _inner(optimizer).param_groups
            if not any(id(p) in own for group in groups for p in group["params"]):
                raise ConfigError(
                    "optimizers=: the optimizer has no parameter of the sharded model, so it "
                    "would train nothing; build the optimizer after the model is sharded"
                )
        return optimizer

    def _has_mixed_mesh_grads(self: Any, model: Any) -> bool:
        """Let the norm of gradients on any meshes be ours."""
        return is_sharded(self.model) or super()._has_mixed_mesh_grads(model)  # type: ignore[misc]

    def _mixed_mesh_grad_norm(self: Any, model: Any, max_norm: float) -> Any:
        """Clip by the norm of all gradients over all ranks."""
        if not is_sharded(self.model):
            return super()._mixed_mesh_grad_norm(model, max_norm)  # type: ignore[misc]
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def _save(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model as a folder of Hugging Face; every rank takes part."""
        folder = output_dir or self.args.output_dir
        if is_sharded(self.model) and not isinstance(self.model, transformers.PreTrainedModel):
            if hasattr(self.model, "peft_config"):
                save_adapter(self.model, folder)
            else:
                save_weights(self.model, folder, writes=self.args.should_save)
            if self.args.should_save:
                torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
                if self.processing_class is not None:
                    self.processing_class.save_pretrained(folder)
        elif self.args.should_save or not is_sharded(self.model):
            super()._save(output_dir, state_dict)  # type: ignore[misc]
        else:
            self.model.save_pretrained(folder, is_main_process=False)

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """Write every rank's slices, and the schedule."""
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            return
        _save_slices(
            Path(output_dir),
            self.model,
            self.optimizer,
            self.lr_scheduler,
            writes_schedule=self.args.should_save,
        )

    def _load_from_checkpoint(self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
        """Read the weights, from the slices if they are there."""
        if is_sharded(self.model):
            _load_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_best_model(self: Any) -> None:
        if is_sharded(self.model):
            _load_weights(self.model, Path(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self: Any, checkpoint: str | None) -> None:
        """Read the optimizer's state; the weights come with it."""
        if checkpoint is None or not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        if Path(checkpoint, FOLDER).is_dir():
            _load_slices(Path(checkpoint), self.model, self.optimizer)
        elif Path(checkpoint, OPTIMIZER_NAME).is_file():
            raise CheckpointError(
                f"{checkpoint} holds the optimizer of a model that was not sharded; resume "
                "it as it was, or start from its weights: from_pretrained() reads them"
            )
        elif self.is_world_process_zero():
            warnings.warn(
                f"{checkpoint} has no folder {FOLDER!r}, in which the optimizer's state would be: "
                "the optimizer starts anew, from the weights",
                stacklevel=2,
            )
        _load_schedule(Path(checkpoint), self.lr_scheduler)


def trainer_class(base: type[Any]) -> type[Any]:
    """Return a `Trainer` class that also takes sharded models; ``base`` is any subclass of it.

    For trainers of other libraries: ``trainer_class(SFTTrainer)``.
    See Note [What is changed of Trainer].
    """
    return type(base.__name__, (_Sharded, base), {"__doc__": base.__doc__})


Trainer = trainer_class(transformers.Trainer)


class CheckpointCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Let transformers' own `Trainer` write checkpoints from which a sharded run goes on.

    For ``Trainer(..., callbacks=[CheckpointCallback()])`` with ``save_only_model=True``. To go on,
    give the folder to both: ``CheckpointCallback(resume=folder)`` and
    ``train(resume_from_checkpoint=folder)``. Our own `Trainer` needs no callback.

    **Raises** ConfigError when only one of the two was given a folder, or they differ.
    """

    def __init__(self, resume: str | Path | None = None) -> None:
        self._resume = Path(resume) if resume is not None else None

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Write the slices, the schedule and this rank's random generators."""
        checkpoint = Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        _save_slices(
            checkpoint,
            objects["model"],
            objects["optimizer"],
            objects["lr_scheduler"],
            writes_schedule=args.should_save,
        )
        # Trainer reads the generators whenever it resumes, in the form that it writes them.
        stand_in: Any = SimpleNamespace(args=args)
        transformers.Trainer._save_rng_state(stand_in, str(checkpoint))

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Read them, if Trainer goes on from a checkpoint."""
        step, checkpoint = state.global_step, self._resume
        if checkpoint is None:
            if step:
                raise ConfigError(
                    f"CheckpointCallback: Trainer goes on from step {step}, but the callback was "
                    "given no folder; give it the same: CheckpointCallback(resume=folder)"
                )
            return
        there = transformers.TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if there.global_step != step:
            raise ConfigError(
                f"CheckpointCallback(resume={str(checkpoint)!r}) is of step {there.global_step}, "
                f"but Trainer is at step {step}; give train(resume_from_checkpoint=...) this folder"
            )
        _load_slices(checkpoint, objects["model"], objects["optimizer"])
        _load_schedule(checkpoint, objects["lr_scheduler"])


def _save_slices(
    checkpoint: Path, model: Any, optimizer: Any, schedule: Any, *, writes_schedule: bool
) -> None:
    """Write every rank's slices of a checkpoint, and on one rank the schedule."""
    save(checkpoint / FOLDER, model, _inner(optimizer), replace=True)
    if writes_schedule:
        torch.save(schedule.state_dict(), checkpoint / SCHEDULER_NAME)


def _load_slices(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Read every rank's slices: master weights and optimizer state."""
    load(checkpoint / FOLDER, model, _inner(optimizer), restore_generators=False)


def _load_schedule(checkpoint: Path, schedule: Any) -> None:
    """Read the schedule, if the checkpoint has one."""
    if (checkpoint / SCHEDULER_NAME).is_file():
        schedule.load_state_dict(torch.load(checkpoint / SCHEDULER_NAME, weights_only=True))


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, without accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _load_weights(model: Any, checkpoint: Path) -> None:
    folder = checkpoint / FOLDER
    if folder.is_dir():
        load(folder, model, restore_generators=False)
    elif hasattr(model, "peft_config"):
        load_adapter(model, checkpoint)
    else:
        load_weights(model, checkpoint)
