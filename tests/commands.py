"""Commands of `shardwise` for tests, in this process."""

import os
import subprocess
import sys
from pathlib import Path

from shardwise.cli.main import app

SOURCES = Path(__file__).parents[1] / "src"
HEAVY = "torch", "numpy", "pydantic", "transformers"


def call_command(command, arguments):
    """Run one command in this process and return its exit code."""
    words = [command, *arguments]
    return int(app(words, prog_name="shardwise", standalone_mode=False) or 0)


def run_alone(*commands):
    """Run commands in a process of their own; return its output, and the heavy modules it has."""
    code = "import sys; from shardwise.cli.main import app\n"
    for words in commands:
        code += f"assert not app({[*map(str, words)]!r}, standalone_mode=False)\n"
    code += f"print(*set(sys.modules).intersection({HEAVY!r}))"
    path = os.pathsep.join([str(SOURCES), os.environ.get("PYTHONPATH", "")])
    words, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    *output, modules = done.stdout.removesuffix("\n").split("\n")
    return "\n".join(output), set(modules.split())
