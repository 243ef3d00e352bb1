"""The verdict of a resumed run: the cause of its restart, and the seconds of each part.

Note [The parts of a restart]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The run before left its last step's line, and each rank that raised an error left a line with its
time. The processes of this run know when they were started. So the time from the last step to the
next one falls into parts: ``detect`` until the first rank raised the error that ended it (with the
step in which it came), ``abort`` until the last one did, ``rendezvous`` until this process was
started, ``imports``, ``process group``, ``rebuild`` of data, model and optimizer, ``load``, and
``first step``. Where no rank left a line, the first three are one part, ``down``. In a loop of the
user's own the four parts before the first step are one, ``start``. Times of other hosts are by
their clocks.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.monitor.doctor.ends import died
from shardwise.monitor.doctor.evidence import Evidence
from shardwise.monitor.lines import read_lines
from shardwise.monitor.record import Begin, End, Restart, read_ends
from shardwise.processes import seconds_since_birth
from shardwise.quantities import format_duration

_TAIL_BYTES = 1 << 16


class StartClock:
    """The parts of this process's start, in seconds, in order: see Note [The parts of a restart].

    ``begun_s`` is the time at which they begin, the process's birth where the system tells it.
    """

    def __init__(self, knows_birth: bool = False) -> None:
        self.begun_s = self._last_s = time.time() - (seconds_since_birth() if knows_birth else 0.0)
        self.parts_s: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """End a part."""
        now_s = time.time()
        self.parts_s[part] = max(0.0, now_s - self._last_s)
        self._last_s = now_s


@dataclass(frozen=True)
class Ending:
    """How the run before ended: the cause, its last step, and when that and the errors were."""

    cause: str
    step: int
    stepped_s: float
    errors_s: tuple[float, ...]

    @classmethod
    def of(cls, output: Path, path: Path, has_all_steps: bool) -> "Ending | None":
        """Read it; None if there was no run. Call it before this run writes.

        ``path`` has the run's lines, ``output`` is the folder of its record. Unless ``path`` has a
        line of every step, the last step is that which a rank has left with its error.
        """
        if not path.exists():
            return None
        steps = [line["step"] for line in read_lines(path, _TAIL_BYTES) if "step" in line]
        cause, ends = _cause_of(output)
        steps += [] if has_all_steps else [end.step for end in ends]
        errors_s = tuple(end.unix_s for end in ends if end.error and end.unix_s)
        return cls(cause, max(steps, default=0), path.stat().st_mtime, errors_s)

    def parts_s(self, begun_s: float) -> Mapping[str, float]:
        """Return the parts until this process was started at ``begun_s``."""
        if not self.errors_s:
            return {"down": max(0.0, begun_s - self.stepped_s)}
        parts, last_s = {}, self.stepped_s
        for name, end_s in (
            ("detect", min(self.errors_s)),
            ("abort", max(self.errors_s)),
            ("rendezvous", begun_s),
        ):  # in order and within the whole, whatever other hosts' clocks say
            end_s = max(last_s, min(end_s, begun_s))
            parts[name], last_s = end_s - last_s, end_s
        return parts


def _cause_of(output: Path) -> tuple[str, list[End]]:
    """Return who ended the run, in words, and what ranks have left of their ends."""
    with suppress(ConfigError, OSError):  # not observed, damaged, or of another version
        run = read_ends(output)
        ends = [line for line in run.end_lines.values() if isinstance(line, End)]
        if (found := died(Evidence(run))) is not None:
            return found.verdict, ends
        if len(ends) == len(run.end_lines):
            return "it was stopped, or came to its end", ends
        silent = sum(isinstance(line, Begin) for line in run.end_lines.values())
        return f"{silent} of {len(run.end_lines)} ranks ended and left no error", ends
    return "unknown, as there is no record of it to read (observe: true makes one)", []


@dataclass(frozen=True)
class Recovery:
    """A run that resumes from ``step``, until its first step."""

    ending: Ending
    clock: StartClock
    step: int
    from_memory: bool

    def verdict(self) -> Restart:
        """Return the verdict; call it after the first step."""
        self.clock.mark("first step")
        parts_s = {**self.ending.parts_s(self.clock.begun_s), **self.clock.parts_s}
        lost = max(0, self.ending.step - self.step)
        return Restart(self.step, self.ending.cause, lost, self.from_memory, parts_s)


def tell(restart: Restart, say: Callable[[str], None]) -> None:
    """Say the verdict in two lines."""
    num = restart.lost_steps
    lost = f"{num} of its steps are taken again" if num else "none of its steps is lost"
    say(f"the run before: {restart.cause}; {lost}")
    parts = ", ".join(f"{name} {_seconds(s)}" for name, s in restart.parts_s.items())
    whole = format_duration(sum(restart.parts_s.values()))
    say(f"{whole} from its last step to the end of this run's first, in seconds: {parts}")


def _seconds(seconds: float) -> str:
    """Return seconds with two digits, and whole ones from 10 on."""
    return f"{seconds:,.0f}" if seconds >= 10 else f"{seconds:.2g}"
