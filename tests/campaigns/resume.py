"""Kill a training run in every step and at random moments, and resume it; a program, not a test.

    python tests/campaigns/resume.py [--settings 0,3] [--steps 30] [--random] [--seed S]

The settings are those of tests/train/test_resume.py. In each step k all ranks, or one rank and then
the others, get SIGKILL: in the middle of the step, or with ``--random`` at a moment after it, when
a checkpoint may be half written. The run goes on with `resume: auto` in new processes, and every
loss and gradient norm must have the bits of a run that nobody killed. It prints its seed and each
step that fails, and ends with exit code 1 if one did.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "train")]

import ranks  # noqa: E402 - found through the line above
from resumes import CountsSteps, curve_of, train, write_text  # noqa: E402
from test_resume import SETTINGS  # noqa: E402

WAIT_S = ranks.HANG_S
LATEST_S = 0.05  # after the step's line is written


class KillsIn(CountsSteps):
    """Kills its process in the middle of the n-th step."""

    @property
    def requested(self) -> bool:
        self.num_steps += 1
        if self.num_steps == self._die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return False


def train_rank(rank: int, world_size: int, flags: dict[str, Any], die_in: int | None) -> None:
    train(rank, world_size, flags, KillsIn(die_in))


def run_to_end(world_size: int, flags: dict[str, Any]) -> None:
    outcomes = ranks.start_ranks(train_rank, world_size, flags, None).wait(WAIT_S)
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise ranks.RankError(outcomes)


def kill_in_step(world_size: int, flags: dict[str, Any], step: int) -> str:
    """Let every rank kill itself in the middle of its step; they are all there by then."""
    outcomes = ranks.start_ranks(train_rank, world_size, flags, step).wait(WAIT_S)
    assert all(outcome.exit_code == -signal.SIGKILL for outcome in outcomes), outcomes
    return "in the step"


def kill_after_step(world_size: int, flags: dict[str, Any], step: int, draw: random.Random) -> str:
    """Kill all ranks a moment after the step's line, one of them a little before the others."""
    started = ranks.start_ranks(train_rank, world_size, flags, None)
    path = flags["output"] / "metrics.jsonl"
    deadline = time.monotonic() + WAIT_S
    while not (path.exists() and f'"step": {step}, "loss"' in path.read_text()):
        assert time.monotonic() < deadline, "the step never came"
        time.sleep(0.001)
    after_s, apart_s = draw.uniform(0, LATEST_S), draw.choice([0.0, draw.uniform(0, LATEST_S)])
    time.sleep(after_s)
    order = draw.sample(range(world_size), world_size)
    for number, rank in enumerate(order):
        if number == 1:
            time.sleep(apart_s)
        started.kill(rank)
    started.wait(WAIT_S, grace_s=5)
    return f"{1000 * after_s:.1f} ms after it, rank {order[0]} {1000 * apart_s:.1f} ms earlier"


def try_setting(number: int, asked: argparse.Namespace, folder: Path) -> int:
    """Try every step of one setting; return how many failed."""
    world_size, flags = SETTINGS[number]
    shape = {"data": write_text(folder), "steps": asked.steps, "dropout": 0.1, **flags}
    run_to_end(world_size, {**shape, "output": folder / "straight", "eval_every": 7})
    straight = curve_of(folder / "straight")
    assert len(straight) == asked.steps
    num_failed = 0
    for step in range(1, asked.steps + 1):
        draw = random.Random(f"{asked.seed} {number} {step}")
        saving = {"save_every": draw.choice([1, 2, 3]), "keep_last": 2, "resume": "auto"}
        parts = {**shape, **saving, "output": folder / f"killed-{step}"}
        if asked.random:
            moment = kill_after_step(world_size, parts, step, draw)
        else:
            moment = kill_in_step(world_size, parts, step)
        run_to_end(world_size, parts)
        curve = curve_of(parts["output"])
        if curve != straight:
            num_failed += 1
            pairs = enumerate(zip(curve, straight, strict=False), start=1)
            where = next((n for n, (a, b) in pairs if a != b), f"length {len(curve)}")
            print(f"  FAILED: step {step}, killed {moment}; first difference {where}", flush=True)
        shutil.rmtree(parts["output"])
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(map(str, range(len(SETTINGS)))))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--random", action="store_true", help="kill at random moments")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**9)
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)
    num_failed = 0
    for number in map(int, asked.settings.split(",")):
        with tempfile.TemporaryDirectory() as name:
            found = try_setting(number, asked, Path(name))
        num_failed += found
        world_size, flags = SETTINGS[number]
        shown = f"setting {number} ({world_size} ranks, {flags})"
        print(f"{shown}: {asked.steps - found} of {asked.steps} to the bit", flush=True)
    ranks.close_all()
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
