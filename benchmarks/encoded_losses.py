"""Compare what a model learns with encoded gathers and reductions with the same run without.

    python benchmarks/encoded_losses.py                                  # three seeds, all choices
    python benchmarks/encoded_losses.py --keys ""                        # the demo's whole model
    python benchmarks/encoded_losses.py --choices int8-a2a --seeds 0 --json runs/losses.jsonl

The decoder of examples/demo.yaml, made smaller by `--keys`, is trained on the demo's text once for
each choice and seed; the seed decides weights and windows. Everything is in fp32 but what travels:
"int8", "fp8" and "int4" encode gathers, "...-a2a" reductions, "int8 both" either. The loss is that
on held-out text after the last step. Goal: the mean over the seeds is within 0.5 % of fp32's for 8
bits and for bf16-a2a, and within 1 % for 4 bits.

"one rank" (sums in another order) and "bf16" (computed in bf16, nothing encoded) tell what sets two
runs apart at all: a difference that is no larger than theirs says nothing about a format.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _common as common
import _seeded_losses as seeded

common.find_shardwise()

PLAIN, ONE_RANK = "fp32", "one rank"
CHOICES: dict[str, Mapping[str, Any]] = {
    ONE_RANK: {},
    "bf16": {"precision": "bf16"},
    **{name: {"gather": name} for name in ("int8", "fp8", "int4")},
    **{f"{name}-a2a": {"reduce": f"{name}-a2a"} for name in ("bf16", "int8", "fp8", "int4")},
    "int8 both": {"gather": "int8", "reduce": "int8-a2a"},
}
GOALS = {"int4": 0.01, "int4-a2a": 0.01}  # of all others that encode
GOAL, UNMEASURED = 0.005, (ONE_RANK, "bf16")


def work(config: Mapping[str, Any]) -> None:
    """Train the model from every seed on this rank; write the losses on held-out text."""
    import torch

    from shardwise.train.checks import check_run
    from shardwise.train.config import load_config
    from shardwise.train.launch import RankPlace
    from shardwise.train.loop import compute_step, evaluate
    from shardwise.train.setup import prepare_run

    rank, ranks = config["rank"], config["num_ranks"]
    place = RankPlace(rank, ranks, rank, ranks)
    losses = []
    with common.joined_ranks(config):
        for seed in config["seeds"]:
            keys = check_run(load_config(seeded.DEMO, {**config["keys"], "seed": seed}), ranks)
            run = prepare_run(keys, place, torch.device("cpu"))
            for step in range(1, keys.steps + 1):
                compute_step(run, step)
            losses.append(evaluate(run))
    common.write_result(config, {"losses": losses})


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = seeded.parser(__doc__, CHOICES, ",")
    parser.add_argument("--block", type=int, default=256, help="elements that share a scale")
    return parser.parse_args()


def main() -> None:
    """Train with every choice and compare."""
    args = parse()
    keys = seeded.keys_of(args, gather_block=args.block)
    plain: list[float] = []
    rows = []
    for choice in (PLAIN, *args.choices):
        ranks = 1 if choice == ONE_RANK else args.ranks
        with tempfile.TemporaryDirectory(prefix="shardwise-losses-") as folder:
            mine = {**keys, **CHOICES.get(choice, {}), "ranks": ranks, "output": folder}
            case = {"keys": mine, "seeds": args.seeds}
            found = common.run_processes(Path(__file__), case, ranks, timeout_s=args.timeout)
        losses = found[0]["losses"]
        plain = plain or losses
        more, row = seeded.compare(choice, losses, plain)
        goal = GOALS.get(choice, GOAL)
        is_judged = choice not in (PLAIN, *UNMEASURED)
        rows.append([*row, common.verdict(abs(common.mean(more)), goal) if is_judged else ""])
        record = {"benchmark": "encoded_losses", "choice": choice, "seeds": args.seeds}
        record |= {"keys": keys, "eval_losses": losses, "more": more}
        common.append_json(args.json, record)
    common.print_table(["choice", "loss", "mean", "range over seeds", "goal"], rows)


if __name__ == "__main__":
    common.main(work, main)
