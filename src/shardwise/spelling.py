"""Suggestions for unknown words, at the end of error messages."""

from collections.abc import Iterable


def did_you_mean(word: str, words: Iterable[str], n: int = 1, cutoff: float = 0.6) -> str:
    """Return "; did you mean 'a' or 'b'?" with up to ``n`` words spelt like this one, else ""."""
    from difflib import get_close_matches  # in the error alone: the accounting starts without it

    near = get_close_matches(word, list(words), n, cutoff)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
