"""Faults at random places of random loops: is every survivor told who is missing, why, and when.

    python tests/campaigns/hangs.py --cases 60 --seed 0

Prints a line for each case, and in the end: how many survivors said anything (recall), how many
named the rank and what ails it (cause), and how long after the fault, beyond the timeout, they said
so. A case that fails is run again by `--only NUMBER` of the same seed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from hangs import AXES, Case, named, run_case

# Where each fault can be: a rank that dies or stands still does so anywhere.
ANYWHERE = ("forward", "backward", "loss", "step", "save", "loader")
PLACES = {
    **dict.fromkeys(("kill", "stop", "loader", "slow", "raise"), ANYWHERE),
    "skip": ("loss", "step", "save"),
    **dict.fromkeys(("order", "shape", "dtype"), ("loss",)),
}
AT_ONCE = ("kill", "raise")  # told when they happen, not when a time is over
KILLED_S, BEYOND_S = 5.0, 2.0


def draw(seed, number):
    """Return one case; `save` is in every third step only."""
    rng = random.Random(f"{seed}/{number}")
    axis, fault = rng.choice(list(AXES)), rng.choice(list(PLACES))
    place = rng.choice(PLACES[fault])
    ranks = 3 if axis in ("data", "fully_shard") else 4
    step = rng.choice((3, 6)) if place == "save" else rng.randrange(1, 7)
    return Case(axis, fault, rng.randrange(ranks), place, rng.randrange(4), step)


def limit_of(case):
    return KILLED_S if case.fault in AT_ONCE else case.timeout_s + BEYOND_S


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    given = parser.parse_args()
    numbers = range(given.cases) if given.only is None else [given.only]
    found = []
    for number in numbers:
        case = draw(given.seed, number)
        with tempfile.TemporaryDirectory() as folder:
            ends = run_case(case, Path(folder))
        survivors = [e for e in ends if e.rank != case.rank and not died(case, e)]
        found += [(case, end) for end in survivors]
        told = " ".join(shown(case, end) for end in survivors)
        print(f"{number:3} {case.axis:11} {case.fault:6} {case.place:8} rank {case.rank} {told}")
        for end in survivors:
            if given.only is not None or not named(case, end):
                print("    " + "\n    ".join(end.text.splitlines()[-6:]))
        sys.stdout.flush()
    summarise(found)


def died(case, end):
    """Tell whether gloo has ended a rank that met one with other bytes: it cannot say anything."""
    return case.fault in ("shape", "dtype") and (end.exit_code or 0) < 0


def shown(case, end):
    said = "silent" if end.said_s is None else f"{end.said_s:.1f} s"
    over = "hangs" if end.after_s is None else f"over {end.after_s:.1f} s"
    return f"[{end.rank}: {said}, {over}{'' if named(case, end) else ', NOT NAMED'}]"


def summarise(found):
    said = [(case, end) for case, end in found if end.said_s is not None]
    right = [pair for pair in found if named(*pair)]
    late = [(c, e) for c, e in said if (e.said_s or 0.0) > limit_of(c)]
    beyond = sorted((e.said_s or 0.0) - c.timeout_s for c, e in said if c.fault not in AT_ONCE)
    killed = sorted(e.after_s or 1e9 for c, e in found if c.fault == "kill")
    print(f"survivors: {len(found)}; said why: {len(said)} ({len(said) / len(found):.1%})")
    print(f"rank and cause named: {len(right)} ({len(right) / len(found):.1%})")
    print(f"later than the timeout + {BEYOND_S:g} s, or {KILLED_S:g} s at once: {len(late)}")
    for name, times in (("said, beyond the timeout", beyond), ("ended after a kill", killed)):
        if times:
            middle = times[len(times) // 2]
            print(f"{name}: median {middle:.1f} s, longest {times[-1]:.1f} s of {len(times)}")


if __name__ == "__main__":
    main()
