"""Read chunks of a checkpoint's files, in file order, and check each before it counts.

Note [Straight into place]
~~~~~~~~~~~~~~~~~~~~~~~~~~
A chunk that is wanted whole is read into the memory of its tensor and hashed there, while it is in
the processor's cache; there is no copy on the way. Small chunks that lie next to each other (step
counts, norms, biases) are read with one call and copied from there: a call for each would cost more
than their bytes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.checkpoint.digest import CHUNK_BYTES, chunk_digest
from shardwise.checkpoint.files import Files, Reader, is_unreadable
from shardwise.checkpoint.pieces import Scattered
from shardwise.errors import CheckpointError, DamagedCheckpoint

_OPEN_FILES = 64
_SMALL_BYTES = 64 << 10


class Chunk(NamedTuple):
    """A chunk of ``num_bytes`` at ``begin`` of a file; bytes [lo, hi) of it are wanted in ``out``.

    ``key`` names its tensor.
    """

    name: str
    begin: int
    num_bytes: int
    digest: str
    key: str
    lo: int
    hi: int
    out: memoryview | Scattered


class ChunkReader:
    """The files of one checkpoint, opened when they are needed.

    It has read ``num_bytes`` so far, from the files in ``opened``.
    """

    def __init__(self, files: Files, folder: Path) -> None:
        self.num_bytes = 0
        self.opened: set[str] = set()
        self._files = files
        self._folder = folder
        self._readers: dict[str, Reader] = {}

    def read(self, chunks: Sequence[Chunk]) -> Iterator[int]:
        """Read the chunks, sorted by file and place; yield the bytes of each call that was made.

        **Raises** DamagedCheckpoint naming file, tensor and bytes; CheckpointError with the errno.
        """
        ordered = sorted(chunks, key=lambda c: (c.name, c.begin))
        at = 0
        while at < len(ordered):
            end = _end_of_run(ordered, at)
            run = ordered[at:end]
            first = run[0]
            is_one = len(run) == 1 and first.hi - first.lo == first.num_bytes
            if is_one and isinstance(first.out, memoryview):
                self._read(first, first.out)
                self._check(first, first.out)
            else:
                span = memoryview(bytearray(run[-1].begin + run[-1].num_bytes - first.begin))
                self._read(first, span)
                for chunk in run:
                    data = span[chunk.begin - first.begin :][: chunk.num_bytes]
                    self._check(chunk, data)
                    chunk.out[:] = data[chunk.lo : chunk.hi]
            yield sum(chunk.hi - chunk.lo for chunk in run)
            at = end

    def close(self) -> None:
        """Close the files."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _read(self, first: Chunk, out: memoryview) -> None:
        try:
            self._reader(first.name).read_into(first.begin, out)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error} (tensor '{first.key}')") from error
        except OSError as error:
            # A file that cannot be read counts as damage: an older one may be readable.
            kind = DamagedCheckpoint if is_unreadable(error) else CheckpointError
            raise kind(
                f"{self._folder / first.name}: tensor '{first.key}': {error.strerror} "
                f"(errno {error.errno})"
            ) from error
        self.num_bytes += len(out)

    def _check(self, chunk: Chunk, data: memoryview) -> None:
        if chunk_digest(data) != chunk.digest:
            raise DamagedCheckpoint(
                f"{self._folder / chunk.name}: tensor '{chunk.key}' is damaged in the bytes "
                f"{chunk.begin} to {chunk.begin + chunk.num_bytes} of the file"
            )

    def _reader(self, name: str) -> Reader:
        if name not in self._readers:
            if len(self._readers) >= _OPEN_FILES:
                oldest = next(iter(self._readers))
                self._readers.pop(oldest).close()
            path = self._folder / name
            try:
                self._readers[name] = self._files.open(path)
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{path}: it is missing") from None
            self.opened.add(name)
        return self._readers[name]


def _end_of_run(chunks: Sequence[Chunk], at: int) -> int:
    """Return where the run of small chunks next to each other that begins at ``at`` ends."""
    first = last = chunks[at]
    end = at + 1
    while (
        end < len(chunks)
        and last.num_bytes <= _SMALL_BYTES >= chunks[end].num_bytes
        and chunks[end].name == first.name
        and chunks[end].begin == last.begin + last.num_bytes
        and last.begin + last.num_bytes - first.begin < CHUNK_BYTES
    ):
        last = chunks[end]
        end += 1
    return end
