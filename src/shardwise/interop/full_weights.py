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
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.pending import CollectiveId
from shardwise.engine.agreement import agree
from shardwise.errors import ConfigError, StateError
from shardwise.parallel.parts import Model, Parts
from shardwise.tensor.cut import Cut, DimCut, PieceCut, as_dtensor
from shardwise.tensor.inner import inner_of, plain_parts, version_of
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.param import ShardedParam

State = dict[str, torch.Tensor]
Convert = Callable[[State], State]

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
        parts = Parts(model)
        world = range(dist.get_world_size())
        agree(parts.all_ranks, [f"ranks={ranks}", f"dtype={dtype}"], what)
        if ranks is not None and (not ranks or any(rank not in world for rank in ranks)):
            raise ConfigError(
                f"{what}: ranks={ranks!r}: expected ranks of the world, 0 to {len(world) - 1}, or "
                "None for all"
            )
        if parts.suspended:
            raise StateError(
                f"{what}: the model is gathered already; use its parameters, or leave the context"
            )
        parts.check_usable(f"{what}: ")
        parts.finish_pending_work(what)
        self._what, self._dtype = what, dtype
        self._ranks = None if ranks is None else frozenset(ranks)
        self._comm, self._stages = parts.comm, parts.comm.axes.stages
        self._takes = ranks is None or dist.get_rank() in ranks
        column = dist.get_process_group_ranks(self._stages.group) if self._stages else ()
        self._is_needed = self._takes or not self._ranks.isdisjoint(column)  # type: ignore[union-attr]
        self._needs: dict[tuple[int, ...], tuple[list[int], bool]] = {}

    def _needed_along(self, cut: Cut) -> tuple[list[int], bool]:
        """Return the ranks of the shard axis that need the piece, and if this rank needs it."""
        axis, outer_axes = cut.comm.axes.shard, cut.outer_axes
        if self._ranks is None:
            return list(range(axis.size)), True
        key = (id(axis.group), *(id(each.group) for each in outer_axes))
        if key not in self._needs:
            needs = torch.tensor([self._is_needed], dtype=torch.uint8)
            for each in outer_axes:
                needs = cut.comm.max(needs, each, _SITE)
            rows = cut.comm.gather_rows(needs, axis, _SITE).flatten().tolist()
            self._needs[key] = [rank for rank, needed in enumerate(rows) if needed], bool(needs)
        return self._needs[key]

    def stream(
        self,
        tensors: Mapping[str, torch.Tensor],
        groups: Sequence[Sequence[str]],
        convert: Convert,
        bucket_bytes: int,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and whole tensors on ranks that take them; every rank iterates.

        ``groups`` are names that ``convert`` takes together. Small groups are gathered together, up
        to half a bucket.

        **Raises** StateError if a weight was changed after the first one was requested.
        """
        stages = self._stages
        versions = {name: _version(tensor) for name, tensor in tensors.items()}
        for stage in range(stages.size if stages is not None else 1):
            if stages is not None and stage != stages.rank:
                yield from filter(lambda _: self._takes, self._received(stage))
                continue
            for batch in self._batches(groups, tensors, bucket_bytes // 2):
                names = [name for group in batch for name in group]
                changed = [name for name in names if _version(tensors[name]) != versions[name]]
                if changed:
                    raise StateError(
                        f"stream(): '{changed[0]}' was changed after the stream began; take all "
                        "weights before the next step"
                    )
                fulls = dict(zip(names, self.gather([tensors[n] for n in names]), strict=True))
                for group in batch if self._is_needed else ():
                    made = convert({name: fulls.pop(name) for name in group})
                    while made:
                        name = next(iter(made))
                        tensor = made.pop(name)
                        self._send(name, tensor)
                        if self._takes:
                            yield name, tensor
                        del tensor
            if self._is_needed:
                self._send("", torch.empty(0))

    def _batches(
        self,
        groups: Sequence[Sequence[str]],
        tensors: Mapping[str, torch.Tensor],
        max_bytes: int,
    ) -> Iterator[list[Sequence[str]]]:
        """Yield lists of groups to gather together: one group, or several small ones."""
        batch: list[Sequence[str]] = []
        total = 0
        for group in groups:
            num_bytes = sum(
                tensors[name].numel() * self._dtype_of(tensors[name]).itemsize for name in group
            )
            if batch and total + num_bytes > max_bytes:
                yield batch
                batch, total = [], 0
            batch.append(group)
            total += num_bytes
        if batch:
            yield batch

    @torch.no_grad()
    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return whole tensors, or empty tensors on ranks that do not need them.

        **Cost** each slice is sent to each rank that needs the piece. A single tensor is received
        in place. Several tensors are received together and copied, so they should be small.
        """
        found: list[torch.Tensor] = [torch.empty(0)] * len(tensors)
        groups: dict[tuple[int, ...], dict[int, _Slices]] = {}
        for number, tensor in enumerate(tensors):
            owner = owner_of(tensor)
            if owner is not None:
                each = self._slices_of(tensor, owner)
                axes = (each.cut.comm.axes.shard, *each.cut.outer_axes)
                key = tuple(id(axis.group) for axis in axes)
                groups.setdefault(key, {})[number] = each
            elif isinstance(tensor, DTensor):
                found[number] = self._cast(tensor.full_tensor())
            elif self._is_needed:
                found[number] = self._cast(tensor.detach()).clone()
        for group in groups.values():
            self._exchange(list(group.values()))
            found = [group[n].whole() if n in group else full for n, full in enumerate(found)]
        return found

    def _slices_of(self, tensor: torch.Tensor, owner: ShardedParam) -> "_Slices":
        local: torch.Tensor = tensor._local_tensor.detach()  # type: ignore[attr-defined]
        parts = inner_of(local, owner.cut, owner.name)
        if [part.suffix for part in parts] != [""]:
            raise ConfigError(
                f"{self._what}: parameter '{owner.name}' is made of several tensors "
                f"({', '.join(plain_parts(local))}), which have no one name"
            )
        part, cut = parts[0].local.detach(), parts[0].cut
        inner = cut.inner if isinstance(cut, PieceCut) else cut
        moved = part.movedim(inner.dim, 0) if isinstance(inner, DimCut) else part
        return _Slices(self._cast(moved.reshape(-1)), cut, inner, self._needed_along(cut)[1])

    def _dtype_of(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is sent."""
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device=self._comm.device, dtype=self._dtype_of(tensor))

    def _exchange(self, wanted: Sequence["_Slices"]) -> None:
        """Gather tensors along the shard axis; all must be on the same axes."""
        takers, is_needed = self._needed_along(wanted[0].cut)
        comm, axis = wanted[0].cut.comm, wanted[0].cut.comm.axes.shard
        ranks = range(axis.size)
        spread = [each for each in wanted if len(each.ranges) > 1]
        for each in wanted if is_needed else ():
            if len(each.ranges) == 1:
                each.flat.copy_(each.own)
        if len(spread) == 1:
            (one,) = spread
            places = [one.place(rank) for rank in ranks] if is_needed else []
            comm.gather_to(one.own, places, takers, axis, _SITE, one.inner.owner)
        elif spread:
            sent = torch.cat([each.own.view(torch.uint8) for each in spread])
            sizes = [[each.num_bytes(rank) for each in spread] for rank in ranks]
            places = [sent.new_empty(sum(row) if is_needed else 0) for row in sizes]
            comm.gather_to(sent, places, takers, axis, _SITE)
            for rank, row in enumerate(sizes if is_needed else ()):
                for each, arrived in zip(spread, places[rank].split(row), strict=True):
                    each.place(rank).view(torch.uint8).copy_(arrived)

    # -- between the stages of a pipeline
    def _send(self, name: str, tensor: torch.Tensor) -> None:
        """Send a tensor of this stage to the other stages, if any; no name ends the stage."""
        if (stages := self._stages) is None:
            return
        about = json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)])
        text = torch.frombuffer(bytearray(about.encode()), dtype=torch.uint8)
        for each in (torch.tensor([text.numel()]), text, tensor.contiguous()):
            if each.numel():
                self._comm.broadcast_from_owner(each, stages, stages.rank, _SITE)

    def _received(self, stage: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that another stage sends; yield none if not needed here."""

        def receive(like: torch.Tensor) -> torch.Tensor:
            assert self._stages is not None
            return self._comm.broadcast_from_owner(like, self._stages, stage, _SITE)

        while self._is_needed:
            size = int(receive(torch.zeros(1, dtype=torch.int64)))
            text = receive(torch.zeros(size, dtype=torch.uint8))
            name, dtype, shape = json.loads(bytes(text.tolist()))
            if not name:
                return
            like = torch.empty(shape, dtype=getattr(torch, dtype), device=self._comm.device)
            yield name, receive(like) if like.numel() else like


class _Slices:
    """A tensor that is gathered: this rank's elements, and memory for those of all ranks.

    ``inner`` is the cut of this rank's piece along the shard axis, ``ranges`` are each rank's
    elements [lo, hi) in the gathered piece; there is one range if it is not cut.
    """

    def __init__(self, own: torch.Tensor, cut: Cut, inner: Cut, is_needed: bool) -> None:
        self.own, self.cut, self.inner, self._is_needed = own, cut, inner, is_needed
        self.flat = own.new_empty(prod(inner.shape) if is_needed else 0)
        self.ranges: Sequence[tuple[int, int]] = ((0, prod(inner.shape)),)
        if isinstance(inner, DimCut) and inner.layout is not None:
            numel = prod(inner.local_shape)
            ranks = range(inner.layout.num_ranks)
            self.ranges = [(rank * numel, (rank + 1) * numel) for rank in ranks]
        elif inner.layout is not None:
            self.ranges = inner.ranges

    def place(self, rank: int) -> torch.Tensor:
        """Return the memory of a rank's elements."""
        return self.flat[slice(*self.ranges[rank])]

    def num_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's elements."""
        lo, hi = self.ranges[rank]
        return (hi - lo) * self.own.element_size()

    def whole(self) -> torch.Tensor:
        """Return the gathered tensor; a piece is completed along its own axes."""
        shape = self.inner.shape
        if not self._is_needed:
            return self.flat
        if isinstance(self.inner, DimCut):
            dim = self.inner.dim
            rest = [size for other, size in enumerate(shape) if other != dim]
            full = self.flat.view(shape[dim], *rest).movedim(0, dim)
        else:
            full = self.flat.view(shape)
        if isinstance(self.cut, PieceCut):
            full = as_dtensor(full, self.cut.outer).full_tensor()
        return full


def _version(tensor: torch.Tensor) -> int:
    return version_of(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
