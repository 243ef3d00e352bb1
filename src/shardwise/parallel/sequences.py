"""Integers: the tokens of a sequence on each rank, and the keys that each token sees.

Note [Head and tail]
In causal attention the last token sees all tokens, the first one only itself. So a sequence is cut
into 2N chunks, and rank r has chunk r and chunk 2N - 1 - r: each rank then computes equally many
query-key products (Llama 3, arXiv:2407.21783, section 3.3.2). Packed documents are cut one by one,
as attention does not cross them. Tokens beyond a multiple of 2N go to the ranks with the fewest
tokens so far, so that ranks differ by at most one token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from shardwise.errors import ConfigError


@dataclass(frozen=True)
class TokenSpan:
    """Tokens [lo, hi) of the whole sequence, of the document that starts at ``document``."""

    lo: int
    hi: int
    document: int


@dataclass(frozen=True)
class SequenceCut:
    """Cut of a sequence of ``documents`` (their lengths, in order) over ``num_ranks``.

    One document is a whole sequence. A rank's tokens lie in the order of its `spans`.
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
    def spans(self) -> tuple[tuple[TokenSpan, ...], ...]:
        """The spans of each rank; see Note [Head and tail]."""
        if self.num_ranks == 1:
            return (tuple(TokenSpan(lo, hi, lo) for lo, hi in self._bounds),)
        spans: list[list[TokenSpan]] = [[] for _ in range(self.num_ranks)]
        tokens = [0] * self.num_ranks
        for start, stop in self._bounds:
            chunk_length, num_left = divmod(stop - start, 2 * self.num_ranks)
            lengths = [chunk_length] * 2 * self.num_ranks
            for chunk in self._chunks_to_extend(tokens, num_left):
                lengths[chunk] += 1
            lo = start
            for chunk, length in enumerate(lengths):
                rank = self._rank_of(chunk)
                tokens[rank] += length
                mine = spans[rank]
                if length and mine and mine[-1].hi == lo and mine[-1].document == start:
                    mine[-1] = TokenSpan(
                        mine[-1].lo, lo + length, start
                    )  # last rank's middle chunks
                elif length:
                    mine.append(TokenSpan(lo, lo + length, start))
                lo += length
        return tuple(map(tuple, spans))

    def tokens(self, rank: int) -> list[int]:
        """Return the positions of a rank's tokens in the whole sequence, in the rank's order."""
        return [place for span in self.spans[rank] for place in range(span.lo, span.hi)]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of tokens on each rank."""
        return tuple(sum(span.hi - span.lo for span in mine) for mine in self.spans)

    @cached_property
    def on_one_rank(self) -> "SequenceCut":
        """The same sequence on one rank."""
        return SequenceCut(self.documents, 1)

    @property
    def _bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(accumulate(self.documents, initial=0)))

    def _rank_of(self, chunk: int) -> int:
        return min(chunk, 2 * self.num_ranks - 1 - chunk)

    def _chunks_to_extend(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the chunks that get one more token: those of the ranks with the fewest tokens."""
        places = [(tokens[rank], rank, rank) for rank in range(self.num_ranks)]
        places += [
            (count + 1, rank, 2 * self.num_ranks - 1 - rank) for count, rank, _ in list(places)
        ]
        return [chunk for _, _, chunk in sorted(places)[:count]]


def cut_of(length: int, num_ranks: int, documents: Sequence[int] | None = None) -> SequenceCut:
    """Return the cut of a sequence of ``length`` tokens.

    **Raises** ConfigError if the documents' lengths do not sum to ``length``.
    """
    cut = SequenceCut((length,) if documents is None else tuple(documents), num_ranks)
    if cut.length != length:
        raise ConfigError(
            f"documents: their lengths sum to {cut.length}, but the sequence has {length} tokens"
        )
    return cut
