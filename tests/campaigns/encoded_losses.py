"""Hold what a model learns under encoded gathers against the same run without; a program, no test.

    python tests/campaigns/encoded_losses.py                        # three seeds, all formats
    python tests/campaigns/encoded_losses.py --choices int8 --seeds 0 --json runs/losses.jsonl

`shardwise train examples/demo.yaml` once for each choice and seed, in fp32 but for what travels;
the seed decides weights and windows. The loss is that of the run's own evaluation on held-out text
after the last of 300 steps. Goal: the mean over the seeds is within 0.5 % of fp32's for 8 bits, and
within 1 % for 4.

What sets two runs apart at all is told by "one rank" (fp32 as well, so its sums alone are rounded
in another order) and by "bf16" (computed in bf16, nothing encoded). A difference that is no larger
than that of bf16 says nothing about a format.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "examples" / "demo.yaml"
PLAIN, ONE_RANK, BF16 = "none", "one rank", "bf16"
GOALS = {"int8": 0.005, "fp8": 0.005, "int4": 0.01}

CHOICES = [ONE_RANK, BF16, *GOALS]


def train(choice: str, seed: int, args: argparse.Namespace) -> float:
    """Train the demo's model; return the loss on held-out text after the last step."""
    with tempfile.TemporaryDirectory(prefix="shardwise-losses-") as folder:
        flags = ["--steps", args.steps, "--eval-every", args.steps, "--seed", seed]
        ranks = 1 if choice == ONE_RANK else args.ranks
        flags += ["--ranks", ranks, "--output", Path(folder, "run")]
        flags += ["--gather", choice, "--gather-block", args.block] if choice in GOALS else []
        flags += ["--precision", "bf16"] if choice == BF16 else []
        flags += ["--lr", args.lr, "--min-lr", args.lr / 20] if args.lr else []
        command = [sys.executable, "-m", "shardwise", "train", str(DEMO), *map(str, flags)]
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    told = (found for found in map(json.loads, reversed(lines)) if "eval_loss" in found)
    return float(next(told)["eval_loss"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--choices", default=CHOICES, type=lambda text: text.split(","))
    parser.add_argument("--seeds", default=[0, 1, 2], type=lambda t: [*map(int, t.split(","))])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--block", type=int, default=256, help="elements that share a scale")
    parser.add_argument("--lr", type=float, help="the demo's own is 4e-3")
    parser.add_argument("--json", type=Path, help="append a line for each run to this file")
    args = parser.parse_args()
    more: dict[str, list[float]] = {choice: [] for choice in args.choices}
    for seed in args.seeds:
        plain = 0.0
        for choice in (PLAIN, *args.choices):
            loss = train(choice, seed, args)
            plain = loss if choice == PLAIN else plain
            more.setdefault(choice, []).append(loss / plain - 1)
            print(f"seed {seed} {choice:8} {loss:.4f} ({loss / plain - 1:+.2%})", flush=True)
            if args.json is not None:
                row = {"seed": seed, "choice": choice, "steps": args.steps, "eval_loss": loss}
                with args.json.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    for choice in args.choices:
        by, goal = mean(more[choice]), GOALS.get(choice)
        verdict = f": goal {goal:.1%} {'met' if abs(by) <= goal else 'missed'}" if goal else ""
        print(f"{choice:8} {by:+.2%} over {len(args.seeds)} seeds{verdict}")


if __name__ == "__main__":
    main()
