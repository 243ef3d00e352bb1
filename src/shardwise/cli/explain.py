"""`shardwise explain`: what a finding of `shardwise doctor` means, when it is told, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise import terminal
from shardwise.cli.flags import call_command
from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.monitor.lessons import Lesson


def run_command(arguments: Sequence[str]) -> int:
    """Run `shardwise explain` with its arguments; return the exit code."""

    def explain(
        code: Annotated[
            str | None, typer.Argument(help="such as SW020, or 20; without it, all are listed")
        ] = None,
        markdown: Annotated[
            bool, typer.Option("--markdown", help="the page of all findings, docs/findings.md")
        ] = False,
    ) -> int:
        """Explain a finding by its code: what it means, signal and threshold, remedies in order."""
        return _explain(code, markdown)

    return call_command(explain, arguments, "shardwise explain")


def _explain(code: str | None, markdown: bool) -> int:
    from shardwise.monitor.lessons import LESSONS, page

    if markdown:
        terminal.say(page())
        return 0
    if code is not None:
        given, code = code, f"SW{int(code):03d}" if code.isdecimal() else code.upper()
        if code not in LESSONS:
            raise ConfigError(
                f"{given!r} is not the code of a finding{did_you_mean(code, LESSONS)}; "
                "`shardwise explain` lists them"
            )
    from shardwise.cli.tables import make_table
    from shardwise.terminal import open_console

    console = open_console()
    if code is not None:
        _show(console, LESSONS[code])
        return 0
    table = make_table("!code", "finding", "!severity")
    for lesson in LESSONS.values():
        table.add_row(lesson.code, lesson.title, lesson.severity)
    console.print(table)
    return 0


def _show(console: Console, lesson: Lesson) -> None:
    from rich.text import Text

    def say(heading: str, text: str) -> None:
        console.print(Text.assemble((f"{heading}\n", "bold"), text, "\n"))

    console.print(Text(f"{lesson.code}  {lesson.title} ({lesson.severity})\n", "bold"))
    say("What it means", lesson.means)
    say("When it is told", lesson.signal)
    remedies = "\n".join(f"{n}. {text}" for n, text in enumerate(lesson.remedies, 1))
    say("What to do, in this order", remedies)
    say("What it looks like", lesson.picture)
