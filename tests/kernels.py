"""Run the tests that other floating-point kernels could break under such: `make test-kernels`.

Which kernels torch, MKL and oneDNN take depends on the processor. Here they are told to take others
than the best, as another machine would; the test suite itself runs with the best. The tests are
those marked `kernels`: runs compared over ranks, with the plain loop, and with torch's own.

    python tests/kernels.py [arguments for pytest]
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "ATen without vector registers": {"ATEN_CPU_CAPABILITY": "default"},
    "ATen with AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "MKL's most compatible sums": {"MKL_CBWR": "COMPATIBLE"},
    "MKL's sums of AVX2": {"MKL_CBWR": "AVX2"},
    "oneDNN with SSE4.1": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    # Ranks have more threads than there are cores: those that wait must not spin.
    "two threads": {
        **{"SHARDWISE_TEST_THREADS": "2", "OMP_NUM_THREADS": "2"},
        **{"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"},
    },
}
FILES = (
    "tests/test_roundings.py",
    "tests/test_optimizer_before_shard.py",
    "tests/test_shard_tensor_optimizers.py",
    "tests/checkpoint/test_save_load.py",
    "tests/engine/test_double_backward.py",
    "tests/engine/test_grad_hooks.py",
    "tests/engine/test_model_passes.py",
    "tests/engine/test_scenarios.py",
    "tests/engine/test_skipped_layers.py",
    "tests/engine/test_uneven.py",
    "tests/interop/test_fully_shard.py",
    "tests/interop/test_fully_shard_ranks_differ.py",
    "tests/interop/test_fully_shard_surface.py",
    "tests/train/test_resume.py",
)


def settings_here():
    """Return the settings that change anything on this machine, by name."""
    best = torch.backends.cpu.get_cpu_capability().lower()
    found = {name: env for name, env in SETTINGS.items() if env.get("ATEN_CPU_CAPABILITY") != best}
    if best == "default":  # it has no AVX2
        del found["ATen with AVX2"]
    return found


def run(name, environment, arguments):
    """Run the marked tests under one setting; print how it ended, all of it if it failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "kernels", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *FILES, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    said = lines[-1] if done.returncode == 0 else done.stdout
    told = " ".join(f"{key}={value}" for key, value in environment.items())
    print(f"kernels: {name} ({told}): {said}", flush=True)
    return done.returncode == 0


def main(arguments):
    """Run every setting, two at a time; return 0 if all went well."""
    settings = settings_here()
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(run, settings, settings.values(), [arguments] * len(settings)))
    return 0 if all(ended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
