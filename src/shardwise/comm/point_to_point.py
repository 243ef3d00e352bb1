"""All-gather and reduce-scatter by sends and receives straight into place; for gloo.

Note [Why not gloo's own collectives]
On gloo, reduce-scatter is an all-reduce and a copy (pytorch#149869), and all-gather copies through
separate buffers: at 64 MB both take 4 to 6 times as long as the same bytes sent point to point
into their destination. ``benchmarks/collectives.py`` measures it. Above 16 MB a message is sent in
pieces, because gloo allocates new buffers for each larger message. Small tensors for one peer are
sent as one message. Sums are in rank order, so the result does not depend on timing, on the stage,
or on the rank that computes it.
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
    is_small,
    owned_ranges,
    packed_segments,
    receives_into_mean,
)
from shardwise.mesh import Axis
from shardwise.trace import Traffic

PIECE_BYTES = 16 << 20
_TAGS_PER_COLLECTIVE = 1 << 8
_TAG_OF_KIND = {"all_gather": 0, "reduce_scatter": 1, "all_reduce": 2, "gather": 3}


@dataclass
class _Messages:
    """Messages between this rank and its peers along one axis, all in flight at once.

    ``peers`` has the peer of each work. ``num_messages`` counts by (peer, is sent).
    """

    collective: CollectiveId
    axis: Axis
    works: list[dist.Work] = field(default_factory=list)
    peers: list[int] = field(default_factory=list)
    sent_bytes: int = 0
    num_messages: dict[tuple[int, bool], int] = field(default_factory=dict)

    def _next_tag(self, peer: int, *, is_sent: bool) -> int:
        count = self.num_messages.get((peer, is_sent), 0)
        self.num_messages[peer, is_sent] = count + 1
        count %= _TAGS_PER_COLLECTIVE  # equal tags match in the order in which they were sent
        kind = _TAG_OF_KIND[self.collective.kind]
        return (self.collective.index * len(_TAG_OF_KIND) + kind) * _TAGS_PER_COLLECTIVE + count

    def send(self, peer: int, tensor: torch.Tensor) -> None:
        for piece in _pieces(tensor):
            self.sent_bytes += piece.nbytes
            tag = self._next_tag(peer, is_sent=True)
            self.works.append(self.axis.group.send([piece], peer, tag))
            self.peers.append(peer)

    def receive(self, peer: int, tensor: torch.Tensor) -> None:
        for piece in _pieces(tensor):
            tag = self._next_tag(peer, is_sent=False)
            self.works.append(self.axis.group.recv([piece], peer, tag))
            self.peers.append(peer)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the pieces in which a tensor is sent; an empty tensor has none."""
    if tensor.nbytes <= PIECE_BYTES:
        return (tensor,) if tensor.numel() else ()
    return tensor.split(PIECE_BYTES // tensor.element_size())


def _as_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [t.view(torch.uint8) for t in tensors]


def start_all_gather(
    items: Sequence[GatherItem], axis: Axis, collective: CollectiveId, traffic: Traffic
) -> Pending:
    """Send this rank's shares to every peer, and receive the peers' shares into ``full``.

    **Cost** (ranks - 1) x the share, padding not sent; buffers for small segments only.
    """
    messages = _Messages(collective, axis)
    rank = axis.rank
    share_bytes = [item.segment.shard_numel * item.full.element_size() for item in items]
    packed_numbers = packed_segments(share_bytes)
    small = [items[number] for number in packed_numbers]
    large = [item for number, item in enumerate(items) if number not in packed_numbers]
    for item in items:
        lo, hi = item.segment.bounds(rank)
        if not item.in_place and hi > lo:
            item.full[lo:hi].copy_(item.source[: hi - lo])
    packed: torch.Tensor | None = None
    if small:
        packed = torch.cat(_as_bytes([item.source[: _length(item, rank)] for item in small]))
    stagings: list[tuple[list[torch.Tensor], torch.Tensor]] = []
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            receiver, sender = (rank + step) % axis.size, (rank - step) % axis.size
            for item in large:
                lo, hi = item.segment.bounds(sender)
                messages.receive(sender, item.full[lo:hi])
                messages.send(receiver, item.source[: _length(item, rank)])
            if packed is not None:
                shares = [item.full[slice(*item.segment.bounds(sender))] for item in small]
                targets = _as_bytes(shares)
                staging = packed.new_empty(sum(target.numel() for target in targets))
                messages.receive(sender, staging)
                messages.send(receiver, packed)
                stagings.append((targets, staging))
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, messages.sent_bytes)

    def unpack() -> None:
        for targets, staging in stagings:
            sizes = [target.numel() for target in targets]
            for target, piece in zip(targets, staging.split(sizes), strict=True):
                target.copy_(piece)

    return Pending(
        key,
        messages.works,
        finish=unpack if stagings else None,
        keep=(items, packed, stagings),
        peers=messages.peers,
    )


def _length(item: GatherItem, rank: int) -> int:
    """Return the elements of a rank's share, without padding."""
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
    """Send each peer its part of ``sent`` and receive a part from each, in rank order."""
    messages = _Messages(collective, axis)
    outputs = received[0].split(list(received[1]))
    sources = sent[0].split(list(sent[1]))
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            receiver, sender = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            messages.receive(sender, outputs[sender])
            messages.send(receiver, sources[receiver])
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, messages.sent_bytes)
    return Pending(key, messages.works, finish, keep=(outputs, sources, keep), peers=messages.peers)


@dataclass
class _SliceSum:
    """The sum of one range of this rank's share.

    - ``out``: the memory of the mean; it may be the memory of the lowest peer's addend.
    - ``local``: this rank's addend.
    - ``peers``: the addends of the peers, by rank.
    """

    out: torch.Tensor
    local: torch.Tensor
    peers: dict[int, torch.Tensor]

    def run(self, rank: int, num_ranks: int, divisor: float) -> None:
        """Add in rank order and divide, one block that fits the cache after the other."""
        addends = [self.local if r == rank else self.peers[r] for r in range(num_ranks)]
        sum_in_order(addends, self.out, divisor, BLOCK_NUMEL)


def sum_in_order(
    addends: Sequence[torch.Tensor], out: torch.Tensor, divisor: float, block_numel: int
) -> None:
    """Replace ``out`` by the sum of flat addends over ``divisor``, by blocks of elements.

    If addends have another dtype than ``out``, they are cast one after the other.
    """
    for begin in range(0, out.numel(), block_numel):
        part = slice(begin, begin + block_numel)
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
    """Send every peer its shares of this rank's parts, sum the received addends, and divide.

    Addends are sent in the parts' dtype and summed in ``out``'s: bf16 gradients are sent as two
    bytes and still summed in fp32.

    **Cost** sends numel x (ranks - 1) / ranks; receives into (ranks - 1) x the share, of which one
    share is ``out`` if the dtypes agree. The sums are computed in ``wait``.
    """
    messages = _Messages(collective, axis)
    sums = [_SliceSum(out, local, {}) for item in items for local, out in _slices(item, axis.rank)]
    unpacks: list[Callable[[], None]] = []
    buffers: list[torch.Tensor] = []
    key = key_of(collective, axis)
    with collective_errors(key):
        for step in range(1, axis.size):
            receiver, sender = (axis.rank + step) % axis.size, (axis.rank - step) % axis.size
            buffers += _send_shares(messages, items, receiver)
            staging, unpack = _receive_shares(messages, sums, sender)
            buffers.append(staging)
            unpacks.append(unpack)
    traffic.add(f"{axis.name}.{collective.kind}", collective.unit, messages.sent_bytes)

    def finish() -> None:
        for unpack in unpacks:
            unpack()
        for slice_sum in sums:
            slice_sum.run(axis.rank, axis.size, divisor)

    return Pending(key, messages.works, finish, keep=(items, sums, buffers), peers=messages.peers)


def _slices(item: ReduceItem, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (slice of a part, its range of ``out``) for the elements that ``rank`` owns.

    The range of ``out`` is meaningful only if ``rank`` is this rank.
    """
    begin, _ = item.segment.bounds(rank)
    parts = [(offset, part.numel()) for offset, part in item.parts]
    slices = []
    for number, lo, hi in owned_ranges(item.segment, parts, rank):
        offset, part = item.parts[number]
        slices.append((part[lo - offset : hi - offset], item.out[lo - begin : hi - begin]))
    return slices


def _send_shares(messages: _Messages, items: Sequence[ReduceItem], peer: int) -> list[torch.Tensor]:
    """Send a peer its slices; return the buffer in which the small ones are packed, if any."""
    slices = [part for item in items for part, _ in _slices(item, peer)]
    small = [part for part in slices if is_small(part.nbytes)]
    for part in slices:
        if not is_small(part.nbytes):
            messages.send(peer, part)
    packed = [torch.cat(_as_bytes(small))] if len(small) > 1 else []
    for part in packed or small:
        messages.send(peer, part)
    return packed


def _receive_shares(
    messages: _Messages, sums: Sequence[_SliceSum], peer: int
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Post the receives of a peer's addends.

    Return the buffer of the small addends, and the function that unpacks it after the wait.
    """
    small = [slice_sum for slice_sum in sums if is_small(slice_sum.local.nbytes)]
    for slice_sum in sums:
        local, out = slice_sum.local, slice_sum.out
        if not is_small(local.nbytes):
            casts = local.dtype != out.dtype
            is_mean = receives_into_mean(local.nbytes, casts, peer, messages.axis.rank)
            slice_sum.peers[peer] = out if is_mean else torch.empty_like(local)
            messages.receive(peer, slice_sum.peers[peer])
    sizes = [slice_sum.local.nbytes for slice_sum in small]
    device = small[0].local.device if small else "cpu"
    staging = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    messages.receive(peer, staging)

    def unpack() -> None:
        for slice_sum, piece in zip(small, staging.split(sizes), strict=True):
            if piece.storage_offset() % slice_sum.local.element_size():
                piece = piece.clone()  # a view of another dtype must be aligned
            slice_sum.peers[peer] = piece.view(slice_sum.local.dtype)

    return staging, unpack
