"""What holds for every test: as many threads as ranks have, reasons for skips, no process left."""

import getpass
import os
import tempfile
from collections import Counter
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


# Files that take long; a worker that is left alone with one at the end would be late.
FIRST = (
    "checkpoint/test_any_to_any.py",
    "checkpoint/test_crashes.py",
    "checkpoint/test_hostile.py",
    "checkpoint/test_kills.py",
    "checkpoint/test_parallel_models.py",
    "engine/test_models_compile.py",
    "engine/test_parity.py",
    "engine/test_parity_precision.py",
    "engine/test_placements.py",
    "engine/test_skipped_layers.py",
    "engine/test_stream_order.py",
    "engine/test_tensor_parallel.py",
    "interop/test_accelerate.py",
    "interop/test_fully_shard.py",
    "interop/test_lightning.py",
    "interop/test_peft_adapters.py",
    "interop/test_pipelining.py",
    "interop/test_torch_features.py",
    "interop/test_transformers_generate.py",
    "interop/test_transformers_loading.py",
    "interop/test_transformers_trainer.py",
    "plan/test_memory_matrix.py",
    "plan/test_play_ranks.py",
    "test_plain_state.py",
    "test_shard_tensor.py",
    "test_shard_tensor_draws.py",
    "test_shard_tensor_optimizers.py",
    "test_shard_tensor_steps.py",
    "test_shard_tensor_sweep.py",
    "test_traffic_memory.py",
    "test_zero_from_scratch.py",
    "train/test_command.py",
    "train/test_resume.py",
    "train/test_same_losses.py",
)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # it would sort files by their number of tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # xdist gives out files in the order of their first tests
        _sort_for_workers(items)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


def _sort_for_workers(items: list[pytest.Item]) -> None:
    """Put the longest files first, then those of most tests."""
    folder = Path(__file__).parent
    num_tests = Counter(item.path for item in items)

    def turn(item: pytest.Item) -> tuple[bool, int]:
        is_long = item.path.relative_to(folder).as_posix() in FIRST
        return not is_long, -num_tests[item.path]

    items.sort(key=turn)


def pytest_sessionfinish() -> None:
    ranks.close_all()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """Seed every test, so that none depends on which ran before it."""
    torch.manual_seed(0)
