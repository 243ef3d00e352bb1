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
        (self.site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # A folder named so is searched, but its own .pth files, such as the source's, are not read.
        (self.site / "others.pth").write_text(sysconfig.get_path("purelib"))
        self.install(ROOT)
        (self.information,) = self.site.glob("shardwise-*.dist-info")
        self.metadata = Parser().parsestr((self.information / "METADATA").read_text())

    @property
    def top_level(self):
        """The names that these wheels, and not those of the present environment, add."""
        return {path.name for path in self.site.glob("shardwise*") if path.suffix != ".dist-info"}

    def install(self, project):
        """Build the wheel of a project, and install it."""
        wheels = self.folder / f"wheels-{project.name}"
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
        self.run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, project)
        python = ("--python", self.bin / "python")
        self.run(*pip, *python, "install", "--no-deps", "--no-index", *wheels.glob("*.whl"))

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
def test_command_works_from_the_wheel_and_says_how_to_install_labs(installed):
    command, python = installed.bin / "shardwise", installed.bin / "python"
    where = installed.run(python, "-c", "import shardwise; print(shardwise.__file__)")
    assert where.startswith(f"{installed.folder}/")
    assert installed.top_level == {"shardwise"}
    assert installed.metadata["Version"] in installed.run(command, "--version")
    assert "train" in installed.run(command, "--help")
    refused = subprocess.run(
        [command, "lab", "list"], cwd=installed.folder, capture_output=True, text=True, env={}
    )
    assert refused.returncode == 2 and "pip install ./labs" in refused.stderr


@pytest.mark.slow
def test_labs_are_a_wheel_of_their_own(installed):
    installed.install(ROOT / "labs")
    assert installed.top_level == {"shardwise", "shardwise_labs"}
    assert "Kill a rank" in installed.run(installed.bin / "shardwise", "lab", "list")


@pytest.mark.slow
def test_two_ranks_train_from_the_wheel(installed):
    small = ("--ranks", 2, "--dim", 32, "--layers", 2, "--steps", 4, "--data", venv.__file__)
    printed = installed.run(installed.bin / "shardwise", "train", *small)
    assert "4 steps" in printed and "rank 1: " in printed, printed
