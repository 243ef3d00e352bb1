"""Optimizers that read whole matrices: each rank steps the matrices it owns, as plain tensors.

Note [A step of whole matrices]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Layout ``matrices`` puts each whole matrix on one rank. There an optimizer that reads it (Muon,
Shampoo, SOAP) can step as in one process, without communication. But a sharded tensor with no
elements on this rank still has the global shape, and operations on it would need the other ranks.
So the optimizer's code gets a copy of the optimizer, with the same class and options. In the copy
this rank's matrices are plain tensors over the same memory, with their gradients and state. The
matrices of other ranks are left out, and all other parameters are unchanged. State and options of
the copy are written back after the step. So a matrix's state is on its owner only.

Elementwise optimizers do not need this: they step an empty slice as with layout ``flat``, and have
state for it on every rank. An optimizer that reads several parameters or draws steps sharded
tensors too; see Note [A probe of an optimizer]. L-BFGS treats all parameters as one vector and is
refused.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from functools import cache
from typing import cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from shardwise.layout.placements import local_of
from shardwise.step.local_step import (
    Args,
    Kwargs,
    copy_settings_back,
    is_elementwise,
    optimizer_like,
    run_last,
)
from shardwise.step.probe import refuse_collectives, traits_of
from shardwise.tensor.plain_state import PLAIN_SCALARS, owner_of, owning_rank
from shardwise.tensor.replaced import params_of
from shardwise.unit.partial import PartialGrad

_HOOK = "_shardwise_whole_hook"  # on an optimizer: id of the hook after its step
_STEP = "_shardwise_whole_step"  # on the copy that steps


@cache
def step_matrices_whole() -> None:
    """Let optimizers step owned matrices as plain tensors, from now on.

    See Note [A step of whole matrices].
    """
    torch_optimizer.register_optimizer_step_pre_hook(_prepare)


def _prepare(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    """Make the last hook before a step create the copy, and the first hook after it write back."""
    if torch.compiler.is_compiling() or is_elementwise(optimizer):
        return
    if isinstance(optimizer, torch.optim.LBFGS) or hasattr(optimizer, "optimizers"):
        return  # each of its optimizers steps by itself
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        return  # a wrapper (SAM, Lookahead), whose copy would not share groups with the inner one
    params = params_of(optimizer)
    if all(owning_rank(param) is None for param in params):
        return
    traits = traits_of(optimizer, args, kwargs)
    refuse_collectives(optimizer, traits)
    if not traits.is_separable:
        return  # operations on sharded tensors are right for all ranks, or refused
    run_last(optimizer, _substitute)
    if _HOOK not in vars(optimizer):
        vars(optimizer)[_HOOK] = optimizer.register_step_post_hook(_write_back).id
    after = cast(OrderedDict[int, object], optimizer._optimizer_step_post_hooks)
    after.move_to_end(vars(optimizer)[_HOOK], last=False)


def _substitute(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    step = _WholeStep(optimizer)
    kwargs = dict(kwargs)
    closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
    if callable(closure):
        return (step.copy, step.around(closure), *args[2:]), kwargs
    return (step.copy, *args[1:]), kwargs


def _write_back(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    step: _WholeStep | None = vars(args[0]).get(_STEP) if args else None
    if step is not None:
        step.write_back(optimizer)


class _WholeStep:
    """One step, taken by the optimizer ``copy``."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._owned: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameter, plain tensor
        self._elsewhere: list[torch.Tensor] = []  # owned by other ranks
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        for group, new_group in zip(optimizer.param_groups, groups, strict=True):
            for param in group["params"]:
                owner = owning_rank(param)
                if owner is None:
                    new_group["params"].append(param)
                elif owner == owner_of(param).cut.comm.axes.shard.rank:
                    stand_in = local_of(param).detach().requires_grad_(param.requires_grad)
                    self._owned.append((param, stand_in))
                    new_group["params"].append(stand_in)
                else:
                    self._elsewhere.append(param)
        self._read_grads()
        state: dict[torch.Tensor, dict[str, object]] = defaultdict(dict, optimizer.state)
        for param in self._elsewhere:
            state.pop(param, None)
        self._before: dict[int, Mapping[str, object]] = {}  # state by id of the parameter
        for param, stand_in in self._owned:
            before = state.pop(param, {})
            self._before[id(param)] = before
            if before:
                state[stand_in] = {key: _plain(value) for key, value in before.items()}
        self._given = {id(stand_in): dict(state.get(stand_in, {})) for _, stand_in in self._owned}
        self.copy = optimizer_like(optimizer, groups, state)
        vars(self.copy)[_STEP] = self

    def _read_grads(self) -> None:
        """Read the gradients, on all ranks: reading one completes its reduction."""
        grads = [param.grad for param in (*self._elsewhere, *(p for p, _ in self._owned))]
        for grad in grads:
            if isinstance(grad, PartialGrad):
                grad.to_local()  # raises: the window is open
        for param, stand_in in self._owned:
            grad = param.grad
            stand_in.grad = None if grad is None else local_of(grad)

    def around(self, closure: Callable[[], object]) -> Callable[[], object]:
        """Return a closure that also takes over the gradients it leaves."""

        def closure_and_grads() -> object:
            self._count_changes()
            loss = closure()
            self._read_grads()
            return loss

        return closure_and_grads

    def _count_changes(self) -> None:
        """Mark full copies as stale on all ranks, so that all ranks gather together."""
        stepped = [*self._elsewhere, *(param for param, _ in self._owned)]
        torch.autograd.graph.increment_version([local_of(param) for param in stepped])

    def write_back(self, optimizer: Optimizer) -> None:
        """Write the copy's state, options and attributes back to the optimizer."""
        self._count_changes()
        state = self.copy.state
        del vars(self.copy)[_STEP]  # no cycle, which would keep the gradients
        for param, stand_in in self._owned:
            stepped = state.pop(stand_in, None)
            if stepped is not None:
                optimizer.state[param] = {
                    key: self._sharded(param, stand_in, key, value)
                    for key, value in stepped.items()
                }
        for param in self._elsewhere:
            optimizer.state.pop(param, None)
        for key, value in state.items():
            optimizer.state[key] = value
        copy_settings_back(optimizer, self.copy)

    def _sharded(
        self, param: torch.Tensor, stand_in: torch.Tensor, key: str, value: object
    ) -> object:
        """Return one value of the state to keep: the tensor from before the step, or a new one."""
        given = self._given[id(stand_in)].get(key)
        if isinstance(value, torch.Tensor) and value is given:
            return self._before[id(param)][key]
        has_shape = type(value) is torch.Tensor and value.shape == param.shape
        if not has_shape or key in PLAIN_SCALARS:
            return value
        return owner_of(param).form.wrap(value)


def _plain(value: object) -> object:
    """Return this rank's elements of sharded state, also in lists and dicts; an owner has all."""
    if isinstance(value, DTensor):
        return local_of(value)
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    return type(value)(map(_plain, value)) if isinstance(value, list | tuple) else value
