"""The steps of a preflight, in the order in which every rank takes them."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.axes import Axes
from shardwise.comm.collectives import all_reduce_scalars
from shardwise.device import local_device
from shardwise.preflight.checks import Check, Judge, NodeReport, Preflight, Rows, Verdict
from shardwise.preflight.links import Echo, measure_axes, measure_neighbours, measure_trips
from shardwise.preflight.meeting import Meeting, MissingRanksError, Row
from shardwise.preflight.node import FolderProbe, Multiply, check_products, describe_node
from shardwise.train.setup import join_ranks

_LATE = "not done after"


@dataclass(frozen=True)
class Request:
    """The axes and the folder of the run, and the seconds that a rank or a file may be late.

    ``multiply`` and ``clock`` are the product and the clock under test.
    """

    axes: Axes
    folder: Path | None
    timeout_s: float = 60.0
    file_s: float = 30.0  # nfs(5), acdirmin: so long a client may not see a new name
    multiply: Multiply = torch.matmul
    clock: Callable[[], float] = time.time


@dataclass(frozen=True)
class _PreflightStep:
    """One part of a preflight: the work of each rank, and rank 0's checks of the results."""

    name: str
    work: Callable[[], Row]
    judge: Callable[[Rows], Iterable[Check]]
    must_pass: bool = False  # the parts after it would fail too, or hang


def preflight(
    meeting: Meeting,
    request: Request,
    environment: Mapping[str, str],
    progress: Callable[[str, float], None] = lambda label, share: None,
) -> tuple[Verdict, Preflight | None]:
    """Check machines, network and folder; every rank calls it, before any process group exists.

    Rank 0 returns the report too, the others only the verdict. ``environment`` has the launcher's
    variables.

    **State** makes and removes small files in the folder, joins and leaves the process group.

    **Cost** a few seconds; about 150 MiB on each device.

    **Raises** CollectiveError on a rank that gets no answer from rank 0.
    """
    began_s = time.monotonic()
    with ExitStack() as leaving:
        leaving.callback(meeting.leave)
        rank = _Rank(meeting, request, environment, leaving)
        checks: list[Check] = []
        parts = rank.parts()
        for number, part in enumerate(parts):
            progress(part.name, number / len(parts))
            checks += rank.go_through(part)
            if rank.instructions["ends"]:
                break
        if meeting.place.rank:
            verdict: Verdict = meeting.broadcast("verdict", None)["verdict"]
            return verdict, None
        not_reached = tuple(part.name for part in parts[number + 1 :])
        report = Preflight(
            meeting.place.world_size,
            rank.collect_nodes(),
            tuple(checks),
            not_reached,
            time.monotonic() - began_s,
        )
        meeting.broadcast("verdict", {"verdict": report.verdict})
        return report.verdict, report


class _Rank:
    """One rank in a preflight.

    ``instructions`` are those that rank 0 sent after the last part; ``judge`` makes its checks.
    """

    def __init__(
        self, meeting: Meeting, request: Request, environment: Mapping[str, str], leaving: ExitStack
    ) -> None:
        self.instructions: Row = {}
        self.judge = Judge()
        self._meeting = meeting
        self._request = request
        self._place = meeting.place
        self._environment = environment
        self._leaving = leaving
        self._device = torch.device("cpu")  # until `_describe` sets it
        self._folder: FolderProbe | None = None
        self._token = uuid.uuid4().hex[:12]  # in the names of files; that of rank 0 counts

    def parts(self) -> list[_PreflightStep]:
        """Return the parts in their order."""
        judge = self.judge
        parts = [
            _PreflightStep("nodes", self._describe, judge.judge_nodes),
            _PreflightStep("products", self._multiply, judge.judge_products),
        ]
        if self._request.folder is not None:
            parts.append(_PreflightStep("folder", self._write, judge.judge_folder))
            parts.append(_PreflightStep("shared folder", self._look, judge.judge_shared))
        if self._place.world_size > 1:
            parts += [
                _PreflightStep("reachability", self._ask, judge.judge_ways, must_pass=True),
                _PreflightStep("process group", self._join, judge.judge_group),
                _PreflightStep("axes", self._measure_axes, judge.judge_axes),
                _PreflightStep("links", self._measure_links, judge.judge_links),
            ]
        return parts

    def go_through(self, part: _PreflightStep) -> list[Check]:
        """Do one part together with the other ranks; return its checks on rank 0."""
        row = _within(self._request.timeout_s, part.work, self._device)
        if self._place.rank:
            self._meeting.gather(part.name, row)
            self.instructions = self._meeting.broadcast(part.name, None)
            return []
        try:
            rows = self._meeting.gather(part.name, row) or []
            errors = {rank: row["error"] for rank, row in enumerate(rows) if "error" in row}
            # If a rank has failed, ranks that were too late have only waited for it.
            causes = {r: text for r, text in errors.items() if not text.startswith(_LATE)} or errors
        except MissingRanksError as error:
            causes = dict.fromkeys(error.ranks, f"{error}. Look at the log of that rank")
        failed = list(causes)
        if failed:
            by_text = {text: [r for r in failed if causes[r] == text] for text in causes.values()}
            text = "; ".join(f"{self.judge.named(of)}: {text}" for text, of in by_text.items())
            checks = [Check(part.name, "failed", text, tuple(failed))]
        else:
            self.judge.rows[part.name] = rows
            checks = list(part.judge(rows))
        is_bad = part.must_pass and any(check.verdict == "failed" for check in checks)
        self.instructions = self._meeting.broadcast(
            part.name, self._next_instructions() | {"ends": bool(failed) or is_bad}
        )
        return checks

    # -- the work of this rank
    def _describe(self) -> Row:
        self._device = local_device(self._place.local_rank)
        row = describe_node(self._device, self._environment)
        if self._place.local_rank == 0:
            echo = self._leaving.enter_context(closing(Echo(row["address"], self._request.clock)))
            row["echo"] = echo.address
        return row | {"is_first": self._place.local_rank == 0}

    def _multiply(self) -> Row:
        return check_products(self._device, self._request.multiply)

    def _write(self) -> Row:
        if self._place.local_rank or self._request.folder is None:
            return {}
        self._folder = FolderProbe(self._request.folder, self.instructions["token"])
        clear = partial(self._folder.clear, self._place.rank)
        self._leaving.callback(_within, self._request.timeout_s, clear, self._device)
        return self._folder.write(self._place.rank)

    def _look(self) -> Row:
        if self._folder is None or self._place.rank not in self.instructions["wrote"]:
            return {}
        timeout_s = min(self._request.file_s, self._request.timeout_s / 2)
        return self._folder.look(self._place.rank, self.instructions["wrote"], timeout_s)

    def _ask(self) -> Row:
        if self._place.local_rank:
            return {"asked": {}}
        others = {int(rank): tuple(at) for rank, at in self.instructions["echoes"].items()}
        others.pop(self._place.rank)
        return {"asked": measure_trips(others, self._request.clock)}

    def _join(self) -> Row:
        began_s = time.monotonic()
        store = dist.PrefixStore("group", self._meeting.store)
        # Longer than a part may take, so that the part reports it before NCCL ends the process.
        joined = join_ranks(self._place, None, store, 3 * self._request.timeout_s)
        self._leaving.enter_context(joined)
        all_reduce_scalars([0.0])  # NCCL connects with the first collective
        return {"seconds": time.monotonic() - began_s, "backend": str(dist.get_backend())}

    def _measure_axes(self) -> Row:
        return measure_axes(self._request.axes.over(self._place.world_size), self._device)

    def _measure_links(self) -> Row:
        return measure_neighbours(self.instructions["nodes"], self._device)

    # -- the results, on rank 0
    def _next_instructions(self) -> Row:
        """Return the facts that the next part needs: nodes, their echoes, a token, and writers."""
        facts = self.judge.rows.get("nodes", ())
        if not self.judge.nodes:
            for rank, row in enumerate(facts):
                if row["is_first"]:
                    self.judge.nodes.append([])
                self.judge.nodes[-1].append(rank)
        wrote = [n for n, row in enumerate(self.judge.rows.get("folder", ())) if "sync_s" in row]
        echoes = {rank: row["echo"] for rank, row in enumerate(facts) if "echo" in row}
        return {
            "nodes": self.judge.nodes,
            "echoes": echoes,
            "token": self._token,
            "wrote": wrote,
        }

    def collect_nodes(self) -> tuple[NodeReport, ...]:
        """Return the nodes with all results about them."""
        rows = self.judge.rows
        trips, offsets = self.judge.trips()
        links = self.judge.links()
        nodes = []
        for number, ranks in enumerate(self.judge.nodes):
            facts = rows["nodes"][ranks[0]]
            speeds = [value for ends, value in links.items() if number in ends]
            flops = [rows["products"][rank]["flops"] for rank in ranks if "products" in rows]
            names = "host", "address", "interface", "device", "processor", "host_free_bytes"
            nodes.append(
                NodeReport(
                    ranks=tuple(ranks),
                    **{name: facts[name] for name in names},
                    device_free_bytes=facts.get("device_free_bytes"),
                    trip_s=trips.get(ranks[0]),
                    offset_s=offsets.get(ranks[0]),
                    flops=min(flops, default=None),
                    link_bytes_per_s=max(speeds, default=None),
                )
            )
        return tuple(nodes)


def _within(limit_s: float, work: Callable[[], Row], device: torch.device) -> Row:
    """Return the row of ``work``, or a row with its error or with the timeout.

    A thread runs it, with the current device set. A call that hangs in a library cannot be ended:
    its thread stays until the process ends.
    """
    results: list[Row] = []

    def attempt() -> None:
        try:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device.index)
            results.append(work())
        except Exception as error:  # the preflight ends and shows it
            results.append({"error": f"{type(error).__name__}: {error}"})

    thread = threading.Thread(target=attempt, name="shardwise-preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    return results[0] if results else {"error": f"{_LATE} {limit_s:g} s"}
