"""Identity of processes, by number and start time, and their state.

The start time is needed because the system reuses numbers.
"""

import ctypes
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Life = Literal["alive", "stopped", "dead", "silent"]
_PROCESSES = Path("/proc")
_DEATH_SIGNAL = 1
# Fields after a process's name in its stat file.
_STATE, _USER, _SYSTEM, _BORN, _EXIT_CODE = 0, 11, 12, 19, 49


@dataclass(frozen=True)
class Process:
    """One process; ``machine`` is the same for processes that see each other's numbers."""

    pid: int
    host: str
    machine: str
    born: str

    def __str__(self) -> str:
        """Return the process's number and host."""
        return f"process {self.pid} on {self.host}"


def own_process() -> Process:
    """Return this process."""
    machine = born = ""
    with suppress(OSError):
        machine = f"{boot_id()}/{os.stat('/proc/self/ns/pid').st_ino}"
        born = _stat(os.getpid())[_BORN]
    return Process(os.getpid(), socket.gethostname(), machine, born)


def launcher_process() -> Process | None:
    """Return the process that started this one, if it runs the same Python: it may start others.

    A shell or a batch system is none.
    """
    own, pid = own_process(), os.getppid()
    with suppress(OSError):
        python = os.readlink(_PROCESSES / "self" / "exe")
        if os.readlink(_PROCESSES / str(pid) / "exe") == python:
            return Process(pid, own.host, own.machine, _stat(pid)[_BORN])
    return None


def boot_id() -> str:
    """Return a text that is new at each start of the system. **Raises** OSError if unknown."""
    return Path(_PROCESSES, "sys/kernel/random/boot_id").read_text().strip()


def seconds_since_birth() -> float:
    """Return how long ago this process was started; 0 if the system does not tell."""
    with suppress(AttributeError, OSError):
        ticks = int(_stat(os.getpid())[_BORN])
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, now_s - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def fate(process: Process, mine: Process) -> tuple[Life, str]:
    """Return the state of a process, and the cause of its death if known.

    "silent" is a process that cannot be looked up from here.
    """
    if not process.machine or process.machine != mine.machine:
        return "silent", ""
    try:
        stat_fields = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return "dead", ""
    except OSError:
        return "silent", ""
    if stat_fields[_BORN] != process.born:
        return "dead", ""
    if stat_fields[_STATE] in "ZX":
        code = int(stat_fields[_EXIT_CODE]) if len(stat_fields) > _EXIT_CODE else 0
        return "dead", _named(code & 0x7F) if code & 0x7F else f"exit code {code >> 8}"
    return ("stopped", "") if stat_fields[_STATE] in "Tt" else ("alive", "")


def work_done() -> tuple[float, int]:
    """Return the core seconds, and the bytes read and written, of this process and its children.

    Zeros if the system does not tell.
    """
    core_s, num_bytes, pids = 0.0, 0, [os.getpid()]
    while pids:
        pid = pids.pop()
        with suppress(OSError, AttributeError, ValueError):  # one that has ended in the meantime
            fields = _stat(pid)
            core_s += (int(fields[_USER]) + int(fields[_SYSTEM])) / os.sysconf("SC_CLK_TCK")
            for children in Path(_PROCESSES, str(pid), "task").glob("*/children"):
                pids += map(int, children.read_text().split())
            lines = Path(_PROCESSES, str(pid), "io").read_text().splitlines()
            num_bytes += sum(int(line.split()[1]) for line in lines[:2])  # rchar, wchar
    return core_s, num_bytes


def kill_stopped(process: Process, mine: Process) -> bool:
    """Kill a process of this machine that SIGSTOP has stopped; return True if it was.

    SIGTERM waits for a stopped process to go on, SIGKILL does not. A process that a debugger holds
    is left alone. The descriptor keeps the number from being reused between look and kill.
    """
    if process.machine != mine.machine:
        return False
    try:
        handle = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or the process is gone
        return False
    try:
        found = _stat(process.pid)
        if found[_BORN] != process.born or found[_STATE] != "T":
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def end_with_parent(number: signal.Signals | None) -> None:
    """Let this process get a signal when its parent dies; None: no longer. Linux only.

    **Source** prctl(2), PR_SET_PDEATHSIG.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, 0 if number is None else int(number))


_CRASHES = {
    "SIGSEGV": "native code read memory that is not its own",
    "SIGBUS": "a mapped file or shared memory is shorter than it was",
    "SIGABRT": "native code has ended the process, as gloo does for a message of another size",
    "SIGILL": "native code is built for another processor",
    "SIGFPE": "native code divided by zero",
}
_USUAL_SENDERS = {
    "SIGKILL": "often: the machine ran out of memory, a scheduler or a person ended it, or it was "
    "frozen",
    "SIGTERM": "often: a launcher, a scheduler or a person ended it",
    "SIGHUP": "often: its terminal or session ended",
}


def describe_signal(number: int) -> str:
    """Return how a process has ended by a signal and what often sends it, to end a sentence."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # of real-time signals two have names
        return f"was killed by signal {number}"
    if name in _CRASHES:
        return f"crashed with {name} ({_CRASHES[name]})"
    hint = f" ({_USUAL_SENDERS[name]})" if name in _USUAL_SENDERS else ""
    return f"was killed by {name}{hint}"


def describe_end(cause: str) -> str:
    """Return how a process ended, from a cause of `fate`, as the end of a sentence."""
    if not cause:
        return (
            "was killed (SIGKILL; often: the machine ran out of memory), crashed in native code, "
            "or ended by os._exit: which of them is not known"
        )
    if not cause.startswith("signal"):
        return f"ended with {cause}, as by os._exit"
    return describe_signal(int(cause.split()[1]))


def _named(number: int) -> str:
    with suppress(ValueError):
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"


def _stat(pid: int) -> list[str]:
    return Path(_PROCESSES, str(pid), "stat").read_text().rpartition(")")[2].split()
