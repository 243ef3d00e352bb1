"""From a table of state to what `write_checkpoint` takes: one manifest, and this rank's part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch

from shardwise import __version__
from shardwise.checkpoint.container import CHUNK_BYTES, DIGEST_BYTES, digest_of, memory_of
from shardwise.checkpoint.manifest import (
    FORMAT,
    PIECES_FORMAT,
    LayoutRow,
    Manifest,
    MeshRow,
    OptimizerRow,
    TensorRow,
    turn_of_key,
)
from shardwise.checkpoint.merge import Merged, key_of, merge, row_of
from shardwise.checkpoint.same_bits import check_stages
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import Item, Ranks, Table
from shardwise.checkpoint.write import Part
from shardwise.comm.control import Control
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box

_NOT_ALIKE = bytes(DIGEST_BYTES)  # in the place of a digest: this rank has what others have not


def assemble(control: Control, table: Table, run: str, step: int | None) -> tuple[Manifest, Part]:
    """Decide what is saved once and what by each rank; describe it.

    **Cost** one exchange of 32 bytes; a second of 16 bytes per tensor when ranks differ. Where
    groups of ranks have tensors of their own: Note [What ranks tell each other] in `merge`.

    **Raises** CheckpointError on all ranks when what they have does not fit together.
    """
    digests = [digest_of(_bytes_of(item.data)) for item in table.uncut]
    said = _exchange(control, table, digests)
    if said is not None:
        made = _of_alike(control, table, _differing(control, digests, said))
    else:
        merged = merge(control, table, digests)
        check_stages(control, table, merged)
        made = _of_groups(control, table, merged)
    first = made.meshes[0]
    manifest = Manifest(
        format=PIECES_FORMAT if said is None else FORMAT,
        shardwise=__version__,
        torch=torch.__version__,
        run=run,
        step=step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds") if control.rank == 0 else "",
        stage=table.stage,
        num_shards=len(first[0]),
        num_replicas=len(first),
        layouts=made.layouts,
        tensors=made.rows,
        tied=dict(made.tied),
        optimizer=made.optimizer,
        ranks=(),
        meshes=tuple(MeshRow(ranks=ranks) for ranks in made.meshes) if said is None else (),
    )
    own = (*table.own, *made.own)
    part = Part(
        rank=control.rank,
        read=lambda number, box: _read(made.items[number], box),
        own=[(_row(item), lambda item=item: _bytes_of(item.data)) for item in own],  # type: ignore[misc]
        values=table.values,
    )
    return manifest, part


@dataclass(frozen=True)
class _Made:
    """What the manifest says of all ranks; this rank's items by their rows, and those of its own.

    The first who has a tensor stands for all where nobody's own is asked for.
    """

    meshes: Sequence[Ranks]
    layouts: tuple[LayoutRow, ...]
    tied: Mapping[str, str]
    optimizer: OptimizerRow | None
    rows: tuple[TensorRow, ...]
    items: Mapping[int, Item]
    own: Sequence[Item]


def _of_alike(control: Control, table: Table, differing: Sequence[int]) -> _Made:
    """Describe what all ranks have alike."""
    ranks, rows = range(control.num_ranks), [_row(item) for item in table.sharded]
    for number, item in enumerate(table.uncut):
        writer = 0 if number in differing else _writer(item.info, number, ranks)
        rows.append(_row(item, writer))
    items = dict(enumerate((*table.sharded, *table.uncut)))
    own = [table.uncut[number] for number in differing if control.rank != 0]
    return _Made(table.meshes, table.layouts, table.tied, table.optimizer, tuple(rows), items, own)


def _of_groups(control: Control, table: Table, merged: Merged) -> _Made:
    """Describe what groups of ranks have; of all who could write a tensor, choose one."""
    rows, own = list[TensorRow](), list[Item]()
    mine = {key_of(item): item for item in (*table.sharded, *table.uncut)}
    for number, (key, places) in enumerate(merged.cut.items()):
        rows.append(row_of(key, *tuple(places)[number % len(places)]))
    for number, (key, held) in enumerate(merged.uncut.items()):
        writer = held.ranks[0] if held.differs else _writer(key.info, number, held.ranks)
        rows.append(row_of(key, rank=writer))
        if held.differs and key in mine and held.ranks[0] != control.rank:
            own.append(mine[key])
    keys = enumerate((*merged.cut, *merged.uncut))
    items = {number: mine[key] for number, key in keys if key in mine}
    return _Made(
        tuple(merged.meshes),
        tuple(merged.layouts),
        merged.tied,
        merged.optimizer,
        tuple(rows),
        items,
        own,
    )


def _row(item: Item, rank: int = 0) -> TensorRow:
    return row_of(key_of(item), item.layout, item.index, rank)


def written_items(table: Table, members: Sequence[int], rank: int) -> tuple[Item, ...]:
    """Return the cut tensors that this rank writes; its replicas write the others.

    Where groups of ranks hold one piece, all of it that each of them may have to write.
    """
    if table.is_alike:
        num_replicas, num_shards = len(table.meshes[0]), len(table.meshes[0][0])
        mine = rank // num_shards
        return tuple(item for n, item in enumerate(table.sharded) if n % num_replicas == mine)
    found = []
    for item in table.sharded:
        mesh = table.meshes[table.layouts[item.layout or 0].mesh]
        if members[rank] in mesh[turn_of_key(item.info.key, len(mesh))]:
            found.append(item)
    return tuple(found)


def _writer(info: TensorInfo, number: int, ranks: Sequence[int]) -> int:
    """Return who writes a whole tensor: large ones take turns, small ones are the first rank's.

    Every rank reads all of them: a thousand step counts must not be a thousand files to open.
    """
    is_large = info.num_bytes >= CHUNK_BYTES
    return ranks[number % len(ranks)] if is_large else ranks[0]


def _read(item: Item, box: Box) -> memoryview:
    return _bytes_of(item.data[box.lo - item.lo : box.hi - item.lo])


def _bytes_of(data: torch.Tensor) -> memoryview:
    return memory_of(data.detach().cpu().contiguous())


def _exchange(control: Control, table: Table, digests: Sequence[str]) -> list[bytes] | None:
    """Return what each rank says of its whole tensors; None where ranks have others than others.

    **Raises** CheckpointError when they have, and should not.
    """
    names = digest_of("\n".join(f"{item.info}" for item in table.uncut).encode())
    data = digest_of(b"".join(map(bytes.fromhex, digests)))
    mine = bytes.fromhex(names) if table.is_alike else _NOT_ALIKE
    rows = control.exchange(mine + bytes.fromhex(data))
    said = [row[:DIGEST_BYTES] for row in rows]
    if _NOT_ALIKE in said:
        return None
    other = [n for n, row in enumerate(said) if row != said[0]]
    if other:
        raise CheckpointError(
            f"rank {other[0]} has other buffers or optimizer state to save than rank 0. Was an "
            "optimizer stepped on some ranks only?"
        )
    return rows


def _differing(control: Control, digests: Sequence[str], said: Sequence[bytes]) -> list[int]:
    """Return which whole tensors are not the same on all ranks."""
    if all(row == said[0] for row in said):
        return []
    all_digests = control.exchange(b"".join(map(bytes.fromhex, digests)))
    return [
        number
        for number in range(len(digests))
        if len({row[DIGEST_BYTES * number :][:DIGEST_BYTES] for row in all_digests}) > 1
    ]
