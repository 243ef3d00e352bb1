"""Stand-ins for the disk and for the other ranks: they fail, forget and interleave on command.

`FaultyFiles` makes one operation fail or the process die at it, `SimulatedDisk` is a file system in
memory that a power cut can hit, `Lockstep` runs ranks as threads of which one runs at a time. All
are deterministic: the same seed or the same number of the operation gives the same run.
"""

import errno
import os
import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from ranks import HANG_S
from shardwise.checkpoint.files import Entry, Files, Reader
from shardwise.errors import CollectiveError, DamagedCheckpoint

PAGE = 4096


class Killed(BaseException):
    """The process of this rank was killed: what it wrote stays, it does nothing more."""


class PowerCut(BaseException):
    """The machine lost its power: all ranks stop, what was not synced may be lost."""


class _Stopped(BaseException):
    """The run is over because of a mistake in the test's subject."""


_DYING = (Killed, PowerCut, _Stopped)


class _Handle:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def os_error(number, path):
    return OSError(number, os.strerror(number), str(path))


# ------------------------------------------------------------------------------ failing operations


@dataclass(frozen=True)
class Fault:
    """What goes wrong: at the operation number ``at``, from 0, of all or of one kind.

    ``number`` is an errno; without one the process is killed. In the ``middle`` half of the bytes
    of a write are written; every other operation happens wholly or not at all. A ``lasting`` fault
    meets every later operation too, as a full disk does.
    """

    at: int
    number: int | None = None
    op: str | None = None
    when: Literal["before", "middle", "after"] = "before"
    lasting: bool = False


def _counted(op):
    """Return a method that counts an operation, and does it on the files inside."""

    def method(self, path, *more):
        return self.do(op, path, lambda: getattr(self.inner, op)(path, *more))

    return method


class FaultyFiles:
    """Files of one rank: count the operations, and fail or die at the chosen ones.

    A killed rank does nothing more: every later call raises Killed, so that no clean-up runs which
    a real kill would not run, and its open files and locks are closed as the kernel does it.
    """

    def __init__(self, inner, *faults, before=None):
        self.inner = inner
        self.operations = []
        self.dead = False
        self._faults = faults
        self._before = before
        self._handles = []  # open files and locks

    make_folder, make_folders, list = map(_counted, ("make_folder", "make_folders", "list"))
    remove_file, remove_folder = map(_counted, ("remove_file", "remove_folder"))
    rename, exchange = map(_counted, ("rename", "exchange"))
    sync_folder, free_bytes = map(_counted, ("sync_folder", "free_bytes"))

    def create(self, path):
        return _FaultyWriter(self, path, self.do("create", path, lambda: self.inner.create(path)))

    def open(self, path):
        return _FaultyReader(self, path, self.do("open", path, lambda: self.inner.open(path)))

    def lock(self, path, shared=False):
        lock = self.do("lock", path, lambda: self.inner.lock(path, shared))
        return lock and _FaultyLock(self, path, lock)

    def do(self, op, path, action, half=None):
        """Count the operation, do it, and let the fault that meets it come true."""
        if self.dead:
            raise Killed
        if self._before is not None:
            self._before()
        fault = self._met(op)
        self.operations.append((op, path.name))
        if fault is not None and fault.when != "after":
            if fault.when == "middle" and half is not None:
                half()
            self._fail(fault, path)
        result = action()
        if hasattr(result, "close") or hasattr(result, "release"):
            self._handles.append(result)
        if fault is not None:
            self._fail(fault, path)
        return result

    def _met(self, op):
        for fault in self._faults:
            if fault.op in (None, op):
                done = sum(1 for kind, _ in self.operations if fault.op in (None, kind))
                if done == fault.at or (fault.lasting and done > fault.at):
                    return fault
        return None

    def _fail(self, fault, path):
        if fault.number is not None:
            raise os_error(fault.number, path)
        self.dead = True
        for handle in self._handles:
            with suppress(OSError):
                (handle.release if hasattr(handle, "release") else handle.close)()
        raise Killed


class _FaultyHandle(_Handle):
    def __init__(self, files, path, inner):
        self._files = files
        self._path = path
        self._inner = inner
        self._closed = False


class _FaultyWriter(_FaultyHandle):
    def write(self, buffers):
        def half():
            rest = sum(view.nbytes for view in buffers) // 2
            for view in buffers:
                head = view.cast("B")[:rest] if view.nbytes else view
                self._inner.write([head])
                rest -= head.nbytes

        self._files.do("write", self._path, lambda: self._inner.write(buffers), half)

    def sync(self):
        try:
            self._files.do("sync", self._path, self._inner.sync)
        except OSError:
            if isinstance(self._inner, _SimulatedWriter):
                self._inner.forget()
            raise

    def close(self):
        if not (self._closed or self._files.dead):
            self._closed = True
            try:
                self._files.do("close", self._path, self._inner.close)
            except OSError:
                self._inner.close()  # a file is closed even if that fails
                raise


class _FaultyReader(_FaultyHandle):
    read = Reader.read

    @property
    def size(self):
        return self._inner.size

    def read_into(self, offset, buffer):
        self._files.do("read", self._path, lambda: self._inner.read_into(offset, buffer))

    def close(self):
        self._inner.close()


class _FaultyLock(_FaultyHandle):
    def write(self, text):
        self._files.do("lock_write", self._path, lambda: self._inner.write(text))

    def release(self):
        if not (self._closed or self._files.dead):
            self._closed = True
            self._files.do("release", self._path, self._inner.release)


class Watched(Files):
    """Files that write down what is read of them."""

    def __init__(self):
        self.reads = {}

    def open(self, path):
        reads, reader = self.reads.setdefault(path.name, []), super().open(path)
        inner = reader.read_into

        def read_into(offset, buffer):
            reads.append((offset, offset + buffer.nbytes))
            inner(offset, buffer)

        reader.read_into = read_into
        return reader


# --------------------------------------------------------------------------------- simulated disk


@dataclass(eq=False)
class _Node:
    """A file or a folder, whatever its names are."""

    inode: int
    is_folder: bool
    entries: dict[str, "_Node"] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    synced: int = 0  # so many bytes are durable
    forgetful: bool = False  # a sync failed: the kernel dropped the bytes and will not say it again


_Place = tuple[_Node, str, _Node]  # folder, name, what is there


@dataclass(eq=False)
class _Change:
    """One change of names: which places lose what they hold, and which get it."""

    what: str
    takes: Sequence[_Place] = ()
    puts: Sequence[_Place] = ()
    synced: bool = False

    @property
    def folders(self):
        return {folder for folder, _, _ in (*self.takes, *self.puts)}


_Names = dict[_Node, dict[str, _Node]]


class SimulatedDisk:
    """Files in memory with two images: what running programs see and what is durable.

    A power cut (`crash`) leaves of a file its synced bytes and of the rest any size and any pages,
    the others zero. Each change of names (create, make, rename, exchange, remove) since the last
    `sync_folder` of a folder that it concerns survives or not, in no order, but wholly or not at
    all, and only if what it acts on survived: no file in a folder that was never made. As a rename
    never leaves both names or neither, the sync of either of its two folders makes it durable.

    Operations are counted from 0; at number ``crash_at`` and ever after they raise PowerCut and do
    nothing. ``before`` is called ahead of every operation. Paths start at one root, which is there.
    """

    def __init__(self, crash_at=None, before=None):
        self.operations = []
        self.crash_at = crash_at
        self._before = before
        self._root = _Node(2, True)
        self._num_nodes = 2
        self._durable = {self._root: {}}
        self._log = []  # changes of names that are not in `_durable`, oldest first
        self._locks = defaultdict(list)

    # ---- Files

    def make_folder(self, path):
        self.count("make_folder", path)
        self._make(path, is_folder=True)

    def make_folders(self, path):
        self.count("make_folders", path)
        for folder in (*reversed(path.parents), path):
            if _parts(folder):
                try:
                    self._make(folder, is_folder=True)
                except FileExistsError:
                    if folder != path:
                        continue
                    if not self._find(folder).is_folder:
                        raise
                self._settle(self._find(folder.parent))

    def create(self, path):
        self.count("create", path)
        return _SimulatedWriter(self, path, self._make(path, is_folder=False))

    def open(self, path):
        self.count("open", path)
        node = self._find(path)
        if node.is_folder:
            raise DamagedCheckpoint(f"{path} should be a regular file but is a folder")
        return _SimulatedReader(self, path, node)

    def sync_folder(self, path):
        self.count("sync_folder", path)
        self._settle(self._find(path, folder=True))

    def rename(self, source, target):
        self.count("rename", source)
        self._parent(source)
        folder, name = self._parent(target)
        old = self._place(source)
        if name in folder.entries:
            raise os_error(errno.EEXIST, source)
        if folder in _reachable(_names(self._root), old[2]):
            raise os_error(errno.EINVAL, source)
        self._change(_Change(f"rename {source} {target}", [old], [(folder, name, old[2])]))

    def exchange(self, a, b):
        self.count("exchange", a)
        self._parent(a), self._parent(b)  # their errors come first, as the kernel has it
        one, two = self._place(a), self._place(b)
        names = _names(self._root)
        if one[0] in _reachable(names, two[2]) or two[0] in _reachable(names, one[2]):
            raise os_error(errno.EINVAL, a)
        puts = [(*one[:2], two[2]), (*two[:2], one[2])]
        if one[2] is not two[2]:
            self._change(_Change(f"exchange {a} {b}", [one, two], puts))

    def list(self, path):
        self.count("list", path)
        found = sorted(self._find(path, folder=True).entries.items())
        return [
            Entry(name, "folder" if node.is_folder else "file", len(node.data))
            for name, node in found
        ]

    def remove_file(self, path):
        self.count("remove_file", path)
        place = self._place(path)
        if place[2].is_folder:
            raise os_error(errno.EISDIR, path)
        self._change(_Change(f"remove {path}", [place]))

    def remove_folder(self, path):
        self.count("remove_folder", path)
        place = self._place(path)
        if not place[2].is_folder:
            raise os_error(errno.ENOTDIR, path)
        if place[2].entries:
            raise os_error(errno.ENOTEMPTY, path)
        self._change(_Change(f"remove {path}", [place]))

    def free_bytes(self, path):
        self.count("free_bytes", path)
        self._find(path)
        return 1 << 40

    def lock(self, path, shared=False):
        self.count("lock", path)
        folder, name = self._parent(path)
        node = folder.entries.get(name) or self._make(path, is_folder=False)
        if node.is_folder:
            raise DamagedCheckpoint(f"{path} should be a regular file but is a folder")
        held = self._locks[node]  # of those who hold it, whether they share it
        if held and not (shared and all(held)):
            return None
        held.append(shared)
        return _SimulatedLock(self, path, node)

    # ---- what tests ask

    def tree(self):
        """Return what programs see: each path with its bytes, None for a folder."""
        found = {}

        def walk(folder, prefix):
            for name, node in sorted(folder.entries.items()):
                found[prefix + name] = None if node.is_folder else bytes(node.data)
                walk(node, f"{prefix}{name}/")

        walk(self._root, "/")
        return found

    def crash(self, choose):
        """Return the disk as it is after a power cut now; this one stays as it is.

        ``choose`` gets what is asked and the number of options, of which 0 is the worst.
        """
        names = {folder: dict(entries) for folder, entries in self._durable.items()}
        moved = {node for change in self._log if change.puts for _, _, node in change.takes}
        moved &= _reachable(_names(self._root), self._root)
        for change in self._log:
            if _applies(change, names, self._root, moved) and (
                change.synced or choose(change.what, 2)
            ):
                _apply(change, names)
        after = SimulatedDisk()
        copies = {self._root: after._root}

        def copy(folder):
            for name, node in sorted(names.get(folder, {}).items()):
                twin = _Node(node.inode, node.is_folder)
                twin.data = bytearray() if node.is_folder else _surviving(node, name, choose)
                twin.synced = len(twin.data)
                copies[folder].entries[name] = copies[node] = twin
                if node.is_folder:
                    copy(node)

        copy(self._root)
        after._num_nodes = self._num_nodes
        after._durable = _names(after._root)
        return after

    # ---- inner

    def count(self, op, path):
        self.check_power()
        if self._before is not None:
            self._before()
            self.check_power()
        self.operations.append((op, path.name))

    def check_power(self):
        if self.crash_at is not None and len(self.operations) >= self.crash_at:
            raise PowerCut

    def unlock(self, node):
        self._locks[node].pop()  # whoever they are, they are alike

    def _find(self, path, folder=False):
        node = self._root
        for name in _parts(path):
            if not node.is_folder:
                raise os_error(errno.ENOTDIR, path)
            if name not in node.entries:
                raise os_error(errno.ENOENT, path)
            node = node.entries[name]
        if folder and not node.is_folder:
            raise os_error(errno.ENOTDIR, path)
        return node

    def _parent(self, path):
        try:
            return self._find(path.parent, folder=True), path.name
        except OSError as error:
            raise os_error(error.errno or 0, path) from None

    def _place(self, path):
        folder, name = self._parent(path)
        return folder, name, self._find(path)

    def _make(self, path, is_folder):
        folder, name = self._parent(path)
        if name in folder.entries:
            raise os_error(errno.EEXIST, path)
        self._num_nodes += 1
        node = _Node(self._num_nodes, is_folder)
        self._change(_Change(f"make {path}", puts=[(folder, name, node)]))
        return node

    def _change(self, change):
        for folder, name, _ in change.takes:
            del folder.entries[name]
        for folder, name, node in change.puts:
            folder.entries[name] = node
        self._log.append(change)

    def _settle(self, folder):
        taken = set()
        put = set()
        for change in reversed(self._log):  # and what it rests on in other folders
            freed = {(where, name) for where, name, _ in change.takes}
            change.synced |= (
                folder in change.folders or bool(taken & {*change.puts}) or bool(put & freed)
            )
            if change.synced:
                taken |= {*change.takes}
                put |= {(where, name) for where, name, _ in change.puts}
        while self._log and self._log[0].synced:  # nothing before it can be lost any more
            change = self._log.pop(0)
            if _applies(change, self._durable, self._root, set()):
                _apply(change, self._durable)


def _parts(path):
    assert ".." not in path.parts, path
    return path.parts[1:] if path.is_absolute() else path.parts


def _names(root):
    return {node: dict(node.entries) for node in _walk(root) if node.is_folder}


def _walk(node):
    yield node
    for child in node.entries.values():
        yield from _walk(child)


def _reachable(names, start):
    found, rest = {start}, [start]
    while rest:
        new = set(names.get(rest.pop(), {}).values()) - found
        found |= new
        rest += new
    return found


def _applies(change, names, root, moved):
    """Say whether what the change acts on is there, given the earlier ones that survived."""
    if not all(names.get(folder, {}).get(name) is node for folder, name, node in change.takes):
        return False
    if not change.puts:  # removed; a folder takes the files along whose removal was lost
        return not any(moved & set(names.get(node, {}).values()) for _, _, node in change.takes)
    there = _reachable(names, root)
    freed = {(folder, name) for folder, name, _ in change.takes}
    return all(
        folder in there and ((folder, name) in freed or name not in names[folder])
        for folder, name, _ in change.puts
    )


def _apply(change, names):
    for folder, name, _ in change.takes:
        del names[folder][name]
    for folder, name, node in change.puts:
        names[folder][name] = node
        if node.is_folder:
            names.setdefault(node, {})


def _surviving(node, name, choose):
    """Choose a size between what was synced and what was written, then which pages have data."""
    lo, hi = node.synced, len(node.data)
    pages = range((lo // PAGE + 1) * PAGE, hi, PAGE)
    sizes = sorted({lo, (lo + hi) // 2, *pages, hi - 1, hi}) if lo < hi else [hi]
    size = sizes[choose(f"size of {name}", len(sizes)) if lo < hi else 0]
    data = node.data[:size]
    for begin in sorted({lo, *(p for p in pages if p < size)} if lo < size else ()):
        end = min(size, (begin // PAGE + 1) * PAGE)
        if not choose(f"{name}[{begin}:{end}]", 2):
            data[begin:end] = bytes(end - begin)
    return data


class _SimulatedHandle(_Handle):
    def __init__(self, disk, path, node):
        self._disk = disk
        self._path = path
        self._node = node
        self._closed = False

    def _count(self, op):
        self._disk.count(op, self._path)
        if self._closed:
            raise os_error(errno.EBADF, self._path)


class _SimulatedWriter(_SimulatedHandle):
    def write(self, buffers):
        self._count("write")
        self._node.data += b"".join(buffers)

    def sync(self):
        self._count("sync")
        if not self._node.forgetful:
            self._node.synced = len(self._node.data)

    def forget(self):
        """Follow a failed sync: a later one says that all is well, and it is not."""
        self._node.forgetful = True

    def close(self):
        if not self._closed:
            self._closed = True
            with suppress(PowerCut):
                self._disk.count("close", self._path)


class _SimulatedReader(_SimulatedHandle):
    read = Reader.read

    def __init__(self, disk, path, node):
        super().__init__(disk, path, node)
        self.size = len(node.data)

    def read_into(self, offset, buffer):
        self._count("read")
        data, end = self._node.data, offset + buffer.nbytes
        if buffer.nbytes and end > len(data):
            raise DamagedCheckpoint(f"{self._path}: expected {end} bytes, it has {len(data)}")
        if buffer.nbytes:
            buffer.cast("B")[:] = data[offset:end]

    def close(self):
        self._closed = True


class _SimulatedLock(_SimulatedHandle):
    def write(self, text):
        self._count("lock_write")
        self._node.data[:] = text.encode()
        self._node.synced = 0

    def release(self):
        if not self._closed:
            self._closed = True
            self._disk.unlock(self._node)


def randomly(rng):
    """Choose for `crash` by a generator: most is lost, most survives, or anything between."""
    keep = rng.choice((0.0, 0.5, 0.9))
    return lambda _, options: options - 1 if rng.random() < keep else rng.randrange(options)


def all_crashes(disk, limit=4096, seed=0):
    """Yield every disk that a power cut now may leave; if they are more, ``limit`` of them."""
    odometer = _Odometer()
    found = [disk.crash(odometer.choose)]
    while odometer.turn() and len(found) <= limit:
        found.append(disk.crash(odometer.choose))
    if len(found) <= limit:
        yield from found
        return
    rng = random.Random(seed)
    yield disk.crash(lambda _, options: 0)
    yield disk.crash(lambda _, options: options - 1)
    for _ in range(limit - 2):
        yield disk.crash(randomly(rng))


class _Odometer:
    """Answers every sequence of questions in every way, one way a turn."""

    def __init__(self):
        self._answers = []
        self._options = []

    def choose(self, _, options):
        self._options.append(options)
        if len(self._answers) < len(self._options):
            self._answers.append(0)
        return self._answers[len(self._options) - 1]

    def turn(self):
        while self._answers and self._answers[-1] + 1 == self._options[len(self._answers) - 1]:
            self._answers.pop()
        if self._answers:
            self._answers[-1] += 1
        self._options.clear()
        return bool(self._answers)


# -------------------------------------------------------------------------------- ranks in lockstep


class Lockstep:
    """Run ranks as threads of which one runs at a time; the baton passes where ranks meet.

    With a seed, `pause` (to be given to a disk as ``before``) passes it too, to a random rank. A
    rank that ends by an exception makes the exchanges of the others fail, a PowerCut ends all. If
    some wait and none can go on, as when one has returned without an exchange, or if two ranks call
    different ones, `run` raises AssertionError.
    """

    def __init__(self):
        self._rng = None
        self._current = None

    def run(self, ranks, body, seed=None, patience=HANG_S):
        """Return what each rank returned, or the exception that ended it."""
        self._rng = None if seed is None else random.Random(seed)
        self._ranks = range(ranks)
        self._go = [threading.Semaphore(0) for _ in self._ranks]
        self._results = {}
        self._dead = set()
        self._calls = defaultdict(dict)
        self.num_calls = Counter()
        self._waits = {}  # rank: (call, for which ranks)
        self._stop = None
        self._mistake = ""
        self._over = threading.Event()
        for rank in self._ranks:
            threading.Thread(target=self._main, args=(rank, body), daemon=True).start()
        self._pass_on()
        if not self._over.wait(patience):
            self._stop = _Stopped()
            raise AssertionError(f"rank {self._current} neither ended nor met the others")
        self._current = None
        if self._mistake:
            raise AssertionError(self._mistake)
        return [self._results[rank] for rank in self._ranks]

    def pause(self):
        """Let another rank run, if there is a seed; outside of a run do nothing."""
        if self._rng is not None and self._current is not None:
            self._switch(self._current)

    def meet(self, rank, kind, row):
        """Wait for the ranks that this call needs and return their rows."""
        dying = sys.exception()
        if isinstance(dying, _DYING):
            raise dying  # a dead process says nothing, whatever its clean-up code asks for
        call = self.num_calls[rank]
        self.num_calls[rank] += 1
        self._calls[call][rank] = (kind, row)
        needed = self._ranks if kind == "exchange" else [int(kind.split()[1])]
        self._waits[rank] = (call, needed)
        self._switch(rank)
        del self._waits[rank]
        rows = self._calls[call]
        if missing := [other for other in needed if other not in rows]:
            raise CollectiveError(f"rank {rank}: rank {missing[0]} ended before call {call}")
        forms = {(kind, len(row) if kind == "exchange" else 0) for kind, row in rows.values()}
        if len(forms) > 1:
            self._mistake = f"call {call} differs between the ranks: {sorted(forms)}"
            self._stop = _Stopped()
            raise self._stop
        return [rows[other][1] for other in needed]

    def _main(self, rank, body):
        self._go[rank].acquire()
        try:
            if self._stop is not None:
                raise type(self._stop)
            self._results[rank] = body(_LockstepControl(self, rank, len(self._ranks)))
        except BaseException as error:
            self._results[rank] = error
            self._dead.add(rank)
            if isinstance(error, PowerCut):
                self._stop = error
        self._pass_on()

    def _switch(self, rank):
        self._pass_on()
        self._go[rank].acquire()
        if self._stop is not None:
            self._waits.pop(rank, None)
            raise type(self._stop)

    def _pass_on(self):
        """Choose who runs next and let it run."""
        alive = [rank for rank in self._ranks if rank not in self._results]
        able = [rank for rank in alive if self._able(rank)]
        if alive and not able:
            waits = {rank: f"in call {self._waits[rank][0]}" for rank in alive}
            self._mistake = self._mistake or f"a hang: waiting {waits}, the others have returned"
            self._stop, able = _Stopped(), alive
        if able:
            self._current = self._rng.choice(able) if self._rng is not None else able[0]
            self._go[self._current].release()
        else:
            self._over.set()

    def _able(self, rank):
        if self._stop is not None or rank not in self._waits:
            return True
        call, needed = self._waits[rank]
        missing = {other for other in needed if other not in self._calls[call]}
        return not missing or bool(missing & self._dead)


@dataclass
class _LockstepControl:
    _lockstep: Lockstep
    rank: int
    num_ranks: int

    @property
    def members(self):
        return range(self.num_ranks)

    def exchange(self, row, about=""):
        return self._lockstep.meet(self.rank, "exchange", bytes(row))

    def exchange_after(self, work, row_bytes):
        return self.exchange(work())

    def broadcast(self, data, source=0):
        return self._lockstep.meet(self.rank, f"broadcast {source}", bytes(data))[0]
