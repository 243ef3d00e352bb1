"""Settings of ``shard()``, as frozen values that check themselves.

`Precision`, `Units` and `Schedule` are public, and so is `homes.Offload`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from shardwise.errors import ConfigError
from shardwise.homes import Offload, OffloadLike, check_coded, resolve_offload
from shardwise.precisions import (
    BLOCK_MULTIPLE,
    GATHER_BITS,
    PRECISION_DTYPES,
    REDUCE_FORMATS,
    Coding,
    GatherName,
    ReduceName,
    nearest_precision,
    plain_precision,
)
from shardwise.spelling import did_you_mean
from shardwise.stages import DEFAULT_BUCKET_BYTES, STAGES, LayoutName, ReduceEvery, Stage


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of tensor has; ``None`` keeps the parameter's own dtype.

    ``param`` is the dtype of the full parameters that the layers compute with, ``master`` that of
    the trainable shards which the optimizer updates (frozen parameters keep their own), ``reduce``
    that in which gradients are summed over ranks and micro-batches. With ``cast_inputs``,
    floating-point inputs of a unit's forward are cast to ``param``. With ``gather``, matrices (and
    tensors of more dims) are sent in that format, with a scale per ``block`` elements, and the
    layers compute with the decoded values; stored and stepped values are unchanged. With
    ``reduce="int8-a2a"`` (or fp8, int4, bf16), gradients of matrices are encoded once and sent in
    that format, and each rank sums them in float32, in rank order. Muon enlarges the error of
    these codes: give ``reduce`` a dtype.

    **Raises** ConfigError for a value that a field does not take.
    """

    param: torch.dtype | None = None
    master: torch.dtype | None = None
    reduce: torch.dtype | ReduceName | None = None
    cast_inputs: bool = True
    gather: GatherName | None = None
    block: int = 256

    def __post_init__(self) -> None:
        """Check the values where they are written."""
        for field in ("param", "master", "reduce"):
            value = getattr(self, field)
            known = isinstance(value, torch.dtype) and value.is_floating_point
            is_name = isinstance(value, str)
            if (
                value is None
                or known
                or (field == "reduce" and is_name and value in REDUCE_FORMATS)
            ):
                continue
            expected = (
                "a floating-point dtype, such as torch.bfloat16, or None for the parameter's own"
            )
            hint = ""
            if field == "reduce" and is_name:
                expected = f"a floating-point dtype, or {', '.join(map(repr, REDUCE_FORMATS))}"
                hint = did_you_mean(value, REDUCE_FORMATS)
            elif is_name and (name := plain_precision(value)) in PRECISION_DTYPES:
                dtypes = ", ".join(f"torch.{d}" if d else "None" for d in PRECISION_DTYPES[name])
                hint = f"; {name!r} means Precision({dtypes})"
            raise ConfigError(f"precision.{field}={value!r}: expected {expected}{hint}")
        if self.gather is not None and self.gather not in GATHER_BITS:
            raise ConfigError(
                f"precision.gather={self.gather!r}: expected {', '.join(map(repr, GATHER_BITS))}, "
                "or None to gather in the dtype of computation"
                + did_you_mean(str(self.gather), GATHER_BITS)
            )
        if type(self.block) is not int or self.block < 1 or self.block % BLOCK_MULTIPLE:
            raise ConfigError(
                f"precision.block={self.block!r}: expected a multiple of {BLOCK_MULTIPLE}, the "
                "elements that share one scale, such as 256"
            )

    @property
    def coding(self) -> Coding | None:
        """The encoding of gathers; None if parameters are sent in the computing dtype."""
        return None if self.gather is None else Coding(self.gather, self.block)

    @property
    def reduce_coding(self) -> Coding | None:
        """The encoding of gradients; None if they are sent in their dtype."""
        name = self.reduce_name
        return None if name is None else Coding(REDUCE_FORMATS[name], self.block)

    @property
    def reduce_name(self) -> ReduceName | None:
        """The format of encoded gradients."""
        return self.reduce if isinstance(self.reduce, str) else None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype of the sums; None is the parameter's own."""
        return torch.float32 if isinstance(self.reduce, str) else self.reduce


def _precision(names: Iterable[str | None]) -> Precision:
    param, master, reduce = (getattr(torch, name) if name else None for name in names)
    return Precision(param, master, reduce)


PRECISIONS = {name: _precision(dtypes) for name, dtypes in PRECISION_DTYPES.items()}


PrecisionLike = str | torch.dtype | Precision | None


UnitChoice = type[nn.Module] | str | nn.Module
Placement = DeviceMesh | Shard | tuple[DeviceMesh, Shard]
Placements = Mapping[str, Placement] | Callable[[str, nn.Parameter], Placement | None]
Init = Callable[[nn.Module], object]


@dataclass(frozen=True)
class Units:
    """Which modules form units, and how their parameters are placed and filled.

    ``modules`` are module classes, class names or modules; None finds them (`layout.units`).
    ``optional`` modules may be skipped by some ranks at stage 3. ``experts`` names the parameters
    on the expert mesh of `Axes`, with ``*`` as a wildcard. ``placements`` gives single parameters
    another mesh or dim (`layout.placements`). ``init(module)`` fills a module of a model on the
    meta device; None calls ``reset_parameters()``.

    **Raises** ConfigError for an ``init`` that cannot be called.
    """

    modules: UnitChoice | Iterable[UnitChoice] | None = None
    optional: UnitChoice | Iterable[UnitChoice] = ()
    experts: str | Sequence[str] = ()
    placements: Placements | None = None
    init: Init | None = None

    @classmethod
    def of(cls, given: "UnitsLike") -> "Units":
        """Return ``given`` if it is a `Units`, else one whose ``modules`` it is."""
        return given if isinstance(given, Units) else cls(given)

    def __post_init__(self) -> None:
        """Check the values where they are written."""
        if self.init is not None and not callable(self.init):
            raise ConfigError(
                f"init={self.init!r}: expected a function that takes a module, or None"
            )


UnitsLike = UnitChoice | Iterable[UnitChoice] | Units | None


@dataclass(frozen=True)
class Schedule:
    """When parameters are gathered and gradients reduced. It changes no value.

    ``prefetch_bytes`` bounds the full parameters gathered ahead of their use; None is the largest
    unit, 0 makes every gather blocking. ``bucket_bytes`` of gradients are collected before a
    reduction starts; 0 reduces each unit alone. ``reduce_every`` is "step" (one reduction of an
    accumulation window, more memory) or "micro_batch" (less memory, more traffic); None is the
    stage's own. ``nearby_ranks``, at stage 3: so many neighbours on the shard axis, as a rule those
    of a node, each keep a part of what they have gathered for forward, and gather it from each
    other for backward (hpZ of ZeRO++).

    **Raises** ConfigError for a value that a field does not take.
    """

    prefetch_bytes: int | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    reduce_every: ReduceEvery | None = None
    nearby_ranks: int | None = None

    @classmethod
    def of(cls, given: "Schedule | None") -> "Schedule":
        """Return ``given``, or the default for None. **Raises** ConfigError for another type."""
        if given is not None and not isinstance(given, Schedule):
            raise ConfigError(f"schedule={given!r}: expected a shardwise.config.Schedule or None")
        return given or cls()

    def __post_init__(self) -> None:
        """Check the values where they are written."""
        if self.reduce_every not in (None, "step", "micro_batch"):
            raise ConfigError(
                f"reduce_every={self.reduce_every!r}: expected 'step' (one reduction, more "
                "memory), 'micro_batch' (less memory, more traffic), or None for the stage's own"
            )
        if self.prefetch_bytes is not None and not _is_size(self.prefetch_bytes):
            raise ConfigError(
                f"prefetch_bytes={self.prefetch_bytes!r}: expected 0 (blocking) or more bytes, as "
                "a number, or None for the largest unit"
            )
        if not _is_size(self.bucket_bytes):
            raise ConfigError(
                f"bucket_bytes={self.bucket_bytes!r}: expected 0 (each unit alone) or more bytes, "
                "as a number"
            )
        num = self.nearby_ranks
        if num is not None and (type(num) is not int or num < 2):
            raise ConfigError(
                f"nearby_ranks={num!r}: expected the number of ranks in a node, 2 or more, or None "
                "for gathers from all ranks of the shard axis"
            )


@dataclass(frozen=True)
class ShardConfig:
    """The settings of one ``shard()`` call, checked and resolved; see `Schedule`, `Offload`.

    ``reduces_in_flight`` bounds the reductions that overlap the backward pass.
    """

    stage: Stage
    layout: LayoutName
    precision: Precision
    reduce_every: ReduceEvery
    prefetch_bytes: int | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    reduces_in_flight: int = 2
    offload: Offload | None = None
    nearby_ranks: int | None = None

    @property
    def state_offload(self) -> Offload | None:
        """The places of offloaded state; None if all state is on the device."""
        return self.offload if self.offload is not None and self.offload.moves_state else None


def resolve_config(
    stage: int,
    layout: str,
    precision: PrecisionLike,
    schedule: Schedule | None = None,
    offload: OffloadLike = None,
) -> ShardConfig:
    """Check the settings and resolve their defaults.

    **Raises** ConfigError with the setting, its value and the allowed values.
    """
    if stage not in range(len(STAGES)) or isinstance(stage, bool):
        raise ConfigError(f"stage={stage!r}: expected 0, 1, 2 or 3 (ZeRO stages; 0 is replicated)")
    if layout not in ("rows", "flat", "matrices"):
        raise ConfigError(
            f"layout={layout!r}: expected 'rows' (cut along dim 0), 'flat' (ranges of elements) or "
            "'matrices' (each matrix whole on one rank)"
        )
    precision = resolve_precision(precision)
    schedule = Schedule.of(schedule)
    row, homes = STAGES[int(stage)], resolve_offload(offload)
    if precision.gather is not None:
        check_coded(precision.gather, row, homes, layout)
    return ShardConfig(
        stage=row,
        layout=layout,  # type: ignore[arg-type]
        precision=precision,
        reduce_every=schedule.reduce_every or row.reduce_every,
        prefetch_bytes=schedule.prefetch_bytes,
        bucket_bytes=schedule.bucket_bytes,
        offload=homes,
        nearby_ranks=_checked_nearby(schedule, row),
    )


def _checked_nearby(schedule: Schedule, stage: Stage) -> int | None:
    """Return the ranks that backward gathers from. **Raises** ConfigError below stage 3."""
    if schedule.nearby_ranks is not None and not stage.frees_after_forward:
        raise ConfigError(
            f"nearby_ranks={schedule.nearby_ranks}: at stage {stage.number} full parameters stay "
            "until backward, so it gathers nothing; take stage=3 or leave nearby_ranks out"
        )
    return schedule.nearby_ranks


def resolve_precision(precision: PrecisionLike) -> Precision:
    """Return the `Precision` of a name or a computing dtype; None keeps all dtypes.

    **Raises** ConfigError with the value and the allowed values.
    """
    if precision is None:
        return Precision()
    name = plain_precision(precision)
    if isinstance(name, str) and name in PRECISIONS:
        return PRECISIONS[name]
    if not isinstance(precision, Precision):
        raise ConfigError(
            f"precision={precision!r}: expected one of {', '.join(map(repr, PRECISIONS))}, the "
            f"dtype to compute in, None, or a shardwise.Precision{nearest_precision(precision)}"
        )
    return precision


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
