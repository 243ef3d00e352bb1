"""The class of ``fully_shard``'s modules: ``FSDP<Cls>``, as in torch."""

from functools import cache
from itertools import chain
from typing import Any, NoReturn

import torch

from shardwise.engine.module_methods import FSDPModule
from shardwise.layout.placements import local_of
from shardwise.tensor.inner import plain_parts
from shardwise.unit.materialize import poison


def _refuse_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


@cache
def sharded_class(cls: Any) -> Any:
    """Return ``FSDP<Cls>``, a subclass of FSDPModule and ``cls``; cached.

    Its ``to_empty`` poisons memory, so that the first forward pass finds unwritten tensors.
    """

    def to_empty(
        self: Any, *, device: torch.device | str | int | None, recurse: bool = True
    ) -> Any:
        cls.to_empty(self, device=device, recurse=recurse)
        for tensor in chain(self.parameters(recurse), self.buffers(recurse)):
            for part in plain_parts(local_of(tensor)).values():
                poison(part)
        self._get_fsdp_state().is_emptied = True
        return self

    members = {"__deepcopy__": _refuse_deepcopy, "to_empty": to_empty}
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)
