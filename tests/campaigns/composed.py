"""Hold planned peak memory of composed runs against the allocator's trace; a program, not a test.

    python tests/campaigns/composed.py [--ranks 1,2,4] [--only tp=2]

It prints a row for each combination of tensor, pipeline, context and expert degrees that fits the
ranks, with stages 1 and 3, with and without checkpointing, pipelines by either schedule, attention
over parts of sequences in each way, and for each stage of a pipeline: what
is planned by the formulas, what the allocator gave out on the fullest rank, and the error.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "plan")]

from composed_cells import ComposedCell, measure_all, predict  # noqa: E402 - see above
from ranks import run_ranks  # noqa: E402
from shardwise.errors import ConfigError  # noqa: E402

_MIB = 1 << 20
_LIMIT = 0.01
_SIZES = (1, 2, 4)


def cells_of(num_ranks):
    """Return all combinations that fit, each at two stages, with and without checkpointing."""
    found = []
    for mixed, tp, pp, cp, ep in itertools.product((False, True), *(_SIZES,) * 4):
        kinds = itertools.product((1, 3), (False, True), ("fp32", "bf16"))
        for stage, checkpointed, precision in kinds:
            if precision == "bf16" and (stage == 1 or checkpointed):
                continue
            degrees = {"tp": tp, "pp": pp, "cp": cp, "ep": ep}
            settings = {name: size for name, size in degrees.items() if size > 1}
            settings |= {"accumulation": pp + 1} if pp > 1 else {}
            settings |= {"stage": stage, "activation_checkpointing": checkpointed}
            settings |= {"precision": precision} if precision != "fp32" else {}
            for ways in _ways(settings):
                cell = ComposedCell({**settings, **ways}, mixed)
                try:
                    cell.candidate(num_ranks)
                except (ConfigError, ValueError):
                    continue  # the degrees do not fit the ranks or the model
                found.append(cell)
    return found


def _ways(settings):
    """Return how pipelines are driven and parts of sequences attend: each way once."""
    found = [{}]
    found += [{"pp_schedule": "gpipe"}] if "pp" in settings else []
    found += [{"cp_method": "heads"}, {"cp_method": "ring"}] if "cp" in settings else []
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--only", default="", help="cells whose name has this")
    args = parser.parse_args()
    errors = []
    print(f"{'ranks':>5} {'planned MiB':>12} {'traced MiB':>12} {'error':>8}  peak in  cell")
    for num_ranks in map(int, args.ranks.split(",")):
        for cell in cells_of(num_ranks):
            if args.only not in cell.name:
                continue
            measured = [found[0] for found in run_ranks(measure_all, num_ranks, [cell])]
            for stage, played in enumerate(predict(cell, num_ranks)):
                real = max(m.peak for m in measured if m.stage == stage)
                planned = played.peak.ledger.total
                errors.append(planned / real - 1)
                where = (
                    f", stage {stage} of the pipeline" if len(predict(cell, num_ranks)) > 1 else ""
                )
                print(
                    f"{num_ranks:>5} {planned / _MIB:>12.2f} {real / _MIB:>12.2f} "
                    f"{errors[-1]:>+8.2%}  {played.peak.phase:<9} {cell.name}{where}",
                    flush=True,
                )
    sizes = [abs(error) for error in errors]
    beyond = sum(size > _LIMIT for size in sizes)
    print(
        f"{len(sizes)} peaks: median error {statistics.median(sizes):.2%}, worst {max(sizes):.2%}, "
        f"{beyond} beyond {_LIMIT:.0%}"
    )


if __name__ == "__main__":
    main()
