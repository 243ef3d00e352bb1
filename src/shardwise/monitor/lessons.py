"""The meaning of each code of a finding: for findings, `shardwise explain` and its page."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files

from shardwise.monitor.findings import SEVERITIES, Severity


@dataclass(frozen=True)
class Lesson:
    """One code, taught: what it means, when it is told, what to do first, what it looks like."""

    code: str
    title: str
    severity: Severity
    means: str
    signal: str
    remedies: tuple[str, ...]
    picture: str


def read_lessons(text: str) -> Mapping[str, Lesson]:
    """Read lessons from TOML. **Raises** ValueError naming a table that is not a lesson."""
    keys = {each.name for each in fields(Lesson)} - {"code"}
    found = {}
    for code, table in tomllib.loads(text).items():
        remedies = table.get("remedies") or [None]
        texts = [*remedies, *(table.get(key) for key in keys - {"remedies"})]
        is_complete = all(isinstance(each, str) and each for each in texts)
        if table.keys() != keys or not is_complete or table["severity"] not in SEVERITIES:
            raise ValueError(
                f"lesson {code}: expected a text for each of {sorted(keys)}, a list of texts for "
                f"remedies and a severity of {SEVERITIES}; got {table}"
            )
        found[code] = Lesson(code, **table | {"remedies": tuple(remedies)})
    return found


LESSONS = read_lessons(files(__package__).joinpath("lessons.toml").read_text(encoding="utf-8"))


def as_markdown(lesson: Lesson) -> str:
    """Return a section of the page of findings."""
    remedies = "\n".join(f"{n}. {text}" for n, text in enumerate(lesson.remedies, 1))
    return (
        f"## {lesson.code}\n\n**{lesson.title}** ({lesson.severity}). {lesson.means}\n\n"
        f"*When it is told.* {lesson.signal}\n\n*What to do, in this order.*\n\n{remedies}\n\n"
        f"*What it looks like.* {lesson.picture}\n"
    )


_INTRODUCTION = """# Findings

What `shardwise doctor RUN` may say of an observed run, by code. `shardwise explain CODE` says the
same in a terminal, and `shardwise explain --markdown` writes this page. Thresholds are shares of a
step wherever they can be; what is shorter than 20 ms on a CPU, or 2 ms on an accelerator, counts as
noise. How to use it: [doctor.md](how-to/doctor.md).
"""


def page() -> str:
    """Return docs/findings.md."""
    rows = "\n".join(
        f"| [{lesson.code}](#{lesson.code.lower()}) | {lesson.title} | {lesson.severity} |"
        for lesson in LESSONS.values()
    )
    table = f"| code | finding | severity |\n|---|---|---|\n{rows}\n"
    return "\n".join([_INTRODUCTION, table, *map(as_markdown, LESSONS.values())])
