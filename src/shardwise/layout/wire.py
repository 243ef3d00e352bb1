"""Layout of encoded messages of gathers and reductions: offsets of numbers, scales and codes.

Note [Blocks of codes]
Blocks are counted from the first element of a parameter, so they do not depend on the number of
ranks. A block that is cut between two ranks is encoded as two, each with a separate scale, because
no rank sees the other's elements. A parameter has at most one such block per rank. Parameters of
fewer than two dims (biases, norms) are sent in the computing dtype: they are few, and coarse steps
in their values cost more than their bytes.

Note [Order in a message]
Elements sent as numbers come first, then all scales (float32, one per block), then all codes. A
gather sends one such message per segment. The shares of a segment are as long as the longest,
rounded up so that scales and elements are aligned. If the transport takes uneven shares, it does
not send the end of the last rank's share. So an encoded gather is an ordinary gather of segments of
bytes. In a reduction each rank gets one message from every peer, with its slices of all gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from shardwise.layout.segments import Layout, Segment
from shardwise.precisions import Coding

SCALE_BYTES = 4  # float32
CPU_CHUNK_NUMEL = 1 << 18  # elements encoded at once, which fit a core's cache
DEVICE_CHUNK_NUMEL = 1 << 24  # on other devices, for fewer kernels
_SHARE_ALIGNMENT = 8  # of a gather's shares: the largest element
_REDUCED_ALIGNMENT = 16  # of a reduction's message, of its codes, and of each slice of numbers


@dataclass(frozen=True)
class SentSlice:
    """Elements [lo, hi) of a parameter in a message.

    They are sent as numbers of ``size`` bytes if ``coding`` is None or has no scales.
    """

    lo: int
    hi: int
    size: int
    coding: Coding | None

    @property
    def codes(self) -> Coding | None:
        """The coding of the elements; None if they are sent as numbers."""
        return self.coding if self.coding is not None and self.coding.has_scales else None


@dataclass(frozen=True)
class BlockRun:
    """Consecutive blocks of one slice in a message.

    - ``number``: the number of the slice. ``begin``: its first element in the run.
    - ``num``, ``width``: the number of blocks, and the elements of a block.
    - ``codes``, ``scales``: the offsets of the blocks' codes and scales in the message.
    - ``coding``: if None, the run is all numbers of a slice, at offset ``codes``.
    - ``full``, ``shard``: in a gather, the offsets of the elements in the full buffer and in [S].
    """

    number: int
    begin: int
    num: int
    width: int
    codes: int
    scales: int
    coding: Coding | None
    full: int = 0
    shard: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.num * self.width


class MessageSize(NamedTuple):
    """Bytes of numbers (aligned), scales and codes in messages of a reduction; sizes add up."""

    numbers: int
    scales: int
    codes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the message."""
        first_code = _aligned(self.numbers + self.scales, _REDUCED_ALIGNMENT)
        return _aligned(first_code + self.codes, _REDUCED_ALIGNMENT)


@dataclass(frozen=True)
class CodedMessage:
    """A message: what a rank sends of a segment, or gets from each peer in a reduction."""

    runs: tuple[BlockRun, ...]
    num_bytes: int

    @property
    def coded(self) -> list[BlockRun]:
        """The runs of blocks."""
        return [run for run in self.runs if run.coding is not None]

    @property
    def plain(self) -> list[BlockRun]:
        """The slices that are sent as numbers."""
        return [run for run in self.runs if run.coding is None]


def size_of(slices: Sequence[SentSlice], alignment: int = _REDUCED_ALIGNMENT) -> MessageSize:
    """Return the size of the message with a rank's slices."""
    numbers = scales = codes = 0
    for sent in slices:
        if sent.codes is None:
            numbers += _aligned((sent.hi - sent.lo) * sent.size, alignment)
            continue
        for _, num, width in blocks_of(sent.lo, sent.hi, sent.codes.block):
            scales += num * SCALE_BYTES
            codes += num * sent.codes.code_bytes(width)
    return MessageSize(numbers, scales, codes)


def message_of(slices: Sequence[SentSlice], alignment: int = _REDUCED_ALIGNMENT) -> CodedMessage:
    """Lay out the message with a rank's slices; see Note [Order in a message]."""
    size = size_of(slices, alignment)
    # The offsets in the message of the next slice of numbers, the next scale and the next code.
    numbers = 0
    scales = _aligned(size.numbers, SCALE_BYTES if size.scales else 1)
    codes = _aligned(scales + size.scales, alignment)
    end = _aligned(codes + size.codes, alignment)
    runs = []
    for number, sent in enumerate(slices):
        if sent.codes is None:
            numel = sent.hi - sent.lo
            runs.append(
                BlockRun(
                    number,
                    begin=0,
                    num=1,
                    width=numel,
                    codes=numbers,
                    scales=numbers,
                    coding=None,
                )
            )
            numbers += _aligned(numel * sent.size, alignment)
            continue
        for lo, num, width in blocks_of(sent.lo, sent.hi, sent.codes.block):
            runs.append(
                BlockRun(
                    number,
                    begin=lo - sent.lo,
                    num=num,
                    width=width,
                    codes=codes,
                    scales=scales,
                    coding=sent.codes,
                )
            )
            scales += num * SCALE_BYTES
            codes += num * sent.codes.code_bytes(width)
    return CodedMessage(tuple(runs), end)


@dataclass(frozen=True)
class Wire:
    """The encoded gather of one layout; ``plain_size`` is the bytes of an element in the layers."""

    layout: Layout
    coding: Coding
    plain_size: int

    @property
    def has_codes(self) -> bool:
        """Tell whether any parameter is encoded."""
        return self.plain_size > 1 and any(map(is_coded, (p.shape for p in self.layout.params)))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The segments of the layout, in bytes."""
        segments: list[Segment] = []
        num_ranks = self.layout.num_ranks
        begin = 0
        for number in range(len(self.layout.segments)):
            sizes = [self.share(number, rank).num_bytes for rank in range(num_ranks)]
            share = _aligned(max(sizes), _SHARE_ALIGNMENT)
            last = max((rank for rank in range(num_ranks) if sizes[rank]), default=0)
            segments.append(
                Segment(
                    numel=last * share + sizes[last],
                    shard_numel=share,
                    full_offset=begin * num_ranks,
                    shard_offset=begin,
                )
            )
            begin += share
        return tuple(segments)

    @cached_property
    def share_bytes(self) -> int:
        """Bytes that one rank sends to each peer, padding included."""
        return sum(segment.shard_numel for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        """Bytes that all ranks send together."""
        return self.share_bytes * self.layout.num_ranks

    @cached_property
    def _params_of(self) -> list[list[int]]:
        """The indices of the parameters of each segment."""
        params_of: list[list[int]] = [[] for _ in self.layout.segments]
        for index, placed in enumerate(self.layout.params):
            params_of[placed.segment].append(index)
        return params_of

    def share(self, number: int, rank: int) -> CodedMessage:
        """Return the message that ``rank`` sends of a segment."""
        pieces = [(index, self.layout.piece(index, rank)) for index in self._params_of[number]]
        pieces = [(index, piece) for index, piece in pieces if piece.numel]
        slices = []
        for index, piece in pieces:
            coding = self.coding if is_coded(self.layout.params[index].shape) else None
            slices.append(SentSlice(piece.lo, piece.hi, self.plain_size, coding))
        message = message_of(slices, alignment=1)
        runs = []
        for run in message.runs:
            index, piece = pieces[run.number]
            full = self.layout.full_offset(index) + piece.lo + run.begin
            runs.append(replace(run, full=full, shard=piece.shard_offset + run.begin))
        return CodedMessage(tuple(runs), message.num_bytes)

    def runs_of_all(self, number: int) -> list[tuple[int, int, BlockRun]]:
        """Return the runs of all ranks in a segment as (first rank, number of ranks, run).

        Consecutive ranks are joined, and decoded at once, if each has one run, of equal size, and
        the run of the next rank follows in the full copy.
        """
        joined: list[tuple[int, int, BlockRun]] = []
        for rank in range(self.layout.num_ranks):
            runs = self.share(number, rank).coded
            if joined and len(runs) == 1:
                first, num_ranks, run = joined[-1]
                expected = replace(run, full=run.full + num_ranks * run.numel)
                actual = replace(runs[0], shard=run.shard, number=run.number, begin=run.begin)
                if first + num_ranks == rank and actual == expected:
                    joined[-1] = first, num_ranks + 1, run
                    continue
            joined += [(rank, 1, run) for run in runs]
        return joined

    def largest_runs(self, rank: int) -> tuple[int, int]:
        """Return the most elements that are encoded, and decoded, as one run."""
        encoded: list[int] = []
        decoded: list[int] = []
        for number in range(len(self.layout.segments)):
            encoded += [run.numel for run in self.share(number, rank).coded]
            decoded += [ranks * run.numel for _, ranks, run in self.runs_of_all(number)]
        return max(encoded, default=0), max(decoded, default=0)


def blocks_of(lo: int, hi: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of elements [lo, hi) as (first element, number of blocks, width).

    These are a partial block at the begin, whole blocks, and a partial block at the end.
    """
    first = min(-(-lo // block) * block, hi)
    last = max(hi // block * block, first)
    if first > lo:
        yield lo, 1, first - lo
    if last > first:
        yield first, (last - first) // block, block
    if hi > last:
        yield last, 1, hi - last


def is_coded(shape: tuple[int, ...]) -> bool:
    """Tell whether a parameter of this shape is encoded: see Note [Blocks of codes]."""
    return len(shape) > 1


def share_numel(numel: int, num_ranks: int, block: int) -> int:
    """Return the elements of one rank's share of an encoded mean: whole blocks."""
    return -(-numel // (num_ranks * block)) * block


def _aligned(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
