"""The verdicts of rank 0 on the rows of all ranks.

Note [What counts as odd]
~~~~~~~~~~~~~~~~~~~~~~~~~
A run fails if nodes cannot reach each other, compute different bits, have different versions or do
not share their folder. A node that is only slow, or has less memory than the others, is odd: at
most half as fast as the median, or twice as late. Machines without a fault differ by less than
that, even if another program takes part of a core. If no value is more frequent than all others,
every rank is named, as any of them may be right.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Literal

from shardwise.comm.collective_key import name_ranks
from shardwise.host import is_loopback
from shardwise.preflight.meeting import Row
from shardwise.quantities import format_bytes

Verdict = Literal["ok", "odd", "failed"]
_TIMES = 2.0
_LEAST_SHARED_BYTES = 1 << 30
_MOST_SKEW_S = 0.5
_LEAST_LATE_S = 1e-3  # round trips below are those of one machine, or of a busy core
_SLOW_SYNC_S = 1.0
# File systems whose files are lost with their owner.
_NOT_DURABLE: tuple[tuple[tuple[str, ...], str, Verdict], ...] = (
    (("tmpfs", "ramfs", "devtmpfs"), "host's memory", "odd"),
    (("overlay", "aufs"), "container", "odd"),
)


@dataclass(frozen=True)
class Check:
    """The result of one check; ``ranks`` are those that differ, or on which it failed."""

    name: str
    verdict: Verdict
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class NodeReport:
    """One node: its ranks and their figures; None for parts that were not reached."""

    host: str
    ranks: tuple[int, ...]
    address: str
    interface: str
    device: str
    processor: str
    host_free_bytes: int
    device_free_bytes: int | None = None
    trip_s: float | None = None
    offset_s: float | None = None  # of its clock, from the median
    flops: float | None = None  # of its slowest rank
    link_bytes_per_s: float | None = None  # of the faster of its two links


@dataclass(frozen=True)
class Preflight:
    """The result of a preflight; ``not_reached`` names the parts after one that failed."""

    num_ranks: int
    nodes: tuple[NodeReport, ...]
    checks: tuple[Check, ...]
    not_reached: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        verdicts = {check.verdict for check in self.checks}
        return "failed" if "failed" in verdicts else "odd" if "odd" in verdicts else "ok"

    def to_json(self) -> Row:
        """Return it for programs."""
        return {"kind": "preflight", "verdict": self.verdict} | asdict(self)


Rows = Sequence[Row]
Kind = tuple[str, Verdict]  # a check's name, and its verdict if values differ
_Shown = Callable[[float], str]


class Judge:
    """Makes the checks of each part from its rows, on rank 0; keeps the rows for later parts."""

    def __init__(self) -> None:
        self.rows: dict[str, Rows] = {}
        self.nodes: list[list[int]] = []  # the ranks of each node

    def named(self, ranks: Sequence[int]) -> str:
        """Return the names of ranks for people, by host if hosts are known."""
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            known = self.rows.get("nodes")
            hosts.setdefault(known[rank]["host"] if known else "", []).append(rank)
        texts = {host: name_ranks(sorted(of)) for host, of in hosts.items()}
        return ", ".join(f"{host} ({text})" if host else text for host, text in texts.items())

    def judge_nodes(self, rows: Rows) -> Iterator[Check]:
        """Compare versions, memory and settings of the ranks."""
        for what in rows[0]["versions"]:
            kind: Kind = f"version of {what}", "failed"
            yield self._same(kind, [row["versions"][what] for row in rows])
        yield self._same(("device", "odd"), [row["device"] for row in rows])
        settings = [" ".join(f"{k}={v}" for k, v in row["settings"].items()) for row in rows]
        yield self._same(("variables of NCCL and gloo", "odd"), settings)
        for what in ("host", "device"):
            free = _figures(rows, f"{what}_free_bytes")
            yield from self._compare(f"free {what} memory", free, format_bytes)
        shared = _figures(rows, "shared_memory_bytes")
        small = [rank for rank, size in shared.items() if size < _LEAST_SHARED_BYTES]
        if small:
            text = (
                f"{format_bytes(shared[small[0]])} is free in /dev/shm on {self.named(small)}; "
                "NCCL, data loaders and copies of checkpoints in memory take more. Give a "
                "container a larger one (--shm-size)"
            )
            yield Check("shared memory", "odd", text, tuple(small))

    def judge_products(self, rows: Rows) -> Iterator[Check]:
        """Find devices with wrong bits, with other bits than equal devices, and slow ones."""
        equal: dict[str, list[int]] = {}  # ranks by their kind of device
        for rank, node in enumerate(self.rows["nodes"]):
            kind = f"{node['device']}, {node['processor']}, {node['versions']}"
            equal.setdefault(kind, []).append(rank)
        wrong = [rank for rank, row in enumerate(rows) if row["wrong"]]
        other = [
            ranks[n]
            for ranks in equal.values()
            for n in _others([rows[r]["digests"] for r in ranks])
        ]
        texts = [f"{self.named([r])}: {', '.join(rows[r]['wrong'])}" for r in wrong]
        if other:
            texts.append(f"{self.named(other)}: other bits than on equal devices")
        if texts:
            text = f"a matrix product is wrong: {'; '.join(texts)}. Have the device tested"
            yield Check("products", "failed", text, tuple(sorted({*wrong, *other})))
        else:
            yield Check("products", "ok", "all are exact, and equal devices agree to the bit")
        for ranks in equal.values():
            rates = {rank: rows[rank]["flops"] for rank in ranks}
            yield from self._compare("speed of products", rates, _flops)

    def judge_folder(self, rows: Rows) -> Iterator[Check]:
        """Check that the folder outlives the nodes, and compare the seconds of durable writes."""
        refused = [rank for rank, row in enumerate(rows) if "refused" in row]
        if refused:
            text = f"{self.named(refused)} cannot write it: {rows[refused[0]]['refused']}"
            yield Check("folder", "failed", text, tuple(refused))
        for kinds, owner, verdict in _NOT_DURABLE:
            gone = [rank for rank, row in enumerate(rows) if row.get("kind") in kinds]
            if gone:
                text = (
                    f"on {self.named(gone)} it lies on {rows[gone[0]]['kind']}: checkpoints are "
                    f"lost with the {owner}"
                )
                yield Check("folder", verdict, text, tuple(gone))
        synced = _figures(rows, "sync_s")
        yield from self._compare("durable write", synced, _milliseconds, late_from=_SLOW_SYNC_S)

    def judge_shared(self, rows: Rows) -> Iterator[Check]:
        """Check that all nodes see the same folder, and that a lock holds on all of them."""
        blind = [rank for rank, row in enumerate(rows) if row.get("unseen")]
        free = [rank for rank, row in enumerate(rows) if not row.get("is_excluded", True)]
        if blind:
            text = (
                f"{self.named(blind[:1])} does not see the files of "
                f"{self.named(rows[blind[0]]['unseen'])}: the folder is not the same on all nodes. "
                "Give a path on a file system that they share"
            )
            yield Check("shared folder", "failed", text, tuple(blind))
        elif (num := sum("unseen" in row for row in rows)) > 1:
            yield Check("shared folder", "ok", f"{num} nodes see the files of each other")
        if free:
            text = (
                f"a lock of rank 0 does not hold on {self.named(free)}: two runs could write one "
                "folder. Mount it with locks (NFS: without nolock, Lustre: with flock)"
            )
            yield Check("lock", "odd", text, tuple(free))

    def judge_ways(self, rows: Rows) -> Iterator[Check]:
        """Find loopback addresses, unreachable and far nodes, and clocks that differ."""
        yield from self._judge_addresses(self.rows["nodes"])
        ways = [(a, int(b), way) for a, row in enumerate(rows) for b, way in row["asked"].items()]
        lost = [(a, b, way["error"]) for a, b, way in ways if "error" in way]
        if lost:
            ends = Counter(rank for a, b, _ in lost for rank in (a, b))
            worst = [rank for rank, count in ends.items() if count == max(ends.values())]
            a, b, why = lost[0]
            text = (
                f"{len(lost)} of the ways between nodes are closed, most of them at "
                f"{self.named(worst)}; from {self.named([a])} to {self.named([b])}: {why}. Look "
                "for a firewall, a wrong address or a link that is down"
            )
            yield Check("reachability", "failed", text, tuple(worst))
        trips, offsets = self.trips()
        yield from self._compare("round trip", trips, _milliseconds, late_from=_LEAST_LATE_S)
        skewed = [rank for rank, offset in offsets.items() if abs(offset) > _MOST_SKEW_S]
        text = f"clocks differ by {max(map(abs, offsets.values()), default=0.0):.2g} s at most"
        if skewed:
            text += f", on {self.named(skewed)}; times in logs cannot be compared: run NTP"
        yield Check("clock", "odd" if skewed else "ok", text, tuple(skewed))

    def _judge_addresses(self, nodes: Rows) -> Iterator[Check]:
        """Find addresses that lead other nodes to themselves, if ranks have several networks."""
        if len({row["network"] for row in nodes}) == 1:
            return
        looping = [rank for rank, row in enumerate(nodes) if is_loopback(row["address"])]
        if looping:
            text = (
                f"{self.named(looping)} would be reached at {nodes[looping[0]]['address']}, which "
                "leads others to themselves: give torchrun --local-addr there"
            )
            yield Check("address", "failed", text, tuple(looping))
        # Runs on GPUs have groups of gloo too, for small exchanges.
        by_name = [
            rank
            for rank, row in enumerate(nodes)
            if not row["has_interface"] and is_loopback(row["name_address"])
        ]
        if by_name and not looping:
            row = nodes[by_name[0]]
            text = (
                f"the name of {self.named(by_name)} leads to {row['name_address']}, which gloo "
                "takes as the address that others connect to: set GLOO_SOCKET_IFNAME="
                f"{row['interface'] or 'the interface to the other nodes'}"
            )
            yield Check("address", "failed", text, tuple(by_name))

    def trips(self) -> tuple[dict[int, float], dict[int, float]]:
        """Return each node's median round trip, and its clock's offset from the median."""
        trips, offsets = {}, {}
        for a, row in enumerate(self.rows.get("reachability", ())):
            reached = {int(b): way for b, way in row["asked"].items() if "error" not in way}
            if reached:
                trips[a] = median(way["trip_s"] for way in reached.values())
            if a == 0:
                offsets = {0: 0.0} | {b: way["offset_s"] for b, way in reached.items()}
        usual = median(offsets.values()) if offsets else 0.0  # the first clock may be the odd one
        return trips, {rank: offset - usual for rank, offset in offsets.items()}

    def judge_group(self, rows: Rows) -> Iterator[Check]:
        """Report the seconds in which the process group opened."""
        slowest = max(row["seconds"] for row in rows)
        yield Check("process group", "ok", f"{rows[0]['backend']}, open after {slowest:.2f} s")

    def judge_axes(self, rows: Rows) -> Iterator[Check]:
        """Compare the speeds and latencies of the groups of each axis."""
        for name in rows[0]:
            of_ranks = [row[name] for row in rows]
            rates, trips = _figures(of_ranks, "bytes_per_s"), _figures(of_ranks, "latency_s")
            yield from self._compare(f"axis {name}", rates, _per_second)
            latency = f"latency of axis {name}"
            yield from self._compare(latency, trips, _milliseconds, late_from=_LEAST_LATE_S)

    def judge_links(self, rows: Rows) -> Iterator[Check]:
        """Find nodes whose links to both neighbours are slow, or else slow links."""
        rates = self.links()
        best = {n: max(r for ends, r in rates.items() if n in ends) for e in rates for n in e}
        firsts = {self.nodes[node][0]: rate for node, rate in best.items()}
        for check in self._compare("links", firsts, _per_second):
            slow = [ends for ends, rate in rates.items() if rate * _TIMES < median(rates.values())]
            if check.verdict == "ok" and slow:
                ranks = [self.nodes[node][0] for node in slow[0]]
                text = f"{check.text}; {_per_second(rates[slow[0]])} between {self.named(ranks)}"
                check = Check("links", "odd", text, tuple(ranks))
            yield check

    def links(self) -> dict[tuple[int, int], float]:
        """Return the bytes per second of each link, by its nodes; the slower direction counts."""
        rows = self.rows.get("links", ())
        rates: dict[tuple[int, int], float] = {}
        for key in dict.fromkeys(key for row in rows for key in row):
            a, b = map(int, key.split("-"))
            ends = ([rows[rank].get(key, {}) for rank in self.nodes[node]] for node in (a, b))
            rates[a, b] = min(sum(row.get("bytes_per_s", 0.0) for row in end) for end in ends)
        return rates

    def _same(self, kind: Kind, values: Sequence[str]) -> Check:
        """Compare texts; the check names the ranks that have each of them."""
        (name, verdict), other = kind, _others(values)
        if not other:
            return Check(name, "ok", values[0] or "none")
        having: dict[str, list[int]] = {}
        for rank, value in enumerate(values):
            having.setdefault(value or "none", []).append(rank)
        parts = sorted(having.items(), key=lambda part: len(part[1]))
        text = "; ".join(f"{self.named(ranks)}: {value}" for value, ranks in parts)
        return Check(name, verdict, text, tuple(other))

    def _compare(
        self, name: str, values: Mapping[int, float], shown: _Shown, late_from: float | None = None
    ) -> Iterator[Check]:
        """Compare figures with their median; see Note [What counts as odd].

        More is better. With ``late_from`` less is better, and a value below it is never odd.
        """
        if not values:
            return
        usual = median(values.values())
        if late_from is None:
            odd = [rank for rank, value in values.items() if value * _TIMES < usual]
        else:
            odd = [r for r, value in values.items() if value > max(usual * _TIMES, late_from)]
        text = f"{shown(min(values.values()))} to {shown(max(values.values()))}"
        if odd:
            text += f"; {self.named(odd)}: {shown(values[odd[0]])}, the median is {shown(usual)}"
        yield Check(name, "odd" if odd else "ok", text, tuple(odd))


def _figures(rows: Rows, key: str) -> dict[int, float]:
    return {rank: float(row[key]) for rank, row in enumerate(rows) if key in row}


def _others(values: Sequence[object]) -> list[int]:
    """Return the places of values that are not the most frequent one; all if none is."""
    texts = list(map(str, values))
    (usual, most), *rest = Counter(texts).most_common(2)
    is_tie = any(count == most for _, count in rest)
    return [place for place, text in enumerate(texts) if is_tie or text != usual]


def _per_second(num_bytes: float) -> str:
    return f"{format_bytes(num_bytes)}/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _flops(rate: float) -> str:
    return f"{rate / 1e9:,.0f} GFLOP/s"
