"""Copies of a run's state in the shared memory of its hosts, from which a restart takes seconds.

Note [Copies in memory]
~~~~~~~~~~~~~~~~~~~~~~~
A copy is a checkpoint in the format of those on disk, in a folder of a file system in memory, which
outlives the processes that write it. Each host holds the files of its ranks, and with
``copies`` those of ranks of as many other hosts; every host has the manifest. The thread of
background saves writes it:

1. One rank of each host renames the older of two copies to a temporary folder, or makes one.
2. Every rank writes its files there, over those of the older copy: a file system in memory takes
   three times as long to free pages and find others. Ranks read those of other hosts that theirs
   is to hold.
3. Rank 0 notes in the lock file of the checkpoints on disk that the copy counts. One rank of each
   host writes the manifest and gives the folder its name. A copy counts if the hosts together hold
   the files of every rank.

So there are at most two copies, and while one is written the other is whole. A copy never counts as
saved: it is gone when the host restarts, and when the run ends.

Note [Which copy a restart takes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The newest that is whole. A run that ends while it writes a copy leaves the one before it, so a
restart may be two periods behind the last step. Rank 0 warns of each newer state that was not
taken, with the reason (`Refused`).

Note [Which copies are of this run]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The folder in memory has a name made of the path of the checkpoints on disk. That folder's lock file
says which copies count, by the digests of their manifests (`folder.CopiesThatCount`); every save,
load and copy writes it. Copies of another run, of a timeline that the run has left, or beside
checkpoints that were moved are never loaded; the next copy removes them.

Note [Folders of runs that are gone]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The folder's lock file lists the processes of the run on this host, and the launcher that may start
them again. The next run of this user on the host removes a folder if its lock is free, all these
processes are gone, and nothing else is in it. A folder whose processes cannot be seen from here (of
another container) stays.
"""

import fcntl
import json
import os
import re
import socket
import stat
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from shardwise.checkpoint.all_ranks import explain, on_all_ranks
from shardwise.checkpoint.assemble import Assembled, assemble
from shardwise.checkpoint.container import digest_of
from shardwise.checkpoint.files import Entry, Files, Lock, reading
from shardwise.checkpoint.folder import (
    LOCK,
    Chosen,
    CopiesThatCount,
    Refused,
    lock_text,
    remove_checkpoint,
    set_aside,
    step_name,
    take,
    temporary,
)
from shardwise.checkpoint.manifest import MANIFEST, IndexRow, is_ours, parse_manifest, seal
from shardwise.checkpoint.peers import (
    AT_ONCE_BYTES,
    COPY,
    RANK,
    TOKEN_BYTES,
    PeerFiles,
    PeerReader,
    PeerServer,
)
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.state import Table
from shardwise.checkpoint.verify import difference_of_rank, names_of_rank
from shardwise.checkpoint.write import NONCE_BYTES, Written, write_ranks, write_small
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import Control, exchange_any
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.homes import COPIES_IN_MEMORY
from shardwise.host import is_loopback, own_address
from shardwise.processes import Process, boot_id, fate, launcher_process, own_process

ROOT = Path("/dev/shm")
_Copy = tuple[int, str, int]  # its step, the digest of its manifest, the number of its ranks
_RUN_FOLDER = re.compile(r"[0-9a-f]{32}|\.old-[0-9a-f]{32}-[0-9a-f]{8}")


def folder_in_memory(folder: Path, root: Path) -> Path:
    """Return where the copies of a run lie that keeps its checkpoints in ``folder``."""
    return root / f"shardwise-{os.getuid()}" / digest_of(os.fsencode(folder))


class MemoryTier:
    """The copies of one run on all hosts. See Note [Copies in memory].

    ``root`` is a folder in memory that outlives the processes. ``counts`` says which copies may be
    loaded, as rank 0 has it; ``refused`` is the reason if none of them may. All ranks make it
    together, with the same settings, and call its methods together.

    ``news`` are warnings for the user, on one rank of each host.

    **Raises** CheckpointError on all ranks if the folder is another job's or another user's.
    """

    def __init__(
        self,
        folder: Path,
        control: Control,
        root: Path,
        copies: int,
        counts: CopiesThatCount,
        refused: str = "",
    ) -> None:
        self._files, self._control = Files(), control
        self.counts, self._why_none = counts, refused
        self._on_disk, self.folder = folder, folder_in_memory(folder, root)
        self.newest: int | None = None  # the step of the newest whole copy
        self.whole: tuple[tuple[int, str], ...] = ()  # the copies that count, on rank 0
        self.news: list[str] = []
        self._assembled = Assembled()
        self._reported: set[str] = set()
        self._lock: Lock | None = None
        self._server: PeerServer | None = None
        self._addresses: dict[int, tuple[str, int]] = {}  # by the rank that leads a host
        packed = exchange_any(control, on_all_ranks(control, self._describe_host))
        rows = [json.loads(row) for row in packed]
        hosts = list(dict.fromkeys(host for host, _ in rows))
        self._hosts = [[r for r, (each, _) in enumerate(rows) if each == host] for host in hosts]
        self._host = hosts.index(rows[control.rank][0])
        self._processes = [each for rank in self._hosts[self._host] for each in rows[rank][1]]
        self._copies = min(copies, len(hosts) - 1)
        self._leads = self._hosts[self._host][0] == control.rank
        token = control.broadcast(os.urandom(TOKEN_BYTES + NONCE_BYTES))
        self._token, self._nonce = token[:TOKEN_BYTES], token[TOKEN_BYTES:]
        try:
            on_all_ranks(control, self._take_lock)
            if len(hosts) > 1:
                self._listen()
        except BaseException:
            self.close(clears=False)
            raise

    def _describe_host(self) -> bytes:
        """Return the name of this rank's host, and the processes that its copies are for.

        Ranks whose processes share the file system are on one host.
        """
        found = self._make_folder()
        name = socket.gethostname()
        with suppress(OSError):
            name = boot_id()
        processes = [own_process(), launcher_process()]
        shown = [asdict(each) for each in processes if each is not None]
        return json.dumps([f"{name} {found.st_dev} {found.st_ino}", shown]).encode()

    def _make_folder(self) -> os.stat_result:
        """Make the folder, which no other user may read; return its status."""
        self._files.make_folders(self.folder.parent.parent)
        self._make_private(self.folder.parent)
        parent = os.open(self.folder.parent, os.O_RDONLY)
        try:
            fcntl.flock(parent, fcntl.LOCK_EX)  # by one rank of the host after the other
            return self._make_private(self.folder)
        finally:
            os.close(parent)

    def _make_private(self, path: Path) -> os.stat_result:
        """Make one folder, after moving anything else from the place of the copies' folder."""
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        is_folder, is_own = stat.S_ISDIR(found.st_mode), found.st_uid == os.getuid()
        if path == self.folder and is_own and not is_folder:  # inside our own folder
            self._keep_aside(path)
            return self._make_private(path)
        if path == self.folder and is_own and stat.S_IMODE(found.st_mode) != 0o700:
            os.chmod(path, 0o700)
        elif not is_folder or not is_own or stat.S_IMODE(found.st_mode) & 0o077:
            raise CheckpointError(
                f"{path} is no folder that only this user may read and write; remove it, or pass "
                "memory_folder="
            )
        return found

    def _take_lock(self) -> None:
        """Hold the folder for this job: another one may use the same path of checkpoints."""
        if not self._leads:
            return
        try:
            self._lock = take(self._files, self.folder / LOCK)
        except (DamagedCheckpoint, FileNotFoundError) as error:
            # No file, or another run has just removed the folder, whose processes were gone.
            if isinstance(error, DamagedCheckpoint):
                self._keep_aside(self.folder / LOCK)
            self._make_folder()
            self._lock = take(self._files, self.folder / LOCK)
        if self._lock is None:
            raise CheckpointError(
                f"{self.folder}: another job of this user keeps its copies there, with "
                "checkpoints under the same path; pass another memory_folder="
            )
        content = {"checkpoints": str(self._on_disk), "processes": self._processes}
        self._lock.write(json.dumps(content) + "\n")
        remove_dead_runs(self._files, self.folder, self.news)

    def _listen(self) -> None:
        """Start a server on each host; exchange the addresses."""
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
            self._server = PeerServer(self.folder, address, self._token)
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
        files = (path for path in folder.rglob("*") if path.is_file() and path.name != LOCK)
        return sum(path.stat().st_size for path in files)

    def write(
        self, table: Table, step: int, run: str, note: Callable[[tuple[int, str]], None]
    ) -> Written:
        """Write a copy, on all hosts; return its size. See Note [Copies in memory].

        ``note`` records its step and digest, before it gets its name.

        **Cost** this rank's bytes once, hashed, and again for each of ``copies``, over TCP; four
        exchanges of at most 42 bytes.

        **Raises** CheckpointError, the same on all ranks.
        """
        control, files = self._control, self._files
        target = self.folder / step_name(step)
        folder = temporary(target, self._nonce)
        made: list[tuple[int, str]] = []

        def give_name() -> None:
            data = seal(whole)
            made.append((step, digest_of(data)))
            note(made[0])
            if self._leads:
                write_small(files, folder / MANIFEST, data, rewrites=True)
                files.rename(folder, target)

        before = partial(self._prepare, folder)
        manifest, part = assemble(control, table, run, step, before, self._assembled)
        # Every host seals it alone, so all have the same bytes: without the time.
        manifest = manifest.model_copy(update={"saved_at": ""})
        whole = write_ranks(files, control, folder, manifest, part, rewrites=True)
        if self._copies:
            on_all_ranks(control, lambda: self._copy_from_hosts(folder, whole.ranks))
        on_all_ranks(control, give_name)
        self.newest, self._why_none = step, ""
        self.whole = (*self.whole[-1:], *made)
        return Written.of(target, whole, control.rank)

    def _prepare(self, folder: Path) -> None:
        """Make the folder of the next copy, of the older copy's files if there are two."""
        self._make_folder()  # it may have been removed
        if not self._leads:
            return
        is_made = False
        for entry in self._entries_but(self.newest):
            path = self.folder / entry.name
            if not is_made and entry.kind == "folder" and self._is_plain(path):
                if path != folder:
                    self._files.rename(path, folder)
                is_made = True
            else:
                self._remove(path, entry)
        if not is_made:
            self._files.make_folder(folder)
            return
        held = [self._hosts[self._host - distance] for distance in range(self._copies + 1)]
        ranks = {rank for on_host in held for rank in on_host}
        for entry in self._files.list(folder):
            found = RANK.match(entry.name)
            if found is None or int(found[1]) not in ranks:  # of another number of ranks or hosts
                self._files.remove_file(folder / entry.name)

    def _is_plain(self, path: Path) -> bool:
        """Tell whether a folder holds files of a checkpoint alone."""
        with suppress(OSError):
            return all(e.kind == "file" and is_ours(e.name) for e in self._files.list(path))
        return False

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
                    PeerReader(path, self._addresses[leader], self._token) as reader,
                    self._files.rewrite(path, reader.size) as writer,
                ):
                    for begin in range(0, reader.size, AT_ONCE_BYTES):
                        data = reader.read(begin, min(AT_ONCE_BYTES, reader.size - begin))
                        writer.write([memoryview(data)])

    def find(self) -> tuple[list[Chosen], list[Refused]]:
        """Return the copies that the hosts hold whole, the newest first, and the others.

        **Cost** two exchanges of some bytes for each saved rank; a broadcast of each manifest.
        """
        received = json.loads(
            self._control.broadcast(json.dumps([self.counts, self._why_none]).encode())
        )
        counts, why_none = CopiesThatCount(*received[0]), received[1]
        counted = {(step, digest) for step, digest in ([] if why_none else counts.copies)}
        mine, refused = on_all_ranks(self._control, lambda: self._held(counted, why_none))
        row = json.dumps([[[*copy, ranks] for copy, (_, ranks) in mine.items()], refused]).encode()
        rows, texts = zip(*map(json.loads, exchange_any(self._control, row)), strict=True)
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
                address_of = {r: self._addresses[by] for r, by in held.items() if by != here}
                files = PeerFiles(address_of, self._token)
                found.append(Chosen(path, step, manifest, data, files))
        whole = {chosen.step for chosen in found}
        refusals = [Refused(*each) for each in dict.fromkeys(map(tuple, chain(*texts)))]
        refusals = [each for each in refusals if not (each.is_damaged and each.step in whole)]
        for step in sorted({step for step, _ in counted}, reverse=True)[:1]:
            if step not in whole and not any(each.step == step for each in refusals):
                refusals.append(self._missing(step, holders))
        return found, refusals

    def _missing(self, step: int, holders: Mapping[_Copy, Mapping[int, int]]) -> Refused:
        """Return what lacks of a copy of which no host holds anything damaged."""
        text = f"nothing of it is in {self.folder}: the host was restarted, or its memory emptied"
        for (found, _, num_ranks), held in holders.items():
            if found == step:
                lost = name_ranks(sorted(set(range(num_ranks)) - held.keys()))
                text = f"no host has the files of {lost}"
        return Refused(step, text, False)

    def _held(
        self, counted: Collection[tuple[int, str]], why_none: str
    ) -> tuple[dict[_Copy, tuple[bytes, list[int]]], list[Refused]]:
        """Return this host's copies that count: the manifest, and whose files are here.

        The second value has those that do not count, or lack something.
        """
        found: dict[_Copy, tuple[bytes, list[int]]] = {}
        refused: list[Refused] = []
        steps = {step for step, _ in counted}
        for entry in self._entries_but(None) if self._leads else ():
            match = COPY.fullmatch(entry.name)
            assert match is not None
            step, path = int(match[1] or match[3]), self.folder / entry.name
            if not match[1]:
                text = "it was not complete when the run ended"
                refused += [Refused(step, text, False)] if match[2] == "tmp" else []
                continue
            try:
                with reading(path):
                    if entry.kind != "folder":
                        raise DamagedCheckpoint(f"{path} is no folder")
                    data = read_small(self._files, path / MANIFEST)
                    manifest = parse_manifest(data, str(path / MANIFEST))
                    entries = {entry.name: entry for entry in self._files.list(path)}
            except (CheckpointError, OSError) as error:
                refused.append(Refused(step, explain(error), step in steps))
                continue
            if (step, digest_of(data)) not in counted:
                text = why_none or "the run has gone on from another state since"
                refused.append(Refused(step, text, False))
                continue
            ranks = []
            for rank, row in enumerate(manifest.ranks):
                text = difference_of_rank(path, entries, rank, row)
                if not text:
                    ranks.append(rank)
                elif any(name in entries for name in names_of_rank(rank, row)):
                    refused.append(Refused(step, text, True))
            found[step, digest_of(data), manifest.num_ranks] = data, ranks
        return found, refused

    def keep_only(self, loaded: Chosen | None) -> None:
        """Remove all copies but the one that was loaded; None: all."""
        self.newest = None if loaded is None else loaded.step
        self.whole = () if loaded is None else ((loaded.step, digest_of(loaded.data)),)
        self._why_none = ""
        on_all_ranks(self._control, lambda: self._remove_all_but(self.newest))

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
            warnings.warn(f"{self.folder}: files stay in memory: {explain(error)}", stacklevel=2)
        finally:
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def _entries_but(self, step: int | None) -> list[Entry]:
        """List the copies of this host, whole or not, but that of ``step``."""
        kept = None if step is None else step_name(step)
        with suppress(FileNotFoundError):
            entries = self._files.list(self.folder)
            return [e for e in entries if COPY.fullmatch(e.name) and e.name != kept]
        return []

    def _remove_all_but(self, step: int | None) -> None:
        for entry in self._entries_but(step) if self._leads else ():
            self._remove(self.folder / entry.name, entry)

    def _remove(self, path: Path, entry: Entry) -> None:
        """Remove a copy; a foreign entry in its place is kept under another name."""
        try:
            if entry.kind != "folder":
                self._keep_aside(path)
            elif (left := remove_checkpoint(self._files, path)) is not None:
                self._report(
                    f"{left}: these files were in a copy in memory, and are not part of it"
                )
        except FileNotFoundError:
            pass
        except OSError as error:
            self._report(f"{path}: this copy in memory cannot be removed: {explain(error)}")

    def _keep_aside(self, path: Path) -> None:
        """Rename a foreign entry that has the name of an entry of ours."""
        left = set_aside(self._files, path)
        self._report(f"{path} was not what a run puts there: it is now {left.name}; remove it")

    def _report(self, text: str) -> None:
        if text not in self._reported:
            self._reported.add(text)
            self.news.append(text)


def remove_dead_runs(files: Files, own: Path, news: list[str]) -> None:
    """Remove the folders beside ``own`` of runs that are gone; add their names to ``news``.

    See Note [Folders of runs that are gone].
    """
    for entry in files.list(own.parent):
        is_other = _RUN_FOLDER.fullmatch(entry.name) is not None and entry.name != own.name
        if is_other and entry.kind == "folder":
            with suppress(OSError, ValueError, LookupError, TypeError, CheckpointError):
                _remove_dead_run(files, own.parent / entry.name, news)


def _remove_dead_run(files: Files, folder: Path, news: list[str]) -> None:
    """Remove a folder if its run is gone. **Raises** many kinds of errors if it is not clear."""
    entries = {entry.name: entry for entry in files.list(folder)}
    is_removed = folder.name.startswith(".")  # by a run that was killed while it did this
    if not is_removed and entries[LOCK].kind != "file":
        return
    copies = [folder / name for name in entries if name != LOCK]
    for path in copies:
        plain = all(e.kind == "file" and is_ours(e.name) for e in files.list(path))
        if COPY.fullmatch(path.name) is None or not plain:
            return
    checkpoints, renamed = "", folder
    if not is_removed:
        lock = files.lock(folder / LOCK, shared=True)  # a run holds one that is not shared
        if lock is None:
            return
        try:
            content = lock_text(files, folder / LOCK)
            mine, processes = own_process(), [Process(**each) for each in content["processes"]]
            if not processes or any(fate(each, mine)[0] != "dead" for each in processes):
                return
            checkpoints = str(content["checkpoints"])
            renamed = folder.parent / f".old-{folder.name}-{os.urandom(4).hex()}"
            files.rename(folder, renamed)
        finally:
            lock.release()
    num_bytes = 0
    for path in copies:
        for each in files.list(renamed / path.name):
            num_bytes += each.size
            files.remove_file(renamed / path.name / each.name)
        files.remove_folder(renamed / path.name)
    if LOCK in entries:
        files.remove_file(renamed / LOCK)
    files.remove_folder(renamed)
    if copies:
        news.append(
            f"{folder}: {num_bytes} bytes of copies in memory were removed. They were of a run "
            f"whose processes and launcher are gone, with checkpoints in {checkpoints or 'unknown'}"
        )
