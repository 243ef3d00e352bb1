"""The commands of `shardwise lab`, as functions that return what the terminal shows."""

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise_labs.course import (
    Lab,
    answers_in,
    built_by,
    intro_of,
    labs,
    line_of,
    steps_of,
)
from shardwise_labs.ranks import Job, Outcome, Verdict, run_job

SCORE = ".shardwise-labs.json"
WIDTH = 80
STATIC = ("predict", "break", "decide", "claims")


class LabError(ConfigError):
    """A command cannot be carried out; the text says what to do."""


def lab_of(number: int) -> Lab:
    """Return a lab by its number. **Raises** LabError."""
    if number not in labs():
        raise LabError(f"there is no lab {number}; `shardwise lab list` has them")
    return labs()[number]


def list_labs(folder: Path) -> str:
    """Return the labs with the targets met so far."""
    score = _score(folder)
    lines = []
    for lab in labs().values():
        met = score.get(str(lab.number), {}).get("met", [])
        lines.append(f"{lab.number:>3}  {lab.title:<50} {len(met)} of {_total(lab)} targets met")
    unmet = [
        n for n, lab in labs().items() if len(score.get(str(n), {}).get("met", [])) < _total(lab)
    ]
    following = f"Next: `shardwise lab start {unmet[0]}`." if unmet else "All targets are met."
    return "\n".join([*lines, "", following])


def start(number: int, folder: Path) -> str:
    """Copy the lab's file with gaps, and its broken program; return the first steps."""
    lab = lab_of(number)
    if (folder / lab.file).exists():
        raise LabError(f"{lab.file} is in this folder already; it is left as it is")
    (folder / lab.file).write_text(lab.gapped())
    (folder / lab.broken_file).write_text(lab.broken)
    missing = [name for name in lab.needs if not (folder / name).exists()]
    needs = "".join(f"It imports {name}: {built_by(name)}.\n\n" for name in missing)
    return (
        f"Lab {number}: {lab.title}\n\n{_narrow(intro_of(lab.page))}\n\n"
        f"Wrote {lab.file}, yours to fill.\n"
        f"Wrote {lab.broken_file}: leave it closed until the step Break.\n\n"
        f"{_narrow(needs)}{read(number, 'Predict')}\n\nNext: fill PREDICT in {lab.file}, then "
        f"`shardwise lab read {number} build`."
    )


def read(number: int, step: str | None) -> str:
    """Return one step of the lab's page, or the names of the steps."""
    steps = steps_of(lab_of(number).page)
    if step is None:
        return "\n".join(f"shardwise lab read {number} {name.split()[0].lower()}" for name in steps)
    wanted = step.lower()
    for name, text in sorted(
        steps.items(), key=lambda each: not each[0].lower().startswith(wanted)
    ):
        if wanted in name.lower():
            return f"{name}\n{'-' * len(name)}\n{_narrow(text)}"
    raise LabError(f"lab {number} has no step {step!r}; its steps are {', '.join(steps)}")


def hint(number: int, gap: int | None, folder: Path) -> str:
    """Return the next hint of a gap, each deeper than the one before."""
    lab, score = lab_of(number), _score(folder)
    entry = score.setdefault(str(number), {})
    if gap is None and entry.get("gap", 1) is None:
        return (
            f"The last check missed no gap. `shardwise lab hint {number} --gap 1` shows one again."
        )
    gap = gap or int(entry.get("gap", 1))
    if gap not in lab.hints:
        raise LabError(f"lab {number} has gaps {', '.join(map(str, lab.hints))}")
    shown = entry.setdefault("hints", {})
    depth = min(int(shown.get(str(gap), 0)) + 1, 3)
    shown[str(gap)] = depth
    _keep(folder, score)
    return _wrapped(f"gap {gap}, hint {depth} of 3: ", lab.hints[gap][depth - 1])


def run(number: int, path: Path) -> str:
    """Run the reader's file on ranks; return the table of what was measured."""
    lab = lab_of(number)
    if path.name != lab.broken_file:
        missing = [name for name in lab.predict if _answers(path, "PREDICT").get(name) is None]
        if missing:
            raise LabError(
                f"predict first: PREDICT in {path.name} has no number for {missing[0]!r}"
            )
    job = Job(number, (str(path.resolve()),), lab.num_ranks[:1], False, lab.hang_s)
    outcomes = run_job(job)
    if problem := failure(outcomes):
        return problem
    first = outcomes[0]
    width = max(len(label) for label, _ in first.rows)
    rows = [f"{label:<{width}} {value}" for label, value in first.rows]
    return "\n".join([f"On {first.num_ranks} ranks, rank 0:", "", *rows])


@dataclass(frozen=True)
class Checked:
    """The verdicts of a check, in order, and an exception or a hang of the reader's code."""

    lab: Lab
    verdicts: tuple[Verdict, ...]
    problem: str

    @property
    def num_met(self) -> int:
        """Return the number of targets met."""
        return sum(verdict.met for verdict in self.verdicts)

    @property
    def total(self) -> int:
        """Return the number of targets."""
        return _total(self.lab)

    @property
    def gap(self) -> int | None:
        """Return the gap of the first target missed, or not judged; None if all are met."""
        missed = {verdict.target for verdict in self.verdicts if not verdict.met}
        met = {verdict.target for verdict in self.verdicts if verdict.met}
        left = [target for target in self.lab.targets if target not in met]
        first = next((target for target in left if target in missed), left[0] if left else None)
        return None if first is None else self.lab.targets[first]

    def text(self) -> str:
        """Return what the terminal shows."""
        gap = self.gap
        judged = {verdict.target for verdict in self.verdicts}
        lines = [
            _wrapped(f"{v.target:<12}{'met' if v.met else 'MISSED':<8}", v.text)
            for v in self.verdicts
        ]
        if self.problem:
            lines += ["", self.problem]
        if left := [target for target in self.lab.targets if target not in judged]:
            lines += ["", _wrapped("Judged after these: ", ", ".join(left))]
        lines += ["", f"{self.num_met} of {self.total} targets met."]
        if gap is not None:
            lines[-1] += f" A hint for gap {gap}: `shardwise lab hint {self.lab.number}`"
        elif self.num_met == self.total and self.lab.number + 1 in labs():
            lines[-1] += f" Next: `shardwise lab start {self.lab.number + 1}`"
        return "\n".join(lines)


def check(number: int, path: Path, hang_s: float | None = None) -> Checked:
    """Check the reader's file on ranks, and its answers; keep the score beside the file."""
    lab = lab_of(number)
    _answers(path, "PREDICT")
    outcomes = run_job(
        Job(number, (str(path.resolve()),), lab.num_ranks, True, hang_s or lab.hang_s)
    )
    checked = judged(lab, path, outcomes)
    score = _score(path.parent)
    entry = score.setdefault(str(number), {})
    entry["met"] = [verdict.target for verdict in checked.verdicts if verdict.met]
    entry["gap"] = checked.gap
    _keep(path.parent, score)
    return checked


def judged(lab: Lab, path: Path, outcomes: Sequence[Outcome]) -> Checked:
    """Return the verdicts of all ranks and of the file's answers, by target."""
    by_target: dict[str, Verdict] = {}
    facts: dict[str, str] = {}
    for outcome in outcomes:
        facts |= {**outcome.facts, **facts}
        for verdict in outcome.verdicts:
            known = by_target.get(verdict.target)
            if known is None or (known.met and not verdict.met):
                by_target[verdict.target] = verdict
    for outcome in outcomes:
        if outcome.error and outcome.target in by_target and by_target[outcome.target].met:
            del by_target[outcome.target]  # other ranks met it
    ordered = [by_target[target] for target in lab.targets if target in by_target]
    predict, *others = _static(lab, path, facts)
    return Checked(lab, (predict, *ordered, *others), failure(outcomes))


def failure(outcomes: Sequence[Outcome]) -> str:
    """Return in words how the reader's code failed on some rank; nothing if it did not."""
    failed = [outcome for outcome in outcomes if outcome.error]
    raised = [outcome for outcome in failed if not outcome.is_waiting]
    raised.sort(key=lambda outcome: "the process crashed" not in outcome.error)
    waiting = [f"rank {o.rank} waits: {o.error}" for o in failed if o.is_waiting]
    if raised:
        first = raised[0]
        where = "" if len(raised) == first.num_ranks else f"rank {first.rank}: "
        about = f"{first.target}: " if first.target else ""
        return "\n".join([f"{about}{where}{first.error}", *waiting])
    if not waiting:
        return ""
    about = next((f"{o.target}: " for o in failed if o.target), "")
    return "\n".join([f"{about}your code did not end, so the ranks were stopped", *waiting])


def _total(lab: Lab) -> int:
    return len(lab.targets) + len(STATIC)


def _static(lab: Lab, path: Path, facts: Mapping[str, str]) -> list[Verdict]:
    answers = answers_in(path)
    verdicts = [_predicted(lab, answers.get("PREDICT", {}), facts)]
    broken = answers.get("BREAK", {})
    problem = ""
    if None in (broken.get("line"), broken.get("finding")):
        problem = "BREAK is not filled in yet"
    elif not isinstance(broken["line"], int):
        problem = f"'line' is the number of a line of {lab.broken_file}: 12, say"
    elif broken["line"] != line_of(lab.broken, lab.defect.line):
        problem = f"line {broken['line']} of {lab.broken_file} is right as it is"
    elif str(broken["finding"]).upper() != lab.defect.finding:
        problem = f"that is the line with the defect; {broken['finding']} is another finding"
    verdicts.append(Verdict("break", not problem, problem or lab.defect.why))
    (choice,) = list(answers.get("DECIDE", {}).values()) or [None]
    is_right = str(choice) == str(lab.decision.answer)
    said = (
        "DECIDE is not filled in yet" if choice is None else f"not {choice!r}: {lab.decision.ask}"
    )
    verdicts.append(Verdict("decide", is_right, lab.decision.why if is_right else said))
    verdicts.append(_claimed(lab, answers.get("CLAIMS", {}), facts))
    return verdicts


def _predicted(lab: Lab, given: Mapping[str, object], facts: Mapping[str, str]) -> Verdict:
    for name, number in lab.predict.items():
        value = given.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return Verdict("predict", False, f"no number for {name!r}")
        if number.value is not None and abs(value - number.value) > number.within * number.value:
            ratio = value / number.value
            return Verdict("predict", False, f"{name}: {value:g} is {ratio:.3g} x: {number.why}")
    runs = [f"{n}: {facts[n]} in the run, {given[n]} predicted" for n in lab.predict if n in facts]
    return Verdict("predict", True, "; ".join(runs) or f"{len(lab.predict)} of {len(lab.predict)}")


def _claimed(lab: Lab, given: Mapping[str, object], facts: Mapping[str, str]) -> Verdict:
    reasons = []
    for text, claim in lab.claims.items():
        if not isinstance(given.get(text), bool):
            return Verdict("claims", False, f"True or False? {text}")
        why = ". Its figures come when no target is left to judge"
        if facts.keys() >= set(_names(claim.why)):
            why = f", since {claim.why.format_map(facts)}"
        reasons.append(f"{text}: {claim.is_true}{why}")
        if given[text] != claim.is_true:
            return Verdict("claims", False, reasons[-1])
    return Verdict("claims", True, "\n".join(reasons))


def _names(text: str) -> list[str]:
    return [part.split("}")[0] for part in text.split("{")[1:]]


def _answers(path: Path, name: str) -> Mapping[str, object]:
    if not path.exists():
        raise LabError(f"there is no file {path}; `shardwise lab start` writes it")
    try:
        return answers_in(path).get(name, {})
    except SyntaxError as error:
        raise LabError(f"line {error.lineno} of {path.name} is not Python: {error.msg}") from None


def _narrow(text: str) -> str:
    """Return Markdown with paragraphs and lists wrapped for a terminal; code and tables stay."""
    parts = re.split(r"(```.*?```|(?:^\|[^\n]*\n?)+)", text, flags=re.DOTALL | re.MULTILINE)
    wrapped = [re.sub(r"[^\n](?:.|\n(?![\n\d]))*", _filled, part) for part in parts[::2]]
    parts[::2] = wrapped
    return "".join(parts)


def _filled(match: re.Match[str]) -> str:
    return textwrap.fill(match[0], WIDTH, break_long_words=False, break_on_hyphens=False)


def _wrapped(label: str, text: str) -> str:
    """Wrap each line of a text beside its label."""
    indents = (label, *[" " * len(label)] * text.count("\n"))
    lines = [
        textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=" " * len(label))
        for indent, line in zip(indents, text.split("\n"), strict=True)
    ]
    return "\n".join(lines) or label


def _score(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / SCORE
    try:
        return dict(json.loads(path.read_text())) if path.exists() else {}
    except ValueError:
        raise LabError(f"{path} is damaged; delete it, and the score begins anew") from None


def _keep(folder: Path, score: Mapping[str, object]) -> None:
    (folder / SCORE).write_text(json.dumps(score, indent=1))
