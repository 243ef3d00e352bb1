"""Check of host memory for offloaded state, before any state is moved."""

import hashlib
import logging
import os
import socket
import struct
from collections.abc import Sequence

import torch

from shardwise.comm.control import Control
from shardwise.config import ShardConfig
from shardwise.errors import ConfigError
from shardwise.homes import folders_of
from shardwise.host import available_host_bytes
from shardwise.layout.placements import local_of
from shardwise.layout.units import ParamSpec, UnitSpec
from shardwise.mesh import Axis
from shardwise.quantities import format_bytes
from shardwise.unit.materialize import first_away

_LOG = logging.getLogger("shardwise")
_ROW = struct.Struct("<16sQQ")  # host, bytes that the rank needs, bytes free
HOST_ROW_BYTES = _ROW.size


def host_row(specs: Sequence[UnitSpec], config: ShardConfig, axis: Axis) -> bytes:
    """Return this rank's host, the memory that it needs there and the free memory, in 32 bytes."""
    host = hashlib.blake2b(socket.gethostname().encode(), digest_size=16).digest()
    away = config.state_offload is not None
    free = available_host_bytes() if away else 0
    return _ROW.pack(host, bytes_in_host_memory(specs, config, axis), free)


def check_host_room(control: Control, config: ShardConfig, packed: Sequence[bytes]) -> None:
    """Check that each host has memory for its ranks' offloaded state, from all `host_row` values.

    Counts slices and reduced gradients; the optimizer's state is not known yet. Warns on rank 0 if
    the step would use one thread although each rank has several cores.

    **Raises** ConfigError, the same on all ranks, with the needed and free bytes and the remedies.
    """
    if config.state_offload is None:
        return
    rows = [_ROW.unpack(row) for row in packed]
    host = rows[control.rank][0]
    for other in dict.fromkeys(row[0] for row in rows):
        ranks = [rank for rank, row in enumerate(rows) if row[0] == other]
        total, free = sum(rows[rank][1] for rank in ranks), min(rows[rank][2] for rank in ranks)
        if total > free:
            first = control.members[ranks[0]] if control.members else 0
            raise ConfigError(
                f"offload: the {len(ranks)} ranks on the host of rank {first} "
                f"need {format_bytes(total)} of its memory for slices and gradients, and "
                f"{format_bytes(free)} are free there. Use more hosts, offload less (fraction=), "
                "or let them rest in files (params= and grads='nvme:FOLDER')"
            )
    cores = len(os.sched_getaffinity(0)) // sum(row[0] == host for row in rows)
    is_on_host = config.state_offload.step_on == "host"
    if is_on_host and torch.get_num_threads() == 1 < cores and control.rank == 0:
        _LOG.warning(
            "the optimizer steps on the host, with 1 thread where each rank has %d cores: call "
            "torch.set_num_threads(), or shardwise.overlap(optimizer, threads=%d)",
            *(cores, cores),
        )


def bytes_in_host_memory(specs: Sequence[UnitSpec], config: ShardConfig, axis: Axis) -> int:
    """Return the bytes of this rank's slices and reduced gradients on the host, without padding."""
    offload = config.state_offload
    if offload is None:
        return 0
    slices_are_there = not folders_of(offload.params)
    means_are_there = not folders_of(offload.grads)
    ranks = axis.size if config.stage.shards_state else 1
    total = 0
    for spec in specs[first_away(specs, config) :]:
        for param in spec.params:
            copies = slices_are_there + (means_are_there and param.param.requires_grad)
            numel = local_of(param.param).numel()
            share = -(-numel // ranks)
            if param.owner is not None and ranks > 1:
                share = numel if param.owner == axis.rank else 0
            total += copies * share * _master_bytes(param, config)
    return total


def _master_bytes(spec: ParamSpec, config: ShardConfig) -> int:
    own, master = spec.param.dtype, config.precision.master
    is_cast = master is not None and spec.param.requires_grad and own.is_floating_point
    return (master or own).itemsize if is_cast else own.itemsize
