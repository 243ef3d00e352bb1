"""The doctor: rules that judge an observed run, a row for each; on rank 0 while it continues."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from shardwise.monitor.doctor import settings, state, training, waits
from shardwise.monitor.doctor.evidence import Evidence, NotEnough
from shardwise.monitor.findings import Abstention, Diagnosis, Finding
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.record import (
    IdleScheduler,
    LostUpdates,
    Memory,
    NoGradient,
    NonFinite,
    OtherSave,
    RankLine,
    RunFacts,
    RunRecord,
    SkippedSteps,
    StepLine,
)

_LOG = logging.getLogger("shardwise")
_HELD_LINES = 3  # that show a finding, before it is logged
_KEPT_LINES, _KEPT_OWN = 64, 16  # by the live doctor
_JUDGED = (
    *(Memory, NonFinite, LostUpdates, OtherSave),
    *(NoGradient, SkippedSteps, IdleScheduler),
)


class _Rule(NamedTuple):
    """A row: the codes that a rule finds, the rule, and for how many ranks at least it judges."""

    codes: tuple[str, ...]
    find: Callable[[Evidence], Finding | None]
    min_ranks: int = 1


_RULES = (
    _Rule(("SW001",), settings.not_sharded, 2),
    _Rule(("SW002",), settings.one_unit, 2),
    _Rule(("SW003",), settings.too_fine, 2),
    _Rule(("SW004",), settings.largest_unit, 2),
    _Rule(("SW006",), settings.padding),
    _Rule(("SW010",), settings.small_buckets, 2),
    _Rule(("SW011",), settings.large_bucket, 2),
    _Rule(("SW011",), settings.large_prefetch, 2),
    _Rule(("SW012", "SW005"), waits.exposed_communication, 2),
    _Rule(("SW013",), waits.slow_pair, 2),
    _Rule(("SW014",), waits.slow_axis, 2),
    _Rule(("SW020",), waits.straggler, 2),
    _Rule(("SW021",), waits.data_loader),
    _Rule(("SW024",), waits.uneven_batches, 2),
    _Rule(("SW025",), training.shared_inputs, 2),
    _Rule(("SW026",), training.small_batches),
    _Rule(("SW027",), training.many_reads),
    _Rule(("SW022",), state.no_step),
    _Rule(("SW023",), state.died),
    _Rule(("SW030", "SW005"), state.full_memory),
    _Rule(("SW031",), state.fragmentation),
    _Rule(("SW032", "SW033"), state.cost_of_offload),
    _Rule(("SW034",), training.memory_leak),
    _Rule(("SW035",), training.needless_recomputation),
    _Rule(("SW040",), state.half_precision),
    _Rule(("SW041",), state.not_finite),
    _Rule(("SW042",), state.lost_updates),
    _Rule(("SW043",), training.growing_norm),
    _Rule(("SW044",), training.idle_scheduler),
    _Rule(("SW045",), training.no_gradient),
    _Rule(("SW046",), training.dropout_off),
    _Rule(("SW047",), training.kept_gradients),
    _Rule(("SW050",), state.slow_saves),
    _Rule(("SW050",), state.other_saves),
    _Rule(("SW051",), state.no_saves),
    _Rule(("SW052",), training.long_evaluation),
)


def diagnose(run: RunRecord) -> Diagnosis:
    """Judge a run by all rules; leave out findings that another one explains.

    **Cost** some 100 microseconds for a run of a few hundred lines.
    """
    evidence, found = Evidence(run), list[Finding]()
    abstentions: list[Abstention] = []
    judged: list[str] = []
    for rule in _RULES:
        try:
            finding = rule.find(evidence) if run.facts.num_ranks >= rule.min_ranks else None
            judged += rule.codes
        except NotEnough as missing:
            abstentions += [Abstention(code, str(missing)) for code in rule.codes]
            continue
        if finding is not None:
            found.append(replace(finding, step=run.steps[-1].step if run.steps else None))
    kept = [f for f in found if not any(other.explains(f) for other in found)]
    kept.sort(key=lambda finding: (finding.severity != "critical", finding.code))
    missing_of = tuple(each for each in abstentions if each.code not in judged)
    return Diagnosis(tuple(kept), missing_of, tuple(dict.fromkeys(judged)))


class LiveDoctor:
    """Judges a run line by line, on rank 0 behind the training; ``found`` has its findings.

    A finding is logged once, after it has held for some lines, and appended to ``findings.jsonl``
    in ``folder``. A critical one is logged at once.
    """

    def __init__(self, facts: RunFacts, folder: Path | None, done: int = 0) -> None:
        self.found: list[Finding] = []
        self._facts = facts
        self._path = folder or Path()
        self._file = JsonLines(folder / "findings.jsonl" if folder is not None else None, done)
        self._lines: deque[StepLine] = deque(maxlen=_KEPT_LINES)
        self._own: deque[RankLine] = deque(maxlen=_KEPT_OWN)
        self._held: Counter[tuple[str, int | None]] = Counter()
        self._logged: set[tuple[str, int | None]] = set()

    def note(self, line: RankLine) -> None:
        """Take a line of this rank: its memory, bad gradients, saves."""
        if isinstance(line, _JUDGED):
            self._own.append(line)

    def write(self, line: StepLine) -> None:
        """Take a line over all ranks, and judge. **Cost** some 100 microseconds."""
        self._lines.append(line)
        run = RunRecord(self._path, self._facts, tuple(self._lines), {0: tuple(self._own)})
        findings = {(f.code, f.rank): f for f in diagnose(run).findings}
        self._held = Counter({key: self._held[key] + 1 for key in findings})
        for key, finding in findings.items():
            is_due = self._held[key] >= _HELD_LINES or finding.severity == "critical"
            if is_due and key not in self._logged:
                self._logged.add(key)
                self.found.append(finding)
                text = f"{finding.code} {finding.verdict}"
                _LOG.warning("step %d: %s (`shardwise explain %s`)", line.step, text, finding.code)
                self._file.write(**finding.to_json() | {"step": line.step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
