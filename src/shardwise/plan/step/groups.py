"""What of a candidate decides the bytes of a unit, and the unit's parameters by storage."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardwise.layout.memory import Memory, group_by_dtypes
from shardwise.layout.segments import build_layout
from shardwise.plan.candidate import Candidate
from shardwise.plan.sizes import DTYPE_BYTES, PRECISIONS, DtypeName
from shardwise.precisions import PRECISION_DTYPES, Coding
from shardwise.stages import STAGES, Stage

# Shape, dtype, whether it is trained, whether it gets a gradient, owner.
ParamKey = tuple[tuple[int, ...], DtypeName, bool, bool, int | None]


@dataclass(frozen=True)
class Setting:
    """What of a candidate decides the bytes of a unit."""

    stage: Stage
    num_shards: int
    num_replicas: int
    precision: str
    layout: Literal["rows", "flat", "matrices"]
    on_cpu: bool  # the transport is point to point, and so the device is the CPU
    optimizer: str
    rank: int
    stays: bool  # where the slices rest elsewhere, a copy of them stays on the device
    is_away: bool = False
    coding: Coding | None = None  # how gathers are encoded
    reduce_coding: Coding | None = None


def setting_of(candidate: Candidate, rank: int = 0) -> Setting:
    """Take from a candidate what decides the bytes of a unit that rests on the device."""
    return Setting(
        STAGES[candidate.stage],
        candidate.num_shards,
        candidate.num_replicas,
        candidate.precision,
        candidate.layout,
        candidate.transport == "point_to_point",
        candidate.optimizer,
        rank,
        candidate.offload.params == "device",
        coding=candidate.coding,
        reduce_coding=candidate.reduce_coding,
    )


class Group(NamedTuple):
    """The parameters of one storage: which of them are trained and updated, and their memory."""

    memory: Memory
    trained: tuple[bool, ...]
    updated: tuple[bool, ...]
    master_name: DtypeName
    reduce: int

    @property
    def updated_numels(self) -> list[int]:
        """Elements of each parameter that the optimizer updates."""
        params = self.memory.layout.params
        return [p.numel for p, updated in zip(params, self.updated, strict=True) if updated]


def groups_of(params: tuple[ParamKey, ...], setting: Setting) -> list[Group]:
    """Group parameters by dtypes, frozen ones apart, as `unit.materialize` does."""
    row = PRECISIONS[setting.precision]
    own = PRECISION_DTYPES.get(setting.precision) == (None, None, None)
    wanted = (None, None) if own else (row.master, row.compute)
    keys = ((dtype, "float" in dtype, trained) for _, dtype, trained, *_ in params)
    groups = []
    for ((master, compute), _), members in group_by_dtypes(params, keys, *wanted).items():
        owners = [m[4] for m in members]
        layout = build_layout(setting.layout, [m[0] for m in members], setting.num_shards, owners)
        sizes = DTYPE_BYTES[master], DTYPE_BYTES[compute]
        place = setting.is_away, setting.is_away and setting.stays
        whose = setting.coding if "float" in compute else None, setting.rank
        memory = Memory(layout, setting.stage, *sizes, master != compute, *place, *whose)
        trained = tuple(m[2] for m in members)
        updated = tuple(m[2] and m[3] for m in members)
        summed = "float32" if setting.reduce_coding else master if own else row.reduce
        groups.append(Group(memory, trained, updated, master, DTYPE_BYTES[summed]))
    return groups
