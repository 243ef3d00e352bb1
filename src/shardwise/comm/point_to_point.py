"""All-gather and reduce-scatter by sends and receives straight into place; for gloo.

Note [Why not gloo's own collectives]
On gloo, reduce-scatter is an all-reduce and a copy (pytorch#149869), and all-gather stages through
separate buffers: at 64 MB both take 4 to 6 times as long as the same bytes sent point to point
into their destination. ``benchmarks/collectives.py`` measures it. Above 16 MB a message is sent in
pieces, since gloo's buffers for larger ones are allocated anew each time. Small tensors for one
peer travel as one message. Sums run in rank order, so the result does not depend on timing, on
the stage, or on the rank that computes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from shardwise.comm.pending import (
    CollectiveId,
    GatherItem,
    Pending,
    ReduceItem,
    collective_errors,
    key_of,
)
from shardwise.comm.shares import (
    BLOCK_NUMEL,
    gathered_together,
    is_small,
    lands_in_mean,
    owned_ranges,
)
from shardwise.mesh import Axis
from shardwise.trace import Traffic

PIECE_BYTES = 16 << 20
_TAGS_PER_COLLECTIVE = 1 << 8
_TAG_OF_KIND = {"all_gather": 0, "reduce_scatter": 1, "all_reduce": 2, "gather": 3}


@dataclass
class _Messages:
    """Messages between this rank and its peers along one axis, all in flight at once."""

    collective: CollectiveId
    axis: Axis
    works: list[dist.Work] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)  # of each work
    sent_bytes: int = 0
    tags: dict[tuple[int, bool], int] = field(default_factory=dict)

    def _next_tag(self, peer: int, sending: bool) -> int:
        count = self.tags.get((peer, sending), 0)
        self.tags[peer, sending] = count + 1
        count %= _TAGS_PER_COLLECTIVE  # equal tags match in the order in which they were sent
        kind = _TAG_OF_KIND[self.collective.kind]
        return (self.collective.index * len(_TAG_OF_KIND) + kind) * _TAGS_PER_COLLECTIVE + count

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        for piece in _pieces(tensor):
            self.sent_bytes += piece.nbytes
            tag = self._next_tag(peer, True)
            self.works.append(self.axis.group.send([piece], peer, tag))
            self.peers.append(peer)

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        for piece in _pieces(tensor):
            tag = self._next_tag(peer, False)
            self.works.append(self.axis.group.recv([piece], peer, tag))
            self.peers.append(peer)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    if tensor.nbytes <= PIECE_BYTES:
        return (tensor,) if tensor.numel() else ()
    return tensor.split(PIECE_BYTES // tensor.element_size())


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.view(torch.uint8) for t in tensors]


def start_all_gather(
    items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
) -> Pending:
    """Send this rank's shares to every peer, receive theirs into place.

    **Cost** (ranks - 1) x the share, padding not sent; no buffer but for small segments.
    """
    exchange = _Messages(collective, axis)
    me = axis.rank
    together = gathered_together([i.segment.shard_numel * i.full.element_size() for i in items])
    small = [items[number] for number in together]
    large = [item for number, item in enumerate(items) if number not in together]
    for item in items:
        lo, hi = item.segment.bounds(me)
        if not item.in_place and hi > lo:
            item.full[lo:hi].copy_(item.source[: hi - lo])
    mine = _as_bytes([i.source[: _length(i, me)] for i in small])
    packed = torch.cat(mine) if mine else None
    stagings: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            to, frm = (me + step) % axis.size, (me - step) % axis.size
            for item in large:
                lo, hi = item.segment.bounds(frm)
                exchange.receive(frm, item.full[lo:hi])
                exchange.send(to, item.source[: _length(item, me)])
            if packed is not None:
                into = _as_bytes([i.full[slice(*i.segment.bounds(frm))] for i in small])
                staging = packed.new_empty(sum(t.numel() for t in into))
                exchange.receive(frm, staging)
                exchange.send(to, packed)
                stagings.append((into, staging))
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, exchange.sent_bytes)

    def unpack() -> None:
        for into, staging in stagings:
            for place, piece in zip(into, staging.split([t.numel() for t in into]), strict=True):
                place.copy_(piece)

    finish, keep = unpack if stagings else None, (items, packed, stagings)
    return Pending(key, exchange.works, finish, keep, exchange.peers)


def _length(item: GatherItem, rank: int) -> int:
    lo, hi = item.segment.bounds(rank)
    return hi - lo


def start_all_to_all(
    received: tuple[torch.Tensor, Sequence[int]],
    sent: tuple[torch.Tensor, Sequence[int]],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    finish: Callable[[], None],
    keep: object,
) -> Pending:
    """Send each peer its part of ``sent``, receive one from each; both are in rank order."""
    exchange = _Messages(collective, axis)
    into, out = received[0].split(list(received[1])), sent[0].split(list(sent[1]))
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            to, frm = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            exchange.receive(frm, into[frm])
            exchange.send(to, out[to])
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, exchange.sent_bytes)
    return Pending(key, exchange.works, finish, (into, out, keep), exchange.peers)


@dataclass
class _SliceSum:
    """One range of this rank's share: its own addend, the peers', and where the mean goes.

    ``out`` may be the memory of the lowest peer's addend.
    """

    out: torch.Tensor
    own: torch.Tensor
    peers: dict[int, torch.Tensor]

    def run(self, rank: int, num_ranks: int, divisor: float) -> None:
        """Add in rank order, starting from rank 0, and divide; block by block, in the cache."""
        addends = [self.own if r == rank else self.peers[r] for r in range(num_ranks)]
        sum_in_order(addends, self.out, divisor, BLOCK_NUMEL)


def sum_in_order(
    addends: Sequence[torch.Tensor], out: torch.Tensor, divisor: float, at_a_time: int
) -> None:
    """Replace ``out`` by the sum of flat addends over ``divisor``, so many elements at a time.

    Addends of another dtype are cast to ``out``'s one by one.
    """
    for begin in range(0, out.numel(), at_a_time):
        part = slice(begin, begin + at_a_time)
        _add_in_order([addend[part] for addend in addends], out[part])
        if divisor != 1:
            out[part].div_(divisor)


def _add_in_order(addends: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    if addends[0].dtype != out.dtype or len(addends) == 1:
        out.copy_(addends[0])
        for addend in addends[1:]:
            out.add_(addend)
        return
    torch.add(addends[0], addends[1], out=out)
    for addend in addends[2:]:
        out.add_(addend)


def start_reduce_scatter(
    items: Sequence[ReduceItem],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    divisor: float,
) -> Pending:
    """Send every peer its shares of this rank's parts, sum what arrives, divide.

    The addends travel in the parts' dtype and are summed in ``out``'s: bf16 gradients take two
    bytes on the wire and are still summed in fp32.

    **Cost** sends numel x (ranks - 1) / ranks; receives into (ranks - 1) x the share, of which one
    lies in ``out`` where the dtypes agree. The sums run in ``wait``.
    """
    exchange = _Messages(collective, axis)
    sums = [_SliceSum(out, own, {}) for item in items for own, out in _slices(item, axis.rank)]
    unpacks: list[Callable[[], None]] = []
    buffers: list[torch.Tensor] = []
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            to, frm = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            buffers += _send_shares(exchange, items, to)
            staging, unpack = _receive_shares(exchange, sums, frm)
            buffers.append(staging)
            unpacks.append(unpack)
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, exchange.sent_bytes)

    def finish() -> None:
        for unpack in unpacks:
            unpack()
        for each in sums:
            each.run(axis.rank, axis.size, divisor)

    return Pending(key, exchange.works, finish, (items, sums, buffers), exchange.peers)


def _slices(item: ReduceItem, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (slice of a part, its place in ``out``) for what ``rank`` owns of the item.

    The place is meaningful only where ``rank`` is the caller's own.
    """
    begin, _ = item.segment.bounds(rank)
    parts = [(offset, part.numel()) for offset, part in item.parts]
    found = []
    for number, lo, hi in owned_ranges(item.segment, parts, rank):
        offset, part = item.parts[number]
        found.append((part[lo - offset : hi - offset], item.out[lo - begin : hi - begin]))
    return found


def _send_shares(exchange: _Messages, items: Sequence[ReduceItem], peer: int) -> list[torch.Tensor]:
    """Send a peer its slices; return the buffer in which the small ones travel together."""
    slices = [piece for item in items for piece, _ in _slices(item, peer)]
    small = [t for t in slices if is_small(t.nbytes)]
    for piece in slices:
        if not is_small(piece.nbytes):
            exchange.send(peer, piece)
    together = [torch.cat(_as_bytes(small))] if len(small) > 1 else []
    for piece in together or small:
        exchange.send(peer, piece)
    return together


def _receive_shares(
    exchange: _Messages, sums: Sequence[_SliceSum], peer: int
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Post the receives of a peer's addends; return the buffer of small ones and its unpacking."""
    small = [each for each in sums if is_small(each.own.nbytes)]
    for each in sums:
        own, out = each.own, each.out
        if not is_small(own.nbytes):
            is_mean = lands_in_mean(own.nbytes, own.dtype != out.dtype, peer, exchange.axis.rank)
            each.peers[peer] = out if is_mean else torch.empty_like(own)
            exchange.receive(peer, each.peers[peer])
    sizes = [each.own.nbytes for each in small]
    device = small[0].own.device if small else "cpu"
    staging = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    exchange.receive(peer, staging)

    def unpack() -> None:
        for each, piece in zip(small, staging.split(sizes), strict=True):
            if piece.storage_offset() % each.own.element_size():
                piece = piece.clone()
            each.peers[peer] = piece.view(each.own.dtype)

    return staging, unpack
