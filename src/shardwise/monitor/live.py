"""A run as it continues: its files read as they grow, and the doctor on rank 0."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.monitor.doctor import diagnose
from shardwise.monitor.findings import Finding
from shardwise.monitor.lines import GrowingLines, JsonLines
from shardwise.monitor.record import (
    RunFacts,
    RunRecord,
    StepLine,
    checked_line,
    folder_of,
    rank_files,
    read_facts,
    read_step,
)
from shardwise.monitor.summary import settled, where_time_goes

_LOG = logging.getLogger("shardwise")
_MOST_LINES = 240  # over all ranks that a reader keeps
_TAIL_BYTES = 1 << 22  # of a rank's file that are read when a reader starts
_LATE_TIMES, _LATE_S = 4.0, 30.0  # usual gaps without new figures, and at least so many seconds
_HELD_LINES = 3  # that show a finding, before it is logged
_KEPT_LINES, _KEPT_OWN = 64, 8  # by the doctor


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: the newest lines over all ranks, and each rank's newest by kind."""

    record: RunRecord

    @property
    def lines(self) -> tuple[StepLine, ...]:
        """The newest lines over all ranks."""
        return self.record.steps

    @property
    def quiet_s(self) -> float:
        """Seconds since the newest of them was written."""
        return self.record.idle_s or 0.0

    @property
    def ending(self) -> str | None:
        """The end that the run has written; None while it continues, or if it was killed."""
        ends = [line for line in self.record.last_words.values() if line["kind"] == "end"]
        errors = [line["error"] for line in ends if line.get("error")]
        return f"it broke off: {errors[0]}" if errors else "it is over" if ends else None

    @property
    def gap_s(self) -> float | None:
        """The usual time between two lines, None before there are two."""
        late = [line.at_s for line in settled(self.lines)[-8:]]
        return (late[-1] - late[0]) / (len(late) - 1) if len(late) > 1 else None

    @property
    def is_late(self) -> bool:
        """Whether new figures are long overdue: the run was killed, or it hangs."""
        if self.ending is not None or self.gap_s is None:
            return False
        return self.quiet_s > max(_LATE_TIMES * self.gap_s, _LATE_S)

    def to_json(self) -> dict[str, Any]:
        """Return the snapshot as values of JSON; figures are those of the newest line."""
        latest = self.lines[-1] if self.lines else None
        facts, values = self.record.facts, asdict(latest) if latest else {}
        return {
            "run": str(self.record.path),
            "num_ranks": facts.num_ranks,
            "device": facts.device,
            "stage": facts.stage,
            "step": latest.step if latest else 0,
            "at_s": latest.at_s if latest else 0.0,
            "quiet_s": round(self.quiet_s, 3),
            "is_late": self.is_late,
            "ending": self.ending,
            **{name: values.get(name, {}) for name in ("metrics", "values", "values_over_steps")},
            "phases_s": where_time_goes(self.lines),
            **diagnose(self.record).to_json(),
        }


class LiveRun:
    """Reads a run's files repeatedly, each time only the new lines.

    It works on every machine that sees the files.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._folder = folder_of(path)
        self._clock = clock
        self._facts = read_facts(self._folder, self.path)
        self._began_s = clock()
        self._steps = GrowingLines(self._folder / "steps.jsonl")
        self._lines: deque[StepLine] = deque(maxlen=_MOST_LINES)
        self._files: dict[int, GrowingLines] = {}
        self._own: dict[int, dict[str, Mapping[str, Any]]] = {}

    def look(self) -> Snapshot:
        """Return the present state. **Raises** ConfigError if the run's folder was removed."""
        if self._steps.was_replaced():  # resumed, or started again
            self._facts = read_facts(self._folder, self.path)
            self._lines.clear()
        self._lines.extend(read_step(line, self._steps.path) for line in self._steps.read())
        for rank, file in rank_files(self._folder):
            growing = self._files.setdefault(rank, GrowingLines(file, _TAIL_BYTES))
            if growing.was_replaced():
                self._own.pop(rank, None)
            newest = self._own.setdefault(rank, {})
            for line in growing.read():
                newest.pop(kind := line.get("kind", ""), None)  # the order is that of the newest
                newest[kind] = checked_line(line, file)
        by_rank = {rank: tuple(newest.values()) for rank, newest in sorted(self._own.items())}
        path = self._steps.path
        changed_s = path.stat().st_mtime if path.exists() else self._began_s
        quiet_s = max(self._clock() - changed_s, 0.0)
        return Snapshot(RunRecord(self.path, self._facts, tuple(self._lines), by_rank, quiet_s))


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
        self._own: deque[Mapping[str, Any]] = deque(maxlen=_KEPT_OWN)
        self._held: Counter[tuple[str, int | None]] = Counter()
        self._logged: set[tuple[str, int | None]] = set()

    def note(self, line: Mapping[str, Any]) -> None:
        """Take a line of this rank: its memory, bad gradients, saves."""
        if line["kind"] in ("memory", "non_finite", "lost_updates", "other_save"):
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
                explain = f"`shardwise explain {finding.code}`"
                _LOG.warning(
                    "step %d: %s %s (%s)", line.step, finding.code, finding.verdict, explain
                )
                self._file.write(**finding.to_json() | {"step": line.step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
