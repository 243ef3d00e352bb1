"""The same rules while a run goes on, on rank 0 behind the training: each finding is told once."""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.monitor.doctor import diagnose
from shardwise.monitor.findings import Finding
from shardwise.monitor.lines import JsonLines
from shardwise.monitor.record import RunFacts, RunRecord, StepLine

_LOG = logging.getLogger("shardwise")
_HELD_LINES = 3  # that show a finding, before it is told
_KEPT_LINES = 64
_KEPT_OWN = 8


class LiveDoctor:
    """Looks at a run line by line; ``found`` are its findings so far.

    Each is logged once, in a line, after it has held for some lines, and appended to
    ``findings.jsonl`` in ``folder``. What is known at step 0 holds from the first line.
    """

    def __init__(self, facts: RunFacts, folder: Path | None, done: int = 0) -> None:
        self.found: list[Finding] = []
        self._facts = facts
        self._path = folder or Path()
        self._file = JsonLines(folder / "findings.jsonl" if folder is not None else None, done)
        self._lines: deque[StepLine] = deque(maxlen=_KEPT_LINES)
        self._own: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_OWN)
        self._held: Counter[tuple[str, int | None]] = Counter()
        self._told: set[tuple[str, int | None]] = set()

    def note(self, line: Mapping[str, Any]) -> None:
        """Take a line of this rank alone: its memory, bad gradients, saves."""
        if line["kind"] in ("memory", "non_finite", "lost_updates", "other_save"):
            self._own.append(line)

    def look(self, line: StepLine) -> None:
        """Take a line over all ranks, and judge. **Cost** some 100 microseconds."""
        self._lines.append(line)
        run = RunRecord(self._path, self._facts, tuple(self._lines), {0: tuple(self._own)})
        findings = {(f.code, f.rank): f for f in diagnose(run).findings}
        self._held = Counter({key: self._held[key] + 1 for key in findings})
        for key, finding in findings.items():
            is_urgent = finding.severity == "critical"
            if key not in self._told and (self._held[key] >= _HELD_LINES or is_urgent):
                self._told.add(key)
                self._tell(finding, line.step)

    def _tell(self, finding: Finding, step: int) -> None:
        self.found.append(finding)
        explain = f"`shardwise explain {finding.code}`"
        _LOG.warning("step %d: %s %s (%s)", step, finding.code, finding.verdict, explain)
        self._file.write(**finding.to_json() | {"step": step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
