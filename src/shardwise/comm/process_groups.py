"""Process groups on which a collective has failed; their timeouts; how to abort one.

Note [Aborting a group]
A wait on gloo cannot be cancelled. But a receive that times out closes the connections of its
group, and every wait on them raises. A wait on NCCL blocks no thread: the group is aborted, its
kernels end, and the next call raises. Either way the group is of no use afterwards.
"""

import warnings
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.collective_key import CollectiveKey, reason_of
from shardwise.comm.listener import WAITS
from shardwise.errors import CollectiveError

USUAL_CAUSE = "another rank died, raised or ended first, as a rule: its log has the cause"


class FailedGroups:
    """The groups of this process on which a collective has failed, each with the reason.

    Some ranks may have stopped in a collective that others never began, so no further call on the
    group is safe.
    """

    def __init__(self) -> None:
        self._reasons: dict[int, tuple[dist.ProcessGroup | None, str]] = {}

    def add(self, group: dist.ProcessGroup | None, reason: str) -> None:
        """Note that this rank makes no more collectives of a group; the first reason stays."""
        self._reasons.setdefault(id(group), (group, reason))

    def reason(self, group: dist.ProcessGroup | None) -> str | None:
        """Return why a collective of a group has failed; None if none has."""
        return self._reasons.get(id(group), (None, None))[1]

    def reasons(self) -> list[str]:
        """Return the reasons of all groups."""
        return [reason for _, reason in self._reasons.values()]

    def refuse(self, what: str | CollectiveKey, group: dist.ProcessGroup | None) -> None:
        """Refuse ``what`` on a group. **Raises** CollectiveError if an earlier call has failed."""
        if self._reasons and (reason := self.reason(group)) is not None:
            raise CollectiveError(
                f"rank {dist.get_rank()}: {what} is not possible any more, as an earlier call on "
                f"the same process group has failed: {reason}. End this process and start again "
                "from a checkpoint"
            )


FAILED_GROUPS = FailedGroups()


def fail(key: CollectiveKey, reason: str) -> str:
    """Note that a collective has failed; return the cause, as far as the listener finds it."""
    cause = WAITS.listener.find_cause(key, reason)
    FAILED_GROUPS.add(key.group, cause)
    return cause


def usual_reason(error: BaseException) -> str:
    """Return the usual cause of a backend's error, and the backend's text."""
    return f"{USUAL_CAUSE} ({reason_of(error)})"


def waits_block(group: Any) -> bool:
    """Tell whether a wait on a group blocks the thread, as gloo's do."""
    try:
        return bool(_backend_of(group).name().lower() == "gloo")
    except (AttributeError, RuntimeError):  # not a process group of torch
        return True


def timeout_s_of(group: Any) -> float | None:
    """Return the timeout of a group's backend in seconds; None if it is unknown."""
    with suppress(AttributeError, RuntimeError):
        return float(_backend_of(group).options._timeout.total_seconds())
    return None


def has_usual_timeout(group: Any) -> bool:
    """Tell whether a group has the timeout that torch gives if the program names none."""
    usual = dist.distributed_c10d.default_pg_timeout
    if not waits_block(group):
        usual = getattr(dist.distributed_c10d, "default_pg_nccl_timeout", None) or usual
    return timeout_s_of(group) == usual.total_seconds()


def abort(group: Any) -> bool:
    """Make waits on a group raise, see Note [Aborting a group]; tell whether that is possible."""
    backend = _backend_of(group)
    if not waits_block(group):
        if not hasattr(backend, "abort"):
            return False
        backend.abort()
        return True
    for peer in range(backend.size()):  # a connection that is closed already closes no other
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, 0).wait(timedelta(milliseconds=1))
                warnings.warn("received an unexpected message", RuntimeWarning, stacklevel=2)
                return False
    return True


def abort_all() -> None:
    """Make waits on all groups that torch knows raise."""
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(RuntimeError, AttributeError):
            abort(group)


def _backend_of(group: Any) -> Any:
    """Return the backend that moves training's tensors, or the group itself if it is one."""
    if not hasattr(group, "_get_backend"):
        return group
    for device in getattr(group, "_device_types", ()):
        if device.type != "cpu":
            return group._get_backend(device)
    return group._get_backend(torch.device("cpu"))
