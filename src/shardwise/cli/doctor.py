"""`shardwise doctor`: the diagnosis of an observed run, as cards or as JSON."""

from __future__ import annotations

from pathlib import Path

import typer
from pydantic import BaseModel
from rich.panel import Panel
from rich.text import Text

from shardwise.cli.flags import print_json, takes_keys
from shardwise.errors import ConfigError
from shardwise.keys import check_keys, key
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.findings import Diagnosis, Finding
from shardwise.monitor.record import RunRecord, read_run
from shardwise.terminal import open_console, printable

_HEALTHY, _FOUND, _NOT_WHOLE = 0, 1, 2
_BROKEN_RUN = ("SW022", "SW023")
_COLOURS = {"critical": "red", "warning": "yellow"}
_NEWEST = 8  # timelines and memory lines of each rank that are read
_CARD_WIDTH = 100


class DoctorFlags(BaseModel):
    """The flags of `shardwise doctor`; most are of a preflight."""

    preflight: bool = key(
        False, "Run", "look at the machines of a run to come; under torchrun on each node"
    )
    folder: Path | None = key(
        None, "Run", "preflight: where checkpoints will be; unset: the YAML's output"
    )
    ranks: int | None = key(None, "Run", "preflight: local ranks; not under torchrun", ge=1)
    axes: str | None = key(None, "Run", "preflight: degrees, such as tp=8,pp=2; unset: the YAML's")
    timeout: float = key(60.0, "Run", "preflight: seconds that a rank may be late", ge=1)
    json_: bool = key(False, "Output", "print JSON for programs")


@takes_keys(
    DoctorFlags,
    "run",
    Path,
    "the output of a run that was observed; with --preflight the YAML of one to come",
)
def doctor(context: typer.Context, run: Path | None, flags: dict[str, object]) -> int:
    """Diagnose an observed run: failures, the numbers behind them, and settings to change.

    With --preflight: check machines, network and folder of a run before it begins.

    Exit codes: 0 nothing was found; 1 something was; 2 the run has died or hangs, there is no such
    run, or too little of it to judge; with --preflight, the run would fail.
    """
    request = check_keys(DoctorFlags, {}, flags, None, "doctor")
    if request.preflight:
        from shardwise.cli.preflight import run_preflight

        return run_preflight(context, run, request)
    for stray in ("folder", "ranks", "axes"):
        if stray in flags:
            raise ConfigError(f"flag --{stray}: it is of a preflight; add --preflight")
    if run is None or not run.is_dir():
        raise ConfigError(f"{run or 'run'}: there is no such folder; name an observed run's output")
    record = read_run(run, newest=_NEWEST)
    diagnosis = diagnose(record)
    # A diagnosis needs the rules on steps: the facts of a run alone say little.
    is_judged = not any(
        "lines of steps" in abstention.missing for abstention in diagnosis.abstentions
    )
    if request.json_:
        print_json({"kind": "diagnosis", "run": str(run)} | diagnosis.to_json())
    else:
        _show(record, diagnosis, is_judged)
    if any(finding.code in _BROKEN_RUN for finding in diagnosis.findings):
        return _NOT_WHOLE
    if diagnosis.findings:
        return _FOUND
    return _HEALTHY if is_judged else _NOT_WHOLE


def _show(run: RunRecord, diagnosis: Diagnosis, is_judged: bool) -> None:
    console = open_console()
    facts, steps = run.facts, run.steps[-1].step if run.steps else 0
    what = f"stage {facts.stage}, {facts.num_ranks} ranks of {facts.device}, {steps} steps"
    console.print(Text.assemble((printable(run.path), "bold"), f"  {printable(what)}"))
    if run.note is not None:
        console.print(Text(run.note, "dim"))
    for finding in diagnosis.findings:
        console.print(_card(finding))
    if not diagnosis.findings:
        none = ("nothing found", "green") if is_judged else ("cannot be judged yet", "yellow")
        console.print(Text(*none))
    by_reason: dict[str, list[str]] = {}
    for abstention in diagnosis.abstentions:
        by_reason.setdefault(abstention.missing, []).append(abstention.code)
    for missing, codes in by_reason.items():
        console.print(Text(f"not enough evidence for {', '.join(codes)}: {missing}", "dim"))


def _card(finding: Finding) -> Panel:
    colour = _COLOURS[finding.severity]
    evidence = "; ".join(f"{name}: {value:,.4g}" for name, value in finding.evidence.items())
    lines = [Text(printable(finding.verdict), "bold"), Text(printable(finding.why))]
    lines.append(Text(evidence, "dim"))
    for change in finding.changes:
        was = "" if change.before is None else f"- {change.key}: {change.before}\n"
        text = f"{was}+ {change.key}: {change.after}"
        lines.append(Text("\n".join(map(printable, text.split("\n"))), "cyan"))
    if finding.gain is not None:
        lines.append(Text(f"expected: {finding.gain}", "green"))
    lines.append(Text(f"shardwise explain {finding.code}   {finding.doc}", "dim"))
    heading = f"[{colour}]{finding.code}  {finding.title} ({finding.severity})[/{colour}]"
    look = {"title_align": "left", "border_style": colour, "width": _CARD_WIDTH}
    return Panel(Text("\n").join(lines), title=heading, **look)  # type: ignore[arg-type]
