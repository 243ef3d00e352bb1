"""What stages of a pipeline have under one name must be one tensor: the same bits on all of them.

Note [A sum that no cut changes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Stages may cut a tensor at other places, so digests of slices tell nothing. Each rank hashes every
element of its slice together with its place in the tensor, and sums the hashes modulo 2^64; the sum
over a stage's slices is the tensor's, wherever it was cut. Only names that several stages have are
read, and eight bytes of each are exchanged.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardwise.checkpoint.merge import Key, Merged, key_of
from shardwise.checkpoint.state import Item, Table
from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import Control
from shardwise.errors import CheckpointError

_ELEMENTS = 1 << 22  # at once
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_MIX = (-7046029254386353131, -4658895280553007687)  # of splitmix64, as signed numbers


def once(table: Table) -> Table:
    """Leave out what this rank has twice, as two stages of it have it.

    **Raises** CheckpointError naming what has other bits in them.
    """
    return replace(table, sharded=tuple(_once(table.sharded)), uncut=tuple(_once(table.uncut)))


def _once(items: Sequence[Item]) -> list[Item]:
    found: dict[Key, Item] = {}
    for item in items:
        first = found.setdefault(key_of(item), item)
        if first is item:
            continue
        if first.lo != item.lo or first.data.numel() != item.data.numel():
            raise CheckpointError(
                f"'{item.info.key}' is in two stages of this rank, cut at other places; shard both "
                "with layout='rows', or give each a name of its own"
            )
        if fingerprint(first) != fingerprint(item):
            raise _other_bits(item.info.key, "two stages of this rank")
    return list(found.values())


def check_stages(control: Control, table: Table, merged: Merged) -> None:
    """Compare what several stages have under one name. See Note [A sum that no cut changes].

    **Cost** nothing where there is no such name; else a pass over these, and one exchange.

    **Raises** CheckpointError, the same on all ranks, naming the key and the stages.
    """
    shared = [key for key, places in merged.cut.items() if len(places) > 1]
    if not shared or table.place is None:
        return
    mine = {key_of(item): item for item in table.sharded}
    sums = [fingerprint(mine[key]) if key in mine else 0 for key in shared]
    said = control.exchange(b"".join(n.to_bytes(8, "big") for n in (table.place, *sums)))
    rows = [[int.from_bytes(row[n : n + 8], "big") for n in range(0, len(row), 8)] for row in said]
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
            raise _other_bits(key.info.key, where)


def _other_bits(key: str, where: str) -> CheckpointError:
    return CheckpointError(
        f"'{key}' has other values in {where}, and a checkpoint has one tensor of a name. If it is "
        "one parameter (tied embeddings), call shardwise.parallel.tie() once the stages are "
        "sharded; else give each stage's a name of its own"
    )


@torch.no_grad()
def fingerprint(item: Item) -> int:
    """Return the sum of this rank's hashes. See Note [A sum that no cut changes]."""
    data = item.data.detach().contiguous()
    flat = data.view(_INTEGERS.get(data.element_size(), torch.int32))
    first = item.lo * data.element_size() // flat.element_size()
    total = 0
    for begin in range(0, flat.numel(), _ELEMENTS):
        values = flat[begin : begin + _ELEMENTS].long()
        at = first + begin
        places = torch.arange(at, at + values.numel(), device=values.device)
        mixed = (values * _MIX[0]) ^ ((places + 1) * _MIX[1])
        mixed = (mixed ^ (mixed >> 31)) * _MIX[0]
        total += int(((mixed ^ (mixed >> 29)) * _MIX[1]).sum())
    return total % (1 << 64)
