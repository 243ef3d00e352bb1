"""Memory and traffic of a sharded model on this rank, in bytes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.exchange import Exchange
from shardwise.comm.torch_collectives import CountedCollectives
from shardwise.engine.api import engine_of
from shardwise.engine.seams import Activations
from shardwise.hangs.abort import watch as watch
from shardwise.mesh import Axis
from shardwise.parallel.parts import Model, Parts, modules_of
from shardwise.step.local_step import is_elementwise
from shardwise.step.overlap import staging_bytes
from shardwise.tensor.cut import axes_of_mesh
from shardwise.tensor.elements import elements_of
from shardwise.tensor.inner import plain_parts
from shardwise.tensor.plain_state import owner_of
from shardwise.trace import Stats, Traffic
from shardwise.unit.param import ShardedParam
from shardwise.unit.unit import Unit


def stats(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Stats:
    """Return the bytes that this rank holds now and has sent.

    ``optimizer``: its state counts in ``bytes_by_place``. torch's collectives (tensor parallelism,
    stages of a pipeline) are included if they ran inside `counting`.
    """
    engine = engine_of(model)
    storages = [s for u in engine.units for s in u.storages]
    params = [s for u in engine.units for s in u.params]
    grads = [elements_of(g).nbytes for s in params if isinstance(g := s.grad, DTensor)]
    in_leaves = [getattr(s.leaf, "grad", None) for s in params]  # none before a first gather
    partials = [t for t in (*(s.gradient.partial for s in params), *in_leaves) if t is not None]
    kept = sum(s.kept_bytes for s in storages)
    traffic = traffic_of(model)
    separate = [elements_of(p.sharded) for p in params if not p.encoding.is_in_storage]
    separate_bytes = sum(part.nbytes for local in separate for part in plain_parts(local).values())
    return Stats(
        param_shard_bytes=sum(s.memory.shard_bytes for s in storages) + separate_bytes,
        param_full_bytes=kept,
        param_full_peak_bytes=max(engine.ledger.peak, kept),
        grad_shard_bytes=sum(grads) + engine.reductions.nbytes,
        grad_partial_bytes=sum(t.nbytes for t in partials),
        bytes_by_place=bytes_by_place(engine.units, optimizer, engine.activations),
        sent_bytes=dict(traffic.sent_bytes),
        num_collectives=dict(traffic.num_collectives),
    )


def traffic_of(model: nn.Module) -> Traffic:
    """Return this rank's traffic of a sharded model, over all meshes."""
    engine, total = engine_of(model), Traffic()
    here = [engine.comm.traffic, *(u.comm.traffic for u in engine.units)]
    here += [exchange.traffic for exchange in exchanges_of(model)]
    for traffic in {id(each): each for each in here}.values():
        total.sent_bytes.update(traffic.sent_bytes)
        total.num_collectives.update(traffic.num_collectives)
    return total


def exchanges_of(model: nn.Module) -> list[Exchange]:
    """Return the exchanges of activations in a model's modules."""
    attributes = (each for module in model.modules() for each in vars(module).values())
    return [each for each in attributes if isinstance(each, Exchange)]


@contextmanager
def counting(model: Model) -> Iterator[Traffic]:
    """Count torch's collectives over a model's axes too; for a pipeline, pass all stages.

    Yields counts that are filled at the end: ``sent_bytes`` and ``num_collectives`` by
    ``axis.kind``, of all that this rank has sent inside, by Shardwise and by torch
    ("tp.all_gather", "pp.send"). From then on `stats` of the (first) model has torch's too. A
    collective over other ranks than an axis of the model's mesh or DTensors is not counted.

    **Cost** none outside; inside, some microseconds of the host per torch operation, and compiled
    modules run uncompiled.

    **Raises** ConfigError if the model is not sharded.
    """
    parts, modules = Parts(model), modules_of(model)
    total = Traffic()
    before = [traffic_of(each) for each in modules]
    axes: list[Axis] = []  # axes of the user's meshes keep the user's names
    for engine in parts.engines:
        mesh = engine.comm.axes.mesh
        whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        axes += axes_of_mesh(whole) if whole.mesh_dim_names else ()
    axes += [axis for unit in parts.units for p in unit.params for axis in p.cut.outer_axes]
    axes += [exchange.axis for each in modules for exchange in exchanges_of(each)]
    axes += [axis for comm in parts.comms for axis in comm.axes.all]
    with CountedCollectives(axes, parts.comm.traffic):
        yield total
    for each, was in zip(modules, before, strict=True):
        now = traffic_of(each)
        for kind, num in (now.num_collectives - was.num_collectives).items():
            total.num_collectives[kind] += num
            total.sent_bytes[kind] += now.sent_bytes[kind] - was.sent_bytes[kind]


def bytes_by_place(
    units: Iterable[Unit],
    optimizer: torch.optim.Optimizer | None = None,
    activations: Activations | None = None,
) -> dict[str, int]:
    """Return bytes by "device", "host" and "files": slices, their copies, means, full parameters.

    ``optimizer`` adds its state, ``activations`` their host memory. Without offload, all state is
    on the device.
    """
    found: Counter[str] = Counter()
    if activations is not None:
        found["host"] += activations.host_bytes
    for unit in units:
        for storage in unit.storages:
            found[place_of(unit, "params")] += storage.memory.shard_bytes
            found["device"] += storage.memory.copy_bytes + storage.kept_bytes
            found["host"] += storage.mean_memory.bytes_at_home
        for param in unit.params:
            if not param.encoding.is_in_storage:
                found[place_of(unit)] += elements_of(param.sharded).nbytes
            if isinstance(param.grad, DTensor):
                grad = elements_of(param.grad)
                if not param.has_storage or not param.storage.mean_memory.has_at_home(grad):
                    found[place_of(unit, "grads")] += grad.nbytes
    for each, state in () if optimizer is None else optimizer.state.items():
        owner = owner_of(each)
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local = elements_of(value) if isinstance(value, DTensor) else value
                found[place_of_state(optimizer, owner, value)] += local.nbytes
    found["device"] += staging_bytes(optimizer)
    return dict(+found)


def place_of(unit: Unit, kind: Literal["params", "grads", "optimizer"] | None = None) -> str:
    """Return the place of a kind of a unit's state; None is state that is never in files."""
    if unit.home is None:
        return "device"
    return "host" if kind is None or getattr(unit.home.files, kind) is None else "files"


def place_of_state(
    optimizer: torch.optim.Optimizer | None, owner: ShardedParam | None, value: torch.Tensor
) -> str:
    """Return the place of a tensor of the optimizer's state of the parameter ``owner``."""
    if owner is None:
        return "device"
    in_files = False
    if value.ndim and optimizer is not None:  # a count of steps stays in memory
        param, parts = owner.sharded, getattr(optimizer, "optimizers", (optimizer,))
        for each in parts:  # of several in one, that of the parameter
            if len(parts) == 1 or any(param is p for g in each.param_groups for p in g["params"]):
                in_files = is_elementwise(each)
                break
    return place_of(owner.unit, "optimizer" if in_files else None)
