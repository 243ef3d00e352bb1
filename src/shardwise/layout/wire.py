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
ON_CPU_AT_A_TIME = 1 << 18  # elements encoded at once, which fit a core's cache
AT_A_TIME = 1 << 24  # on other devices, for fewer kernels
_SHARE_ALIGNMENT = 8  # of a gather's shares: the largest element
_REDUCED_ALIGNMENT = 16  # of a reduction's message, of its codes, and of each slice of numbers


@dataclass(frozen=True)
class Slice:
    """Elements [lo, hi) of a parameter; ``size`` is the bytes of an element sent as a number.

    Elements are sent as numbers without ``coding``, or if it has no scales.
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
class Run:
    """``num`` blocks of ``width`` elements of slice ``number``, from its element ``begin`` on.

    ``codes`` and ``scales`` are the offsets of the blocks' codes and scales in the message. Without
    ``coding`` the run is all numbers of a slice, at ``codes``. In a gather the elements begin at
    ``full`` in the full buffer, and at ``shard`` among the rank's slices.
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
    """The bytes that one rank sends of a segment, or gets from each peer in a reduction."""

    runs: tuple[Run, ...]
    num_bytes: int

    @property
    def coded(self) -> list[Run]:
        """The runs of blocks."""
        return [run for run in self.runs if run.coding is not None]

    @property
    def plain(self) -> list[Run]:
        """The slices that are sent as numbers."""
        return [run for run in self.runs if run.coding is None]


def size_of(slices: Sequence[Slice], alignment: int = _REDUCED_ALIGNMENT) -> MessageSize:
    """Return the size of the message with a rank's slices."""
    numbers = scales = codes = 0
    for each in slices:
        if each.codes is None:
            numbers += _aligned((each.hi - each.lo) * each.size, alignment)
            continue
        for _, num, width in blocks_of(each.lo, each.hi, each.codes.block):
            scales += num * SCALE_BYTES
            codes += num * each.codes.code_bytes(width)
    return MessageSize(numbers, scales, codes)


def message_of(slices: Sequence[Slice], alignment: int = _REDUCED_ALIGNMENT) -> CodedMessage:
    """Lay out a rank's slices; see Note [Order in a message]."""
    size = size_of(slices, alignment)
    at, scales = 0, _aligned(size.numbers, SCALE_BYTES if size.scales else 1)
    codes = _aligned(scales + size.scales, alignment)
    end = _aligned(codes + size.codes, alignment)
    runs = []
    for number, each in enumerate(slices):
        if each.codes is None:
            numel = each.hi - each.lo
            runs.append(Run(number, 0, 1, numel, at, at, None))
            at += _aligned(numel * each.size, alignment)
            continue
        for lo, num, width in blocks_of(each.lo, each.hi, each.codes.block):
            runs.append(Run(number, lo - each.lo, num, width, codes, scales, each.codes))
            scales += num * SCALE_BYTES
            codes += num * each.codes.code_bytes(width)
    return CodedMessage(tuple(runs), end)


@dataclass(frozen=True)
class Wire:
    """The encoded gather of one layout; ``plain_size`` is bytes per element as computed with."""

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
        found, ranks, begin = [], self.layout.num_ranks, 0
        for number in range(len(self.layout.segments)):
            sizes = [self.share(number, rank).num_bytes for rank in range(ranks)]
            share = _aligned(max(sizes), _SHARE_ALIGNMENT)
            last = max((rank for rank in range(ranks) if sizes[rank]), default=0)
            found.append(Segment(last * share + sizes[last], share, begin * ranks, begin))
            begin += share
        return tuple(found)

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
        found: list[list[int]] = [[] for _ in self.layout.segments]
        for index, placed in enumerate(self.layout.params):
            found[placed.segment].append(index)
        return found

    def share(self, number: int, rank: int) -> CodedMessage:
        """Return the message that ``rank`` sends of a segment."""
        pieces = [(index, self.layout.piece(index, rank)) for index in self._params_of[number]]
        pieces = [(index, piece) for index, piece in pieces if piece.numel]
        message = message_of(
            [
                Slice(piece.lo, piece.hi, self.plain_size, self.coding if is_coded(shape) else None)
                for index, piece in pieces
                for shape in [self.layout.params[index].shape]
            ],
            alignment=1,
        )
        runs = []
        for run in message.runs:
            index, piece = pieces[run.number]
            full = self.layout.full_offset(index) + piece.lo + run.begin
            runs.append(replace(run, full=full, shard=piece.shard_offset + run.begin))
        return CodedMessage(tuple(runs), message.num_bytes)

    def runs_of_all(self, number: int) -> list[tuple[int, int, Run]]:
        """Return (first rank, number of ranks, run): equal runs of ranks are decoded at once.

        Each of these ranks has one run, and the next rank's follows in the full copy.
        """
        found: list[tuple[int, int, Run]] = []
        for rank in range(self.layout.num_ranks):
            runs = self.share(number, rank).coded
            if found and len(runs) == 1:
                first, ranks, run = found[-1]
                following = replace(run, full=run.full + ranks * run.numel)
                same = replace(runs[0], shard=run.shard, number=run.number, begin=run.begin)
                if first + ranks == rank and same == following:
                    found[-1] = first, ranks + 1, run
                    continue
            found += [(rank, 1, run) for run in runs]
        return found

    def largest_runs(self, rank: int) -> tuple[int, int]:
        """Return the most elements that are encoded, and decoded, as one run."""
        numbers = range(len(self.layout.segments))
        own = (run for number in numbers for run in self.share(number, rank).coded)
        arriving = (each for number in numbers for each in self.runs_of_all(number))
        return (
            max((run.numel for run in own), default=0),
            max((ranks * run.numel for _, ranks, run in arriving), default=0),
        )


def blocks_of(lo: int, hi: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (first element, number of blocks, width): the cut block, whole ones, the last."""
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
