"""What one ``fully_shard`` call asks for, as one frozen value that its unit carries.

The setters of FSDPModule replace the value between passes; the engine reads it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from shardwise.comm.packed import Transfer
from shardwise.mesh import Axis
from shardwise.stages import STAGES, UnitSettings


@dataclass(frozen=True)
class GroupSettings(UnitSettings):
    """The settings of the parameters of one ``fully_shard`` call.

    ``auto_reshard``: freed after forward unless this is the root. ``divisor``: None is the number
    of ranks. ``zero_fill``: parameters without a gradient are reduced as zeros. ``nearby``: over
    these ranks the full parameters stay spread between forward and backward.
    """

    mp: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    auto_reshard: bool = True
    all_reduces: bool = True
    reads_in_backward: bool = True
    divisor: float | None = None
    sums_only: bool = False
    zero_fill: bool = False
    nearby: Axis | None = None
    max_in_flight: int = 1
    all_gather: Transfer | None = None
    reduce_scatter: Transfer | None = None
    after_reduce: Callable[[torch.Tensor], Any] | None = None

    def with_stage(self, **changes: Any) -> "GroupSettings":
        """Return these settings with fields of the stage's row replaced."""
        return replace(self, stage=replace(self.stage, **changes))


def group_settings(
    reshard_after_forward: bool | None, nearby: Axis | None, mp: MixedPrecisionPolicy
) -> GroupSettings:
    """Return the settings that a call begins with."""
    return GroupSettings(
        replace(STAGES[3], frees_after_forward=reshard_after_forward is not False),
        keeps_last=False,
        mp=mp,
        auto_reshard=reshard_after_forward is None,
        nearby=nearby,
    )
