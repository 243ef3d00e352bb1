"""The bytes that the engine owns at a moment, by place, kind and unit.

Note [One owner for each byte]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Tensors share memory: a gradient is a part of the buffer of the next step's gradients, a view is a
part of its base. So memory is counted by the blocks of an allocator (torch's storages), each once,
under the first kind that has a part of it. Shards inside full copies are the exception: that part
of the block counts as shards.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from shardwise.debug import place_of, place_of_state
from shardwise.device import memory_in_use_bytes
from shardwise.engine.parts import Parts
from shardwise.engine.tree import tensors_in
from shardwise.names import join_units
from shardwise.step.overlap import staging_bytes
from shardwise.svg import order_of_kinds
from shardwise.tensor.background_step import elements_of
from shardwise.tensor.inner import plain_parts
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.states import GradState
from shardwise.unit.unit import Unit

NO_UNIT = "(no unit)"  # memory of several units, or of no unit


@dataclass(frozen=True)
class OwnedBytes:
    """Bytes by (place, kind, unit); places are "device", "host", "files".

    ``in_use_bytes`` is all allocated memory of the device; on the CPU that of the process, with its
    libraries.
    """

    owned: Mapping[tuple[str, str, str], int]
    in_use_bytes: int

    def by_kind(self, place: str = "device") -> dict[str, int]:
        """Return the bytes of each kind in one place, named as in a plan's ledger."""
        found: Counter[str] = Counter()
        for (where, kind, _), num_bytes in self.owned.items():
            if where == place:
                found[kind] += num_bytes
        return {kind: found[kind] for kind in sorted(+found, key=order_of_kinds)}

    def by_unit(self, place: str = "device") -> dict[str, dict[str, int]]:
        """Return the bytes of each kind of each unit in one place."""
        found: dict[str, dict[str, int]] = {}
        for (where, kind, unit), num_bytes in self.owned.items():
            if where == place:
                found.setdefault(unit, {})[kind] = num_bytes
        return found

    @property
    def device_bytes(self) -> int:
        """The engine's bytes on the device."""
        return sum(n for (place, _, _), n in self.owned.items() if place == "device")

    @property
    def other_bytes(self) -> int:
        """Other bytes of the device: activations, temporaries and others."""
        return max(self.in_use_bytes - self.device_bytes, 0)


def state_bytes(
    optimizers: Sequence[torch.optim.Optimizer],
) -> Counter[tuple[str, str, str]]:
    """Return the bytes of the optimizers' state, which change only in their steps."""
    blocks = _Blocks()
    for optimizer in optimizers:
        _add_state(blocks, optimizer)
    return blocks.found


def owned_bytes(
    parts: Parts,
    optimizers: Sequence[torch.optim.Optimizer] = (),
    state: Mapping[tuple[str, str, str], int] | None = None,
) -> OwnedBytes:
    """Return the bytes that the engine owns on this rank; see Note [One owner for each byte].

    ``state`` is a result of `state_bytes` since the optimizers' last step.

    **Cost** some microseconds of the host for each storage, and for each parameter that has a
    gradient; without ``state`` for each tensor of the optimizers too.
    """
    blocks = _Blocks()
    for unit in parts.units:
        _add_params(blocks, unit)
    for unit in parts.units:
        _add_grads(blocks, unit)
    blocks.found.update(state_bytes(optimizers) if state is None else state)
    for unit in parts.units:
        if unit.gather.pending is not None:
            blocks.add("device", "gather_staging", unit.name, tensors_in(unit.gather.pending.holds))
        coded = [s.coded_memory for s in unit.storages if s.coded_memory is not None]
        blocks.add("device", "gather_staging", unit.name, coded)
    for engine in parts.engines:
        for held in engine.reductions.held:
            name = join_units(held.units)
            blocks.add("device", "grad_shards", name, held.means)
            blocks.add("device", "grad_full", name, held.grads)
            blocks.add("device", "reduce_staging", name, tensors_in(held.staging))
        if engine.activations is not None:
            blocks.count("host", "activations_on_host", NO_UNIT, engine.activations.host_bytes)
    for optimizer in optimizers:
        blocks.count("device", "state_staging", NO_UNIT, staging_bytes(optimizer))
    return OwnedBytes(dict(+blocks.found), memory_in_use_bytes(parts.comm.device))


class _Blocks:
    """Blocks of memory, each counted once."""

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()
        self._seen: set[int] = set()

    def count(self, place: str, kind: str, unit: str, num_bytes: int) -> None:
        self.found[place, kind, unit] += num_bytes

    def see(self, *tensors: torch.Tensor) -> None:
        """Mark memory as counted."""
        self._seen.update(t.untyped_storage().data_ptr() for t in tensors)

    def add(self, place: str, kind: str, unit: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in (part for made in tensors for part in _plain(made)):
            block = tensor.untyped_storage()
            if block.nbytes() and block.data_ptr() not in self._seen:
                self._seen.add(block.data_ptr())
                self.count(place, kind, unit, block.nbytes())


def _add_params(blocks: _Blocks, unit: Unit) -> None:
    for storage in unit.storages:
        memory, place = storage.memory, place_of(unit, "params")
        blocks.count(place, "param_shards", unit.name, memory.shard_bytes)
        blocks.count("device", "param_full", unit.name, storage.kept_bytes + memory.copy_bytes)
        blocks.see(storage.master, storage.full)
    for param in unit.params:
        if not param.encoding.in_storage:
            blocks.add(place_of(unit), "param_shards", unit.name, [param.sharded])
            if param.leaf is not None:
                blocks.add("device", "param_full", unit.name, [param.leaf.data])


def _add_grads(blocks: _Blocks, unit: Unit) -> None:
    place = place_of(unit, "grads")
    for storage in unit.storages:
        blocks.add(place_of(unit), "grad_shards", unit.name, storage.means.held)
        if storage.unreduced is not None:
            blocks.add("device", "grad_shards", unit.name, [storage.unreduced.sums])
    is_empty = unit.grad_state is GradState.EMPTY and not unit.settings.stands_while_full
    for param in unit.params:
        if is_empty and not param.has_partial:  # autograd writes before the unit's state changes
            continue
        for mean in (param.grad, param.mean):
            if isinstance(mean, DTensor):
                blocks.add(place, "grad_shards", unit.name, [mean])
        partials = [param.partial, getattr(param.leaf, "grad", None)]
        blocks.add("device", "grad_full", unit.name, [t for t in partials if t is not None])


def _add_state(blocks: _Blocks, optimizer: torch.optim.Optimizer) -> None:
    for param, state in optimizer.state.items():
        owner = owner_of(param)
        name = NO_UNIT if owner is None else owner.unit.name
        for value in state.values():
            if isinstance(value, torch.Tensor):
                place = place_of_state(optimizer, owner, value)
                blocks.add(place, "optimizer_state", name, [value])


def _plain(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the plain tensors of this rank inside a tensor, without waiting."""
    local = elements_of(tensor) if isinstance(tensor, DTensor) else tensor
    return plain_parts(local).values()
