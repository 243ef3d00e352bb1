"""Hugging Face's safetensors weights as a `Source` that is read by slices.

Note [Why not safe_open]
The library's ``get_slice`` cuts boxes, and a range of the flat tensor is several boxes. It cuts no
scalars. It maps the file, so a file that is truncated meanwhile kills the process instead of
raising. Here a flat range is a range of bytes: `container.read_header` and one read at an offset.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from shardwise.checkpoint.container import (
    MAX_HEADER_BYTES,
    element_bytes,
    memory_of,
    read_header,
    torch_dtype,
)
from shardwise.checkpoint.files import Files, read_text
from shardwise.checkpoint.source import TensorInfo
from shardwise.convert.pieces import Piece, PieceSource, explained, flat_piece
from shardwise.errors import CheckpointError, DamagedCheckpoint
from shardwise.strict_json import loads

WEIGHTS_FILE = "model.safetensors"
_WRITER = "safetensors"
INDEX_FILE = "model.safetensors.index.json"
_REMEDY = "The folder mixes files of two saves, or is not whole: fetch it again"
_FILE_NAME = re.compile(r"[\w-][\w. -]*\.safetensors", re.ASCII)


def open_huggingface(path: Path) -> PieceSource:
    """Open a folder of safetensors weights, one such file, or an index of such files.

    A folder has ``model.safetensors``, or ``model.safetensors.index.json`` and the files that it
    names. All tensors are "param", because the files do not tell buffers from parameters. Links
    are followed inside the folder and inside the cache of the hub. An index names files beside it
    only.

    **Cost** the headers; tensors are read by `Source.read`.

    **Raises** CheckpointError when there are no such weights, or when index and files disagree;
    DamagedCheckpoint when a file is not whole.
    """
    index = _index_of(path)
    if index is None:
        return open_weight_files([path / WEIGHTS_FILE if path.is_dir() else path], str(path))
    with explained(str(path), _WRITER):
        weight_map = _read_index(index)
    homes = {key: index.parent / name for key, name in weight_map.items()}
    return open_weight_files(sorted(set(homes.values())), str(path), homes)


def open_weight_files(
    paths: Sequence[Path], where: str = "", homes: Mapping[str, Path] | None = None
) -> PieceSource:
    """Open these safetensors files as one source; links are followed as in `open_huggingface`.

    ``where`` is its name in errors, ``homes`` are the files of its tensors by an index.

    **Cost** the headers.

    **Raises** CheckpointError when one cannot be read, two hold the same tensor, or the index names
    another file; DamagedCheckpoint when one is not whole, or lacks a tensor of the index.
    """
    files, held = Files(), dict[str, Path]()
    index: dict[TensorInfo, list[Piece]] = {}
    for file in paths:
        with explained(str(file), _WRITER), files.open(follow_link(file)) as reader:
            found, begin = read_header(reader, str(file))
        for key, stored in found.items():
            first = held.setdefault(key, file)
            home = first if homes is None else homes.get(key, "no file")
            if home != file:
                raise CheckpointError(f"{file} holds tensor '{key}', expected in {home}. {_REMEDY}")
            info = TensorInfo("param", key, stored.dtype, stored.lengths)
            read = partial(_read, files, file, info, begin + stored.begin)
            index[info] = [flat_piece(0, info.numel, read)]
    for key, home in (homes or {}).items():
        if key not in held:
            raise DamagedCheckpoint(f"{home} lacks tensor '{key}' of the index. {_REMEDY}")
    return PieceSource(where or str(paths[0]), index)


def follow_link(file: Path) -> Path:
    """Return the file that a link leads to: one of the same folder, or a blob of the hub's cache.

    The cache has links ``snapshots/<revision>/...`` to files in ``blobs/``.

    **Raises** CheckpointError when a link leads elsewhere; FileNotFoundError when its target is
    missing.
    """
    real = Path(os.path.realpath(file, strict=True))
    folder = Path(os.path.realpath(file.parent, strict=True))
    homes = [folder]
    homes += [parent.parent / "blobs" for parent in folder.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(home) for home in homes):
        raise CheckpointError(
            f"{file} is a link to {real}, which leads out of its folder, and is not followed: what "
            "is there may not be meant for you to copy. Put the file itself there if it is"
        )
    return real


def _read(files: Files, file: Path, info: TensorInfo, begin: int, lo: int, hi: int) -> torch.Tensor:
    """Return elements [lo, hi) of a tensor whose bytes begin at ``begin`` of the file."""
    elements = torch.empty(hi - lo, dtype=torch_dtype(info.dtype))
    try:
        with files.open(follow_link(file)) as reader:
            reader.read_into(begin + lo * element_bytes(info.dtype), memory_of(elements))
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"tensor '{info.name}': {error}") from error
    except OSError as error:
        raise CheckpointError(f"tensor '{info.name}' cannot be read: {error}") from error
    return elements


def _index_of(path: Path) -> Path | None:
    """Return the path of the index, or None for a single file."""
    if not path.is_dir():
        return path if path.name.endswith(".json") else None
    has_file, has_index = os.path.lexists(path / WEIGHTS_FILE), os.path.lexists(path / INDEX_FILE)
    if has_file and has_index:
        raise CheckpointError(
            f"{path} holds {WEIGHTS_FILE} and {INDEX_FILE}, which may be two models: give the path "
            "of one"
        )
    if not has_file and not has_index:
        raise CheckpointError(
            f"{path} holds neither {WEIGHTS_FILE} nor {INDEX_FILE}. If its weights have another "
            "name, give the path of the file or of its index; if they are pickled (.bin, .pt), let "
            "transformers load them and save_pretrained() them as safetensors"
        )
    return path / INDEX_FILE if has_index else None


def _read_index(index: Path) -> Mapping[str, str]:
    """Return the file name of every tensor; the names can be joined to the folder safely."""
    text = read_text(Files(), follow_link(index), MAX_HEADER_BYTES)
    value = loads(text.encode(), str(index))
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedCheckpoint(f"{index}: expected a weight_map of tensor names to file names")
    for name in weight_map.values():
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index} names the file {name!r}; expected a plain name beside it that ends in "
                ".safetensors. Do not load what you do not trust"
            )
    return weight_map
