"""What a rank says of itself every second, and whether its process still lives.

Note [Dead, stopped, silent]
A rank whose record does not change for some seconds is silent: stopped, dead, cut off, or in a call
that does not let Python go on. On the same machine the system tells which: processes are looked up
by number and by the time of their start, as a number may have been given to another one since. Of
a rank on another machine that is silent no more is known, until a rank beside it says more.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

Life = Literal["alive", "stopped", "dead", "silent"]
ENDED_WELL = "its program is over"
_PROCESSES = Path("/proc")
_STATE, _BORN, _EXIT_CODE = 0, 19, 49  # of what stands after a process's name in its stat file
_SILENT_LOOKS = 4


@dataclass(frozen=True)
class Process:
    """One process; ``machine`` is the same for processes that see each other's numbers."""

    pid: int
    host: str
    machine: str
    born: str

    def __str__(self) -> str:
        """Say it for people."""
        return f"process {self.pid} on {self.host}"


@dataclass(frozen=True)
class Pulse:
    """What a rank has said last.

    ``last`` is the key of the collective that it began last, ``number`` how many it had begun of
    that key, ``changes`` how much it has begun at all. If it was asked, it says for some seconds
    ``where`` it is, and what it has ``begun`` by keys. ``left`` says how its program has ended,
    ``follows`` whether that was as another rank had failed, and ``came`` with what it had come to a
    call of torch's that failed.
    """

    beat: int
    process: Process
    last: str = ""
    number: int = 0
    changes: int = 0
    computed_s: float = 0.0
    where: str = ""
    came: str = ""
    begun: Mapping[str, int] = field(default_factory=dict)
    left: str = ""
    follows: bool = False

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: bytes) -> "Pulse":
        """Return what a rank has said."""
        values = json.loads(text)
        return cls(**values | {"process": Process(**values["process"])})


def own_process() -> Process:
    """Return this process."""
    machine = born = ""
    with suppress(OSError):
        boot = Path(_PROCESSES, "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
        born = _stat(os.getpid())[_BORN]
    return Process(os.getpid(), socket.gethostname(), machine, born)


def fate(process: Process, mine: Process) -> tuple[Life, str]:
    """Return whether a process lives, and what it died of if that can still be known.

    "silent" stands for a process that cannot be looked up from here.
    """
    if not process.machine or process.machine != mine.machine:
        return "silent", ""
    try:
        told = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "dead", ""
    except OSError:
        return "silent", ""
    if told[_BORN] != process.born:
        return "dead", ""
    if told[_STATE] in "ZX":
        code = int(told[_EXIT_CODE]) if len(told) > _EXIT_CODE else 0
        return "dead", _named(code & 0x7F) if code & 0x7F else f"exit code {code >> 8}"
    return ("stopped", "") if told[_STATE] in "Tt" else ("alive", "")


def _named(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _stat(pid: int) -> list[str]:
    return Path(_PROCESSES, str(pid), "stat").read_text().rpartition(")")[2].split()


class Pulses:
    """What this rank has heard of others, and since when it has heard nothing new."""

    def __init__(self, look_every_s: float) -> None:
        self.look_every_s = look_every_s
        self.process = own_process()
        self._heard: dict[int, tuple[Pulse, float, Pulse, float]] = {}  # first, newest; when

    def hear(self, rank: int, pulse: Pulse) -> None:
        """Note what a rank has said."""
        now_s = time.monotonic()
        first, first_s, newest, _ = self._heard.get(rank, (pulse, now_s, pulse, now_s))
        if newest.beat != pulse.beat or rank not in self._heard:
            self._heard[rank] = first, first_s, pulse, now_s

    def forget(self) -> None:
        """Begin anew, with the newest as the first: what changes from now on is what counts."""
        self._heard = {rank: (new, at, new, at) for rank, (_, _, new, at) in self._heard.items()}

    def newest(self, rank: int) -> Pulse | None:
        """Return what a rank has said last."""
        heard = self._heard.get(rank)
        return None if heard is None else heard[2]

    def moved(self, rank: int) -> tuple[bool, float, float]:
        """Tell of a rank since `forget`: has it begun more; its seconds on a core, and all."""
        first, first_s, newest, newest_s = self._heard[rank]
        computed_s = newest.computed_s - first.computed_s
        return newest.changes != first.changes, computed_s, newest_s - first_s

    def life(self, rank: int) -> tuple[Life, str]:
        """Return whether a rank lives, as far as it can be known; see `fate`."""
        heard = self._heard.get(rank)
        if heard is None:
            return "silent", ""
        found, cause = fate(heard[2].process, self.process)
        if found == "silent" and time.monotonic() - heard[3] < _SILENT_LOOKS * self.look_every_s:
            return "alive", ""
        return found, cause

    def is_silent(self, rank: int) -> bool:
        """Tell whether a rank has said nothing for some looks."""
        heard = self._heard.get(rank)
        since = 0.0 if heard is None else heard[3]
        return time.monotonic() - since >= _SILENT_LOOKS * self.look_every_s
