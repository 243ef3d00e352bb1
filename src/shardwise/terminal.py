"""Output to the terminal, with control characters escaped.

All commands print through it, since names, keys and errors come from files that may be hostile.
"""

import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

_PIPE_WIDTH = 160


def escaped(text: str, kept: str = "\n\t") -> str:
    """Return a text with all control characters but those ``kept`` escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def printable(value: object) -> str:
    """Return a value of a file as text in one line, without control characters."""
    return escaped(str(value), "")


def say(text: str, stream: TextIO | None = None) -> None:
    """Write to stdout, or to ``stream``, at once."""
    stream = sys.stdout if stream is None else stream
    stream.write(escaped(text))
    stream.flush()


def complain(text: str) -> None:
    """Write to stderr, at once."""
    say(text, sys.stderr)


class EscapingConsole(Console):
    """A console of rich that escapes every text which it has laid out."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of a renderable."""
        for segment in super().render(renderable, options):
            is_text = segment.control is None
            yield segment._replace(text=escaped(segment.text)) if is_text else segment


def open_console(stream: TextIO | None = None) -> Console:
    """Return stdout, or ``stream``: as wide as the terminal, or wide enough for tables."""
    console = EscapingConsole(file=stream, highlight=False)
    if console.is_terminal:
        return console
    return EscapingConsole(file=stream, highlight=False, width=_PIPE_WIDTH)
