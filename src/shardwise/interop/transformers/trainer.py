"""transformers' `Trainer` for sharded models, and callbacks for the stock one.

Note [Methods that replace Trainer's]
The loop, the batches, accumulation, clipping, evaluation, the callbacks and the schedule are
transformers' own. Replaced are the methods that save and load: weights are gathered layer by layer
into the usual files, and every rank writes its slices of master weights and optimizer state into
the folder ``shardwise`` of each checkpoint. `Trainer` resumes from them, bit-identical, on any
number of ranks. A model that is not sharded uses the methods of transformers. A sharded model
carries the mark of Note [Sharded at load time], for which transformers refuses to resume; this
class hides it.

Note [Callbacks of Trainer]
Trainer calls back after a step, an evaluation or a save. The flags of its control name what comes
next; it follows them in the order evaluation, save, next batch. So between two calls the loop is in
the first of these that a flag asks for. Trainer has no callback for an error. `Trainer` of this
package ends the observation itself; around the stock one, use ``with callback:``.
"""

import os
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
import transformers
from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINING_ARGS_NAME,
)

from shardwise.checkpoint.save_load import load, save
from shardwise.engine.api import has_sharded_parts, is_sharded
from shardwise.errors import CheckpointError, ConfigError
from shardwise.interop.observed_loop import PAUSE, ObservedLoop
from shardwise.interop.peft import load_adapter, save_adapter
from shardwise.interop.transformers.loading import load_weights
from shardwise.interop.transformers.saving import prepare, save_weights
from shardwise.parallel.clipping import clip_grad_norm_
from shardwise.versions import load_neighbour

FOLDER = "shardwise"  # in each checkpoint: the slices of master weights and optimizer state
_Base: Any = object  # a class of Trainer, which comes after `_Sharded` in `trainer_class`
_OWN_FIGURES = ("_runtime", "_per_second", "epoch")  # that Trainer logs about its speed


class ObserveCallback(ObservedLoop, transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Observe the steps of a Trainer as `shardwise.observe` does; ``options`` are its own.

    For ``Trainer(..., callbacks=[ObserveCallback("runs/a")])`` on every rank, with the `Trainer` of
    this package or the stock one. It records waits for batches, saves, tokens and Trainer's logs;
    evaluations are left out. ``run`` is the observation, None before training and after it. Put
    ``with callback:`` around ``train()`` of the stock Trainer, so that the record of a run that
    raises has its end.

    **Raises** ConfigError as training begins, if the model is not sharded.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._end(error)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Begin to observe."""
        self._begin(objects["model"], objects["optimizer"], state.global_step)

    def on_epoch_begin(self, *_: object, **objects: object) -> None:
        """Count the wait for the first batch of an epoch."""
        self._go_into("data")

    def on_step_begin(self, *_: object, **objects: object) -> None:
        """End the wait for batches."""
        self._go_into("")

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **objects: object,
    ) -> None:
        """Count the next phase. See Note [Callbacks of Trainer]."""
        is_saved = "save" if control.should_save else "data"
        self._go_into(PAUSE if control.should_evaluate else is_saved)

    on_epoch_end = on_evaluate = on_save = on_step_end

    def on_prediction_step(self, *_: object, **objects: object) -> None:
        """Pause: no flag announces some evaluations."""
        self._go_into(PAUSE)

    def on_log(self, *_: object, **objects: Any) -> None:
        """Record Trainer's logs without its figures of speed."""
        logs = objects.get("logs") or {}
        if "train_runtime" not in logs:
            self._log({k: v for k, v in logs.items() if not k.endswith(_OWN_FIGURES)})

    def on_train_end(self, *_: object, **objects: object) -> None:
        """End the observation."""
        self._end()


class _Sharded(_Base):
    """The methods that differ. See Note [Methods that replace Trainer's]."""

    def __init__(self, model: nn.Module | None = None, *args: object, **kwargs: object) -> None:
        load_neighbour("accelerate", wanted_by="transformers.Trainer")
        settings = args[0] if args else kwargs.get("args")
        if model is not None and is_sharded(model):
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
        super().__init__(model, *args, **kwargs)

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """True if transformers has sharded the model; the mark of `prepare` does not count."""
        return vars(self).get("_loaded_in_shards", False) and not is_sharded(self.model)

    @is_distributed_loading_by_transformers.setter
    def is_distributed_loading_by_transformers(self, is_marked: bool) -> None:
        self._loaded_in_shards = is_marked  # by Trainer's __init__

    def train(self, *args: object, **kwargs: object) -> object:
        """Train; end observations if training raises."""
        with ExitStack() as ends:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, ObserveCallback):
                    ends.enter_context(callback)
            return super().train(*args, **kwargs)

    def call_model_init(self, trial: object = None) -> object:
        """Prepare a model that ``model_init`` sharded."""
        model = super().call_model_init(trial)
        return prepare(model) if is_sharded(model) else model

    def _prepare_for_training(self, *args: object, **kwargs: object) -> object:
        """Let accelerate put autocast on the model without wrapping it."""
        model = self.model
        if is_sharded(model):
            prepare(model)  # it may have been sharded after Trainer got it
            if not getattr(model, "_is_accelerate_prepared", False):
                self.accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
        return super()._prepare_for_training(*args, **kwargs)

    def create_optimizer(self, *args: object, **kwargs: object) -> torch.optim.Optimizer:
        """Refuse an optimizer that would train none of the shards."""
        optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)
        if is_sharded(self.model):
            own = {id(p) for p in self.model.parameters()}
            groups = _inner(optimizer).param_groups
            if not any(id(p) in own for group in groups for p in group["params"]):
                raise ConfigError(
                    "optimizers=: the optimizer has no parameter of the sharded model, so it "
                    "would train nothing; build the optimizer after the model is sharded"
                )
        return optimizer

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        """Use `clip_grad_norm_` for gradients on any meshes."""
        return is_sharded(self.model) or super()._has_mixed_mesh_grads(model)

    def _mixed_mesh_grad_norm(self, model: nn.Module, max_norm: float) -> object:
        """Clip by the norm of all gradients over all ranks."""
        if not is_sharded(self.model):
            return super()._mixed_mesh_grad_norm(model, max_norm)
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        """Write the model as a Hugging Face folder; every rank takes part."""
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
            super()._save(output_dir, state_dict)
        else:
            self.model.save_pretrained(folder, is_main_process=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write every rank's slices, and the schedule."""
        if not is_sharded(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save(Path(output_dir, FOLDER), self.model, _inner(self.optimizer), replace=True)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Read the weights, from the slices if the checkpoint has them."""
        if is_sharded(self.model):
            _load_weights(self.model, Path(resume_from_checkpoint))
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if is_sharded(self.model):
            _load_weights(self.model, Path(self.state.best_model_checkpoint))
        else:
            super()._load_best_model()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Read the optimizer's state; the weights come with it."""
        if checkpoint is None or not is_sharded(self.model):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        slices, schedule = Path(checkpoint, FOLDER), Path(checkpoint, SCHEDULER_NAME)
        if slices.is_dir():
            load(slices, self.model, _inner(self.optimizer), restore_generators=False)
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
        if schedule.is_file():
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))


def trainer_class(base: type) -> type[Any]:
    """Return a subclass of a Trainer that also takes sharded models.

    ``base`` is any subclass of transformers' Trainer, e.g. ``trainer_class(SFTTrainer)``.
    See Note [Methods that replace Trainer's].
    """
    return type(base.__name__, (_Sharded, base), {"__doc__": base.__doc__})


Trainer = trainer_class(transformers.Trainer)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer itself, without accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


def _load_weights(model: nn.Module, checkpoint: Path) -> None:
    folder = checkpoint / FOLDER
    if folder.is_dir():
        load(folder, model, restore_generators=False)
    elif hasattr(model, "peft_config"):
        load_adapter(model, checkpoint)
    else:
        load_weights(model, checkpoint)
