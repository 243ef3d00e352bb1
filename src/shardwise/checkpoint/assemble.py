"""From a table of state to what `write_checkpoint` takes: one manifest, and this rank's part."""

from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from shardwise import __version__
from shardwise.checkpoint.container import memory_of
from shardwise.checkpoint.digest import CHUNK_BYTES, digest_of
from shardwise.checkpoint.manifest import Manifest, TensorRow
from shardwise.checkpoint.state import Item, Table
from shardwise.checkpoint.write import Part
from shardwise.comm.control import Control
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box

_DIGEST_BYTES = 16


def assemble(control: Control, table: Table, run: str, step: int | None) -> tuple[Manifest, Part]:
    """Decide what is saved once and what by each rank; describe it.

    **Cost** one exchange of 32 bytes; a second of 16 bytes per tensor when ranks differ.

    **Raises** CheckpointError on all ranks when they do not have the same tensors.
    """
    differing = _differing(control, table.whole)
    rows = [_row(item) for item in table.sharded]
    rows += [
        _row(item, rank=_writer(item, number, control.num_ranks) if number not in differing else 0)
        for number, item in enumerate(table.whole)
    ]
    manifest = Manifest(
        format=1,
        shardwise=__version__,
        torch=torch.__version__,
        run=run,
        step=step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds") if control.rank == 0 else "",
        stage=table.stage,
        num_shards=table.num_shards,
        num_replicas=table.num_replicas,
        layouts=table.layouts,
        tensors=tuple(rows),
        tied=dict(table.tied),
        optimizer=table.optimizer,
        ranks=(),
    )
    items = (*table.sharded, *table.whole)
    own = [*table.own]
    if control.rank != 0:  # rank 0's stands for all where nobody's own is asked for
        own += [table.whole[number] for number in differing]
    part = Part(
        rank=control.rank,
        read=lambda number, box: _read(items[number], box),
        own=[(_row(item), lambda item=item: _bytes_of(item.data)) for item in own],  # type: ignore[misc]
        values=table.values,
    )
    return manifest, part


def written_items(table: Table, rank: int) -> tuple[Item, ...]:
    """Return the cut tensors that this rank writes; its replicas write the others."""
    replica = rank // table.num_shards
    return tuple(item for n, item in enumerate(table.sharded) if n % table.num_replicas == replica)


def _writer(item: Item, number: int, num_ranks: int) -> int:
    """Return who writes a whole tensor: large ones take turns, small ones are rank 0's.

    Every rank reads all of them: a thousand step counts must not be a thousand files to open.
    """
    return number % num_ranks if item.data.nbytes >= CHUNK_BYTES else 0


def _row(item: Item, rank: int = 0) -> TensorRow:
    info = item.info
    return TensorRow(
        kind=info.kind,
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=info.shape,
        layout=item.layout,
        index=item.index,
        rank=rank,
    )


def _read(item: Item, box: Box) -> memoryview:
    return _bytes_of(item.data[box.lo - item.lo : box.hi - item.lo])


def _bytes_of(data: torch.Tensor) -> memoryview:
    return memory_of(data.detach().cpu().contiguous())


def _differing(control: Control, items: Sequence[Item]) -> list[int]:
    """Return which whole tensors are not the same on all ranks."""
    digests = [bytes.fromhex(digest_of(_bytes_of(item.data))) for item in items]
    names = "\n".join(f"{item.info}" for item in items)
    both = [bytes.fromhex(digest_of(data)) for data in (names.encode(), b"".join(digests))]
    rows = control.exchange(b"".join(both))
    other = [n for n, row in enumerate(rows) if row[:_DIGEST_BYTES] != rows[0][:_DIGEST_BYTES]]
    if other:
        raise CheckpointError(
            f"rank {other[0]} has other buffers or optimizer state to save than rank 0. Was an "
            "optimizer stepped on some ranks only?"
        )
    if all(row == rows[0] for row in rows):
        return []
    all_digests = control.exchange(b"".join(digests))
    return [
        number
        for number in range(len(items))
        if len({row[_DIGEST_BYTES * number :][:_DIGEST_BYTES] for row in all_digests}) > 1
    ]
