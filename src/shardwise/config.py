"""What the user asks of ``shard()``, as frozen values, checked and resolved."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch

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
from shardwise.stages import DEFAULT_BUCKET_BYTES, STAGES, ReduceEvery, Stage

LayoutName = Literal["rows", "flat", "matrices"]


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of tensor has; ``None`` keeps the parameter's own dtype.

    ``param`` is the dtype of the full parameters that the layers compute with, ``master`` that of
    the trainable shards which the optimizer updates (frozen parameters keep their own), ``reduce``
    that in which gradients are summed over ranks and micro-batches. With ``cast_inputs``,
    floating-point inputs of a unit's forward are cast to ``param``. With ``gather``, matrices (and
    tensors of more dims) travel in that format, each ``block`` elements with a scale of their own,
    and the layers compute with what arrives; what is stored and stepped stays as it is. With
    ``reduce="int8-a2a"`` (or fp8, int4, bf16) gradients of matrices travel in that format, encoded
    once, and every rank sums what it gets in float32, in rank order. Muon enlarges the error of
    these codes: give it a dtype.

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
                hint = f"; {name!r} stands for Precision({dtypes})"
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
        """How gathers are encoded; None where parameters travel as they are computed with."""
        return None if self.gather is None else Coding(self.gather, self.block)

    @property
    def reduce_coding(self) -> Coding | None:
        """How gradients are encoded; None where they travel in the dtype that they come in."""
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


@dataclass(frozen=True)
class ShardConfig:
    """The settings of one ``shard()`` call, checked and resolved.

    ``prefetch_bytes`` bounds the full parameters gathered ahead of their use (``None``: the
    largest unit; 0: none, which makes every gather blocking). ``bucket_bytes`` is how many bytes
    of gradients are collected before a reduction starts. ``reduces_in_flight`` bounds reductions
    that run behind the backward pass. ``offload="cpu"`` keeps what each rank owns in host memory:
    slices, their gradients, the optimizer's state and its step; `Offload` says it for each kind,
    and for inputs of checkpointed blocks (two copies of each, which win nothing where all fits).
    """

    stage: Stage
    layout: LayoutName
    precision: Precision
    reduce_every: ReduceEvery
    prefetch_bytes: int | None = None
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    reduces_in_flight: int = 2
    offload: Offload | None = None

    @property
    def state_offload(self) -> Offload | None:
        """Where state rests that is away; None where all of it is on the device."""
        return self.offload if self.offload is not None and self.offload.moves_state else None


def resolve_config(
    stage: int,
    layout: str,
    precision: PrecisionLike,
    reduce_every: str | None,
    prefetch_bytes: int | None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    offload: OffloadLike = None,
) -> ShardConfig:
    """Check the settings and resolve their defaults.

    **Raises** ConfigError, naming the setting, what came and what would do.
    """
    if stage not in range(len(STAGES)) or isinstance(stage, bool):
        raise ConfigError(f"stage={stage!r}: expected 0, 1, 2 or 3 (ZeRO stages; 0 is replicated)")
    if layout not in ("rows", "flat", "matrices"):
        raise ConfigError(
            f"layout={layout!r}: expected 'rows' (cut along dim 0), 'flat' (ranges of elements) or "
            "'matrices' (each matrix whole on one rank)"
        )
    precision = resolve_precision(precision)
    if reduce_every not in (None, "step", "micro_batch"):
        raise ConfigError(
            f"reduce_every={reduce_every!r}: expected 'step' (one reduction, more memory), "
            "'micro_batch' (less memory, more traffic), or None for the stage's own"
        )
    if prefetch_bytes is not None and not _is_size(prefetch_bytes):
        raise ConfigError(
            f"prefetch_bytes={prefetch_bytes!r}: expected 0 (blocking) or more bytes, as a number, "
            "or None for the largest unit"
        )
    if not _is_size(bucket_bytes):
        raise ConfigError(
            f"bucket_bytes={bucket_bytes!r}: expected 0 (each unit alone) or more bytes, as a "
            "number"
        )
    row, homes = STAGES[int(stage)], resolve_offload(offload)
    if precision.gather is not None:
        check_coded(precision.gather, row, homes, layout)
    return ShardConfig(
        stage=row,
        layout=layout,  # type: ignore[arg-type]
        precision=precision,
        reduce_every=reduce_every or row.reduce_every,  # type: ignore[arg-type]
        prefetch_bytes=prefetch_bytes,
        bucket_bytes=bucket_bytes,
        offload=homes,
    )


def resolve_precision(precision: PrecisionLike) -> Precision:
    """Return what a name, or the dtype to compute in, stands for; None keeps all dtypes.

    **Raises** ConfigError, naming what came and what would do.
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
