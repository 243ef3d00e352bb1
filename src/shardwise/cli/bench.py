"""`shardwise bench`: measure this machine with all its ranks at once, print it, write it down."""

from __future__ import annotations

import json
import os
from pathlib import Path

import typer
from pydantic import BaseModel

from shardwise import terminal
from shardwise.cli.flags import check_target, takes_keys
from shardwise.cli.tables import make_table
from shardwise.cli.train import read_place, report_errors_once
from shardwise.errors import ConfigError
from shardwise.keys import check_keys, key
from shardwise.plan.machine.calibration import Calibration, to_json, write_calibration
from shardwise.progress import share_bar
from shardwise.quantities import format_bytes
from shardwise.terminal import open_console
from shardwise.train.launch import RankPlace, launch_local_ranks


class BenchFlags(BaseModel):
    """The flags of `shardwise bench`."""

    calibrate: bool = key(False, "Run", "write a file that `shardwise plan` takes")
    ranks: int | None = key(
        None, "Run", "local ranks; unset: one per device, or per core. Not under torchrun", ge=1
    )
    threads: int | None = key(None, "Run", "CPU threads per rank; unset: cores / ranks", ge=1)
    quick: bool = key(False, "Run", "a few seconds, and rough numbers")
    output: Path = key(
        Path("shardwise-calibration.json"),
        "Output",
        "the file that --calibrate writes; its disk is measured",
    )
    json_: bool = key(False, "Output", "print the file's contents")


@takes_keys(BenchFlags)
def bench(context: typer.Context, _: object, flags: dict[str, object]) -> int:
    """Measure this machine with all its ranks at once: products, memory, collectives, disk.

    The figures hold for this number of ranks, since ranks share cores and memory. With
    --calibrate they are written to a file, for `shardwise plan --calibration`. Takes about a
    minute.
    """
    request = check_keys(BenchFlags, {}, flags, None, "bench")
    place, output = read_place(os.environ), request.output
    with report_errors_once(place):
        check_target("output", output)
        if not os.access(folder := output.parent, os.W_OK):
            raise ConfigError(f"flag --output: the folder {folder} is not writable")
        num_ranks = 1 if place is not None else request.ranks
        if num_ranks is None:
            import torch

            num_ranks = torch.accelerator.device_count() or os.cpu_count() or 1
        if num_ranks > 1:
            return launch_local_ranks(["bench", *context.meta["arguments"]], num_ranks)
        from shardwise.bench.calibrate import calibrate as measure
        from shardwise.train.setup import join_ranks

        place = place or RankPlace(0, 1, 0, 1)
        with join_ranks(place, request.threads) as device, share_bar(place.rank == 0) as progress:
            calibration = measure(device, folder, quick=request.quick, progress=progress)
        if place.rank:
            return 0
        if request.json_:
            terminal.say(json.dumps(to_json(calibration), indent=1) + "\n")
        else:
            _show(calibration)
        if request.calibrate:
            write_calibration(calibration, output)
            if not request.json_:
                terminal.say(f"wrote {output}: `shardwise plan --calibration {output}`\n")
    return 0


def _show(calibration: Calibration) -> None:
    def size(value: float, unit: str) -> str:
        return format_bytes(value) if unit == "bytes" else f"{value:.3g} FLOP"

    console, host = open_console(), calibration.host
    console.print(
        f"{host.processor}, {host.num_cores} cores, {format_bytes(host.memory_bytes)}; "
        f"{host.device}; torch {host.torch}; {calibration.num_ranks} ranks x "
        f"{calibration.threads_per_rank} threads at once, {calibration.backend}"
    )
    rows = []
    for name, curve in calibration.curves.items():
        rate = curve.peak_rate
        shown = f"{format_bytes(rate)}/s" if curve.unit == "bytes" else f"{rate / 1e9:.4g} GFLOP/s"
        ends = []
        for i in (0, -1):
            ends += [size(curve.sizes[i], curve.unit), f"{curve.seconds[i] * 1e6:,.1f} us"]
        rows.append((name, *ends, shown))
    columns = "measured", ">smallest", ">takes", ">largest", ">takes", ">best rate"
    console.print(make_table(columns, rows))
    console.print(
        f"overlap {calibration.overlap:.0%}: that much of a collective is hidden behind a "
        f"computation\neach further message {calibration.message_s * 1e6:.1f} us; the engine's "
        f"host code per unit {calibration.unit_forward_s * 1e6:.0f} us forward, "
        f"{calibration.unit_backward_s * 1e6:.0f} us backward; a checkpointed block "
        f"{calibration.checkpoint_s * 1e6:.0f} us\na process holds "
        f"{format_bytes(calibration.process_bytes)}, its device context "
        f"{format_bytes(calibration.context_bytes)}"
    )
