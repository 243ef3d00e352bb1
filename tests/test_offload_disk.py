"""State in files: what is read is what was written, in order, whatever the disk does meanwhile."""

import ctypes
import errno
import gc
import itertools
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranks import HANG_S, forked
from shardwise.errors import ConfigError, StateError, StorageError
from shardwise.offload import disk as disk_module
from shardwise.offload.disk import Disk
from shardwise.offload.file_slices import cached_share, map_file
from shardwise.offload.files import System
from shardwise.offload.pool import Pool
from shardwise.offload.stripes import ALIGNMENT, STRIPE_BYTES, Stripes, regions_of

MIB = 1 << 20


def host_memory(num_bytes):
    return torch.empty(num_bytes, dtype=torch.uint8)


def faulty(op):
    """Return a call of the system that asks ``fault`` first, and counts."""
    plain = getattr(System, op)

    def call(self, target, *args):
        folder = target.name if op == "open" else self.folders[target]
        self.counts[op] += 1
        limit = self.fault(op, folder, args[0] if args else 0)
        if limit is not None:
            return _some(partial(plain, self), target, *args, limit)
        done = plain(self, target, *args)
        if op == "open":
            self.folders[done] = folder
        return done

    return call


class FaultySystem(System):
    """Calls that fail on command: ``fault(op, folder, at)`` may raise, wait or say how much.

    What it returns bounds the bytes of one read or write.
    """

    open, reserve, close = faulty("open"), faulty("reserve"), faulty("close")
    read, write = faulty("read"), faulty("write")
    go_direct, drop_cache = faulty("go_direct"), faulty("drop_cache")

    def __init__(self, fault=None):
        super().__init__()
        self.fault = fault or no_fault
        self.counts = Counter()
        self.folders = {}  # by descriptor


def no_fault(op, folder, at):
    return None


def _some(call, fd, at, parts, limit):
    """Do ``limit`` bytes at most. Of the last block, if that is not whole, nothing is done."""
    taken, rest = [], limit - limit % ALIGNMENT
    for part in parts:
        taken.append(part[:rest])
        rest -= len(taken[-1])
    done = call(fd, at, [part for part in taken if len(part)])
    return min(sum(len(part) for part in parts), done + limit % ALIGNMENT)


def fails(op, number, folder=None):
    def fault(done, where, at):
        if done == op and folder in (None, where):
            raise OSError(number, os.strerror(number))

    return fault


@contextmanager
def opened(*folders, buffers=2, buffer_bytes=MIB, system=None):
    disk = Disk(folders, buffer_bytes, buffers, host_memory, rank=3, system=system)
    try:
        yield disk
    finally:
        disk.close()


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    assert not list(tmp_path.iterdir()), "something is left"


@pytest.fixture
def two(folder, monkeypatch):
    monkeypatch.setattr(disk_module, "_TRIAL_BYTES", 16 * ALIGNMENT)  # to measure their speed
    both = folder / "a", folder / "b"
    for path in both:
        path.mkdir()
    yield both
    for path in both:
        path.rmdir()  # which it could not be with a file in it


def start(op, disk, *args):
    """Begin a read or a write."""
    return (disk.start_read if op == "read" else disk.start_write)(*args)


@pytest.fixture
def small_stripes(monkeypatch):
    small = partial(Stripes, stripe_bytes=2 * ALIGNMENT)
    monkeypatch.setattr(disk_module, "Stripes", small)


def some_bytes(num_bytes, seed=0):
    return torch.randint(256, (num_bytes,), generator=torch.manual_seed(seed)).to(torch.uint8)


def assert_kept(disk, file, begin, data):
    """Check that a read gives the data, after the writes that were started before."""
    found = torch.empty_like(data)
    disk.start_read(file, begin, found).wait()
    assert torch.equal(found, data)


# ------------------------------------------------------------------------------------- integers


@given(st.lists(st.integers(0, 3 * ALIGNMENT), max_size=12))
def test_tensors_of_a_unit_begin_at_blocks_touch_nobody_and_waste_less_than_a_block(sizes):
    regions = regions_of(sizes)
    ends = [*regions.begins[1:], regions.num_bytes] if sizes else []
    assert regions.sizes == tuple(sizes) and len(regions.begins) == len(sizes)
    for begin, size, end in zip(regions.begins, sizes, ends, strict=True):
        assert begin % ALIGNMENT == 0 and end % ALIGNMENT == 0
        assert 0 <= end - begin - size < ALIGNMENT
    assert regions.num_bytes == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)


speeds = st.lists(st.floats(0.01, 100), min_size=1, max_size=4)


@given(speeds, st.integers(1, 300 * ALIGNMENT), st.data())
def test_every_byte_of_a_range_is_in_one_piece_and_every_place_of_a_folder_has_one_byte(
    speeds, num_bytes, data
):
    stripes = Stripes(speeds, stripe_bytes=2 * ALIGNMENT)
    begin = data.draw(st.integers(0, num_bytes))
    end = data.draw(st.integers(begin, num_bytes))
    where = {}  # the place of every byte at the border of a range, from a deal of all bytes at once
    for piece in stripes.pieces(0, num_bytes, 1 << 40):
        at = piece.at
        for lo, hi in piece.ranges:
            where[lo], where[hi - 1] = (piece.folder, at), (piece.folder, at + hi - lo - 1)
            at += hi - lo
    sizes = stripes.part_bytes(num_bytes)
    assert sum(sizes) == num_bytes
    covered = []
    places = {}
    for piece in stripes.pieces(begin, end, 4 * ALIGNMENT):
        assert 0 < piece.num_bytes <= 4 * ALIGNMENT
        assert piece.at + piece.num_bytes <= sizes[piece.folder]
        assert piece.at % ALIGNMENT == piece.ranges[0][0] % ALIGNMENT
        at = piece.at
        for lo, hi in piece.ranges:
            assert where.get(lo, (piece.folder, at)) == (piece.folder, at)
            assert lo == begin or lo % ALIGNMENT == 0
            at += hi - lo
        covered += piece.ranges
        places.setdefault(piece.folder, []).append((piece.at, at))
    covered.sort()
    assert sum(hi - lo for lo, hi in covered) == end - begin
    assert all(one[1] == two[0] for one, two in pairwise(covered))
    for found in places.values():  # of each folder, the range is one range of its file
        assert all(one[1] == two[0] for one, two in pairwise(found))


@given(speeds)
def test_folders_share_bytes_by_their_speeds_in_every_part_of_a_unit(speeds):
    stripes = Stripes(speeds)
    stripe_round = sum(stripes.counts)
    for speed, count in zip(speeds, stripes.counts, strict=True):
        assert count >= 1 and (count - stripe_round * speed / sum(speeds)) < 1.5
    for num_stripes in (1, 5, 64, 200):
        sizes = stripes.part_bytes(num_stripes * STRIPE_BYTES)
        for size, count in zip(sizes, stripes.counts, strict=True):
            fair = num_stripes * count / stripe_round
            assert abs(size / STRIPE_BYTES - fair) < len(speeds) + 1


# --------------------------------------------------------------------------------- bytes and order


operations = st.lists(
    st.tuples(
        st.sampled_from(["write", "read", "write ring", "read ring"]),
        st.integers(0, 40_000),
        st.integers(0, 20_000),
        st.booleans(),  # at blocks
    ),
    max_size=20,
)


@pytest.mark.parametrize("num_folders", [1, 2])
def test_any_sequence_of_reads_and_writes_gives_the_bytes_of_plain_memory(
    two, monkeypatch, num_folders, small_stripes
):
    size = 60_000
    monkeypatch.setattr(disk_module, "_REQUEST_BYTES", 4 * ALIGNMENT)
    with opened(*two[:num_folders], buffers=3, buffer_bytes=20_480) as disk:

        @given(operations)
        @settings(max_examples=60)
        def run(operations):
            file, oracle = disk.file("u", size), bytearray(size)
            reads = []
            for number, (kind, begin, num_bytes, at_blocks) in enumerate(operations):
                if at_blocks:
                    begin, num_bytes = begin & -ALIGNMENT, num_bytes & -ALIGNMENT
                release = lambda: None  # noqa: E731
                if "ring" in kind:
                    while disk.pool.num_free < 2 and reads:
                        check(*reads.pop(0))
                    buffer = disk.acquire()
                    memory, release = buffer.memory[:num_bytes], buffer.release
                else:
                    memory = torch.empty(num_bytes, dtype=torch.uint8)
                if "write" in kind:
                    memory.copy_(some_bytes(num_bytes, number))
                    oracle[begin : begin + num_bytes] = bytes(memory.tolist())
                    disk.start_write(file, begin, memory, release)
                else:
                    transfer = disk.start_read(file, begin, memory)
                    expected = bytes(oracle[begin : begin + num_bytes])
                    reads.append((transfer, memory, expected, release))
            for read in reads:
                check(*read)
            everything = torch.empty(size, dtype=torch.uint8)
            disk.start_read(file, 0, everything).wait()
            assert bytes(everything.tolist()) == bytes(oracle)
            file.close()

        run()
        assert disk.pool.num_free == 3


def check(transfer, memory, expected, release):
    transfer.wait()
    assert bytes(memory.tolist()) == expected
    release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_of_any_dtype_come_back(folder, dtype):
    with opened(folder) as disk:
        file = disk.file("blocks.0", 100_000)
        for shape in ((), (0,), (7,), (33, 5)):
            tensor = torch.randn(shape).to(dtype)
            disk.start_write(file, 8192, tensor)
            assert_kept(disk, file, 8192, tensor)


def test_aligned_memory_goes_to_the_disk_in_requests_of_eight_mib_and_nothing_else_is_called(
    folder,
):
    system = FaultySystem()
    with opened(folder, buffers=1, buffer_bytes=20 * MIB, system=system) as disk:
        file, buffer = disk.file("u", 20 * MIB), disk.acquire()
        assert buffer.memory.data_ptr() % ALIGNMENT == 0 and buffer.memory.nbytes == 20 * MIB
        system.counts.clear()
        disk.start_write(file, 0, buffer.memory).wait()
        disk.start_read(file, 0, buffer.memory).wait()
        system.counts.pop("drop_cache", None)  # where /tmp takes no direct I/O
        assert system.counts == {"write": 3, "read": 3}


@pytest.mark.parametrize(("first", "then"), [("write", "read"), ("read", "write")])
def test_a_transfer_waits_for_those_of_its_bytes_and_for_no_other(folder, first, then):
    go_on = threading.Event()

    def fault(op, where, at):
        if op == first and at == ALIGNMENT and not go_on.is_set():
            assert go_on.wait(HANG_S)

    system = FaultySystem()
    with opened(folder, system=system) as disk:
        file, old, new = disk.file("u", 4 * ALIGNMENT), *map(some_bytes, [ALIGNMENT] * 2, (0, 1))
        for begin in (1, 2):
            disk.start_write(file, begin * ALIGNMENT, old).wait()
        system.fault = fault
        memory = {"read": torch.zeros_like(old), "write": new}
        before, after = (start(op, disk, file, ALIGNMENT, memory[op]) for op in (first, then))
        assert_kept(disk, file, 2 * ALIGNMENT, old)
        assert not before.is_over and not after.is_over
        go_on.set()
        after.wait()
        assert before.is_over and torch.equal(memory["read"], new if first == "write" else old)


def test_neighbours_in_one_block_that_are_written_at_once_keep_their_bytes(folder):
    def fault(op, where, at):
        if op == "read":
            time.sleep(0.02)  # between the read of a block and its write is time for another

    with opened(folder, system=FaultySystem(fault)) as disk:
        file, data = disk.file("u", 2 * ALIGNMENT), some_bytes(5000)
        for begin, end in ((1000, 2000), (0, 1000), (4500, 5000), (2000, 4500)):
            disk.start_write(file, begin, data[begin:end])
        assert_kept(disk, file, 0, data)


@pytest.mark.parametrize("most", [ALIGNMENT, 3 * ALIGNMENT + 100])
def test_calls_that_do_a_part_are_repeated_for_the_rest(two, most, small_stripes):
    system = FaultySystem(lambda op, where, at: most if op in ("read", "write") else None)
    with opened(*two, system=system) as disk:
        data = some_bytes(100_017)
        file = disk.file("u", MIB)
        disk.start_write(file, 5, data)
        assert_kept(disk, file, 5, data)


@pytest.mark.parametrize("slow", ["read", "write"])
def test_two_folders_share_the_bytes_by_measured_speed(two, monkeypatch, slow):
    now_s, lock = [0.0], threading.Lock()

    def fault(op, where, at):
        with lock:  # a request takes 2 s in one direction of b, else 1 s
            now_s[0] += 2 if op == slow and where == "b" else 1 if op in ("read", "write") else 0

    monkeypatch.setattr(disk_module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    with opened(*two, system=FaultySystem(fault)) as disk:
        (a, share_a), (b, share_b) = disk.shares
        assert (a, b) == two and share_a + share_b == 1
        assert share_a == pytest.approx(3 / 5, abs=1 / 64)
        file = disk.file("u", 200 * STRIPE_BYTES)
        sizes = [os.fstat(fd).st_size for fd in file._fds]
        assert sum(sizes) == 200 * STRIPE_BYTES
        assert sizes[0] / sum(sizes) == pytest.approx(share_a, abs=0.02)
        data = some_bytes(5 * MIB)
        disk.start_write(file, 100 * MIB, data)
        assert_kept(disk, file, 100 * MIB, data)


def test_a_file_system_that_refuses_direct_io_goes_through_the_cache_and_that_is_said_once(
    folder, caplog
):
    system = FaultySystem(fails("go_direct", errno.EINVAL))
    with caplog.at_level(logging.INFO, "shardwise"), opened(folder, system=system) as disk:
        for unit in ("a", "b"):
            file, data = disk.file(unit, MIB), some_bytes(MIB)
            disk.start_write(file, 0, data)
            assert_kept(disk, file, 0, data)
    said = [record for record in caplog.records if "O_DIRECT" in record.message]
    assert [record.levelno for record in said] == [logging.INFO]
    assert "rank 3" in said[0].message and str(folder) in said[0].message
    assert system.counts["drop_cache"] == 4 and system.counts["go_direct"] == 1


def test_a_file_system_that_refuses_direct_io_when_it_is_used_is_found_out_at_the_start(folder):
    refused = []

    def fault(op, where, at):
        if op == "write" and not refused:
            refused.append(op)
            raise OSError(errno.EINVAL, "Invalid argument")

    system = FaultySystem(fault)
    with opened(folder, system=system) as disk:
        disk.start_write(disk.file("u", 10), 0, some_bytes(10)).wait()
        assert system.counts["drop_cache"] >= 1


# -------------------------------------------------------------------------------------- the ring


def test_no_more_buffers_are_out_than_there_are_and_who_waits_gets_the_next(folder):
    made = []

    def counted(num_bytes):
        made.append(num_bytes)
        return host_memory(num_bytes)

    pool = Pool(counted, 3, 5000)
    assert made == [5000] * 3 and pool.num_bytes == 15000
    out, most, lock = [0], [0], threading.Lock()

    def work():
        for _ in range(50):
            buffer = pool.acquire()
            with lock:
                out[0] += 1
                most[0] = max(most[0], out[0])
            time.sleep(1e-5)
            with lock:
                out[0] -= 1
            buffer.release()
            buffer.release()  # harmless, even if somebody has it by now

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert most[0] <= 3 and pool.num_free == 3


def test_memory_that_is_aligned_already_is_asked_for_once_and_to_the_byte(tmp_path):
    made = []

    def page_locked(num_bytes):
        made.append(num_bytes)
        memory = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
        begin = -memory.data_ptr() % ALIGNMENT
        return memory[begin : begin + num_bytes]

    Disk([tmp_path], 8192, 2, page_locked, 0).close()
    assert made == [8192, 8192]


def test_a_write_gives_its_buffer_back_whether_it_ends_well_or_not(folder):
    system = FaultySystem()
    with opened(folder, buffers=1, system=system) as disk:
        file = disk.file("u", MIB)
        for _ in range(5):
            buffer = disk.acquire()
            disk.start_write(file, 0, buffer.memory, buffer.release)
        disk.acquire().release()
        system.fault = fails("write", errno.EIO)
        buffer = disk.acquire()
        disk.start_write(file, 0, buffer.memory, buffer.release)
        with pytest.raises(StorageError, match="writing"):
            disk.acquire()
        assert disk.pool.num_free == 1


# ------------------------------------------------------------------------------------ what fails


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_disk_that_fails_is_told_with_rank_unit_folder_and_what_to_do(two, op, monkeypatch):
    # Folders of one speed share the bytes.
    monkeypatch.setattr(
        disk_module, "time", SimpleNamespace(perf_counter=itertools.count().__next__)
    )
    system = FaultySystem()
    with opened(*two, system=system) as disk:
        file, data = disk.file("blocks.7", 4 * MIB), some_bytes(4 * MIB)
        disk.start_write(file, 0, data).wait()
        system.fault = fails(op, errno.EIO, "b")
        transfer = start(op, disk, file, 0, data)
        verb = "reading" if op == "read" else "writing"
        expected = (
            rf"rank 3, unit 'blocks\.7': {verb} .* MiB in {two[1]} failed: Input/output error "
            r"\(errno 5\).* last checkpoint"
        )
        for _ in range(2):  # every time
            with pytest.raises(StorageError, match=expected):
                transfer.wait()
        system.fault = no_fault
        if op == "write":  # what is there may be of two steps, so it is not read any more
            with pytest.raises(StorageError, match=expected):
                disk.start_read(file, 0, data).wait()
        else:
            disk.start_read(file, 0, data).wait()
            assert torch.equal(data, some_bytes(4 * MIB))


def test_what_nobody_waited_for_is_raised_once_by_the_next_call(folder):
    calls = [
        lambda disk, file: disk.acquire(),
        lambda disk, file: disk.file("other", 10),
        lambda disk, file: disk.start_read(file, 0, torch.empty(3)),
        lambda disk, file: disk.start_write(file, 0, torch.empty(3)),
    ]
    for call in calls:
        system = FaultySystem()
        with opened(folder, system=system) as disk:
            file, other = disk.file("", 100), disk.file("other", 100)
            system.fault = fails("write", errno.EIO)
            disk.start_write(file, 0, torch.ones(4)).join()
            system.fault = no_fault
            with pytest.raises(StorageError, match=r"rank 3, unit '\(root\)': writing 16 B"):
                call(disk, file)
            disk.start_write(other, 0, torch.ones(4)).wait()
            disk.acquire().release()


def test_a_full_disk_is_told_before_anything_is_written_with_what_is_needed_and_free(folder):
    with opened(folder) as disk:
        too_much = System().free_bytes(folder) + (64 << 30)
        with pytest.raises(StorageError) as caught:
            disk.file("blocks.1", too_much)
        said = str(caught.value)
        assert "rank 3, unit 'blocks.1': " in said and f"are needed in {folder}" in said
        assert "are free there" in said and "free some space, name another folder" in said
        data = some_bytes(100)  # and the disk is as good as before
        disk.start_write(disk.file("blocks.1", 100), 0, data).wait()
        gc.collect()


def test_a_file_that_could_not_be_made_leaves_no_descriptor_open(two):
    system = FaultySystem()
    with opened(*two, system=system) as disk:
        before = len(os.listdir("/proc/self/fd"))
        system.fault = fails("reserve", errno.ENOSPC, "b")
        with pytest.raises(StorageError, match="No space left on device"):
            disk.file("u", 10 * MIB)
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("op", "fault", "said"),
    [
        ("write", fails("write", errno.ENOSPC), r"No space .* \(errno 28\); free some"),
        ("read", lambda op, *_: 0 if op == "read" else None, "Input/output error"),
    ],
    ids=["full in spite of the reservation", "a read that does not go on"],
)
def test_a_call_that_fails_or_does_nothing_is_an_error(folder, op, fault, said):
    system = FaultySystem()
    with opened(folder, system=system) as disk:
        file = disk.file("u", MIB)
        system.fault = fault
        with pytest.raises(StorageError, match=said):
            start(op, disk, file, 0, some_bytes(MIB)).wait()


@pytest.mark.parametrize("case", ["missing", "a file", "refused"])
def test_a_folder_that_cannot_be_used_is_refused_with_its_path(tmp_path, case):
    path, system = tmp_path / "disk", FaultySystem()
    if case == "a file":
        path.write_text("")
    elif case == "refused":
        system.fault = fails("open", errno.EACCES)
    made = []
    with pytest.raises(
        ConfigError, match=f"rank 0: {path} for offload: .* existing, writable folder"
    ):
        Disk([path], 1, 1, lambda n: made.append(n) or host_memory(n), 0, system)
    assert not made, "memory was taken before"
    with pytest.raises(ConfigError, match="at least one folder"):
        Disk([], 1, 1, host_memory, 0)


def test_bytes_outside_of_a_file_are_refused_and_the_buffer_is_free_again(folder):
    with opened(folder, buffers=1) as disk:
        file = disk.file("u", 100)
        for begin, num_bytes in ((-1, 1), (0, 101), (100, 1)):
            buffer = disk.acquire()
            with pytest.raises(ValueError, match="of a file of 100 bytes"):
                disk.start_write(file, begin, buffer.memory[:num_bytes], buffer.release)


# ----------------------------------------------------------------------------------------- the end


def threads_of_disks():
    return [t.name for t in threading.enumerate() if t.name.startswith("shardwise-disk")]


def test_closing_waits_for_what_is_under_way_and_leaves_no_thread_and_no_space(folder):
    system = FaultySystem(lambda op, where, at: time.sleep(0.01) if op == "write" else None)
    with opened(folder, system=system) as disk:
        file = disk.file("u", 64 * MIB)
        writing = [disk.start_write(file, 0, some_bytes(MIB, n)) for n in range(4)]
    assert all(transfer.is_over for transfer in writing) and not threads_of_disks()
    for transfer in writing:  # those that waited for others were made too
        transfer.wait()
    assert system.counts["close"] == system.counts["open"]
    disk.close()
    for call in (
        disk.acquire,
        lambda: disk.file("u", 1),
        lambda: disk.start_read(file, 0, torch.ones(1)),
    ):
        with pytest.raises(StateError, match="closed"):
            call()


def test_a_file_is_closed_only_after_what_is_under_way(folder):
    system = FaultySystem(lambda op, where, at: time.sleep(0.02) if op == "write" else None)
    with opened(folder, system=system) as disk:
        file = disk.file("u", MIB)
        writing = disk.start_write(file, 0, some_bytes(MIB))
        file.close()
        writing.wait()
        before = system.counts["close"]
        file.close()
        assert system.counts["close"] == before


def test_a_disk_that_nobody_holds_any_more_ends_its_threads_and_files(folder):
    system = FaultySystem()
    disk = Disk([folder], MIB, 1, host_memory, 0, system)
    file = disk.file("u", MIB)
    disk.start_write(file, 0, some_bytes(MIB)).wait()
    threads = [t for t in threading.enumerate() if t.name.startswith("shardwise-disk")]
    assert threads
    del disk, file
    gc.collect()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    assert system.counts["close"] == system.counts["open"]


PROGRAM = """
import sys, torch
from pathlib import Path
from shardwise.offload.disk import Disk
disk = Disk([Path(sys.argv[1])], 1 << 20, 2, lambda n: torch.zeros(n, dtype=torch.uint8), 0)
file = disk.file("u", 256 << 20)
for n in range(64):
    buffer = disk.acquire()
    disk.start_write(file, n << 20, buffer.memory, buffer.release)
"""


def write_and_wait(folder, pipe):
    disk = Disk([folder], MIB, 2, host_memory, 0)
    file = disk.file("u", 256 * MIB)
    for n in range(8):
        disk.start_write(file, n * MIB, some_bytes(MIB))
    pipe.send("wrote")
    time.sleep(2 * HANG_S)


def test_a_process_that_is_killed_leaves_no_file_and_no_space_taken(folder):
    ours, theirs = multiprocessing.Pipe()
    process = forked(write_and_wait, (folder, theirs), "writer", daemon=True)
    try:
        assert ours.recv() == "wrote"
        held = [os.stat(p) for p in Path(f"/proc/{process.pid}/fd").iterdir() if p.exists()]
        assert any(s.st_size == 256 * MIB and s.st_nlink == 0 for s in held)
        assert not list(folder.iterdir())
    finally:
        process.kill()
        process.join(HANG_S)
    assert process.exitcode == -signal.SIGKILL and not list(folder.iterdir())


def test_a_program_that_ends_without_closing_does_not_hang(folder):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    assert subprocess.run(command, env=env, timeout=HANG_S).returncode == 0


def test_a_file_system_without_nameless_files_has_them_without_a_name_all_the_same(
    folder, monkeypatch
):
    plain = os.open

    def without(path, flags, *more, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return plain(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", without)
    with opened(folder) as disk:
        file, data = disk.file("u", MIB), some_bytes(MIB)
        assert not list(folder.iterdir())
        disk.start_write(file, 0, data)
        assert_kept(disk, file, 0, data)


def test_what_the_system_has_of_a_file_in_memory_is_known(tmp_path):
    disk = Disk([tmp_path], 0, 1, lambda n: torch.zeros(n, dtype=torch.uint8), 0)
    memory = map_file(disk.file("unit", 8 << 20))
    memory.fill_(3)
    assert cached_share(memory) == 1
    address, num_bytes = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    libc, sync, page_out = ctypes.CDLL(None), 4, 21  # MS_SYNC, MADV_PAGEOUT of Linux
    assert libc.msync(address, num_bytes, sync) == 0
    assert libc.madvise(address, num_bytes, page_out) == 0
    assert cached_share(memory) < 0.5
    assert int(memory.sum()) == 3 * memory.nbytes
    assert cached_share(memory[:0]) == 1
    disk.close()
