"""Errors for torch's wrappers, and for functions of FSDP1, that are given a sharded model."""

from collections.abc import Callable, Iterable, Mapping, Set
from functools import cache, wraps
from typing import Any

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.fsdp._fully_shard import _fully_shard as _of_torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.model import noted_state
from shardwise.engine.tree import ATTRIBUTE
from shardwise.errors import ConfigError
from shardwise.surface.state import ModuleState
from shardwise.tensor.plain_state import owner_of

_WHOLE_STATE = (
    "inside `with shardwise.gathered(model):` the state_dict() is whole, and "
    "shardwise.save(path, model, optimizer) writes a sharded checkpoint"
)
_SAVED = "call shardwise.save(path, model, optimizer) and shardwise.load(path, model, optimizer)"
FSDP1_FUNCTIONS = {
    "state_dict_type": _WHOLE_STATE,
    "set_state_dict_type": _WHOLE_STATE,
    "summon_full_params": "use `with shardwise.gathered(model):`",
    "optim_state_dict": _SAVED,
    "optim_state_dict_to_load": _SAVED,
    "full_optim_state_dict": _SAVED,
    "sharded_optim_state_dict": _SAVED,
}


@cache
def refuse_wrappers() -> None:
    """Let torch's wrappers and FSDP1's functions refuse sharded models, from now on.

    They would find nothing to do, without an error, or replace parameters that are in use.
    """
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel):
        wrapper.__init__ = _refusing_wrapper(wrapper)  # type: ignore[method-assign]
    for name, instead in FSDP1_FUNCTIONS.items():
        function = _refusing(getattr(FullyShardedDataParallel, name), instead)
        setattr(FullyShardedDataParallel, name, staticmethod(function))
    files: tuple[Any, ...] = (_fsdp_init, _of_torch)  # versions of torch call it in one of them
    for file in files:
        if hasattr(file, "_get_managed_modules"):
            file._get_managed_modules = _refusing_parts(file._get_managed_modules)


def _refusing_wrapper(wrapper: Any) -> Callable[..., None]:
    init = wrapper.__init__
    left_out = _ignored_by_ddp if wrapper is DistributedDataParallel else _ignored_by_fsdp

    @wraps(init)
    def checked(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        found = _find_sharded(module, left_out(module, kwargs))
        if found is not None:
            raise ConfigError(
                f"{wrapper.__name__}: {found} is sharded by Shardwise, which averages gradients "
                "itself. Use the model without this wrapper. If only a part is sharded, shard the "
                "whole model, or let the wrapper ignore the part (ignored_modules= of "
                "FullyShardedDataParallel, _set_params_and_buffers_to_ignore_for_model of "
                "DistributedDataParallel)"
            )
        init(self, module, *args, **kwargs)

    return checked


def _ignored_by_ddp(model: Any, _: Mapping[str, Any]) -> set[int]:
    """Return the ids of parameters that DDP leaves out: those it is told to, and frozen ones."""
    if not isinstance(model, nn.Module):
        return set()
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    return {
        id(param)
        for name, param in model.named_parameters()
        if name in names or not param.requires_grad
    }


def _ignored_by_fsdp(_: Any, options: Mapping[str, Any]) -> set[int]:
    """Return the ids of the parameters that FSDP1's options leave out."""
    ignored = [*(options.get("ignored_modules") or ()), *(options.get("ignored_states") or ())]
    params = (each.parameters() if isinstance(each, nn.Module) else (each,) for each in ignored)
    return {id(param) for group in params for param in group}


def _refusing(function: Callable[..., Any], instead: str) -> Callable[..., Any]:
    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # The parameter is called module in some versions and functions, and model in others.
        model: Any = args[0] if args else kwargs.get("module", kwargs.get("model"))
        found = _find_sharded(model)
        if found is not None and not FullyShardedDataParallel.fsdp_modules(model):
            raise ConfigError(
                f"FullyShardedDataParallel.{function.__name__}: {found} is sharded by Shardwise, "
                f"so FSDP1 finds nothing in it. Instead, {instead}"
            )
        return function(*args, **kwargs)

    return checked


def _refusing_parts(managed: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(managed)
    def checked(roots: Iterable[nn.Module], *args: Any, **kwargs: Any) -> Any:
        for root in roots:
            found = _find_sharded(root)
            if found is not None:
                raise ConfigError(
                    f"torch's fully_shard: {found} is sharded by Shardwise. Use "
                    "shardwise.fully_shard for the other modules and for the model, too"
                )
        return managed(roots, *args, **kwargs)

    return checked


def _find_sharded(model: object, ignored: Set[int] = frozenset()) -> str | None:
    """Return the words for the first part of a model that Shardwise has sharded, or None.

    Parameters with the ids ``ignored`` do not count.
    """
    if not isinstance(model, nn.Module):
        return None
    for name, param in model.named_parameters():
        if owner_of(param) is not None and id(param) not in ignored:
            return f"parameter '{name}' of this {type(model).__name__}"
    for name, module in model.named_modules():
        if not _is_marked(module):
            continue
        if not ignored or any(id(param) not in ignored for param in module.parameters()):
            return f"submodule '{name}' of this {type(model).__name__}" if name else "this model"
    return None


def _is_marked(module: nn.Module) -> bool:
    """Tell whether a module is sharded; a copy made inside of `gathered` has the mark of another's.

    Inside of `gathered` the parameters of a sharded module are plain.
    """
    state = noted_state(module)
    is_of_state = isinstance(state, ModuleState) and any(each is module for each in state.modules)
    return ATTRIBUTE in vars(module) or is_of_state
