"""Programs for tests: scripts and modules run in processes that have imported everything already.

`run_program` does what `python` would do, or `torchrun` with so many ranks, and returns the exit
code and what was printed. The processes are forked as those of `ranks` are, so they start in no
time: an interpreter that imports torch and what stands on it needs seconds. What is under test is
the program; how processes are launched is tested with real launchers, in a few tests.

`start_program` leaves the program running, as the leader of a session of its own, for tests that
send it signals.

Note [Ranks of a launcher]
A program that launches ranks itself, by torch's agent, would start an interpreter for each. Here a
process that is forked from the launcher before it does anything forks them instead, and the agent
keeps its children: each rank is orphaned at once, and the launcher is the subreaper that gets it.
So the agent waits for ranks, signals and kills them as ever, and they outlive it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from ranks import GRACE_S, HANG_S, LOOPBACK, die_with_the_parent, forked

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"0x\S+|\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def run_program(program, *arguments, num_ranks=None, cwd=None, launches=False):
    """Run a script (a path) or a module (a name) to its end; with ranks, as torchrun would.

    What ``launches`` ranks itself, by torch's agent or by `torch.multiprocessing.spawn`, gets them
    by forks.

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
            how = (environment, str(cwd or os.getcwd()), sys.path, folder, launches)
            is_script = isinstance(program, Path)
            processes.append(forked(_become, (is_script, argv, *how), f"{program}, rank {rank}"))
        codes = []
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
    codes += [process.exitcode for process in processes]  # one may end between two looks
    code = next(filter(None, codes), 0)
    return subprocess.CompletedProcess(argv, code, out, err)


@dataclass
class Program:
    """A program under way, and what it has printed."""

    process: BaseProcess
    folder: Path

    @property
    def pid(self):
        assert self.process.pid is not None
        return self.process.pid

    @property
    def ranks(self):
        """Return the process ids of the ranks that it has launched, which lead sessions too."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [pid for pid in map(int, children.split()) if os.getsid(pid) == pid]

    def finish(self):
        """Wait for its end; return the exit code (-N after signal N) and what it printed."""
        self.process.join(HANG_S)
        if (code := self.process.exitcode) is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"{self.process.name} hangs")
        return (code, *self.printed())

    def printed(self):
        return [Path(self.folder, name).read_text() for name in ("out", "err")]


def start_program(folder, program, *arguments, launches=False):
    """Start a script or a module that prints into the folder; see `run_program`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [str(program), *map(str, arguments)]
    how = (environment, os.getcwd(), sys.path, str(folder), launches)
    process = forked(_become, (isinstance(program, Path), argv, *how), str(program))
    return Program(process, folder)


def is_running(pid):
    """Look at the process table; a zombie that nobody has waited for does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run_example(name, *arguments, num_ranks=2):
    """Run an example on ranks, in an empty folder; return what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        example = ROOT / "examples" / name
        done = run_program(example, *arguments, num_ranks=num_ranks, cwd=Path(folder))
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_as_in_the_gallery(name, *arguments, num_ranks=2):
    """Run an example; return what it prints, which is that of its page."""
    from gallery import printed_by  # in docs, where programs that use this file do not look

    out = run_example(name, *arguments, num_ranks=num_ranks)
    assert_alike(out.replace(f"{ROOT}/", ""), printed_by(name))
    return out


def assert_alike(out, shown):
    """Compare words to the letter, and numbers as far as processors agree."""
    assert NUMBER.split(out) == NUMBER.split(shown)
    for ours, theirs in zip(NUMBER.findall(out), NUMBER.findall(shown), strict=True):
        if not ours.startswith("0x"):  # the bits of a loss
            near, far = (float(text.replace(",", "")) for text in (theirs, ours))
            assert abs(far - near) <= 0.1 * near + (0.02 if "." in theirs else 4), (ours, theirs)


def torchrun(*arguments):
    """Let torchrun itself launch two ranks from the root; return what they print."""
    options = ("--standalone", "--nproc-per-node", 2)
    done = run_program("torch.distributed.run", *options, *arguments, cwd=ROOT, launches=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def as_of_torchrun(rank, num_ranks, port):
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


def _become(is_script, argv, environment, cwd, path, folder, may_launch):
    """Be an interpreter that was started with these arguments."""
    die_with_the_parent()
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    gc.freeze()
    sys.path[:] = [str(Path(argv[0]).parent), *path] if is_script else path
    os.setsid()
    if may_launch:
        _fork_what_is_launched()
    _run(is_script, argv)


def _run(is_script, argv):
    random.seed()  # the server's state would be that of every process
    sys.argv[:] = argv
    if is_script:
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _fork_what_is_launched():
    """Let torch's agent fork what it would start: see Note [Ranks of a launcher]."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)
    ours, theirs = multiprocessing.Pipe()
    if os.fork() == 0:
        ours.close()
        for number in (signal.SIGINT, signal.SIGTERM):  # which are for the launcher
            signal.signal(number, signal.SIG_IGN)
        _fork_on_demand(theirs)
    theirs.close()

    class Forked(subprocess.Popen[str]):
        def _execute_child(self, args, *others):
            python, *command = (arg for arg in args if arg != "-u")
            assert python == sys.executable, args
            is_script = command[0] != "-m"
            ours.send((is_script, command if is_script else command[1:], others[5]))
            self.pid = ours.recv()
            self._child_created = True

    subprocess_handler.Popen = Forked
    start = torch.multiprocessing.start_processes
    torch.multiprocessing.spawn = partial(start, start_method="fork")


def _fork_on_demand(pipe):
    """Fork a rank for each request, until the launcher is gone."""
    while True:
        try:
            is_script, argv, environment = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            rank = os.fork()
            if rank:
                os.write(tells, str(rank).encode())
                os._exit(0)
            for end in (pipe.fileno(), told, tells):
                os.close(end)
            while os.getppid() == parent:  # it is not the launcher's child yet
                time.sleep(0.001)
            _end_as(is_script, argv, environment)
        os.close(tells)
        os.waitpid(between, 0)  # only now is the rank a child that the launcher may wait for
        pipe.send(int(os.read(told, 32)))
        os.close(told)


def _end_as(is_script, argv, environment):
    """Run a script or a module to the end of this process."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    code = 1
    try:
        if is_script:
            sys.path.insert(0, str(Path(argv[0]).parent))
        _run(is_script, argv)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
