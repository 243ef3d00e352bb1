"""A parameter with copies on several stages of a pipeline.

Note [When gradients of tied copies are summed]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Each stage reduces its copy's gradient at the end of its passes. Another stage may then still wait
for data from this stage, so waiting for its gradient would be a deadlock. When ranks clip or step,
all have ended their passes. So `clip_grad_norm_` or the optimizer's step, whichever comes first,
makes the sum, once per reduction. All copies get the same sum, in the order of the stages, and take
the same step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise.layout.placements import local_of
from shardwise.mesh import Axis
from shardwise.tensor.plain_state import owner_of


class Tie:
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
        hold = weakref.ref(self)
        handle = register_optimizer_step_pre_hook(lambda o, *_: _before_step(hold, o))
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
        return [param.unit.scheduler.num_reduced for param in self.params]

    @torch.no_grad()
    def share_values(self) -> None:
        """Copy the first stage's values to all copies."""
        local = local_of(self.params[0].sharded)
        if self.stages is not None and self.peers:
            found = self._exchange(local.reshape(-1))
            local = found[self.places[0]].view(local.shape)
        for param in self.params:
            if param.sharded._local_tensor is not local:
                param.sharded._local_tensor.copy_(local)

    def _exchange(self, mine: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return each stage's tensor, by place. **Cost** sends this rank's slice to each."""
        if self.stages is None:
            return {self.places[0]: mine}
        comm = self.params[0].unit.comm
        theirs = comm.exchange_with(self.peers, mine, self.stages, self.name)
        return {self.stages.rank: mine, **theirs}

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
        there = [local_of(grad) for grad in grads if grad is not None]
        dtype = there[0].dtype if there else first.dtype
        # The last element counts the gradients; without any, there is no sum.
        mine = first.new_zeros(first.numel() + 1, dtype=dtype)
        for local in there:
            mine[:-1] += local.reshape(-1)
            mine[-1] += 1
        found = self._exchange(mine)
        total = torch.zeros_like(mine)
        for place in self.places:
            total += found[place]
        if there or bool(total[-1]):
            whole = total[:-1].view(first.shape)
            for param, grad in zip(self.params, grads, strict=True):
                if grad is None:
                    param.sharded.grad = param.form.like(whole.clone())
                else:
                    (grad._local_tensor if isinstance(grad, DTensor) else grad).copy_(whole)


def ties_of(owners: Iterable[Any]) -> list[Tie]:
    """Return the ties of parameters' owners (None: no owner), in the same order on all ranks."""
    found = {id(o.tie): o.tie for o in owners if o is not None and o.tie is not None}
    return sorted(found.values(), key=lambda tie: str(tie.name))


def _before_step(hold: weakref.ref[Tie], optimizer: torch.optim.Optimizer) -> None:
    """Sum the gradients before the first step of one of the copies."""
    tie = hold()
    if tie is not None and tie.is_among(p for g in optimizer.param_groups for p in g["params"]):
        tie.sum_grads()
