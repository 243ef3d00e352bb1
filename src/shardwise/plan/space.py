"""The settings that a search varies, and the limits of its plans."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Any, Literal

from shardwise.errors import ConfigError
from shardwise.homes import Offload, check_coded
from shardwise.plan.candidate import (
    ALL_DEGREES,
    DEGREES,
    Candidate,
    Kernels,
    LossKind,
    planned_offload,
)
from shardwise.plan.machine.hardware import Cluster
from shardwise.plan.planning import Model
from shardwise.precisions import GatherName, ReduceName
from shardwise.stages import STAGES

_MAY_BE_EMPTY = ("num_shards", "micro_batches")
_TRIED = {  # settings of a candidate, and the field of the space that has their values
    "stage": "stages",
    "layout": "layouts",
    "units": "units",
    "bucket_bytes": "bucket_bytes",
    "reduce_every": "reduce_every",
    "gather": "gathers",
    "reduce": "reduces",
}
KNOBS = ("layouts", "units", "bucket_bytes", "reduce_every", "prefetch_units")


@dataclass(frozen=True)
class Space:
    """The values to try of each varied setting; everything else is as in ``base``.

    ``micro_batches`` empty: powers of two from 1 for as long as they fit. ``fills_pipelines``: with
    as many micro-batches as stages, as a run. ``may_move_inputs`` to the host: where needed to fit.
    """

    base: Candidate
    stages: Sequence[int] = (0, 1, 2, 3)
    layouts: Sequence[Literal["rows", "flat", "matrices"]] = ("rows",)
    units: Sequence[tuple[str, ...] | None] = (None,)
    num_shards: Sequence[int] = ()
    prefetch_units: Sequence[int | None] = (1, 0, 2)  # None: as in base
    bucket_bytes: Sequence[int] = (1 << 20,)
    reduce_every: Sequence[Literal["step", "micro_batch"] | None] = (None,)
    gathers: Sequence[GatherName | None] = (None,)  # formats change the results
    reduces: Sequence[ReduceName | None] = (None,)
    activation_checkpointing: Sequence[str] = ("none", "full")
    micro_batches: Sequence[int] = ()
    offloads: Sequence[Offload] = (Offload(),)
    degrees: Sequence[tuple[int, int, int]] = ((1, 1, 1),)  # tensor, pipeline, context
    expert_degrees: Sequence[int | None] = (None,)  # None: as in base
    kernels: Sequence[tuple[Kernels, LossKind] | None] = (None,)  # with the loss; None: as in base
    narrows: bool = False
    fills_pipelines: bool = False
    may_move_inputs: bool = False


@dataclass(frozen=True)
class Limits:
    """The limits of a plan; None is no limit.

    ``tokens_per_step`` is met by accumulation and may not be missed by more than one per cent.
    """

    max_memory_bytes: int | None = None
    tokens_per_step: int | None = None
    target_tokens_per_s: float | None = None


@dataclass(frozen=True)
class Way:
    """How layers are computed, and all that may differ where that is the same: ``variants``.

    These are of the same number of ranks that have different windows, so what a micro-batch costs a
    rank is the same; each is a candidate without a micro-batch, and the units gathered ahead.
    """

    variants: tuple[tuple[Candidate, int | None], ...]


def check_space(space: Space, limits: Limits) -> None:
    """Refuse a space that is empty, and limits that are not positive. **Raises** ConfigError."""
    for name in ("max_memory_bytes", "tokens_per_step", "target_tokens_per_s"):
        value = getattr(limits, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value}: expected more than 0")
    for name in (f.name for f in fields(space) if f.name not in _MAY_BE_EMPTY):
        if getattr(space, name) == ():
            raise ConfigError(f"search: {name} is empty; give at least one value to try")


def check_some_fit(model: Model, ways: Sequence[Way]) -> None:
    """Refuse degrees that the model cannot have, where no placement has others."""
    first: ConfigError | None = None
    placements = (_placed(way.variants[0][0]) for way in ways)
    for placed in dict.fromkeys(placements):
        try:
            model.check_degrees(placed)
        except ConfigError as error:
            first = first or error
        else:
            return
    assert first is not None  # there is at least one way
    raise first


def _placed(candidate: Candidate) -> Candidate:
    """Return a candidate with the same ranks in each degree, and nothing else."""
    sizes = {
        name: getattr(candidate, name) for name in ("num_shards", "num_replicas", *ALL_DEGREES)
    }
    return Candidate(**sizes)


def ways_of(space: Space, cluster: Cluster) -> Iterator[Way]:
    """Yield the ways of a space, each with its variants, those first that have all on the device.

    One stands for those that are alike: parameters that stay in full are not moved, and without
    gathers there is nothing to gather ahead.
    """
    offloads = [*map(planned_offload, space.offloads)]
    offloads.sort(key=lambda offload: (offload.moves_state, offload.params != "device"))
    computed = product(
        space.degrees, space.expert_degrees, space.activation_checkpointing, space.kernels
    )
    for degrees, ep, checkpointing, kernels in computed:
        ranks, rest = divmod(cluster.num_ranks, prod(degrees))
        if rest:
            continue
        settings: dict[str, Any] = dict(zip(DEGREES, degrees, strict=True))
        settings |= {"activation_checkpointing": checkpointing}
        settings |= {"ep": ep} if ep is not None else {}
        settings |= {"kernels": kernels[0], "loss": kernels[1]} if kernels is not None else {}
        base = replace(space.base, **settings)
        variants = tuple(
            variant
            for num_shards in space.num_shards or _splits(ranks, cluster.node.num_accelerators)
            if not ranks % num_shards
            for variant in _variants(space, base, offloads, (num_shards, ranks // num_shards))
        )
        if variants:
            yield Way(variants)


def _variants(
    space: Space, base: Candidate, offloads: Sequence[Offload], sizes: tuple[int, int]
) -> Iterator[tuple[Candidate, int | None]]:
    """Yield the candidates of one way over so many shards and replicas."""
    tried = product(offloads, *(getattr(space, name) for name in _TRIED.values()))
    for (offload, *values), ahead in product(tried, space.prefetch_units):
        settings: dict[str, Any] = dict(zip(_TRIED, values, strict=True))
        if settings["gather"] is not None and not _can_be_coded(settings, offload):
            continue
        candidate = replace(
            base, num_shards=sizes[0], num_replicas=sizes[1], offload=offload, **settings
        )
        stage = STAGES[candidate.stage]
        is_same = not stage.frees_after_backward and offload.params == "cpu"
        if is_same and replace(offload, params="device") in offloads:
            continue  # full parameters stay on the device
        gathers = candidate.has_shards and stage.shards_state
        if gathers or ahead == space.prefetch_units[0]:
            yield candidate, ahead


def _can_be_coded(settings: Mapping[str, Any], offload: Offload) -> bool:
    """Tell whether gathers can be encoded, as `shardwise.homes.check_coded` has it."""
    try:
        check_coded("", STAGES[settings["stage"]], offload, settings["layout"])
    except ConfigError:
        return False
    return True


def _splits(ranks: int, ranks_per_node: int) -> list[int]:
    """Return the shard-axis sizes worth trying: all ranks, and one node."""
    return [ranks] if ranks <= ranks_per_node or ranks % ranks_per_node else [ranks, ranks_per_node]


def turned(space: Space, best: Candidate) -> Iterator[tuple[Candidate, int | None]]:
    """Yield a candidate with its knobs turned; the one that has been played is left out."""
    names = {value: key for key, value in _TRIED.items()}
    values = [getattr(space, name) for name in KNOBS]
    for number, (*settings, ahead) in enumerate(product(*values)):
        turned = {names[name]: value for name, value in zip(KNOBS, settings, strict=False)}
        if number and (best.gather is None or turned["layout"] != "matrices"):
            yield replace(best, **turned), ahead
