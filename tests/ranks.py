"""Ranks for tests: real processes with a gloo process group over loopback.

`run_ranks(fn, world_size, *args)` calls `fn(rank, world_size, *args)` on every rank and returns the
results in rank order. Ranks are forked from a server process that has imported torch already, and
one pool of ranks per world size stays open for the whole test session, so a call costs
milliseconds. A pool in which a call failed is never used again, and one that nobody calls is
stopped until its next call.

A call that is not done after `HANG_S` counts as hanging. This is the only limit of time in the
tests: none depends on how fast a machine is, or on what else it does.

`start_ranks` gives a call its own processes, which a test may stop or kill, and a handle that says
how each of them ended.

`fn` is found by its module and name, so it must stand at the top level of a test module. A test
that does nothing but call one is written as one function, under `on_ranks`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor._redistribute as redistribution
import torch.distributed.tensor.debug as dtensor_caches
from torch.distributed.tensor._collective_utils import MeshTopoInfo

import kept_groups

LOOPBACK = "127.0.0.1"
CURRENT_TEST = "PYTEST_CURRENT_TEST"  # a variable that pytest sets
NUM_THREADS = int(os.environ.get("SHARDWISE_TEST_THREADS", "1"))  # of each rank; tests/kernels.py
HANG_S = 900.0  # what takes longer hangs: thirty times the slowest test on a quiet machine
GRACE_S = 30.0  # how long the other ranks may take to end once one has failed
IDLE_S = 1.0  # a pool that was not called for so long rests
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.utils.checkpoint",
    "torch._dynamo",  # the first optimizer step of a process imports it
    "numpy",
    "hypothesis",
    "pytest",
    "ranks",
    "kept_groups",
    "preloaded",
    "torch.distributed.pipelining",
    # What tests of other libraries import in every rank; what is not installed is passed over.
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
    "peft",
    "lightning",
]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one rank's call ended: with a result, an exception, or the end of its process."""

    rank: int
    ended_at_s: float  # on the clock of time.monotonic(), which all processes share
    result: Any = None
    error: str | None = None  # the remote traceback; of one that crashed or timed out, its stacks
    error_type: str | None = None  # the class name of the exception
    exit_code: int | None = None  # set if the process ended by itself or was killed (-signal)
    timed_out: bool = False  # still running at the end of the wait, and killed then

    @property
    def ok(self) -> bool:
        return self.error is None and self.exit_code is None

    def describe(self) -> str:
        stacks = f"its stacks:\n{self.error or '(none)'}"
        if self.timed_out:
            return f"was still running and had to be killed; {stacks}"
        if self.exit_code is not None:
            return f"ended without a result, exit code {self.exit_code}; {stacks}"
        return f"raised {self.error_type}:\n{self.error}"


class RankError(Exception):
    """A call failed on one rank or more; `outcomes` has all of them, in rank order."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        failed = sorted(
            (o for o in outcomes if not o.ok), key=lambda o: (o.timed_out, o.ended_at_s)
        )
        first, *others = failed
        lines = [f"rank {first.rank} of {len(outcomes)} {first.describe()}"]
        lines += [f"after it, rank {o.rank} {o.describe()}" for o in others]
        super().__init__("\n".join(lines))
        self.outcomes = outcomes
        self.rank = first.rank
        self.error_type = first.error_type


@dataclass(slots=True, eq=False)
class Ranks:
    """The processes of one process group, and the call they are busy with."""

    world_size: int
    fresh: bool  # each process ends with its call, as in a launched job
    store: dist.TCPStore
    scratch: str  # a folder, which a forked child of this process that ends does not clean up
    processes: list[multiprocessing.process.BaseProcess] = field(default_factory=list)
    pipes: list[connection.Connection] = field(default_factory=list)
    answered_at_s: float = 0.0  # the end of the last call, on the clock of time.monotonic()
    resting: bool = False  # its processes are stopped

    @property
    def pids(self) -> list[int]:
        return [process.pid or -1 for process in self.processes]

    def kill(self, rank: int, signal_number: int = signal.SIGKILL) -> float:
        """Send one rank a signal; return the time on the clock of `Outcome.ended_at_s`."""
        os.kill(self.pids[rank], signal_number)
        return time.monotonic()

    def signal_all(self, signal_number: int) -> None:
        for rank in range(self.world_size):
            with contextlib.suppress(ProcessLookupError):  # a dead rank is reported by wait()
                self.kill(rank, signal_number)

    def submit(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        test = os.environ.get(CURRENT_TEST, "")
        body = pickle.dumps((os.getcwd(), warnings.filters, test, fn, args, kwargs))
        call = pickle.dumps((sys.path, body))
        if self.resting:
            self.signal_all(signal.SIGCONT)
            self.resting = False
        for pipe in self.pipes:
            with contextlib.suppress(BrokenPipeError):  # a dead rank is reported by wait()
                pipe.send_bytes(call)

    def wait(self, timeout_s: float = HANG_S, grace_s: float | None = None) -> list[Outcome]:
        """Collect how each rank's call ended, in rank order.

        What still runs after `timeout_s`, or `grace_s` after the first failure, is killed.
        """
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout_s
        failed = False
        while len(outcomes) < self.world_size:
            pending = [rank for rank in range(self.world_size) if rank not in outcomes]
            watched = [self.pipes[rank] for rank in pending]
            watched += [self.processes[rank].sentinel for rank in pending]  # type: ignore[misc]
            if not connection.wait(watched, max(0.0, deadline - time.monotonic())):
                outcomes |= self._kill_pending(pending)
                break
            for rank in pending:
                if (outcome := self._poll(rank)) is not None:
                    outcomes[rank] = outcome
                    if not outcome.ok and not failed and grace_s is not None:
                        deadline = min(deadline, time.monotonic() + grace_s)
                        failed = True
        if self.fresh:
            self.close()
        return [outcomes[rank] for rank in range(self.world_size)]

    def _poll(self, rank: int) -> Outcome | None:
        pipe, process = self.pipes[rank], self.processes[rank]
        alive = process.is_alive()  # asked first: what a dead rank had sent is in the pipe by now
        if pipe.poll():
            with contextlib.suppress(EOFError, ConnectionResetError):
                return Outcome(rank, **pickle.loads(pipe.recv_bytes()))
            process.join(HANG_S)
            alive = False
        if alive:
            return None
        ended_at_s, stacks = time.monotonic(), self._stacks(rank)
        return Outcome(rank, ended_at_s, error=stacks, exit_code=process.exitcode)

    def _kill_pending(self, pending: list[int]) -> dict[int, Outcome]:
        for rank in pending:  # each prints its stacks first
            with contextlib.suppress(ProcessLookupError):
                self.kill(rank, signal.SIGUSR1)
        said = [self._stacks(rank) for rank in pending]
        for _ in range(100):  # a slow machine writes slowly, and one that is stopped never
            time.sleep(0.3)
            before, said = said, [self._stacks(rank) for rank in pending]
            silent = [rank for rank, text in zip(pending, said, strict=True) if not text]
            if said == before and all(map(self._is_stopped, silent)):
                break
        outcomes = {}
        for rank in pending:
            self.processes[rank].kill()
            self.processes[rank].join(HANG_S)
            outcomes[rank] = Outcome(
                rank,
                time.monotonic(),
                error=self._stacks(rank),
                exit_code=self.processes[rank].exitcode,
                timed_out=True,
            )
        return outcomes

    def _stacks(self, rank: int) -> str:
        path = Path(self.scratch, f"{rank}.stacks")
        return path.read_text() if path.exists() else ""

    def _is_stopped(self, rank: int) -> bool:
        """Tell whether a rank was stopped, or is dead, and so will say nothing."""
        try:
            state = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "TtZX"

    def close(self) -> None:
        """End all processes; they have nothing to say any more."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(HANG_S)
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)
        if self in _open:
            _open.remove(self)


_open: list[Ranks] = []
_pools: dict[int, Ranks] = {}  # by world size


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = HANG_S,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` on every rank; return the results in rank order.

    Raises: RankError with the remote traceback as soon as a rank has failed and the others have
    ended or had GRACE_S to do so, and after `timeout_s` with the stacks of what still runs.
    """
    pool = None if fresh else _pools.pop(world_size, None)
    ranks = pool if pool is not None else _open_ranks(world_size, fresh=fresh)
    ranks.submit(fn, args, kwargs)
    return _results(ranks, timeout_s)


@dataclass(frozen=True, slots=True)
class _Body:
    """A function under `on_ranks`, by its name, where the test stands."""

    module: str
    name: str

    def __call__(self, rank: int, world_size: int, **given: Any) -> None:
        body = getattr(importlib.import_module(self.module), self.name).body
        names = inspect.signature(body).parameters.keys()
        given |= dict.fromkeys(names & {"rank"}, rank)
        given |= dict.fromkeys(names & _SIZE, world_size)
        body(**given)


_SIZE = {"world_size", "num_ranks", "world"}


def on_ranks(*sizes: Any, **options: Any) -> Callable[[Callable[..., None]], Any]:
    """Make a test of a function that every rank of each world size calls.

    The function gets `rank` and `world_size` if it has such parameters; its others are those of
    the test: fixtures, and what `parametrize` gives. Without sizes, that gives the size too. What
    has a default may be given by a call of the test, as campaigns do.
    """

    def decorate(fn: Callable[..., None]) -> Any:
        params = inspect.signature(fn).parameters
        (size,) = params.keys() & _SIZE or {"world_size"}

        def test(**given: Any) -> None:
            world_size = given.pop(size)
            run_ranks(_Body(fn.__module__, fn.__name__), world_size, **given, **options)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(test, name, getattr(fn, name))
        given = (n for n, p in params.items() if p.default is p.empty and n != "rank")
        names = dict.fromkeys((size, *given))
        keyword = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, keyword) for name in names])
        test.__signature__ = signature  # type: ignore[attr-defined]
        test.body = fn  # type: ignore[attr-defined]
        return pytest.mark.parametrize(size, sizes)(test) if sizes else test

    return decorate


def run_sizes(
    fn: Callable[..., Any], args_by_size: dict[int, tuple[Any, ...]], timeout_s: float = HANG_S
) -> dict[int, list[Any]]:
    """Call `fn(rank, world_size, *args)` on worlds of several sizes at once; see `run_ranks`.

    Pools stay open anyway, so this takes no more memory than one call after the other.
    """
    worlds = {size: _pools.pop(size, None) or _open_ranks(size, False) for size in args_by_size}
    for size, ranks in worlds.items():
        ranks.submit(fn, args_by_size[size], {})
    try:
        return {size: _results(ranks, timeout_s) for size, ranks in worlds.items()}
    finally:
        for size, ranks in worlds.items():
            if _pools.get(size) is not ranks:  # it failed, or nobody has heard how it ended
                ranks.close()


def _results(ranks: Ranks, timeout_s: float) -> list[Any]:
    """Wait for a call; a pool in which it went well is used again."""
    outcomes = ranks.wait(timeout_s, GRACE_S)
    if not all(outcome.ok for outcome in outcomes):
        ranks.close()
        raise RankError(outcomes)
    if not ranks.fresh:
        ranks.answered_at_s = time.monotonic()
        _pools[ranks.world_size] = ranks
    return [outcome.result for outcome in outcomes]


def rest_idle_pools() -> None:
    """Stop the ranks of pools that nobody calls: their threads of gloo wake 100 times a second."""
    for pool in _pools.values():
        if not pool.resting and time.monotonic() - pool.answered_at_s > IDLE_S:
            pool.signal_all(signal.SIGSTOP)
            pool.resting = True


def start_ranks(fn: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> Ranks:
    """Start `fn(rank, world_size, *args, **kwargs)` in processes of its own, and return at once.

    The test may `kill` ranks and must `wait` for the outcomes; nothing raises on its behalf.
    """
    ranks = _open_ranks(world_size, fresh=True)
    ranks.submit(fn, args, kwargs)
    return ranks


def begin_all(calls: dict[str, tuple[Any, ...]]) -> Callable[[str], list[Any]]:
    """Start calls that mostly wait all at once; return what gives the results of one by its name.

    Each call is a function, its number of ranks, and its other arguments.
    """
    begun = {name: start_ranks(*call) for name, call in calls.items()}

    def results(name: str) -> list[Any]:
        outcomes = begun[name].wait()
        assert all(outcome.ok for outcome in outcomes), [each.describe() for each in outcomes]
        return [outcome.result for outcome in outcomes]

    return results


def close_all() -> None:
    """End every process this module has started; for the end of the test session."""
    while _open:
        _open[0].close()
    _pools.clear()


# Before multiprocessing's own end, which asks ranks to end and waits: those that rest do not hear.
atexit.register(close_all)


def _open_ranks(world_size: int, fresh: bool) -> Ranks:
    # The store lives here, on a port the system chose: no collisions, and it survives any rank.
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(world_size, fresh, store, tempfile.mkdtemp(prefix="ranks-"))
    _open.append(ranks)
    for rank in range(world_size):
        ours, theirs = multiprocessing.Pipe()
        args = (rank, world_size, store.port, theirs, fresh, ranks.scratch)
        ranks.processes.append(forked(_serve, args, f"rank {rank} of {world_size}", daemon=True))
        theirs.close()
        ranks.pipes.append(ours)
    return ranks


def forked(
    target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool = False
) -> multiprocessing.process.BaseProcess:
    """Start a process that is forked from the server, which has imported everything already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _python_path():
        forkserver.ensure_running()
    process = context.Process(target=target, args=args, name=name, daemon=daemon)
    process.start()
    return process


@contextlib.contextmanager
def _python_path() -> Iterator[None]:
    """Let the server process import what we can; Python 3.11 does not hand it our sys.path."""
    given = {"PYTHONPATH": os.pathsep.join(sys.path)}
    given["HF_HUB_OFFLINE"] = "1"  # which is read once, in the import
    before = {name: os.environ.get(name) for name in given}
    os.environ |= given
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# What follows runs in the ranks.


def _serve(
    rank: int,
    world_size: int,
    port: int,
    pipe: connection.Connection,
    fresh: bool,
    scratch: str,
) -> None:
    """Join the process group, then answer calls until the parent closes the pipe."""
    die_with_the_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    stacks = open(f"{scratch}/{rank}.stacks", "w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    collect_rarely()
    gc.freeze()  # what was imported before the fork need not be looked at by every collection
    try:
        if not fresh:  # a launched process has a device for each group
            kept_groups.share_device()
        store = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
        timeout = timedelta(minutes=5)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        # A rank that ends at once would break the connections that others still open.
        store.set(f"connected {rank}", "")
        store.wait([f"connected {other}" for other in range(world_size)], timeout)
    except Exception as error:
        pipe.send_bytes(_failure(error))
        return
    groups = kept_groups.install()
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        # A crash leaves them as well, whatever was called before: who puts back all handlers that
        # Python knows (Lightning does) takes this one away, and it counts as enabled still.
        faulthandler.disable()
        faulthandler.enable(stacks)
        answer, ok = _answer(call, rank, world_size)
        if fresh and ok:
            dist.destroy_process_group()
        pipe.send_bytes(answer)
        if fresh:  # as a launched process would: its connections close, and its peers notice
            os._exit(0 if ok else 1)
        _clean_up(groups)


def _answer(call: bytes, rank: int, world_size: int) -> tuple[bytes, bool]:
    try:
        sys.path[:], body = pickle.loads(call)
        directory, filters, os.environ[CURRENT_TEST], fn, args, kwargs = pickle.loads(body)
        os.chdir(directory)
        _reset_state()
        warnings.resetwarnings()
        warnings.filters[:] = filters  # type: ignore[index]  # what is an error in the test is an error in its ranks
        with _device():
            result = fn(rank, world_size, *args, **kwargs)
        return pickle.dumps({"ended_at_s": time.monotonic(), "result": result}), True
    except BaseException as error:
        return _failure(error), False


def _device() -> contextlib.AbstractContextManager[Any]:
    """Return the device that calls run on: one that checks the order of streams, if asked for."""
    if os.environ.get("SHARDWISE_TEST_DEVICE") != "checking":
        return contextlib.nullcontext()
    from checking_device import CheckingDevice  # which imports what most calls do not need

    return CheckingDevice()


def _failure(error: BaseException) -> bytes:
    fields = {
        "ended_at_s": time.monotonic(),
        "error": traceback.format_exc(),
        "error_type": type(error).__name__,
    }
    return pickle.dumps(fields)


def agreed(value: Any) -> Any:
    """Check that all ranks have the same value, and return it."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == found[0] for each in found), found
    return value


def _reset_state() -> None:
    """Give each call the same start, whatever ran in this process before."""
    random.seed(0)
    seed_torch()
    torch.set_num_threads(NUM_THREADS)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.use_deterministic_algorithms(False)


def collect_rarely() -> None:
    """Let Python look for cycles every 50 000 new objects, not every 700."""
    gc.set_threshold(50_000, 10, 10)


def seed_torch() -> None:
    """Seed as `torch.manual_seed(0)` does, which formats the stack for each kind of device."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def _clean_up(groups: kept_groups.KeptGroups) -> None:
    """Give back, or close, the groups that a call made; free its cycles (hooks hold modules)."""
    if groups.give_back():
        # DTensor remembers what it has worked out for a mesh: an equal mesh of the next call would
        # get the old one, whose groups are closed, and each group that is remembered keeps its
        # threads.
        for owner, clear in (
            (dtensor_caches, "_clear_python_sharding_prop_cache"),
            (dtensor_caches, "_clear_fast_path_sharding_prop_cache"),
            (redistribution, "clear_redistribute_planner_cache"),
            (getattr(redistribution, "_gen_transform_infos", None), "cache_clear"),
            (MeshTopoInfo.build_from_mesh, "cache_clear"),
        ):
            getattr(owner, clear, lambda: None)()  # not all versions have all
    gc.collect()
    gc.freeze()  # what stays after a call stays: later collections need not look at it


def die_with_the_parent() -> None:
    """Never outlive the test session, not even when stopped or stuck in C code.

    The server process ends when nobody holds its alive pipe any more; ranks must not hold it, and
    are killed by the kernel when the server ends.
    """
    alive_fd = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    if alive_fd is not None:
        os.close(alive_fd)
        forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    parent_pid = os.getppid()
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
