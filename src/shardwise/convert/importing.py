"""Write a `Source` of any format as a Shardwise checkpoint.

Note [As one rank would have saved it]
Every tensor is whole in the files of rank 0, and a load with any number of ranks, stage and layout
reads its own slices. The optimizer's groups and values and the user's own state are encoded as
`checkpoint.state` does it. Random generators are missing, because other formats do not keep them or
keep them as pickles: a load leaves the ranks' generators unchanged.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import ValidationError

from shardwise import __version__
from shardwise.checkpoint.container import bytes_of, dtype_name, memory_of
from shardwise.checkpoint.files import Files
from shardwise.checkpoint.folder import step_name, take_lock
from shardwise.checkpoint.manifest import Manifest, OptimizerRow, TensorRow
from shardwise.checkpoint.source import Kind, Source, TensorInfo
from shardwise.checkpoint.values import encode
from shardwise.checkpoint.write import NONCE_BYTES, Part, Progress, Written, write_checkpoint
from shardwise.comm.control import SoloControl
from shardwise.convert.pieces import PieceSource
from shardwise.errors import CheckpointError, ConfigError
from shardwise.layout.boxes import Box

_RUN_BYTES = 8


def import_source(
    source: Source,
    target: Path,
    *,
    files: Files,
    step: int | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write a source as a checkpoint that `shardwise.load` restores.

    The checkpoint is the folder ``target``, or with ``step`` the folder of that step in it, as with
    `shardwise.save`. Without ``step`` its step is the source's. With ``step`` the lock of
    ``target`` is held, because a run that saves there would remove the unfinished folder.
    ``progress`` is called with the bytes of each tensor of the source.
    See Note [As one rank would have saved it].

    **Cost** one pass over the source, one tensor in memory at a time.

    **Raises** CheckpointError when the target exists or a run is saving there, when the disk fails,
    and when the source has no tensors or a value that cannot be saved; DamagedCheckpoint when its
    bytes are not right. No checkpoint is left then.
    """
    infos = [info for info in source.tensors if info.kind != "extra"]
    if not infos:
        raise CheckpointError(f"{source.where} holds no tensors: there is nothing to import")
    optimizer: OptimizerRow | None = None
    loose: Mapping[str, torch.Tensor] = {}  # tensors of the optimizer that no parameter has
    if source.optimizer is not None:
        of = source.optimizer
        groups, loose = encode([dict(group) for group in of.groups], "groups")
        state, loose = encode(
            {name: dict(values) for name, values in of.state.items()}, "state", loose
        )
        optimizer = OptimizerRow(class_name=of.class_name, groups=groups, state=state)
    extra, own = encode(dict(source.extra), "extra")
    rows = [_row(info) for info in infos]
    rows += [_tensor_row("optimizer", "", tensor, place) for place, tensor in loose.items()]
    tensors = list(loose.values())

    def read(number: int, box: Box) -> memoryview:
        if number >= len(infos):
            return bytes_of(tensors[number - len(infos)])
        data = memory_of(source.read(infos[number], box.lo, box.hi))
        if progress is not None:
            progress(len(data))
        return data

    manifest = _manifest(source, source.step if step is None else step, rows, optimizer)
    part = Part(
        rank=0,
        read=read,
        own=[
            (_tensor_row("extra", place, tensor), lambda tensor=tensor: bytes_of(tensor))  # type: ignore[misc]
            for place, tensor in own.items()
        ],
        values={"extra": extra, "modules": {}, "generators": {}},
    )
    nonce = os.urandom(NONCE_BYTES)
    control = SoloControl()
    if step is None:
        return write_checkpoint(files, control, target, nonce, manifest, part)
    lock = take_lock(files, target, manifest.run)
    try:
        return write_checkpoint(files, control, target / step_name(step), nonce, manifest, part)
    finally:
        lock.release()


def without_prefix(source: PieceSource, prefix: str) -> PieceSource:
    """Return a source whose names lose ``prefix`` where they begin with it, as ``module.``.

    **Raises** ConfigError when no name begins with it, or when two names would become one.
    """
    groups = source.optimizer.groups if source.optimizer is not None else ()
    state = source.optimizer.state if source.optimizer is not None else {}
    names = {*(info.name for info in source.tensors), *source.tied, *source.tied.values(), *state}
    names |= {name for group in groups for name in group["params"]}
    if not prefix or not any(name.startswith(prefix) for name in names):
        such = ", ".join(sorted(names)[:3])
        raise ConfigError(
            f"{source.where}: no name begins with {prefix!r}; they are such as {such}"
        )
    originals: dict[str, str] = {}
    for name in sorted(names):
        new = name.removeprefix(prefix)
        if originals.setdefault(new, name) != name:
            both = f"'{originals[new]}' and '{name}'"
            raise ConfigError(f"{source.where}: without {prefix!r}, {both} would be one name")
    short = {name: new for new, name in originals.items()}
    optimizer = source.optimizer and replace(
        source.optimizer,
        groups=tuple({**g, "params": [short[name] for name in g["params"]]} for g in groups),
        state={short[name]: values for name, values in state.items()},
    )
    index = {replace(i, name=short[i.name]): pieces for i, pieces in source.index.items()}
    tied = {short[alias]: short[name] for alias, name in source.tied.items()}
    return replace(source, index=index, optimizer=optimizer, tied=tied)


def _manifest(
    source: Source, step: int | None, rows: list[TensorRow], optimizer: OptimizerRow | None
) -> Manifest:
    try:
        return Manifest(
            format=1,
            shardwise=__version__,
            torch=torch.__version__,
            run=os.urandom(_RUN_BYTES).hex(),
            step=step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            stage=0,
            num_shards=1,
            num_replicas=1,
            layouts=(),
            tensors=tuple(rows),
            tied=dict(source.tied),
            optimizer=optimizer,
            ranks=(),
        )
    except ValidationError as error:
        raise _refusal(source.where, error) from None


def _row(info: TensorInfo) -> TensorRow:
    try:
        return TensorRow(**vars(info))
    except ValidationError as error:
        raise _refusal(f"tensor '{info.key}'", error) from None


def _refusal(where: str, error: ValidationError) -> CheckpointError:
    return CheckpointError(f"{where} cannot be saved: {error.errors()[0]['msg']}")


def _tensor_row(kind: Kind, name: str, tensor: torch.Tensor, state: str = "") -> TensorRow:
    dtype = dtype_name(tensor.dtype, f"{name}{state}")
    return _row(TensorInfo(kind, name, dtype, tuple(tensor.shape), state))
