"""Loading of optional packages: offloaded state, special optimizer steps, methods of modules.

The core does not import these packages. A function of this file imports one if a model needs it.
Only `codes` is imported where it is used, in `unit.storage` and `comm.collectives`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from shardwise.comm.collectives import Comm
from shardwise.homes import Offload
from shardwise.unit.home import Homes
from shardwise.unit.unit import Unit

if TYPE_CHECKING:
    from shardwise.engine.runtime import Engine


class Activations(Protocol):
    """Keeps inputs of checkpointed blocks in host memory between forward and recomputation."""

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory in use now."""

    def open(self) -> None:
        """Begin to take inputs; called at the start of the outermost forward call."""

    def close(self) -> None:
        """Stop taking inputs; called at the end of the outermost forward call."""


def open_homes(offload: Offload | None, device: torch.device) -> Homes | None:
    """Open the homes of offloaded state, or None. **Raises** ConfigError for unusable folders."""
    if offload is None:
        return None
    homes: Homes = import_module("shardwise.offload.home").OffloadHomes(offload, device)
    return homes


def activations_of(
    offload: Offload | None, comm: Comm, full: Callable[[], Iterable[torch.Tensor]]
) -> Activations | None:
    """Return the keeper of checkpointed blocks' inputs, or None if they stay on the device.

    ``full`` returns the memory of full parameters, which is never moved.
    """
    if offload is None or offload.activations == "device":
        return None
    kind = import_module("shardwise.offload.activations").ActivationOffload
    activations: Activations = kind(comm.device, comm.time, comm.tracer, full)
    return activations


def attach_steppers(units: Iterable[Unit]) -> None:
    """Load the optimizer steps that the units need.

    These are the step on plain tensors, that of offloaded units, and that of matrices of one owner.
    """
    units = list(units)
    if _is_installed("shardwise.step"):  # without it, operations on shards make the same steps
        import_module("shardwise.step.local_step").step_as_plain_tensors()
        import_module("shardwise.step.probe").find_collectives()
        import_module("shardwise.step.refused_classes").refuse_wrong_classes()
        import_module("shardwise.step.shared_draws").draw_as_one_process()
        if any(
            not param.form.finishes_reduction_on_read for unit in units for param in unit.params
        ):
            import_module("shardwise.step.stand_ins").step_on_shard_tensors()
    if any(unit.home is not None for unit in units):
        import_module("shardwise.step.overlap").overlap_offloaded()
    if any(param.cut.owner is not None for unit in units for param in unit.params if param.has_cut):
        import_module("shardwise.step.whole_matrices").step_matrices_whole()


def attach_surface(model: nn.Module, engine: "Engine", units: Sequence[Unit]) -> None:
    """Give modules with units the methods of FSDP2's, and let them be copied with their units."""
    if _is_installed("shardwise.surface"):
        import_module("shardwise.surface.model").attach(model, engine, units)


def _is_installed(package: str) -> bool:
    """Tell whether an optional package is installed; an error inside it is not hidden."""
    with suppress(ImportError):
        return bool(import_module(package))
    return False
