"""`shardwise explain`: the meaning, condition and remedies of a finding of `shardwise doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardwise import terminal
from shardwise.errors import ConfigError
from shardwise.spelling import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from shardwise.monitor.findings import FindingDoc


def explain(
    code: Annotated[
        str | None, typer.Argument(help="such as SW020, or 20; without it, all are listed")
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="the page of all findings, docs/findings.md")
    ] = False,
) -> int:
    """Explain a finding by its code: meaning, condition with thresholds, remedies in order."""
    from shardwise.monitor.findings import finding_docs, findings_page

    if markdown:
        terminal.say(findings_page())
        return 0
    docs = finding_docs()
    if code is not None:
        given, code = code, f"SW{int(code):03d}" if code.isdecimal() else code.upper()
        if code not in docs:
            raise ConfigError(
                f"{given!r} is not the code of a finding{did_you_mean(code, docs)}; "
                "`shardwise explain` lists them"
            )
    from shardwise.cli.tables import make_table
    from shardwise.terminal import open_console

    console = open_console()
    if code is not None:
        _show(console, docs[code])
        return 0
    table = make_table("!code", "finding", "!severity")
    for doc in docs.values():
        table.add_row(doc.code, doc.title, doc.severity)
    console.print(table)
    return 0


def _show(console: Console, doc: FindingDoc) -> None:
    from rich.text import Text

    def say(heading: str, text: str) -> None:
        console.print(Text.assemble((f"{heading}\n", "bold"), text, "\n"))

    console.print(Text(f"{doc.code}  {doc.title} ({doc.severity})\n", "bold"))
    say("Meaning", doc.means)
    say("Condition", doc.condition)
    remedies = "\n".join(f"{n}. {text}" for n, text in enumerate(doc.remedies, 1))
    say("Remedies, in this order", remedies)
    say("In the report", doc.picture)
