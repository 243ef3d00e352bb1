"""One description of a model of which each rank knows only its own units and pieces.

Note [What ranks tell each other]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Where all ranks have the same tensors, cut over one mesh, nothing of them is sent. Elsewhere each
rank describes what it has, without a byte of a cut tensor; ranks that would say the same are found
by a digest, and the first of each such group is heard by all. Everybody then merges the same
descriptions in the same order, so that all have one manifest, or raise one error.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any, NamedTuple

from shardwise.checkpoint.all_ranks import on_all_ranks
from shardwise.checkpoint.digest import DIGEST_BYTES, digest_of
from shardwise.checkpoint.manifest import LayoutRow, MeshRow, OptimizerRow, TensorRow
from shardwise.checkpoint.pieces import is_grid
from shardwise.checkpoint.sealed import Digest, Name, Part, Rows, seal, unseal, validated
from shardwise.checkpoint.source import TensorInfo
from shardwise.checkpoint.state import Item, Ranks, Table
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import Control
from shardwise.errors import CheckpointError
from shardwise.layout.boxes import Region, full_region

_HINT = "Was an optimizer stepped on some ranks only?"


class Described(Part):
    """What one rank has, with the digests of the tensors that it has whole."""

    stage: int
    meshes: Rows[MeshRow]
    layouts: Rows[LayoutRow]
    cut: Rows[TensorRow]
    uncut: Rows[TensorRow]
    digests: Rows[Digest]
    tied: dict[Name, Name]
    optimizer: OptimizerRow | None
    apart: Rows[Name]
    takes_turns: bool  # a copy was made only of what is written where all ranks are alike


class Key(NamedTuple):
    """A tensor, or a piece of one, by what all who hold it say of it."""

    info: TensorInfo
    region: Region


@dataclass
class Held:
    """Who has a whole tensor, and the digest that each of them has of it."""

    ranks: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Tell whether it is not the same on all that have it."""
        return len(set(self.digests)) > 1


@dataclass
class Merged:
    """What all ranks have together; a tensor that is cut with each place that it is cut at."""

    meshes: dict[Ranks, int]
    layouts: dict[LayoutRow, int]
    cut: dict[Key, dict[tuple[int, int], None]]
    uncut: dict[Key, Held]
    tied: dict[str, str]
    optimizer: OptimizerRow | None


def key_of(item: Item | TensorRow) -> Key:
    """Return what an item or a row is known by."""
    if isinstance(item, TensorRow):
        return Key(item.info, item.region)
    return Key(item.info, item.piece or full_region(item.info.shape))


def row_of(
    key: Key, layout: int | None = None, index: int | None = None, rank: int = 0
) -> TensorRow:
    """Describe a tensor, or a piece, and where it lies."""
    info, region = key
    is_piece = region.shape != info.shape
    return TensorRow(
        kind=info.kind,
        name=info.name,
        state=info.state,
        dtype=info.dtype,
        shape=region.shape,
        layout=layout,
        index=index,
        rank=rank,
        at=region.at if is_piece else (),
        of=info.shape if is_piece else (),
    )


def merge(control: Control, table: Table, digests: Sequence[str]) -> Merged:
    """Return what all ranks have together. See Note [What ranks tell each other].

    ``digests`` are those of the table's whole tensors.

    **Cost** one exchange of 16 bytes; from one rank of each group, the names and shapes of what it
    has, to all.

    **Raises** CheckpointError, the same on all ranks, naming those that do not fit together.
    """
    said: list[bytes] = []

    def describe() -> bytes:
        said.append(seal(_describe(control, table, digests)))
        return bytes.fromhex(digest_of(said[0]))

    rows = on_all_ranks(control, describe, DIGEST_BYTES)
    groups: dict[bytes, list[int]] = {}
    for rank, row in enumerate(rows):
        groups.setdefault(row, []).append(rank)
    heard = []
    for ranks in groups.values():
        data = control.broadcast(said[0], ranks[0])
        where = f"what {name_ranks(ranks)} described"
        heard.append((ranks, validated(Described, unseal(data, where), where)))
    return _merged(heard)


def _describe(control: Control, table: Table, digests: Sequence[str]) -> Described:
    numbers = {member: number for number, member in enumerate(control.members)}
    strange = {r for mesh in table.meshes for row in mesh for r in row} - numbers.keys()
    if strange:
        raise CheckpointError(
            f"{name_ranks(sorted(strange))} of a mesh is not among those that save: "
            f"{name_ranks(list(control.members))}"
        )
    meshes = [tuple(tuple(numbers[rank] for rank in row) for row in m) for m in table.meshes]
    return Described(
        stage=table.stage,
        meshes=tuple(MeshRow(ranks=ranks) for ranks in meshes),
        layouts=table.layouts,
        cut=tuple(row_of(key_of(item), item.layout, item.index) for item in table.sharded),
        uncut=tuple(row_of(key_of(item)) for item in table.uncut),
        digests=tuple(digests),
        tied=dict(table.tied),
        optimizer=table.optimizer,
        apart=table.apart,
        takes_turns=table.is_alike and table.is_staged and len(table.meshes[0]) > 1,
    )


_Heard = Sequence[tuple[Sequence[int], Described]]


def _merged(heard: _Heard) -> Merged:
    """Merge descriptions, in the order of the first ranks that gave them."""
    for ranks, one in heard:
        if one.takes_turns:
            raise CheckpointError(
                f"{name_ranks(ranks)} cut all over one mesh with replicas, and other ranks have "
                "units of further meshes: save such a model with shardwise.save()"
            )
        if one.stage != heard[0][1].stage:
            first, other = heard[0][1].stage, one.stage
            raise CheckpointError(
                f"rank {heard[0][0][0]} is at stage {first}, {name_ranks(ranks)} at stage {other}"
            )
    made = Merged({}, {}, {}, {}, {}, _optimizer(heard))
    over: list[dict[int, set[tuple[Key, int, int]]]] = []  # of each description, by mesh
    for ranks, one in heard:
        meshes = [made.meshes.setdefault(m.ranks, len(made.meshes)) for m in one.meshes]
        moved = [row.model_copy(update={"mesh": meshes[row.mesh]}) for row in one.layouts]
        layouts = [made.layouts.setdefault(row, len(made.layouts)) for row in moved]
        over.append({})
        for row in one.cut:
            assert row.layout is not None and row.index is not None
            key, place = key_of(row), (layouts[row.layout], row.index)
            made.cut.setdefault(key, {})[place] = None
            over[-1].setdefault(moved[row.layout].mesh, set()).add((key, *place))
        for row, digest in zip(one.uncut, one.digests, strict=True):
            held = made.uncut.setdefault(key_of(row), Held())
            held.ranks += ranks
            held.digests += [digest] * len(ranks)
        for name, holder in one.tied.items():
            if made.tied.setdefault(name, holder) != holder:
                both = f"'{made.tied[name]}' and '{holder}'"
                raise CheckpointError(f"'{name}' is another name of {both} on different ranks")
    _check_meshes(heard, made, over)
    _check_tensors(heard, made)
    return made


def _check_meshes(
    heard: _Heard, made: Merged, over: Sequence[Mapping[int, set[tuple[Key, int, int]]]]
) -> None:
    """Refuse ranks that cut tensors together and do not mean the same ones."""
    group_of = {rank: number for number, (ranks, _) in enumerate(heard) for rank in ranks}
    for table, mesh in made.meshes.items():
        first, *others = [rank for replica in table for rank in replica]
        mine = over[group_of[first]].get(mesh, set())
        for number in dict.fromkeys(group_of[rank] for rank in others):
            theirs = over[number].get(mesh, set())
            if theirs != mine:
                other = next(rank for rank in others if group_of[rank] == number)
                name = min(key.info.key for key, *_ in mine ^ theirs)
                raise CheckpointError(
                    f"rank {other} has other tensors to save than rank {first}, with which it cuts "
                    f"them: '{name}' is not the same on both. {_HINT}"
                )


def _check_tensors(heard: _Heard, made: Merged) -> None:
    """Refuse tensors that are not the same to all who have them, or lack a piece."""
    infos: dict[str, tuple[TensorInfo, str]] = {}
    pieces: dict[TensorInfo, list[Region]] = {}
    for what, listed in (("cut", made.cut), ("whole", made.uncut)):
        for info, region in listed:
            pieces.setdefault(info, []).append(region)
            first, how = infos.setdefault(info.key, (info, what))
            if (first, how) != (info, what):
                raise CheckpointError(
                    f"'{info.key}' is {first.kind} {first.dtype} {first.shape}, {how}, on "
                    f"{_who(heard, first)}, and {info.kind} {info.dtype} {info.shape}, {what}, on "
                    f"{_who(heard, info)}"
                )
    for info, regions in pieces.items():
        is_one = len(regions) == 1 and regions[0].shape == info.shape
        if not is_one and not is_grid(info.shape, regions):
            raise CheckpointError(
                f"'{info.key}' {info.shape}: its pieces, on {_who(heard, info)}, are not the "
                f"whole tensor. {_HINT}"
            )
    apart = {name for _, one in heard for name in one.apart}
    for (info, _), places in made.cut.items():
        if info.name in apart and len(places) > 1:
            raise CheckpointError(
                f"'{info.name}' lies on a mesh of its own, and on {_who(heard, info)} there are "
                f"{len(places)} of that name: whether they are one tensor is not known. Make it a "
                "DTensor, whose placements say so, or give each a name of its own"
            )
    for name, holder in made.tied.items():
        if name in infos:
            raise CheckpointError(
                f"'{name}' is another name of '{holder}' on some ranks, and a tensor of its own on "
                f"{_who(heard, infos[name][0])}"
            )


def _who(heard: _Heard, info: TensorInfo) -> str:
    """Name the ranks that have some of a tensor."""
    found = [
        rank
        for ranks, one in heard
        if any(row.info == info for row in (*one.cut, *one.uncut))
        for rank in ranks
    ]
    return name_ranks(sorted(found))


def _optimizer(heard: _Heard) -> OptimizerRow | None:
    """Merge what optimizers have beside tensors: settings are one, parameters are joined."""
    rows = [(name_ranks(ranks), one.optimizer) for ranks, one in heard]
    first_ranks, first = rows[0]
    groups: list[Any] = []
    state: dict[str, Any] = {}
    for ranks, row in rows:
        kinds = [each.class_name if each else "none" for each in (first, row)]
        if kinds[0] != kinds[1] or (first and row and len(first.groups) != len(row.groups)):
            said = [f"{len(each.groups)} groups" if each else "" for each in (first, row)]
            raise CheckpointError(
                f"the optimizer is {kinds[0]} {said[0]} on {first_ranks}, {kinds[1]} {said[1]} on "
                f"{ranks}: all ranks save theirs, of one kind and with as many groups"
            )
        if row is None:
            continue
        for number, group in enumerate(row.groups):
            if row is first:
                groups.append({**group, "params": {}})
            for key in _differing(groups[number], group):
                raise CheckpointError(
                    f"optimizer: '{key}' of group {number} is {shown(group.get(key))} on {ranks} "
                    f"and {shown(groups[number].get(key))} on {first_ranks}: a checkpoint has one"
                )
            groups[number]["params"] |= dict.fromkeys(group["params"])
        for name, values in row.state.items():
            if state.setdefault(name, values) != values:
                raise CheckpointError(
                    f"optimizer: the values of '{name}' on {ranks} are not those of other ranks"
                )
    if first is None:
        return None
    listed = [{**group, "params": list(group["params"])} for group in groups]
    return first.model_copy(update={"groups": listed, "state": state})


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for key in one.keys() | other.keys():
        if key != "params" and one.get(key, ...) != other.get(key, ...):
            yield key
