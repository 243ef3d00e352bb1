"""Try torch's functions on sharded tensors and on whole ones: `make soak CAMPAIGN=operations`.

Each cell is a call (`tests/test_shard_tensor_sweep.py` has the calls) on a kind of tensor, a stage,
a layout and a number of ranks; ranks without elements are among them. A cell is right, refused with
an error of Shardwise, refused in torch's words, or wrong. Wrong cells are listed, and the exit
status is 1.

    python tests/campaigns/operations.py --trials 200 --seed 3     # as many calls for each setting
    python tests/campaigns/operations.py --trials 0                # all calls
"""

import argparse
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent / "src"), str(TESTS)]

import test_shard_tensor_sweep as functions  # noqa: E402
from ranks import run_ranks  # noqa: E402

SETTINGS = [
    *itertools.product((0, 1), ("rows",), (2, 3)),
    *itertools.product((3,), ("rows", "flat", "matrices"), (1, 2, 3, 4)),
]
KINDS = tuple(itertools.product(("parameter", "gradient"), (False, True)))
CELLS = ("right", "refused", "raw error", "wrong")


def main() -> int:
    """Run the campaign and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=200, help="calls of each setting; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    calls = functions.calls_that_work_on_plain_tensors()
    rng = random.Random(options.seed)
    table: dict[tuple[object, ...], Counter[str]] = {}
    wrong: list[str] = []
    for (stage, layout, size), (what, grads) in itertools.product(SETTINGS, KINDS):
        trials = sorted(rng.sample(calls, options.trials)) if options.trials else calls
        ranks = run_ranks(functions.sweep, size, layout, what, grads, trials, stage)
        offenders = sorted({line for rank in ranks for line in rank[0]})
        setting = f"stage {stage}, {layout}, {size} ranks, {what}, grad mode {grads}"
        wrong += [f"{setting}: {line}" for line in offenders]
        cells = table.setdefault((stage, layout, what), Counter())
        cells.update(ranks[0][1])
        print(f"{setting}: {dict(ranks[0][1])}", flush=True)
        for line in (*offenders, *ranks[0][2]):
            print(f"    {line}", flush=True)
    print("\n| stage, layout | tensor | right | refused | raw error | wrong |")
    print("|---|---|--:|--:|--:|--:|")
    for (stage, layout, what), cells in sorted(table.items()):
        counts = " | ".join(str(cells[kind]) for kind in CELLS)
        print(f"| {stage}, {layout} | {what} | {counts} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
