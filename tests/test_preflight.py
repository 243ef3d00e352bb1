"""A preflight finds the faults that are put in, at the ranks that have them, and nothing else.

Each rank is a node of its own here. `make soak CAMPAIGN=nodes` has nodes with networks of
their own.
"""

import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import ranks
from shardwise.axes import Axes
from shardwise.cli.main import app
from shardwise.errors import CollectiveError
from shardwise.preflight import node, run
from shardwise.preflight.checks import Judge
from shardwise.preflight.links import Echo, rounds_of
from shardwise.preflight.meeting import Meeting, open_store
from shardwise.preflight.run import Request, preflight
from shardwise.train.launch import RankPlace

SIZE = 3
ODD = 1  # the rank with the fault
HERE = {"MASTER_ADDR": "127.0.0.1"}
LATE_S = 5.0  # after which a rank that never comes is late
FILE_S = 1.0  # after which a file that never appears is not there
OF_SPEED = "speed of products", "round trip", "durable write", "axis", "latency", "links"


class _Closed(Echo):
    """An echo that nobody can connect to."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        super().close()

    def close(self) -> None:
        """Do nothing more."""


def multiply_wrongly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = left @ right
    product[5, 7] += 1
    return product


def multiply_otherwise(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return exact products of small integers, and others with a wrong last bit."""
    product = left @ right
    return product * (1 + 2**-20) if bool((product % 1).any()) else product


def fly(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Return what this rank hears of each fault: rank 0 the report, others the verdict."""
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    place = RankPlace(rank, world, 0, 1)

    def look(
        name: str, timeout_s: float = 60.0, file_s: float = 30.0, pp: int = 1, **fault: Any
    ) -> Any:
        meeting = Meeting(dist.PrefixStore(name, store), place, timeout_s)
        mine = fault if rank == ODD else {}
        where, variables = mine.pop("folder", folder), mine.pop("environment", {})
        request = Request(Axes(pp=pp), where, timeout_s, file_s, **mine)
        verdict, found = preflight(meeting, request, HERE | variables)
        return {"verdict": verdict} if found is None else found.to_json()

    reports = {
        "none": look("none", pp=world),
        "product": look("product", multiply=multiply_wrongly),
        "bits": look("bits", multiply=multiply_otherwise, folder=Path("/proc/none")),
        "odd": look("odd", clock=lambda: time.time() + 3600, environment={"NCCL_DEBUG": "INFO"}),
    }
    node.boot_id = lambda: str(rank)  # as if each rank had a machine of its own
    node.own_address = lambda seen_from: "127.0.0.1"  # which none of them can leave
    reports["address"] = look("address")
    if rank == ODD:
        node.__version__, node.available_host_bytes = "0.0.1", lambda: 1 << 20
        run.Echo = _Closed  # type: ignore[misc]
    reports["several"] = look("several", file_s=FILE_S, folder=folder / "other")
    if rank != ODD:
        reports["missing"] = look("missing", LATE_S)
    again = dist.PrefixStore("end", store)  # which the test's ranks leave
    dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
    dist.barrier()  # a rank that left now would close connections that others are still opening
    return reports


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank heard of each fault."""
    return ranks.run_ranks(fly, SIZE, tmp_path_factory.mktemp("run"), fresh=True)


def found(report: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Return what is not well, by name, but for figures of speed, as the machine may be busy."""
    checks = [check for check in report["checks"] if not check["name"].startswith(OF_SPEED)]
    return {c["name"]: (c["verdict"], list(c["ranks"])) for c in checks if c["verdict"] != "ok"}


def test_ranks_without_a_fault_may_begin_and_every_figure_is_there(
    reports: list[dict[str, Any]],
) -> None:
    report = reports[0]["none"]
    assert report["verdict"] != "failed"
    assert (found(report), report["not_reached"]) == ({}, ())
    assert [each["ranks"] for each in report["nodes"]] == [(0,), (1,), (2,)]
    for each in report["nodes"]:
        assert each["flops"] > 0 and each["link_bytes_per_s"] > 0 and each["trip_s"] > 0
    assert "axis pp" in [check["name"] for check in report["checks"]]


@pytest.mark.parametrize(
    ("fault", "verdict", "name", "words"),
    [
        ("odd", "odd", "clock", "3.6e+03 s"),
        ("odd", "odd", "variables of NCCL and gloo", "NCCL_DEBUG=INFO"),
        ("product", "failed", "products", "1 of 1,048,576 elements in torch.float32"),
        ("bits", "failed", "products", "other bits than on equal devices"),
        ("bits", "failed", "folder", "/proc/none: No such file or directory"),
        ("several", "failed", "version of shardwise", "0.0.1, code"),
        ("several", "odd", "free host memory", "1 MiB, the median is"),
        ("several", "failed", "shared folder", "not the same on all nodes"),
        ("several", "failed", "reachability", "Connection refused"),
        ("missing", "failed", "nodes", "nothing came from them within 5 s"),
    ],
)
def test_a_fault_is_found_at_the_rank_that_has_it(
    reports: list[dict[str, Any]], fault: str, verdict: str, name: str, words: str
) -> None:
    (check,) = [check for check in reports[0][fault]["checks"] if check["name"] == name]
    assert check["verdict"] == verdict and words in check["text"], check
    at_both_ends = name in ("shared folder", "reachability")
    assert ODD in check["ranks"] if at_both_ends else check["ranks"] == (ODD,)


def test_nothing_else_is_found_and_all_ranks_hear_the_verdict(
    reports: list[dict[str, Any]],
) -> None:
    assert {name: list(found(reports[0][name])) for name in reports[0]} == {
        "none": [],
        "product": ["products"],
        "bits": ["products", "folder"],
        "odd": ["variables of NCCL and gloo", "clock"],
        "address": ["address"],
        "several": [
            *("version of shardwise", "free host memory", "shared folder"),
            *("address", "reachability"),
        ],
        "missing": ["nodes"],
    }
    for fault in reports[0]:
        heard = {each[fault]["verdict"] for each in reports if fault in each}
        assert heard == {reports[0][fault]["verdict"]}
        assert "failed" in heard or fault in ("none", "odd")


def test_what_would_hang_is_not_tried(reports: list[dict[str, Any]]) -> None:
    for fault in ("several", "address"):
        assert reports[0][fault]["not_reached"] == ("process group", "axes", "links")
    assert found(reports[0]["address"])["address"] == ("failed", [0, 1, 2])


def test_nothing_is_left_in_the_folder(tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["doctor", "--preflight", f"--folder={tmp_path}", "--json"])
    # A container's folder and its small /dev/shm are odd.
    assert told.exit_code in (0, 1) and json.loads(told.stdout)["num_ranks"] == 1
    assert not list(tmp_path.iterdir())
    wrong = CliRunner().invoke(app, ["doctor", "--preflight", "--folder=/etc/hosts/x", "--json"])
    (check,) = [c for c in json.loads(wrong.stdout)["checks"] if c["name"] == "folder"]
    assert wrong.exit_code == 2 and check["text"].endswith("Not a directory")
    made = tmp_path / "new"
    CliRunner().invoke(app, ["doctor", "--preflight", f"--folder={made}"])
    assert not made.exists()


def judge_of(num_nodes: int) -> Judge:
    judge = Judge()
    judge.rows["nodes"] = [
        {"host": f"node{n}", "device": "cpu", "processor": "", "versions": ""}
        for n in range(num_nodes)
    ]
    judge.nodes = [[n] for n in range(num_nodes)]
    return judge


def product(digest: str = "a", flops: float = 1e9) -> dict[str, Any]:
    return {"wrong": [], "digests": digest, "flops": flops}


@pytest.mark.parametrize(
    ("part", "rows", "name", "expected"),
    [
        ("judge_products", [product(), product(), product("b")], "products", ("failed", (2,))),
        ("judge_products", [product(), product("b")], "products", ("failed", (0, 1))),  # a tie
        (
            "judge_products",
            [product(flops=rate) for rate in (1e9, 4e8, 1e9)],
            "speed of products",
            ("odd", (1,)),
        ),
        ("judge_folder", [{"kind": "ext4", "sync_s": s} for s in (0.1, 0.1, 0.9)], "durable write",
            ("ok", ())),
        ("judge_folder", [{"kind": "ext4", "sync_s": s} for s in (0.1, 0.1, 2.0)], "durable write",
            ("odd", (2,))),
        ("judge_folder", [{"kind": "ext4"}, {"kind": "tmpfs"}], "folder", ("odd", (1,))),
        ("judge_shared", [{"unseen": [], "is_excluded": rank < 2} for rank in range(3)], "lock",
            ("odd", (2,))),
        ("judge_axes", [{"tp": {"bytes_per_s": rate, "latency_s": 1e-4}} for rate in (9, 9, 9, 4)],
            "axis tp", ("odd", (3,))),
        ("judge_axes", [{"tp": {"bytes_per_s": 9, "latency_s": s}} for s in (0.1, 0.1, 0.3)],
            "latency of axis tp", ("odd", (2,))),
    ],
)  # fmt: skip
def test_what_differs_from_the_median_or_the_majority_is_named(
    part: str, rows: list[dict[str, Any]], name: str, expected: tuple[str, tuple[int, ...]]
) -> None:
    checks = list(getattr(judge_of(len(rows)), part)(rows))
    (found,) = [check for check in checks if check.name == name]
    assert (found.verdict, found.ranks) == expected, found


def test_both_links_of_a_slow_node_are_slow_and_a_slow_link_has_two_ends() -> None:
    for slow, expected in (((0, 1), (1,)), ((1,), (1, 2))):  # links by number: 0-1, 1-2, 2-3, 3-0
        judge, rows = judge_of(4), [dict[str, Any]() for _ in range(4)]
        for number in range(4):
            rate = {"bytes_per_s": 1.0 if number in slow else 9.0}
            for end in (number, (number + 1) % 4):
                rows[end][f"{number}-{(number + 1) % 4}"] = rate
        judge.rows["links"] = rows
        (check,) = judge.judge_links(rows)
        assert (check.verdict, check.ranks) == ("odd", expected), check


def test_a_clock_is_compared_with_the_median_of_all_and_not_with_the_first() -> None:
    judge = judge_of(3)
    ways = {str(rank): {"trip_s": 1e-4, "offset_s": 100.0} for rank in (1, 2)}
    judge.rows["reachability"] = [{"asked": ways}, {"asked": {}}, {"asked": {}}]
    assert judge.trips()[1] == {0: -100.0, 1: 0.0, 2: 0.0}


def test_a_store_that_cannot_be_reached_is_named_with_its_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    with pytest.raises(CollectiveError, match=r"rank 1 on .* cannot reach the store at 127.0.0.1:"):
        open_store(where, RankPlace(1, 2, 0, 1), 1.0)


@pytest.mark.parametrize("text", ["tp", "tp=x", "dp=2", "tp=2;pp=2"])
def test_wrong_degrees_are_refused_with_the_names_that_there_are(text: str) -> None:
    told = CliRunner().invoke(app, ["doctor", "--preflight", f"--axes={text}"])
    assert told.exit_code == 2 and "dp_replicate, dp_shard, cp, tp, pp, ep" in told.stderr


@pytest.mark.parametrize("num", range(1, 9))
def test_around_the_ring_each_node_meets_both_neighbours_and_one_at_a_time(num: int) -> None:
    rounds = rounds_of(num)
    assert all(len({node for pair in pairs for node in pair}) == 2 * len(pairs) for pairs in rounds)
    met = sorted(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    ring = {tuple(sorted((n, (n + 1) % num))) for n in range(num)} if num > 1 else set()
    assert met == sorted(ring)
