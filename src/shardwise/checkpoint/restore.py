"""Put a checkpoint's values into a model and its optimizer: this rank's slices, read in place.

Note [Moments in a checkpoint]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint has ``exp_avg`` and ``exp_avg_sq`` as values: the 8-bit codes of
`shardwise.optim.AdamW` as float32, its bfloat16 moments as they are. So any AdamW can load them.
Ours encodes them in the form of its groups, which gives the saved codes again if the blocks are the
same. torch's takes them in the dtype of its parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.container import dtype_name, memory_of, torch_dtype
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.checkpoint.state import (
    clean_name,
    local_piece,
    names_of_params,
    param_names,
    persistent_buffers,
)
from shardwise.engine.adoption import innermost
from shardwise.engine.parts import Joined, Model, modules_of
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout.boxes import Region, full_region
from shardwise.offload.home import Home
from shardwise.optim.adamw import AdamW, Moment
from shardwise.optim.kinds import ARGUMENTS
from shardwise.optim.moments import MOMENTS, kind_of
from shardwise.tensor.cut import Cut
from shardwise.tensor.inner import cut_by_rows, has_own_gather, inner_of, plain_parts
from shardwise.tensor.plain_state import PLAIN_SCALARS
from shardwise.unit.param import ShardedParam

_SHOWN = 5
_COMPARED_ELEMENTS = 1 << 22  # at once


@dataclass(frozen=True, eq=False)
class Place:
    """One parameter: all its names, and the memory of its elements [lo, hi).

    ``held`` is the tensor in the optimizer's groups. ``param`` and ``cut`` are None for a parameter
    that is not sharded, which has all elements. A parameter of several plain tensors has a place
    for each. The optimizer's state belongs to the first, with the ``suffixes`` of all of them.
    """

    names: tuple[str, ...]
    held: torch.Tensor
    shape: tuple[int, ...]
    lo: int
    hi: int
    data: torch.Tensor
    param: ShardedParam | None = None
    cut: Cut | None = None
    is_first: bool = True
    suffixes: tuple[str, ...] = ("",)

    @property
    def piece(self) -> Region:
        """The box of the parameter whose flattened elements [lo, hi) are in ``data``."""
        return full_region(self.shape) if self.cut is None else self.cut.piece

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """The elements [lo, hi) that each rank of the shard axis works on."""
        if self.param is None or self.cut is None or self.cut.layout is None or self.param.dim > 0:
            return ((0, self.piece.numel),)
        return self.cut.ranges

    @property
    def of_own_class(self) -> torch.Tensor | None:
        """This rank's part of a parameter whose class defines its own gather; else None."""
        local: torch.Tensor = self.held if self.param is None else self.param.sharded._local_tensor
        return local if has_own_gather(local) else None

    def state_of_class(self, before: object) -> torch.Tensor:
        """Return memory for state of the parameter's own class: ``before``, if it fits."""
        local = self.of_own_class
        assert local is not None
        if isinstance(before, torch.Tensor) and before.shape == self.held.shape:
            inside = before._local_tensor if isinstance(before, DTensor) else before
            is_alike = self.param is None or self.param.form.is_alike(before)
            if is_alike and tuple(plain_parts(inside)) == self.suffixes:
                return before
        made = torch.zeros_like(local)
        return made if self.param is None else self.param.form.like(made)

    def state_like(self, dtype: torch.dtype, before: object) -> torch.Tensor:
        """Return memory for state that is cut as the parameter is: ``before``, if it fits."""
        held = before if isinstance(before, torch.Tensor) and before.dtype == dtype else None
        if self.param is None:
            is_plain = type(held) is torch.Tensor and held.device == self.data.device
            if held is not None and is_plain and tuple(held.shape) == self.shape:
                return held
            return torch.empty(self.shape, dtype=dtype, device=self.data.device)
        if held is not None and self.param.form.is_alike(held):
            return held
        shape, home = self.param.cut.local_shape, self.param.unit.home
        if isinstance(home, Home) and home.files.optimizer is not None:
            return self.param.form.like(
                home.in_file(home.files.optimizer, prod(shape), dtype).view(shape)
            )
        return self.param.form.like(torch.empty(shape, dtype=dtype, device=self.data.device))


def places_of_sharded(param: ShardedParam) -> list[Place]:
    """Return the places of a sharded parameter."""
    names, held = param_names(param), param.sharded
    parts = inner_of(held._local_tensor, param.cut, names[0])
    suffixes = tuple(part.suffix for part in parts)
    return [
        Place(
            tuple(name + part.suffix for name in names),
            held,
            part.cut.shape,
            part.cut.lo,
            part.cut.hi,
            part.local.detach(),
            param,
            part.cut,
            part is parts[0],
            suffixes,
        )
        for part in parts
    ]


def places_of_plain(model: Model) -> list[Place]:
    """Return the places of a model that is not sharded. **Raises** ConfigError on meta."""
    names: dict[nn.Parameter, list[str]] = {}
    for each in modules_of(model):
        for name, param in each.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(clean_name(name))
            if param.is_meta:
                raise ConfigError(
                    f"model: parameter '{name}' is on the meta device and has no memory to load "
                    "into; call model.to_empty(device=...) first"
                )
    places = []
    for param, of_param in names.items():
        parts = plain_parts(param)
        for number, (suffix, part) in enumerate(parts.items()):
            called = tuple(name + suffix for name in of_param)
            shape, count = tuple(part.shape), part.numel()
            kinds = None, None, number == 0, tuple(parts)
            places.append(Place(called, param, shape, 0, count, part.detach(), *kinds))
    return places


@dataclass(frozen=True)
class Target:
    """Elements [lo, hi) of a tensor of the checkpoint, or of a piece, to be read into ``data``.

    With ``fill`` it is called with them, and writes them to ``data`` in its form.
    """

    info: TensorInfo
    lo: int
    hi: int
    data: torch.Tensor
    piece: Region | None = None
    fill: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Matched:
    """The targets of parameters and buffers, and each place with the name it was saved under.

    Without ``strict``, ``missing`` are the places that the checkpoint lacks, ``missing_names`` all
    names that it lacks, ``unexpected`` the names that only it has.
    """

    targets: tuple[Target, ...]
    places: tuple[tuple[Place, str], ...]
    missing: tuple[Place, ...]
    missing_names: tuple[str, ...]
    unexpected: tuple[str, ...]


class Names:
    """The parameters of a checkpoint by every name that they have."""

    def __init__(self, source: Source) -> None:
        self.infos = {i.name: i for i in source.tensors if i.kind in ("param", "buffer")}
        self.tied = source.tied

    def find(self, names: Sequence[str]) -> list[str]:
        """Return the names under which a parameter with these names was saved, each once.

        It is more than one name if weights are tied here and were not when saved.
        """
        found = dict.fromkeys(self.tied.get(name, name) for name in names)
        return [name for name in found if name in self.infos]


def match_model(
    source: Source,
    model: Model,
    places: Sequence[Place],
    *,
    strict: bool,
    cast: bool,
    elsewhere: Collection[str] = (),
) -> Matched:
    """Find the saved tensor of each parameter and buffer; nothing is changed.

    ``elsewhere``: names that other ranks look for.

    **Raises** CheckpointError naming tensors that are missing, unexpected, or of another shape or
    dtype.
    """
    names = Names(source)
    targets, found, missing = [], [], []
    lacking: list[Place] = []
    used = set(elsewhere)
    for place in places:
        saved_names = names.find(place.names)
        if not saved_names:
            missing.append(place.names[0])
            lacking.append(place)
            continue
        name, *others = saved_names
        used |= {name, *place.names}
        for other in others:
            if _differ(source, names.infos[name], names.infos[other]):
                if strict:
                    raise CheckpointError(
                        f"{source.where}: '{name}' and '{other}' are one parameter here, and two "
                        "there with other values. Load into a model that does not tie them, or "
                        f"pass strict=False to take '{name}' alone"
                    )
                used.discard(other)
        info = names.infos[name]
        _check(source, info, place.shape, place.data.dtype, cast)
        targets.append(Target(info, place.lo, place.hi, place.data, place.piece))
        found.append((place, name))
    for key, buffer in persistent_buffers(model):
        if key not in names.infos:
            missing.append(key)
            continue
        used.add(key)
        info = names.infos[key]
        _check(source, info, tuple(buffer.shape), buffer.dtype, cast)
        local, piece = local_piece(buffer.detach(), key)
        targets.append(Target(info, 0, local.numel(), local, piece))
    unexpected = [name for name in names.infos if name not in used]
    if (strict or not found) and (missing or unexpected):
        remedy = "or pass strict=False to load what both have" if found else "no name is in both"
        raise CheckpointError(
            f"{source.where}: the model and the checkpoint differ: "
            f"{differences(missing, unexpected)}. Load into the model that was saved; {remedy}"
        )
    return Matched(tuple(targets), tuple(found), tuple(lacking), tuple(missing), tuple(unexpected))


def _differ(source: Source, a: TensorInfo, b: TensorInfo) -> bool:
    """Tell whether two saved tensors differ; reads all of both on every rank, if they do not.

    So all ranks find the same answer without an exchange.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return True
    for lo in range(0, a.numel, _COMPARED_ELEMENTS):
        hi = min(lo + _COMPARED_ELEMENTS, a.numel)
        first, second = (source.read(info, lo, hi).view(torch.uint8) for info in (a, b))
        if not torch.equal(first, second):
            return True
    return False


def differences(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """Describe which names only the model has, and which only the checkpoint."""
    parts = [
        f"{len(names)} {what} ({', '.join(names[:_SHOWN])}{', ...' if names[_SHOWN:] else ''})"
        for what, names in (("missing there", missing), ("unknown here", unexpected))
        if names
    ]
    return "; ".join(parts)


def _check(
    source: Source, info: TensorInfo, shape: tuple[int, ...], dtype: torch.dtype, cast: bool
) -> None:
    if info.shape != tuple(shape):
        raise CheckpointError(
            f"{source.where}: '{info.name}' has shape {info.shape} there and {tuple(shape)} here"
        )
    if info.dtype != dtype_name(dtype, info.name) and not cast:
        raise CheckpointError(
            f"{source.where}: '{info.name}' is {torch_dtype(info.dtype)} there and {dtype} here; "
            "shard with the same master dtype, or pass cast=True to convert"
        )


def match_optimizer(source: Source, optimizer: Joined, matched: Matched) -> list[dict[str, object]]:
    """Return the saved settings of each of the optimizer's groups; nothing is changed.

    **Raises** CheckpointError when the checkpoint holds no optimizer, another one, or other groups.
    """
    info = source.optimizer
    if info is None:
        raise CheckpointError(
            f"{source.where}: it holds no optimizer state; load with optimizer=None to take the "
            "parameters alone"
        )
    if info.class_name not in ("", optimizer.name):
        raise CheckpointError(
            f"{source.where}: the optimizer is {info.class_name} there and "
            f"{optimizer.name} here; load with optimizer=None to take parameters alone"
        )
    saved_names = {id(place): name for place, name in matched.places}
    places = [*(place for place, _ in matched.places), *matched.missing]
    here = [
        {saved_names[id(place)] for place in group if id(place) in saved_names}
        for group in names_of_params([(p.held, p) for p in places if p.is_first], optimizer)
    ]
    # Tied parameters have one name; parameters that this model lacks (without strict) have no name.
    known = {n: saved for place, saved in matched.places for n in (*place.names, saved)}
    listed = [[source.tied.get(n, n) for n in group["params"]] for group in info.groups]
    there = [{known[name] for name in names if name in known} for names in listed]
    if len(here) != len(there):
        raise CheckpointError(
            f"{source.where}: the optimizer has {len(there)} groups there and {len(here)} here"
        )
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        if ours != theirs:
            name = min(ours ^ theirs)
            has, lacks = ("here", "there") if name in ours else ("there", "here")
            raise CheckpointError(
                f"{source.where}: '{name}' is in group {number} of the optimizer {has}, not {lacks}"
            )
    saved = [{k: v for k, v in group.items() if k != "params"} for group in info.groups]
    return _settings_for(source.where, optimizer, saved)


def optimizer_targets(
    source: Checkpoint,
    optimizer: Joined,
    matched: Matched,
    groups: Sequence[Mapping[str, object]],
) -> tuple[dict[Place, dict[str, object]], list[Target]]:
    """Return new state for each place, and the targets of its tensors.

    Memory that the optimizer already has is reused. **Cost** the state's bytes of this rank, where
    it does not exist yet.
    """
    info = source.optimizer
    assert info is not None
    by_name: dict[str, list[TensorInfo]] = {}
    for tensor in source.tensors:
        if tensor.kind == "optimizer" and tensor.name:
            by_name.setdefault(source.tied.get(tensor.name, tensor.name), []).append(tensor)
    saved_dtypes = {
        tensor.name: tensor.dtype for tensor in source.tensors if tensor.kind == "param"
    }
    in_optimizer = {
        id(p): {**group, **saved}
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
        for p in group["params"]
    }
    states: dict[Place, dict[str, object]] = {}
    targets = []
    for place, name in matched.places:
        if id(place.held) not in in_optimizer or not place.is_first:
            continue
        state = dict(info.state.get(name, {}))
        before = optimizer.state.get(place.held, {})
        if place.of_own_class is not None:
            of_class, rest = _states_of_class(source, by_name.get(name, ()), place, before)
            by_name[name] = rest
            for key, (value, into) in of_class.items():
                state[key] = value
                targets += into
        for tensor in by_name.get(name, ()):
            is_cut = _is_cut(source, tensor, place)
            dtype = torch_dtype(tensor.dtype)
            group = in_optimizer[id(place.held)]
            moment = _moment_of(optimizer, place, tensor.state, group, before) if is_cut else None
            if moment is not None:
                state.update(moment.state)
                bounds = place.lo, place.hi
                targets.append(Target(tensor, *bounds, moment.data, place.piece, moment.fill))
                continue
            if is_cut and dtype == torch.uint8:
                _check_blocks(source, tensor, place)
            if is_cut:
                # A moment of our AdamW may have another dtype than its parameter: not for others.
                is_reduced = tensor.state in MOMENTS and ARGUMENTS[0] in group
                if tensor.dtype == saved_dtypes.get(name) or is_reduced:
                    dtype = place.data.dtype  # like the parameter's, which may have been cast
                value = place.state_like(dtype, before.get(tensor.state))
            else:
                # torch keeps step counts on the CPU, unless the step itself runs on the device.
                on_device = group.get("fused") or group.get("capturable") or tensor.shape
                device = place.data.device if on_device else torch.device("cpu")
                value = torch.empty(tensor.shape, dtype=dtype, device=device)
            state[tensor.state] = value
            if isinstance(value, DTensor):
                targets.append(Target(tensor, place.lo, place.hi, value.to_local(), place.piece))
            else:
                targets.append(Target(tensor, 0, tensor.numel, value))
        states[place] = state
    return states, targets


def _states_of_class(
    source: Checkpoint, found: Sequence[TensorInfo], place: Place, before: Mapping[str, object]
) -> tuple[dict[str, tuple[torch.Tensor, list[Target]]], list[TensorInfo]]:
    """Return the state that has the parameter's own class, by key, with targets; and the rest."""
    by_state = {tensor.state: tensor for tensor in found}
    made: dict[str, tuple[torch.Tensor, list[Target]]] = {}
    last = place.suffixes[-1]
    assert place.of_own_class is not None
    rest = [part.shape[1:] for part in plain_parts(place.of_own_class).values()]
    shapes = [(place.shape[0], *each) for each in rest]
    for key in [state.removesuffix(last) for state in by_state if state.endswith(last)]:
        infos = [by_state[key + s] for s in place.suffixes if key + s in by_state]
        if [info.shape for info in infos] != shapes:
            continue
        value = place.state_of_class(before.get(key))
        local = value._local_tensor if isinstance(value, DTensor) else value
        into = []
        for tensor, part in zip(infos, plain_parts(local).values(), strict=True):
            cut = None if place.param is None else cut_by_rows(tensor.shape, place.param.cut)
            begin, end = (0, tensor.numel) if cut is None else (cut.lo, cut.hi)
            into.append(Target(tensor, begin, end, part.detach()))
            del by_state[tensor.state]
        made[key] = value, into
    return made, list(by_state.values())


def _check_blocks(source: Checkpoint, info: TensorInfo, place: Place) -> None:
    """Refuse 8-bit state in blocks of other slices than this rank's: scales are per block."""
    if source.ranges(info, place.piece) != place.ranges:
        raise CheckpointError(
            f"{source.where}: optimizer state '{info.state}' of '{info.name}' is quantised in "
            f"blocks of the slices that {source.manifest.num_shards} ranks had at stage "
            f"{source.manifest.stage}, and the slices are others here. Load it with as many ranks, "
            "the same layout and stage, or without the optimizer"
        )


def _is_cut(source: Checkpoint, info: TensorInfo, place: Place) -> bool:
    """Tell whether a tensor of the optimizer is cut as its parameter is; else it is plain."""
    if info.shape != place.shape:
        return False
    # An imported tensor is whole in its file; for a scalar the shape does not decide then.
    return source.is_cut(info) or (source.is_imported and info.state not in PLAIN_SCALARS)


def read_targets(source: Checkpoint, targets: Sequence[Target]) -> Iterator[int]:
    """Read every target; yield bytes as they come.

    Targets in CPU memory that need no cast are read in place, without a copy.
    """
    in_place, chunks = [], []
    for target in targets:
        data = target.data
        same = torch_dtype(target.info.dtype) == data.dtype and target.fill is None
        if same and data.device.type == "cpu" and data.is_contiguous():
            in_place.append(data)
            memory = memory_of(data)
            chunks += source.chunks(target.info, target.lo, target.hi, memory, target.piece)
        else:  # even without elements: every rank's full copy becomes stale
            with torch.no_grad():
                read = source.read(target.info, target.lo, target.hi, target.piece)
                if target.fill is not None:
                    target.fill(read)
                else:
                    data.copy_(read.view(data.shape))
            yield data.nbytes
    try:
        yield from source.read_chunks(chunks)
    finally:
        for data in in_place:  # autograd, and units with full copies, must see the change
            torch.autograd.graph.increment_version(data)


def apply_optimizer(
    optimizer: Joined,
    groups: Sequence[Mapping[str, object]],
    states: Mapping[Place, dict[str, object]],
) -> None:
    """Give the optimizer its settings and its state, once all tensors are read."""
    for each in optimizer.optimizers:
        _apply_settings(each, groups)
        for place, state in states.items():
            if not any(
                place.held is param for group in each.param_groups for param in group["params"]
            ):
                continue
            if state:
                each.state[place.held] = state
            else:
                each.state.pop(place.held, None)


def _apply_settings(
    optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, object]]
) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in ARGUMENTS and key not in group:  # of our AdamW's moments, for another AdamW
                continue
            before = group.get(key)
            tensors = [v for v in (before, value) if isinstance(v, torch.Tensor)]
            if len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
                # A captured graph, or a schedule, holds this tensor.
                tensors[0].copy_(tensors[1])
            else:
                group[key] = value


def _settings_for(
    where: str, optimizer: Joined, saved: list[dict[str, object]]
) -> list[dict[str, object]]:
    """Return the saved settings that the optimizer takes.

    **Raises** CheckpointError if they would change its steps.
    """
    first = innermost(optimizer.optimizers[0])
    try:
        return [first.loaded_settings(s) for s in saved] if isinstance(first, AdamW) else saved
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _moment_of(
    optimizer: Joined,
    place: Place,
    key: str,
    group: Mapping[str, Any],
    before: Mapping[str, object],
) -> Moment | None:
    """Return a moment to be filled, if the optimizer is our AdamW; ``before`` is used if it fits.

    ``group`` are the settings of the parameter's group.
    """
    if key not in MOMENTS or not isinstance(innermost(optimizer.optimizers[0]), AdamW):
        return None
    kind = kind_of(group["moments"], group["block"])
    return Moment(place.held, kind, MOMENTS.index(key), before)
