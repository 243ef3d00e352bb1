"""Full weights of a sharded model, a few tensors at a time, on the ranks that take them.

Note [The way of a full weight]
First, a tensor is gathered along the shard axis: every rank sends its slice to the ranks that need
the whole piece, directly into place. With tensor or expert parallelism a rank then has a piece, and
a gather along their axes completes the tensor. Last, the ranks of a pipeline stage send the tensor
along the axis of the stages. A rank needs a tensor if it takes it, or if it sends it later to a
rank that does. So each step asks the axis of the next step. Ranks that need nothing only send.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.pending import CollectiveId
from shardwise.engine.agreement import agree
from shardwise.engine.parts import Model, Parts
from shardwise.errors import ConfigError, StateError
from shardwise.mesh import Axis
from shardwise.tensor.cut import Cut, DimCut, PieceCut, as_dtensor
from shardwise.tensor.inner import inner_of, plain_parts, version_of
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.param import ShardedParam

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]

BUCKET_BYTES = 64 << 20
_SITE = CollectiveId("gather", "(stream)", 0)


def named_weights(model: nn.Module) -> State:
    """Return the entries of ``state_dict()``, still sharded, without aliases of tied weights."""
    state: State = model.state_dict(keep_vars=True)
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    names = [name for name in state if name not in ignored]
    kept: dict[int, str] = {}
    for name in sorted(names, key=lambda n: n in tied):
        kept.setdefault(id(state[name]), name)
    return {name: state[name] for name in names if kept[id(state[name])] == name}


@dataclass(frozen=True)
class _Sharded:
    """A tensor to gather: this rank's slice, and its cut along the shard axis."""

    local: torch.Tensor
    cut: Cut

    @property
    def inner(self) -> Cut:
        """The cut of this rank's piece along the shard axis."""
        return self.cut.inner if isinstance(self.cut, PieceCut) else self.cut

    @property
    def own(self) -> torch.Tensor:
        """This rank's elements, flat, in their order in the gathered piece."""
        inner = self.inner
        moved = self.local.movedim(inner.dim, 0) if isinstance(inner, DimCut) else self.local
        return moved.reshape(-1)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Each rank's elements [lo, hi) in the gathered piece; one range if it is not cut."""
        inner = self.inner
        if inner.layout is None:
            return ((0, prod(inner.shape)),)
        if not isinstance(inner, DimCut):
            return inner.ranges
        numel = prod(inner.local_shape)
        return tuple((r * numel, (r + 1) * numel) for r in range(inner.layout.num_ranks))

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of the gathered piece in its shape."""
        inner = self.inner
        if not isinstance(inner, DimCut):
            return flat.view(inner.shape)
        rest = [size for dim, size in enumerate(inner.shape) if dim != inner.dim]
        return flat.view(inner.shape[inner.dim], *rest).movedim(0, inner.dim)


class FullWeights:
    """Gathers the tensors of one model; every rank makes one and asks for the same tensors.

    ``ranks`` of the world take the tensors; None means all. Floating-point tensors are cast to
    ``dtype`` before they are sent.

    **Raises** ConfigError on all ranks for a rank outside the world, or if ranks differ in their
    arguments. StateError inside `gathered`, or if the parameters must not be used.
    """

    def __init__(
        self,
        model: Model,
        what: str,
        ranks: Collection[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.parts = Parts(model)
        world = range(dist.get_world_size())
        agree(self.parts.everyone, [f"ranks={ranks}", f"dtype={dtype}"], what)
        if ranks is not None and (not ranks or any(rank not in world for rank in ranks)):
            raise ConfigError(
                f"{what}: ranks={ranks!r}: expected ranks of the world, 0 to {len(world) - 1}, or "
                "None for all"
            )
        if self.parts.suspended:
            raise StateError(
                f"{what}: the model is gathered already; use its parameters, or leave the context"
            )
        self.parts.check_usable(f"{what}: ")
        self.parts.rest(what)
        self._what, self._dtype = what, dtype
        self._ranks = None if ranks is None else frozenset(ranks)
        self._device = self.parts.comm.device
        self.is_taker = ranks is None or dist.get_rank() in ranks
        stages = self.parts.comm.axes.stages
        column = dist.get_process_group_ranks(stages.group) if stages else ()
        self.is_needed = self.is_taker or not self._ranks.isdisjoint(column)  # type: ignore[union-attr]
        self._needs: dict[tuple[int, ...], tuple[list[int], bool]] = {}

    def _needed_along(self, cut: Cut) -> tuple[list[int], bool]:
        """Return the ranks of the shard axis that need the piece, and if this rank needs it."""
        axis, own_axes = cut.comm.axes.shard, cut.own_axes
        if self._ranks is None:
            return list(range(axis.size)), True
        key = (id(axis.group), *(id(each.group) for each in own_axes))
        if key not in self._needs:
            needs = torch.tensor([self.is_needed], dtype=torch.uint8)
            for each in own_axes:
                needs = cut.comm.max(needs, each, _SITE)
            rows = cut.comm.gather_rows(needs, axis, _SITE).flatten().tolist()
            self._needs[key] = [rank for rank, needed in enumerate(rows) if needed], bool(needs)
        return self._needs[key]

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors, or empty tensors on ranks that do not need them.

        **Cost** each slice is sent to each rank that needs the piece. A single tensor is received
        in place. Several tensors are received together and copied, so they should be small.
        """
        found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        sharded: dict[int, _Sharded] = {}
        for number, tensor in enumerate(tensors):
            owner = owner_of(tensor)
            if owner is not None:
                sharded[number] = self._sharded(tensor, owner)
            elif isinstance(tensor, DTensor):
                found[number] = self._cast(tensor.full_tensor())
            elif self.is_needed:
                found[number] = self._cast(tensor.detach()).clone()
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, each in sharded.items():
            axes = (each.cut.comm.axes.shard, *each.cut.own_axes)
            groups.setdefault(tuple(id(axis.group) for axis in axes), []).append(number)
        for numbers in groups.values():
            pieces = self._pieces([sharded[number] for number in numbers])
            for number, piece in zip(numbers, pieces, strict=True):
                cut = sharded[number].cut
                if self._needed_along(cut)[1] and isinstance(cut, PieceCut):
                    piece = as_dtensor(piece, cut.outer).full_tensor()
                found[number] = piece
        return found

    def _sharded(self, tensor: torch.Tensor, owner: ShardedParam) -> _Sharded:
        local: torch.Tensor = tensor._local_tensor.detach()  # type: ignore[attr-defined]
        parts = inner_of(local, owner.cut, owner.name)
        if [part.suffix for part in parts] != [""]:
            raise ConfigError(
                f"{self._what}: parameter '{owner.name}' is made of several tensors "
                f"({', '.join(plain_parts(local))}), which have no one name"
            )
        return _Sharded(parts[0].local.detach(), parts[0].cut)

    def num_bytes(self, tensor: torch.Tensor) -> int:
        """Return the bytes of a whole tensor in the dtype in which it is sent."""
        dtype = self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype
        return tensor.numel() * dtype.itemsize

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if tensor.is_floating_point() else None
        return tensor.to(device=self._device, dtype=dtype)

    def _pieces(self, wanted: Sequence[_Sharded]) -> list[torch.Tensor]:
        """Gather tensors along the shard axis; all must be on the same axes."""
        takers, is_needed = self._needed_along(wanted[0].cut)
        comm, axis = wanted[0].cut.comm, wanted[0].cut.comm.axes.shard
        flats: list[torch.Tensor] = []
        spread: list[_Slices] = []
        for each in wanted:
            own = self._cast(each.own)
            flats.append(own.new_empty(prod(each.inner.shape) if is_needed else 0))
            if len(each.ranges) > 1:
                spread.append(_Slices(own, flats[-1], each.ranges, each.inner.owner))
            elif is_needed:
                flats[-1].copy_(own)
        if len(spread) == 1:
            one = spread[0]
            places = [one.place(rank) for rank in range(axis.size)] if is_needed else []
            comm.hand_over(one.own, places, takers, axis, _SITE, one.owner)
        elif spread:
            sent = torch.cat([part.own.view(torch.uint8) for part in spread])
            sizes = [[part.num_bytes(rank) for part in spread] for rank in range(axis.size)]
            places = [sent.new_empty(sum(row) if is_needed else 0) for row in sizes]
            comm.hand_over(sent, places, takers, axis, _SITE)
            for rank, row in enumerate(sizes if is_needed else ()):
                for part, arrived in zip(spread, places[rank].split(row), strict=True):
                    part.place(rank).view(torch.uint8).copy_(arrived)
        return [
            each.shaped(flat) if is_needed else flat
            for each, flat in zip(wanted, flats, strict=True)
        ]


@dataclass(frozen=True)
class _Slices:
    """One tensor's elements on this rank, its gathered memory, and each rank's range in it."""

    own: torch.Tensor
    flat: torch.Tensor
    ranges: Sequence[tuple[int, int]]
    owner: int | None

    def place(self, rank: int) -> torch.Tensor:
        return self.flat[slice(*self.ranges[rank])]

    def num_bytes(self, rank: int) -> int:
        lo, hi = self.ranges[rank]
        return (hi - lo) * self.own.element_size()


def stream_weights(
    weights: FullWeights,
    tensors: Mapping[str, torch.Tensor],
    groups: Sequence[Sequence[str]],
    convert: Convert,
    bucket_bytes: int,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and whole tensors on ranks that take them; every rank iterates.

    ``groups`` are names that ``convert`` takes together. Small groups are gathered together, up to
    half a bucket.

    **Raises** StateError if a weight was changed after the first one was requested.
    """
    stages = weights.parts.comm.axes.stages
    versions = {name: _version(tensor) for name, tensor in tensors.items()}
    for stage in range(stages.size if stages is not None else 1):
        if stages is not None and stage != stages.rank:
            for name, tensor in _received(weights, stages, stage):
                if weights.is_taker:
                    yield name, tensor
            continue
        for batch in _batches(groups, tensors, weights, bucket_bytes // 2):
            names = [name for group in batch for name in group]
            changed = [name for name in names if _version(tensors[name]) != versions[name]]
            if changed:
                raise StateError(
                    f"stream(): '{changed[0]}' was changed after the stream began; take all "
                    "weights before the next step"
                )
            fulls = dict(zip(names, weights.gather([tensors[n] for n in names]), strict=True))
            if not weights.is_needed:
                continue
            for group in batch:
                made = convert({name: fulls.pop(name) for name in group})
                while made:
                    name = next(iter(made))
                    tensor = made.pop(name)
                    if stages is not None:
                        _send(weights, stages, name, tensor)
                    if weights.is_taker:
                        yield name, tensor
                    del tensor
        if stages is not None and weights.is_needed:
            _send(weights, stages, "", torch.empty(0))


def _version(tensor: torch.Tensor) -> int:
    return version_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)


def _batches(
    groups: Sequence[Sequence[str]],
    tensors: Mapping[str, torch.Tensor],
    weights: FullWeights,
    max_bytes: int,
) -> Iterator[list[Sequence[str]]]:
    """Yield lists of groups to gather together: one group, or several small ones."""
    batch: list[Sequence[str]] = []
    total = 0
    for group in groups:
        num_bytes = sum(weights.num_bytes(tensors[name]) for name in group)
        if batch and total + num_bytes > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append(group)
        total += num_bytes
    if batch:
        yield batch


def _send(weights: FullWeights, stages: Axis, name: str, tensor: torch.Tensor) -> None:
    """Send one tensor of this pipeline stage to the other stages; an empty name ends the stage."""
    about = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
    text = torch.frombuffer(bytearray(about.encode()), dtype=torch.uint8)
    comm, rank = weights.parts.comm, stages.rank
    comm.from_owner(torch.tensor([text.numel()]), stages, rank, _SITE)
    comm.from_owner(text, stages, rank, _SITE)
    if tensor.numel():
        comm.from_owner(tensor.contiguous(), stages, rank, _SITE)


def _received(weights: FullWeights, stages: Axis, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that another pipeline stage sends; yield none if not needed here."""
    comm = weights.parts.comm
    while weights.is_needed:
        size = int(comm.from_owner(torch.zeros(1, dtype=torch.int64), stages, stage, _SITE))
        text = comm.from_owner(torch.zeros(size, dtype=torch.uint8), stages, stage, _SITE)
        name, dtype, shape = json.loads(bytes(text.tolist()))
        if not name:
            return
        like = torch.empty(shape, dtype=getattr(torch, dtype), device=comm.device)
        yield name, comm.from_owner(like, stages, stage, _SITE) if like.numel() else like
