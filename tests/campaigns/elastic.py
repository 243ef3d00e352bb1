"""Let nodes join and leave a run, again and again; it must take the steps of clean starts.

    make soak CAMPAIGN=elastic TRIALS=50
    python tests/campaigns/elastic.py [--trials 10] [--seed S] [--networks]

A node is an agent of torchrun with one rank. A trial changes their number once, one to three: a
node joins, is killed with its rank, gets SIGTERM and leaves, or errs: one bit of its state flips.
The check of each step finds that, and ``on_fault: leave`` ends that node and no other. All trials
are of one run. At the end each stretch of steps on as many ranks is taken again from its first
step, by ranks that start clean; each loss and gradient norm must have the same bits. Five
micro-batches do not divide over two or three ranks, and dropout draws. The last line is JSON with
the changes, and how often the state came from memory and from disk.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from networks import Networks

HERE = Path(__file__).parent.parent
sys.path[:0] = [str(HERE), str(HERE / "train")]

import ranks  # noqa: E402 - found through the line above
from resumes import TINY, curve_of, lines_of, train, write_text  # noqa: E402
from shardwise.checkpoint.memory import ROOT, folder_in_memory  # noqa: E402
from shardwise.train.launch import OWN_STORE  # noqa: E402

MOST_NODES = 3
MICRO_BATCHES = 5
LONGEST_S = 120
FLAGS = {"dropout": 0.1, "global_batch": 2 * MICRO_BATCHES, "stage": 3, "schedule": "constant"}
KEPT = {"save_every": 100_000, "memory_every": 3, "resume": "auto", "steps": 1_000_000}
CHECKED = {"replay_every": 1, "on_fault": "leave"}
ERRING = Path(__file__).parent / "erring.py"
HANG_S = 5  # a node that is cut off closes no connection
SOON = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"


class Nodes:
    """The nodes of one run; the first keeps the store in which they meet, and stays."""

    def __init__(self, folder: Path, networks: Networks | None) -> None:
        self._networks = networks
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.output = folder / "run"
        self.flags = {**TINY, **FLAGS, "eval_windows": 0, "data": folder / "text.txt"}
        self.log = folder / "log"
        self.running: list[psutil.Process] = []
        self._numbers: dict[int, int] = {}  # of a running node, by its process
        self.pids: set[int] = set()

    @property
    def has_networks(self) -> bool:
        """Tell whether nodes can be cut off."""
        return self._networks is not None

    def join(self) -> None:
        """Start a node."""
        taken = [self._numbers[node.pid] for node in self.running]
        number = next(n for n in range(MOST_NODES) if n not in taken)
        store = local = "127.0.0.1"
        within: list[str] = []
        if self._networks is not None:
            store, local = self._networks.addresses[0], f"node{number}"
            within = self._networks.within(number)
        nodes = [f"--nnodes=1:{MOST_NODES}", "--nproc-per-node=1", "--max-restarts=999"]
        meeting = [f"--rdzv-endpoint={store}:{self._port}", f"--local-addr={local}"]
        meeting += ["--rdzv-backend=c10d", "--rdzv-id=elastic"]
        meeting += [f"--rdzv-conf=is_host={int(not self.running)},{SOON}"]
        flags = {**self.flags, **KEPT, **CHECKED, "output": self.output, "hang_timeout": HANG_S}
        keys = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items()]
        command = [sys.executable, "-m", "torch.distributed.run", *nodes, *meeting]
        with self.log.open("a") as file:
            node = psutil.Popen(
                [*within, *command, str(ERRING), "train", *keys],
                env={**os.environ, OWN_STORE: "1", "ERRS": str(self._error_of(number))},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self.running.append(node)
        self._numbers[node.pid] = number

    def cut(self, node: psutil.Process) -> None:
        """Cut a node off until the others have gone on without it, then end it."""
        before, number = self.num_loads, self._numbers[node.pid]
        self.running.remove(node)
        self._networks.cut(number)
        try:
            until(lambda: self.has_stepped(before), "steps without the node that is cut off")
        finally:
            self.running.append(node)
            self.kill(node)
            self._networks.cut(number, False)

    def _error_of(self, number: int) -> Path:
        """The file that makes a node err while it exists."""
        return self.output.parent / f"err{number}"

    def err(self, node: psutil.Process) -> None:
        """Let a node err; the check of each step ends it, and no other node."""
        self._error_of(self._numbers[node.pid]).touch()
        node.wait(LONGEST_S)
        self.running.remove(node)

    def kill(self, node: psutil.Process) -> None:
        """Kill an agent and its rank, as the loss of a node does."""
        for process in [*node.children(recursive=True), node]:
            process.kill()
        node.wait(10)
        self.running.remove(node)

    def end(self, node: psutil.Process) -> None:
        """Let a node leave, as a scheduler that takes it back does."""
        node.send_signal(signal.SIGTERM)
        node.wait(LONGEST_S)
        self.running.remove(node)

    @property
    def num_loads(self) -> int:
        """How often the run has gone on."""
        path = self.output / "metrics.jsonl"
        return sum("load_s" in line for line in lines_of(self.output)) if path.exists() else -1

    def has_stepped(self, num_loads: int) -> bool:
        """Tell whether the nodes took some steps together since the run had gone on so often."""
        for node in self.running:
            self.pids.update(child.pid for child in node.children(recursive=True))
        if self.num_loads <= num_loads:
            return False
        lines = [line for line in lines_of(self.output) if "loss" in line or "load_s" in line]
        since = max((n for n, line in enumerate(lines) if "load_s" in line), default=-1)
        passes = -(-MICRO_BATCHES // len(self.running))
        config = (self.output / "config.yaml").read_text()
        return f"accumulation: {passes}\n" in config and len(lines) - 1 - since > 4


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come in {LONGEST_S} s")
        time.sleep(0.1)


def change(nodes: Nodes, draw: random.Random) -> str:
    """Change the number of nodes once; return how."""
    num = len(nodes.running)
    how = "joined" if num == 1 or (num < MOST_NODES and draw.random() < 0.5) else "left"
    if how == "joined":
        nodes.join()
        return how
    ways = {"killed": nodes.kill, "left": nodes.end, "erred": nodes.err}
    if nodes.has_networks:
        ways["cut off"] = nodes.cut
    how = draw.choice(list(ways))
    ways[how](draw.choice(nodes.running[1:]))
    return how


def run_changes(
    num: int, seed: int, folder: Path, networks: Networks | None, counted: Counter[str]
) -> str:
    """Return what is wrong, or nothing."""
    nodes, draw, counts = Nodes(folder, networks), random.Random(seed), [1]
    nodes.join()
    try:
        until(lambda: nodes.has_stepped(-1), "the first steps")
        for number in range(num):
            before = nodes.num_loads
            how = change(nodes, draw)
            counts.append(len(nodes.running))
            if how != "cut off":
                until(partial(nodes.has_stepped, before), f"steps on {counts[-1]} nodes")
            counted[how] += 1
            print(f"change {number + 1}: {how}, {counts[-1]} nodes", file=sys.stderr, flush=True)
        first, *others = nodes.running
        for node in others:
            os.kill(node.pid, signal.SIGTERM)
        nodes.end(first)
    except TimeoutError as error:
        return f"{error}; {nodes.log.read_text()[-3000:]}"
    finally:
        for node in list(nodes.running):
            if node.is_running():
                nodes.kill(node)
    said = nodes.log.read_text()
    counted["faults named"] = said.count("this node leaves the run")
    if counted["faults named"] != counted["erred"]:
        return f"{counted['erred']} nodes erred: {said[-3000:]}"
    counted["loads from memory"] = said.count("(a copy in memory)")
    counted["loads from disk"] = said.count("going on from step") - counted["loads from memory"]
    if left := [pid for pid in nodes.pids if psutil.pid_exists(pid)]:
        return f"processes are left: {left}"
    if folder_in_memory(nodes.output / "checkpoints", ROOT).exists():
        held = sorted(folder_in_memory(nodes.output / "checkpoints", ROOT).rglob("*"))
        return f"copies are left in memory: {held}; {said[-3000:]}"
    return compare(nodes, folder / "clean")


def compare(nodes: Nodes, clean: Path) -> str:
    """Take each stretch again by ranks that start clean; return where the curves part."""
    curve = curve_of(nodes.output)
    for first, last, num_ranks in stretches(nodes):
        part: dict[str, Any] = {"steps": last, "save_every": 1_000_000, "resume": "auto"}
        ranks.run_ranks(train, num_ranks, {**nodes.flags, **part, "output": clean})
        if curve_of(clean) != curve[:last]:
            return (
                f"the steps {first} to {last} on {num_ranks} ranks are not those of a clean start"
            )
    return "" if curve_of(clean) == curve else "steps are missing"


def stretches(nodes: Nodes) -> list[tuple[int, int, int]]:
    """Return (first step, last step, ranks) of each start, from what the run has said."""
    found, num_ranks, first = list[tuple[int, int, int]](), 1, 1
    for line in nodes.log.read_text().splitlines():
        words = line.replace("changed since then: ranks: ", "ranks ").split()
        if line.startswith("going on from step "):
            step = int(words[4])
            found = [(a, min(b, step), n) for a, b, n in [*found, (first, step, num_ranks)]]
            first = step + 1
        elif words[:1] == ["ranks"] and "->" in words:
            num_ranks = int(words[3])
    found.append((first, len(curve_of(nodes.output)), num_ranks))
    return [(a, b, n) for a, b, n in found if a <= b]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10, help="changes of the number of nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--networks", action="store_true", help="one for each node, as root")
    asked = parser.parse_args()
    counted: Counter[str] = Counter()
    with (
        Networks(MOST_NODES) if asked.networks else nullcontext() as networks,
        tempfile.TemporaryDirectory() as name,
    ):
        write_text(Path(name))
        wrong = run_changes(asked.trials, asked.seed, Path(name), networks, counted)
    ranks.close_all()
    if wrong:
        print(f"FAILED: --seed {asked.seed} --trials {asked.trials}\n{wrong}")
    print(json.dumps({"seed": asked.seed, "trials": asked.trials, "verdicts": counted}))
    return 1 if wrong or not counted["loads from memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
