"""``tie()``: copies of a parameter on several pipeline stages, kept equal by summed gradients.

Note [When gradients of tied copies are summed]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each stage reduces its copy's gradient at the end of its passes. Another stage may then still wait
for data from this stage, so waiting for its gradient would be a deadlock. When ranks clip or step,
all have ended their passes. So `clip_grad_norm_` or the optimizer's step, whichever comes first,
makes the sum, once per reduction. All copies get the same sum, in the order of the stages, and take
the same step.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import get_process_group_ranks
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.comm.collective_key import name_ranks
from shardwise.comm.control import exchange_any
from shardwise.errors import ConfigError
from shardwise.layout.boxes import full_region
from shardwise.layout.placements import local_of
from shardwise.mesh import Axis
from shardwise.parallel.parts import Model, Parts
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.param import ShardedParam


class TiedCopies:
    """The copies of one parameter: ``params`` are this rank's, ``places`` all stages with a copy.

    ``stages`` is the pipeline's axis; None if this rank has all copies.
    """

    def __init__(
        self, name: str, params: Sequence[Any], stages: Axis | None, places: Sequence[int]
    ) -> None:
        self.name = name
        self.params = list(params)
        self.stages = stages
        self.places = list(places)
        self._reduced = self._num_reduced()
        for param in self.params:
            param.tie = self
        ref = weakref.ref(self)
        handle = register_optimizer_step_pre_hook(lambda o, *_: _before_step(ref, o))
        weakref.finalize(self, handle.remove)

    @property
    def peers(self) -> list[int]:
        """The other stages with a copy, by their place along the axis."""
        return [p for p in self.places if self.stages is not None and p != self.stages.rank]

    def counts(self, param: Any) -> bool:
        """Return True for the one copy that counts where each parameter counts once."""
        is_first = self.stages is None or self.places[0] == self.stages.rank
        return is_first and param is self.params[0]

    def is_among(self, params: Iterable[Any]) -> bool:
        """Return True if one of this rank's copies is among parameters of the model."""
        return any(owner_of(param) in self.params for param in params)

    def _num_reduced(self) -> list[int]:
        return [param.unit.engine.backward.num_reduced for param in self.params]

    @torch.no_grad()
    def share_values(self) -> None:
        """Copy the first stage's values to all copies."""
        local = local_of(self.params[0].sharded)
        if self.stages is not None and self.peers:
            values = self._exchange(local.reshape(-1))
            local = values[self.places[0]].view(local.shape)
        for param in self.params:
            if param.sharded._local_tensor is not local:
                param.sharded._local_tensor.copy_(local)

    def _exchange(self, mine: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return each stage's tensor, by place. **Cost** sends this rank's slice to each."""
        if self.stages is None:
            return {self.places[0]: mine}
        comm = self.params[0].unit.comm
        received = comm.exchange_with(self.peers, mine, self.stages, self.name)
        return {self.stages.rank: mine, **received}

    @torch.no_grad()
    def sum_grads(self) -> None:
        """Sum the gradients of all copies, once per reduction; every stage with a copy calls it.

        **Cost** sends this rank's slice of the gradient to each other stage with a copy.
        """
        now = self._num_reduced()
        # Frozen copies have no gradient, and all are frozen together. A stage with no other
        # parameters reduces nothing, and would leave the other stages waiting.
        if now == self._reduced or not self.params[0].sharded.requires_grad:
            return
        self._reduced = now
        grads = [param.sharded.grad for param in self.params]
        first = local_of(self.params[0].sharded)
        local_grads = [local_of(grad) for grad in grads if grad is not None]
        dtype = local_grads[0].dtype if local_grads else first.dtype
        # The last element counts the gradients; without any, there is no sum.
        mine = first.new_zeros(first.numel() + 1, dtype=dtype)
        for local in local_grads:
            mine[:-1] += local.reshape(-1)
            mine[-1] += 1
        sums = self._exchange(mine)
        total = torch.zeros_like(mine)
        for place in self.places:
            total += sums[place]
        if local_grads or bool(total[-1]):
            whole = total[:-1].view(first.shape)
            for param, grad in zip(self.params, grads, strict=True):
                if grad is None:
                    param.sharded.grad = param.form.wrap(whole.clone())
                else:
                    target = grad._local_tensor if isinstance(grad, DTensor) else grad
                    target.copy_(whole)


def ties_of(owners: Iterable[Any]) -> list[TiedCopies]:
    """Return the ties of parameters' owners (None: no owner), in the same order on all ranks."""
    ties = {id(o.tie): o.tie for o in owners if o is not None and o.tie is not None}
    return sorted(ties.values(), key=lambda tie: str(tie.name))


def _before_step(ref: weakref.ref[TiedCopies], optimizer: torch.optim.Optimizer) -> None:
    """Sum the gradients before the first step of one of the copies."""
    tie = ref()
    if tie is not None and tie.is_among(p for g in optimizer.param_groups for p in g["params"]):
        tie.sum_grads()


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
    parts.finish_pending_work("tie()")
    if not names or not hasattr(names, "items"):
        raise ConfigError(
            f"names={names!r}: expected a mapping from other names to the first name, as in "
            "{'head.weight': 'embed.weight'}"
        )
    both = sorted(set(names) & set(names.values()))
    if both:
        raise ConfigError(
            f"names: {both} are on both sides of {dict(names)}; give all other names of a "
            "parameter the first one: {'b': 'a', 'c': 'a'}"
        )
    firsts = dict.fromkeys(names.values())
    all_names = {
        first: [first, *(name for name, target in names.items() if target == first)]
        for first in firsts
    }
    mine = {first: _copies(parts, listed) for first, listed in all_names.items()}
    stages = parts.comm.axes.stages
    row = {
        "names": sorted({use.name for params in mine.values() for p in params for use in p.uses}),
        "facts": {first: _facts(params) for first, params in mine.items() if params},
        "place": 0 if stages is None else stages.rank,
        "ranks": [] if stages is None else get_process_group_ranks(stages.group),
        "requested": dict(names),
    }
    control = parts.all_ranks
    rows = [json.loads(text) for text in exchange_any(control, json.dumps(row).encode())]
    members: list[int] = list(control.members) or [0]
    _check(rows, members, names, all_names)
    pipeline_ranks = rows[control.rank]["ranks"] or [members[control.rank]]
    for first, params in mine.items():
        if params:
            stage_rows = [
                row for row, rank in zip(rows, members, strict=True) if rank in pipeline_ranks
            ]
            places = sorted(row["place"] for row in stage_rows if first in row["facts"])
            TiedCopies(first, params, stages, places).share_values()


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
    facts = []
    for param in params:
        cut = param.cut if param.has_cut else None
        shape = tuple(param.shape) if cut is None else tuple(cut.shape)
        piece = full_region(shape) if cut is None else cut.piece
        lo, hi = (0, 0) if cut is None else (cut.lo, cut.hi)
        trained = "trained" if param.sharded.requires_grad else "frozen"
        facts.append(
            f"{shape} {param.sharded.dtype}, {trained}, elements {lo} to {hi} of the box at "
            f"{tuple(piece.at)} of {tuple(piece.shape)}"
        )
    return list(dict.fromkeys(facts))


def _check(
    rows: list[dict[str, Any]],
    members: list[int],
    names: Mapping[str, str],
    all_names: Mapping[str, list[str]],
) -> None:
    """Refuse copies that cannot be tied; all ranks check the same rows."""
    for rank, row in zip(members, rows, strict=True):
        if row["requested"] != dict(names):
            raise ConfigError(
                f"names: rank {rank} passed {row['requested']}, this rank {names}; pass the same "
                "names on every rank"
            )
    existing = {name for row in rows for name in row["names"]}
    for name in dict.fromkeys(name for listed in all_names.values() for name in listed):
        if name not in existing:
            raise ConfigError(f"names: no stage has a parameter '{name}'; tied are {dict(names)}")
    for first in all_names:
        for rank, row in zip(members, rows, strict=True):
            peers = row["ranks"] or [rank]
            ranks_with: dict[str, list[int]] = {}
            for other, other_row in zip(members, rows, strict=True):
                for fact in other_row["facts"].get(first, ()) if other in peers else ():
                    ranks_with.setdefault(fact, []).append(other)
            if len(ranks_with) > 1:
                what = "; ".join(
                    f"{fact} on {name_ranks(ranks)}" for fact, ranks in ranks_with.items()
                )
                raise ConfigError(
                    f"'{first}' cannot be one parameter on its stages: {what}. Give its copies one "
                    "shape and dtype, and the same cut (layout='rows')"
                )
