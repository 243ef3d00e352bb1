"""Versions of other libraries: read rightly, named when untested, missed with a remedy."""

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import shardwise
from shardwise import fully_shard, shard, versions
from shardwise.errors import ConfigError
from shardwise.versions import TESTED, load_neighbour, minor_of, warn_if_untested


def installed(monkeypatch, version):
    monkeypatch.setattr(versions, "installed_version", lambda package: version)


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.15.3"])
def test_a_version_in_the_tested_range_gives_no_warning(monkeypatch, version):
    installed(monkeypatch, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("torch")


@pytest.mark.parametrize("version", ["2.10.9", "2.16.0.dev20261101", "3.0"])
def test_a_version_outside_the_tested_range_is_named_with_that_range(monkeypatch, version):
    installed(monkeypatch, version)
    with pytest.warns(UserWarning, match=rf"torch {version}.*2\.11 to 2\.15"):
        warn_if_untested("torch")


def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch, tmp_path
):
    with pytest.raises(ConfigError, match=r"nothere.*pip install 'shardwise\[nothere\]'"):
        load_neighbour("nothere", "this test")
    (tmp_path / "halfthere.py").write_text("import nothere")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="nothere"):  # its own trouble, told as it is
        load_neighbour("halfthere", "this test")


def test_every_tested_range_can_be_read_and_runs_upwards():
    for first, last in TESTED.values():
        assert minor_of(first) <= minor_of(last)
    with pytest.raises(ConfigError, match="'main'"):
        minor_of("main")


def test_sharding_with_an_untested_torch_warns(monkeypatch):
    installed(monkeypatch, "2.99.0")
    for entry in (shard, fully_shard):
        with (
            pytest.warns(UserWarning, match=r"torch 2\.99\.0"),
            pytest.raises((ConfigError, ValueError)),
        ):
            entry(nn.ModuleList() if entry is shard else nn.Linear(1, 1))  # refused after it


def test_the_version_of_the_command_answers_without_torch():
    code = (
        "import sys; from shardwise.cli.main import app\n"
        "try: app(['--version'])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"shardwise {shardwise.__version__} (torch {torch.__version__}")
    assert second == "0 False"
