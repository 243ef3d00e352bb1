"""Private names of FSDP2's objects that tools and torch's own tests read, with torch's meaning.

Nothing here changes anything: what is changed through a group of torch's has a method of
FSDPModule. Names before the first forward pass are None, as in torch.
"""

import logging
from typing import Any

import torch

_LOG = logging.getLogger("torch.distributed.fsdp.fully_shard")  # what TORCH_LOGS=+fsdp shows


def tell(event: str, unit: Any = None) -> None:
    """Log ``FSDP::<event> (<module>)`` where torch's own ``fully_shard`` does."""
    if _LOG.isEnabledFor(logging.DEBUG):
        name = unit.name if unit is not None else ""
        _LOG.debug("FSDP::%s%s", event, f" ({name})" if name else "")


class GroupView:
    """What torch's ``FSDPParamGroup`` tells, of one unit."""

    comm_ctx: Any = None  # share_comm_ctx sets it; there are no streams to share

    def __init__(self, unit: Any) -> None:
        self._unit = unit

    @property
    def _module_fqn(self) -> str | None:
        return self._unit.name if self._unit.scheduler is not None else None

    @property
    def fsdp_params(self) -> list["ParamView"]:
        """The parameters, in the order of their modules."""
        return [ParamView(param, self._unit) for param in self._unit.params]

    @property
    def is_unsharded(self) -> bool:
        """Tell whether the full parameters stand in the modules."""
        found: bool = self._unit.is_unsharded
        return found

    @property
    def is_sharded(self) -> bool:
        """Tell whether the sharded ones do."""
        return not self.is_unsharded

    def post_backward(self, *_: Any) -> None:
        """Do nothing: what ends a pipeline's step for all units reduces them."""


class ParamView:
    """What torch's ``FSDPParam`` tells, of one parameter."""

    def __init__(self, param: Any, unit: Any) -> None:
        self._param = param
        self._unit = unit

    @property
    def _param_fqn(self) -> str | None:
        return self._param.name if self._unit.scheduler is not None else None

    @property
    def sharded_param(self) -> torch.nn.Parameter:
        """The DTensor that optimizers know."""
        found: torch.nn.Parameter = self._param.sharded
        return found
