"""Reduce-scatter of encoded gradients: one all-to-all of bytes, and sums in rank order.

Note [Encoded once]
~~~~~~~~~~~~~~~~~~~
A sum that goes from rank to rank (a ring, a tree) would be decoded, added to and encoded again at
every hop. Here each rank encodes what it adds once, sends every other rank the bytes of that rank's
slices, and sums what arrives in the dtype of ``out``, in rank order. So the error is that of one
encoding, whatever the number of ranks, and the bits are the same in every run and on every
transport. A rank's own addend is encoded as those of the others are, and on one rank as well: what
is computed does not depend on who computes it. Source of the all-to-all: "ZeRO++", arXiv
2306.10209, section 3.3.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from shardwise.comm.codes import decode, encode
from shardwise.comm.pending import CollectiveId, Pending, ReduceItem
from shardwise.comm.point_to_point import sum_in_order
from shardwise.comm.shares import BLOCK_NUMEL, owned_ranges
from shardwise.layout.parcels import Packet, Parcel, Slice, parcel_of
from shardwise.layout.wire import AT_A_TIME, ON_CPU_AT_A_TIME, SCALE_BYTES
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.trace import Traffic


class Exchange(Protocol):
    """An all-to-all of bytes, by either transport."""

    def __call__(
        self,
        received: tuple[torch.Tensor, Sequence[int]],
        sent: tuple[torch.Tensor, Sequence[int]],
        axis: Axis,
        collective: CollectiveId,
        traffic: Traffic,
        finish: Callable[[], None],
        keep: object,
    ) -> Pending:
        """Send each rank its bytes, which lie in rank order, and receive this one's from each.

        A rank sends itself nothing: both of its own sizes are 0.
        """


@dataclass(frozen=True)
class _Addend:
    """A slice of a part, where its mean will be, and its dtype if it travels as numbers."""

    values: torch.Tensor
    out: torch.Tensor
    dtype: torch.dtype
    place: Slice


def start_reduce_scatter(
    items: Sequence[ReduceItem],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    divisor: float,
    exchange: Exchange,
) -> Pending:
    """Encode and send every peer its slices; when they have arrived, decode, sum and divide.

    See Note [Encoded once].

    **Cost** sends the parcels of all others; memory for all parcels of this rank's gradients, and
    for one from every other rank; while it encodes or sums, some elements in float32.
    """
    parcels = list[tuple[list[_Addend], Parcel]]()
    for rank in range(axis.size):
        addends = list(_addends(items, rank))
        parcels.append((addends, parcel_of([each.place for each in addends])))
    mine, expected = parcels[axis.rank]
    device = next((item.out.device for item in items), torch.device("cpu"))
    sizes = [parcel.num_bytes for _, parcel in parcels]
    counts = [expected.num_bytes] * axis.size
    sizes[axis.rank] = counts[axis.rank] = 0  # what stays here is no part of the exchange
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    boxes = list(sent.split(sizes))
    own = boxes[axis.rank] = sent.new_empty(expected.num_bytes)
    for box, (addends, parcel) in zip(boxes, parcels, strict=True):
        for packet in parcel.packets:
            _pack(packet, addends[packet.number], box)
    received = sent.new_empty(sum(counts))
    arriving = list(received.split(counts))
    arriving[axis.rank] = own

    def finish() -> None:
        for packet in expected.packets:
            _sum(packet, mine[packet.number], arriving, divisor)

    return exchange(
        (received, counts), (sent, sizes), axis, collective, traffic, finish, (items, boxes)
    )


def _addends(items: Sequence[ReduceItem], rank: int) -> Iterator[_Addend]:
    """Yield what ``rank`` is sent of each part; ``out`` is meaningful for the caller's own."""
    for item in items:
        begin, _ = item.segment.bounds(rank)
        codings = item.codings or (None,) * len(item.parts)
        ranges = [(offset, part.numel()) for offset, part in item.parts]
        for number, lo, hi in owned_ranges(item.segment, ranges, rank):
            offset, part = item.parts[number]
            coding = codings[number]
            dtype = part.dtype if coding is None else torch.bfloat16
            place = Slice(lo - offset, hi - offset, dtype.itemsize, coding)
            out = item.out[lo - begin : hi - begin]
            yield _Addend(part[place.lo : place.hi], out, dtype, place)


def _pack(packet: Packet, addend: _Addend, box: torch.Tensor) -> None:
    """Write one packet's bytes."""
    if packet.coding is None:
        _numbers(packet, addend, box).copy_(addend.values)
        return
    for begin, num in _parts(packet, box.device):
        codes, scales = _codes(packet, packet.coding, box, begin, num)
        encode(_blocks(packet, addend.values, begin, num), codes, scales, packet.coding.format)


def _sum(packet: Packet, addend: _Addend, boxes: Sequence[torch.Tensor], divisor: float) -> None:
    """Decode one packet of every rank, add in rank order, divide."""
    if packet.coding is None:
        at_a_time = BLOCK_NUMEL if addend.out.device.type == "cpu" else AT_A_TIME
        numbers = [_numbers(packet, addend, box) for box in boxes]
        sum_in_order(numbers, addend.out, divisor, at_a_time)
        return
    for begin, num in _parts(packet, addend.out.device):
        out = _blocks(packet, addend.out, begin, num)
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        for rank, box in enumerate(boxes):
            into = out if rank == 0 and out.dtype == values.dtype else values
            decode(*_codes(packet, packet.coding, box, begin, num), into, packet.coding.format)
            if rank == 0 and into is not out:
                out.copy_(into)
            elif rank:
                out.add_(into)
        if divisor != 1:
            out.div_(divisor)


def _parts(packet: Packet, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of the blocks that are worked on at a time."""
    at_a_time = ON_CPU_AT_A_TIME if device.type == "cpu" else AT_A_TIME
    most = max(at_a_time // packet.width, 1)
    for begin in range(0, packet.num, most):
        yield begin, min(most, packet.num - begin)


def _blocks(packet: Packet, values: torch.Tensor, begin: int, num: int) -> torch.Tensor:
    first = packet.begin + begin * packet.width
    return values[first : first + num * packet.width].view(num, packet.width)


def _codes(
    packet: Packet, coding: Coding, box: torch.Tensor, begin: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    size = coding.code_bytes(packet.width)
    codes = box[packet.codes + begin * size :][: num * size].view(num, size)
    at = packet.scales + begin * SCALE_BYTES
    scales = box[at : at + num * SCALE_BYTES].view(torch.float32).view(num, 1)
    return codes, scales


def _numbers(packet: Packet, addend: _Addend, box: torch.Tensor) -> torch.Tensor:
    return box[packet.codes :][: packet.width * addend.dtype.itemsize].view(addend.dtype)
