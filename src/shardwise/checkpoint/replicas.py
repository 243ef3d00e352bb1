"""Replicas that step separately (`parallel.local_steps`), in a checkpoint and back.

Note [Saved replicas]
~~~~~~~~~~~~~~~~~~~~~
Each replica has parameters and an optimizer of its own. Those of replica 0 are saved under the
parameters' names, as without `LocalSteps`, so every reader of checkpoints finds one model. Those of
replica r are saved as tensors of the optimizer under ``replica.r/NAME``, the parameter itself as
state "parameter". The anchor and the momentum of the outer step are the same on all replicas, and
are saved once, under ``outer/NAME``. Settings and counts are a value of each rank, under `KEY`
beside the modules' own states.

If all replicas were synchronised when it was saved, a checkpoint means the same for any number of
replicas, and without `LocalSteps`: replica r takes the optimizer's state of replica r modulo the
saved number. In the middle of a window only as many replicas with the same windows can go on.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardwise.checkpoint.source import TensorInfo
from shardwise.errors import CheckpointError
from shardwise.parallel.local_steps import LocalSteps
from shardwise.parallel.parts import Parts
from shardwise.unit.param import ShardedParam

KEY = "(local steps)"
OUTER = "outer/"
PARAMETER = "parameter"
_OTHERS = re.compile(r"replica\.\d+/")
_NAMES = ("num_replicas", "every", "streams", "keeps", "num_steps", "num_synced")


def prefix_of(replica: int) -> str:
    """Return how the names of a replica's parameters begin."""
    return f"replica.{replica}/" if replica else ""


def local_steps_of(engine: Parts | None) -> LocalSteps | None:
    """Return the `LocalSteps` of a model, or None."""
    return None if engine is None else cast("LocalSteps | None", engine.local_steps)


def own_prefix(engine: Parts) -> str:
    """Return how the names of this rank's parameters begin in a save."""
    steps = local_steps_of(engine)
    return "" if steps is None else prefix_of(steps.replica)


def is_parameter(info: TensorInfo, prefix: str = "") -> bool:
    """Tell whether a tensor is a parameter, of the replica whose names begin with ``prefix``."""
    if not prefix:
        return info.kind == "param"
    return is_of_replica(info) and info.name.startswith(prefix)


def is_of_replica(info: TensorInfo) -> bool:
    """Tell whether a tensor is a parameter of a replica other than the first."""
    is_theirs = _OTHERS.match(info.name) is not None
    return info.kind == "optimizer" and info.state == PARAMETER and is_theirs


def is_of_first_replica(name: str) -> bool:
    """Tell whether a name is neither another replica's nor of the outer state."""
    return not name.startswith(OUTER) and _OTHERS.match(name) is None


def outer_tensors(engine: Parts) -> Iterator[tuple[ShardedParam, str, torch.Tensor]]:
    """Yield (parameter, key, this rank's slice) of the outer state, on replica 0, which saves it.

    Other replicas yield nothing.
    """
    steps = local_steps_of(engine)
    if steps is not None and steps.replica == 0:
        for state in steps.states():
            for key, flat in state.flats().items():
                for param, part in state.split(flat):
                    yield param, key, part


@dataclass(frozen=True)
class SavedReplicas:
    """The settings and counts of `LocalSteps` in a checkpoint; ``where`` is for messages."""

    where: str
    num_replicas: int
    every: int
    streams: int
    keeps: int
    num_steps: int
    num_synced: tuple[int, ...]

    @classmethod
    def take(cls, modules: dict[str, Any], where: str) -> "SavedReplicas | None":
        """Take them out of the values of a rank's modules; None if there are none."""
        values = modules.pop(KEY, None)
        if values is None:
            return None
        is_whole = isinstance(values, dict) and values.keys() == set(_NAMES)
        *numbers, synced = map(values.get, _NAMES) if is_whole else [None]
        listed = synced if isinstance(synced, list) else [None]
        if any(type(number) is not int or number < 0 for number in (*numbers, *listed)):
            raise CheckpointError(f"{where}: the values of LocalSteps are not as they are saved")
        return cls(where, **{**values, "num_synced": tuple(listed)})

    @property
    def is_synchronized(self) -> bool:
        """Tell whether all replicas had one model."""
        return all(synced == self.num_steps for synced in self.num_synced)

    @property
    def _windows(self) -> str:
        tensors = ("nothing", "the anchor", "anchor and momentum")[min(self.keeps, 2)]
        return (
            f"{self.num_replicas} replicas, every={self.every}, streams={self.streams}, and keeps "
            f"{tensors}"
        )

    def check(self, steps: LocalSteps | None) -> None:
        """Raise CheckpointError if the checkpoint has no meaning for the model's replicas."""
        if self.is_synchronized:
            return
        saved, here = self._windows, "no LocalSteps"
        if steps is not None:
            here = SavedReplicas("", **facts_of(steps))._windows
        if here != saved:
            raise CheckpointError(
                f"{self.where}: it was saved in the middle of a window of LocalSteps (step "
                f"{self.num_steps}), when each replica had parameters of its own. It has "
                f"{saved}, and the model {here}. Load it as it was saved and call "
                "LocalSteps.synchronize() before the next save, or load a checkpoint that was "
                "saved at a synchronisation"
            )

    def prefix_for(self, steps: LocalSteps | None) -> str:
        """Return how the names begin that this rank's replica takes."""
        return "" if steps is None else prefix_of(steps.replica % self.num_replicas)


def facts_of(steps: LocalSteps) -> dict[str, Any]:
    """Return the settings and counts that a checkpoint has."""
    return {
        "num_replicas": steps.num_replicas,
        "every": steps.every,
        "streams": steps.streams,
        "keeps": steps.num_kept,
        "num_steps": steps.num_steps,
        "num_synced": list(steps.num_synced),
    }
