"""Nodes with networks of their own on one machine: Linux network namespaces, joined by a bridge.

Each node has its own address, host name and names file (ip-netns(8), unshare(1)), so a link can be
slow or down, and two nodes can be cut off from each other. It needs root.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import Self

SLOW = "rate 20mbit burst 32kbit latency 50ms"


class Networks:
    """So many nodes, made on entry and removed on exit; each is named by its number."""

    def __init__(self, num: int) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            raise SystemExit("nodes with networks of their own need root, and ip of iproute2")
        mark = secrets.token_hex(3)  # a network is removed a little after its name
        self._bridge = f"swb{mark}"
        self._names = [f"sw{mark}n{node}" for node in range(num)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(num)]

    def __enter__(self) -> Self:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("link", "set", self._bridge, "up")
        for node, name in enumerate(self._names):
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", self._bridge, "up")
            _ip("-n", name, "addr", "add", f"{self.addresses[node]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")
            self.name(node, self.addresses[node])
        return self

    def __exit__(self, *error: object) -> None:
        for name in self._names:
            pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            subprocess.run(["kill", "-9", *pids.stdout.split()], capture_output=True)
            _ip("netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)
        _ip("link", "del", self._bridge)

    def within(self, node: int) -> list[str]:
        """Return the words before a command that runs on a node, under its own host name."""
        named = f'hostname node{node}; exec "$@"'
        return ["ip", "netns", "exec", self._names[node], "unshare", "-u", "sh", "-c", named, "sh"]

    def name(self, node: int, address: str) -> None:
        """Let the name of a node lead to an address, on the node itself; others know the right."""
        hosts = [f"{at} node{n}" for n, at in enumerate(self.addresses) if n != node]
        folder = Path("/etc/netns", self._names[node])
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f"{address} node{node}", "127.0.0.1 localhost", *hosts]
        (folder / "hosts").write_text("\n".join(lines) + "\n")

    def slow(self, node: int) -> None:
        """Let a node send 20 Mbit/s."""
        within = ["ip", "netns", "exec", self._names[node]]
        subprocess.run([*within, *f"tc qdisc add dev eth0 root tbf {SLOW}".split()], check=True)

    def close(self, a: int, b: int) -> None:
        """Close the way between two nodes."""
        _ip("-n", self._names[a], "route", "add", "unreachable", self.addresses[b])

    def cut(self, node: int, is_off: bool = True) -> None:
        """Cut a node off from all others, or join it again."""
        _ip("link", "set", self._names[node], "down" if is_off else "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
