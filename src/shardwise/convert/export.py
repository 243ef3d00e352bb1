"""Write a `Source` as Hugging Face's safetensors or as torch's ``.distcp``.

Note [Names are the model's own]
Tensors are written under the names that the module has. transformers 5 renames and joins weights of
some models while it loads them (experts of a mixture become one tensor). It also loads weights
under the module's names. If another program expects the names of the hub, load the export with
transformers and save_pretrained() it.
"""

import json
import os
import re
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from shardwise.checkpoint.all_ranks import explain
from shardwise.checkpoint.container import (
    Stored,
    build_header,
    element_bytes,
    place,
    torch_dtype,
)
from shardwise.checkpoint.files import Files, read_file
from shardwise.checkpoint.folder import remove_tree
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.replicas import SavedReplicas, is_of_first_replica
from shardwise.checkpoint.source import Source, TensorInfo
from shardwise.checkpoint.write import write_small
from shardwise.convert.huggingface import INDEX_FILE, WEIGHTS_FILE, follow_link
from shardwise.errors import CheckpointError, ConfigError

_MAX_COMPANION_BYTES = 64 << 20
_PIECE_BYTES = 64 << 20  # of one tensor in memory at a time
_FLOATS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_CONFIG = "config.json"
_COMPANIONS = (  # small files that transformers reads beside the weights; never code
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json"),
)


@dataclass(frozen=True)
class Exported:
    """The files of weights of one export, and the bytes and number of tensors in them."""

    files: tuple[str, ...]
    total_bytes: int
    num_tensors: int


def export_huggingface(
    source: Source,
    target: Path,
    *,
    files: Files,
    max_shard_bytes: int = 5_000_000_000,
    dtype: str | None = None,
    config_from: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Exported:
    """Write parameters and buffers as a folder that ``from_pretrained`` loads.

    The folder has one ``model.safetensors``, or files of at most ``max_shard_bytes`` and an index;
    a larger tensor has a file to itself. ``dtype`` ("BF16" or "bfloat16") casts F64, F32, F16 and
    BF16 tensors, no others. Further names of a shared parameter are left out, as transformers
    leaves them out: it ties them again by ``config.json``. ``config.json`` and the tokenizer's
    files are copied unchanged from ``config_from``. ``progress`` is called with the bytes of each
    piece. Tensors of a Shardwise checkpoint are sorted by name, with numbers as numbers, so one
    model gives one file for any units, ranks, stages and degrees that saved it.

    The target must be missing or empty, and appears whole. A killed process leaves a ``.tmp-``
    folder beside it, which may be removed. See Note [Names are the model's own].

    **Cost** one pass over the source; at most 64 MiB of a tensor, and its cast, in memory.

    **Raises** ConfigError for wrong arguments; CheckpointError when the target is in use, the disk
    fails, or a finite value does not fit into ``dtype``. Nothing is left then.
    """
    if dtype is not None:
        dtype = _FLOATS.get(dtype.removeprefix("torch."), dtype)
        if dtype not in _FLOATS.values():
            raise ConfigError(f"dtype: expected one of {', '.join(_FLOATS)}, got {dtype!r}")
    if max_shard_bytes < 1:
        raise ConfigError(f"max_shard_bytes: expected at least 1, got {max_shard_bytes}")
    _check_one_model(source)
    infos = [t for t in source.tensors if t.kind in ("param", "buffer")]
    infos = [t for t in infos if t.name not in source.tied]
    if isinstance(source, Checkpoint):  # its order is that of units and stages
        infos.sort(key=_place_of_name)
    if not infos:
        raise CheckpointError(f"{source.where} holds no parameter that could be exported")
    by_name = {info.name: info for info in infos}
    casts = dict.fromkeys(_FLOATS.values(), dtype) if dtype else {}
    tensors = [(t.name, casts.get(t.dtype, t.dtype), t.shape) for t in infos]
    plan = plan_files(tensors, max_shard_bytes)
    total_bytes = sum(stored[-1].end for stored in plan.values())
    with _new_folder(files, target, total_bytes) as folder:
        if config_from is not None:
            _copy_companions(files, config_from, folder)
        for name, stored in plan.items():
            with files.create(folder / name) as writer:
                writer.write([memoryview(build_header(stored, {"format": "pt"}))])
                for s in stored:
                    for piece in _pieces(source, by_name[s.key], s):
                        writer.write([piece.view(torch.uint8).numpy().data])
                        if progress is not None:
                            progress(piece.nbytes)
                writer.sync()
        if len(plan) > 1:
            write_small(files, folder / INDEX_FILE, index_text(plan).encode())
    return Exported(tuple(plan), total_bytes, len(infos))


def _check_one_model(source: Source) -> None:
    """Raise CheckpointError for replicas that had parameters of their own when it was saved."""
    if not isinstance(source, Checkpoint):
        return
    saved = SavedReplicas.take(source.values_of(source.rank)["modules"], source.where)
    if saved is not None and not saved.is_synchronized:
        raise CheckpointError(
            f"{source.where}: it was saved in the middle of a window of LocalSteps, when each of "
            f"{saved.num_replicas} replicas had parameters of its own. Export a checkpoint that "
            "was saved at a synchronisation, or after LocalSteps.synchronize()"
        )


def _place_of_name(info: TensorInfo) -> list[str | int]:
    parts = re.split(r"(\d+)", info.name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def export_dcp(source: Source, target: Path) -> None:
    """Write a folder for torch's `FileSystemReader`: ``{"model": ..., "optim": ...}``.

    Both are nested as ``torch.distributed.checkpoint.state_dict.get_state_dict`` returns them, so
    that ``dcp.load`` on any number of ranks fills a plain script's state. A shared parameter is
    written under all its names. The user's own state is left out. The target must be missing or
    empty, and appears whole. `HuggingFaceStorageReader` reads Shardwise checkpoints directly.

    **Cost** all tensors in memory at once: torch's writer needs the whole state.

    **Raises** CheckpointError when the target is in use or the disk fails. Nothing is left then.
    """
    # Imported here because the import takes long and few commands need it.
    from torch.distributed import checkpoint as dcp

    _check_one_model(source)
    total_bytes = sum(t.num_bytes for t in source.tensors if t.kind != "extra")
    with _new_folder(Files(), target, total_bytes) as folder, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
        try:
            writer = dcp.FileSystemWriter(folder)
            dcp.save(_nested(source), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # no Exception, so few handlers would see it
            raise CheckpointError(f"{target}: torch could not write it: {error}") from error


def plan_files(
    tensors: Sequence[tuple[str, str, tuple[int, ...]]], max_bytes: int | None
) -> dict[str, list[Stored]]:
    """Return the safetensors files of tensors (name, dtype, shape), with each tensor's place.

    There is one ``model.safetensors``, or files of at most ``max_bytes``. In a file, tensors with
    large elements come first, so each tensor is aligned to its elements.
    """
    sizes = [prod(shape) * element_bytes(dtype) for _, dtype, shape in tensors]
    shards = split_into_shards(sizes, max_bytes or max(1, sum(sizes)))
    files = {}
    for number, shard in enumerate(shards, start=1):
        boxes = [(*tensors[i], (0,) * len(tensors[i][2])) for i in shard]
        boxes.sort(key=lambda box: -element_bytes(box[1]))
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name if len(shards) > 1 else WEIGHTS_FILE] = place(boxes)
    return files


def index_text(files: Mapping[str, Sequence[Stored]], **metadata: int) -> str:
    """Return the index of several files, as JSON."""
    metadata["total_size"] = sum(stored[-1].end for stored in files.values())
    weight_map = {s.key: name for name, stored in files.items() for s in stored}
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"


def split_into_shards(sizes: Sequence[int], max_bytes: int) -> list[list[int]]:
    """Assign tensors to files, in order; a tensor beyond ``max_bytes`` gets a file to itself.

    **Source** the result of ``huggingface_hub.split_state_dict_into_shards_factory``.
    """
    shards: list[list[int]] = []
    current: list[int] = []
    current_bytes = 0
    for i, size in enumerate(sizes):
        if size > max_bytes:
            shards.append([i])
            continue
        if current_bytes + size > max_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(i)
        current_bytes += size
    return [*shards, current] if current else shards


@contextmanager
def _new_folder(files: Files, target: Path, total_bytes: int) -> Iterator[Path]:
    """Yield a folder that becomes the target, durably, when the block succeeds."""
    target = Path(os.path.abspath(target))
    folder = target.parent / f".tmp-{target.name}-{secrets.token_hex(4)}"
    try:
        files.make_folders(target.parent)
        is_there = _is_empty_folder(files, target)
        free_bytes = files.free_bytes(target.parent)
        if free_bytes < total_bytes:
            raise CheckpointError(
                f"{target}: the export takes {total_bytes} bytes, {free_bytes} are free there"
            )
        files.make_folder(folder)
        yield folder
        files.sync_folder(folder)
        if is_there:
            files.remove_folder(target)
        files.rename(folder, target)
    except BaseException as error:
        with suppress(OSError, CheckpointError):
            remove_tree(files, folder)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} was not written: {explain(error)}") from error
        raise
    try:
        files.sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} is written but may not survive a power cut: {explain(error)}"
        ) from error


def _is_empty_folder(files: Files, target: Path) -> bool:
    """Tell whether the target is an empty folder; refuse it if it is anything else."""
    kinds = {entry.name: entry.kind for entry in files.list(target.parent)}
    if target.name and target.name not in kinds:
        return False
    if kinds.get(target.name) != "folder" or files.list(target):
        raise CheckpointError(
            f"{target} is there already; expected a new name or an empty folder. Nothing was "
            "changed: remove it first, or export under another name"
        )
    return True


def _copy_companions(files: Files, config_from: Path, folder: Path) -> None:
    """Copy the configuration and the tokenizer, through the links of a snapshot of the hub."""
    names = {entry.name for entry in files.list(config_from)}
    if _CONFIG not in names:
        raise CheckpointError(
            f"{config_from} holds no {_CONFIG}; expected the folder of a Hugging Face model"
        )
    for name in (_CONFIG, *_COMPANIONS):
        if name in names:
            try:
                real = follow_link(config_from / name)
            except FileNotFoundError:  # a link to nothing
                if name == _CONFIG:
                    raise
                continue
            write_small(files, folder / name, read_file(files, real, _MAX_COMPANION_BYTES))


def _pieces(source: Source, info: TensorInfo, stored: Stored) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in its dtype in the file."""
    step = _PIECE_BYTES // element_bytes(info.dtype)
    for lo in range(0, info.numel, step):
        piece = source.read(info, lo, min(lo + step, info.numel))
        cast = piece.to(torch_dtype(stored.dtype))
        if cast is not piece and not torch.equal(cast.isfinite(), piece.isfinite()):
            raise CheckpointError(
                f"{source.where}: tensor '{info.name}' of {info.dtype} holds values beyond "
                f"the range of {stored.dtype}; export with another dtype"
            )
        yield cast


def _nested(source: Source) -> dict[str, object]:
    """Return the whole state, nested as by `get_state_dict`."""
    model: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, object]] = {}
    for info in source.tensors:
        if info.kind != "extra" and is_of_first_replica(info.name):
            full = source.read(info, 0, info.numel).view(info.shape)
            if info.kind == "optimizer":
                state.setdefault(info.name, {})[info.state] = full
            else:
                model[info.name] = full
    model |= {alias: model[name] for alias, name in source.tied.items()}
    if source.optimizer is None:
        return {"model": model}
    values: Mapping[str, Mapping[str, object]] = source.optimizer.state
    for name, of_parameter in values.items():
        state.setdefault(name, {}).update(of_parameter)
    groups = [
        {**group, "params": list(filter(is_of_first_replica, group["params"]))}
        for group in source.optimizer.groups
    ]
    state = {name: of_name for name, of_name in state.items() if is_of_first_replica(name)}
    return {"model": model, "optim": {"state": state, "param_groups": groups}}
