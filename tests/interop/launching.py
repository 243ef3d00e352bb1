"""Examples for tests: run as a reader would, by torchrun on two ranks."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from ranks import HANG_S


def run_example(path: Path, *arguments: str) -> str:
    """Return what it prints; if it hangs, end it with its ranks."""
    environment = os.environ | {
        "PYTHONPATH": str(path.parents[1] / "src"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [sys.executable, *launch, str(path), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, err
    return out
