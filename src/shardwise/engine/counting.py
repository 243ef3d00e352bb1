"""``counting()``: what torch itself sends over a composed model's axes, for as long as is asked."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.comm.torch_collectives import CountedCollectives
from shardwise.engine.api import exchanges_of, traffic_of
from shardwise.engine.parts import Model, Parts, modules_of
from shardwise.mesh import Axis
from shardwise.trace import Traffic
from shardwise.unit.pieces import axes_of_mesh


@contextmanager
def counting(model: Model) -> Iterator[Traffic]:
    """Count what torch sends inside over the axes of a model, too; of a pipeline, give all stages.

    Gives counts that are filled at the end: ``sent_bytes`` and ``num_collectives`` by
    ``axis.kind``, of all that this rank has sent inside, Shardwise's collectives and torch's
    ("tp.all_gather", "pp.send"). From then on `stats` of the (first) model has torch's as well. A
    collective of ranks that are no axis of the model's mesh or of its DTensors is not counted.

    **Cost** none outside; inside, some microseconds of the host for each operation of torch, and
    modules that torch.compile has compiled run as they were written.

    **Raises** ConfigError where the model is not sharded.
    """
    parts, modules = Parts(model), modules_of(model)
    total = Traffic()
    before = [traffic_of(each) for each in modules]
    with CountedCollectives(_axes_of(parts, model), parts.comm.traffic):
        yield total
    for each, was in zip(modules, before, strict=True):
        now = traffic_of(each)
        for kind, num in (now.num_collectives - was.num_collectives).items():
            total.num_collectives[kind] += num
            total.sent_bytes[kind] += now.sent_bytes[kind] - was.sent_bytes[kind]


def _axes_of(parts: Parts, model: Model) -> list[Axis]:
    """Return the axes that a model is on, those of the user's meshes under the user's names."""
    found: list[Axis] = []
    for engine in parts.engines:
        mesh = engine.comm.axes.mesh
        whole = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
        found += axes_of_mesh(whole) if whole.mesh_dim_names else ()
    params = [param for unit in parts.units for param in unit.params]
    found += [axis for param in params for axis in param.cut.own_axes]
    found += [exchange.axis for each in modules_of(model) for exchange in exchanges_of(each)]
    return [*found, *(axis for comm in parts.comms for axis in comm.axes.all)]
