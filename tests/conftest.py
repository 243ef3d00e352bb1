"""What holds for every test: as many threads as ranks have, reasons for skips, no process left."""

import gc
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
ranks.collect_rarely()

# For this process and all that tests start. A thread that wakes up then interrupts no other one,
# which may hold a connection's lock: gloo's thread would try to lock it, again and again, until the
# other thread goes on.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

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


# Files that take long, longest first: none is left for one worker alone at the end, where those of
# few tests come.
FIRST = (
    "labs/test_lab_command.py",
    "train/test_resume.py",
    "plan/test_one_model.py",
    "interop/test_torch_features.py",
    "engine/test_scenarios.py",
    "train/test_command.py",
    "test_hangs.py",
    "test_architecture.py",
    "monitor/test_doctor_runs.py",
    "test_docs.py",
    "interop/test_lightning.py",
    "plan/test_play_ranks.py",
    "interop/test_pipeline_schedules.py",
    "checkpoint/test_memory.py",
    "engine/test_stream_order.py",
    "test_shard_tensor.py",
    "test_traffic_memory.py",
    "interop/test_transformers_parallel.py",
    "interop/test_transformers_trainer.py",
    "checkpoint/test_save_load.py",
    "engine/test_overlap.py",
    "engine/test_breadth_first.py",
    "parallel/test_experts.py",
    "plan/test_counted_traffic.py",
    "test_waits.py",
    "engine/test_rank_differences.py",
    "engine/test_offload_files.py",
    "interop/test_accelerate.py",
    "engine/test_parity_precision.py",
    "checkpoint/test_crashes.py",
    "engine/test_skipped_layers.py",
    "plan/test_tracing.py",
    "train/test_degrees_of_runs.py",
    "train/test_same_bits.py",
    "checkpoint/test_shared_folder.py",
    "plan/test_calibration.py",
    "engine/test_pipelines.py",
    "plan/test_composed_memory.py",
    "engine/test_activations.py",
    "checkpoint/test_pieces.py",
    "test_ranks.py",
    "checkpoint/test_parallel_models.py",
    "test_shard_tensor_optimizers.py",
    "interop/test_foreign_files.py",
    "engine/test_encoded_runs.py",
    "test_zero_from_scratch.py",
    "test_shard_tensor_sweep.py",
    "test_optim_adamw.py",
    "plan/test_memory_matrix.py",
    "plan/test_plan_command.py",
    "engine/test_double_backward.py",
    "engine/test_matrices.py",
    "plan/test_simulate.py",
    "interop/test_fully_shard.py",
    "interop/test_own_gather.py",
)


def pytest_configure(config):
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # it would sort files by their number of tests


def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):  # xdist gives out files in the order of their first tests
        _sort_for_workers(items)
    if torch.cuda.is_available():
        return
    no_gpu = pytest.mark.skip(reason="needs a CUDA device, and this machine has none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)


def _sort_for_workers(items):
    """Put the longest files first, then those of most tests."""
    folder = Path(__file__).parent
    num_tests = Counter(item.path for item in items)
    turns = {folder / name: number for number, name in enumerate(FIRST)}

    def turn(item):
        return turns.get(item.path, len(turns)), -num_tests[item.path]

    items.sort(key=turn)


def pytest_collection_finish():
    gc.freeze()  # modules and tests stay: no collection need look at them


def pytest_sessionfinish():
    ranks.close_all()


@pytest.fixture(autouse=True)
def _same_start():
    """Seed every test, so that none depends on which ran before it; idle ranks rest meanwhile."""
    ranks.seed_torch()
    ranks.rest_idle_pools()
