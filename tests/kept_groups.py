"""Process groups that outlive a call on ranks, for the calls that follow.

A group of gloo takes 20 ms to open and as long to close, each with three threads, and most calls
open the same ones: the mesh's, and a control group. `install()` lets a rank keep the groups of a
call for the next. Nothing is under way on them then: a pool in which a call failed is not used
again (`ranks`).

All ranks must take the same groups, so what is kept depends on nothing but what all have opened:
groups over the whole world, and those that torch opens on all ranks alike (`dist.new_group`).

`share_device()` gives all groups of a rank one thread that waits for the network, not one each:
it wakes a hundred times a second, idle or not, and many idle ranks stay open.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from shardwise import axes
from shardwise.comm import control
from shardwise.comm.process_groups import FAILED_GROUPS

KEPT = 4  # so many groups stay open between calls


@dataclass(slots=True)
class KeptGroups:
    """Groups by what they were opened with: those in use, and those left by earlier calls."""

    in_use: list[tuple[Hashable, Any]] = field(default_factory=list)
    free: list[tuple[Hashable, Any]] = field(default_factory=list)  # the oldest first

    def take(self, key, opened):
        """Return a group that an earlier call has left, or a new one."""
        for place, (known, _) in enumerate(self.free):
            if known == key:
                self.in_use.append(self.free.pop(place))
                break
        else:
            self.in_use.append((key, opened()))
        return self.in_use[-1][1]

    def give_back(self):
        """End a call: keep its groups, close the oldest; tell whether any was closed."""
        axes._MESHES.clear()  # which hold groups that may be closed here
        for key, group in self.in_use:  # a call that closes a group by itself needs fresh ranks
            is_torchs = isinstance(group, dist.ProcessGroup)
            assert not is_torchs or group in distributed_c10d._world.pg_map, key
        self.free += [each for each in self.in_use if FAILED_GROUPS.reason(each[1]) is None]
        self.in_use = []
        surplus, self.free = self.free[:-KEPT], self.free[-KEPT:]
        kept = {id(group) for _, group in self.free}
        others = [group for group in distributed_c10d._world.pg_map if id(group) not in kept]
        for group in others:
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        return bool(surplus) or len(others) > 1


def share_device():
    """Open this process's groups of gloo on one device from now on; on theirs, where torch's API
    does not say how.
    """
    gloo = dist.ProcessGroupGloo
    if not hasattr(gloo, "_Options") or not hasattr(gloo._Options(), "_devices"):
        return
    device = gloo.create_device(interface="lo")

    class OnOneDevice(gloo):
        def __init__(self, store, rank, size, timeout, **others):
            options = gloo._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    for home in (dist, distributed_c10d):
        home.ProcessGroupGloo = OnOneDevice


def install():
    """Let this process take groups of earlier calls before it opens new ones."""
    groups = KeptGroups()
    new_group, open_group = distributed_c10d.new_group, control.open_group

    def kept_new_group(
        ranks=None,
        timeout=None,
        backend=None,
        pg_options=None,
        use_local_synchronization=False,
        group_desc=None,
        **others,
    ):
        def opened():
            return new_group(
                ranks,
                timeout,
                backend,
                pg_options,
                use_local_synchronization,
                group_desc,
                **others,
            )

        if use_local_synchronization or pg_options is not None or others or backend == "fake":
            return opened()
        members = None if ranks is None else tuple(ranks)
        return groups.take((members, timeout, backend, group_desc), opened)

    def kept_open_group(store, ranks, timeout):
        if len(ranks) < dist.get_world_size():
            return open_group(store, ranks, timeout)
        return groups.take(
            ("control", tuple(ranks), timeout), lambda: open_group(store, ranks, timeout)
        )

    for home in (dist, distributed_c10d, device_mesh):
        home.new_group = kept_new_group
    control.open_group = kept_open_group
    return groups
