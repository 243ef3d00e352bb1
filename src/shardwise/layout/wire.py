"""Where codes and scales lie in what each rank sends of an encoded gather: integers.

Note [Blocks of a gather]
Blocks are counted from the first element of a parameter, so they do not depend on the number of
ranks. A block that a cut between two ranks goes through is encoded as two, each with a scale of its
own, as no rank sees the other's elements. Of one parameter that is at most one block for each rank.
Parameters of fewer than two dims (biases, norms) travel as they are computed with: they are few,
and a step that is coarse for them costs more than their bytes.

Note [Shares of bytes]
What a rank sends of a segment is: parameters that travel as they are, then all scales (float32, one
a block), then all codes. The shares of a segment are as long as the longest, rounded up so that
scales and elements are aligned; of the last rank that has anything, what is behind is not sent
where shares may be uneven. So a gather of bytes is one of segments, as any other.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.layout.segments import Layout, Segment
from shardwise.precisions import Coding

SCALE_BYTES = 4  # float32
ON_CPU_AT_A_TIME = 1 << 18  # elements that are coded at once, which stay in a core's cache
AT_A_TIME = 1 << 24  # elsewhere kernels are to be few
_ALIGNMENT = 8  # of the largest element


@dataclass(frozen=True)
class Run:
    """``num`` blocks of ``width`` elements, one behind another, of one parameter.

    Their elements begin at ``full`` in the full buffer and at ``shard`` among the rank's slices;
    ``scales`` and ``codes`` are where theirs begin in the rank's share, in bytes.
    """

    full: int
    shard: int
    num: int
    width: int
    scales: int
    codes: int


@dataclass(frozen=True)
class Plain:
    """``numel`` elements that travel as they are, from byte ``at`` of the rank's share."""

    full: int
    shard: int
    numel: int
    at: int


@dataclass(frozen=True)
class Share:
    """What one rank sends of one segment."""

    runs: tuple[Run, ...]
    plain: tuple[Plain, ...]
    num_bytes: int


@dataclass(frozen=True)
class Wire:
    """The encoded form of one layout; ``plain_size`` are bytes of an element computed with."""

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
            share = _aligned(max(sizes), _ALIGNMENT)
            last = max((rank for rank in range(ranks) if sizes[rank]), default=0)
            found.append(Segment(last * share + sizes[last], share, begin * ranks, begin))
            begin += share
        return tuple(found)

    @cached_property
    def share_bytes(self) -> int:
        """Bytes that one rank sends to each other one, padding included."""
        return sum(segment.shard_numel for segment in self.segments)

    @property
    def num_bytes(self) -> int:
        """Bytes of what all ranks send, together."""
        return self.share_bytes * self.layout.num_ranks

    @cached_property
    def _params_of(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.layout.segments]
        for index, placed in enumerate(self.layout.params):
            found[placed.segment].append(index)
        return found

    def share(self, number: int, rank: int) -> Share:
        """Say what ``rank`` sends of a segment; see Note [Shares of bytes]."""
        pieces = [(index, self.layout.piece(index, rank)) for index in self._params_of[number]]
        coded = [is_coded(self.layout.params[index].shape) for index, _ in pieces]
        at, plain = 0, []
        cuts: list[tuple[int, int, int, int]] = []
        for (index, piece), has_codes in zip(pieces, coded, strict=True):
            begin = self.layout.full_offset(index)
            if has_codes:
                cuts += [
                    (begin + lo, piece.shard_offset + lo - piece.lo, num, width)
                    for lo, num, width in blocks_of(piece.lo, piece.hi, self.coding.block)
                ]
            elif piece.numel:
                plain.append(Plain(begin + piece.lo, piece.shard_offset, piece.numel, at))
                at += piece.numel * self.plain_size
        scales = _aligned(at, SCALE_BYTES) if cuts else at
        codes = scales + sum(num for _, _, num, _ in cuts) * SCALE_BYTES
        runs = []
        for full, shard, num, width in cuts:
            runs.append(Run(full, shard, num, width, scales, codes))
            scales += num * SCALE_BYTES
            codes += num * self.coding.code_bytes(width)
        return Share(tuple(runs), tuple(plain), codes)

    def runs_of_all(self, number: int) -> list[tuple[int, int, Run]]:
        """List (first rank, number of ranks, run): ranks that are cut alike are decoded at once.

        They are where each has one run alike, and the next one's follows in the full copy.
        """
        found: list[tuple[int, int, Run]] = []
        for rank in range(self.layout.num_ranks):
            runs = self.share(number, rank).runs
            if found and len(runs) == 1:
                first, ranks, run = found[-1]
                behind = replace(run, full=run.full + ranks * run.num * run.width)
                if first + ranks == rank and replace(runs[0], shard=run.shard) == behind:
                    found[-1] = first, ranks + 1, run
                    continue
            found += [(rank, 1, run) for run in runs]
        return found

    def largest_runs(self, rank: int) -> tuple[int, int]:
        """Return the most elements that are encoded, and decoded, as one run."""
        numbers = range(len(self.layout.segments))
        own = (run for number in numbers for run in self.share(number, rank).runs)
        arriving = (each for number in numbers for each in self.runs_of_all(number))
        return (
            max((run.num * run.width for run in own), default=0),
            max((ranks * run.num * run.width for _, ranks, run in arriving), default=0),
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
    """Tell whether a parameter of this shape is encoded: see Note [Blocks of a gather]."""
    return len(shape) > 1


def _aligned(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
