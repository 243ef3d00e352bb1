"""Put a checkpoint's values into a model and its optimizer: this rank's slices, read in place.

Note [Moments in a checkpoint]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint has ``exp_avg`` and ``exp_avg_sq`` as values: those of `shardwise.optim.AdamW` that are
codes of 8 bits as float32, those in bfloat16 as they are. So any AdamW takes them, ours in whatever
form its groups ask for: codes are made anew, which gives the codes that there were where blocks are
the same, and torch's in the dtype of its parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.container import dtype_name, memory_of, torch_dtype
from shardwise.checkpoint.places import Place
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.checkpoint.state import local_piece, names_of_params, persistent_buffers
from shardwise.engine.adoption import innermost
from shardwise.engine.parts import Joined, Model
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout.boxes import Region
from shardwise.optim.adamw import AdamW, Moment
from shardwise.optim.kinds import ARGUMENTS
from shardwise.optim.moments import MOMENTS, kind_of
from shardwise.tensor.inner import cut_by_rows, plain_parts
from shardwise.tensor.plain_state import PLAIN_SCALARS

_SHOWN = 5
_COMPARED_ELEMENTS = 1 << 22  # at once


@dataclass(frozen=True)
class Target:
    """Elements [lo, hi) of a tensor of the checkpoint, or of a piece, to be read into ``data``.

    With ``fill`` they are given to that, which knows how ``data`` has them.
    """

    info: TensorInfo
    lo: int
    hi: int
    data: torch.Tensor
    piece: Region | None = None
    fill: Callable[[torch.Tensor], None] | None = None


@dataclass(frozen=True)
class Matched:
    """What goes where: parameters and buffers, and each place with the name it was saved under.

    Without ``strict``, ``missing`` are the places that the checkpoint has not, ``missing_names``
    what it has not in all, ``unexpected`` what only it has.
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

        More than one where weights are tied here and were not there.
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
    """Find what goes to each parameter and buffer; nothing is changed.

    ``elsewhere``: names that other ranks look for.

    **Raises** CheckpointError naming what is missing, unexpected, or of another shape or dtype.
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
        remedy = "or pass strict=False to load what both have" if found else "no parameter is alike"
        raise CheckpointError(
            f"{source.where}: the model and the checkpoint differ: "
            f"{differences(missing, unexpected)}. Load into the model that was saved; {remedy}"
        )
    return Matched(tuple(targets), tuple(found), tuple(lacking), tuple(missing), tuple(unexpected))


def _differ(source: Source, a: TensorInfo, b: TensorInfo) -> bool:
    """Tell whether two saved tensors have other bits; reads all of them if not, on every rank.

    So all ranks come to one answer without asking each other.
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
    """Write down which names only the model, and which only the checkpoint has."""
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


def match_optimizer(source: Source, optimizer: Joined, matched: Matched) -> list[dict[str, Any]]:
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
    # What is tied here has one name, what this model has not (without strict) has none.
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
    groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[Place, dict[str, Any]], list[Target]]:
    """Return new state for each place, and what is to be read into its tensors.

    Memory that the optimizer has already is used again. **Cost** the state's bytes of this rank,
    where it does not exist yet.
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
    states: dict[Place, dict[str, Any]] = {}
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
                if tensor.dtype == saved_dtypes.get(name) or _is_reduced(tensor.state, group):
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
    source: Checkpoint, found: Sequence[TensorInfo], place: Place, before: Mapping[str, Any]
) -> tuple[dict[str, tuple[torch.Tensor, list[Target]]], list[TensorInfo]]:
    """Return the state of a parameter of its own class, by key, with what is read; and the rest."""
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
    """Refuse 8-bit state whose blocks are not those of this rank's slices: scales are per block."""
    if source.ranges(info, place.piece) != place.ranges:
        raise CheckpointError(
            f"{source.where}: optimizer state '{info.state}' of '{info.name}' is quantised in "
            f"blocks of the slices that {source.manifest.num_shards} ranks had at stage "
            f"{source.manifest.stage}, and the slices are others here. Load it with as many ranks, "
            "the same layout and stage, or without the optimizer"
        )


def _is_cut(source: Checkpoint, info: TensorInfo, place: Place) -> bool:
    """Tell whether a tensor of the optimizer is cut like its parameter; else it is a plain one."""
    if info.shape != place.shape:
        return False
    # One that was imported is whole in its file; of a scalar the shape does not tell then.
    return source.is_cut(info) or (source.is_imported and info.state not in PLAIN_SCALARS)


def read_targets(source: Checkpoint, targets: Sequence[Target]) -> Iterator[int]:
    """Read every target; yield bytes as they come.

    What lies in CPU memory and needs no cast is read in place, without a copy on the way.
    """
    in_place, chunks = [], []
    for target in targets:
        data = target.data
        same = torch_dtype(target.info.dtype) == data.dtype and target.fill is None
        if same and data.device.type == "cpu" and data.is_contiguous():
            in_place.append(data)
            memory = memory_of(data)
            chunks += source.chunks(target.info, target.lo, target.hi, memory, target.piece)
        else:  # of no elements too: every rank's full copy is stale then
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
        for data in in_place:  # autograd, and who keeps full copies, must see what we wrote
            torch.autograd.graph.increment_version(data)


def apply_optimizer(
    optimizer: Joined,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Place, dict[str, Any]],
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


def _apply_settings(optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if _is_foreign(key, group):
                continue
            before = group.get(key)
            tensors = [v for v in (before, value) if isinstance(v, torch.Tensor)]
            if len(tensors) == 2 and tensors[0].shape == tensors[1].shape:
                # A captured graph, or a schedule, holds on to it.
                tensors[0].copy_(tensors[1])
            else:
                group[key] = value


def _settings_for(
    where: str, optimizer: Joined, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what the optimizer takes of saved settings.

    **Raises** CheckpointError where its steps would be others.
    """
    first = innermost(optimizer.optimizers[0])
    try:
        return [first.loaded_settings(s) for s in saved] if isinstance(first, AdamW) else saved
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _moment_of(
    optimizer: Joined, place: Place, key: str, group: Mapping[str, Any], before: Mapping[str, Any]
) -> Moment | None:
    """Return a moment to be filled, where it is one of our AdamW's; ``before`` is used if it fits.

    ``group`` are the settings of the parameter's.
    """
    if key not in MOMENTS or not isinstance(innermost(optimizer.optimizers[0]), AdamW):
        return None
    kind = kind_of(group["moments"], group["block"])
    return Moment(place.held, kind, MOMENTS.index(key), before)


def _is_reduced(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether a state is a moment of our AdamW, which another one has in its own dtype."""
    return key in MOMENTS and ARGUMENTS[0] in group


def _is_foreign(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether a saved setting says how our AdamW keeps moments, to a group of another."""
    return key in ARGUMENTS and key not in group
