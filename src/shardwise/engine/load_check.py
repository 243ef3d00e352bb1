"""``load_state_dict``: ranks compare what they are about to load.

Each rank keeps its slices of what it is given. So a load on one rank only, or of another file,
would leave a mixture of two models, without an error.
"""

from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import nn

from shardwise.engine.agreement import agree
from shardwise.engine.module_state import noted_state
from shardwise.engine.runtime import Engine
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit


def compare_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str = "", *_: Any
) -> None:
    """Compare what ranks are about to load into a sharded model, or into a part of one.

    It is torch's hook before ``load_state_dict``, of all modules; the outermost one compares.

    **Cost** a digest of whole tensors, at the speed of memory, and an exchange of 16 bytes. Sharded
    values are each rank's own, so only their names are compared.

    **Raises** ConfigError on all ranks, before anything is written, naming the first difference.
    """
    units = _units_of(module)
    engine = units[0].scheduler if units else None
    root = engine.units[0] if isinstance(engine, Engine) else units[0] if units else None
    if root is None or (prefix and module not in root.modules):
        return
    comm = root.comm
    is_gathered = isinstance(engine, Engine) and engine.suspended
    if comm.axes.num_ranks == 1 or is_gathered:
        return
    apart = {
        id(param.sharded)
        for unit in units
        for param in unit.params
        if unit.comm.axes.mesh != comm.axes.mesh
    }
    facts = []
    for name, param in module.named_parameters(remove_duplicate=False):
        value = state_dict.get(prefix + name)
        told = "of this rank's own" if id(param) in apart else _describe_value(value)
        facts.append(f"'{prefix}{name}' {told}")
    what = "load_state_dict()"
    agree(comm.control, facts, what, "Load the same file on every rank; nothing was changed")


def _units_of(module: nn.Module) -> list[Unit]:
    """Return the units of a module and of those inside of it; else the one that it is a part of."""
    states = (noted_state(inner) for inner in module.modules())
    units = {id(unit): unit for state in states if state is not None for unit in state.units}
    if not units:
        owners = (owner_of(param) for param in module.parameters())
        units = {id(o.unit): o.unit for o in owners if isinstance(o, ShardedParam)}
    return list(units.values())


def _describe_value(value: Any) -> str:
    """Return a whole tensor's shape, dtype and digest; of others only the class."""
    if type(value) not in (torch.Tensor, nn.Parameter) or value.is_meta:
        return "missing" if value is None else type(value).__name__
    data = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    digest = xxhash.xxh3_64_hexdigest(data.numpy())
    return f"{tuple(value.shape)} {value.dtype}, digest {digest}"
