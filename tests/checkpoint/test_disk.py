"""The stand-ins of disk.py, as all crash tests rest on them: the real disk is their oracle."""

import errno
import random
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from disk import (
    PAGE,
    Fault,
    FaultyFiles,
    Killed,
    Lockstep,
    PowerCut,
    SimulatedDisk,
    all_crashes,
    randomly,
)
from ranks import HANG_S
from shardwise.checkpoint.files import Files, read_text
from shardwise.checkpoint.folder import remove_tree
from shardwise.errors import CheckpointError, CollectiveError

ROOT = Path("/")


def put(files, path, data, sync=True):
    with files.create(path) as writer:
        writer.write([memoryview(data)])
        if sync:
            writer.sync()


def get(files, path):
    with files.open(path) as reader:
        data = bytearray(reader.size)
        reader.read_into(0, memoryview(data))
    return bytes(data)


def trees(disk, limit=4096):
    return [after.tree() for after in all_crashes(disk, limit)]


# ------------------------------------------------------------------------------ the real one agrees

NAMES = st.sampled_from(["a", "b", "c"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(lambda names: "/".join(names))


class Twins(RuleBasedStateMachine):
    """The same operations on a real folder and on the simulated disk give the same answers."""

    def __init__(self):
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self._real, self._simulated = Files(), SimulatedDisk()
        self._writers = []

    def both(self, action):
        answers = []
        for files, root in ((self._real, Path(self._folder.name)), (self._simulated, ROOT)):
            try:
                answers.append(action(files, root))
            except OSError as error:
                answers.append(errno.errorcode[error.errno or 0])
                assert error.filename is not None
            except (CheckpointError, UnicodeDecodeError) as error:
                answers.append(type(error))
        return answers[0], answers[1]

    def same(self, action):
        real, simulated = self.both(action)
        assert real == simulated

    @rule(path=PATHS)
    def make_folder(self, path):
        self.same(lambda files, root: files.make_folder(root / path))

    @rule(path=PATHS)
    def make_folders(self, path):
        self.same(lambda files, root: files.make_folders(root / path))

    @rule(path=PATHS, data=st.binary(max_size=9))
    def create(self, path, data):
        real, simulated = self.both(lambda files, root: files.create(root / path))
        if isinstance(real, str) or isinstance(simulated, str):
            assert real == simulated
        else:
            self._writers.append((real, simulated))
            self.append(len(self._writers) - 1, data)

    @rule(number=st.integers(0, 3), data=st.binary(max_size=9))
    def append(self, number, data):
        for writers in self._writers[number : number + 1]:
            for writer in writers:
                writer.write([memoryview(data[:2]), memoryview(data[2:])])

    @rule(source=PATHS, new=PATHS)
    def rename(self, source, new):
        self.same(lambda files, root: files.rename(root / source, root / new))

    @rule(a=PATHS, b=PATHS)
    def exchange(self, a, b):
        self.same(lambda files, root: files.exchange(root / a, root / b))

    @rule(path=PATHS)
    def remove_file(self, path):
        self.same(lambda files, root: files.remove_file(root / path))

    @rule(path=PATHS)
    def remove_folder(self, path):
        self.same(lambda files, root: files.remove_folder(root / path))

    @rule(path=PATHS)
    def remove_tree(self, path):
        self.same(lambda files, root: remove_tree(files, root / path))

    @rule(path=PATHS)
    def sync(self, path):
        self.same(lambda files, root: files.sync_folder(root / path))

    @rule(path=st.sampled_from(["l", "a/l", "b/c/l"]), text=st.text(max_size=3))
    def lock(self, path, text):
        def write(files, root):
            lock = files.lock(root / path)
            lock.write(text)
            refused = files.lock(root / path) is None
            refused_shared = files.lock(root / path, shared=True) is None
            lock.release()
            sharing = [files.lock(root / path, shared=True) for _ in range(2)]
            while_shared = []
            for each in sharing:
                while_shared.append(files.lock(root / path) is None)
                each.release()
            return refused and refused_shared and all(while_shared)

        self.same(write)

    @rule(path=PATHS, offset=st.integers(0, 9), length=st.integers(0, 9))
    def read(self, path, offset, length):
        def read(files, root):
            with files.open(root / path) as reader:
                data = bytearray(length)
                reader.read_into(offset, memoryview(data))
                return reader.size, bytes(data)

        self.same(read)
        self.same(lambda files, root: read_text(files, root / path, 8))

    @invariant()
    def the_trees_are_equal(self):
        for folder in ("", "a", "a/b", "b/a"):
            self.same(
                lambda files, root, folder=folder: [
                    (entry.name, entry.kind, entry.size) for entry in files.list(root / folder)
                ]
            )

    def teardown(self):
        for real, simulated in self._writers:
            real.close()
            simulated.close()
        everything = self._simulated.tree()
        assert self._simulated.crash(lambda _, options: options - 1).tree() == everything
        self._folder.cleanup()


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


# ----------------------------------------------------------------------------------------- crashes


def play(disk, script):
    """Do what each line says: ``put`` is synced, ``write`` is not; paths begin at the root."""
    for line in script.split("; "):
        word, *rest = line.split()
        paths = [ROOT / path for path in rest]
        if word in ("put", "write"):
            put(disk, paths[0], "".join(rest[1:]).encode(), sync=word == "put")
        else:
            getattr(disk, word)(*paths)


def names(*paths, **contents):
    """Return a tree: folders, and files whose paths have _ for a slash."""
    files = {"/" + path.replace("_", "/"): text.encode() for path, text in contents.items()}
    return {f"/{path}": None for path in paths} | files


# What is done, and every tree that a power cut then may leave.
CRASHES = {
    "synced data with a synced name stays": ("put a data; sync_folder /", [names(a="data")]),
    "a file without a synced name is gone or whole": ("put a data", [{}, names(a="data")]),
    "unsynced data is missing, short or zero": (
        "write a data; sync_folder /",
        [names(a=text) for text in ("", "da", "\0\0", "dat", "\0\0\0", "data", "\0\0\0\0")],
    ),
    "an unsynced rename leaves the old or the new name": (
        "make_folders run/tmp; put run/tmp/f 1; sync_folder run/tmp; rename run/tmp run/step",
        [names("run", "run/tmp", run_tmp_f="1"), names("run", "run/step", run_step_f="1")],
    ),
    "a synced rename leaves the new name": (
        "make_folders run/tmp; put run/tmp/f 1; sync_folder run/tmp; rename run/tmp run/step; "
        "sync_folder run",
        [names("run", "run/step", run_step_f="1")],
    ),
    "an exchange happens to both names or to none": (
        "put a 1; put b 2; sync_folder /; exchange a b",
        [names(a="1", b="2"), names(a="2", b="1")],
    ),
    "nothing survives in a folder whose making was lost": (
        "make_folder d; put d/f 1; sync_folder d; rename d e",
        [{}, names("d", d_f="1"), names("e", e_f="1")],
    ),
    "changes of names survive in any subset": (
        "put a; put b; put c",
        [names(**dict.fromkeys(kept, "")) for kept in ("", "a", "b", "c", "ab", "ac", "bc", "abc")],
    ),
    "a durable removal of a folder takes its files along": (
        "make_folders d; put d/x 1; sync_folder d; rename d/x d/y; remove_file d/y; "
        "remove_folder d; sync_folder /",
        [{}],
    ),
    "a removed folder takes no file along that was moved out of it": (
        "make_folders d; make_folders e; put d/x 1; sync_folder d; rename d/x e/x; remove_folder d",
        [names("d", "e", d_x="1"), names("d", "e", e_x="1"), names("e", e_x="1")],
    ),
    "a new file takes no name whose old file has not left it": (
        "put a 1; sync_folder /; rename a b; put a 2",
        [names(a="1"), names(b="1"), names(a="2", b="1")],
    ),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_power_cut_leaves_these_trees_and_no_others(name):
    script, expected = CRASHES[name]
    disk = SimulatedDisk()
    play(disk, script)
    found = {frozenset(tree.items()) for tree in trees(disk)}
    assert found == {frozenset(tree.items()) for tree in expected}


def test_bytes_synced_before_survive_beside_lost_pages():
    disk = SimulatedDisk()
    page = bytes([1]) * PAGE
    with disk.create(ROOT / "a") as writer:
        writer.write([memoryview(page[:100])])
        writer.sync()
        writer.write([memoryview(page[100:]), memoryview(page)])
    disk.sync_folder(ROOT)
    found = {tree["/a"] for tree in trees(disk)}
    assert all(data is not None and data[:100] == page[:100] for data in found)
    assert {page[:100], page[:100] + bytes(PAGE - 100) + page, page + bytes(PAGE), page} <= found
    assert page + page in found


def test_a_sync_that_failed_and_then_succeeds_has_saved_nothing():
    """As kernels do: the pages are dropped, and the error is told once."""
    disk = SimulatedDisk()
    files = FaultyFiles(disk, Fault(0, errno.EIO, "sync"))
    with files.create(ROOT / "a") as writer:
        writer.write([memoryview(b"data")])
        with pytest.raises(OSError):
            writer.sync()
        writer.sync()
    disk.sync_folder(ROOT)
    assert {"/a": b""} in trees(disk)


def test_a_crash_leaves_the_crashed_disk_alone_and_is_itself_durable():
    disk = SimulatedDisk()
    put(disk, ROOT / "a", b"1", sync=False)
    before = disk.tree()
    after = disk.crash(lambda _, options: options - 1)
    put(after, ROOT / "b", b"2")
    assert disk.tree() == before
    assert {"/a": b"1"} in trees(after) and {"/a": b"1", "/b": b"2"} in trees(after)
    assert all(tree["/a"] == b"1" for tree in trees(after))


@pytest.mark.parametrize("k", range(6))
def test_a_power_cut_comes_before_the_chosen_operation_and_lasts(k):
    disk = SimulatedDisk(crash_at=k)
    with pytest.raises(PowerCut):
        put(disk, ROOT / "a", b"1")  # create, write, sync, close
        disk.sync_folder(ROOT)
        disk.sync_folder(ROOT)
    operations = ["create", "write", "sync", "close", "sync_folder", "sync_folder"]
    assert [op for op, _ in disk.operations] == operations[:k]
    with pytest.raises(PowerCut):
        disk.list(ROOT)


def test_too_many_crashes_are_sampled_with_both_extremes_and_the_same_for_a_seed():
    disk = SimulatedDisk()
    for i in range(10):
        put(disk, ROOT / str(i), bytes([i]))
    found = trees(disk, limit=50)
    assert len(found) == 50 and found == trees(disk, limit=50)
    assert found[0] == {} and found[1] == disk.tree()
    assert len({frozenset(tree) for tree in found}) > 20


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_after_any_crash_every_file_is_in_one_place_and_every_promise_was_kept(data):
    """Random names come, move and go; each file holds its own number, so that it is known again.

    A file that was there at a sync of everything and not removed since is still in one place. Names
    that nothing touched since the last sync of their folder are as they were then.
    """
    disk = SimulatedDisk()
    rng = random.Random(data.draw(st.integers(0, 1 << 32), label="seed"))
    folders = [ROOT, ROOT / "d", ROOT / "e"]
    for folder in folders[1:]:
        disk.make_folders(folder)
    kept = set()
    promised = {folder: {} for folder in folders}
    touched = {folder: set() for folder in folders}
    for number in range(rng.randrange(1, 25)):
        files = [path for path, content in disk.tree().items() if content is not None]
        old = Path(rng.choice(files)) if files else None
        other = Path(rng.choice(files)) if files else None
        new = rng.choice(folders) / f"n{number % 5}"
        what = rng.choice(["put", "put", "move", "swap", "remove", "sync", "sync all"])
        if what == "put" and str(new) not in files:
            put(disk, new, b"%d" % number)
        elif what == "move" and old and str(new) not in files:
            disk.rename(old, new)
        elif what == "swap" and old and other:
            disk.exchange(old, other)
        elif what == "remove" and old:
            kept.discard(get(disk, old))
            disk.remove_file(old)
        elif what.startswith("sync"):
            for folder in folders if what == "sync all" else [rng.choice(folders)]:
                disk.sync_folder(folder)
                promised[folder] = files_in(disk, folder)
                touched[folder] = set()
            if what == "sync all":
                kept = {content for content in disk.tree().values() if content is not None}
            continue
        for path in (old, other, new):
            if path:
                touched[path.parent].add(path.name)
    choose = data.draw(st.sampled_from(["hypothesis", "random"]), label="choose")
    after = disk.crash(
        randomly(rng)
        if choose == "random"
        else lambda what, options: data.draw(st.integers(0, options - 1), label=what)
    )
    contents = [content for content in after.tree().values() if content is not None]
    assert len(contents) == len(set(contents))
    assert kept <= set(contents)
    for folder in folders:
        for names in (found := files_in(after, folder), promised[folder]):
            for name in touched[folder]:
                names.pop(name, None)
        assert found == promised[folder]


def files_in(disk, folder):
    return {
        Path(path).name: content
        for path, content in disk.tree().items()
        if content is not None and Path(path).parent == folder
    }


# -------------------------------------------------------------------------------------- faults


def save(files):
    """A small commit: nine operations, of which one writes ten bytes."""
    files.make_folder(ROOT / "tmp")
    with files.create(ROOT / "tmp" / "f") as writer:
        writer.write([memoryview(b"01234"), memoryview(b"56789")])
        writer.sync()
    files.sync_folder(ROOT / "tmp")
    files.rename(ROOT / "tmp", ROOT / "step")
    files.sync_folder(ROOT)
    assert [entry.name for entry in files.list(ROOT)] == ["step"]


@pytest.mark.parametrize("when", ["before", "middle", "after"])
@pytest.mark.parametrize("number", [None, errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT])
def test_each_operation_can_fail_or_kill_and_nothing_later_happens(number, when):
    plain = FaultyFiles(SimulatedDisk())
    save(plain)
    assert len(plain.operations) == 9
    for k in range(9):
        disk = SimulatedDisk()
        files = FaultyFiles(disk, Fault(k, number, when=when))
        with pytest.raises(Killed if number is None else OSError) as caught:
            save(files)
        assert files.operations[: k + 1] == plain.operations[: k + 1]
        if number is not None:
            assert isinstance(caught.value, OSError) and caught.value.errno == number
            assert Path(caught.value.filename).name == plain.operations[k][1]
        else:
            assert len(files.operations) == k + 1 and files.dead
            with pytest.raises(Killed):
                files.list(ROOT)


def test_a_fault_meets_the_chosen_operation_of_a_kind_and_half_a_write_stays():
    disk = SimulatedDisk()
    files = FaultyFiles(disk, Fault(1, None, "write", "middle"))
    put(files, ROOT / "a", b"01234")
    with pytest.raises(Killed), files.create(ROOT / "b") as writer:
        writer.write([memoryview(b"012"), memoryview(b""), memoryview(b"3456789")])
    assert disk.tree() == {"/a": b"01234", "/b": b"01234"}


def test_a_lasting_fault_goes_on_and_another_passes():
    for lasting in (False, True):
        files = FaultyFiles(SimulatedDisk(), Fault(1, errno.ENOSPC, "write", lasting=lasting))
        outcome = []
        for name in "abcd":
            try:
                put(files, ROOT / name, b"1")
                outcome.append(True)
            except OSError:
                outcome.append(False)
        assert outcome == [True, False, not lasting, not lasting]


def test_a_killed_rank_loses_its_lock_and_runs_no_clean_up(tmp_path):
    for disk, root in ((SimulatedDisk(), ROOT), (Files(), tmp_path)):
        files = FaultyFiles(disk, Fault(1, op="create"))
        lock = files.lock(root / "lock")
        assert lock is not None and disk.lock(root / "lock") is None
        with pytest.raises(Killed):
            try:
                put(files, root / "a", b"1")
                put(files, root / "b", b"1")
            finally:
                lock.release()
                files.remove_file(root / "a")
        assert [entry.name for entry in disk.list(root)] == ["a", "lock"]
        again = disk.lock(root / "lock")
        again.release()


# -------------------------------------------------------------------------------------- lockstep


@pytest.mark.parametrize("ranks", [1, 3, 5])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_ranks_in_lockstep_exchange_and_broadcast_as_real_ones(ranks, seed):
    def body(control):
        assert control.num_ranks == ranks
        found = []
        for i in range(4):
            found.append(control.exchange(b"%d%d" % (i, control.rank)))
            found.append(control.broadcast(b"x" * i if control.rank == 0 else b"ignored"))
        return found

    one = []
    for i in range(4):
        one += [[b"%d%d" % (i, rank) for rank in range(ranks)], b"x" * i]
    assert Lockstep().run(ranks, body, seed) == [one] * ranks


def test_only_one_rank_runs_at_a_time_and_a_seed_gives_one_order():
    def order(seed):
        lockstep = Lockstep()
        disk = SimulatedDisk(before=lockstep.pause)
        busy = threading.Lock()

        def body(control):
            for i in range(3):
                assert busy.acquire(blocking=False)
                busy.release()
                put(disk, ROOT / f"{control.rank}-{i}", b"1")
                control.exchange(b"")

        assert lockstep.run(3, body, seed) == [None] * 3
        return disk.operations

    orders = [order(seed) for seed in range(5)]
    assert orders == [order(seed) for seed in range(5)]
    assert len({tuple(o) for o in orders}) == 5
    assert [name for op, name in order(None) if op == "create"] == [
        f"{rank}-{i}" for i in range(3) for rank in range(3)
    ]


# The error of rank 1, and whether it ends after a broadcast of its own, or exchanges to clean up.
ENDS = [(Killed(), ""), (CheckpointError("no"), ""), (Killed(), "sent"), (Killed(), "cleans up")]


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(("error", "how"), ENDS)
def test_the_exchanges_of_others_fail_when_a_rank_ends_by_an_exception(error, how, seed):
    """A dead rank's broadcast was sent, and its clean-up cannot exchange."""

    def body(control):
        data = control.broadcast(b"data", 1) if how == "sent" else control.exchange(b"a")
        try:
            if control.rank == 1:
                raise error
        finally:
            if (control.rank != 1 and how != "sent") or how == "cleans up":
                data = control.exchange(b"b")[0]
        return data

    results = Lockstep().run(3, body, seed)
    assert results[1] is error
    for rank in (0, 2):
        ended = isinstance(results[rank], CollectiveError)
        assert results[rank] == b"data" if how == "sent" else ended


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_power_cut_stops_all_ranks_but_not_what_has_returned(seed):
    lockstep = Lockstep()
    disk = SimulatedDisk(crash_at=10, before=lockstep.pause)

    def body(control):
        control.exchange(b"")
        for i in range(2 if control.rank == 2 else 50):
            disk.free_bytes(ROOT) if control.rank == 2 else put(
                disk, ROOT / f"{control.rank}{i}", b""
            )
        if control.rank == 1:
            control.exchange(b"")
        return "done"

    results = lockstep.run(3, body, seed)
    assert isinstance(results[0], PowerCut) and isinstance(results[1], PowerCut)
    assert results[2] == "done" or isinstance(results[2], PowerCut)
    assert len(disk.operations) == 10


def test_a_hang_is_told_and_every_thread_ends():
    def body(control):
        control.exchange(b"")
        if control.rank != 1:
            control.exchange(b"")

    before = set(threading.enumerate())
    with pytest.raises(AssertionError, match=r"a hang: waiting \{0: 'in call 1', 2: 'in call 1'\}"):
        Lockstep().run(3, body)
    new = set(threading.enumerate()) - before
    for thread in new:
        thread.join(HANG_S)
    assert not any(thread.is_alive() for thread in new)


@pytest.mark.parametrize("swapped", ["kind", "length"])
def test_ranks_that_call_different_exchanges_are_told(swapped):
    def body(control):
        if control.rank == 1 and swapped == "kind":
            control.broadcast(b"12")
        else:
            control.exchange(b"1" * (1 + control.rank))

    with pytest.raises(AssertionError, match="call 0 differs"):
        Lockstep().run(2, body)


def test_a_rank_that_blocks_outside_of_the_exchanges_is_told():
    gate = threading.Event()
    with pytest.raises(AssertionError, match="rank 0 neither ended nor met"):
        Lockstep().run(2, lambda control: gate.wait(), patience=0.2)
    gate.set()
