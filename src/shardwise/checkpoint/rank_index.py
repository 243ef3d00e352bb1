"""What one rank wrote: where each box lies in its files, the digests, and the rank's own values."""

from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from shardwise.checkpoint.container import element_bytes
from shardwise.checkpoint.digest import DIGEST_CHARS, num_chunks
from shardwise.checkpoint.manifest import Manifest, TensorRow
from shardwise.checkpoint.sealed import (
    MANIFEST,
    Count,
    Digest,
    Format,
    Name,
    Part,
    Rank,
    Rows,
    index_name,
    unseal,
    validated,
)
from shardwise.errors import DamagedCheckpoint


class BoxRow(NamedTuple):
    """One box in the files of a rank: of which tensor, where, and the digests of its chunks.

    It ends where the next one of its file begins; what it holds is computed from the manifest.
    """

    tensor: Count
    file: Annotated[int, Field(ge=0, le=64, strict=True)]
    begin: Count
    digests: str


class BoxPlace(NamedTuple):
    """Bytes [begin, end) of a file, and the digests of their chunks."""

    begin: int
    end: int
    digests: str


class OwnRow(TensorRow):
    """A tensor of this rank alone, whole, with the digests of its chunks."""

    begin: Count
    digests: str


class FileRow(Part):
    """One file of a rank: its size, and the digest of its header."""

    num_bytes: Count
    header: Digest


class RankIndex(Part):
    """What one rank wrote. ``values`` are its generators and its part of the user's state.

    Boxes are arrays in the file, to keep an index small.
    """

    format: Format
    run: Name
    step: Count | None
    rank: Rank
    files: Rows[FileRow]
    boxes: Rows[BoxRow]
    own: Rows[OwnRow]
    values: dict[str, Any]

    @cached_property
    def box_places(self) -> dict[tuple[int, int], BoxPlace]:
        """Where the boxes lie, by (tensor number, file)."""
        ends = {number: file.num_bytes for number, file in enumerate(self.files)}
        if self.own:
            ends[0] = self.own[0].begin
        places = {}
        for row in reversed(self.boxes):
            end = ends.get(row.file, 0)
            places[row.tensor, row.file] = BoxPlace(row.begin, end, row.digests)
            ends[row.file] = row.begin
        return places


def parse_index(data: bytes, where: str) -> RankIndex:
    """Read the index of a rank. **Raises** DamagedCheckpoint naming what is wrong."""
    return validated(RankIndex, unseal(data, where), where)


def two_saves(manifest: Manifest, rank: int, data: bytes) -> str:
    """Say that a manifest and an index that it does not name are of two saves.

    Returns "" if the index is damaged, or of another rank: then it is the wrong one.
    """
    name = index_name(rank)
    try:
        index = parse_index(data, name)
    except DamagedCheckpoint:
        return ""
    if index.rank != rank:
        return ""
    return (
        f"{MANIFEST} and {name} are whole and of two saves: step {manifest.step} of run "
        f"{manifest.run} and step {index.step} of run {index.run}. One of the two was copied there "
        "from another checkpoint"
    )


def differences(manifest: Manifest, rank: int, index: RankIndex) -> Iterator[str]:
    """Yield in what an index is not as the manifest says."""
    row = manifest.ranks[rank]
    if (index.run, index.step, index.rank) != (manifest.run, manifest.step, rank):
        yield (
            f"it is of run {index.run}, step {index.step}, rank {index.rank}; expected run "
            f"{manifest.run}, step {manifest.step}, rank {rank}"
        )
    if index.format != manifest.format:
        yield f"format {index.format}, and the manifest is {manifest.format}"
    file_bytes = sum(file.num_bytes for file in index.files)
    if (len(index.files), file_bytes) != (row.num_files, row.file_bytes):
        yield (
            f"it names {len(index.files)} files of {file_bytes} bytes; the manifest "
            f"{row.num_files} of {row.file_bytes}"
        )
    if len(index.box_places) != len(index.boxes):
        yield "a box stands in it twice"


def check_index(manifest: Manifest, rank: int, index: RankIndex, where: str) -> None:
    """Check that an index fits the manifest, and that tensors lie one after the other in a file.

    Boxes come in the order of `Manifest.all_boxes`, then the rank's own tensors, without a gap up
    to the end of the file.

    **Raises** DamagedCheckpoint naming what is wrong.
    """
    tensors, num_files = manifest.tensors, len(index.files)
    for difference in differences(manifest, rank, index):
        raise DamagedCheckpoint(f"{where}: {difference}")
    if any(box.tensor >= len(tensors) or box.file >= num_files for box in index.boxes):
        raise DamagedCheckpoint(f"{where}: it names a tensor or a file that is none")
    if len({own.info.key for own in index.own}) != len(index.own) or (index.own and not num_files):
        raise DamagedCheckpoint(f"{where}: its own tensors stand twice, or in no file")
    whole = {tensor.info for tensor in tensors if tensor.layout is None}
    strange = [own.name for own in index.own if own.kind != "extra" and own.info not in whole]
    if strange:
        raise DamagedCheckpoint(f"{where}: a rank cannot have its own '{strange[0]}'")
    _check_places(manifest, index, where)


def _check_places(manifest: Manifest, index: RankIndex, where: str) -> None:
    tensors, before = manifest.tensors, dict[int, tuple[int, int]]()
    for box in index.boxes:
        _, end, digests = index.box_places[box.tensor, box.file]
        width = element_bytes(tensors[box.tensor].dtype)
        order = (-width, box.tensor)
        if end <= box.begin or order <= before.get(box.file, (-width - 1, 0)):
            raise DamagedCheckpoint(
                f"{where}: what lies at byte {box.begin} of file {box.file} is not next"
            )
        if len(digests) != num_chunks(end - box.begin) * DIGEST_CHARS:
            raise DamagedCheckpoint(f"{where}: a tensor of file {box.file} has not all its digests")
        before[box.file] = order
    end = index.own[0].begin if index.own else 0
    for own in index.own:
        num_bytes = own.num_bytes
        if own.begin != end or len(own.digests) != num_chunks(num_bytes) * DIGEST_CHARS:
            raise DamagedCheckpoint(f"{where}: its own '{own.name}' is not described right")
        end += num_bytes
    if index.own and end != index.files[0].num_bytes:
        raise DamagedCheckpoint(f"{where}: file 0 does not end with its last tensor")
