"""An end to waits that cannot be cancelled; see Note [Breaking a wait off] in watch.py."""

import warnings
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def backend_of(group: Any) -> Any:
    """Return the backend of a process group that moves training's tensors, or the group itself."""
    if not hasattr(group, "_get_backend"):
        return group
    for device in getattr(group, "_device_types", ()):
        if device.type != "cpu":
            return group._get_backend(device)
    return group._get_backend(torch.device("cpu"))


def blocks(group: Any) -> bool:
    """Tell whether waits on a group block the thread that waits, as gloo's do."""
    try:
        return bool(backend_of(group).name().lower() == "gloo")
    except (AttributeError, RuntimeError):  # no process group of torch's
        return True


def timeout_s_of(group: Any) -> float | None:
    """Return how long a group waits, as its backend was told; None where that is not known."""
    with suppress(AttributeError, RuntimeError):
        return float(backend_of(group).options._timeout.total_seconds())
    return None


def break_off(group: Any) -> bool:
    """Make waits on a group raise; tell whether that is possible."""
    backend = backend_of(group)
    if not blocks(group):
        abort = getattr(backend, "abort", None)
        if abort is None:
            return False
        abort()
        return True
    for peer in range(backend.size()):  # one whose connection is closed already closes no other
        if peer != backend.rank():
            with suppress(RuntimeError):
                backend.recv([torch.zeros(1)], peer, 0).wait(timedelta(milliseconds=1))
                warnings.warn("a message of nobody has arrived", RuntimeWarning, stacklevel=2)
                return False
    return True


def break_off_all() -> None:
    """Make waits on all groups that torch knows raise."""
    for group in list(getattr(dist.distributed_c10d._world, "pg_map", {})):
        with suppress(RuntimeError, AttributeError):
            break_off(group)
