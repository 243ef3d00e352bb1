"""The slices beside a checkpoint of transformers' `Trainer`: master weights, optimizer, schedule.

Every rank writes and reads its own, in the folder ``shardwise`` of the checkpoint. Our `Trainer`
does so by itself, the stock one by `CheckpointCallback`.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shardwise.checkpoint.single import load, save
from shardwise.errors import ConfigError

FOLDER = "shardwise"


def save_slices(
    checkpoint: Path, model: Any, optimizer: Any, schedule: Any, *, writes_schedule: bool
) -> None:
    """Write every rank's slices of a checkpoint, and on one rank the schedule."""
    save(checkpoint / FOLDER, model, inner(optimizer), replace=True)
    if writes_schedule:
        torch.save(schedule.state_dict(), checkpoint / SCHEDULER_NAME)


def load_slices(checkpoint: Path, model: Any, optimizer: Any) -> None:
    """Read every rank's slices: master weights and optimizer state."""
    load(checkpoint / FOLDER, model, inner(optimizer), restore_generators=False)


def load_schedule(checkpoint: Path, schedule: Any) -> None:
    """Read the schedule, if the checkpoint has one."""
    if (checkpoint / SCHEDULER_NAME).is_file():
        schedule.load_state_dict(torch.load(checkpoint / SCHEDULER_NAME, weights_only=True))


def inner(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer itself, without accelerate's wrapper."""
    found: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return found


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
        save_slices(
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
        load_slices(checkpoint, objects["model"], objects["optimizer"])
        load_schedule(checkpoint, objects["lr_scheduler"])
