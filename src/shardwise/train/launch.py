"""The launch of local ranks with torch's elastic agent, and their stop on a signal.

Note [Ending on a signal]
Each rank runs in a separate session, so Ctrl-C in a terminal reaches only the launching process.
Torch's agent turns SIGINT and SIGTERM into one SignalException: it forwards the signal to every
rank, waits for them up to `shutdown_timeout`, and raises. A rank only notes the signal
(`StopRequest`). At the end of the step the ranks sum their notes, so all stop after the same step.
The agent's log lines and traceback are silenced, as a rank that failed has reported on stderr.

Until its first step a rank ends at once. It may be inside a call that opens connections, which no
handler of Python interrupts: if another rank dies then, the agent ends all ranks to start them
again, and would wait for this one until it kills it.

If the launcher is killed with SIGKILL, its ranks get no signal. They see that their parent has
changed and end in the same way, with the usual last checkpoint; before the first step the system
ends them. Otherwise they would train on unseen and lock the folder of the run. A rank without an
agent may outlive its shell.
"""

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

from shardwise import terminal
from shardwise.processes import describe_signal, end_with_parent

INTERRUPTED = 130
# By default the agent gives ranks that it has started again the store of those before, with their
# addresses: they wait for processes that are gone (pytorch#135712, torch 2.5 to 2.13 and later).
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_SHUTDOWN_TIMEOUT_S = 120
_LINGER_S = 3


@dataclass(frozen=True)
class RankPlace:
    """This process's rank and the number of ranks, over all machines and on this one."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


class StopRequest:
    """Records SIGINT and SIGTERM instead of ending the process; the run reads it after each step.

    ``parent`` is the id of the launcher: the run also stops if it is no longer the parent.
    """

    def __init__(self, parent: int | None = None) -> None:
        self._parent = parent
        self._noted = False
        self._may_listen = False

    @classmethod
    def of_process(cls, has_launcher: bool = False) -> Self:
        """Make the request of this process, on the main thread; see Note [Ending on a signal].

        Until `listen`, a rank with a launcher ends at once on a signal, and with the launcher.
        """
        request = cls(os.getppid() if has_launcher else None)
        request._may_listen = True
        if has_launcher:
            request._handle(signal.SIG_DFL)
            end_with_parent(signal.SIGTERM)
        return request

    def listen(self) -> None:
        """Record signals from now on: the first step begins."""
        if self._may_listen:
            self._handle(self._note)
            end_with_parent(None)

    def _handle(self, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, handler)

    @property
    def is_orphan(self) -> bool:
        """True if the launcher of this rank has ended."""
        return self._parent is not None and os.getppid() != self._parent

    @property
    def requested(self) -> bool:
        """True if this rank has to stop."""
        return self._noted or self.is_orphan

    def linger(self) -> None:
        """Wait for this rank's signal after all ranks have stopped for another rank's.

        When a node joins, the agents end their ranks at different moments. A rank that ended before
        the signal of its agent would count as failed, and cost one of ``--max-restarts``.
        """
        until_s = time.monotonic() + _LINGER_S
        while not self.requested and time.monotonic() < until_s:
            time.sleep(0.05)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


def leave(place: RankPlace, rank: int) -> bool:
    """End this node's agent if ``rank`` is on this node and there are other nodes; return if so.

    Ranks of a node have consecutive numbers. Torchrun continues with the other nodes.
    """
    size = place.local_world_size
    is_on_node = rank // size == place.rank // size and size < place.world_size
    if is_on_node and place.local_rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
    return is_on_node


def launch_local_ranks(arguments: Sequence[str], num_ranks: int, max_restarts: int = 0) -> int:
    """Run `python -m shardwise <arguments>` as local ranks and wait for them.

    If one dies, all are ended and started again, ``max_restarts`` times. That needs `OWN_STORE`=1
    in the environment.

    Return the exit code: 0, INTERRUPTED after a signal, or that of the first rank that failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # Each logger of the agent has its own level, so their parent cannot silence them.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    limits: dict[str, Any] = {}
    if "shutdown_timeout" in LaunchConfig.__dataclass_fields__:  # torch 2.11 has 30 s
        limits["shutdown_timeout"] = _SHUTDOWN_TIMEOUT_S
    with tempfile.TemporaryDirectory(prefix="shardwise-") as log_folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=log_folder),
            **limits,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "shardwise", *arguments)
        except (SignalException, KeyboardInterrupt):
            return INTERRUPTED
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code: int = failure.exitcode
            if code < 0:
                ending = f"{describe_signal(-code)}; the other ranks were ended"
            else:
                ending = f"ended with exit code {code}; its own message is above"
            if code != INTERRUPTED:
                terminal.complain(f"rank {rank} {ending}\n")
            return 1 if code < 0 else code
    return 0
