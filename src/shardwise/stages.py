"""The table of stages: how long full parameters and gradients live. No torch.

A stage is a row of data, and nothing else in the package branches on the stage's number.
"""

from dataclasses import dataclass
from typing import Literal

ReduceEvery = Literal["step", "micro_batch"]


@dataclass(frozen=True)
class Stage:
    """One row of the stage table: lifetimes of full parameters and of gradients.

    Source: ZeRO (Rajbhandari et al. 2020), section 5: stage 1 partitions the optimizer state,
    stage 2 also the gradients, stage 3 also the parameters.
    """

    number: int
    shards_state: bool
    frees_after_forward: bool
    frees_after_backward: bool
    reduce_every: ReduceEvery


STAGES = (
    Stage(0, False, False, False, "step"),
    Stage(1, True, False, False, "step"),
    Stage(2, True, False, False, "micro_batch"),
    Stage(3, True, True, True, "micro_batch"),
)
