"""Attachment of an engine to a model's modules; comparison of the state that ranks load."""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from shardwise.engine.agreement import agree
from shardwise.engine.hooks import register_hooks, register_load_check, register_wrappers
from shardwise.engine.runtime import Engine
from shardwise.engine.seams import attach_steppers, attach_surface
from shardwise.engine.tree import ATTRIBUTE
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit

# torch's pipelining reads a module's state through torch's fully_shard
_FULLY_SHARD = torch_fully_shard.__wrapped__  # type: ignore[attr-defined]


def attach_engine(model: nn.Module, engine: Engine, units: list[Unit]) -> None:
    """Attach the engine and its hooks to the model of ``units``."""
    engine.take_units(units)
    attach_steppers(units)
    vars(model)[ATTRIBUTE] = engine
    for module in (model, *register_wrappers(engine, units)):
        if callable(getattr(module, "generate", None)):
            note_managed(module)  # each rank then generates until all ranks have ended
    attach_surface(model, engine, units)
    register_load_check(model, compare_load)
    for unit in reversed(units):  # hooks are prepended: of one module's units the first runs first
        register_hooks(engine, unit)


def compare_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "", *_: object
) -> None:
    """Compare the state that ranks are about to load into a sharded model, or into a part of one.

    torch calls it before ``load_state_dict`` of each module; only the outermost module compares.

    **Cost** a digest of whole tensors, at the speed of memory, and an exchange of 16 bytes. Sharded
    values differ between ranks, so only their names are compared.

    **Raises** ConfigError on all ranks, before anything is written, naming the first difference.
    """
    units = _units_of(module)
    engine = units[0].engine if units else None
    root = engine.units[0] if isinstance(engine, Engine) else units[0] if units else None
    if root is None or (prefix and module not in root.modules):
        return
    comm = root.comm
    is_gathered = isinstance(engine, Engine) and engine.suspended
    if comm.axes.num_ranks == 1 or is_gathered:
        return
    rank_specific = {
        id(param.sharded)
        for unit in units
        for param in unit.params
        if unit.comm.axes.mesh != comm.axes.mesh
    }
    facts = []
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        is_specific = id(param) in rank_specific
        fact = "of this rank's own" if is_specific else _describe_value(value)
        facts.append(f"'{prefix}{name}' {fact}")
    remedy = "Load the same file on every rank; nothing was changed"
    agree(comm.control, facts, "load_state_dict()", remedy)


def _units_of(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of its submodules, else those that own its parameters."""
    states = (noted_state(inner) for inner in module.modules())
    units = {id(unit): unit for state in states if state is not None for unit in state.units}
    if not units:
        owners = (owner_of(param) for param in module.parameters())
        params = [owner for owner in owners if isinstance(owner, ShardedParam)]
        units = {id(param.unit): param.unit for param in params}
    return list(units.values())


def _describe_value(value: Any) -> str:
    """Return a whole tensor's shape, dtype and digest; for other values only the class."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
        return "missing" if value is None else type(value).__name__
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = xxhash.xxh3_64_hexdigest(data.numpy())
    return f"{tuple(value.shape)} {value.dtype}, digest {digest}"


# -- marks on modules
def note_managed(module: nn.Module) -> None:
    """Flag a module as FSDP does, because its forward may need all ranks.

    transformers reads the flag before it generates or drops layers. dynamo compiles a flagged
    module only if ``use_orig_params`` is set too.
    """
    module._is_fsdp_managed_module = True  # type: ignore[assignment]
    module._fsdp_use_orig_params = True  # type: ignore[assignment]


def note_state(module: nn.Module, state: object) -> None:
    """Store the sharding state on a module."""
    vars(module).setdefault(STATE_KEY, {})[_FULLY_SHARD] = state


def noted_state(module: Any) -> Any:
    """Return the sharding state of a module, or None."""
    return vars(module).get(STATE_KEY, {}).get(_FULLY_SHARD)
