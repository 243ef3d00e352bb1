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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.errors import ConfigError
from shardwise.monitor.doctor.evidence import Evidence
from shardwise.monitor.doctor.state import died
from shardwise.monitor.lines import read_lines
from shardwise.monitor.record import Begin, End, Restart, read_ends
from shardwise.processes import seconds_since_birth
from shardwise.quantities import format_duration

_TAIL_BYTES = 1 << 16
_NONE_LOST = "none of its steps is lost"


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
class Recovery:
    """A run that resumes from ``step`` after one that ended, until its first step.

    Of the run before: the ``cause`` of its end, its ``last_step``, when that and the errors were.
    """

    clock: StartClock
    step: int
    from_memory: bool
    cause: str
    last_step: int
    stepped_s: float
    errors_s: Sequence[float]

    @classmethod
    def after(
        cls,
        output: Path,
        path: Path,
        has_all_steps: bool,
        clock: StartClock,
        step: int,
        from_memory: bool,
    ) -> "Recovery | None":
        """Read how the run before ended; None if there was no run. Call it before this run writes.

        ``path`` has the run's lines, ``output`` is the folder of its record. Unless ``path`` has a
        line of every step, the last step is that which a rank has left with its error.
        """
        if not path.exists():
            return None
        steps = [line["step"] for line in read_lines(path, _TAIL_BYTES) if "step" in line]
        cause, ends = _cause_of(output)
        steps += [] if has_all_steps else [end.step for end in ends]
        return cls(
            *(clock, step, from_memory, cause),
            last_step=max(steps, default=0),
            stepped_s=path.stat().st_mtime,
            errors_s=[end.unix_s for end in ends if end.error and end.unix_s],
        )

    def verdict(self, say: Callable[[str], None]) -> Restart:
        """Return the verdict, and say it in two lines; call it after the first step."""
        self.clock.mark("first step")
        begun_s, last_s, parts_s = self.clock.begun_s, self.stepped_s, dict[str, float]()
        errors_s = self.errors_s or (begun_s,)
        ends_s = {"detect": min(errors_s), "abort": max(errors_s), "rendezvous": begun_s}
        for name, end_s in (ends_s if self.errors_s else {"down": begun_s}).items():
            # In order and within the whole, whatever other hosts' clocks say.
            end_s = max(last_s, min(end_s, begun_s))
            parts_s[name], last_s = end_s - last_s, end_s
        parts_s |= self.clock.parts_s
        lost_steps = max(0, self.last_step - self.step)
        lost = f"{lost_steps} of its steps are taken again" if lost_steps else _NONE_LOST
        say(f"the run before: {self.cause}; {lost}")
        # Seconds with two digits, and whole ones from 10 on.
        texts = (f"{name} {s:{',.0f' if s >= 10 else '.2g'}}" for name, s in parts_s.items())
        parts, whole = ", ".join(texts), format_duration(sum(parts_s.values()))
        say(f"{whole} from its last step to the end of this run's first, in seconds: {parts}")
        return Restart(self.step, self.cause, lost_steps, self.from_memory, parts_s)


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
