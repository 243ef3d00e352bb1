"""Integers: offsets of tensors in a unit's file, and its bytes divided over folders by speed.

The bytes are cut into stripes, which are assigned in rounds. In each round a folder gets a number
of stripes by its speed, spread over the round, and appends them to its file. So any range of the
unit is one range of each folder's file, and all folders work on it at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 4096  # of file offsets, byte counts and memory, as O_DIRECT requires


def align(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Regions:
    """Bytes [begins[i], begins[i] + sizes[i]) of a unit's file hold its tensor i.

    Each begins at a multiple of `ALIGNMENT`, and ``num_bytes`` is one too. The tensors of a unit
    are one range of ``num_bytes``, which is read or written at once.
    """

    begins: tuple[int, ...]
    sizes: tuple[int, ...]
    num_bytes: int


def regions_of(sizes: Sequence[int]) -> Regions:
    """Return the regions of tensors with these sizes in bytes, in order."""
    begins = []
    end = 0
    for num_bytes in sizes:
        begins.append(end)
        end += align(num_bytes)
    return Regions(tuple(begins), tuple(sizes), end)


STRIPE_BYTES = 1 << 20
_ROUND = 64  # stripes; a share is a multiple of 1/64


@dataclass(frozen=True)
class FileRange:
    """``num_bytes`` at offset ``at`` of the file in folder number ``folder``.

    They hold the unit's ``ranges``, [begin, end) each, one after another.
    """

    folder: int
    at: int
    num_bytes: int
    ranges: tuple[tuple[int, int], ...]


class Stripes:
    """Divides bytes over folders. ``speeds``: one per folder, in any unit, above 0."""

    def __init__(self, speeds: Sequence[float], stripe_bytes: int = STRIPE_BYTES) -> None:
        assert stripe_bytes % ALIGNMENT == 0
        self._bytes = stripe_bytes
        self.counts = _counts(speeds)
        turns = [((k + 0.5) / n, f) for f, n in enumerate(self.counts) for k in range(n)]
        self._folders = [folder for _, folder in sorted(turns)]  # of each stripe of a round
        # Of each stripe of a round: its number among those of its folder.
        self._places = [self._folders[:i].count(f) for i, f in enumerate(self._folders)]

    def pieces(self, begin: int, end: int, max_bytes: int) -> Iterator[FileRange]:
        """Yield bytes [begin, end) of the unit as pieces, each of at most ``max_bytes``.

        Pieces begin and end at multiples of `ALIGNMENT`, except at ``begin`` and ``end``.
        ``max_bytes`` is a multiple of the stripe.
        """
        open_pieces: dict[int, tuple[int, list[tuple[int, int]]]] = {}
        while begin < end:
            stripe, inside = divmod(begin, self._bytes)
            upto = min(end, begin - inside + self._bytes)
            folder, at = self._place(stripe)
            first, ranges = open_pieces.setdefault(folder, (at + inside, []))
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], upto)
            else:
                ranges.append((begin, upto))
            at += inside + upto - begin
            if at % max_bytes == 0:
                del open_pieces[folder]
                yield FileRange(folder, first, at - first, tuple(ranges))
            begin = upto
        for folder, (first, ranges) in open_pieces.items():
            num_bytes = sum(hi - lo for lo, hi in ranges)
            yield FileRange(folder, first, num_bytes, tuple(ranges))

    def part_bytes(self, num_bytes: int) -> list[int]:
        """Return how many of the first ``num_bytes`` bytes each folder has."""
        sizes = [0] * len(self.counts)
        for piece in self.pieces(0, num_bytes, self._bytes):
            sizes[piece.folder] += piece.num_bytes
        return sizes

    def _place(self, stripe: int) -> tuple[int, int]:
        """Return a stripe's folder and its offset in the folder's file."""
        rounds, turn = divmod(stripe, len(self._folders))
        folder = self._folders[turn]
        return folder, (rounds * self.counts[folder] + self._places[turn]) * self._bytes


def _counts(speeds: Sequence[float]) -> list[int]:
    """Return the number of stripes per round of each folder, at least one."""
    if len(speeds) == 1:
        return [1]
    total = sum(speeds)
    counts = [max(1, int(_ROUND * speed / total)) for speed in speeds]
    by_need = sorted(range(len(speeds)), key=lambda f: counts[f] - _ROUND * speeds[f] / total)
    for folder in by_need[: max(0, _ROUND - sum(counts))]:
        counts[folder] += 1
    return counts
