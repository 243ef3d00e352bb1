"""A copy of a sharded model: the same slices, in units and an engine of its own.

Note [Copies]
The modules are copied as ever, by `copy.deepcopy`. Before that every parameter gets its copy, in a
unit that watches nothing yet, and is put into ``memo``, so whatever refers to a parameter refers to
the copy afterwards. When the modules are there, the units take their places in them. Gradients,
hooks on parameters and an open accumulation window are not copied, as torch does not.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.collectives import Comm, make_comm
from shardwise.engine.hooks import forget_hooks
from shardwise.engine.runtime import Engine
from shardwise.errors import StateError
from shardwise.trace import FullParamLedger
from shardwise.unit.encodings import OwnGather
from shardwise.unit.forms import AsShardTensor
from shardwise.unit.param import ShardedParam
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Unit

Memo = dict[int, Any]


def copy_engine(engine: Engine, memo: Memo) -> tuple[Engine, list[Unit]]:
    """Copy the units with their slices; every rank calls it.

    **Cost** the memory of the slices again; one small broadcast, one gloo group.
    """
    if engine.is_running():
        raise StateError(
            "copy.deepcopy of a sharded model inside a forward or backward pass: copy it between "
            "two passes"
        )
    engine.conditions.check_usable("copy.deepcopy: ")
    engine.finish_steps()
    comms = {id(comm): make_comm(comm.axes, comm.device) for comm in engine.comms}
    ledger = FullParamLedger()
    made = Engine(engine.config, comms[id(engine.comm)], ledger)
    memo[id(engine)] = made
    units = [_copy_unit(u, comms[id(u.comm)], made, ledger, memo) for u in engine.units]
    return made, units


def _copy_unit(unit: Unit, comm: Comm, engine: Engine, ledger: FullParamLedger, memo: Memo) -> Unit:
    made = Unit(
        unit.name,
        unit.index,
        unit.modules,
        comm,
        engine,
        unit.settings,
        unit.precision,
        unit.sums,
        home=replace(unit.home, time=comm.time, slab=None) if unit.home is not None else None,
    )
    storages: dict[int, Storage] = {}
    for storage in unit.storages:
        storages[id(storage)] = _copy_storage(storage, made, ledger)
    for param in unit.params:
        cut = param.cut.over(comm)
        trains = param.sharded.requires_grad
        form, dim = AsShardTensor(cut), param.dim
        copied = ShardedParam(made, param.uses, form, param.shape, trains, cut=cut, dim=dim)
        if isinstance(param.encoding, OwnGather):
            form.place_apart(copied, _copy_chunk(param))
            copied.lie_apart(param.encoding.again())
            copied.index = param.index
        else:
            copied.lie_in(storages[id(param.storage)], param.index)
        copied.keep_notes({k: v for k, v in vars(param.sharded).items() if not k.startswith("_")})
        made.params.append(copied)
        memo[id(param.sharded)] = copied.sharded
    known = {id(param): copied for param, copied in zip(unit.params, made.params, strict=True)}
    for rows in unit.summed_apart:
        of_copies = tuple(known[id(param)] for param in rows.params)
        made.summed_apart.append(replace(rows, params=of_copies))
    made.lay_out(list(storages.values()))
    for storage in made.storages:  # only now: the full parameters are views
        storage.free()
    return made


@torch.no_grad()
def _copy_chunk(param: ShardedParam) -> torch.Tensor:
    """Copy this rank's part of a parameter that lies in no storage, with its padding."""
    local = param.sharded._local_tensor
    copied: torch.Tensor = local.new_zeros(param.padded_size).narrow(0, 0, local.shape[0])
    return copied.copy_(local)


@torch.no_grad()
def _copy_storage(storage: Storage, unit: Unit, ledger: FullParamLedger) -> Storage:
    dtypes = storage.master.dtype, storage.full.dtype
    stage, home = unit.settings.stage, unit.home
    where = storage.full.device, ledger, home
    made = Storage(storage.layout, storage.rank, stage, dtypes, *where, storage.coding)
    made.master.copy_(storage.master)
    return made


def place_units(units: list[Unit], memo: Memo) -> None:
    """Let copied units take their places in the copied modules."""
    for unit in units:
        unit.modules = tuple(memo[id(module)] for module in unit.modules)
        params, unit.params = unit.params, []
        for param in params:
            param.uses = tuple(replace(use, module=memo[id(use.module)]) for use in param.uses)
            unit.add(param)


def forget_engine(model: nn.Module) -> None:
    """Take from a copied model what watches it."""
    for module in model.modules():
        forget_hooks(module)
