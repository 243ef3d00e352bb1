"""Files that others wrote: each command that reads some answers or says one error, at once."""

import subprocess
import sys
from pathlib import Path

GENERATOR = Path(__file__).with_name("hostile_files.py")


def test_hostile_runs_and_files_give_an_answer_or_one_printable_error_within_limits():
    done = subprocess.run(
        [sys.executable, GENERATOR, "7", "6"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
