"""``tie()``: keep copies of a parameter on several pipeline stages equal."""

import json
from collections.abc import Mapping
from typing import Any

from torch.distributed import get_process_group_ranks

from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import exchange_any
from shardwise.engine.parts import Model, Parts
from shardwise.errors import ConfigError
from shardwise.layout.boxes import full_region
from shardwise.parallel.ties import Tie
from shardwise.unit.param import ShardedParam


def tie(model: Model, names: Mapping[str, str]) -> None:
    """Tie copies of a parameter on several stages; every rank calls it, once.

    ``model`` is the rank's stage, or a list of its stages, sharded over `Axes`. ``names`` maps
    other names of a parameter to its first, as in ``{"head.weight": "embed.weight"}``, the same on
    all ranks. All copies take the first stage's values. From then on their gradients are summed
    over the stages, by `clip_grad_norm_` or the optimizer's step, whichever comes first. Norms
    count the parameter once, and checkpoints hold it once, under its first name. Each stage's
    optimizer has its copy, with the same settings. A deep copy of a stage is not tied.

    **Cost** two exchanges of a few bytes; in each step, this rank's slice of the gradient to each
    other stage with a copy.

    **Raises** ConfigError, on all ranks, for names that no stage has, and for copies that differ in
    shape, dtype or sharding.
    """
    parts = Parts(model)
    parts.rest("tie()")
    if not names or not hasattr(names, "items"):
        raise ConfigError(
            f"names={names!r}: expected which name is another of which, as in "
            "{'head.weight': 'embed.weight'}"
        )
    both = sorted(set(names) & set(names.values()))
    if both:
        raise ConfigError(
            f"names: {both} stand on both sides of {dict(names)}; give all other names of a "
            "parameter the first one: {'b': 'a', 'c': 'a'}"
        )
    firsts = dict.fromkeys(names.values())
    listed = {first: [first, *(n for n, of in names.items() if of == first)] for first in firsts}
    mine = {first: _copies(parts, found) for first, found in listed.items()}
    stages = parts.comm.axes.stages
    said = {
        "names": sorted({use.name for params in mine.values() for p in params for use in p.uses}),
        "facts": {first: _facts(params) for first, params in mine.items() if params},
        "place": 0 if stages is None else stages.rank,
        "ranks": [] if stages is None else get_process_group_ranks(stages.group),
        "asked": dict(names),
    }
    control = parts.everyone
    rows = [json.loads(row) for row in exchange_any(control, json.dumps(said).encode())]
    members: list[int] = list(control.members) or [0]
    _check(rows, members, names, listed)
    here = rows[control.rank]["ranks"] or [members[control.rank]]
    for first, params in mine.items():
        if params:
            having = [row for row, rank in zip(rows, members, strict=True) if rank in here]
            places = sorted(row["place"] for row in having if first in row["facts"])
            Tie(first, params, stages, places).share_values()


def _copies(parts: Parts, names: list[str]) -> list[ShardedParam]:
    """Return this rank's parameters with these names, in the order of its stages."""
    return [
        param
        for unit in parts.units
        for param in unit.params
        if any(use.name in names for use in param.uses)
    ]


def _facts(params: list[ShardedParam]) -> list[str]:
    """Describe the facts that must agree: shape, dtype, training, and this rank's elements."""
    found = []
    for param in params:
        cut = param.cut if param.has_cut else None
        shape = tuple(param.shape) if cut is None else tuple(cut.shape)
        piece = full_region(shape) if cut is None else cut.piece
        lo, hi = (0, 0) if cut is None else (cut.lo, cut.hi)
        trained = "trained" if param.sharded.requires_grad else "frozen"
        found.append(
            f"{shape} {param.sharded.dtype}, {trained}, elements {lo} to {hi} of the box at "
            f"{tuple(piece.at)} of {tuple(piece.shape)}"
        )
    return list(dict.fromkeys(found))


def _check(
    rows: list[dict[str, Any]],
    members: list[int],
    names: Mapping[str, str],
    listed: Mapping[str, list[str]],
) -> None:
    """Refuse copies that cannot be tied; all ranks check the same rows."""
    for rank, row in zip(members, rows, strict=True):
        if row["asked"] != dict(names):
            raise ConfigError(f"names: rank {rank} asked for {row['asked']}, this rank for {names}")
    there = {name for row in rows for name in row["names"]}
    for name in dict.fromkeys(name for each in listed.values() for name in each):
        if name not in there:
            raise ConfigError(f"names: no stage has a parameter '{name}'; tied are {dict(names)}")
    for first in listed:
        for rank, row in zip(members, rows, strict=True):
            peers = row["ranks"] or [rank]
            alike: dict[str, list[int]] = {}
            for other, theirs in zip(members, rows, strict=True):
                for fact in theirs["facts"].get(first, ()) if other in peers else ():
                    alike.setdefault(fact, []).append(other)
            if len(alike) > 1:
                what = "; ".join(f"{fact} on {name_ranks(on)}" for fact, on in alike.items())
                raise ConfigError(
                    f"'{first}' cannot be one parameter on its stages: {what}. Give its copies one "
                    "shape and dtype, and cut them alike (layout='rows')"
                )
