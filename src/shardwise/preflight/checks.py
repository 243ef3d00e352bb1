"""What rank 0 makes of the rows: verdicts, with the nodes that differ from the others.

Note [What counts as odd]
~~~~~~~~~~~~~~~~~~~~~~~~~
A run fails where nodes cannot reach each other, compute other bits, have other versions or do not
share their folder. A node that is only slow, or has less memory than the others, is odd: at most
half as fast as the median, or twice as late. Machines without a fault differ by less than that,
also where another program takes part of a core.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Literal

from shardwise.preflight.meeting import Row
from shardwise.quantities import format_bytes

Verdict = Literal["ok", "odd", "failed"]
_TIMES = 2.0
_LEAST_SHARED_BYTES = 1 << 30
_MOST_SKEW_S = 0.5
_LEAST_LATE_S = 1e-3  # round trips below are those of one machine, or of a busy core
_SLOW_SYNC_S = 1.0
_IN_MEMORY, _OF_CONTAINER = ("tmpfs", "ramfs", "devtmpfs"), ("overlay", "aufs")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; ``ranks`` are those that differ, or at which it failed."""

    name: str
    verdict: Verdict
    text: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Node:
    """One node: its ranks, and what they found, as far as the preflight came."""

    host: str
    ranks: tuple[int, ...]
    address: str
    interface: str
    device: str
    processor: str
    host_free_bytes: int
    device_free_bytes: int | None = None
    trip_s: float | None = None
    offset_s: float | None = None  # of its clock, from that of the first node
    flops: float | None = None  # of its slowest rank
    link_bytes_per_s: float | None = None  # of the faster of its two links


@dataclass(frozen=True)
class Preflight:
    """What a preflight found; ``not_reached`` names the parts after one that failed."""

    num_ranks: int
    nodes: tuple[Node, ...]
    checks: tuple[Check, ...]
    not_reached: tuple[str, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst of the checks."""
        found = {check.verdict for check in self.checks}
        return "failed" if "failed" in found else "odd" if "odd" in found else "ok"

    def to_json(self) -> Row:
        """Return it for programs."""
        return {"kind": "preflight", "verdict": self.verdict} | asdict(self)


Rows = Sequence[Row]
Nodes = Sequence[Sequence[int]]  # the ranks of each
Named = Callable[[Sequence[int]], str]  # of ranks, by host


def judge_nodes(rows: Rows, named: Named) -> Iterator[Check]:
    """Compare versions, addresses, memory and settings of the ranks."""
    for what in rows[0]["versions"]:
        yield _same(f"version of {what}", [row["versions"][what] for row in rows], named, "failed")
    yield _same("device", [row["device"] for row in rows], named, "odd")
    settings = [" ".join(f"{k}={v}" for k, v in row["settings"].items()) for row in rows]
    yield _same("variables of NCCL and gloo", settings, named, "odd")
    for key, what in (("host_free_bytes", "host memory"), ("device_free_bytes", "device memory")):
        if key in rows[0]:
            free = {rank: float(row[key]) for rank, row in enumerate(rows)}
            yield _slow(f"free {what}", free, format_bytes, named)
    small = _where(rows, lambda row: row.get("shared_memory_bytes", 1 << 62) < _LEAST_SHARED_BYTES)
    if small:
        size = format_bytes(rows[small[0]]["shared_memory_bytes"])
        yield Check(
            "shared memory",
            "odd",
            f"{size} is free in /dev/shm on {named(small)}; NCCL, data loaders and copies of "
            "checkpoints in memory take more. Give a container a larger one (--shm-size)",
            tuple(small),
        )


def judge_addresses(rows: Rows, named: Named) -> Iterator[Check]:
    """Find nodes of several whose address leads other nodes to themselves."""
    if len({row["network"] for row in rows}) > 1:
        inward = _where(rows, lambda row: _is_inward(row["address"]))
        if inward:
            text = f"{named(inward)} would be reached at {rows[inward[0]]['address']}, which leads "
            text += "others to themselves: give torchrun --rdzv-endpoint the first node's address"
            yield Check("address", "failed", text, tuple(inward))
    if not any(_is_inward(row["address"]) for row in rows):
        inward = _where(
            rows,
            lambda row: (
                _is_inward(row["name_address"])
                and row["device"] == "cpu"  # NCCL looks for interfaces itself
                and not row["has_interface"]
            ),
        )
        if inward:
            row = rows[inward[0]]
            text = f"the name of {named(inward)} leads to {row['name_address']}, which gloo takes "
            text += "as the address that others connect to: set GLOO_SOCKET_IFNAME="
            text += row["interface"] or "the interface to the other nodes"
            yield Check("address", "failed", text, tuple(inward))


def _is_inward(address: str) -> bool:
    return address == "::1" or address.startswith("127.")


def judge_trips(rows: Rows, named: Named) -> Iterator[Check]:
    """Find nodes that cannot be reached, are far or have another time."""
    lost = [
        (a, int(b), row["error"])
        for a, of in _asked(rows)
        for b, row in of.items()
        if "error" in row
    ]
    if lost:
        ends = Counter(rank for a, b, _ in lost for rank in (a, b))
        worst = [rank for rank, count in ends.items() if count == max(ends.values())]
        a, b, why = lost[0]
        yield Check(
            "reachability",
            "failed",
            f"{len(lost)} of the ways between nodes are closed, most of them at {named(worst)}; "
            f"from {named([a])} to {named([b])}: {why}. Look for a firewall, a wrong address or a "
            "link that is down",
            tuple(worst),
        )
        return
    trips, offsets = trips_of(rows)
    if trips:
        late = _slow("round trip", trips, _milliseconds, named, more=False)
        yield late if max(trips.values()) > _LEAST_LATE_S else Check("round trip", "ok", late.text)
        skewed = [rank for rank, offset in offsets.items() if abs(offset) > _MOST_SKEW_S]
        most = max(offsets.values(), key=abs)
        text = f"clocks differ by {abs(most):.2g} s at most"
        if skewed:
            text += f", on {named(skewed)}; times in logs and reports cannot be compared: run NTP"
        yield Check("clock", "odd" if skewed else "ok", text, tuple(skewed))


def trips_of(rows: Rows) -> tuple[dict[int, float], dict[int, float]]:
    """Return each node's median round trip to others, and its clock's offset from the first's."""
    trips, offsets = {}, {0: 0.0}
    for a, of in _asked(rows):
        heard = {int(b): row for b, row in of.items() if "error" not in row}
        if heard:
            trips[a] = median(row["trip_s"] for row in heard.values())
        if a == 0:
            offsets |= {b: row["offset_s"] for b, row in heard.items()}
    return trips, offsets


def _asked(rows: Rows) -> list[tuple[int, Row]]:
    return [(rank, row["asked"]) for rank, row in enumerate(rows) if row.get("asked")]


def judge_products(rows: Rows, named: Named, kinds: Sequence[str]) -> Iterator[Check]:
    """Find devices with wrong bits, with other bits than equal devices, and slow ones.

    ``kinds`` are the devices of the ranks: only equal ones must have equal bits.
    """
    wrong = _where(rows, lambda row: bool(row["wrong"]))
    other = []
    for kind in dict.fromkeys(kinds):
        ranks = [rank for rank, each in enumerate(kinds) if each == kind]
        found = Counter(str(rows[rank]["digests"]) for rank in ranks)
        usual = found.most_common(1)[0][0]
        other += [rank for rank in ranks if str(rows[rank]["digests"]) != usual]
    if wrong or other:
        text = "; ".join(f"{named([rank])}: {', '.join(rows[rank]['wrong'])}" for rank in wrong)
        text = text or f"{named(other)} has other bits than most devices of its kind"
        text = f"a matrix product is wrong: {text}. Take the device out and have it tested"
        yield Check("products", "failed", text, tuple(wrong or other))
    else:
        yield Check("products", "ok", "every device has the bits that were known before")
    for kind in dict.fromkeys(kinds):
        rates = {r: row["flops"] for r, row in enumerate(rows) if kinds[r] == kind}
        yield _slow("speed of products", rates, lambda v: f"{v / 1e9:,.0f} GFLOP/s", named)


def judge_folder(rows: Rows, named: Named) -> Iterator[Check]:
    """Tell whether the folder outlives the nodes, and how long a durable write takes."""
    refused = _where(rows, lambda row: "refused" in row)
    if refused:
        text = f"{named(refused)} cannot write it: {rows[refused[0]]['refused']}"
        yield Check("folder", "failed", text, tuple(refused))
    kinds = {rank: row["kind"] for rank, row in enumerate(rows) if "kind" in row}
    gone = [rank for rank, kind in kinds.items() if kind in (*_IN_MEMORY, *_OF_CONTAINER)]
    if gone:
        kind = kinds[gone[0]]
        owner = "host" if kind in _IN_MEMORY else "container"
        text = f"on {named(gone)} it lies on {kind}: checkpoints are lost with the {owner}"
        verdict: Verdict = "failed" if kind in _IN_MEMORY else "odd"
        yield Check("folder", verdict, text, tuple(gone))
    synced = {rank: row["sync_s"] for rank, row in enumerate(rows) if "sync_s" in row}
    if not synced:
        return
    late = _slow("durable write", synced, _milliseconds, named, more=False)
    yield late if max(synced.values()) > _SLOW_SYNC_S else Check(late.name, "ok", late.text)


def judge_shared(rows: Rows, named: Named) -> Iterator[Check]:
    """Tell whether all nodes see one folder, and whether a lock on one holds on the others."""
    blind = {rank: row["unseen"] for rank, row in enumerate(rows) if row.get("unseen")}
    if blind:
        ranks = list(blind)
        text = f"{named(ranks[:1])} does not see the files of {named(blind[ranks[0]])}: the folder "
        text += "is not the same on all nodes. Give a path on a file system that they share"
        yield Check("shared folder", "failed", text, tuple(ranks))
        return
    yield Check("shared folder", "ok", "every node sees the files of all others")
    free = [rank for rank, row in enumerate(rows) if not row.get("is_excluded", True)]
    if free:
        text = f"a lock of rank 0 does not hold on {named(free)}: two runs could write one folder. "
        text += "Mount the file system with locks (NFS: without nolock, Lustre: with flock)"
        yield Check("lock", "odd", text, tuple(free))


def judge_joins(rows: Rows) -> Iterator[Check]:
    """Tell how long the process group took to open."""
    slowest = max(row["seconds"] for row in rows)
    yield Check("process group", "ok", f"{rows[0]['backend']}, open after {slowest:.2f} s")


def judge_axes(rows: Rows, named: Named) -> Iterator[Check]:
    """Compare the speeds of the groups of each axis."""
    for name in dict.fromkeys(name for row in rows for name in row):
        rates = {rank: row[name]["bytes_per_s"] for rank, row in enumerate(rows) if name in row}
        yield _slow(f"axis {name}", rates, _per_second, named)


def judge_links(rows: Rows, named: Named, nodes: Nodes) -> Iterator[Check]:
    """Find nodes whose links to both neighbours are slow, or else slow links."""
    rates = links_of(rows, nodes)
    if not rates:
        return
    best = {
        node: max(r for key, r in rates.items() if node in key) for key in rates for node in key
    }
    of_nodes = lambda found: named([nodes[node][0] for node in found])  # noqa: E731
    check = _slow("links", best, _per_second, of_nodes)
    slow = list(check.ranks)
    if not slow:
        numbered = dict(enumerate(rates.values()))
        between = lambda found: " and ".join(of_nodes(list(rates)[n]) for n in found)  # noqa: E731
        check = _slow("links", numbered, _per_second, between)
        slow = [node for n in check.ranks for node in list(rates)[n]]
    yield replace(check, ranks=tuple(rank for node in slow for rank in nodes[node]))


def links_of(rows: Rows, nodes: Nodes) -> dict[tuple[int, int], float]:
    """Return the bytes per second of each link, by its nodes; the slower direction counts."""
    found: dict[tuple[int, int], float] = {}
    for key in dict.fromkeys(key for row in rows for key in row):
        a, b = map(int, key.split("-"))
        ends = ([rows[rank].get(key, {}) for rank in nodes[node]] for node in (a, b))
        found[a, b] = min(sum(row.get("bytes_per_s", 0.0) for row in end) for end in ends)
    return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Return numbers of ranks for people, neighbours as a range."""
    first, last = min(ranks), max(ranks)
    if len(ranks) > 2 and last - first + 1 == len(ranks):
        return f"ranks {first} to {last}"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _where(rows: Rows, is_so: Callable[[Row], bool]) -> list[int]:
    return [rank for rank, row in enumerate(rows) if is_so(row)]


def _same(name: str, values: Sequence[str], named: Named, verdict: Verdict) -> Check:
    """Compare texts with the most frequent one."""
    usual = Counter(values).most_common(1)[0][0]
    other = [rank for rank, value in enumerate(values) if value != usual]
    if not other:
        return Check(name, "ok", usual or "none")
    text = f"{named(other)}: {values[other[0]] or 'none'}; the others: {usual or 'none'}"
    return Check(name, verdict, text, tuple(other))


def _slow(
    name: str,
    values: Mapping[int, float],
    shown: Callable[[float], str],
    named: Named,
    more: bool = True,
) -> Check:
    """Compare figures with their median; see Note [What counts as odd]. ``more`` is better."""
    usual = median(values.values())
    text = f"{shown(min(values.values()))} to {shown(max(values.values()))}"
    if more:
        odd = [rank for rank, value in values.items() if value * _TIMES < usual]
    else:
        odd = [rank for rank, value in values.items() if value > usual * _TIMES]
    if not odd:
        return Check(name, "ok", text)
    text += f"; {named(odd)}: {shown(values[odd[0]])}, the median is {shown(usual)}"
    return Check(name, "odd", text, tuple(odd))


def _per_second(num_bytes: float) -> str:
    return f"{format_bytes(num_bytes)}/s"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
