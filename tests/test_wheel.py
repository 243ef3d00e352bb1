"""The built wheel, installed beside the present dependencies, without the source tree."""

import os
import subprocess
import sys
import sysconfig
import venv
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


class Installed:
    """A new environment that has the wheel, and sees the packages of this one."""

    def __init__(self, folder):
        self.folder, self.bin = folder, folder / "venv" / "bin"
        venv.create(folder / "venv", symlinks=True)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # A folder named so is searched, but its own .pth files, such as the source's, are not read.
        (site / "others.pth").write_text(sysconfig.get_path("purelib"))
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        self.run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, ROOT)
        python = ("--python", self.bin / "python")
        self.run(*pip, *python, "install", "--no-deps", "--no-index", *folder.glob("*.whl"))
        (self.information,) = site.glob("shardwise-*.dist-info")
        self.metadata = Parser().parsestr((self.information / "METADATA").read_text())

    def run(self, *command):
        """Run a command in the folder, without this process's paths; return what it prints."""
        kept = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            list(map(str, command)), cwd=self.folder, env=kept, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
def test_the_wheel_says_what_it_is_by_whom_and_under_which_license(installed):
    told = installed.metadata
    assert told["Summary"] and told["License-Expression"] == "Apache-2.0"
    assert told["Author"] == "The Shardwise authors"
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload() == (ROOT / "README.md").read_text()
    assert (installed.information / "licenses" / "LICENSE").is_file()


@pytest.mark.slow
def test_the_command_and_both_packages_work_from_the_wheel(installed):
    command = installed.bin / "shardwise"
    files = "import shardwise, shardwise_labs as labs; print(shardwise.__file__, labs.__file__)"
    assert installed.run(installed.bin / "python", "-c", files).count(f"{installed.folder}/") == 2
    assert installed.metadata["Version"] in installed.run(command, "--version")
    assert "train" in installed.run(command, "--help")
    assert "Kill a rank" in installed.run(command, "lab", "list")


@pytest.mark.slow
def test_two_ranks_train_from_the_wheel(installed):
    small = ("--ranks", 2, "--dim", 32, "--layers", 2, "--steps", 4, "--data", venv.__file__)
    printed = installed.run(installed.bin / "shardwise", "train", *small)
    assert "4 steps" in printed and "rank 1: " in printed, printed
