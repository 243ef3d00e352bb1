"""The class that ``fully_shard`` gives its modules: ``FSDP<Cls>``, as torch's does."""

from typing import Any, NoReturn

from torch import nn

from shardwise.engine.module_methods import FSDPModule

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _refuse_deepcopy(self: Any, memo: Any) -> NoReturn:
    raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return ``FSDP<Cls>``, a subclass of FSDPModule and of ``cls``, the same one every time."""
    found = _CLASSES.get(cls)
    if found is None:
        made = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _refuse_deepcopy})
        found = _CLASSES.setdefault(cls, made)  # another thread may have been first
    return found
