"""Load every setting's checkpoint under every other setting, on real ranks; a program, not a test.

    python tests/campaigns/any_to_any.py [--pairs N] [--seed S] [--ranks 1,2,3,4,5,8]

Without ``--pairs`` it takes all pairs: 48 x 48 with the default ranks. It prints its seed and each
pair that fails, and ends with exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "checkpoint")]

import ranks  # noqa: E402 - found through the line above
from saving import all_settings  # noqa: E402
from test_any_to_any import load_each, save_each  # noqa: E402

CHUNK = 200  # pairs between two lines of progress


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=None, help="so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--ranks", default="1,2,3,4,5,8")
    asked = parser.parse_args()
    seed = asked.seed if asked.seed is not None else time.time_ns() % 10**9
    sizes = tuple(int(size) for size in asked.ranks.split(","))
    print(f"seed {seed}", flush=True)
    pairs = list(product(all_settings(sizes), repeat=2))
    random.Random(seed).shuffle(pairs)
    pairs = pairs[: asked.pairs]
    num_failed = 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save_each([saver for saver, _ in pairs], root)
        for begin in range(0, len(pairs), CHUNK):
            for (saver, loader), problems in load_each(pairs[begin : begin + CHUNK], root).items():
                if problems:
                    num_failed += 1
                    print(f"{saver} to {loader}:", *problems, sep="\n  ", flush=True)
            print(f"{min(begin + CHUNK, len(pairs))} of {len(pairs)}, {num_failed} failed")
    ranks.close_all()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
