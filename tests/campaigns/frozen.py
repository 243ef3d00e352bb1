"""Freeze ranks of restarting runs with SIGSTOP; each run must restart and end, and leave nothing.

    python tests/campaigns/frozen.py [--trials 12] [--seed S]

Every second trial is a loop of a user under torchrun, the others are `shardwise train`. Each has
two or three ranks, a limit of 6 seconds, two restarts, saves in the background or copies in memory.
One rank, also that of the store, is frozen at a moment after a step, perhaps inside a save. The
program must end with code 0, and soon; no process may be left, stopped or not, and no copy in
memory. It prints the seconds from the freeze to the end of the first attempt, and to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE / "train"))

from resumes import TINY, write_text  # noqa: E402 - found through the line above
from shardwise.checkpoint.memory import ROOT, folder_in_memory  # noqa: E402

LIMIT_S = 6
LONGEST_S = 120  # of a whole trial, on a busy machine
STEPS = 60
LOOP = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch import nn
import shardwise
dist.init_process_group("gloo")
shardwise.debug.watch({limit})
folder = Path(sys.argv[1])
model = shardwise.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=3)
optimizer = torch.optim.AdamW(model.parameters())
with shardwise.Checkpoints(folder / "saved", model, optimizer, memory_every=1) as checkpoints:
    loaded = checkpoints.load()
    for step in range(loaded.step + 1 if loaded else 1, {steps}):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.copy_to_memory(step)
        if step % 4 == 0:
            checkpoints.save(step)
        if dist.get_rank() == 0:
            with open(folder / "steps", "a") as steps:
                print(step, file=steps, flush=True)
        time.sleep(0.02)
dist.destroy_process_group()
"""


def run_trial(number, seed, folder):
    """Run a trial; return a line about it, and what was wrong or ""."""
    draw = random.Random(f"{seed}/{number}")
    num_ranks, step, delay_s = draw.choice([2, 2, 3]), draw.randint(3, 30), draw.uniform(0, 0.05)
    victim, is_torchrun = draw.randrange(num_ranks), number % 2 == 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRIAL": str(folder)}
    if is_torchrun:
        script, log = folder / "loop.py", folder / "steps"
        script.write_text(LOOP.format(limit=LIMIT_S, steps=STEPS))
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = ["-m", "torch.distributed.run", "--nproc-per-node", num_ranks, "--standalone"]
        command += ["--max-restarts", 2, script, folder]
        saved = folder / "saved"
    else:
        write_text(folder)
        how = {"save_every": draw.choice([0, 3]), "memory_every": draw.choice([1, 2])}
        flags = {
            **TINY,
            "steps": STEPS,
            "data": str(folder / "text.txt"),
            "ranks": num_ranks,
            **how,
        }
        flags |= {"output": str(folder / "run"), "schedule": "constant", "stage": 3}
        flags |= {"resume": "auto", "restarts": 2, "hang_timeout": LIMIT_S}
        Path(folder, "run.yaml").write_text(json.dumps(flags))
        command = ["-m", "shardwise", "train", folder / "run.yaml"]
        saved, log = folder / "run" / "checkpoints", folder / "run" / "metrics.jsonl"
    with Path(folder, "log").open("wb") as out:
        job = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, stdout=out, stderr=out
        )
    is_there = until(lambda: reached(log, step) or job.poll() is not None, LONGEST_S)
    time.sleep(delay_s)
    pid = rank_of(folder, victim)
    about = f"{number:3} {'torchrun' if is_torchrun else 'train':8} rank {victim} of {num_ranks}"
    if not is_there or pid is None:
        job.kill()
        return about, "the rank to freeze was not found"
    os.kill(pid, signal.SIGSTOP)
    began_s = time.monotonic()
    until(lambda: not is_alive(pid), LONGEST_S)
    dead_s = time.monotonic() - began_s
    until(lambda: job.poll() is not None, LONGEST_S)
    about += f": killed after {dead_s:.0f} s, over after {time.monotonic() - began_s:.0f} s"
    code = job.poll()
    left = [each for each, _ in processes_of(folder)]
    for each in left:
        os.kill(each, signal.SIGKILL)
    job.kill()
    job.wait()
    if code != 0:
        return about, f"exit code {code}: {Path(folder, 'log').read_text()[-3000:]}"
    if left:
        return about, f"processes are left: {left}"
    if folder_in_memory(saved, ROOT).exists():
        return about, "copies are left in memory"
    return about, ""


def reached(log, step):
    if not log.exists():
        return False
    lines = log.read_text().splitlines()
    return sum('"loss"' in line or line.isdecimal() for line in lines) >= step


def until(holds, longest_s):
    deadline = time.monotonic() + longest_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_of(folder):
    """Yield the processes of a trial, each with its environment."""
    mine = f"TRIAL={folder}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            values = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if mine in values and is_alive(int(path.parent.name)):
            yield int(path.parent.name), values


def rank_of(folder, rank):
    wanted = f"RANK={rank}".encode()
    return next((pid for pid, values in processes_of(folder) if wanted in values), None)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=12)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    failed = 0
    for number in range(asked.first, asked.first + asked.trials):
        with tempfile.TemporaryDirectory() as folder:
            about, wrong = run_trial(number, asked.seed, Path(folder))
        failed += bool(wrong)
        print(f"{about}{': FAILED: ' if wrong else ''}{wrong}", flush=True)
    print(f"{asked.trials - failed} of {asked.trials} restarted, ended and left nothing")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
