"""A rank that is missing is named by all others, with what ails it; campaigns/hangs.py has more."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from hangs import Case, End, named, train
from ranks import HANG_S, on_ranks, run_ranks, start_ranks
from shardwise.comm.collective_key import CollectiveKey
from shardwise.comm.listener import WAITS, Listener, checked_timeout
from shardwise.comm.process_groups import FAILED_GROUPS
from shardwise.errors import ConfigError
from shardwise.hangs.abort import WATCH
from shardwise.hangs.diagnosis import FAILED, AsyncCollectives, Wait, WaitTable, torch_call
from shardwise.hangs.heartbeat import (
    ENDED_WELL,
    Heartbeat,
    Heartbeats,
    WaitRecord,
    lines_of_main,
)
from shardwise.processes import Process, fate, kill_stopped, own_process
from shardwise.train.config import TrainConfig
from shardwise.train.setup import make_decoder, shard_decoder
from shardwise.train.text import load_tokenizer

SAMPLE = [
    Case("data", "stop", rank=0, place="loss", step=150, timeout_s=10.0, agent=False),
    Case("data", "raise", place="step", timeout_s=10.0),
    Case("pipeline", "stop", rank=3, unit=1, timeout_s=10.0),
    Case("fully_shard", "skip", place="loss", timeout_s=10.0),
    Case("ddp", "loader", place="loader", timeout_s=10.0),
    Case("pipeline", "kill", place="forward", unit=1, timeout_s=10.0),
    Case("tensor", "kill", place="backward", unit=1, timeout_s=10.0),
]


def train_into_a_log(rank, world_size, case, folder, port):
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
def running(tmp_path_factory):
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
def test_every_survivor_ends_and_names_the_rank_and_what_ails_it(running, case):
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
        if case.fault in ("kill", "raise"):
            assert "imed out" not in text, "it waited for the timeout of the process group"


# -- whether a process lives
def process_of(pid, mine):
    """Describe a process of this machine, as it would itself."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Process(pid, mine.host, mine.machine, stat[19])


def test_a_process_is_alive_stopped_or_dead_of_a_signal():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    mine = own_process()
    process = process_of(child.pid, mine)
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


def test_a_heartbeat_is_read_as_it_was_published():
    wait = WaitRecord("k", 1, (0, 1), "here")
    published = Heartbeat(3, own_process(), "all_gather", "in f", wait, begun={"k": 1})
    assert Heartbeat.from_json(published.to_json().encode()) == published


# -- the table
def beats(**other):
    return Heartbeat(**{"beat": 1, "process": own_process(), **other})


def waits(**other):
    return beats(wait=record(**other))


def record(**other):
    return WaitRecord(**{"key": "k", "number": 2, "ranks": (0, 1, 2), "text": "here", **other})


def table(**by_rank):
    """Return the table of rank 0, which waits in ``record()``."""
    return table_of(record(), **by_rank)


def table_of(wait, **by_rank):
    heard = Heartbeats()
    for name, heartbeat in by_rank.items():
        heard.add(int(name[1:]), heartbeat)
    return WaitTable(heard, 0, wait)


def test_a_rank_that_has_not_come_is_in_the_table_with_its_line_and_its_last_collective():
    found = table(_1=beats(where="in load (a.py:3)", last="a gather"), _2=waits())
    text = found.describe()
    assert not found.gone
    assert "rank 1 is in no call of Shardwise, but in load (a.py:3)" in text
    assert "its last collective: a gather" in text and "Waiting: ranks 0, 2 in here" in text


def test_ranks_in_different_calls_are_told_apart_from_those_stuck_in_one():
    elsewhere = waits(number=1, text="there", key="other")
    text = table(_1=elsewhere, _2=waits()).describe()
    assert text.startswith("ranks 0, 2 in here; rank 1 in there. The ranks are in different calls")
    assert "if rank == 0" in text and "optional=" not in text
    units = [record(text=f"all_gather of unit '{name}'", key=name) for name in "ab"]
    text = table_of(units[0], _1=beats(wait=units[1]), _2=beats(wait=units[1])).describe()
    assert "in different calls" in text and "Units(optional=" in text
    assert table(_1=elsewhere, _2=waits()).reporter == 0
    heard = Heartbeats()
    for rank, beat in {0: waits(key="other"), 1: waits(), 2: waits(), 3: beats()}.items():
        heard.add(rank, beat)
    # Rank 1 is the lowest one that waits in the same call.
    assert WaitTable(heard, 2, record(ranks=(0, 1, 2, 3))).reporter == 1
    # Rank 2 lacks heartbeats.
    assert WaitTable(heard, 2, record(ranks=range(600))).reporter == 2
    heard.is_current = False
    assert WaitTable(heard, 2, record(ranks=(0, 1, 2, 3))).reporter == 2
    assert "stuck inside" in table(_1=waits(), _2=waits()).describe()


def test_a_rank_that_others_wait_for_elsewhere_is_in_the_table_too():
    there = waits(key="other", ranks=(1, 5), text="there")
    found = table(_1=there, _2=waits(), _5=beats(left="ValueError: enough"))
    assert found.gone == [5] and "ValueError: enough" in found.describe()


def test_who_follows_another_ones_failure_passes_its_verdict_on():
    cause = beats(left="ValueError: enough")
    follows = beats(failed=f"{FAILED}rank 7 has died", left="CollectiveError: x", follows=True)
    both = table(_1=cause, _2=follows).describe()
    assert "ValueError: enough" in both and "rank 7" not in both
    assert table(_1=waits(), _2=follows).describe() == "rank 7 has died"
    silent = table(_1=waits(), _2=beats(left="RuntimeError in a sum of 7", follows=True))
    assert silent.gone == [] and silent.followers == [2]  # it is about to find its cause out


def test_where_the_store_is_silent_a_stopped_rank_is_named_before_those_that_it_has_ended():
    mine = own_process()
    children = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"]) for _ in range(2)
    ]
    stopped, ended = (process_of(child.pid, mine) for child in children)
    try:
        os.kill(children[0].pid, signal.SIGSTOP)
        os.waitid(os.P_PID, children[0].pid, os.WSTOPPED | os.WNOWAIT)
        children[1].kill()
        children[1].wait()
        heard = Heartbeats()
        heard.is_current = True
        heard.add(1, beats(process=stopped))
        heard.add(2, beats(process=ended))
        # Rank 2 would have published that rank 1 is stopped.
        assert "is stopped" not in WaitTable(heard, 0, record()).describe()
        heard.is_current = False
        told = WaitTable(heard, 0, record()).describe()
        assert told.index("rank 1 (process") < told.index("is stopped") < told.index("has died")
    finally:
        children[0].kill()
        children[0].wait()


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
def test_who_has_ended_well_is_missed_only_where_all_must_come(left, number, needs_all, is_missed):
    ended = beats(left=left, begun={"k": number})
    assert table_of(record(needs_all=needs_all), _1=ended, _2=waits()).gone == [1] * is_missed


def test_a_rank_that_raises_is_gone_from_training_and_not_from_small_exchanges():
    ranks = {"_1": beats(failed="rank 1: no space left"), "_2": waits()}
    found = table(**ranks)
    assert "rank 1: no space left" in found.describe() and found.gone == [1]
    assert table_of(record(trains=False), **ranks).gone == []


# -- devices, whose collectives no thread waits for
class OnDevice:
    """A collective on a device, which ends when the test says so."""

    def __init__(self):
        self.over = False

    def is_completed(self):
        return self.over


def test_of_collectives_that_fly_the_oldest_counts_from_when_the_one_before_ended():
    launched = AsyncCollectives()
    key = CollectiveKey("all_gather", "", 0, "shard", mock.Mock(group_name="0"))
    works = [OnDevice() for _ in range(3)]
    for number, work in enumerate(works):
        launched.add(Wait(key, number, 0.0), [work])
    found = launched.oldest()
    assert found is not None and (found.number, found.begun_s) == (0, 0.0)
    works[0].over = works[1].over = True
    before = time.monotonic()
    found = launched.oldest()
    assert found is not None and found.number == 2 and found.begun_s >= before
    kept, works[2].over = weakref.ref(works[2]), True
    last = OnDevice()
    del works, work
    launched.add(Wait(key, 3, 0.0), [last])
    assert kept() is None  # nor does the tensor live on that it was made for
    last.over = True
    assert launched.oldest() is None


def a_device_hangs(rank, world_size):
    """Let a collective of a device that aborts never end, as rank 1 does not begin it."""
    WATCH.look_every_s = 0.2
    shardwise.debug.watch(4)
    group = dist.group.WORLD
    key = CollectiveKey("all_gather", "blocks.0", 0, "shard", group)
    aborted = threading.Event()
    with (
        mock.patch("shardwise.hangs.abort.waits_block", lambda group: False),
        mock.patch("shardwise.hangs.abort.abort_all", aborted.set),
        mock.patch("shardwise.hangs.abort.timeout_s_of", lambda group: 300.0),
    ):
        if rank == 0:
            WATCH.launch(key, WATCH.begin(key), [OnDevice()])
            aborted.wait()
        dist.barrier()
    if rank:
        return []
    with pytest.raises(shardwise.errors.CollectiveError) as caught:
        FAILED_GROUPS.refuse("the next", group)
    return [str(caught.value)]


def test_what_hangs_on_a_device_is_aborted_and_the_next_call_names_who_is_missing():
    (text,), _ = run_ranks(a_device_hangs, 2, fresh=True)
    assert "the next is not possible any more" in text
    assert "rank 1" in text and "s: rank 0 in all_gather of unit 'blocks.0'" in text


# -- the switch
@on_ranks(1, fresh=True)
def test_one_rank_may_be_watched_too():
    shardwise.debug.watch(4)
    model = shardwise.shard(nn.Linear(4, 4))
    assert WAITS.limit_s == 4
    model(torch.ones(2, 4)).sum().backward()
    shardwise.debug.watch(None)
    assert WAITS.limit_s is None
    config = TrainConfig(hang_timeout=77, dim=16, layers=1, heads=2, kv_heads=2, seq=8, vocab=8)
    shard_decoder(config, config.axes.over(1), make_decoder(config, load_tokenizer(None)))
    assert WAITS.limit_s == 77


@on_ranks(2, fresh=True)
def test_the_core_needs_no_watch():
    WAITS.attach(Listener)
    WAITS.set_limit(4)
    model = shardwise.shard(nn.Linear(4, 4), stage=3)
    model(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None
    assert not [thread for thread in threading.enumerate() if "watch" in thread.name]


def test_the_package_attaches_the_watch():
    assert WAITS.listener is WATCH


@pytest.mark.parametrize("wrong", [0, -1, 3.9, float("nan"), "10", True])
def test_what_is_no_time_is_refused(wrong):
    with pytest.raises(ConfigError, match=r"hang_timeout=.*4 seconds or more"):
        checked_timeout(wrong)


def test_a_main_thread_that_computes_is_in_no_wait_of_torchs():
    assert torch_call() is None
    assert "test_hangs.py" in lines_of_main()


def test_only_a_stopped_process_that_is_the_same_is_killed():
    mine = own_process()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e6)"])
    process = process_of(child.pid, mine)
    assert not kill_stopped(process, mine), "it runs"
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    assert not kill_stopped(Process(child.pid, mine.host, mine.machine, "1"), mine)
    assert not kill_stopped(process, Process(mine.pid, mine.host, "another", mine.born))
    assert kill_stopped(process, mine)
    assert child.wait(HANG_S) == -signal.SIGKILL
    assert not kill_stopped(process, mine)
