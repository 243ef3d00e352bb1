"""The check for writes to full parameters that do not change a tensor's version."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import exchange_any
from shardwise.errors import ShardError
from shardwise.parallel.parts import Model, Parts
from shardwise.unit.full_parameter import ValueWatch


@contextmanager
def check_writes(model: Model) -> Iterator[None]:
    """Check by their values that calls write no full parameter; every rank enters and leaves.

    Layers see full parameters, which are copies of the shards. A write by PyTorch changes a
    tensor's version, and is kept or refused without this check, see `docs/limits.md`. Writes
    through NumPy or DLPack arrays, through addresses (``data_ptr``) and by kernels of other
    libraries do not change it. Run one step or one evaluation inside.

    **State** none after the context. A write is not undone.

    **Cost** a copy of the full parameters of each unit during its calls, and two passes over them;
    one exchange at the end.

    **Raises** ShardError at the end, the same on all ranks, with the parameters and the ranks that
    have written them. After an exception inside, nothing is compared.

        with shardwise.check.writes(model):
            model(batch).sum().backward()
    """
    parts = Parts(model)
    parts.finish_pending_work("check.writes()")
    watches = [(unit, ValueWatch()) for unit in parts.units]
    outer = [unit.slots.watch for unit in parts.units]
    for unit, watch in watches:
        unit.slots.watch = watch
    try:
        yield
        for unit, _ in watches:
            unit.reshard()
    finally:
        for unit, watch_before in zip(parts.units, outer, strict=True):
            unit.slots.watch = watch_before
    written = "\n".join(name for _, watch in watches for name in watch.written)
    rows = exchange_any(parts.all_ranks, written.encode())
    ranks: dict[str, list[int]] = {}
    for rank, row in zip(parts.all_ranks.members or [dist.get_rank()], rows, strict=True):
        for name in row.decode().splitlines():
            ranks.setdefault(name, []).append(rank)
    if ranks:
        names = "; ".join(f"'{name}' on {name_ranks(on)}" for name, on in list(ranks.items())[:5])
        more = f" and {len(ranks) - 5} more" if len(ranks) > 5 else ""
        raise ShardError(
            f"parameters were written inside a forward pass, where no version shows it: {names}"
            f"{more}. A full parameter is a copy there, and the change is lost or differs by rank. "
            "Write p.data, or the sharded parameter between steps, or keep the value in a buffer"
        )
