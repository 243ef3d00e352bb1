"""Write the page of the doctor's findings from their texts: see generate_pages.py."""

from shardwise.monitor.findings import FindingDoc, finding_docs

INTRODUCTION = """# Findings

The findings of `shardwise doctor RUN` about an observed run, by code. `shardwise explain CODE`
prints a section in a terminal, and `make pages` writes this page. Most thresholds are shares of a
step. Durations below 20 ms on a CPU, or 2 ms on an accelerator, count as noise.
How to use it: [doctor.md](how-to/doctor.md).
"""


def findings_page() -> str:
    """Return docs/findings.md."""
    docs = finding_docs().values()
    rows = (f"| [{d.code}](#{d.code.lower()}) | {d.title} | {d.severity} |" for d in docs)
    table = "\n".join(["| code | finding | severity |", "|---|---|---|", *rows])
    return "\n".join([INTRODUCTION, table, "", *map(section, docs)])


def section(doc: FindingDoc) -> str:
    """Return the part of the page about one code."""
    remedies = "\n".join(f"{number}. {text}" for number, text in enumerate(doc.remedies, 1))
    return (
        f"## {doc.code}\n\n**{doc.title}** ({doc.severity}). {doc.means}\n\n"
        f"*Condition.* {doc.condition}\n\n*Remedies, in this order.*\n\n{remedies}\n\n"
        f"*In the report.* {doc.picture}\n"
    )
