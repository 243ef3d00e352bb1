"""The parts of a preflight in their order, as every rank goes through them."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.axes import Axes
from shardwise.device import local_device
from shardwise.preflight import checks
from shardwise.preflight.checks import Check, Node, Preflight, Verdict
from shardwise.preflight.links import Echo, ask_nodes, measure_axes, measure_neighbours
from shardwise.preflight.meeting import Meeting, MissingRanksError, Row
from shardwise.preflight.node import Folder, Multiply, check_products, describe_node
from shardwise.train.setup import join_ranks

_NOT_DONE = "not done after"


@dataclass(frozen=True)
class Asked:
    """What to look at: the axes of the run and its folder; how long a rank may be late.

    ``multiply`` and ``clock`` are the product and the clock under test.
    """

    axes: Axes
    folder: Path | None
    timeout_s: float = 60.0
    multiply: Multiply = torch.matmul
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class _Part:
    """One part: what each rank does, and what rank 0 makes of the rows."""

    name: str
    work: Callable[[], Row]
    judge: Callable[[list[Row]], Iterable[Check]]
    must_pass: bool = False  # the parts after it would fail too, or hang
    tells: Callable[[list[Row]], Row] = lambda rows: {}


def preflight(
    meeting: Meeting,
    asked: Asked,
    environment: Mapping[str, str],
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> tuple[Verdict, Preflight | None]:
    """Look at machines, network and folder; every rank calls it together, before any group exists.

    Rank 0 returns what was found, the others only the verdict. ``environment`` has the launcher's
    variables.

    **State** makes and removes small files in the folder, joins and leaves the process group.

    **Cost** a few seconds; about 150 MiB on each device.

    **Raises** CollectiveError on a rank that hears nothing from rank 0.
    """
    began_s = time.monotonic()
    with ExitStack() as leaving:
        leaving.callback(meeting.leave)
        rank = _Rank(meeting, asked, environment, leaving)
        found: list[Check] = []
        parts = rank.parts()
        for number, part in enumerate(parts):
            progress(part.name, number / len(parts))
            found += rank.go_through(part)
            if rank.told["ends"]:
                break
        if meeting.place.rank:
            verdict: Verdict = meeting.tell("verdict", None)["verdict"]
            return verdict, None
        not_reached = tuple(part.name for part in parts[number + 1 :])
        report = Preflight(
            meeting.place.world_size,
            rank.nodes_found(),
            tuple(found),
            not_reached,
            time.monotonic() - began_s,
        )
        meeting.tell("verdict", {"verdict": report.verdict})
        return report.verdict, report


class _Rank:
    """One rank in a preflight; ``told`` is what rank 0 has said, ``rows`` what it has heard."""

    def __init__(
        self, meeting: Meeting, asked: Asked, environment: Mapping[str, str], leaving: ExitStack
    ) -> None:
        self.told: Row = {}
        self.rows: dict[str, list[Row]] = {}
        self._meeting, self._asked, self._place = meeting, asked, meeting.place
        self._environment, self._leaving = environment, leaving
        self._device = local_device(self._place.local_rank)
        self._folder: Folder | None = None

    def parts(self) -> list[_Part]:
        """Return the parts in their order."""
        name = self._named
        found = [
            _Part(
                "nodes", self._describe, lambda r: checks.judge_nodes(r, name), False, self._tell
            ),
            _Part(
                "products",
                lambda: check_products(self._device, self._asked.multiply),
                lambda r: checks.judge_products(r, name, self._kinds()),
            ),
        ]
        if self._asked.folder is not None:
            found += [
                _Part(
                    *("folder", self._write, lambda r: checks.judge_folder(r, name), False),
                    lambda rows: {"wrote": [n for n, row in enumerate(rows) if "sync_s" in row]},
                ),
                _Part("shared folder", self._look, lambda r: checks.judge_shared(r, name)),
            ]
        if self._place.world_size > 1:
            found += [
                _Part("reachability", self._ask, self._judge_ways, must_pass=True),
                _Part("process group", self._join, lambda r: checks.judge_joins(r)),
                _Part("axes", self._measure_axes, lambda r: checks.judge_axes(r, name)),
                _Part(
                    "links",
                    lambda: measure_neighbours(self.told["nodes"], self._device),
                    lambda r: checks.judge_links(r, name, self.told["nodes"]),
                ),
            ]
        return found

    def go_through(self, part: _Part) -> list[Check]:
        """Do one part together with the other ranks; return its checks on rank 0."""
        row = _within(self._asked.timeout_s, part.work)
        found: list[Check] = []
        ends, more = False, {}
        try:
            rows = self._meeting.gather(part.name, row)
        except MissingRanksError as error:
            rows, ends = None, True
            text = f"{self._named(error.ranks)}: {error}. Look at the logs of that rank"
            found = [Check(part.name, "failed", text, tuple(error.ranks))]
        if rows is not None:
            failed = [rank for rank, row in enumerate(rows) if "error" in row]
            if failed:
                # An error says more than that a rank was not done.
                told = [rows[rank]["error"] for rank in failed]
                text = f"{self._named(failed)}: {min(told, key=lambda e: e.startswith(_NOT_DONE))}"
                found = [Check(part.name, "failed", text, tuple(failed))]
                ends = True
            else:
                self.rows[part.name] = rows
                more = part.tells(rows)
                self.told |= more
                found = list(part.judge(rows))
                ends = part.must_pass and any(c.verdict == "failed" for c in found)
        is_first = self._place.rank == 0
        self.told |= self._meeting.tell(part.name, more | {"ends": ends} if is_first else None)
        return found

    # -- what this rank does
    def _describe(self) -> Row:
        row = describe_node(self._device, self._environment)
        if self._place.local_rank == 0:
            echo = self._leaving.enter_context(closing(Echo(row["address"], self._asked.clock)))
            row["echo"] = [row["address"], echo.port]
        return row | {"local": self._place.local_rank}

    def _tell(self, rows: list[Row]) -> Row:
        """Return the ranks of each node, the addresses of their echoes, and a name for files."""
        nodes: list[list[int]] = []
        for rank, row in enumerate(rows):
            if row["local"] == 0:
                nodes.append([])
            nodes[-1].append(rank)
        echoes = {str(rank): row["echo"] for rank, row in enumerate(rows) if "echo" in row}
        return {"nodes": nodes, "echoes": echoes, "token": uuid.uuid4().hex[:12]}

    def _write(self) -> Row:
        if self._place.local_rank or self._asked.folder is None:
            return {}
        self._folder = Folder(self._asked.folder, self.told["token"])
        self._leaving.callback(self._folder.clear, self._place.rank)
        return self._folder.write(self._place.rank)

    def _look(self) -> Row:
        wrote = self.told["wrote"]
        if self._folder is None or self._place.rank not in wrote:
            return {}
        return self._folder.look(self._place.rank, wrote, self._asked.timeout_s / 2)

    def _ask(self) -> Row:
        if self._place.local_rank:
            return {}
        others = {int(r): tuple(at) for r, at in self.told["echoes"].items()}
        others.pop(self._place.rank)
        return {"asked": ask_nodes(others, self._asked.clock)}

    def _join(self) -> Row:
        began_s = time.monotonic()
        store = dist.PrefixStore("group", self._meeting.store)
        joined = join_ranks(self._place, None, store, self._asked.timeout_s)
        self._leaving.enter_context(joined)
        return {"seconds": time.monotonic() - began_s, "backend": str(dist.get_backend())}

    def _measure_axes(self) -> Row:
        return measure_axes(self._asked.axes.over(self._place.world_size), self._device)

    # -- what rank 0 makes of it
    def _named(self, ranks: Iterable[int]) -> str:
        """Return the hosts of ranks, as far as they are known."""
        rows, ranks = self.rows.get("nodes"), list(ranks)
        if rows is None:
            return checks.ranks_text(ranks)
        hosts: dict[str, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(rows[rank]["host"], []).append(rank)
        return ", ".join(f"{host} ({checks.ranks_text(of)})" for host, of in hosts.items())

    def _judge_ways(self, rows: list[Row]) -> list[Check]:
        addresses = checks.judge_addresses(self.rows["nodes"], self._named)
        return [*addresses, *checks.judge_trips(rows, self._named)]

    def _kinds(self) -> list[str]:
        return [f"{r['device']}, {r['processor']}, {r['versions']}" for r in self.rows["nodes"]]

    def nodes_found(self) -> tuple[Node, ...]:
        """Return the nodes with all that is known of them."""
        rows = self.rows
        trips, offsets = checks.trips_of(rows.get("reachability", []))
        nodes = self.told.get("nodes", [])
        links = checks.links_of(rows.get("links", []), nodes)
        found = []
        for number, ranks in enumerate(nodes):
            facts = rows["nodes"][ranks[0]]
            speeds = [value for ends, value in links.items() if number in ends]
            flops = [rows["products"][rank]["flops"] for rank in ranks if "products" in rows]
            names = "host", "address", "interface", "device", "processor", "host_free_bytes"
            found.append(
                Node(
                    ranks=tuple(ranks),
                    **{name: facts[name] for name in names},
                    device_free_bytes=facts.get("device_free_bytes"),
                    trip_s=trips.get(ranks[0]),
                    offset_s=offsets.get(ranks[0]) if trips else None,
                    flops=min(flops, default=None),
                    link_bytes_per_s=max(speeds, default=None),
                )
            )
        return tuple(found)


def _within(limit_s: float, work: Callable[[], Row]) -> Row:
    """Return the row of ``work``, or one with its error, or that it was not done in time.

    A call that hangs in a library cannot be ended: its thread stays until the process ends.
    """
    found: list[Row] = []

    def attempt() -> None:
        try:
            found.append(work())
        except Exception as error:  # the preflight ends and shows it
            found.append({"error": f"{type(error).__name__}: {error}"})

    thread = threading.Thread(target=attempt, name="shardwise-preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else {"error": f"{_NOT_DONE} {limit_s:g} s"}
