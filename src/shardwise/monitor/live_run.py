"""A run as it continues: its files read as they grow, and the doctor on rank 0."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from shardwise.monitor.doctor import diagnose
from shardwise.monitor.findings import Finding
from shardwise.monitor.lines import JsonLine, JsonLines, read_lines
from shardwise.monitor.rank_lines import LostUpdates, Memory, NonFinite, OtherSave, RankLine
from shardwise.monitor.record import (
    RunFacts,
    RunRecord,
    StepLine,
    folder_of,
    lines_of_rank,
    rank_files,
    read_facts,
    read_step,
)
from shardwise.monitor.summary import phase_seconds, settled

_LOG = logging.getLogger("shardwise")
_MOST_LINES = 240  # over all ranks that a reader keeps
_TAIL_BYTES = 1 << 22  # of a file that are read
_LATE_TIMES, _LATE_S = 4.0, 30.0  # usual gaps without new figures, and at least so many seconds
_HELD_LINES = 3  # that show a finding, before it is logged
_KEPT_LINES, _KEPT_OWN = 64, 8  # by the doctor


def gap_of(run: RunRecord) -> float | None:
    """Return the usual seconds between two lines; None before there are two."""
    late = [line.at_s for line in settled(run.steps)[-8:]]
    return (late[-1] - late[0]) / (len(late) - 1) if len(late) > 1 else None


def is_late(run: RunRecord) -> bool:
    """Tell whether new figures are long overdue: the run was killed, or it hangs."""
    gap_s = gap_of(run)
    if run.ending is not None or gap_s is None:
        return False
    return (run.idle_s or 0.0) > max(_LATE_TIMES * gap_s, _LATE_S)


def snapshot_of(run: RunRecord) -> dict[str, object]:
    """Return a run at one moment as values of JSON; figures are those of the newest line."""
    latest = run.steps[-1] if run.steps else None
    values = asdict(latest) if latest else {}
    return {
        "run": str(run.path),
        "num_ranks": run.facts.num_ranks,
        "device": run.facts.device,
        "stage": run.facts.stage,
        "step": latest.step if latest else 0,
        "at_s": latest.at_s if latest else 0.0,
        "quiet_s": round(run.idle_s or 0.0, 3),
        "is_late": is_late(run),
        "ending": run.ending,
        **{name: values.get(name, {}) for name in ("metrics", "values", "values_over_steps")},
        "phases_s": phase_seconds(run.steps),
        **diagnose(run).to_json(),
    }


class LiveRun:
    """Reads a run repeatedly, each time only the ends of files that have changed.

    It works on every machine that sees the files.
    """

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._folder = folder_of(path)
        self._clock = clock
        self._began_s = clock()
        self._seen: dict[Path, tuple[object, Sequence[JsonLine]]] = {}
        read_facts(self._folder, self.path)  # there is a run

    def look(self) -> RunRecord:
        """Return the present state: the newest lines over all ranks, and each rank's by kind.

        ``idle_s`` is the time since the newest line over all ranks. **Raises** ConfigError if the
        run's folder was removed, or a line has a wrong type.
        """
        facts, path = read_facts(self._folder, self.path), self._folder / "steps.jsonl"
        steps = tuple(read_step(line, path) for line in self._lines(path)[-_MOST_LINES:])
        by_rank: dict[int, tuple[RankLine, ...]] = {}
        for rank, file in rank_files(self._folder):
            newest: dict[str, JsonLine] = {}
            for line in self._lines(file):
                kind = str(line.get("kind", ""))
                newest.pop(kind, None)  # the order is that of the newest
                newest[kind] = line
            by_rank[rank] = lines_of_rank(newest.values(), file)
        changed_s = path.stat().st_mtime if path.exists() else self._began_s
        idle_s = max(self._clock() - changed_s, 0.0)
        return RunRecord(self.path, facts, steps, by_rank, idle_s)

    def _lines(self, path: Path) -> Sequence[JsonLine]:
        """Return the lines at the end of a file."""
        stat = path.stat() if path.exists() else None
        version = stat and (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if path not in self._seen or self._seen[path][0] != version:
            self._seen[path] = version, tuple(read_lines(path, _TAIL_BYTES))
        return self._seen[path][1]


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
        if isinstance(line, Memory | NonFinite | LostUpdates | OtherSave):
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
                said = f"{finding.code} {finding.verdict}"
                _LOG.warning("step %d: %s (`shardwise explain %s`)", line.step, said, finding.code)
                self._file.write(**finding.to_json() | {"step": line.step})

    def close(self) -> None:
        """Close the file."""
        self._file.close()
