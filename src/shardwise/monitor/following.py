"""An observed run as it goes on: its files are read as they grow, on whatever machine sees them."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import ConfigError
from shardwise.monitor.doctor import diagnose
from shardwise.monitor.line_kinds import checked_line
from shardwise.monitor.lines import MAX_LINE, parse_line
from shardwise.monitor.record import (
    RunRecord,
    StepLine,
    folder_of,
    rank_files,
    read_facts,
    read_step,
)
from shardwise.monitor.summary import settled, where_time_goes

_MOST_LINES = 240  # that are kept
_TAIL_BYTES = 1 << 22  # of what a rank has written before anybody looked
_LATE_TIMES, _LATE_S = 4.0, 30.0  # usual gaps without new figures, and at least so many seconds


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment: the newest lines over all ranks, and of each rank's own by kind."""

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
        """How the run has ended, as it said so itself; None while it goes on, or was killed."""
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
        """Whether new figures should long have come: the run was killed, or it stands."""
        if self.ending is not None or self.gap_s is None:
            return False
        return self.quiet_s > max(_LATE_TIMES * self.gap_s, _LATE_S)

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON; figures are those of the newest line."""
        latest = self.lines[-1] if self.lines else None
        facts, told = self.record.facts, asdict(latest) if latest else {}
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
            **{name: told.get(name, {}) for name in ("metrics", "values", "values_over_steps")},
            "phases_s": where_time_goes(self.lines),
            **diagnose(self.record).to_json(),
        }


class LiveRun:
    """Reads a run's files again and again, only what is new in them."""

    def __init__(self, path: str | Path, clock: Callable[[], float] = time.time) -> None:
        self.path = Path(path)
        self._folder = folder_of(path)
        self._clock = clock
        self._facts = read_facts(self._folder, self.path)
        self._began_s = clock()
        self._steps = _Growing(self._folder / "steps.jsonl")
        self._lines: deque[StepLine] = deque(maxlen=_MOST_LINES)
        self._files: dict[int, _Growing] = {}
        self._own: dict[int, dict[str, Mapping[str, Any]]] = {}

    def look(self) -> Snapshot:
        """Return what there is now. **Raises** ConfigError where the run's folder has gone."""
        if self._steps.is_another():  # resumed, or started again
            self._facts = read_facts(self._folder, self.path)
            self._lines.clear()
        self._lines.extend(read_step(line, self._steps.path) for line in self._steps.read())
        for rank, file in rank_files(self._folder):
            growing = self._files.setdefault(rank, _Growing(file, _TAIL_BYTES))
            if growing.is_another():
                self._own.pop(rank, None)
            newest = self._own.setdefault(rank, {})
            for line in growing.read():
                newest.pop(kind := line.get("kind", ""), None)  # the order is that of the newest
                newest[kind] = checked_line(line, file)
        by_rank = {rank: tuple(newest.values()) for rank, newest in sorted(self._own.items())}
        changed_s = self._steps.changed_s() or self._began_s
        quiet_s = max(self._clock() - changed_s, 0.0)
        record = RunRecord(self.path, self._facts, tuple(self._lines), by_rank, quiet_s)
        return Snapshot(record)


class _Growing:
    """A file of JSON lines that another process appends to, or puts another in its place.

    Of a file that is there already, only the last ``tail_bytes`` are read where these are given.
    """

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self.path = path
        self._at = 0
        if tail_bytes is not None and path.exists():
            self._at = max(path.stat().st_size - tail_bytes, 0)
        self._is_inside_line = self._at > 0
        self._id: tuple[int, int] | None = None

    def is_another(self) -> bool:
        """Return whether the file is another one, or shorter than what was read of it."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return False
        before, self._id = self._id, (stat.st_dev, stat.st_ino)
        is_another = stat.st_size < self._at or before not in (None, self._id)
        if is_another:
            self._at, self._is_inside_line = 0, False
        return is_another

    def changed_s(self) -> float | None:
        """Return when it was written last, None where it is not there."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return None

    def read(self) -> Iterator[Mapping[str, Any]]:
        """Yield the lines that are new and whole."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            file.seek(self._at)
            while (text := file.readline(MAX_LINE)).endswith(b"\n"):
                self._at += len(text)
                if self._is_inside_line:
                    self._is_inside_line = False
                    continue
                line = parse_line(text.decode(errors="replace"))
                if line is None:
                    raise ConfigError(f"{self.path}: not a line of JSON with a step")
                yield line
