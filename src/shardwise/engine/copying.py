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

from shardwise.comm.collectives import Comm
from shardwise.comm.control import control_over
from shardwise.engine.hooks import forget_hooks
from shardwise.engine.runtime import Engine
from shardwise.errors import StateError
from shardwise.trace import FullBytes
from shardwise.unit.cut import make_cut
from shardwise.unit.storage import Storage
from shardwise.unit.unit import Slot, Unit

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
    if engine.broken is not None:
        raise StateError(f"copy.deepcopy: the parameters are not to be used: {engine.broken}")
    axes = engine.comm.axes
    comm = Comm(axes, engine.comm.device, control_over(axes))
    comm.agree_on_number(engine.comm.device)
    ledger = FullBytes()
    made = Engine(engine.config, comm, ledger)
    memo[id(engine)] = made
    return made, [_copy_unit(unit, comm, made, ledger, memo) for unit in engine.units]


def _copy_unit(unit: Unit, comm: Comm, engine: Engine, ledger: FullBytes, memo: Memo) -> Unit:
    made = Unit(unit.name, unit.index, unit.module, comm, engine, unit.settings, unit.precision)
    storages: dict[int, Storage] = {}
    for storage in unit.storages:
        made.storages.append(_copy_storage(storage, ledger))
        storages[id(storage)] = made.storages[-1]
    for slot in unit.slots:
        layout = slot.cut.layout
        made.slots.append(
            Slot(
                made,
                slot.uses,
                storages[id(slot.storage)],
                slot.index,
                make_cut(slot.cut.shape, layout, slot.cut.index, comm),
                nn.Parameter(torch.empty(0), requires_grad=False),
                slot.param.requires_grad,
            )
        )
        param = made.slots[-1].param
        for name, value in vars(slot.param).items():  # what the user has noted on the parameter
            if not name.startswith("_"):
                vars(param).setdefault(name, value)
        memo[id(slot.param)] = param
    for copied in made.storages:  # only now: the slots' full parameters are views
        copied.free()
    return made


@torch.no_grad()
def _copy_storage(storage: Storage, ledger: FullBytes) -> Storage:
    dtypes = storage.master.dtype, storage.full.dtype
    made = Storage(storage.layout, storage.rank, storage.stage, dtypes, storage.full.device, ledger)
    made.master.copy_(storage.master)
    return made


def place_units(units: list[Unit], memo: Memo) -> None:
    """Let copied units take their places in the copied modules."""
    for unit in units:
        unit.module = memo[id(unit.module)]
        slots, unit.slots = unit.slots, []
        for slot in slots:
            slot.uses = tuple(replace(use, module=memo[id(use.module)]) for use in slot.uses)
            unit.add(slot)


def forget_engine(model: nn.Module) -> None:
    """Take from a copied model what watches it."""
    for module in model.modules():
        forget_hooks(module)
