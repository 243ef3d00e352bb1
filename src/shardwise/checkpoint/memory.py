"""Copies of a run's state in the shared memory of its hosts, from which a restart takes seconds.

Note [Copies in memory]
~~~~~~~~~~~~~~~~~~~~~~~
A copy is a checkpoint in the format of those on disk, in a folder of a file system in memory, which
outlives the processes that write it. Each host holds the files of its own ranks, and with
``copies`` those of ranks of as many other hosts; every host has the manifest. The thread of
background saves writes it:

1. One rank of each host removes all copies but the newest, and makes a folder.
2. Every rank writes its files there. The ranks exchange their rows of the manifest.
3. Ranks read the files of other hosts that theirs is to hold, over TCP (`peers`).
4. One rank of each host writes the manifest and gives the folder its name, on all hosts or none
   that counts: a copy counts if the hosts together hold the files of every rank.

So there are at most two copies, one of them whole. A copy never counts as saved: it is gone when
the host restarts, and when the run ends.

Note [Which copies are of this run]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The folder in memory has a name made of the path of the checkpoints on disk, and that folder's lock
file names the run whose copies count. Copies of another run, or of checkpoints that somebody has
removed or moved away, are never loaded; the next copy removes them.
"""

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from shardwise.checkpoint.all_ranks import on_all_ranks, rows_of_all_ranks
from shardwise.checkpoint.assemble import assemble
from shardwise.checkpoint.container import digest_of
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import (
    Chosen,
    difference_of_rank,
    names_of_rank,
    step_name,
    steps_in,
)
from shardwise.checkpoint.manifest import MANIFEST, IndexRow, parse_manifest, seal
from shardwise.checkpoint.peers import (
    PENDING,
    TOKEN_BYTES,
    PeerFiles,
    PeerReader,
    Server,
    own_address,
)
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.state import Table
from shardwise.checkpoint.trash import remove_tree
from shardwise.checkpoint.write import ROW_BYTES, Written, index_row, write_rank, write_small
from shardwise.comm.control import Control, exchange_any
from shardwise.errors import CheckpointError

ROOT = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_READ_BYTES = 16 << 20  # at once
_NUM_COPIES = 2  # at most, of one step each


def memory_of(folder: Path, root: Path) -> Path:
    """Return where the copies of a run lie that keeps its checkpoints in ``folder``."""
    return root / f"shardwise-{os.getuid()}" / digest_of(os.fsencode(folder))


class _Copy(NamedTuple):
    """A copy, as the ranks name it to each other: the newest is the greatest."""

    step: int
    digest: str
    num_ranks: int


class MemoryTier:
    """The copies of one run on all hosts. See Note [Copies in memory].

    ``root`` is a folder in memory that outlives the processes. ``run`` is the run whose copies may
    be loaded, as rank 0 has it. All ranks make it together, with the same settings, and call its
    methods together.
    """

    def __init__(self, folder: Path, control: Control, root: Path, copies: int, run: str) -> None:
        self._files, self._control, self._run = Files(), control, run
        self.folder = memory_of(folder, root)
        on_all_ranks(control, lambda: self._files.make_folders(self.folder))
        said = exchange_any(control, self._host_name())
        hosts = list(dict.fromkeys(said))
        self._hosts = [[r for r, each in enumerate(said) if each == host] for host in hosts]
        self._host = hosts.index(said[control.rank])
        self._copies = min(copies, len(hosts) - 1)
        self._leads = self._hosts[self._host][0] == control.rank
        self.newest: int | None = None  # the step of the newest whole copy
        self._server: Server | None = None
        self._token = b""
        self._addresses: dict[int, tuple[str, int]] = {}  # by the rank that leads a host
        if len(hosts) > 1:
            self._listen()

    def _host_name(self) -> bytes:
        """Name this rank's host by the file system in memory that its ranks share."""
        place = os.stat(self.folder)
        boot = _BOOT.read_text().strip() if _BOOT.exists() else socket.gethostname()
        return f"{boot} {place.st_dev} {place.st_ino}".encode()

    def _listen(self) -> None:
        """Start a server on each host; exchange the addresses."""
        self._token = self._control.broadcast(os.urandom(TOKEN_BYTES))
        store = getattr(dist.distributed_c10d._get_default_store(), "underlying_store", None)
        if self._leads:
            address = own_address(getattr(store, "host", None))
            self._server = Server(self.folder, address, self._token)
        own = [] if self._server is None else list(self._server.address)
        rows = exchange_any(self._control, json.dumps(own).encode())
        for rank, found in enumerate(map(json.loads, rows)):
            if found:
                self._addresses[rank] = tuple(found)

    def check_room(self, num_bytes: int) -> None:
        """Check that the host has memory for two copies of ``num_bytes`` of this rank.

        **Raises** CheckpointError with the sizes and the remedy.
        """
        folders = [self.folder / entry.name for entry in self._files.list(self.folder)]
        held = sum(entry.size for folder in folders for entry in self._files.list(folder))
        wanted = num_bytes * len(self._hosts[self._host]) * (1 + self._copies) * _NUM_COPIES
        free = self._files.free_bytes(self.folder)
        if wanted > free + held:
            raise CheckpointError(
                f"{self.folder}: the ranks of this host want {wanted} bytes for two copies of the "
                f"state in memory, and {free + held} are free. Give that file system more room (in "
                "a container, --shm-size), or leave out memory_every="
            )

    def write(self, table: Table, step: int, run: str) -> Written:
        """Write a copy, on all hosts; return its size. See Note [Copies in memory].

        **Cost** this rank's bytes once, hashed, and again for each of ``copies``, over TCP; five
        exchanges of at most 34 bytes. **Raises** CheckpointError, the same on all ranks.
        """
        control, files, folder = self._control, self._files, self.folder / PENDING

        def begin() -> None:
            self._remove_all_but(self.newest)
            if self._leads:
                files.make_folder(folder)

        def give_name() -> None:
            if self._leads:
                write_small(files, folder / MANIFEST, seal(whole))
                files.rename(folder, self.folder / step_name(step))

        manifest, part = assemble(control, table, run, step)
        on_all_ranks(control, begin)
        rows = rows_of_all_ranks(
            control, lambda: write_rank(files, folder, manifest, part), ROW_BYTES
        )
        ranks = tuple(map(index_row, rows))
        # Every host seals it alone, so all have the same bytes: without the time.
        whole = manifest.model_copy(update={"ranks": ranks, "saved_at": ""})
        if self._copies:
            on_all_ranks(control, lambda: self._copy_from_hosts(ranks))
        on_all_ranks(control, give_name)
        self.newest, self._run = step, run
        sizes = [row.index_bytes + row.file_bytes for row in ranks]
        return Written(self.folder / step_name(step), sum(sizes), sizes[control.rank])

    def _copy_from_hosts(self, rows: tuple[IndexRow, ...]) -> None:
        """Copy this rank's share of the files of the hosts before this one."""
        here, num_hosts = self._hosts[self._host], len(self._hosts)
        before = [
            self._hosts[(self._host - distance) % num_hosts]
            for distance in range(1, self._copies + 1)
        ]
        pairs = [(ranks[0], rank) for ranks in before for rank in ranks]
        for leader, rank in pairs[here.index(self._control.rank) :: len(here)]:
            for name in names_of_rank(rank, rows[rank]):
                path = self.folder / PENDING / name
                with (
                    PeerReader(path, self._addresses[leader], self._token) as reader,
                    self._files.create(path) as writer,
                ):
                    for begin in range(0, reader.size, _READ_BYTES):
                        data = reader.read(begin, min(_READ_BYTES, reader.size - begin))
                        writer.write([memoryview(data)])

    def find(self) -> list[Chosen]:
        """Return the copies of the run that the hosts hold whole, the newest first.

        **Cost** two exchanges of some bytes for each saved rank; a broadcast of each manifest.
        """
        run = self._control.broadcast(self._run.encode()).decode()
        mine = self._held(run) if self._leads else {}
        said = json.dumps([[*copy, ranks] for copy, (_, ranks) in mine.items()]).encode()
        holders: dict[
            _Copy, dict[int, int]
        ] = {}  # the rank that leads a host with each rank's files
        for leader, row in enumerate(exchange_any(self._control, said)):
            for *copy, ranks in json.loads(row):
                held = holders.setdefault(_Copy(*copy), {})
                held.update(dict.fromkeys(set(ranks) - held.keys(), leader))
        found = []
        for copy in sorted(holders, reverse=True):
            held = holders[copy]
            if len(held) == copy.num_ranks:
                data, _ = mine.get(copy, (b"", ()))
                data = self._control.broadcast(data, held[0])
                path = self.folder / step_name(copy.step)
                manifest = parse_manifest(data, str(path / MANIFEST))
                found.append(Chosen(path, copy.step, manifest, data, self._files_of(held)))
        return found

    def _held(self, run: str) -> "dict[_Copy, tuple[bytes, list[int]]]":
        """Return this host's copies of a run: the manifest, and whose files are here."""
        found = {}
        for step in steps_in(self._files, self.folder):
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
                if (manifest.run, manifest.step) == (run, step):
                    copy = _Copy(step, digest_of(data), manifest.num_ranks)
                    found[copy] = data, ranks
        return found

    def _files_of(self, leaders: dict[int, int]) -> Files:
        """Return the files of a copy; ``leaders`` lead the hosts with each saved rank's files."""

        def address_of(rank: int) -> tuple[str, int] | None:
            return self._addresses.get(leaders.get(rank, -1))

        return PeerFiles(address_of, self._token)

    def keep_only(self, step: int | None, run: str) -> None:
        """Remove all copies but that of ``step``: of a run that goes on from elsewhere, all."""
        self.newest, self._run = step, run
        on_all_ranks(self._control, lambda: self._remove_all_but(step))

    def close(self, clears: bool) -> None:
        """Stop serving other hosts; ``clears`` removes the copies of this host."""
        if self._server is not None:
            self._server.close()
            self._server = None
        if clears and self._leads:
            self._remove_all_but(None)
            self._files.remove_folder(self.folder)

    def _remove_all_but(self, step: int | None) -> None:
        for entry in self._files.list(self.folder) if self._leads else ():
            if step is None or entry.name != step_name(step):
                remove_tree(self._files, self.folder / entry.name)
