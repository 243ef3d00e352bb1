"""The example for Ray, on a local Ray: `make test-ray` installs it and runs this file."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ranks

pytest.importorskip("ray", reason="needs ray, an extra: make test-ray")

EXAMPLES = Path(__file__).parents[1] / "examples"
STEP = re.compile(r"^step (\d+): loss \S+ (\S+)$", re.MULTILINE)


def train_alone(rank: int, world_size: int, folder: Path) -> None:
    """Take the steps of the example without Ray."""
    sys.path.append(str(EXAMPLES))
    importlib.import_module("ray_train").train({"folder": str(folder), "die_after": None})


def test_workers_of_ray_go_on_when_one_is_killed_and_to_the_same_bits(tmp_path: Path) -> None:
    example = [sys.executable, EXAMPLES / "ray_train.py", "--die-after=7"]
    done = subprocess.run(example, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = STEP.findall(done.stdout)
    ranks.run_ranks(train_alone, 2, tmp_path)
    alone = STEP.findall((tmp_path / "losses.txt").read_text())
    assert len(alone) == 10 < len(steps)  # some steps are taken again
    assert set(steps) == set(alone)
