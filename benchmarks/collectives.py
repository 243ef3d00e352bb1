"""Time the engine's all-gather and reduce-scatter over gloo beside torch's own collectives.

    python benchmarks/collectives.py
    python benchmarks/collectives.py --ranks 2 --mib 16,64 --dtype bf16

Target: not slower than torch at any size, and at least twice as fast at 64 MiB (this is the reason
for src/shardwise/comm/point_to_point.py; see its first note).

How. One segment of the full size (all ranks' shares together) is gathered from this rank's own
buffer, and reduced into a buffer of its own; both divide by the number of ranks (torch: AVG). The
four operations alternate in the same processes, one thread per rank; a call is timed from a barrier
to its end on the slowest rank, wait included. Reported: median wall time and CPU milliseconds per
rank, and GB/s of bytes that must be received, full x (N - 1) / N. Results are checked: gathers are
equal bit for bit, reductions too at 2 ranks, and within rounding above (sums run in other orders).
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()

OPERATIONS = ("all_gather", "reduce_scatter")
SPEEDUP = {1: 1.0, 16: 1.0, 64: 2.0}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="comma-separated numbers of ranks")
    parser.add_argument("--mib", default="1,16,64", help="comma-separated full sizes in MiB")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per row")
    args = parser.parse_args()
    args.ranks = [int(n) for n in args.ranks.split(",")]
    args.mib = [int(n) for n in args.mib.split(",")]
    return args


# -- one rank
def work(config: Mapping[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames the two collectives
    with common.joined_ranks(config), torch.no_grad():
        found = []
        for mib in config["mib"]:
            calls, outputs = _calls(mib << 20, getattr(torch, _DTYPES[config["dtype"]]))
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
            for number in range(config["warmup"] + config["repeats"]):
                for name, call in calls.items():
                    dist.barrier()
                    begin, cpu_begin = time.perf_counter(), time.process_time()
                    call()
                    spent = time.perf_counter() - begin, time.process_time() - cpu_begin
                    if number >= config["warmup"]:
                        times[name].append(spent)
            distance = {name: _distance(*pair) for name, pair in outputs.items()}
            found.append({"mib": mib, "times": times, "distance": distance})
        common.write_result(config, {"sizes": found, "torch": torch.__version__})


_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _calls(full_bytes: int, dtype: Any) -> tuple[dict[str, Callable[[], None]], dict[str, Any]]:
    """Return the four calls by name, and each operation's outputs (torch's, ours)."""
    import torch
    import torch.distributed as dist

    from shardwise.comm.collectives import Comm
    from shardwise.comm.pending import CollectiveId, GatherItem, ReduceItem
    from shardwise.layout.segments import Segment
    from shardwise.mesh import resolve_axes

    axes = resolve_axes(None, "cpu")
    comm = Comm(axes, torch.device("cpu"))
    axis = axes.shard
    numel = full_bytes // dtype.itemsize // axis.size * axis.size
    share = numel // axis.size
    generator = torch.Generator().manual_seed(axis.rank)
    source = torch.randn(share, generator=generator).to(dtype)
    grads = torch.randn(numel, generator=generator).to(dtype)
    full_theirs, full_ours = (torch.empty(numel, dtype=dtype) for _ in range(2))
    mean_theirs, mean_ours = (torch.empty(share, dtype=dtype) for _ in range(2))
    segment = Segment(numel, share, 0, 0)
    gather = [GatherItem(segment, source, full_ours, False)]
    reduce = [ReduceItem(segment, ((0, grads),), mean_ours)]
    torch_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    torch_reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def gather_ours() -> None:
        comm.start_all_gather(gather, axis, CollectiveId("all_gather", "bench", 0)).wait()

    def reduce_ours() -> None:
        collective = CollectiveId("reduce_scatter", "bench", 0)
        comm.start_reduce_scatter(reduce, axis, collective, axis.size).wait()

    calls: dict[str, Callable[[], None]] = {
        "all_gather torch": lambda: torch_gather(full_theirs, source),
        "all_gather shardwise": gather_ours,
        "reduce_scatter torch": lambda: torch_reduce(mean_theirs, grads, dist.ReduceOp.AVG),
        "reduce_scatter shardwise": reduce_ours,
    }
    outputs = {
        "all_gather": (full_theirs, full_ours),
        "reduce_scatter": (mean_theirs, mean_ours),
    }
    return calls, outputs


def _distance(theirs: Any, ours: Any) -> float:
    return float((theirs.double() - ours.double()).abs().max())


# -- all sizes and numbers of ranks
def summarize(ranks: Sequence[Mapping[str, Any]], size: int, name: str) -> tuple[float, float]:
    """Return median wall seconds of the slowest rank, and median CPU seconds per rank."""
    times = [rank["sizes"][size]["times"][name] for rank in ranks]
    slowest = [max(wall for wall, _ in call) for call in zip(*times, strict=True)]
    return common.median(slowest), common.median([cpu for each in times for _, cpu in each])


def rows_of(ranks: Sequence[Mapping[str, Any]], dtype: str) -> list[dict[str, Any]]:
    num_ranks = len(ranks)
    rows = []
    for size, measured in enumerate(ranks[0]["sizes"]):
        for operation in OPERATIONS:
            theirs = summarize(ranks, size, f"{operation} torch")
            ours = summarize(ranks, size, f"{operation} shardwise")
            received = measured["mib"] * 2**20 * (num_ranks - 1) / num_ranks
            rows.append(
                {
                    "operation": operation,
                    "ranks": num_ranks,
                    "mib": measured["mib"],
                    "dtype": dtype,
                    "torch_ms": theirs[0] * 1e3,
                    "torch_cpu_ms": theirs[1] * 1e3,
                    "shardwise_ms": ours[0] * 1e3,
                    "shardwise_cpu_ms": ours[1] * 1e3,
                    "shardwise_gb_per_s": received / ours[0] / 1e9,
                    "speedup": theirs[0] / ours[0],
                    "distance": max(r["sizes"][size]["distance"][operation] for r in ranks),
                }
            )
    return rows


def check(row: Mapping[str, Any]) -> None:
    """Stop when the results differ: a wrong answer has no speed."""
    exact = row["operation"] == "all_gather" or row["ranks"] == 2
    rounding = 1e-6 if row["dtype"] == "fp32" else 2e-2
    allowed = 0.0 if exact and row["dtype"] == "fp32" else rounding
    if not row["distance"] <= allowed:
        raise SystemExit(f"{row['operation']}: results differ by {row['distance']:.2e}: {row}")


def main() -> None:
    args = parse()
    rows = []
    for num_ranks in args.ranks:
        ranks = common.run_processes(Path(__file__), vars(args), num_ranks)
        rows += rows_of(ranks, args.dtype)
    table = []
    for row in rows:
        check(row)
        target = SPEEDUP.get(row["mib"])
        said = "-"
        if target is not None:
            said = f">= {target}: {common.verdict(row['speedup'], target, at_most=False)}"
        table.append(
            [
                row["operation"],
                *(str(row[k]) for k in ("ranks", "mib")),
                *(f"{row[k]:.2f}" for k in ("torch_ms", "torch_cpu_ms")),
                *(f"{row[k]:.2f}" for k in ("shardwise_ms", "shardwise_cpu_ms")),
                f"{row['shardwise_gb_per_s']:.2f}",
                f"{row['speedup']:.2f}",
                said,
            ]
        )
        common.append_json(args.json, {"benchmark": "collectives", **row})
    header = "operation|ranks|MiB|torch ms|CPU ms|Shardwise ms|CPU ms|GB/s|speedup|target"
    common.print_table(header.split("|"), table)


if __name__ == "__main__":
    common.main(work, main)
