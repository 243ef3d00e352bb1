"""Write the examples' output into gallery.md: `python docs/gallery.py [NAME.py ...]`.

Tests that run an example compare its output with the page.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "gallery.md"
# A command, and its output below it.
SHOWN = re.compile(
    r"^```sh\n(?P<command>(?:torchrun|python) .*?(?P<name>\w+\.py).*?)\n```\n\n"
    r"```text\n(?P<printed>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def printed_by(name: str) -> str:
    """Return an example's output, as the page has it."""
    (printed,) = (m["printed"] for m in SHOWN.finditer(PAGE.read_text()) if m["name"] == name)
    return printed


def run(shown: re.Match[str]) -> str:
    """Run the command of the page; return it with its output."""
    if sys.argv[1:] and shown["name"] not in sys.argv[1:]:
        return shown[0]
    program, options = shown["command"].replace(" \\\n", " ").split(maxsplit=1)
    command = options.replace("examples/", f"{ROOT}/examples/").split()
    if program == "torchrun":
        command = ["-m", "torch.distributed.run", "--standalone", *command]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    printed = done.stdout.replace(f"{ROOT}/", "")
    return shown[0].replace(f"```text\n{shown['printed']}", f"```text\n{printed}")


if __name__ == "__main__":
    PAGE.write_text(SHOWN.sub(run, PAGE.read_text()))
