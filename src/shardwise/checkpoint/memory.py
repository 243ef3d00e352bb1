"""Copies of a run's state in the shared memory of its hosts, from which a restart takes seconds.

Note [Copies in memory]
~~~~~~~~~~~~~~~~~~~~~~~
A copy is a checkpoint in the format of those on disk, in a folder of a file system in memory, which
outlives the processes that write it. Each host holds the files of its ranks, and with
``copies`` those of ranks of as many other hosts; every host has the manifest. The thread of
background saves writes it:

1. One rank of each host removes all copies but the newest, and makes a folder.
2. Every rank writes its files there. Ranks read those of other hosts that theirs is to hold.
3. One rank of each host writes the manifest and gives the folder its name. A copy counts if the
   hosts together hold the files of every rank.

So there are at most two copies, and while one is written the other is whole. A copy never counts as
saved: it is gone when the host restarts, and when the run ends.

Note [Which copies are of this run]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The folder in memory has a name made of the path of the checkpoints on disk. That folder's lock file
says which copies count (`folder.CopiesThatCount`); every save, load and copy writes it. Copies of
another run, of a timeline that the run has left, or beside checkpoints that were moved away
are never loaded; the next copy removes them.

Note [Files of other hosts]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
One rank of each host runs a `_Server` for its folder. `PeerFiles` opens the files of some ranks
here and of others on a host that has them. A connection begins with a token that the ranks have
exchanged. As in gloo's own connections, nothing is encrypted.
"""

import hmac
import json
import os
import re
import socket
import socketserver
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from struct import Struct

import torch.distributed as dist

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.assemble import assemble
from shardwise.checkpoint.container import digest_of
from shardwise.checkpoint.files import Files, Lock, Reader
from shardwise.checkpoint.folder import (
    LOCK,
    Chosen,
    CopiesThatCount,
    remove_tree,
    step_name,
    steps_in,
    temporary,
)
from shardwise.checkpoint.manifest import MANIFEST, IndexRow, is_ours, parse_manifest, seal
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.state import Table
from shardwise.checkpoint.verify import difference_of_rank, names_of_rank
from shardwise.checkpoint.write import NONCE_BYTES, Written, write_ranks, write_small
from shardwise.comm.control import Control, exchange_any
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.homes import COPIES_IN_MEMORY
from shardwise.host import TcpServer, is_loopback, own_address
from shardwise.processes import boot_id

ROOT = Path("/dev/shm")
_Copy = tuple[int, str, int]  # its step, the digest of its manifest, the number of its ranks
_COPY = re.compile(r"step-[0-9]{8,12}|\.tmp-step-[0-9]{8,12}-[0-9a-f]{8}")
_TOKEN_BYTES = 16
_SIZE = Struct("<q")  # of the file, or -1 if it cannot be read; the bytes asked for follow
_MAX_LINE = 1024
_AT_ONCE_BYTES = 16 << 20
_TIMEOUT_S = 30.0  # a host that is silent for so long is gone
_RANK = re.compile(r"rank([0-9]+)[.-]")


def folder_in_memory(folder: Path, root: Path) -> Path:
    """Return where the copies of a run lie that keeps its checkpoints in ``folder``."""
    return root / f"shardwise-{os.getuid()}" / digest_of(os.fsencode(folder))


class MemoryTier:
    """The copies of one run on all hosts. See Note [Copies in memory].

    ``root`` is a folder in memory that outlives the processes. ``counts`` says which copies may be
    loaded, as rank 0 has it. All ranks make it together, with the same settings, and call its
    methods together.

    **Raises** CheckpointError on all ranks if the folder is another job's or another user's.
    """

    def __init__(
        self, folder: Path, control: Control, root: Path, copies: int, counts: CopiesThatCount
    ) -> None:
        self._files, self._control, self.counts = Files(), control, counts
        self.folder = folder_in_memory(folder, root)
        self.newest: int | None = None  # the step of the newest whole copy
        self._lock: Lock | None = None
        self._server: _Server | None = None
        self._token = b""
        self._addresses: dict[int, tuple[str, int]] = {}  # by the rank that leads a host
        said = exchange_any(control, on_all_ranks(control, self._make_folder))
        hosts = list(dict.fromkeys(said))
        self._hosts = [[r for r, each in enumerate(said) if each == host] for host in hosts]
        self._host = hosts.index(said[control.rank])
        self._copies = min(copies, len(hosts) - 1)
        self._leads = self._hosts[self._host][0] == control.rank
        try:
            on_all_ranks(control, self._take_lock)
            if len(hosts) > 1:
                self._listen()
        except BaseException:
            self.close(clears=False)
            raise

    def _make_folder(self) -> bytes:
        """Make the folder, which no other user may read; name this rank's host by it.

        Ranks whose processes share the file system are on one host.
        """
        self._files.make_folders(self.folder.parent.parent)
        for path in (self.folder.parent, self.folder):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if not is_ours or stat.S_IMODE(found.st_mode) & 0o077:
                raise CheckpointError(
                    f"{path} is no folder that only this user may read and write; remove it, or "
                    "pass memory_folder="
                )
        name = socket.gethostname()
        with suppress(OSError):
            name = boot_id()
        return f"{name} {found.st_dev} {found.st_ino}".encode()

    def _take_lock(self) -> None:
        """Hold the folder for this job: another one may use the same path of checkpoints."""
        if self._leads:
            self._lock = self._files.lock(self.folder / LOCK)
            if self._lock is None:
                raise CheckpointError(
                    f"{self.folder}: another job of this user keeps its copies there, with "
                    "checkpoints under the same path; pass another memory_folder="
                )

    def _listen(self) -> None:
        """Start a server on each host; exchange the addresses."""
        self._token = self._control.broadcast(os.urandom(_TOKEN_BYTES))
        store = getattr(dist.distributed_c10d._get_default_store(), "underlying_store", None)
        address = own_address(getattr(store, "host", None))
        others = [row.decode() for row in exchange_any(self._control, address.encode())]
        seen = [each for each in others if not is_loopback(each)]
        if is_loopback(address) and seen:
            address = own_address(seen[0])  # the store's host knows itself by another name

        def start() -> bytes:
            if not self._leads:
                return b"[]"
            if is_loopback(address) and seen:
                raise CheckpointError(
                    f"copies in memory: {socket.gethostname()} finds no address under which other "
                    f"hosts ({seen[0]}) reach it; check its network, or pass copies=0"
                )
            self._server = _Server(self.folder, address, self._token)
            return json.dumps(self._server.address).encode()

        rows = exchange_any(self._control, on_all_ranks(self._control, start))
        for rank, found in enumerate(map(json.loads, rows)):
            if found:
                self._addresses[rank] = tuple(found)

    def check_room(self, num_bytes: int) -> None:
        """Check that the host has memory for two copies of ``num_bytes`` of this rank.

        **Raises** CheckpointError with the sizes and the remedy.
        """
        held, others = self._num_bytes(self.folder), self._num_bytes(self.folder.parent)
        wanted = num_bytes * len(self._hosts[self._host]) * (1 + self._copies) * COPIES_IN_MEMORY
        free = self._files.free_bytes(self.folder)
        if wanted > free + held:
            raise CheckpointError(
                f"{self.folder}: two copies of this host's state want {wanted} bytes of memory, "
                f"and {free + held} are free; copies of other jobs have {others - held}. Remove "
                f"{self.folder.parent}/* of jobs that are gone, give that file system more room "
                "(in a container, --shm-size), or leave out memory_every="
            )

    def _num_bytes(self, folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    def write(self, table: Table, step: int, run: str) -> Written:
        """Write a copy, on all hosts; return its size. See Note [Copies in memory].

        **Cost** this rank's bytes once, hashed, and again for each of ``copies``, over TCP; a
        broadcast, and five exchanges of at most 42 bytes.

        **Raises** CheckpointError, the same on all ranks.
        """
        control, files = self._control, self._files
        target = self.folder / step_name(step)
        folder = temporary(target, control.broadcast(os.urandom(NONCE_BYTES)))

        def begin() -> None:
            self._make_folder()  # it may have been removed
            self._remove_all_but(self.newest)
            if self._leads:
                files.make_folder(folder)

        def give_name() -> None:
            if self._leads:
                write_small(files, folder / MANIFEST, seal(whole))
                files.rename(folder, target)

        manifest, part = assemble(control, table, run, step)
        on_all_ranks(control, begin)
        # Every host seals it alone, so all have the same bytes: without the time.
        manifest = manifest.model_copy(update={"saved_at": ""})
        whole = write_ranks(files, control, folder, manifest, part)
        if self._copies:
            on_all_ranks(control, lambda: self._copy_from_hosts(folder, whole.ranks))
        on_all_ranks(control, give_name)
        self.newest = step
        return Written.of(target, whole, control.rank)

    def _copy_from_hosts(self, folder: Path, rows: tuple[IndexRow, ...]) -> None:
        """Copy this rank's share of the files of the hosts before this one."""
        here, num_hosts = self._hosts[self._host], len(self._hosts)
        before = [
            self._hosts[(self._host - distance) % num_hosts]
            for distance in range(1, self._copies + 1)
        ]
        pairs = [(ranks[0], rank) for ranks in before for rank in ranks]
        for leader, rank in pairs[here.index(self._control.rank) :: len(here)]:
            for name in names_of_rank(rank, rows[rank]):
                path = folder / name
                with (
                    _PeerReader(path, self._addresses[leader], self._token) as reader,
                    self._files.create(path) as writer,
                ):
                    for begin in range(0, reader.size, _AT_ONCE_BYTES):
                        data = reader.read(begin, min(_AT_ONCE_BYTES, reader.size - begin))
                        writer.write([memoryview(data)])

    def find(self) -> list[Chosen]:
        """Return the copies of the run that the hosts hold whole, the newest first.

        **Cost** two exchanges of some bytes for each saved rank; a broadcast of each manifest.
        """
        said = json.loads(self._control.broadcast(json.dumps(self.counts).encode()))
        counts = CopiesThatCount(*said)
        mine = on_all_ranks(self._control, lambda: self._held(counts))
        row = json.dumps([[*copy, ranks] for copy, (_, ranks) in mine.items()]).encode()
        rows = [json.loads(each) for each in exchange_any(self._control, row)]
        holders: dict[_Copy, dict[int, int]] = {}  # by saved rank: who leads a host with its files
        here = self._hosts[self._host][0]
        for leader in sorted(range(len(rows)), key=lambda rank: rank != here):
            for step, digest, num_ranks, ranks in rows[leader]:
                held = holders.setdefault((step, digest, num_ranks), {})
                held.update(dict.fromkeys(set(ranks) - held.keys(), leader))
        found = []
        for copy in sorted(holders, reverse=True):
            (step, _, num_ranks), held = copy, holders[copy]
            if len(held) == num_ranks:
                source = next(r for r, row in enumerate(rows) if [*copy] in [c[:3] for c in row])
                data = self._control.broadcast(mine.get(copy, (b"", ()))[0], source)
                path = self.folder / step_name(step)
                manifest = parse_manifest(data, str(path / MANIFEST))
                away = {r: self._addresses[by] for r, by in held.items() if by != here}
                files = PeerFiles(away, self._token)
                found.append(Chosen(path, step, manifest, data, files))
        return found

    def _held(self, counts: CopiesThatCount) -> dict[_Copy, tuple[bytes, list[int]]]:
        """Return this host's copies that count: the manifest, and whose files are here."""
        found = {}
        for step in steps_in(self._files, self.folder) if self._leads else ():
            path = self.folder / step_name(step)
            with suppress(CheckpointError, OSError):
                data = read_small(self._files, path / MANIFEST)
                manifest = parse_manifest(data, str(path / MANIFEST))
                entries = {entry.name: entry for entry in self._files.list(path)}
                ranks = [
                    rank
                    for rank, row in enumerate(manifest.ranks)
                    if not difference_of_rank(path, entries, rank, row)
                ]
                if (manifest.run, manifest.step) == (counts.run, step) and step <= counts.step:
                    found[step, digest_of(data), manifest.num_ranks] = data, ranks
        return found

    def keep_only(self, step: int | None) -> None:
        """Remove all copies but that of ``step``; None: all."""
        self.newest = step
        on_all_ranks(self._control, lambda: self._remove_all_but(step))

    def close(self, clears: bool) -> None:
        """Stop serving other hosts; ``clears`` removes the copies of this host."""
        if self._server is not None:
            self._server.close()
            self._server = None
        try:
            if clears and self._leads:
                self._remove_all_but(None)
                self._files.remove_file(self.folder / LOCK)
                self._files.remove_folder(self.folder)
        except FileNotFoundError:  # it is gone already
            pass
        except OSError as error:
            warnings.warn(f"{self.folder}: copies stay in memory: {error}", stacklevel=2)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _remove_all_but(self, step: int | None) -> None:
        with suppress(FileNotFoundError):
            for entry in self._files.list(self.folder) if self._leads else ():
                is_newest = step is not None and entry.name == step_name(step)
                if _COPY.fullmatch(entry.name) and not is_newest:
                    remove_tree(self._files, self.folder / entry.name)


# -- files of other hosts


class _Server(TcpServer):
    """Sends bytes of the copies in one folder to ranks of other hosts, from a thread."""

    def __init__(self, folder: Path, host: str, token: bytes) -> None:
        self.folder, self.token = folder, token
        super().__init__(host, _Handler, "shardwise-peers")


class _Handler(socketserver.StreamRequestHandler):
    """Answers the questions of one rank, each a line of JSON."""

    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        with suppress(OSError, ValueError, TypeError):  # the connection ends, the asker raises
            if not hmac.compare_digest(self.rfile.read(_TOKEN_BYTES), self.server.token):
                return
            self.connection.settimeout(None)  # a load may read other files meanwhile
            while line := self.rfile.readline(_MAX_LINE):
                self._answer(*json.loads(line))

    def _answer(self, step: str, name: str, offset: int, num_bytes: int) -> None:
        is_copy = _COPY.fullmatch(step) is not None
        if not (is_copy and is_ours(name) and 0 <= num_bytes <= _AT_ONCE_BYTES):
            raise ValueError("no file of a checkpoint")
        try:
            with Files().open(self.server.folder / step / name) as reader:
                data, size = reader.read(offset, num_bytes), reader.size
        except (OSError, DamagedCheckpoint):
            data, size = b"", -1
        self.wfile.write(_SIZE.pack(size) + data)


class _PeerReader(Reader):
    """A file on another host. **Raises** DamagedCheckpoint if the host does not answer."""

    def __init__(self, path: Path, address: tuple[str, int], token: bytes) -> None:
        super().__init__(path, -1, 0)
        self._address = address
        try:
            with socket.create_connection(address, _TIMEOUT_S) as connection:
                self._stream = connection.makefile("rwb")  # holds the connection
            self._stream.write(token)
            self.size = self._ask(0, memoryview(bytearray()))
        except OSError as error:
            raise self._unanswered(error) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from ``offset``."""
        rest = buffer.cast("B") if buffer.nbytes else buffer
        try:
            while rest.nbytes:
                part, rest = rest[:_AT_ONCE_BYTES], rest[_AT_ONCE_BYTES:]
                self._ask(offset, part)
                offset += len(part)
        except OSError as error:
            raise self._unanswered(error) from error

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):  # of bytes that could not be sent
            self._stream.close()

    def _ask(self, offset: int, out: memoryview) -> int:
        """Fill ``out``; return the size of the file."""
        asked = json.dumps([self._path.parent.name, self._path.name, offset, len(out)])
        self._stream.write(asked.encode() + b"\n")
        self._stream.flush()
        head = self._stream.read(_SIZE.size)
        if len(head) == _SIZE.size and _SIZE.unpack(head)[0] < 0:
            raise FileNotFoundError(0, "it has no such file any more")
        if len(head) < _SIZE.size or self._stream.readinto(out) < len(out):
            raise ConnectionError(0, "it has ended the connection")
        return int(_SIZE.unpack(head)[0])

    def _unanswered(self, error: OSError) -> DamagedCheckpoint:
        return DamagedCheckpoint(
            f"{self._path}: it was to be read from the memory of {self._address[0]}: "
            f"{error.strerror or error}"
        )


class PeerFiles(Files):
    """The files of checkpoints that lie in the memory of several hosts.

    ``address_of`` has the server of a host for each saved rank whose files are not here.
    """

    def __init__(self, address_of: Mapping[int, tuple[str, int]], token: bytes) -> None:
        self._address_of, self._token = address_of, token

    def open(self, path: Path) -> Reader:
        """Open a file here, or on the host that has it."""
        found = _RANK.match(path.name)
        address = None if found is None else self._address_of.get(int(found[1]))
        return super().open(path) if address is None else _PeerReader(path, address, self._token)
