"""Hold the planner's formula of failures against a run whose ranks are killed at random moments.

    python benchmarks/recovery.py [--steps 4000] [--mtbf-s 30] [--ranks 2] [--seed 0] [--json FILE]
    python benchmarks/recovery.py --steps 300 --no-faults 7       # what being ready costs, and
    python benchmarks/recovery.py --steps 40 --no-faults 5 --seq 1024     # with longer steps

`shardwise train` starts its ranks again and goes on from copies in memory. One run is left alone:
it gives the seconds of a step and of a copy. In the other a rank is killed, with exponentially
distributed times between; how long the way back took stands in its record, by part, and those that
no second kill interrupted are taken. The share of the time that was kept progress is compared with
`expected_goodput` of these times. With n failures the measured share is uncertain by about
1 / sqrt(n) of what failures cost.

With ``--no-faults`` nobody is killed. Runs that are ready for faults (copies in memory, a limit of
waits, restarts) and runs that are not take turns, so often; the target is 0.5 % of the time between
the ends of the first and the last step. CPU seconds are of the whole runs, start included.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from _common import append_json, find_shardwise, mean, median

find_shardwise()

from shardwise.monitor.lines import read_lines  # noqa: E402 - found above
from shardwise.plan.timing.goodput import expected_goodput  # noqa: E402

SHAPE = {
    **{"dim": 128, "layers": 4, "heads": 4, "seq": 128, "micro_batch": 2, "stage": 3},
    **{"threads": 1, "eval_windows": 0, "sample_tokens": 0, "resume": "auto", "restarts": 100_000},
}
POLL_S, TAIL_BYTES = 0.01, 1 << 12


def ranks_of(pid: int) -> list[int]:
    """Return the processes that a launcher has started and that have not ended."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def train(
    folder: Path, keys: dict[str, Any], kills: random.Random | None, mtbf_s: float
) -> tuple[float, list[int], list[dict[str, Any]]]:
    """Train; return the seconds from the first step's end to the last one's, and the run's lines.

    Also, for each kill, how many restarts were over.
    """
    folder.mkdir()
    config, lines = folder / "run.yaml", folder / "run" / "metrics.jsonl"
    config.write_text(json.dumps({**keys, "output": str(folder / "run")}))  # which is YAML too
    killed_after, began_s = list[int](), 0.0
    next_s = float("inf")
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "shardwise", "train", str(config)]
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        while not any(line["step"] == keys["steps"] for line in read_lines(lines, TAIL_BYTES)):
            now_s = time.monotonic()
            if job.poll() is not None:
                sys.exit((folder / "log").read_text()[-3000:])
            if not began_s and any(read_lines(lines, TAIL_BYTES)):
                began_s = now_s
                next_s = now_s + (kills.expovariate(1 / mtbf_s) if kills else float("inf"))
            if kills is not None and now_s >= next_s:
                victims = ranks_of(job.pid)
                if victims:
                    killed_after.append(sum("restart" in line for line in read_lines(lines)))
                    os.kill(kills.choice(victims), signal.SIGKILL)
                next_s = now_s + kills.expovariate(1 / mtbf_s)
            time.sleep(POLL_S)
        took_s = time.monotonic() - began_s
        job.wait()
    return took_s, killed_after, list(read_lines(lines))


def cpu_s_of_children() -> float:
    """Return the CPU seconds of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def cost_without_faults(folder: Path, keys: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Return the medians of seconds of both kinds of runs, and their ratios."""
    bare = {**keys, "memory_every": 0, "restarts": 0, "resume": "never"}
    cases = {"bare": bare, "ready": {**keys, "hang_timeout": 600}}
    wall: dict[str, list[float]] = {case: [] for case in cases}
    cpu: dict[str, list[float]] = {case: [] for case in cases}
    for n in range(rounds):
        for case in list(cases)[:: 1 - 2 * (n % 2)]:
            before_s = cpu_s_of_children()
            wall[case].append(train(folder / f"{case}{n}", cases[case], None, 1.0)[0])
            cpu[case].append(cpu_s_of_children() - before_s)
    found: dict[str, Any] = {"steps": keys["steps"], "rounds": rounds}
    for what, times in (("wall", wall), ("cpu", cpu)):
        found |= {f"{case}_{what}_s": median(times[case]) for case in cases}
        found[f"{what}_ratio"] = median(times["ready"]) / median(times["bare"])
        pairs = zip(times["ready"], times["bare"], strict=True)
        found[f"{what}_ratio_of_pairs"] = median([ready / bare for ready, bare in pairs])
    return found


def main() -> None:
    """Run both, and print what was measured beside what the formula says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--mtbf-s", type=float, default=30.0, help="mean seconds between kills")
    parser.add_argument("--memory-every", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seq", type=int, default=SHAPE["seq"], help="tokens of a sequence")
    parser.add_argument("--no-faults", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--json")
    asked = parser.parse_args()
    keys = {**SHAPE, "steps": asked.steps, "ranks": asked.ranks, "seed": asked.seed}
    keys |= {"seq": asked.seq, "memory_every": asked.memory_every}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if asked.no_faults:
            cost = cost_without_faults(folder, keys, asked.no_faults)
            print(json.dumps(cost, indent=1))
            append_json(asked.json, cost)
            return
        quiet_s, _, quiet = train(folder / "quiet", keys, None, asked.mtbf_s)
        took_s, killed_after, lines = train(
            folder / "killed", keys, random.Random(asked.seed), asked.mtbf_s
        )
    stalls = [line["memory_stall_s"] for line in quiet if "memory_stall_s" in line]
    step_s = (quiet_s - sum(stalls)) / (asked.steps - 1)
    restarts = [line["restart"] for line in lines if "restart" in line]
    once = [r for n, r in enumerate(restarts) if killed_after.count(n) == 1]
    if not once:
        sys.exit("no restart was left alone: give more --steps, or another --mtbf-s")
    backs = [sum(r["parts_s"].values()) - r["parts_s"]["first step"] for r in once]
    mtbf_s, back_s = took_s / len(killed_after), mean(backs)
    expected = expected_goodput(
        step_s,
        mtbf_s=mtbf_s,
        back_s=back_s,
        interval_s=asked.memory_every * step_s,
        stall_s=mean(stalls),
    )
    parts = {
        part: median([r["parts_s"].get(part, 0.0) for r in once])
        for part in dict.fromkeys(part for r in once for part in r["parts_s"])
    }
    found = {
        "steps": asked.steps,
        "step_s": step_s,
        "stall_s": mean(stalls),
        "kills": len(killed_after),
        "restarts": len(restarts),
        "restarts_after_one_kill": len(once),
        "from_memory": sum(r["from_memory"] for r in restarts),
        "mtbf_s": mtbf_s,
        "back_s": back_s,
        "parts_s": parts,
        "lost_steps": mean([r["lost_steps"] for r in restarts]),
        "expected_lost_steps": expected.num_lost_steps_per_failure,
        "kept_fraction": (asked.steps - 1) * step_s / took_s,
        "expected_kept_fraction": expected.kept_fraction,
    }
    print(json.dumps(found, indent=1))
    append_json(asked.json, found)


if __name__ == "__main__":
    main()
