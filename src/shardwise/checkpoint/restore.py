"""Put a checkpoint's values into a model and its optimizer: this rank's slices, read in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.container import dtype_name, memory_of, torch_dtype
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.checkpoint.state import names_of_params, persistent_buffers, slot_names
from shardwise.engine.api import engine_of
from shardwise.errors import CheckpointError
from shardwise.unit.tensor import ShardTensor
from shardwise.unit.unit import Slot

_SHOWN = 5
_PLAIN_SCALARS = ("step", "mu_product", "eta", "mu")  # of torch's optimizers


@dataclass(frozen=True)
class Target:
    """Elements [lo, hi) of a tensor of the checkpoint, to be read into ``data``."""

    info: TensorInfo
    lo: int
    hi: int
    data: torch.Tensor


@dataclass(frozen=True)
class Matched:
    """What goes where: parameters and buffers, and each slot with the name it was saved under.

    Without ``strict``, ``missing`` are the slots that the checkpoint has not, ``missing_names``
    what it has not in all, ``unexpected`` what only it has.
    """

    targets: tuple[Target, ...]
    slots: tuple[tuple[Slot, str], ...]
    missing: tuple[Slot, ...]
    missing_names: tuple[str, ...]
    unexpected: tuple[str, ...]


class Names:
    """The parameters of a checkpoint by every name that they have."""

    def __init__(self, source: Source) -> None:
        self.infos = {i.name: i for i in source.tensors if i.kind in ("param", "buffer")}
        self.tied = source.tied

    def find(self, names: Sequence[str]) -> str | None:
        """Return the name under which a parameter with these names was saved, if it was."""
        for name in names:
            found = self.tied.get(name, name)
            if found in self.infos:
                return found
        return None


def match_model(source: Source, model: nn.Module, *, strict: bool, cast: bool) -> Matched:
    """Find the place of every parameter and buffer; nothing is changed.

    **Raises** CheckpointError naming what is missing, unexpected, or of another shape or dtype.
    """
    names = Names(source)
    targets, slots, missing, lacking = [], [], [], []
    used: set[str] = set()
    for slot in (slot for unit in engine_of(model).units for slot in unit.slots):
        name = names.find(slot_names(slot))
        if name is None:
            missing.append(slot_names(slot)[0])
            lacking.append(slot)
            continue
        used |= {name, *slot_names(slot)}
        info = names.infos[name]
        _check(source, info, slot.cut.shape, slot.storage.master.dtype, cast)
        targets.append(Target(info, slot.cut.lo, slot.cut.hi, slot.param.to_local()))
        slots.append((slot, name))
    for key, buffer in persistent_buffers(model):
        if key not in names.infos:
            missing.append(key)
            continue
        used.add(key)
        info = names.infos[key]
        _check(source, info, tuple(buffer.shape), buffer.dtype, cast)
        targets.append(Target(info, 0, info.numel, buffer.detach()))
    unexpected = [name for name in names.infos if name not in used]
    if (strict or not slots) and (missing or unexpected):
        remedy = "or pass strict=False to load what both have" if slots else "no parameter is alike"
        raise CheckpointError(
            f"{source.where}: the model and the checkpoint differ: "
            f"{differences(missing, unexpected)}. Load into the model that was saved; {remedy}"
        )
    return Matched(tuple(targets), tuple(slots), tuple(lacking), tuple(missing), tuple(unexpected))


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


def match_optimizer(
    source: Source, optimizer: torch.optim.Optimizer, matched: Matched
) -> list[dict[str, Any]]:
    """Return the saved settings of each of the optimizer's groups; nothing is changed.

    **Raises** CheckpointError when the checkpoint holds no optimizer, another one, or other groups.
    """
    info = source.optimizer
    if info is None:
        raise CheckpointError(
            f"{source.where}: it holds no optimizer state; load with optimizer=None to take the "
            "parameters alone"
        )
    if info.class_name not in ("", type(optimizer).__name__):
        raise CheckpointError(
            f"{source.where}: the optimizer is {info.class_name} there and "
            f"{type(optimizer).__name__} here; load with optimizer=None to take parameters alone"
        )
    saved_names = {id(slot): name for slot, name in matched.slots}
    slots = [*(slot for slot, _ in matched.slots), *matched.missing]
    here = [
        {saved_names[id(slot)] for slot in group if id(slot) in saved_names}
        for group in names_of_params(slots, optimizer)
    ]
    # What is tied here has one name, what this model has not (without strict) has none.
    known = {n: saved for slot, saved in matched.slots for n in (*slot_names(slot), saved)}
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
    return [{k: v for k, v in group.items() if k != "params"} for group in info.groups]


def optimizer_targets(
    source: Checkpoint,
    optimizer: torch.optim.Optimizer,
    matched: Matched,
    groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[Slot, dict[str, Any]], list[Target]]:
    """Return new state for each slot, and what is to be read into its tensors.

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
    states: dict[Slot, dict[str, Any]] = {}
    targets = []
    for slot, name in matched.slots:
        if id(slot.param) not in in_optimizer:
            continue
        state = dict(info.state.get(name, {}))
        before = optimizer.state.get(slot.param, {})
        for tensor in by_name.get(name, ()):
            is_cut = _is_cut(source, tensor, slot)
            dtype = torch_dtype(tensor.dtype)
            if is_cut and dtype == torch.uint8:
                _check_blocks(source, tensor, slot)
            if is_cut and tensor.dtype == saved_dtypes.get(name):
                dtype = slot.storage.master.dtype  # like the parameter's, which may have been cast
            value = _state_tensor(
                (tensor.shape, dtype),
                slot,
                is_cut,
                before.get(tensor.state),
                in_optimizer[id(slot.param)],
            )
            state[tensor.state] = value
            targets.append(_state_target(tensor, slot, value))
        states[slot] = state
    return states, targets


def _check_blocks(source: Checkpoint, info: TensorInfo, slot: Slot) -> None:
    """Refuse 8-bit state whose blocks are not those of this rank's slices: scales are per block."""
    here = slot.cut.ranges if slot.cut.layout is not None else ((0, info.numel),)
    if source.ranges(info) != here:
        raise CheckpointError(
            f"{source.where}: optimizer state '{info.state}' of '{info.name}' is quantised in "
            f"blocks of the slices that {source.manifest.num_shards} ranks had at stage "
            f"{source.manifest.stage}, and the slices are others here. Load it with as many ranks, "
            "the same layout and stage, or without the optimizer"
        )


def _is_cut(source: Checkpoint, info: TensorInfo, slot: Slot) -> bool:
    """Tell whether a tensor of the optimizer is cut like its parameter; else it is a plain one."""
    if info.shape != slot.cut.shape:
        return False
    # One that was imported is whole in its file; of a scalar the shape does not tell then.
    return source.is_cut(info) or (source.is_imported and info.state not in _PLAIN_SCALARS)


def _state_tensor(
    like: tuple[tuple[int, ...], torch.dtype],
    slot: Slot,
    is_cut: bool,
    before: Any,
    group: Mapping[str, Any],
) -> torch.Tensor:
    """Return memory of this shape and dtype: what was there before, if it fits."""
    shape, dtype = like
    device = slot.storage.master.device
    if is_cut:
        if (
            isinstance(before, ShardTensor)
            and before.dtype == dtype
            and before._cut.matches(slot.cut)
        ):
            return before
        return ShardTensor.wrap(
            torch.empty(slot.cut.local_shape, dtype=dtype, device=device), slot.cut
        )
    # torch keeps step counts on the CPU, unless the step itself runs on the device.
    on_device = group.get("fused") or group.get("capturable") or shape
    return torch.empty(shape, dtype=dtype, device=device if on_device else torch.device("cpu"))


def _state_target(info: TensorInfo, slot: Slot, value: torch.Tensor) -> Target:
    if isinstance(value, ShardTensor):
        return Target(info, slot.cut.lo, slot.cut.hi, value.to_local())
    return Target(info, 0, info.numel, value)


def read_targets(source: Checkpoint, targets: Sequence[Target]) -> Iterator[int]:
    """Read every target; yield bytes as they come.

    What lies in CPU memory and needs no cast is read in place, without a copy on the way.
    """
    in_place, chunks = [], []
    for target in targets:
        data = target.data
        same = torch_dtype(target.info.dtype) == data.dtype
        if same and data.device.type == "cpu" and data.is_contiguous():
            in_place.append(data)
            chunks += source.chunks(target.info, target.lo, target.hi, memory_of(data))
        else:  # of no elements too: every rank's full copy is stale then
            with torch.no_grad():
                read = source.read(target.info, target.lo, target.hi)
                data.copy_(read.view(data.shape))
            yield data.nbytes
    try:
        yield from source.read_chunks(chunks)
    finally:
        for data in in_place:  # autograd, and who keeps full copies, must see what we wrote
            torch.autograd.graph.increment_version(data)


def apply_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Mapping[str, Any]],
    states: Mapping[Slot, dict[str, Any]],
) -> None:
    """Give the optimizer its settings and its state, once all tensors are read."""
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            before = group.get(key)
            if isinstance(before, torch.Tensor) and isinstance(value, torch.Tensor):
                before.copy_(value)  # a captured graph, or a schedule, holds on to it
            else:
                group[key] = value
    for slot, state in states.items():
        if state:
            optimizer.state[slot.param] = state
        else:
            optimizer.state.pop(slot.param, None)
