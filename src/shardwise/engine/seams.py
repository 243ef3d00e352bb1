"""Rooms below the core that a model may need: homes of offloaded state, other kinds of steps.

The core does not import these rooms. They are loaded by name here, if a model needs them.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Protocol

import torch

from shardwise.comm.collectives import Comm
from shardwise.homes import Offload
from shardwise.unit.home import Homes
from shardwise.unit.unit import Unit


class Activations(Protocol):
    """Keeps inputs of checkpointed blocks in host memory between forward and recomputation."""

    @property
    def host_bytes(self) -> int:
        """What they take of host memory now."""

    def open(self) -> None:
        """Begin to take inputs, at the outermost forward call."""

    def close(self) -> None:
        """End it."""


def open_homes(offload: Offload | None, device: torch.device) -> Homes | None:
    """Open what has offloaded state; None without offload. **Raises** ConfigError for folders."""
    if offload is None:
        return None
    homes: Homes = import_module("shardwise.offload.home").OffloadHomes(offload, device)
    return homes


def activations_of(
    offload: Offload | None, comm: Comm, full: Callable[[], Iterable[torch.Tensor]]
) -> Activations | None:
    """Return what keeps inputs of checkpointed blocks; None if they stay on the device.

    ``full`` returns the memory of full parameters, which is never moved.
    """
    if offload is None or offload.activations == "device":
        return None
    kind = import_module("shardwise.offload.activations").Activations
    made: Activations = kind(comm.device, comm.time, comm.tracer, full)
    return made


def attach_steppers(units: Iterable[Unit]) -> None:
    """Let optimizers step offloaded units, and matrices that have an owner, as these need it."""
    units = list(units)
    if any(unit.home is not None for unit in units):
        import_module("shardwise.step.overlap").overlap_offloaded()
    if any(param.cut.owner is not None for unit in units for param in unit.params if param.has_cut):
        import_module("shardwise.step.whole_matrices").step_matrices_whole()
