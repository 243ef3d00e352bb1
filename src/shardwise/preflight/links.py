"""Connections between nodes: round trips and clocks, speeds of axes and of neighbours."""

import socket
import socketserver
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.axes import DENSE, Axes
from shardwise.bench.network import collective_starter
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.host import TcpServer
from shardwise.mesh import DataAxes, axes_of
from shardwise.preflight.meeting import Row

Address = tuple[str, int]
_CONNECT_S = 5.0
_TIMES_ASKED = 7
_AT_ONCE = 64
_TIME = struct.Struct("<d")
_SMALL_BYTES, _FIRST_BYTES, _MOST_BYTES = 4 << 10, 256 << 10, 64 << 20
_NUM_CALLS = 5
_CALL_S = 0.05  # a collective that takes so long shows the speed of its link


class Echo(TcpServer):
    """Server that sends the time of this node's clock to every client, from a thread."""

    poll_s = 0.05

    def __init__(self, host: str, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        super().__init__(host, _EchoHandler, "shardwise-echo")


class _EchoHandler(socketserver.BaseRequestHandler):
    server: Echo

    def handle(self) -> None:
        self.request.settimeout(_CONNECT_S)
        while self.request.recv(1):
            self.request.sendall(_TIME.pack(self.server.clock()))


def measure_trips(
    addresses: Mapping[int, Address], clock: Callable[[], float] = time.time
) -> dict[int, Row]:
    """Measure round trips to the echoes of other nodes, and the offsets of their clocks.

    ``addresses`` and the result are by the first rank of a node.

    ``offset_s`` is the other clock minus this one at the quickest of seven round trips; its error
    is at most half of that (RFC 5905, section 8). A node that cannot be reached has an ``error``.
    """

    def ask(address: Address) -> Row:
        try:
            with socket.create_connection(address, _CONNECT_S) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return min((_ask_once(link, clock) for _ in range(_TIMES_ASKED)), key=_trip)
        except OSError as error:
            return {"error": error.strerror or str(error)}

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(addresses, pool.map(ask, addresses.values()), strict=True))


def _ask_once(link: socket.socket, clock: Callable[[], float]) -> Row:
    began_s, sent_at = time.perf_counter(), clock()
    link.sendall(b"?")
    (other_time,) = _TIME.unpack(link.recv(_TIME.size, socket.MSG_WAITALL).ljust(_TIME.size, b"\0"))
    trip_s = time.perf_counter() - began_s
    return {"trip_s": trip_s, "offset_s": other_time - (sent_at + trip_s / 2)}


def _trip(row: Row) -> float:
    return float(row["trip_s"])


def measure_axes(axes: Axes, device: torch.device) -> Row:
    """Return the latency and speed of an all-gather along each axis of several ranks.

    Every rank calls it together. Speeds are bytes that a rank receives in a second.
    """
    speeds = {}
    for name in DENSE:
        if getattr(axes, name) > 1:
            speeds[name] = _measure(axes_of(axes[name]), device)
    return speeds


def measure_neighbours(nodes: Sequence[Sequence[int]], device: torch.device) -> Row:
    """Return the speed of the links between this rank's node and those next to it in a ring.

    ``nodes`` are the ranks of each node. Ranks with the same place on two nodes form a pair, and
    all pairs of a round work at once. A slow node has two slow links, a slow link has two ends.
    Every rank calls it together. The keys are two numbers of nodes, such as "0-1".
    """
    speeds: dict[str, object] = {}
    rank = dist.get_rank()
    size = min(map(len, nodes))  # as many pairs on each link
    for links in rounds_of(len(nodes)):
        all_reduce_scalars([0.0])  # the round before is over on all ranks
        pairs = {(nodes[a][n], nodes[b][n]): f"{a}-{b}" for a, b in links for n in range(size)}
        pair = next((pair for pair in pairs if rank in pair), (rank,))
        # torch names such a group by its ranks and the number of groups that this rank has, so
        # that every rank makes one in each round.
        group = dist.new_group(list(pair), use_local_synchronization=True)
        if pair in pairs:
            axes = axes_of(DeviceMesh.from_group(group, device.type))
            speeds[pairs[pair]] = _measure(axes, device)
    return speeds


def rounds_of(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Return the rounds in which each of some nodes meets the next one, around a ring.

    Within a round each node is in one pair at most.
    """
    if num_nodes < 3:
        return [[(0, 1)]] if num_nodes == 2 else []
    ring = [(n, (n + 1) % num_nodes) for n in range(num_nodes)]
    even = num_nodes - num_nodes % 2
    return [links for links in (ring[:even:2], ring[1:even:2], ring[even:]) if links]


def _measure(axes: DataAxes, device: torch.device) -> Row:
    axis = axes.shard
    latency_s = _best_s(axes, device, _SMALL_BYTES, _NUM_CALLS)
    payload = _FIRST_BYTES
    # The ranks of the axis decide together: a slow link gets less to carry.
    mean_s = all_reduce_scalars([_best_s(axes, device, payload, 1)], axis.group)[0] / axis.size
    while payload < _MOST_BYTES and mean_s * payload / _FIRST_BYTES < _CALL_S:
        payload *= 2
    received = payload * (axis.size - 1) / axis.size
    seconds = _best_s(axes, device, payload, _NUM_CALLS)
    return {"latency_s": latency_s, "bytes_per_s": received / seconds}


def _best_s(axes: DataAxes, device: torch.device, payload: int, num_calls: int) -> float:
    """Return the shortest of ``num_calls`` all-gathers."""
    start = collective_starter(axes, device, "all_gather", payload)
    best_s = float("inf")
    for _ in range(1 + num_calls):  # the first one opens connections
        began_s = time.perf_counter()
        start().wait()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
    return best_s
