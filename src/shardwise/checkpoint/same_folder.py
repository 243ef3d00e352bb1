"""Comparison of the folders that the ranks of a save or a load were given.

A folder may have several paths: a relative one, a link, another mount. Ranks exchange a digest of
the path, and only if digests differ, where each path leads.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.verify import manifest_now
from shardwise.comm.control import exchange_any
from shardwise.engine.agreement import describe_difference
from shardwise.errors import CheckpointError, ConfigError
from shardwise.processes import boot_id

if TYPE_CHECKING:
    from shardwise.checkpoint.files import Files
    from shardwise.checkpoint.folder import Chosen
    from shardwise.comm.control import Control

PATH_DIGEST_BYTES = 16
_MAX_SHOWN = 3


class Given(NamedTuple):
    """The path and the step that a rank was given, its machine, and where the path leads there."""

    path: str
    step: int | None
    machine: str
    place: list[object]


def path_digest(path: Path, step: int | None = None) -> bytes:
    """Return the row that ranks exchange to compare their paths and steps."""
    text = os.fsencode(path) + f"\0{step}".encode()
    return hashlib.blake2b(text, digest_size=PATH_DIGEST_BYTES).digest()


def check_one_folder(files: Files, control: Control, path: Path, call: str) -> None:
    """Check that all ranks save to one folder.

    **Cost** an exchange of 16 bytes. **Raises** as `refuse_other_folders`.
    """
    if control.num_ranks > 1:
        digests = control.exchange(path_digest(path), f"the path of {call}")
        refuse_other_folders(files, control, digests, path, call)


def refuse_other_folders(
    files: Files, control: Control, digests: Sequence[bytes], path: Path, call: str
) -> None:
    """Refuse to save to folders that differ by rank, from all ranks' `path_digest`.

    Machines may mount one file system at different places, which only its files show: there the
    save itself fails, since a rank writes into the folder that rank 0 has made.

    **Raises** ConfigError on all ranks, naming ranks and paths.
    """
    if len(set(digests)) > 1:
        given = _exchange_given(files, control, path, None)
        _refuse(call, given, _ranks_elsewhere(given))


def paths_of_load(files: Files, control: Control, path: Path, step: int | None) -> list[str] | None:
    """Return each rank's path if the paths of a load lead to different folders, else None.

    Such folders may hold copies of one checkpoint, as on the hosts' own disks: the load compares
    the manifests. **Cost** an exchange of 16 bytes.

    **Raises** ConfigError on all ranks if only some load a step, or another one.
    """
    if control.num_ranks == 1:
        return None
    digests = control.exchange(path_digest(path, step), "the path of load()")
    if len(set(digests)) == 1:
        return None
    given = _exchange_given(files, control, path, step)
    _refuse("load()", given, [n for n, each in enumerate(given) if each.step != given[0].step])
    is_one = len({(each.machine, *each.place) for each in given}) == 1
    return None if is_one else [each.path for each in given]


def check_same_checkpoint(
    control: Control, files: Files, chosen: Chosen, paths: Sequence[str]
) -> None:
    """Check that every rank's folder holds the chosen checkpoint, from `paths_of_load`.

    **Raises** CheckpointError on all ranks, naming the first that does not, and both paths.
    """

    def compare() -> None:
        if manifest_now(files, chosen.path) != chosen.data:
            raise CheckpointError(
                f"load(): {chosen.path} is not the checkpoint that rank 0 loads from {paths[0]} "
                f"(step {chosen.manifest.step} of run {chosen.manifest.run}), and all ranks load "
                "one checkpoint. Give the same path to all ranks; nothing was changed"
            )

    on_all_ranks(control, compare)


def _exchange_given(files: Files, control: Control, path: Path, step: int | None) -> list[Given]:
    machine = socket.gethostname()
    with suppress(OSError):
        machine = boot_id()
    place: list[object] = []
    with suppress(ValueError):  # a name that no file can have: the call raises for it afterwards
        place = [*files.locate(path)]
    mine = Given(str(path), step, machine, place)
    return [Given(*json.loads(row)) for row in exchange_any(control, json.dumps(mine).encode())]


def _ranks_elsewhere(given: Sequence[Given]) -> list[int]:
    """Return the ranks whose path leads to another folder than on another rank of the machine."""
    first: dict[str, Given] = {}
    return [
        rank
        for rank, each in enumerate(given)
        if each.place != first.setdefault(each.machine, each).place
    ]


def _refuse(call: str, given: Sequence[Given], ranks: Iterable[int]) -> None:
    """Raise ConfigError with the paths of these ranks beside the first rank's, if there are any."""
    ranks_by_folder: dict[str, list[int]] = {}
    for rank in ranks:
        ranks_by_folder.setdefault(_show(given[rank]), []).append(rank)
    if ranks_by_folder:
        there = _show(given[0])
        texts = [
            describe_difference(each, text, 0, there) for text, each in ranks_by_folder.items()
        ]
        shown = "; ".join(texts[:_MAX_SHOWN])
        raise ConfigError(
            f"{call}: the ranks differ in the folder: {shown}. Give the same path and step to all "
            "ranks; nothing was read or written"
        )


def _show(given: Given) -> str:
    return given.path if given.step is None else f"step={given.step} in {given.path}"
