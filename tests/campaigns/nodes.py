"""Preflights of three nodes with networks of their own, each with a fault drawn by seed.

    make soak CAMPAIGN=nodes TRIALS=20
    python tests/campaigns/nodes.py [--trials 10] [--seed S]

Each trial is a job of torchrun with a rank or two per node. The report must name the node with the
fault, and no other. The last line is JSON with the verdicts. It needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from networks import Networks

NUM = 3
LONGEST_S = 300
FAULTS = ("none", "slow", "closed", "name", "folder")
# What a fault must show, and the number of nodes that show it.
SHOWN = {"slow": ("links", "odd", 1), "closed": ("reachability", "failed", 2)}
SHOWN |= {"name": ("address", "failed", 1), "folder": ("shared folder", "failed", NUM)}
OF_SPEED = "speed of products", "round trip", "durable write", "links", "axis", "latency", "free"


def look(networks: Networks, per_node: int, folders: list[Path]) -> dict[str, Any]:
    """Return the report of a preflight over all nodes."""
    jobs = []
    for node in range(NUM):
        meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint={networks.addresses[0]}:29500"]
        meeting += [f"--rdzv-conf=is_host={int(not node)}", f"--local-addr=node{node}"]
        command = [sys.executable, "-m", "torch.distributed.run", *meeting, "--rdzv-id=nodes"]
        command += [f"--nnodes={NUM}", f"--nproc-per-node={per_node}", "-m", "shardwise", "doctor"]
        command += ["--preflight", "--timeout=40", f"--folder={folders[node]}", "--json"]
        jobs.append(
            subprocess.Popen(
                [*networks.within(node), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [job.communicate(timeout=LONGEST_S) for job in jobs]
    try:
        report: dict[str, Any] = json.loads(said[0][0])
    except json.JSONDecodeError:
        raise SystemExit(f"no report: {said[0]}") from None
    return report


def judge(report: dict[str, Any], fault: str, at: list[int], per_node: int) -> str:
    """Return what is wrong with a report, or nothing."""
    ranks = [node * per_node + local for node in sorted(at) for local in range(per_node)]
    seen = {c["name"]: c for c in report["checks"] if c["verdict"] != "ok"}
    name, verdict, _ = SHOWN.get(fault, ("", "", 0))
    check = seen.pop(name, {"verdict": "", "ranks": []})
    named = set(check["ranks"])
    is_right = named == set(ranks) if fault in ("closed", "name") else named <= set(ranks)
    if fault != "none" and (check["verdict"] != verdict or not named or not is_right):
        return f"{fault} at nodes {at}: found {check}, expected {verdict} at ranks {ranks}"
    if fault == "name":  # nobody reaches the first node at a loopback address
        seen.pop("reachability", None)
    left = {other for other in seen if not other.startswith(OF_SPEED)}
    return f"{fault}: {left} was found too" if left else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    counted: Counter[str] = Counter()
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for number in range(asked.trials):
        draw = random.Random(f"{asked.seed} {number}")
        fault, per_node = FAULTS[number % len(FAULTS)], draw.choice([1, 1, 2])
        with tempfile.TemporaryDirectory() as name, Networks(NUM) as networks:
            _, _, count = SHOWN.get(fault, ("", "", 0))
            # A node that is closed to the first one does not reach torchrun's store.
            at = draw.sample(range(NUM - count if fault == "closed" else 0, NUM), count)
            folders = [Path(name)] * NUM
            if fault == "slow":
                networks.slow(at[0])
            elif fault == "closed":
                networks.close(*at)
            elif fault == "name":
                networks.name(at[0], "127.0.1.1")
            elif fault == "folder":
                folders[draw.randrange(NUM)] = Path(name, "other")
            wrong = judge(look(networks, per_node, folders), fault, at, per_node)
        counted["wrong" if wrong else fault] += 1
        print(f"trial {number}: {wrong or fault}", file=sys.stderr, flush=True)
    print(json.dumps({"seed": asked.seed, "trials": asked.trials, "verdicts": counted}))
    return bool(counted["wrong"])


if __name__ == "__main__":
    sys.exit(main())
