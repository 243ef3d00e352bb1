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
from shardwise.layout.wire import (
    AT_A_TIME,
    ON_CPU_AT_A_TIME,
    SCALE_BYTES,
    CodedMessage,
    Run,
    Slice,
    message_of,
)
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

    **Cost** sends the messages of all others; memory for all messages of this rank's gradients, and
    for one from every other rank; while it encodes or sums, some elements in float32.
    """
    messages = list[tuple[list[_Addend], CodedMessage]]()
    for rank in range(axis.size):
        addends = list(_addends(items, rank))
        messages.append((addends, message_of([each.place for each in addends])))
    mine, expected = messages[axis.rank]
    device = next((item.out.device for item in items), torch.device("cpu"))
    sizes = [message.num_bytes for _, message in messages]
    counts = [expected.num_bytes] * axis.size
    sizes[axis.rank] = counts[axis.rank] = 0  # what stays here is no part of the exchange
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    boxes = list(sent.split(sizes))
    own = boxes[axis.rank] = sent.new_empty(expected.num_bytes)
    for box, (addends, message) in zip(boxes, messages, strict=True):
        for run in message.runs:
            _pack(run, addends[run.number], box)
    received = sent.new_empty(sum(counts))
    arriving = list(received.split(counts))
    arriving[axis.rank] = own

    def finish() -> None:
        for run in expected.runs:
            _sum(run, mine[run.number], arriving, divisor)

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


def _pack(run: Run, addend: _Addend, box: torch.Tensor) -> None:
    """Write a run's bytes."""
    if run.coding is None:
        _numbers(run, addend, box).copy_(addend.values)
        return
    for begin, num in _parts(run, box.device):
        codes, scales = _codes(run, run.coding, box, begin, num)
        encode(_blocks(run, addend.values, begin, num), codes, scales, run.coding.format)


def _sum(run: Run, addend: _Addend, boxes: Sequence[torch.Tensor], divisor: float) -> None:
    """Decode a run of every rank, add in rank order, divide."""
    if run.coding is None:
        at_a_time = BLOCK_NUMEL if addend.out.device.type == "cpu" else AT_A_TIME
        numbers = [_numbers(run, addend, box) for box in boxes]
        sum_in_order(numbers, addend.out, divisor, at_a_time)
        return
    for begin, num in _parts(run, addend.out.device):
        out = _blocks(run, addend.out, begin, num)
        values = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        for rank, box in enumerate(boxes):
            into = out if rank == 0 and out.dtype == values.dtype else values
            decode(*_codes(run, run.coding, box, begin, num), into, run.coding.format)
            if rank == 0 and into is not out:
                out.copy_(into)
            elif rank:
                out.add_(into)
        if divisor != 1:
            out.div_(divisor)


def _parts(run: Run, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of the blocks that are worked on at a time."""
    at_a_time = ON_CPU_AT_A_TIME if device.type == "cpu" else AT_A_TIME
    most = max(at_a_time // run.width, 1)
    for begin in range(0, run.num, most):
        yield begin, min(most, run.num - begin)


def _blocks(run: Run, values: torch.Tensor, begin: int, num: int) -> torch.Tensor:
    first = run.begin + begin * run.width
    return values[first : first + num * run.width].view(num, run.width)


def _codes(
    run: Run, coding: Coding, box: torch.Tensor, begin: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    size = coding.code_bytes(run.width)
    codes = box[run.codes + begin * size :][: num * size].view(num, size)
    at = run.scales + begin * SCALE_BYTES
    scales = box[at : at + num * SCALE_BYTES].view(torch.float32).view(num, 1)
    return codes, scales


def _numbers(run: Run, addend: _Addend, box: torch.Tensor) -> torch.Tensor:
    return box[run.codes :][: run.width * addend.dtype.itemsize].view(addend.dtype)
