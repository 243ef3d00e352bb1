"""Boxes of a tensor that several groups of ranks hold, and how elements get from one to another.

Note [One piece into another]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A checkpoint has a tensor in pieces (of tensor parallelism), a reader wants a range of another box
of it. Where both have the same sizes behind the first dim, the range is a range of the piece too,
and is read straight into place: whole tensors, equal pieces, and pieces of rows. Elsewhere each
chunk of the piece that has some of the elements is read once, checked, and its elements are copied
to where they belong (`Scattered`), so that no more than a chunk is in memory beside the target. A
row of the target is never read by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.layout.boxes import Region

if TYPE_CHECKING:
    import numpy as np


def is_grid(of: tuple[int, ...], pieces: Sequence[Region]) -> bool:
    """Tell whether pieces inside a tensor of shape ``of`` are a grid: each element in one of them.

    Empty ones count for nothing. **Cost** O(pieces log pieces) for each dim.
    """
    filled = [piece for piece in pieces if piece.numel]
    if 0 in of:
        return not filled
    cells = 1
    for dim, size in enumerate(of):
        end = 0
        cuts = sorted({(piece.at[dim], piece.shape[dim]) for piece in filled})
        for at, count in cuts:
            if at != end:
                return False
            end += count
        if end != size:
            return False
        cells *= len(cuts)
    return len({piece.at for piece in filled}) == len(filled) == cells


class Scattered:
    """Where bytes [first, last) of a saved piece go: memory of elements [lo, ...) of another box.

    It is sliced and written as a memoryview of those bytes is; other bytes than those wanted are
    left out. See Note [One piece into another].
    """

    def __init__(
        self,
        have: Region,
        first: int,
        last: int,
        want: Region,
        lo: int,
        out: memoryview,
        width: int,
    ) -> None:
        self._have, self._first, self._last = have, first, last
        self._want, self._lo, self._out, self._width = want, lo, out, width

    def __getitem__(self, part: slice) -> Scattered:
        """Return where some of the bytes go."""
        begin, end, _ = part.indices(self._last - self._first)
        first, last = self._first + begin, self._first + end
        return Scattered(self._have, first, last, self._want, self._lo, self._out, self._width)

    def __setitem__(self, all_of_it: slice, data: Any) -> None:
        """Copy the bytes, of whole elements, to where they belong."""
        for common, (source, begin), (target, at) in self._copies():
            theirs = self._array(data, source, begin - self._first // self._width)
            ours = self._array(self._out, target, at - self._lo)
            ours[target.inside(common)] = theirs[source.inside(common)]

    def __bool__(self) -> bool:
        """Tell whether any element of it is wanted."""
        return any(True for _ in self._copies())

    def _copies(self) -> Iterator[tuple[Region, tuple[Region, int], tuple[Region, int]]]:
        """Yield (what both have, the box that it lies in here with its place, and there)."""
        width, end = self._width, self._lo + len(self._out) // self._width
        wanted = self._want.parts(self._lo, end)
        for source, begin, _ in self._have.parts(self._first // width, self._last // width):
            for target, at, _ in wanted:
                common = source.common(target)
                if common is not None:
                    yield common, (source, begin), (target, at)

    def _array(self, data: memoryview, box: Region, first: int) -> np.ndarray[Any, Any]:
        """Return a box's elements, which lie one after the other in ``data``, as an array."""
        import numpy as np

        kind = np.dtype(f"u{self._width}")
        found = np.frombuffer(data, kind, box.numel, first * self._width)
        return found.reshape(box.shape)


def spans(have: Region, want: Region, lo: int, hi: int) -> tuple[int, int] | None:
    """Return the flat range of a piece around its elements among [lo, hi) of another box."""
    ranges = [
        have.flat(common)
        for part, _, _ in want.parts(lo, hi)
        if (common := have.common(part)) is not None
    ]
    return (min(ranges)[0], max(hi for _, hi in ranges)) if ranges else None
