"""Integers: which tokens of a sequence lie on which rank, and which keys each of them sees.

Note [Head and tail]
In causal attention the last token sees all, the first one itself. A sequence is therefore divided
into 2N chunks, and rank r has chunk r and chunk 2N - 1 - r: each rank then computes as many
products of a query and a key (Llama 3, arXiv:2407.21783, section 3.3.2). Documents that are packed
into one sequence are cut one by one, as none sees another; what does not divide by 2N goes to the
ranks that have the fewest tokens so far, so that ranks differ by one token at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class Span:
    """Tokens [lo, hi) of the whole sequence, of the document that starts at ``document``."""

    lo: int
    hi: int
    document: int


@dataclass(frozen=True)
class SequenceCut:
    """How a sequence of ``documents`` (their lengths, in order) is cut over ``num_ranks``.

    One document is a whole sequence. Tokens of a rank lie in the order of its `spans`.
    """

    documents: tuple[int, ...]
    num_ranks: int

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ConfigError(
                f"documents={list(self.documents)}: expected their lengths, each at least 1"
            )

    @property
    def length(self) -> int:
        """Number of tokens of the whole sequence."""
        return sum(self.documents)

    @cached_property
    def spans(self) -> tuple[tuple[Span, ...], ...]:
        """What each rank has, by rank; see Note [Head and tail]."""
        if self.num_ranks == 1:
            return (tuple(Span(lo, hi, lo) for lo, hi in self._bounds),)
        spans: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        tokens = [0] * self.num_ranks
        for start, stop in self._bounds:
            each, left = divmod(stop - start, 2 * self.num_ranks)
            lengths = [each] * 2 * self.num_ranks
            for chunk in self._poorest(tokens, left):
                lengths[chunk] += 1
            lo = start
            for chunk, length in enumerate(lengths):
                rank = self._rank_of(chunk)
                tokens[rank] += length
                mine = spans[rank]
                if length and mine and mine[-1].hi == lo and mine[-1].document == start:
                    mine[-1] = Span(mine[-1].lo, lo + length, start)  # the middle, of the last rank
                elif length:
                    mine.append(Span(lo, lo + length, start))
                lo += length
        return tuple(map(tuple, spans))

    def tokens(self, rank: int) -> list[int]:
        """Return the places in the whole sequence of a rank's tokens, in their order there."""
        return [place for span in self.spans[rank] for place in range(span.lo, span.hi)]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many tokens each rank has."""
        return tuple(sum(span.hi - span.lo for span in mine) for mine in self.spans)

    @cached_property
    def alone(self) -> "SequenceCut":
        """The same sequence on one rank."""
        return SequenceCut(self.documents, 1)

    def num_products(self, rank: int) -> int:
        """Return how many pairs of a query and a key a rank computes in causal attention."""
        return sum(
            sum(range(span.lo - span.document + 1, span.hi - span.document + 1))
            for span in self.spans[rank]
        )

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.documents, initial=0)))

    def _rank_of(self, chunk: int) -> int:
        return min(chunk, 2 * self.num_ranks - 1 - chunk)

    def _poorest(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the chunks that get one token more: those of the ranks that have the fewest."""
        places = [(tokens[rank], rank, rank) for rank in range(self.num_ranks)]
        places += [
            (held + 1, rank, 2 * self.num_ranks - 1 - rank) for held, rank, _ in list(places)
        ]
        return [chunk for _, _, chunk in sorted(places)[:count]]


def cut_of(length: int, num_ranks: int, documents: Sequence[int] | None = None) -> SequenceCut:
    """Return how a sequence of ``length`` tokens is cut.

    **Raises** ConfigError where the documents' lengths are not those of the sequence.
    """
    cut = SequenceCut((length,) if documents is None else tuple(documents), num_ranks)
    if cut.length != length:
        raise ConfigError(
            f"documents: their lengths sum to {cut.length}, but the sequence has {length} tokens"
        )
    return cut
