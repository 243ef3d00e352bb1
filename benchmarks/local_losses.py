"""Compare what replicas learn that are synchronised every few steps with synchronous steps.

    python benchmarks/local_losses.py                                # three seeds, all choices
    python benchmarks/local_losses.py --choices "average 10" --seeds 0 --json runs/local.jsonl

The decoder of examples/demo.yaml, made smaller by `--keys`, is trained on the demo's text once for
each choice and seed, on as many replicas as ranks (stage 3, so each rank is a replica with one
shard). The seed decides weights and windows. "sent" are the bytes of a rank over the replicate axis
in one step, on average; the loss is that on held-out text after the last step and a synchronisation
of all units. There is no goal: the table tells what a choice costs.

"other sum" is the synchronous run with one rank and as many windows in a step: sums in another
order. A difference that is no larger than its own says nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import _common as common
import _seeded_losses as seeded

common.find_shardwise()

SYNCHRONOUS, ONE_RANK = "synchronous", "other sum"
NESTEROV = {"outer": "nesterov"}
CHOICES: dict[str, Mapping[str, Any]] = {
    ONE_RANK: {},
    **{f"average {every}": {"every": every} for every in (10, 50)},
    **{f"nesterov {every}": {"every": every, **NESTEROV} for every in (10, 50, 100)},
    **{
        f"nesterov {every}, momentum {momentum}": {"every": every, "momentum": momentum, **NESTEROV}
        for every, momentum in ((10, 0.5), (50, 0.5), (50, 0.0))
    },
    "nesterov 50, 3 streams": {"every": 50, "streams": 3, **NESTEROV},
    "nesterov 50, int8 sent": {"every": 50, "send": "int8", **NESTEROV},
    "nesterov 50, int8 both": {"every": 50, "send": "int8", "state": "int8", **NESTEROV},
}


def work(config: Mapping[str, Any]) -> None:
    """Train the model from every seed on this rank; write the losses and the bytes of a step."""
    import torch

    from shardwise.train.checks import check_run
    from shardwise.train.config import load_config
    from shardwise.train.launch import RankPlace
    from shardwise.train.loop import compute_step, evaluate, synchronize
    from shardwise.train.setup import make_local_steps, prepare_run

    rank, ranks = config["rank"], config["num_ranks"]
    place = RankPlace(rank, ranks, rank, ranks)
    losses, sent = [], 0.0
    with common.joined_ranks(config):
        for seed in config["seeds"]:
            apart = check_run(load_config(seeded.DEMO, {**config["keys"], "seed": seed}), ranks)
            keys = apart.model_copy(update={"local_steps": None})
            run = prepare_run(keys, place, torch.device("cpu"))
            for step in range(1, keys.steps + 1):
                if step == config.get("begin", 0) + 1:
                    run = replace(run, local=make_local_steps(apart, run.model))
                    before = sent_over_replicas(run.model)
                compute_step(run, step)
                synchronize(run, step)
            sent = (sent_over_replicas(run.model) - before) / (keys.steps - config.get("begin", 0))
            losses.append(evaluate(run))
    common.write_result(config, {"losses": losses, "sent": sent})


def sent_over_replicas(model: Any) -> int:
    """Return the bytes that this rank has sent to other replicas."""
    import shardwise

    of_kinds = shardwise.debug.stats(model).sent_bytes
    return sum(sent for kind, sent in of_kinds.items() if kind.startswith("replicate."))


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = seeded.parser(__doc__, CHOICES, ";")
    parser.add_argument("--begin", type=int, default=0, help="synchronous steps before")
    return parser.parse_args()


def main() -> None:
    """Train with every choice and compare."""
    args = parse()
    keys = seeded.keys_of(args)
    exact: list[float] = []
    rows = []
    for choice in (SYNCHRONOUS, *args.choices):
        is_one = choice == ONE_RANK
        ranks = 1 if is_one else args.ranks
        mine = {**keys, "ranks": ranks}
        mine |= {"accumulation": args.ranks} if is_one else {"dp_replicate": ranks}
        mine |= {"local_steps": CHOICES[choice]} if CHOICES.get(choice) else {}
        with tempfile.TemporaryDirectory(prefix="shardwise-local-") as folder:
            case = {"keys": {**mine, "output": folder}, "seeds": args.seeds, "begin": args.begin}
            found = common.run_processes(Path(__file__), case, ranks, timeout_s=args.timeout)
        losses, sent = found[0]["losses"], found[0]["sent"]
        exact = exact or losses
        more, row = seeded.compare(choice, losses, exact)
        rows.append([*row, f"{sent:,.0f}"])
        record = {"benchmark": "local_losses", "choice": choice, "seeds": args.seeds}
        record |= {
            "keys": keys,
            "begin": args.begin,
            "eval_losses": losses,
            "more": more,
            "sent_bytes": sent,
        }
        common.append_json(args.json, record)
    common.print_table(["choice", "loss", "mean", "range over seeds", "sent in a step"], rows)


if __name__ == "__main__":
    common.main(work, main)
