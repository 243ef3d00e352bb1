"""What holds for every test: as many threads as ranks have, reasons for skips, no process left."""

import getpass
import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

import ranks

# As many threads here as in the ranks: a sum in this process and in theirs has the same bits.
torch.set_num_threads(ranks.NUM_THREADS)

# Inductor's cache does not ask which vector registers it compiled for: a folder for each kind.
_CACHE = f"torchinductor_{getpass.getuser()}_{torch.backends.cpu.get_cpu_capability().lower()}"
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), _CACHE)))

# Property tests draw the same examples in every run; no time limits, since machines differ.
settings.register_profile(
    "shardwise",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("shardwise")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


def pytest_sessionfinish() -> None:
    ranks.close_all()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Seed every test, so that none depends on which ran before it."""
    torch.manual_seed(0)
