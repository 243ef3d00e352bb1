"""Hold the planner's predicted peak memory against the allocator's own trace, on CPU ranks.

    python benchmarks/predicted_memory.py
    python benchmarks/predicted_memory.py --ranks 3 --models decoder,llama --precision bf16
    python benchmarks/predicted_memory.py --json runs/predicted_memory.jsonl

Target: every peak within 1 %, and the lines that the engine owns exact to the byte.

How. The built-in decoder and five models of transformers, each with 3 layers 256 wide, stages 0
to 3, with and without activation checkpointing. Measured is the second step (forward, backward,
clipping, AdamW(fused=True)) of rank 0 under the profiler, which sees every block that the
allocator gives out. Predicted is what `shardwise plan` would say: the model traced on fake tensors
and played with the engine's schedule. Bytes do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _common as common

common.find_shardwise()
sys.path.insert(0, str(common.HERE.parent / "tests" / "plan"))  # the cells, the allocator's trace

LIMIT = 0.01
_MIB = 1 << 20
_NUM_LINES = 4


def parse() -> argparse.Namespace:
    from memory_cells import MODELS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", default=",".join(MODELS), help="of " + ", ".join(MODELS))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--timeout", type=float, default=1800)
    parser.add_argument("--json", metavar="FILE", help="append the results, one line per setting")
    args = parser.parse_args()
    args.models = args.models.split(",")
    unknown = sorted(set(args.models) - set(MODELS))
    if unknown:
        parser.error(f"--models {','.join(unknown)}: expected of {', '.join(MODELS)}")
    return args


# -- one rank
def work(config: Mapping[str, Any]) -> None:
    from memory_cells import cells_of, measure_cell

    with common.joined_ranks(config):
        cells = [c for m in config["models"] for c in cells_of(m, config["precision"])]
        measured = [measure_cell(cell, config["ranks"]) for cell in cells]
        common.write_result(config, {"cells": measured})


# -- the table
def rows_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    from memory_cells import cells_of, predict

    ranks = common.run_processes(Path(__file__), vars(args), args.ranks, timeout_s=args.timeout)
    cells = [cell for model in args.models for cell in cells_of(model, args.precision)]
    rows = []
    for cell, real in zip(cells, ranks[0]["cells"], strict=True):
        counts, played = predict(cell, args.ranks)
        peak = played.peak
        rows.append(
            {
                **vars(cell),
                "num_ranks": args.ranks,
                "predicted_bytes": peak.ledger.total,
                "measured_bytes": real["peak"],
                "error": peak.ledger.total / real["peak"] - 1,
                "phase": peak.phase,
                "lines": peak.ledger.lines(),
                "not_exact": sorted(name for name in counts if counts[name] != real[name]),
            }
        )
    return rows


def print_report(rows: Sequence[Mapping[str, Any]]) -> None:
    table = []
    for row in rows:
        largest = sorted(row["lines"].items(), key=lambda line: -line[1])[:_NUM_LINES]
        table.append(
            [
                row["model"],
                str(row["stage"]),
                "full" if row["checkpointed"] else "none",
                f"{row['predicted_bytes'] / _MIB:.2f}",
                f"{row['measured_bytes'] / _MIB:.2f}",
                f"{row['error']:+.3%}",
                ", ".join(row["not_exact"]) or "all",
                row["phase"],
                ", ".join(f"{name} {size / _MIB:.1f}" for name, size in largest),
            ]
        )
    header = (
        "model|stage|checkpointing|predicted MiB|measured MiB|error|engine's lines exact|peak in"
    )
    common.print_table([*header.split("|"), "largest lines, MiB"], table)
    errors = [abs(row["error"]) for row in rows]
    wrong = sum(bool(row["not_exact"]) for row in rows)
    print(
        f"{len(rows)} settings: median error {common.median(errors):.3%}, worst {max(errors):.3%}; "
        f"target <= {LIMIT:.0%}: {common.verdict(max(errors), LIMIT)}; settings whose engine-owned "
        f"lines are not exact: {wrong}"
    )


def main() -> None:
    args = parse()
    rows = rows_of(args)
    print_report(rows)
    for row in rows:
        common.append_json(args.json, {"benchmark": "predicted_memory", **row})


if __name__ == "__main__":
    common.main(work, main)
