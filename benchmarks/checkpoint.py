"""Time saving, loading and staging checkpoints, beside raw files and torch's DCP, on CPU ranks.

    python benchmarks/checkpoint.py                            # what `make bench-ckpt` runs
    python benchmarks/checkpoint.py --sizes large --state-mb 1200 --rounds 7 --folder /mnt/disk

Targets (save, load, bytes, background):
    bytes on disk          at most 1.001 x the state, and 256 bytes for each box
    save                   at most 1.15 x writing the same bytes raw and syncing them
    load, verifying all    at most 1.25 x reading the same bytes raw
    beside DCP             save at least 4 x as fast on 1 MB tensors, 1.5 x on 67 MB tensors
    background save        stops training for at most 1.1 x a memory copy of the state, the first
                           save too; steps beside it at most 1.3 x as long on a machine of 2 cores;
                           the same for copies in the host's memory

How. FSDP-like state: Linear layers and Adam, fp32, of 1 MB (512 x 512) or 67 MB (4096 x 4096)
tensors, sharded at stage 3 over the ranks; DCP saves the same sizes of fully_shard. All cases of a
round run after each other in the same processes on the same folder, and take turns over the rounds;
a ratio is of medians over rounds. Each case writes, reads and removes its files before the next one
begins, so that all of them use the same pages of memory: on a virtual machine the first use of a
page may cost more than its writing. Raw writing is one file per rank in pieces of 16 MiB, then
fsync; raw reading is readinto a buffer that exists; all ranks do it at once, as they save and load.
The page cache is warm for every reader. With --cold each reader is timed once more when the kernel
has dropped its files from there, as in a resume (a virtual disk may still have a cache behind it).
CPU seconds are of this process, all threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

WIDTHS = {"small": 512, "large": 4096}
DCP_TARGET = {"small": 4.0, "large": 1.5}
SAVE_LIMIT, LOAD_LIMIT, BYTES_LIMIT, STALL_LIMIT, BESIDE_LIMIT = 1.15, 1.25, 1.001, 1.1, 1.3
_PIECE = 16 << 20
_STATE_COPIES = 3  # parameters and Adam's two moments


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="small,large", help="of small (1 MB), large (67 MB)")
    parser.add_argument("--state-mb", type=int, default=600, help="state of all ranks together")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument(
        "--parts", default="sync,background,memory", help="of sync, background, memory"
    )
    parser.add_argument("--cold", action="store_true", help="time reading from the disk too")
    parser.add_argument("--json", help="append the results to this file, one JSON line each")
    return parser.parse_args()


def main() -> None:
    options = parse()
    for size in options.sizes.split(","):
        for part in options.parts.split(","):
            folder = tempfile.mkdtemp(prefix="bench-ckpt-", dir=options.folder)
            config = {
                "part": part,
                "width": WIDTHS[size],
                "state_mb": options.state_mb,
                "rounds": options.rounds,
                "cold": options.cold,
                "folder": folder,
            }
            try:
                results = common.run_processes(
                    Path(__file__), config, options.ranks, timeout_s=1200
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            report = report_sync if part == "sync" else report_background
            report(size, options, results)
            common.append_json(options.json, {"size": size, "part": part, "ranks": results})


# -- in the ranks
def worker(config: dict[str, Any]) -> None:
    with common.joined_ranks(config):
        work = measure_sync if config["part"] == "sync" else measure_background
        common.write_result(config, work(config))


def build(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return a sharded model of Linear layers and its Adam, moments made."""
    import torch
    from torch import nn

    import shardwise

    width = config["width"]
    layer_bytes = _STATE_COPIES * 4 * width * (width + 1)
    layers = max(1, round(config["state_mb"] * 1e6 / layer_bytes))
    with torch.device("meta"):
        model: nn.Module = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    model = shardwise.shard(model, stage=3, units=[nn.Linear])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def build_dcp(config: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """Return what gives DCP's state of the same model under fully_shard."""
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    width = config["width"]
    layer_bytes = _STATE_COPIES * 4 * width * (width + 1)
    layers = max(1, round(config["state_mb"] * 1e6 / layer_bytes))
    mesh = init_device_mesh("cpu", (config["num_ranks"],))
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optim": of_optimizer}

    state()
    return state


def measure_sync(config: dict[str, Any]) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    import shardwise

    rank, folder = config["rank"], Path(config["folder"])
    model, optimizer = build(config)
    blob = state_blob(model, optimizer)
    state = build_dcp(config)
    ours, theirs, raw = folder / "ours", folder / "dcp", folder / "raw"
    into = memoryview(bytearray(len(blob)))
    cases: list[tuple[Path, str, Callable[[], object], str, Callable[[], object]]] = [
        (
            raw,
            *("raw_write", lambda: write_raw(raw / f"{rank}", blob)),
            *("raw_read", lambda: read_raw(raw / f"{rank}", into)),
        ),
        (
            ours,
            *("save", lambda: shardwise.save(ours, model, optimizer)),
            *("load", lambda: shardwise.load(ours, model, optimizer)),
        ),
        (
            theirs,
            *("dcp_save", lambda: dcp.save(state(), checkpoint_id=theirs)),
            *("dcp_load", lambda: dcp.load(state(), checkpoint_id=theirs)),
        ),
    ]
    rows: list[dict[str, float]] = []
    disk = {}
    for number in range(config["rounds"] + 1):
        row: dict[str, float] = {}
        turn = number % len(cases)
        for path, write_name, write, read_name, read in (*cases[turn:], *cases[:turn]):
            if rank == 0 and path == raw:
                raw.mkdir()
            row |= timed(write_name, write)
            row |= timed(read_name, read)
            if config["cold"]:
                if rank == 0:
                    drop_from_cache(path)
                row |= timed(f"{read_name}_cold", read)
            if rank == 0:
                disk[path.name] = bytes_in(path)
                shutil.rmtree(path)
                os.sync()
            dist.barrier()
        rows.append(row)
    boxes = sum(1 for _ in model.parameters()) * (_STATE_COPIES + 1)
    return {"rows": rows[1:], "state_bytes": len(blob), "disk": disk, "boxes": boxes}


def timed(name: str, work: Callable[[], object]) -> dict[str, float]:
    """Return wall and CPU seconds of a call that all ranks make, from the first to the last."""
    import torch.distributed as dist

    dist.barrier()
    begin, cpu_begin = time.perf_counter(), time.process_time()
    work()
    cpu_s = time.process_time() - cpu_begin
    dist.barrier()
    return {name: time.perf_counter() - begin, f"{name}_cpu": cpu_s}


def state_blob(model: Any, optimizer: Any) -> memoryview:
    """Return this rank's state in one piece of memory."""
    import torch

    tensors = [t for p in model.parameters() for t in (p, *optimizer.state[p].values())]
    flat = [getattr(t, "to_local", lambda t=t: t)().detach().reshape(-1) for t in tensors]
    return torch.cat([t.view(torch.uint8) for t in flat]).numpy().data


def write_raw(path: Path, blob: memoryview) -> None:
    with open(path, "wb", buffering=0) as file:
        for begin in range(0, len(blob), _PIECE):
            piece = blob[begin : begin + _PIECE]
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())


def read_raw(path: Path, into: memoryview) -> None:
    with open(path, "rb", buffering=0) as file:
        begin = 0
        while begin < len(into):
            begin += file.readinto(into[begin : begin + _PIECE])


def drop_from_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # what is not on the disk stays
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure_background(config: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import shardwise

    rank, folder, width = config["rank"], Path(config["folder"]), config["width"]
    model, optimizer = build(config)
    blob = torch.frombuffer(bytearray(state_blob(model, optimizer)), dtype=torch.uint8)
    into = torch.zeros_like(blob)
    in_memory = config["part"] == "memory"
    batch = torch.ones(max(1, 2**18 // width), width)

    def step() -> float:
        begin = time.perf_counter()
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begin

    alone = [step() for _ in range(7)][2:]
    rows, reload_s = [], 0.0
    options = {"keep_last": 1, "memory_every": 1 if in_memory else None}
    with shardwise.Checkpoints(folder / "run", model, optimizer, **options) as checkpoints:
        checkpoints.reserve()
        for number in range(config["rounds"]):
            row = timed("copy", lambda: into.copy_(blob))
            save = checkpoints.copy_to_memory if in_memory else checkpoints.save
            saving = save(number)
            row["stall"] = saving.stall_s
            beside = [step()]
            while not together_done(saving.done):
                beside.append(step())
            saving.wait()
            row |= {"beside": common.median(beside), "num_beside": float(len(beside))}
            row |= {"write": saving.write_s}
            alone += [step() for _ in range(3)]
            rows.append(row)
            dist.barrier()
        if in_memory:
            checkpoints.finish()
            reload_s = timed("load", checkpoints.load)["load"]
    found = {"alone": common.median(alone), "state_bytes": blob.numel(), "reload": reload_s}
    return {"rows": rows, "rank": rank} | found


def together_done(done: bool) -> bool:
    import torch
    import torch.distributed as dist

    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


# -- reports
def medians(results: Sequence[dict[str, Any]], name: str) -> float:
    """Return the median over rounds of the slowest rank."""
    rounds = zip(*[r["rows"] for r in results], strict=True)
    return common.median([max(row[name] for row in rows) for rows in rounds])


def report_sync(size: str, options: argparse.Namespace, results: Sequence[dict[str, Any]]) -> None:
    total = sum(r["state_bytes"] for r in results)
    raw_of = dict.fromkeys(("raw_write", "save", "dcp_save"), "raw_write")
    for suffix in ("", "_cold") if options.cold else ("",):
        readers = (f"{name}{suffix}" for name in ("raw_read", "load", "dcp_load"))
        raw_of |= dict.fromkeys(readers, f"raw_read{suffix}")
    names = tuple(raw_of)
    wall = {name: medians(results, name) for name in names}
    cpu = {name: medians(results, f"{name}_cpu") for name in names}
    print(
        f"\n{size}: {total / 1e6:.0f} MB of state, {options.ranks} ranks, {options.rounds} rounds"
    )
    common.print_table(
        ("case", "median", "MB/s", "CPU s per rank", "beside raw"),
        [
            (
                name,
                f"{wall[name]:.3f} s",
                f"{total / wall[name] / 1e6:.0f}",
                f"{cpu[name]:.3f}",
                f"{wall[name] / wall[raw_of[name]]:.2f}",
            )
            for name in names
        ],
    )
    disk, boxes = results[0]["disk"], sum(r["boxes"] for r in results)
    allowed = BYTES_LIMIT * total + 256 * boxes
    lines = [
        ("save / raw write", wall["save"] / wall["raw_write"], SAVE_LIMIT, True),
        ("load / raw read", wall["load"] / wall["raw_read"], LOAD_LIMIT, True),
        ("DCP save / save", wall["dcp_save"] / wall["save"], DCP_TARGET[size], False),
        ("DCP load / load", wall["dcp_load"] / wall["load"], DCP_TARGET[size], False),
        ("bytes on disk / state", disk["ours"] / total, allowed / total, True),
    ]
    if options.cold:
        ratio = wall["load_cold"] / wall["raw_read_cold"]
        lines.append(("load / raw read, cold", ratio, LOAD_LIMIT, True))
    for what, value, limit, at_most in lines:
        word = "at most" if at_most else "at least"
        print(f"{what}: {value:.4g} ({word} {limit:.4g}: {common.verdict(value, limit, at_most)})")
    print(f"DCP's bytes on disk / state: {disk['dcp'] / total:.4f}")


def report_background(
    size: str, options: argparse.Namespace, results: Sequence[dict[str, Any]]
) -> None:
    total = sum(r["state_bytes"] for r in results)
    copy, stall, beside = (medians(results, name) for name in ("copy", "stall", "beside"))
    first = max(r["rows"][0]["stall"] for r in results)
    alone = max(r["alone"] for r in results)
    print(
        f"\n{size}, in the background: {total / 1e6:.0f} MB, copy {copy * 1e3:.1f} ms, stall "
        f"{stall * 1e3:.1f} ms (first {first * 1e3:.1f}), step {alone * 1e3:.1f} ms alone, "
        f"{beside * 1e3:.1f} beside {medians(results, 'num_beside'):.0f} steps; written after "
        f"{medians(results, 'write'):.2f} s"
    )
    if reload := max(r["reload"] for r in results):
        print(f"loaded from the copy in the host's memory in {reload:.2f} s")
    for what, value, limit in (
        ("stall / memory copy", stall / copy, STALL_LIMIT),
        ("first stall / memory copy", first / copy, STALL_LIMIT),
        ("step beside / alone", beside / alone, BESIDE_LIMIT),
    ):
        print(f"{what}: {value:.3f} (at most {limit}: {common.verdict(value, limit)})")


if __name__ == "__main__":
    common.main(worker, main)
