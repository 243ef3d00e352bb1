"""The calibration of this machine: all measurements one by one, with all ranks at once."""

import os
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise import __version__
from shardwise.bench import kernels, network
from shardwise.bench.stopwatch import FULL, QUICK, Stopwatch
from shardwise.device import memory_in_use_bytes, name_of
from shardwise.host import processor_name, total_host_bytes
from shardwise.plan.machine.calibration import Calibration, MeasuredHost
from shardwise.plan.machine.pricing import SecondsCurve

_DTYPES = (torch.float32, torch.bfloat16)


def calibrate(
    device: torch.device,
    folder: Path,
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> Calibration:
    """Measure this machine; every rank of the process group calls it together.

    ``folder`` is on the disk to measure. ``progress`` is called with the name of each measurement
    before it begins, and the share that is done. ``quick`` is for trying it out: the numbers are
    rough.

    **Cost** at most a minute; up to 1 GiB of memory per rank and 64 MiB of disk.
    """
    num_ranks = dist.get_world_size()
    watch = Stopwatch(device, num_ranks, QUICK if quick else FULL)
    resident = memory_in_use_bytes(torch.device("cpu"))
    curves: dict[str, SecondsCurve] = {}
    jobs = _jobs(watch, folder)
    for number, (label, measure) in enumerate(jobs.items()):
        progress(label, number / len(jobs))
        curves |= measure()
    progress("engine and overlap", 1.0)
    several = num_ranks > 1
    forward_s, backward_s, checkpoint_s = kernels.host_seconds(watch)
    return Calibration(
        host=_host(device),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        backend=str(dist.get_backend()),
        num_ranks=num_ranks,
        threads_per_rank=torch.get_num_threads(),
        overlap=network.measure_overlap(watch) if several else 1.0,
        message_s=network.message_seconds(watch) if several else 0.0,
        unit_forward_s=forward_s,
        unit_backward_s=backward_s,
        checkpoint_s=checkpoint_s,
        process_bytes=resident,
        context_bytes=network.context_bytes(device),
        curves=curves,
    )


def _jobs(watch: Stopwatch, folder: Path) -> dict[str, Callable[[], dict[str, SecondsCurve]]]:
    """Return the functions that measure curves, by the names that progress shows."""
    jobs: dict[str, Callable[[], dict[str, SecondsCurve]]] = {}
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        jobs |= {
            f"matrix products, {name}": partial(kernels.matmul_curves, watch, dtype),
            f"attention, {name}": partial(kernels.attention_curves, watch, dtype),
            f"memory-bound, {name}": partial(kernels.memory_curves, watch, dtype),
        }
    jobs |= {
        "optimizer": partial(kernels.optimizer_curves, watch),
        "copies": partial(kernels.copy_curves, watch),
        "host link": partial(network.host_link_curves, watch),
        "disk": partial(network.disk_curves, watch, folder),
    }
    for size in network.group_sizes(watch.num_ranks):
        jobs[f"collectives of {size}"] = partial(_collectives, watch, size)
    return jobs


def _collectives(watch: Stopwatch, group_size: int) -> dict[str, SecondsCurve]:
    on_cpu = watch.device.type == "cpu"
    sums = kernels.sum_curve(watch) if on_cpu else None
    curves = network.collective_curves(watch, group_size, sums)
    return curves if sums is None else {**curves, "sum": sums}


def _host(device: torch.device) -> MeasuredHost:
    memory = device_memory = total_host_bytes()
    if device.type != "cpu":
        _, device_memory = torch.accelerator.get_memory_info(device)
    return MeasuredHost(
        processor=processor_name(),
        num_cores=os.cpu_count() or 1,
        memory_bytes=memory,
        device=name_of(device),
        device_memory_bytes=device_memory,
        torch=torch.__version__,
        shardwise=__version__,
    )
