"""From each rank's table of state to one manifest, and this rank's part of the checkpoint.

Note [Descriptions of ranks]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank describes its tensors, without a byte of one. Ranks with the same description are found by
a digest. If there are several such groups, the first rank of each sends its description to all.
Every rank merges the same descriptions in the same order, so all have one manifest, or raise one
error. If all ranks have the same tensors, cut over one mesh, no description is sent.

Note [A sum that no cut changes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Pipeline stages may cut a tied tensor at different places, so digests of slices cannot be compared.
Each rank hashes every element of its slice together with its place in the tensor, and sums the
hashes modulo 2^64; the sum over a stage's slices is the tensor's, for any cut. Only tensors that
several stages have are read, and eight bytes of each are exchanged.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from reprlib import repr as shown
from typing import Any

import torch

from shardwise import __version__
from shardwise.checkpoint.all_ranks import rows_of_all_ranks
from shardwise.checkpoint.container import CHUNK_BYTES, DIGEST_BYTES, bytes_of, digest_of
from shardwise.checkpoint.manifest import (
    FORMAT,
    PIECES_FORMAT,
    Count,
    Key,
    LayoutRow,
    Manifest,
    MeshRow,
    Name,
    OptimizerRow,
    Rows,
    SealedPart,
    TensorRow,
    is_grid,
    turn_of_key,
)
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import Item, Ranks, Table
from shardwise.checkpoint.write import Part
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import Control, exchange_any
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Box, Region

_HINT = "Was an optimizer stepped on some ranks only?"
_HASHED_ELEMENTS = 1 << 22  # at once
_OnMesh = tuple[int, Key, tuple[int, int]]  # a mesh, and a tensor's layout and index there
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MIX = (-7046029254386353131, -4658895280553007687)  # of splitmix64, as signed numbers


class Described(SealedPart):
    """One rank's tensors and settings, as the other ranks need to know them."""

    run: Name
    step: Count | None
    stage: int
    meshes: Rows[MeshRow]
    layouts: Rows[LayoutRow]
    cut: Rows[TensorRow]
    uncut: Rows[TensorRow]
    tied: dict[Name, Name]
    optimizer: OptimizerRow | None
    own_mesh_params: Rows[Name]
    is_uniform: bool
    takes_turns: bool  # only the tensors were copied that this rank writes if all ranks are equal


@dataclass
class Assembled:
    """The last manifest of a series of saves, if all ranks had the same tensors.

    The next one differs in run, step and the optimizer's settings alone, while ``rows`` are the
    same objects. ``digest`` is that of their description.
    """

    rows: tuple[object, ...] = ()
    digest: str = ""
    manifest: Manifest | None = None


@dataclass
class _Group:
    """Ranks with one description; of each of their whole tensors, the digests on these ranks."""

    ranks: list[int]
    description: Described
    digests: list[set[bytes]]


@dataclass
class Merged:
    """The tensors of all ranks.

    ``cut`` has a row for each layout and index at which a tensor is cut. ``uncut`` has the row of a
    whole tensor, the groups that hold it, and its digests; if they are several, each rank saves its
    own.
    """

    optimizer: OptimizerRow | None
    is_uniform: bool
    meshes: dict[Ranks, int] = field(default_factory=dict)
    layouts: list[LayoutRow] = field(default_factory=list)
    cut: dict[Key, dict[tuple[int, int], TensorRow]] = field(default_factory=dict)
    uncut: dict[Key, tuple[TensorRow, list[_Group], set[bytes]]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def assemble(
    control: Control,
    table: Table,
    run: str,
    step: int | None,
    before: Callable[[], None] = lambda: None,
    last: Assembled | None = None,
) -> tuple[Manifest, Part]:
    """Decide which tensors are saved once and which by each rank; describe them.

    When it returns, ``before`` has been called on all ranks. ``last`` is of the save before this
    one, and is brought up to date.

    **Cost** one exchange of 33 bytes; 16 bytes per whole tensor when ranks differ. If groups of
    ranks have different tensors, their names and shapes: Note [Descriptions of ranks].

    **Raises** CheckpointError on all ranks when their tables do not fit together.
    """
    last = last or Assembled()
    groups = _groups_of(control, table, run, step, before, last)
    own = [(item.row, partial(bytes_of, item.data)) for item in table.own]
    mine = {item.row.key: item for item in (*table.sharded, *table.uncut)}
    if groups is None:
        assert last.manifest is not None
        news = {"run": run, "step": step, "optimizer": table.optimizer}
        manifest = last.manifest.model_copy(update=news)
        keys = [row.key for row in manifest.tensors]
        return manifest, Part(control.rank, _reader(mine, keys), own, table.values)
    merged = merge(groups)
    _check_tied_copies(control, table, merged)
    rows = list[TensorRow]()
    for number, places in enumerate(merged.cut.values()):
        rows.append(list(places.values())[number % len(places)])
    for number, (key, (row, groups, found)) in enumerate(merged.uncut.items()):
        writer = groups[0].ranks[0]
        if len(found) > 1 and key in mine and writer != control.rank:
            own.append((mine[key].row, partial(bytes_of, mine[key].data)))
        # Every rank reads all of them: a thousand step counts must not be a thousand files to open.
        if len(found) == 1 and key.info.num_bytes >= CHUNK_BYTES:
            ranks = [rank for group in groups for rank in group.ranks]
            writer = ranks[number % len(ranks)]
        rows.append(row.model_copy(update={"rank": writer}) if writer else row)
    meshes = tuple(merged.meshes)
    manifest = Manifest(
        format=FORMAT if merged.is_uniform else PIECES_FORMAT,
        shardwise=__version__,
        torch=torch.__version__,
        run=run,
        step=step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds") if control.rank == 0 else "",
        stage=table.stage,
        num_shards=len(meshes[0][0]),
        num_replicas=len(meshes[0]),
        layouts=tuple(merged.layouts),
        tensors=tuple(rows),
        tied=dict(merged.tied),
        optimizer=merged.optimizer,
        ranks=(),
        meshes=() if merged.is_uniform else tuple(MeshRow(ranks=ranks) for ranks in meshes),
    )
    if len(groups) == 1 and all(len(found) == 1 for _, _, found in merged.uncut.values()):
        last.manifest = manifest
        manifest.files_of(control.rank, [row for row, _ in own])  # the next ones have this answer
    keys = [*merged.cut, *merged.uncut]
    return manifest, Part(control.rank, _reader(mine, keys), own, table.values)


def _reader(mine: Mapping[Key, Item], keys: Sequence[Key]) -> Callable[[int, Box], memoryview]:
    """Return a function that reads a box of a tensor of the manifest."""

    def read(number: int, box: Box) -> memoryview:
        item = mine[keys[number]]
        return bytes_of(item.data[box.lo - item.lo : box.hi - item.lo])

    return read


def items_to_write(table: Table, control: Control) -> list[Item]:
    """List the tensors that this rank writes, or may write; of cut ones, its replicas write others.

    If groups of ranks hold one piece, it includes every piece that this rank may have to write.
    """
    found = []
    for number, item in enumerate(table.sharded):
        mesh = table.meshes[table.layouts[item.row.layout or 0].mesh]
        if table.is_uniform:
            is_mine = number % len(mesh) == control.rank // len(mesh[0])
        else:
            turn = turn_of_key(item.info.key, len(mesh))
            is_mine = control.members[control.rank] in mesh[turn]
        found += [item] if is_mine else []
    return [*found, *table.uncut, *table.own]


# -- descriptions of ranks


def _groups_of(
    control: Control,
    table: Table,
    run: str,
    step: int | None,
    before: Callable[[], None],
    last: Assembled,
) -> list[_Group] | None:
    """Return what all ranks have, the group of rank 0 first. See Note [Descriptions of ranks].

    None: all ranks have what they had in ``last``.
    """
    digests = [bytes.fromhex(digest_of(bytes_of(item.data))) for item in table.uncut]
    rows_here = _rows_of(table)
    is_same = last.manifest is not None and rows_here == last.rows

    def describe() -> bytes:
        before()
        if not is_same:
            static = _describe(control, table, "", None, None).model_dump_json()
            last.rows, last.digest, last.manifest = rows_here, digest_of(static.encode()), None
        optimizer = "" if table.optimizer is None else table.optimizer.model_dump_json()
        settings = f"{last.digest} {run} {step} {optimizer}"
        return bytes.fromhex(digest_of(settings.encode()) + digest_of(b"".join(digests)))

    rows = rows_of_all_ranks(control, describe, 2 * DIGEST_BYTES)
    if is_same and all(row == rows[0] for row in rows):
        return None
    mine = _describe(control, table, run, step, table.optimizer)
    same: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows):
        same.setdefault(row[:DIGEST_BYTES], []).append(rank)
    is_one, held = len(same) == 1, [b"".join(digests)] * len(rows)
    if any(row != rows[0] for row in rows):
        held = exchange_any(control, held[0])
    groups = []
    for ranks in same.values():
        description = mine
        if not is_one:
            text = control.broadcast(description.model_dump_json().encode(), ranks[0])
            description = Described.model_validate_json(text)
        found = {held[rank] for rank in ranks}
        ends = range(0, len(held[ranks[0]]), DIGEST_BYTES)
        of_each = [{data[at : at + DIGEST_BYTES] for data in found} for at in ends]
        groups.append(_Group(ranks, description, of_each))
    return groups


def _rows_of(table: Table) -> tuple[object, ...]:
    """Return what decides on a manifest, but for run, step and settings of the optimizer.

    Rows are kept from save to save, so that a comparison is one of identities.
    """
    rows = tuple(item.row for item in (*table.sharded, *table.uncut))
    settings = table.stage, table.is_uniform, table.is_staged, table.own_mesh_params, table.place
    layouts = tuple((row.kind, row.shapes, row.mesh) for row in table.layouts)
    return rows, len(table.sharded), table.meshes, layouts, tuple(table.tied.items()), settings


def _describe(
    control: Control, table: Table, run: str, step: int | None, optimizer: OptimizerRow | None
) -> Described:
    numbers = {member: number for number, member in enumerate(control.members)}
    if table.is_uniform:  # the meshes of one process alone are not those of its group
        numbers = {rank: rank for mesh in table.meshes for row in mesh for rank in row}
    strange = {r for mesh in table.meshes for row in mesh for r in row} - numbers.keys()
    if strange:
        raise CheckpointError(
            f"{name_ranks(sorted(strange))} of a mesh is not among those that save: "
            f"{name_ranks(list(control.members))}"
        )
    meshes = [tuple(tuple(numbers[rank] for rank in row) for row in m) for m in table.meshes]
    return Described.model_construct(  # its rows are valid already
        run=run,
        step=step,
        stage=table.stage,
        meshes=tuple(MeshRow(ranks=ranks) for ranks in meshes),
        layouts=table.layouts,
        cut=tuple(item.row for item in table.sharded),
        uncut=tuple(item.row for item in table.uncut),
        tied=dict(table.tied),
        optimizer=optimizer,
        own_mesh_params=table.own_mesh_params,
        is_uniform=table.is_uniform,
        takes_turns=table.is_uniform and table.is_staged and len(table.meshes[0]) > 1,
    )


def merge(groups: Sequence[_Group]) -> Merged:
    """Merge descriptions, in the order of each group's first rank.

    **Raises** CheckpointError, the same on all ranks, naming the ranks that do not fit together.
    """
    first, is_uniform = groups[0].description, all(group.description.is_uniform for group in groups)
    for group in groups:
        if group.description.takes_turns and not is_uniform:
            raise CheckpointError(
                f"{name_ranks(group.ranks)} cut all over one mesh with replicas, and other ranks "
                "have units of further meshes: save such a model with shardwise.save()"
            )
        for name in ("stage", "step", "run"):
            here, there = getattr(first, name), getattr(group.description, name)
            if here != there:
                raise CheckpointError(
                    f"rank 0 is at {name} {here}, {name_ranks(group.ranks)} at {name} {there}"
                )
    merged = Merged(_merged_optimizer(groups), is_uniform)
    numbers: dict[LayoutRow, int] = {}
    held: dict[_OnMesh, set[int]] = {}  # the groups that have a tensor
    for number, group in enumerate(groups):
        description = group.description
        meshes = [merged.meshes.setdefault(m.ranks, len(merged.meshes)) for m in description.meshes]
        moved = [row.model_copy(update={"mesh": meshes[row.mesh]}) for row in description.layouts]
        layouts = [numbers.setdefault(row, len(numbers)) for row in moved]
        if is_uniform:  # in format 1 each unit has a layout of its own
            layouts = list(range(len(moved)))
        for row in description.cut:
            assert row.layout is not None and row.index is not None
            key, place = row.key, (layouts[row.layout], row.index)
            moved_row = row if is_uniform else row.model_copy(update={"layout": place[0]})
            merged.cut.setdefault(key, {}).setdefault(place, moved_row)
            held.setdefault((moved[row.layout].mesh, key, place), set()).add(number)
        for row, digests in zip(description.uncut, group.digests, strict=True):
            _, holders, found = merged.uncut.setdefault(row.key, (row, [], set()))
            holders.append(group)
            found |= digests
        for name, holder in description.tied.items():
            if merged.tied.setdefault(name, holder) != holder:
                both = f"'{merged.tied[name]}' and '{holder}'"
                raise CheckpointError(f"'{name}' is another name of {both} on different ranks")
    merged.layouts = list(first.layouts if is_uniform else numbers)
    _check_meshes(groups, merged, held)
    if is_uniform and len(groups) > 1:
        lacking = [
            key.info.key for key, (_, on, _) in merged.uncut.items() if len(on) < len(groups)
        ]
        raise CheckpointError(
            f"rank {groups[1].ranks[0]} has other buffers or optimizer state to save than rank 0"
            f"{f': {lacking[0]!r} is not on both' if lacking else ''}. {_HINT}"
        )
    if not is_uniform:  # else each tensor is the same on all ranks, and none is in pieces
        _check_tensors(groups, merged)
    return merged


def _check_meshes(
    groups: Sequence[_Group], merged: Merged, held: Mapping[_OnMesh, set[int]]
) -> None:
    """Check that ranks which cut tensors together have the same ones."""
    group_of = {rank: number for number, group in enumerate(groups) for rank in group.ranks}
    meshes = [[rank for replica in table for rank in replica] for table in merged.meshes]
    groups_in = [{group_of[rank] for rank in ranks} for ranks in meshes]
    for (mesh, key, _), having in held.items():
        if groups_in[mesh] - having:
            first, *others = meshes[mesh]
            has_it = group_of[first] in having
            rank = next(rank for rank in others if (group_of[rank] in having) != has_it)
            raise CheckpointError(
                f"rank {rank} has other tensors to save than rank {first}, with which it cuts "
                f"them: '{key.info.key}' is not the same on both. {_HINT}"
            )


def _check_tensors(groups: Sequence[_Group], merged: Merged) -> None:
    """Check that each tensor is the same on all its ranks, and that no piece is missing."""
    infos: dict[str, tuple[TensorInfo, str]] = {}
    pieces: dict[TensorInfo, list[Region]] = {}
    for what, listed in (("cut", merged.cut), ("whole", merged.uncut)):
        for info, region in listed:
            pieces.setdefault(info, []).append(region)
            first, how = infos.setdefault(info.key, (info, what))
            if (first, how) != (info, what):
                raise CheckpointError(
                    f"'{info.key}' is {first.kind} {first.dtype} {first.shape}, {how}, on "
                    f"{_holders(groups, first)}, and {info.kind} {info.dtype} {info.shape}, "
                    f"{what}, on {_holders(groups, info)}"
                )
    for info, regions in pieces.items():
        is_one = len(regions) == 1 and regions[0].shape == info.shape
        if not is_one and not is_grid(info.shape, regions):
            raise CheckpointError(
                f"'{info.key}' {info.shape}: its pieces, on {_holders(groups, info)}, are not the "
                f"whole tensor. {_HINT}"
            )
    own_mesh_params = {name for group in groups for name in group.description.own_mesh_params}
    for (info, _), places in merged.cut.items():
        if info.name in own_mesh_params and len(places) > 1:
            raise CheckpointError(
                f"'{info.name}' has a mesh of its own, and on {_holders(groups, info)} there are "
                f"{len(places)} of that name: whether they are one tensor is not known. Make it a "
                "DTensor, whose placements say so, or give each another name"
            )
    for name, holder in merged.tied.items():
        if name in infos:
            raise CheckpointError(
                f"'{name}' is another name of '{holder}' on some ranks, and a tensor of its own on "
                f"{_holders(groups, infos[name][0])}"
            )


def _holders(groups: Sequence[_Group], info: TensorInfo) -> str:
    """Name the ranks that have some of a tensor."""
    found = [
        rank
        for group in groups
        if any(row.info == info for row in (*group.description.cut, *group.description.uncut))
        for rank in group.ranks
    ]
    return name_ranks(sorted(found))


def _merged_optimizer(groups: Sequence[_Group]) -> OptimizerRow | None:
    """Merge what optimizers hold beside tensors: equal settings, and all ranks' parameters."""
    rows = [(name_ranks(group.ranks), group.description.optimizer) for group in groups]
    first_ranks, first = rows[0]
    merged: list[Any] = []
    state: dict[str, object] = {}
    for ranks, row in rows:
        kinds = [f"{o.class_name} {len(o.groups)} groups" if o else "none" for o in (first, row)]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"the optimizer is {kinds[0]} on {first_ranks}, {kinds[1]} on {ranks}: all ranks "
                "save theirs, of one kind and with as many groups"
            )
        if row is None:
            continue
        for number, group in enumerate(row.groups):
            if row is first:
                merged.append({**group, "params": {}})
            ours = merged[number]
            for key in (ours.keys() | group.keys()) - {"params"}:
                if ours.get(key, ...) != group.get(key, ...):
                    raise CheckpointError(
                        f"optimizer: '{key}' of group {number} is {shown(group.get(key))} on "
                        f"{ranks} and {shown(ours.get(key))} on {first_ranks}: a checkpoint has one"
                    )
            ours["params"] |= dict.fromkeys(group["params"])
        for name, values in row.state.items():
            if state.setdefault(name, values) != values:
                raise CheckpointError(
                    f"optimizer: the values of '{name}' on {ranks} are not those of other ranks"
                )
    if first is None:
        return None
    listed = [{**group, "params": list(group["params"])} for group in merged]
    return first.model_copy(update={"groups": listed, "state": state})


# -- tied copies: tensors that several pipeline stages have under one name


def drop_copies(table: Table) -> Table:
    """Drop the second copy of tensors that two stages of this rank have.

    **Raises** CheckpointError naming a tensor whose copies differ.
    """
    found: dict[Key, Item] = {}
    for item in (*table.sharded, *table.uncut):
        first = found.setdefault(item.row.key, item)
        if first is item:
            continue
        if first.lo != item.lo or first.data.numel() != item.data.numel():
            raise CheckpointError(
                f"'{item.info.key}' is in two stages of this rank, cut at other places; shard both "
                "with layout='rows', or give each another name"
            )
        if fingerprint(first) != fingerprint(item):
            raise _copies_differ(item.info.key, "two stages of this rank")
    kept = {id(item) for item in found.values()}
    sharded, uncut = (
        tuple(item for item in items if id(item) in kept) for items in (table.sharded, table.uncut)
    )
    return replace(table, sharded=sharded, uncut=uncut)


def _check_tied_copies(control: Control, table: Table, merged: Merged) -> None:
    """Compare the tensors that several stages have. See Note [A sum that no cut changes].

    **Cost** nothing if no tensor is; otherwise a pass over them, and one exchange.

    **Raises** CheckpointError, the same on all ranks, naming the key and the stages.
    """
    shared = [key for key, places in merged.cut.items() if len(places) > 1]
    if not shared or table.place is None:
        return
    mine = {item.row.key: item for item in table.sharded}
    sums = [fingerprint(mine[key]) if key in mine else 0 for key in shared]
    gathered = control.exchange(b"".join(n.to_bytes(8, "big") for n in (table.place, *sums)))
    rows = [
        [int.from_bytes(row[n : n + 8], "big") for n in range(0, len(row), 8)] for row in gathered
    ]
    meshes, layouts = list(merged.meshes), list(merged.layouts)
    for number, key in enumerate(shared, 1):
        found: dict[int, tuple[int, list[int]]] = {}  # by stage: the tensor's sum, and its ranks
        for layout, _ in merged.cut[key]:
            ranks = meshes[layouts[layout].mesh][0]  # of the first replica
            total = sum(rows[rank][number] for rank in ranks) % (1 << 64)
            found.setdefault(rows[ranks[0]][0], (total, list(ranks)))
        if len({total for total, _ in found.values()}) > 1:
            where = " and ".join(
                f"stage {stage} ({name_ranks([control.members[r] for r in ranks])})"
                for stage, (_, ranks) in sorted(found.items())
            )
            raise _copies_differ(key.info.key, where)


def _copies_differ(key: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"'{key}' has other values in {where}, and a checkpoint has one tensor of a name. If it is "
        "one parameter (tied embeddings), call shardwise.parallel.tie() once the stages are "
        "sharded; otherwise give each stage's another name"
    )


@torch.no_grad()
def fingerprint(item: Item) -> int:
    """Return the sum of this rank's hashes. See Note [A sum that no cut changes]."""
    data = item.data.detach().contiguous()
    flat = data.view(_INTEGERS.get(data.element_size(), torch.int32))
    first = item.lo * data.element_size() // flat.element_size()
    total = 0
    for begin in range(0, flat.numel(), _HASHED_ELEMENTS):
        values = flat[begin : begin + _HASHED_ELEMENTS].long()
        at = first + begin
        places = torch.arange(at, at + values.numel(), device=values.device)
        mixed = (values * _MIX[0]) ^ ((places + 1) * _MIX[1])
        mixed = (mixed ^ (mixed >> 31)) * _MIX[0]
        total += int(((mixed ^ (mixed >> 29)) * _MIX[1]).sum())
    return total % (1 << 64)
