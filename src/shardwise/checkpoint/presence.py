"""Tell whether all files of a checkpoint are there, in their sizes; nothing is opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.manifest import IndexRow
from shardwise.checkpoint.sealed import MANIFEST, file_name, index_name, is_ours
from shardwise.errors import DamagedCheckpoint

if TYPE_CHECKING:
    from shardwise.checkpoint.files import Entry


def check_presence(path: Path, entries: Iterable[Entry], ranks: Sequence[IndexRow]) -> None:
    """Compare a folder's listing with what the manifest says of each rank.

    **Raises** DamagedCheckpoint naming the first file that is missing, of another size, or one too
    many; what has no name of ours is left alone.
    """
    found = {entry.name: entry for entry in entries if is_ours(entry.name)}
    expected = {MANIFEST}
    for rank, row in enumerate(ranks):
        names = [file_name(rank, number) for number in range(row.num_files)]
        expected |= {index_name(rank), *names}
        for name in (index_name(rank), *names):
            if name not in found or found[name].kind != "file":
                raise DamagedCheckpoint(f"{path / name}: it is missing, or no regular file")
        _check_size(path, index_name(rank), found[index_name(rank)].size, row.index_bytes)
        _check_size(path, ", ".join(names), sum(found[n].size for n in names), row.file_bytes)
    unknown = sorted(set(found) - expected)
    if unknown:
        raise DamagedCheckpoint(f"{path / unknown[0]}: the manifest does not name this file")


def _check_size(path: Path, names: str, found: int, expected: int) -> None:
    if found != expected:
        raise DamagedCheckpoint(f"{path / names}: {found} bytes, expected {expected}")
