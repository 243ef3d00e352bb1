"""`shardwise explain`: the meaning, condition and remedies of a finding of `shardwise doctor`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from shardwise import terminal
from shardwise.cli.tables import make_table
from shardwise.errors import ConfigError
from shardwise.monitor.findings import finding_docs
from shardwise.spelling import did_you_mean


def explain(
    code: Annotated[
        str | None, typer.Argument(help="such as SW020, or 20; without it, all are listed")
    ] = None,
) -> int:
    """Explain a finding by its code: meaning, condition with thresholds, remedies in order."""
    docs, console = finding_docs(), terminal.open_console()
    if code is None:
        rows = ((doc.code, doc.title, doc.severity) for doc in docs.values())
        console.print(make_table(("code", "finding", "severity"), rows))
        return 0
    known = f"SW{int(code):03d}" if code.isdecimal() else code.upper()
    if known not in docs:
        raise ConfigError(
            f"{code!r} is not the code of a finding{did_you_mean(known, docs)}; "
            "`shardwise explain` lists them"
        )
    doc = docs[known]
    remedies = "\n".join(f"{n}. {text}" for n, text in enumerate(doc.remedies, 1))
    console.print(Text(f"{doc.code}  {doc.title} ({doc.severity})\n", "bold"))
    for heading, text in (
        ("Meaning", doc.means),
        ("Condition", doc.condition),
        ("Remedies, in this order", remedies),
        ("In the report", doc.picture),
    ):
        console.print(Text.assemble((f"{heading}\n", "bold"), text, "\n"))
    return 0
