"""Kill runs that restart by themselves, again and again; every curve must be that of a quiet run.

    make soak CAMPAIGN=restart TRIALS=500
    python tests/campaigns/restart.py [--trials 20] [--seed S]

A trial draws a setting of tests/train/test_resume.py, how often the run saves to disk and copies to
memory, and one to three kills. Each takes one rank, all ranks (a host whose memory stays), the
launcher too or alone (then the run is started again by hand), or is a SIGTERM, at a moment after a
step's line: in the next step, in a save, in a copy; or soon after the kill before, in the recovery
itself. Each loss and gradient norm must have the bits of the run that nobody killed, and nothing
may be left: no process and no copy in memory. It counts the kills that hit a run, and the loads
from memory and from disk; without one from memory in all of it, it fails. A trial that fails prints
what replays it; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "train")]

import ranks  # noqa: E402 - found through the line above
from programs import is_running, start_program  # noqa: E402
from resumes import TINY, curve_of, train, write_text  # noqa: E402
from shardwise.checkpoint.memory import ROOT, folder_in_memory  # noqa: E402

STEPS = 40
LATEST_S = 0.05  # a kill's moment after the step's line
IN_RECOVERY_S = 1.5  # or after the kill before
WHOM = ("a rank", "all ranks", "all ranks", "launcher", "launcher alone", "SIGTERM")
SETTINGS = [
    (1, {"stage": 0, "precision": "fp32"}),
    (2, {"stage": 3, "precision": "bf16"}),
    (2, {"stage": 1, "precision": "bf16", "layout": "flat", "tied_head": True}),
    (2, {"stage": 3, "precision": "fp32", "optimizer_options": {"moments": "bf16"}}),
    (3, {"stage": 3, "precision": "fp32", "activation_checkpointing": True}),
    (3, {"stage": 2, "precision": "fp32", "layout": "flat", "reduce_every": "step"}),
]


@dataclass(frozen=True)
class Trial:
    """One run and its kills: (whom, after which step or None for in the recovery, seconds)."""

    setting: int
    save_every: int
    memory_every: int
    kills: tuple[tuple[str, int | None, float], ...]

    @classmethod
    def drawn(cls, seed, number):
        draw = random.Random(f"{seed} {number}")
        setting = draw.randrange(len(SETTINGS))
        memory_every, save_every = draw.choice([(1, 0), (1, 3), (2, 0), (2, 5), (3, 2), (0, 1)])
        kills, step = [], 1
        for number in range(draw.choice([1, 1, 2, 3])):
            whom = draw.choice(WHOM)
            if number and draw.random() < 0.4:
                kills.append((whom, None, draw.uniform(0, IN_RECOVERY_S)))
            else:
                step = draw.randint(step, STEPS - 10)
                kills.append((whom, step, draw.uniform(0, LATEST_S)))
        return cls(setting, save_every, memory_every, tuple(kills))


@cache
def quiet_curve(setting, folder):
    """Return the curve of a setting's run that nobody kills."""
    world_size, flags = SETTINGS[setting]
    output = folder / f"quiet{setting}"
    shape = {"data": folder / "text.txt", "steps": STEPS, "dropout": 0.1, **flags}
    ranks.run_ranks(train, world_size, {**shape, "output": output, "schedule": "constant"})
    return curve_of(output)


def run_trial(trial, folder, output, counted):
    """Run a trial; return what was wrong, or ""."""
    world_size, flags = SETTINGS[trial.setting]
    output.mkdir()
    flags = {**TINY, "steps": STEPS, "dropout": 0.1, "schedule": "constant", **flags}
    flags |= {"data": folder / "text.txt", "output": output / "run", "ranks": world_size}
    flags |= {"save_every": trial.save_every, "memory_every": trial.memory_every}
    flags |= {"resume": "auto", "restarts": 20}
    config = output / "run.yaml"
    paths = {key: str(flags[key]) for key in ("data", "output")}
    config.write_text(json.dumps({**flags, **paths}))  # which is YAML, too

    def start():
        return start_program(output, "shardwise", "train", config, launches=True)

    job, seen, lines = start(), set(), output / "run" / "metrics.jsonl"
    for whom, step, after_s in trial.kills:
        until(job, lambda step=step: step is None or reached(lines, step))
        time.sleep(after_s)
        if not job.process.is_alive():
            break  # it was faster
        counted["kills"] += 1
        pids = []
        with suppress(FileNotFoundError):
            pids = job.ranks
        seen.update(pids)
        victims = {"a rank": pids[:1], "launcher alone": [], "SIGTERM": []}.get(whom, pids)
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if whom not in ("a rank", "all ranks") or world_size == 1:  # one rank launches nothing
            with suppress(ProcessLookupError):
                os.kill(job.pid, signal.SIGTERM if whom == "SIGTERM" else signal.SIGKILL)
            job.finish()
            while any(map(is_running, seen)):  # they save, and end
                time.sleep(0.01)
            job = start()
    with suppress(FileNotFoundError):  # it has ended
        seen.update(job.ranks)
    code, out, err = job.finish()
    for line in re.findall(r"^going on from step .*$", out, re.MULTILINE):
        counted["loads from memory" if "(a copy in memory)" in line else "loads from disk"] += 1
    if code:
        return f"exit code {code}: {err[-3000:]}"
    if curve_of(output / "run") != quiet_curve(trial.setting, folder):
        return "the curve is not that of the quiet run"
    if left := [pid for pid in seen if is_running(pid)]:
        return f"processes are left: {left}"
    if folder_in_memory(output / "run" / "checkpoints", ROOT).exists():
        return "copies are left in memory"
    return ""


def reached(lines, step):
    """Tell whether the run has written the line of a step; it may be past it already."""
    with suppress(FileNotFoundError):
        return any(f'"step": {n}, "loss"' in lines.read_text() for n in range(step, STEPS + 1))
    return False


def until(job, holds):
    deadline = time.monotonic() + ranks.HANG_S
    while not holds() and job.process.is_alive():
        assert time.monotonic() < deadline, "the step never came"
        time.sleep(0.002)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    verdicts = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder)
        for number in range(asked.first, asked.first + asked.trials):
            trial = Trial.drawn(asked.seed, number)
            wrong = run_trial(trial, folder, folder / str(number), verdicts)
            verdicts["failed" if wrong else "to the bit"] += 1
            if wrong:
                print(f"FAILED: --seed {asked.seed} --first {number} --trials 1\n{trial}\n{wrong}")
            elif number % 25 == 24:
                print(f"{number + 1} trials: {dict(verdicts)}", flush=True)
    ranks.close_all()
    print(json.dumps({"seed": asked.seed, "trials": asked.trials, "verdicts": verdicts}))
    return 1 if verdicts["failed"] or not verdicts["loads from memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
