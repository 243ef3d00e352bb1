"""Codes of 8 or 4 bits with a scale per block, and the reduce-scatter of encoded gradients.

Note [Codes and scales]
The scale of a block is its largest magnitude times 1/127 (int8), 1/448 (fp8, e4m3) or 1/7 (int4),
in float32 and no smaller than the smallest normal number; codes are the quotients, rounded to the
nearest, ties to even. That factor is multiplied by 1 - 2^-22 and rounded once to float32, so that
no finite value becomes infinite on the way. A block with a NaN or an infinity has the scale NaN,
and all of it arrives as NaN: no value that is not finite arrives as a number. Zeros stay zeros, and
so do denormals (int8: below half the smallest normal number). Decoding multiplies code by scale in
float32, and casts to the dtype of computation.

Two codes of 4 bits share a byte: element i of a block is the low half of byte i, and element
i + half the high half, where half is that of the block's elements, rounded up. They are stored
plus 8.

Note [Encoded once]
~~~~~~~~~~~~~~~~~~~
A sum that travels from rank to rank (a ring, a tree) would be decoded, added to and encoded again
at every hop. Here each rank encodes its addend once, sends every other rank the bytes of that
rank's slices, and sums the arriving addends in the dtype of ``out``, in rank order. So the error is
that of one encoding for any number of ranks, and the bits are the same in every run and on every
transport. A rank's own addend is encoded too, on one rank as well: the sum does not depend on the
rank that computes it. Source of the all-to-all: "ZeRO++", arXiv 2306.10209, section 3.3.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.collectives import AllToAll
from shardwise.comm.pending import CollectiveId, Pending, ReduceItem
from shardwise.comm.point_to_point import sum_in_order
from shardwise.comm.shares import BLOCK_NUMEL, owned_ranges
from shardwise.layout.wire import (
    CPU_CHUNK_NUMEL,
    DEVICE_CHUNK_NUMEL,
    SCALE_BYTES,
    BlockRun,
    CodedMessage,
    SentSlice,
    message_of,
)
from shardwise.mesh import Axis
from shardwise.precisions import Coding
from shardwise.trace import Traffic

_LEVELS = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}
_LESS = 1 - 2.0**-22  # keeps the largest finite value finite; see Note [Codes and scales]
_SMALLEST = 2.0**-126  # the smallest normal float32
_HALVES = 2.0**8  # the factor of `_as_halves`


@dataclass(frozen=True)
class _Addend:
    """A slice of a part, the place of its mean, and its dtype if it is sent unencoded."""

    values: torch.Tensor
    out: torch.Tensor
    dtype: torch.dtype
    place: SentSlice


def start_reduce_scatter(
    items: Sequence[ReduceItem],
    axis: Axis,
    collective: CollectiveId,
    traffic: Traffic,
    divisor: float,
    exchange: AllToAll,
) -> Pending:
    """Encode and send every peer its slices; when they have arrived, decode, sum and divide.

    See Note [Encoded once].

    **Cost** sends the messages of all others; memory for all messages of this rank's gradients, and
    for one from every other rank; while it encodes or sums, some elements in float32.
    """
    messages = list[tuple[list[_Addend], CodedMessage]]()
    for rank in range(axis.size):
        addends = list(_addends(items, rank))
        messages.append((addends, message_of([addend.place for addend in addends])))
    mine, expected = messages[axis.rank]
    device = next((item.out.device for item in items), torch.device("cpu"))
    sizes = [message.num_bytes for _, message in messages]
    counts = [expected.num_bytes] * axis.size
    sizes[axis.rank] = counts[axis.rank] = 0  # nothing is sent to itself
    sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    boxes = list(sent.split(sizes))
    local_box = sent.new_empty(expected.num_bytes)
    boxes[axis.rank] = local_box
    for box, (addends, message) in zip(boxes, messages, strict=True):
        for run in message.runs:
            _pack(run, addends[run.number], box)
    received = sent.new_empty(sum(counts))
    received_boxes = list(received.split(counts))
    received_boxes[axis.rank] = local_box

    def finish() -> None:
        for run in expected.runs:
            _sum(run, mine[run.number], received_boxes, divisor)

    return exchange(
        (received, counts), (sent, sizes), axis, collective, traffic, finish, (items, boxes)
    )


def _addends(items: Sequence[ReduceItem], rank: int) -> Iterator[_Addend]:
    """Yield the slices of each part that ``rank`` sums; ``out`` counts only on that rank."""
    for item in items:
        begin, _ = item.segment.bounds(rank)
        codings = item.codings or (None,) * len(item.parts)
        ranges = [(offset, part.numel()) for offset, part in item.parts]
        for number, lo, hi in owned_ranges(item.segment, ranges, rank):
            offset, part = item.parts[number]
            coding = codings[number]
            dtype = part.dtype if coding is None else torch.bfloat16
            place = SentSlice(lo - offset, hi - offset, dtype.itemsize, coding)
            out = item.out[lo - begin : hi - begin]
            yield _Addend(part[place.lo : place.hi], out, dtype, place)


def _pack(run: BlockRun, addend: _Addend, box: torch.Tensor) -> None:
    """Write a run's bytes."""
    if run.coding is None:
        _numbers(run, addend, box).copy_(addend.values)
        return
    for begin, num in _parts(run, box.device):
        codes, scales = _codes(run, run.coding, box, begin, num)
        encode(_blocks(run, addend.values, begin, num), codes, scales, run.coding.format)


def _sum(run: BlockRun, addend: _Addend, boxes: Sequence[torch.Tensor], divisor: float) -> None:
    """Decode a run of every rank, add in rank order, divide."""
    if run.coding is None:
        at_a_time = BLOCK_NUMEL if addend.out.device.type == "cpu" else DEVICE_CHUNK_NUMEL
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


def _parts(run: BlockRun, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (first, number) of the blocks that are encoded or decoded at a time."""
    at_a_time = CPU_CHUNK_NUMEL if device.type == "cpu" else DEVICE_CHUNK_NUMEL
    max_blocks = max(at_a_time // run.width, 1)
    for begin in range(0, run.num, max_blocks):
        yield begin, min(max_blocks, run.num - begin)


def _blocks(run: BlockRun, values: torch.Tensor, begin: int, num: int) -> torch.Tensor:
    first = run.begin + begin * run.width
    return values[first : first + num * run.width].view(num, run.width)


def _codes(
    run: BlockRun, coding: Coding, box: torch.Tensor, begin: int, num: int
) -> tuple[torch.Tensor, torch.Tensor]:
    size = coding.code_bytes(run.width)
    codes = box[run.codes + begin * size :][: num * size].view(num, size)
    at = run.scales + begin * SCALE_BYTES
    scales = box[at : at + num * SCALE_BYTES].view(torch.float32).view(num, 1)
    return codes, scales


def _numbers(run: BlockRun, addend: _Addend, box: torch.Tensor) -> torch.Tensor:
    return box[run.codes :][: run.width * addend.dtype.itemsize].view(addend.dtype)


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str) -> None:
    """Encode blocks.

    **Shapes** ``values`` [n, width], ``codes`` [n, bytes of a block] uint8, ``scales`` [n, 1].

    **Cost** two temporary copies of the values in float32.
    """
    values = values.float()
    scale = values.abs().amax(dim=-1, keepdim=True).mul_(_LESS / _LEVELS[kind])
    scale.clamp_(min=_SMALLEST)
    scales.copy_(scale.masked_fill_(~scale.isfinite(), torch.nan))
    quotients = torch.div(values, scale)
    if kind == "fp8":
        codes.view(torch.float8_e4m3fn).copy_(quotients)
    elif kind == "int8":
        codes.view(torch.int8).copy_(quotients.round_())
    else:
        half = codes.shape[-1]
        remainder = values.shape[-1] - half
        quotients.round_().add_(8)
        codes.copy_(quotients[:, :half])
        codes[:, :remainder].add_(quotients[:, half:].mul_(16).to(torch.uint8))


def decode(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    kind: str,
    scratch: torch.Tensor | None = None,
) -> None:
    """Decode blocks into ``out``.

    **Shapes** ``out`` [..., n, width], ``codes`` [..., n, bytes of a block] uint8, ``scales``
    [..., n, 1]; ``scratch`` float32, flat, as long as ``out``.

    **Cost** with ``scratch`` values are cast once, at the end; without, ``out`` is written twice.
    The bits are the same: every floating-point dtype has every code as a number.
    """
    values = out if scratch is None else scratch[: out.numel()].view(out.shape)
    if kind == "fp8" and codes.device.type == "cpu":
        values.copy_(_as_halves(codes))
        scales = scales * _HALVES
    elif kind == "fp8":
        values.copy_(codes.view(torch.float8_e4m3fn))
    elif kind == "int8":
        values.copy_(codes.view(torch.int8))
    else:
        half = codes.shape[-1]
        remainder = out.shape[-1] - half
        values[..., :half].copy_(codes & 15)
        values[..., half:].copy_(codes[..., :remainder] >> 4)
        values.sub_(8)
    values.mul_(scales)
    if values is not out:
        out.copy_(values)


def _as_halves(codes: torch.Tensor) -> torch.Tensor:
    """Return numbers of e4m3 as float16, 2^-8 times as large; torch's own cast takes 20 x as long.

    Both have the sign first; four bits of exponent with a bias of 7 are the last of five with 15.
    The code of NaN becomes a number, but only blocks whose scale is NaN have it.
    """
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    return bits.bitwise_and_(~(1 << 14)).view(torch.float16)  # clear the copy of the sign
