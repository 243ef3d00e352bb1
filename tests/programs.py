"""Programs for tests: scripts and modules run in processes that have imported everything already.

`run_program` does what `python` would do, or `torchrun` with so many ranks, and returns the exit
code and what was printed. The processes are forked as those of `ranks` are, so they start in no
time: an interpreter that imports torch and what stands on it needs seconds. What is under test is
the program; how processes are launched is tested with real launchers, in a few tests.
"""

from __future__ import annotations

import gc
import os
import random
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import GRACE_S, HANG_S, LOOPBACK, die_with_the_parent, forked

ROOT = Path(__file__).resolve().parents[1]


def run_program(
    program: Path | str,
    *arguments: object,
    num_ranks: int | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script (a path) or a module (a name) to its end; with ranks, as torchrun would.

    The exit code is that of the first process that failed. After it, or after HANG_S, the others
    are killed.
    """
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    argv = [str(program), *map(str, arguments)]
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        processes = []
        for rank in range(num_ranks or 1):
            added = {} if num_ranks is None else as_of_torchrun(rank, num_ranks, store.port)
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            environment |= {"GLOO_SOCKET_IFNAME": "lo", **added}
            how = (environment, str(cwd or os.getcwd()), sys.path, folder)
            is_script = isinstance(program, Path)
            processes.append(forked(_become, (is_script, argv, *how), f"{program}, rank {rank}"))
        codes: list[int] = []
        while running := [p for p in processes if p.exitcode is None]:
            failed = any(p.exitcode for p in processes)
            if not connection.wait([p.sentinel for p in running], GRACE_S if failed else HANG_S):
                for process in running:
                    process.kill()
            for process in running:
                process.join(0)
                if process.exitcode is not None:
                    codes.append(process.exitcode)
        out, err = (Path(folder, name).read_text() for name in ("out", "err"))
    code = next(filter(None, codes), 0)
    return subprocess.CompletedProcess(argv, code, out, err)


def run_example(name: str, *arguments: object, num_ranks: int | None = 2) -> str:
    """Run an example on ranks, from the root as a reader would; return what it prints."""
    done = run_program(ROOT / "examples" / name, *arguments, num_ranks=num_ranks, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_of_torchrun(rank: int, num_ranks: int, port: int) -> Mapping[str, str]:
    """Return the environment that torchrun gives a rank; the store on the port is there already."""
    numbers = {
        **{"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0},
        **{"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "ROLE_WORLD_SIZE": num_ranks},
        **{"GROUP_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0},
        **{"MASTER_PORT": port},
    }
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": LOOPBACK,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _become(
    is_script: bool,
    argv: list[str],
    environment: dict[str, str],
    cwd: str,
    path: list[str],
    folder: str,
) -> None:
    """Be an interpreter that was started with these arguments."""
    die_with_the_parent()
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()  # the server's state would be that of every process
    torch.set_num_threads(1)
    gc.freeze()
    sys.argv[:] = argv
    sys.path[:] = [str(Path(argv[0]).parent), *path] if is_script else path
    if is_script:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
