"""Where a rank stands, and how local ranks are started: torch's own elastic agent.

Note [Ending on a signal]
Each rank runs in a session of its own, so Ctrl-C in a terminal reaches the launching process only.
Torch's agent turns SIGINT and SIGTERM into one SignalException: it forwards the signal to every
rank, waits for them up to `shutdown_timeout`, and raises. A rank only notes the signal
(`StopRequest`); at the end of the step the ranks add up their notes, and all stop at the same one.
So the agent needs no traceback, and its own log lines are silenced: a rank that failed has said
why on stderr by itself.

A launcher that is killed with SIGKILL tells its ranks nothing. They see that they have another
parent, and end in the same way, with the usual last checkpoint: else they would train on unseen
and hold the folder of the run. A rank that no agent started may outlive the shell that started it.
"""

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Self

from shardwise import terminal

INTERRUPTED = 130
_SHUTDOWN_TIMEOUT_S = 120


@dataclass(frozen=True)
class RankPlace:
    """Which of how many ranks this process is, over all machines and on this one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class StopRequest:
    """Note SIGINT and SIGTERM instead of dying of them; the run looks at the end of each step.

    With ``parent``, a process id, it is a wish to stop too when that is no longer the parent.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._parent = parent
        self._noted = False

    @classmethod
    def installed(cls, has_launcher: bool = False) -> Self:
        """Return a request that listens from now on; call on the main thread."""
        request = cls(os.getppid() if has_launcher else None)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, request._note)
        return request

    @property
    def is_orphan(self) -> bool:
        """Tell whether the launcher of this rank is gone."""
        return self._parent is not None and os.getppid() != self._parent

    @property
    def requested(self) -> bool:
        """Tell whether this rank is to stop."""
        return self._noted or self.is_orphan

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


def launch_local_ranks(arguments: Sequence[str], num_ranks: int) -> int:
    """Run `python -m shardwise <arguments>` as local ranks and wait for them.

    It returns the exit code for this process: 0, INTERRUPTED after a signal, or that of the first
    rank that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _silence_agent()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as log_folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shardwise", *arguments)
        except (SignalException, KeyboardInterrupt):
            return INTERRUPTED
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _report_failure(rank, failure.exitcode)
    return 0


def _silence_agent() -> None:
    """Quiet the loggers of the agent; each has its own level, so their parent cannot."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _report_failure(rank: int, exit_code: int) -> int:
    if exit_code == INTERRUPTED:
        return INTERRUPTED
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        hint = " (often: the machine ran out of memory)" if name == "SIGKILL" else ""
        terminal.complain(f"rank {rank} was killed by {name}{hint}; the other ranks were ended\n")
        return 1
    terminal.complain(f"rank {rank} ended with exit code {exit_code}; its own message is above\n")
    return exit_code
