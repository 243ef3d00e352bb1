"""Worlds of real ranks, forked from one process that has imported everything: 0.2 s each.

The parent must never run autograd nor start threads (forked children would wait for them for ever),
so it only reads files and compares. A rank says short messages ("saved") through a pipe and waits
for a word to go on; the parent kills it when it likes.
"""

import ctypes
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # the first optimizer step of a process imports it: once here, in no rank
import torch.distributed as dist

Say = Callable[..., None]
Hear = Callable[[], str]
Body = Callable[[int, Say, Hear], None]
TIMEOUT_S = 900.0  # of a hang; a slow machine is none


class World:
    """Ranks under way; use it as a context, which kills what still runs."""

    def __init__(self, num_ranks, body):
        self.scratch = tempfile.mkdtemp(prefix="world-")
        self.said = [[] for _ in range(num_ranks)]
        self._pids = []
        self._alive = set(range(num_ranks))
        self._up = []
        self._down = []
        self._rest = [b""] * num_ranks
        for rank in range(num_ranks):
            (up, say), (hear, down) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                for fd in (up, down, *self._up, *self._down):
                    os.close(fd)
                _live(rank, num_ranks, body, self.scratch, say, hear)
            os.close(say)
            os.close(hear)
            os.set_blocking(up, False)
            self._pids.append(pid)
            self._up.append(up)
            self._down.append(down)

    def wait(self, *kinds, timeout_s=TIMEOUT_S):
        """Return when every rank has said one of these, or an error, or is dead."""
        end = time.monotonic() + timeout_s
        while waiting := [rank for rank in self._alive if not self.has_said(rank, *kinds, "error")]:
            rest = end - time.monotonic()
            if rest <= 0:
                raise TimeoutError(f"ranks {waiting} said nothing of {kinds}: {self.said}")
            self.listen(rest, waiting)

    def listen(self, timeout_s, ranks=None):
        """Take in what was said, at the latest after the time."""
        listened = self._alive if ranks is None else ranks
        by_fd = {self._up[rank]: rank for rank in listened if rank in self._alive}
        for fd in select.select(list(by_fd), [], [], timeout_s)[0]:
            rank = by_fd[fd]
            while True:
                try:
                    data = os.read(fd, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    self._alive.discard(rank)
                    break
                *lines, self._rest[rank] = (self._rest[rank] + data).split(b"\n")
                self.said[rank] += [json.loads(line) for line in lines]

    def has_said(self, rank, *kinds):
        """Tell whether a rank has said one of these."""
        return any(message["kind"] in kinds for message in self.said[rank])

    def any_said(self, kind):
        """Tell whether any rank has said this."""
        return any(self.has_said(rank, kind) for rank in range(len(self.said)))

    def all_of(self, kind):
        """Return what each rank said of this kind; raise if one did not."""
        missing = [rank for rank in range(len(self.said)) if not self.has_said(rank, kind)]
        if missing:
            raise RuntimeError(f"ranks {missing} did not say {kind!r}: {self.said}")
        return [next(m for m in said if m["kind"] == kind) for said in self.said]

    def go(self, word="go", but=False):
        """Let all ranks go on, with a word of at most a line; ``but``: all but the last one."""
        for fd in self._down[: len(self._down) - but]:
            os.write(fd, word.encode() + b"\n")

    def kill(self, *ranks):
        """Send SIGKILL, to all ranks if none is named.

        They are stopped first: on a busy machine one would see another die before its own turn.
        """
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for rank in ranks or range(len(self._pids)):
                os.kill(self._pids[rank], number)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Kill what still runs, and clear up; what had been said is kept."""
        self.kill()
        for pid in self._pids:
            os.waitpid(pid, 0)
        self.listen(0)  # what a rank had said before it died
        for fd in (*self._up, *self._down):
            os.close(fd)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _live(rank, num_ranks, body, scratch, up, down):  # and never return
    def say(kind, **more):
        os.write(up, json.dumps({"kind": kind, **more}).encode() + b"\n")

    words = os.fdopen(down)

    def hear():
        word = words.readline()
        if not word:
            os._exit(1)  # the parent is dead
        return word.strip()

    try:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)  # never outlive the campaign
        gc.disable()
        log = os.open(Path(scratch, f"log{rank}"), os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{scratch}/store",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        body(rank, say, hear)
        hear()  # a rank that ends would make the others fail
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        say("error", text=text[:2000], trace=traceback.format_exc()[-2000:])
        hear()
    finally:
        sys.stdout.flush()
        os._exit(0)


def in_a_world(num_ranks, body, kind="done"):
    """Run a body on fresh ranks; return what each said of this kind."""
    with World(num_ranks, body) as world:
        world.wait(kind)
        return world.all_of(kind)


def warm_up():
    """Make this process fit to be forked: one thread, and no page written without need."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
