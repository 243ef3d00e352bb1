"""The table of stages (lifetimes of full parameters and gradients), and unit settings; no torch.

A stage is a row of data; no code of the engine branches on the stage's number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LayoutName = Literal["rows", "flat", "matrices"]
ReduceEvery = Literal["step", "micro_batch"]
DEFAULT_BUCKET_BYTES = 1 << 20  # of gradients that are reduced together, by default


@dataclass(frozen=True)
class Stage:
    """One row of the stage table: lifetimes of full parameters and of gradients.

    **Source** ZeRO (Rajbhandari et al. 2020), section 5: stage 1 partitions the optimizer state,
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


@dataclass(frozen=True)
class UnitSettings:
    """Settings of one unit: its row of the table, and its prefetches.

    ``keeps_last``: the root, and the unit whose backward comes next, stay full after forward.
    ``optional``: some ranks may skip it while others run it.
    ``full_between_calls``: the modules hold the full parameters from the gather until they are
    freed (FSDP2's contract), else during calls only.
    ``reads_in_backward``: backward needs the full parameters; an embedding's needs only the ids.
    ``stays_full``: full parameters stay after backward, for the next forward of a window.
    ``keeps_grads``: gradients stay on this rank, unreduced, while it is True.
    ``awaits_end``: the pipeline's schedule ends ``keeps_grads``, not the window's last micro-batch.
    ``forward_prefetch``, ``backward_prefetch``: the units to gather with this one (None: the next
    units of the recorded order).
    """

    stage: Stage
    keeps_last: bool = True
    stays_full: bool = False
    keeps_grads: bool = False
    awaits_end: bool = False
    optional: bool = False
    full_between_calls: bool = False
    reads_in_backward: bool = True
    forward_prefetch: Sequence[Any] | None = None
    backward_prefetch: Sequence[Any] | None = None
