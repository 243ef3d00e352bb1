"""Which checkpoint of a folder a load takes: rank 0 looks, and tells the others.

Note [Beside a run that goes on]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The run whose folder is read may remove a checkpoint at any moment, as a rule because there is a
newer one. What was chosen and is gone, or is another one by now, is no damage: the folder is looked
at again, from the newest. Only what stands there as it was chosen, and cannot be read, is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import MAX_LOOKS as MAX_LOOKS
from shardwise.checkpoint.folder import check_quickly, step_name, steps_in
from shardwise.checkpoint.manifest import Manifest, parse_manifest
from shardwise.checkpoint.read import read_small
from shardwise.checkpoint.sealed import MANIFEST
from shardwise.errors import CheckpointError, DamagedCheckpoint

if TYPE_CHECKING:
    from shardwise.comm.control import Control

_SIZE_BYTES = 8


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to load: its step, its manifest and the manifest's bytes."""

    path: Path
    step: int
    manifest: Manifest
    data: bytes


def choose(control: Control, files: Files, folder: Path, skipped: dict[int, str]) -> Chosen | None:
    """Find the highest step that passes the quick check and was not ``skipped``, on all ranks.

    Adds to ``skipped`` the reasons of newer ones that do not pass. **Raises** CheckpointError.
    """
    found: list[tuple[Manifest | None, bytes]] = []

    def look() -> None:
        if control.rank == 0:
            found.append(_look(files, folder, skipped))

    on_all_ranks(control, look)
    manifest, said = found[0] if found else (None, b"")
    said = control.broadcast(said)
    size = int.from_bytes(said[:_SIZE_BYTES], "little")
    word = json.loads(said[_SIZE_BYTES : _SIZE_BYTES + size])
    skipped.update(word["skipped"])
    if word["step"] is None:
        return None
    path, data = folder / step_name(word["step"]), said[_SIZE_BYTES + size :]
    if manifest is None:
        manifest = parse_manifest(data, str(path / MANIFEST))
    return Chosen(path, word["step"], manifest, data)


def _look(files: Files, folder: Path, known: Collection[int]) -> tuple[Manifest | None, bytes]:
    """Return the manifest of the newest that passes, and the word on it for the other ranks."""
    for _ in range(MAX_LOOKS):
        skipped: list[tuple[int, str]] = []
        for step in (step for step in steps_in(files, folder) if step not in known):
            path = folder / step_name(step)
            try:
                manifest, data = check_quickly(files, path)
            except (CheckpointError, OSError) as error:
                if not _is_there(files, path):
                    break  # look again: there may be a newer one
                if not isinstance(error, (DamagedCheckpoint, FileNotFoundError)):
                    raise
                skipped.append((step, str(error)))
                continue
            return manifest, _word(step, skipped) + data
        else:
            return None, _word(None, skipped)
    raise CheckpointError(vanishing(folder))


def _word(step: int | None, skipped: list[tuple[int, str]]) -> bytes:
    word = json.dumps({"step": step, "skipped": skipped}).encode()
    return len(word).to_bytes(_SIZE_BYTES, "little") + word


def vanishing(folder: Path) -> str:
    """Say that a folder cannot be read as its run removes what is being read."""
    return (
        f"{folder}: its checkpoints are removed faster than they can be read; let the run that "
        "saves there keep more of them (keep_last)"
    )


def has_changed(control: Control, files: Files, chosen: Chosen) -> bool:
    """Tell whether a checkpoint was removed or replaced since it was chosen; all ranks call it."""

    def look() -> bytes:
        if control.rank != 0:
            return b"\0"
        try:
            return bytes([read_small(files, chosen.path / MANIFEST) != chosen.data])
        except (CheckpointError, OSError):
            return bytes([not _is_there(files, chosen.path)])

    return on_all_ranks(control, look, 1)[0] != b"\0"


def is_there(control: Control, files: Files, path: Path) -> bool:
    """Tell whether rank 0 finds a checkpoint under its name; all ranks call it."""

    def look() -> bytes:
        return bytes([control.rank != 0 or _is_there(files, path)])

    return on_all_ranks(control, look, 1)[0] != b"\0"


def _is_there(files: Files, path: Path) -> bool:
    return any(entry.name == path.name for entry in files.list(path.parent))
