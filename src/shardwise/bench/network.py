"""The measurement of collectives, the link to the host, and disks."""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from shardwise.bench.stopwatch import Stopwatch
from shardwise.comm.collectives import Comm
from shardwise.comm.pending import GatherItem, Pending, ReduceItem
from shardwise.device import host_buffer
from shardwise.layout.segments import Segment
from shardwise.mesh import DataAxes, resolve_axes
from shardwise.plan.machine.pricing import SecondsCurve

_PAYLOADS = [1 << i for i in range(12, 28, 2)]  # 4 KiB to 64 MiB
_OVERLAP_PAYLOAD = 16 << 20
_OVERLAP_MESSAGES = 8
_TIMES_LONGER = 3
_NUM_MESSAGES = 16
_MESSAGE_PAYLOAD = 8 << 20
_ITEM_BYTES = 4


def collective_seconds(
    watch: Stopwatch, axes: DataAxes, kind: str, payload: int, num_messages: int = 1
) -> float:
    """Return the seconds of one collective while nothing else runs."""
    start = collective_starter(axes, watch.device, kind, payload, num_messages)
    return watch.seconds(lambda: start().wait(), in_step=True)


def collective_starter(
    axes: DataAxes, device: torch.device, kind: str, payload: int, num_messages: int = 1
) -> Callable[[], Pending]:
    """Return a function that starts a collective along the shard axis.

    It has ``payload`` bytes in all, in equal messages.
    """
    comm, axis = Comm(axes, device), axes.shard
    share = max(1, payload // _ITEM_BYTES // axis.size // num_messages)
    segment = Segment(share * axis.size, share, 0, 0)
    full = [torch.ones(share * axis.size, device=device) for _ in range(num_messages)]
    collective = comm.collective_id(kind, "bench", 0)
    if kind == "all_gather":
        lo, hi = segment.bounds(axis.rank)
        gathers = [GatherItem(segment, f[lo:hi], f, True) for f in full]
        return lambda: comm.start_all_gather(gathers, axis, collective)
    means = [torch.ones(share, device=device) for _ in range(num_messages)]
    reduces = [ReduceItem(segment, ((0, f),), m) for f, m in zip(full, means, strict=True)]
    return lambda: comm.start_reduce_scatter(reduces, axis, collective, axis.size)


def axes_of_groups(watch: Stopwatch, group_size: int) -> DataAxes:
    """Cut the ranks into groups of neighbours; every rank calls it together."""
    device_type = watch.device.type
    if group_size == watch.num_ranks:
        return resolve_axes(None, device_type)
    shape = (watch.num_ranks // group_size, group_size)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))
    return resolve_axes(mesh, device_type)


def group_sizes(num_ranks: int) -> list[int]:
    """Return the sizes of groups to measure: the divisors of the number of ranks, from 2."""
    return [size for size in range(2, num_ranks + 1) if num_ranks % size == 0]


def collective_curves(
    watch: Stopwatch, group_size: int, sums: SecondsCurve | None
) -> dict[str, SecondsCurve]:
    """Measure both collectives of the engine by the bytes of the whole.

    ``sums`` are the seconds of this rank's sums, if the transport runs them in ``wait``. They are
    left out, since a program has them as separate operations.
    """
    axes, curves = axes_of_groups(watch, group_size), {}
    for kind in ("all_gather", "reduce_scatter"):

        def measure(payload: int, kind: str = kind) -> Sequence[float]:
            return [collective_seconds(watch, axes, kind, payload)]

        points = []
        for payload, (seconds,) in watch.sweep(_PAYLOADS, measure):
            if sums is not None and kind == "reduce_scatter":
                share_bytes = payload / group_size
                seconds = max(seconds / 10, seconds - sums.at(share_bytes * (group_size + 1)))
            points.append((float(payload), seconds))
        curves[f"{kind}.{group_size}"] = SecondsCurve.through("bytes", points)
    return curves


def message_seconds(watch: Stopwatch) -> float:
    """Return the seconds that one more message to a peer adds to a collective of as many bytes."""
    axes = axes_of_groups(watch, watch.num_ranks)
    one, many = (
        collective_seconds(watch, axes, "all_gather", _MESSAGE_PAYLOAD, count)
        for count in (1, _NUM_MESSAGES)
    )
    peers = watch.num_ranks - 1 if watch.device.type == "cpu" else 1
    return max(0.0, many - one) / (_NUM_MESSAGES - 1) / peers


def measure_overlap(watch: Stopwatch) -> float:
    """Return the share of a collective that a longer computation hides.

    1 when both together take as long as the computation, 0 when they take as long as one after the
    other, less when they take longer: then they empty each other's caches, or ranks wait for each
    other. The mean over both collectives of the engine, in as many messages as a unit has.
    """
    axes = axes_of_groups(watch, watch.num_ranks)
    left, right = (torch.ones(512, 512, device=watch.device) for _ in range(2))
    product, hidden = partial(F.linear, left, right), []
    for kind in ("all_gather", "reduce_scatter"):
        sizes = kind, _OVERLAP_PAYLOAD, _OVERLAP_MESSAGES
        start = collective_starter(axes, watch.device, *sizes)
        alone = collective_seconds(watch, axes, *sizes)
        count = max(1, round(_TIMES_LONGER * alone / watch.seconds(product, in_step=True)))

        def compute(count: int = count) -> None:
            for _ in range(count):
                product()

        def both(start: Callable[[], Pending] = start) -> None:
            pending = start()
            compute()
            pending.wait()

        computing = watch.seconds(compute, in_step=True)
        hidden.append(1 - (watch.seconds(both, in_step=True) - computing) / alone)
    return min(1.0, max(-1.0, sum(hidden) / len(hidden)))


_TRANSFERS = [1 << i for i in range(12, 29, 2)]
_FILES = [1 << i for i in range(16, 27, 2)]


def host_link_curves(watch: Stopwatch) -> dict[str, SecondsCurve]:
    """Measure copies between the device and page-locked memory; none for the CPU."""
    if watch.device.type == "cpu":
        return {}

    def measure(num_bytes: int) -> Sequence[float]:
        host = host_buffer(num_bytes, watch.device)
        on_device = torch.empty_like(host, device=watch.device)
        return [
            watch.seconds(lambda: on_device.copy_(host, non_blocking=True)),
            watch.seconds(lambda: host.copy_(on_device, non_blocking=True)),
        ]

    measured = watch.sweep(_TRANSFERS, measure)
    return {
        name: SecondsCurve.through("bytes", [(float(n), parts[part]) for n, parts in measured])
        for part, name in enumerate(("to_device", "to_host"))
    }


def disk_curves(watch: Stopwatch, folder: Path) -> dict[str, SecondsCurve]:
    """Measure writing a file, fsync included, and reading it back from the disk."""
    with tempfile.TemporaryDirectory(prefix=".shardwise-bench-", dir=folder) as inside:
        path = Path(inside, "file")

        def measure(num_bytes: int) -> Sequence[float]:
            return watch.parts(_write_and_read(watch, path, os.urandom(num_bytes)))

        measured = watch.sweep(_FILES, measure)
    return {
        name: SecondsCurve.through("bytes", [(float(n), parts[part]) for n, parts in measured])
        for part, name in enumerate(("disk_write", "disk_read"))
    }


def _write_and_read(watch: Stopwatch, path: Path, data: bytes) -> Callable[[], tuple[float, float]]:
    def work() -> tuple[float, float]:
        begin = watch.now()
        with path.open("wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        middle = watch.now()
        with path.open("rb", buffering=0) as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            unread = watch.now()
            file.read()
        return middle - begin, watch.now() - unread

    return work


def context_bytes(device: torch.device) -> int:
    """Return the bytes in use on the device outside of torch's allocator; 0 for the CPU.

    No other process may use the device.
    """
    if device.type == "cpu":
        return 0
    free, total = torch.accelerator.get_memory_info(device)
    return total - free - torch.accelerator.memory_reserved(device)
