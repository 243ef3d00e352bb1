"""A rank that is missing is named by all others, with what ails it; campaigns/hangs.py has more."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from hangs import Case, End, named, train
from ranks import HANG_S, Ranks, run_ranks, start_ranks
from shardwise.comm import missing
from shardwise.comm.meeting import Meeting, text_of
from shardwise.comm.pulse import ENDED_WELL, Pulse, Pulses
from shardwise.comm.waits import Begun, Flights, Wait, lines_of_main, torch_wait
from shardwise.comm.watch import WATCH, checked_timeout
from shardwise.errors import ConfigError
from shardwise.processes import Process, fate, own_process
from shardwise.train.config import TrainConfig
from shardwise.train.setup import make_decoder, shard_decoder
from shardwise.train.text import load_tokenizer

SAMPLE = [
    Case("data", "stop", rank=0, place="loss", step=150, timeout_s=10.0, agent=False),
    Case("data", "kill", place="backward", unit=2, timeout_s=10.0),
    Case("pipeline", "stop", rank=3, unit=1, timeout_s=10.0),
    Case("fully_shard", "skip", place="loss", timeout_s=10.0),
    Case("ddp", "loader", place="loader", timeout_s=10.0),
    Case("ddp", "kill", place="backward", timeout_s=10.0),
    Case("pipeline", "kill", place="forward", unit=1, timeout_s=10.0),
    Case("tensor", "kill", place="backward", unit=1, timeout_s=10.0),
]


def train_into_a_log(rank: int, world_size: int, case: Case, folder: str, port: int) -> None:
    log = os.open(Path(folder, f"{rank}.log"), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    if not case.agent:  # then the store is to be rank 0's
        dist.destroy_process_group()
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        train(case, Path(folder))
    except Exception as error:
        traceback.print_exc()
        sys.last_value = error  # as Python ends of it, and calls what was registered for its end
        atexit._run_exitfuncs()
        raise


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, tuple[Ranks, Path]]:
    """Let all cases wait at once; each begins once the one before it has come to its fault."""
    found = {}
    for case in SAMPLE:
        folder = tmp_path_factory.mktemp(case.fault)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            args = case, str(folder), free.getsockname()[1]
        found[case] = start_ranks(train_into_a_log, case.num_ranks, *args), folder
        until = time.monotonic() + HANG_S
        while not Path(folder, "began" if case.fault != "skip" else "ready1").exists():
            assert time.monotonic() < until, "the ranks did not come to the fault"
            time.sleep(0.02)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: f"{case.axis}-{case.fault}-{case.rank}")
def test_every_survivor_ends_and_names_the_rank_and_what_ails_it(
    running: dict[Case, tuple[Ranks, Path]], case: Case
) -> None:
    ranks, folder = running[case]
    survivors = [rank for rank in range(case.num_ranks) if rank != case.rank]
    for rank in survivors:
        ranks.processes[rank].join(HANG_S)
    if ranks.processes[case.rank].is_alive():
        ranks.kill(case.rank)
    outcomes = ranks.wait(HANG_S)
    for rank in survivors:
        text = Path(folder, f"{rank}.log").read_text()
        assert not outcomes[rank].ok and not outcomes[rank].timed_out, outcomes[rank].describe()
        assert named(case, End(rank, None, None, None, text)), text


# -- whether a process lives
def test_a_process_is_alive_stopped_or_dead_of_a_signal() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    mine = own_process()
    stat = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
    process = Process(child.pid, mine.host, mine.machine, stat[19])
    assert fate(process, mine) == ("alive", "")
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert fate(process, mine) == ("stopped", "")
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert fate(process, mine) == ("dead", "signal 9 (SIGKILL)")
    child.wait()
    assert fate(process, mine) == ("dead", "")
    reused = Process(os.getpid(), mine.host, mine.machine, "1")
    assert fate(reused, mine)[0] == "dead"
    elsewhere = Process(os.getpid(), "another", "another", "1")
    assert fate(elsewhere, mine)[0] == "silent"


def test_a_pulse_is_read_as_it_was_said() -> None:
    said = Pulse(3, own_process(), "0|shard|all_gather|1|blocks.0", 2, 7, 0.5, "in f", {"k": 1})
    assert Pulse.read(said.to_json().encode()) == said


# -- what is said
class Told:
    """A board of which it is known what stands on it."""

    num_ranks = 4

    def __init__(self, **by_rank: tuple[dict[str, Any] | None, Pulse | None]) -> None:
        self._told = {int(name[1:]): told for name, told in by_rank.items()}

    def scan(self, ranks: list[int]) -> dict[int, Any]:
        return {rank: self._told.get(rank, (None, None)) for rank in ranks}


def waits(number: int, text: str = "here", **other: Any) -> dict[str, Any]:
    told = {"key": "k", "number": number, "ranks": [0, 1, 2], "begun": {"k": number}}
    return {**told, "text": text, "came": "", "trains": True, "needs_all": True} | other


def pulse(**other: Any) -> Pulse:
    return Pulse(**{"beat": 1, "process": own_process(), **other})


def verdict(*boards: Told, **own: Any) -> str:
    pulses = Pulses(1.0)
    for board in boards[:-1]:
        missing.look_round(board, pulses, 0, waits(2), lambda rank: "")  # type: ignore[arg-type]
        pulses.forget()
    return missing.said(
        missing.look_round(boards[-1], pulses, 0, waits(2, **own), lambda rank: "")  # type: ignore[arg-type]
    )


def test_a_rank_in_the_same_line_since_has_never_entered() -> None:
    one = Told(_1=(None, pulse(where="in load (a.py:3)")), _2=(waits(2), pulse()))
    later = Told(_1=(None, pulse(beat=2, where="in load (a.py:3)")), _2=(waits(2), pulse(beat=2)))
    text = verdict(one, later)
    assert "rank 1 is in no call of Shardwise, but in load (a.py:3)" in text
    assert "has never entered" in text and "Waiting: ranks 0, 2 in here" in text


def test_a_rank_that_goes_on_elsewhere_or_computes_is_late() -> None:
    one = Told(_1=(None, pulse()), _2=(waits(2), pulse()))
    moves = Told(_1=(None, pulse(beat=2, changes=5)), _2=(waits(2), pulse(beat=2)))
    computes = Told(_1=(None, pulse(beat=2, computed_s=100.0)), _2=(waits(2), pulse(beat=2)))
    assert "is late: it has been in other collectives" in verdict(one, moves)
    assert "is late: it has computed for 100.0 s" in verdict(one, computes)


def test_ranks_in_different_calls_are_mismatched_and_those_in_one_are_stuck_inside() -> None:
    elsewhere = waits(1, "there", key="other", begun={"k": 1, "other": 1})
    assert "mismatched" in verdict(Told(_1=(elsewhere, pulse()), _2=(waits(2), pulse())))
    inside = Told(_1=(waits(2), pulse()), _2=(waits(2), pulse()))
    assert "all ranks have begun it, and are stuck inside" in verdict(inside)
    left = pulse(left="RuntimeError", follows=True, came="a sum of 7")
    came = verdict(
        Told(_1=(None, left), _2=(waits(2, came="a gather of 4"), pulse())), came="a sum of 4"
    )
    assert "the ranks are mismatched: rank 0 came with a sum of 4, rank 1 came with a sum" in came
    assert "gather" not in came


def test_who_follows_another_ones_failure_is_not_blamed() -> None:
    cause = pulse(left="ValueError: enough")
    follows = pulse(left="CollectiveError: rank 1 ...", follows=True)
    text = verdict(Told(_1=(None, cause), _2=(None, follows)))
    assert "rank 1" in text and "ValueError: enough" in text and "rank 2" not in text
    elsewhere = verdict(Told(_1=(None, follows), _2=(waits(2), pulse()), _3=(None, cause)))
    assert "rank 3" in elsewhere and "ValueError: enough" in elsewhere
    assert "rank 1 (" not in elsewhere  # the victim through which it came


@pytest.mark.parametrize(
    ("left", "number", "needs_all", "is_missed"),
    [
        (ENDED_WELL, 1, True, True),
        (ENDED_WELL, 2, True, False),  # it has done its part
        (ENDED_WELL, 1, False, False),  # which may be of others: a message between two ranks
        ("ValueError: enough", 1, False, True),
        ("", 1, True, False),
    ],
)
def test_who_has_ended_well_is_missed_only_where_all_must_come(
    left: str, number: int, needs_all: bool, is_missed: bool
) -> None:
    ended = Told(_1=(None, pulse(left=left, last="k", number=number)), _2=(waits(2), pulse()))
    record = waits(2, needs_all=needs_all)
    scene = missing.look_round(ended, Pulses(1.0), 0, record, lambda rank: "")  # type: ignore[arg-type]
    assert scene.gone == [1] * is_missed


def test_the_last_collective_is_the_later_of_what_was_said_and_what_ended_here() -> None:
    begun = Begun()
    group = mock.Mock(group_name="0")
    meetings = [Meeting("all_gather", f"blocks.{n}", n, "shard", group) for n in range(3)]
    numbers = [begun.add(meeting) for meeting in meetings]
    with mock.patch.object(Meeting, "ranks", (0, 1)):
        begun.end(meetings[1], numbers[1])
    for said, unit in ((0, 1), (2, 2)):  # whether or not the group is still there
        key = begun.last_of(1, (meetings[said].key, 1))
        assert text_of(key) == f"all_gather of unit 'blocks.{unit}' over axis 'shard'"


# -- devices, whose collectives no thread waits for
class Flying:
    """A collective on a device, which ends when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over


def test_of_collectives_that_fly_the_oldest_counts_from_when_the_one_before_ended() -> None:
    flights = Flights()
    meeting = Meeting("all_gather", "", 0, "shard", mock.Mock(group_name="0"))
    works = [Flying() for _ in range(3)]
    for number, work in enumerate(works):
        flights.begin(Wait(meeting, number, 0.0, -1), [work])
    found = flights.oldest()
    assert found is not None and (found.number, found.begun_s) == (0, 0.0)
    works[0].over = works[1].over = True
    before = time.monotonic()
    found = flights.oldest()
    assert found is not None and found.number == 2 and found.begun_s >= before
    kept, works[2].over = weakref.ref(works[2]), True
    last = Flying()
    del works, work
    flights.begin(Wait(meeting, 3, 0.0, -1), [last])
    assert kept() is None  # nor does the tensor live on that it was made for
    last.over = True
    assert flights.oldest() is None


def a_device_hangs(rank: int, world_size: int) -> list[str]:
    """Let a collective of a device that aborts never end, as rank 1 does not begin it."""
    WATCH.look_every_s = 0.2
    shardwise.debug.watch(4)
    group = dist.group.WORLD
    meeting = Meeting("all_gather", "blocks.0", 0, "shard", group)
    aborted = threading.Event()
    with (
        mock.patch("shardwise.comm.watch.blocks", lambda group: False),
        mock.patch("shardwise.comm.watch.break_off_all", aborted.set),
        mock.patch("shardwise.comm.missing.timeout_s_of", lambda group: 300.0),
    ):
        if rank == 0:
            WATCH.fly(meeting, WATCH.begin(meeting), [Flying()])
            aborted.wait()
        dist.barrier()
    if rank:
        return []
    with pytest.raises(shardwise.errors.CollectiveError) as caught:
        WATCH.refuse_failed("the next", group)
    return [str(caught.value)]


def test_what_hangs_on_a_device_is_aborted_and_the_next_call_names_who_is_missing() -> None:
    (text,), _ = run_ranks(a_device_hangs, 2, fresh=True)
    assert "the next is not possible any more" in text
    assert "rank 1" in text and "Waiting: rank 0 in all_gather of unit 'blocks.0'" in text


# -- the switch
def one_rank(rank: int, world_size: int) -> None:
    with pytest.warns(FutureWarning, match=r"shardwise.debug.watch"):
        model = shardwise.shard(nn.Linear(4, 4), hang_timeout=4)
    assert WATCH.limit_s == 4
    model(torch.ones(2, 4)).sum().backward()
    shardwise.debug.watch(None)
    assert WATCH.limit_s is None
    config = TrainConfig(hang_timeout=77, dim=16, layers=1, heads=2, kv_heads=2, seq=8, vocab=8)
    shard_decoder(config, config.axes.over(1), make_decoder(config, load_tokenizer(None)))
    assert WATCH.limit_s == 77


def test_one_rank_may_be_watched_too() -> None:
    run_ranks(one_rank, 1, fresh=True)


@pytest.mark.parametrize("wrong", [0, -1, 3.9, float("nan"), "10", True])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"hang_timeout=.*4 seconds or more"):
        checked_timeout(wrong)


def test_a_main_thread_that_computes_is_in_no_wait_of_torchs() -> None:
    assert torch_wait() is None
    assert "test_hangs.py" in lines_of_main()


def wait_in_barrier(rank: int, world_size: int, folder: str) -> str:
    """Return what a thread of rank 0 sees of its main thread, which waits in a barrier."""
    seen: list[str] = []

    def look() -> None:
        while (call := torch_wait()) is None:
            time.sleep(0.05)
        seen.append(call.text)
        Path(folder, "seen").touch()

    if rank == 0:
        thread = threading.Thread(target=look)
        thread.start()
        dist.barrier()
        thread.join()
        return seen[0]
    while not Path(folder, "seen").exists():
        time.sleep(0.05)
    dist.barrier()
    return ""


def test_a_wait_in_a_call_of_torchs_is_seen_from_another_thread() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(wait_in_barrier, 3, folder)
    assert found[0] == "torch's barrier over ranks 0, 1, 2"
