"""Contexts in which parameters are full, ordinary tensors.

Note [Gradients of gathered parameters]
A graph recorded inside `gathered(model)` ends in full ordinary parameters, which only this context
uses. Inside the context a backward pass, of any order, leaves this rank's gradients in them. When
the context ends, the ranks exchange which parameters have a gradient, and these gradients are
reduced like those of a backward pass. A backward pass after the context adds each gradient to the
shards' gradients when it arrives.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comm.pending import CollectiveId
from shardwise.engine.agreement import find_difference
from shardwise.engine.api import engine_of
from shardwise.engine.runtime import Engine
from shardwise.errors import ConfigError, StateError
from shardwise.layout.placements import local_of
from shardwise.surface.moved import ModuleBefore, Moves, find_moves
from shardwise.tensor.inner import (
    gather_whole,
    has_own_gather,
    has_same_bits,
    inner_of,
    plain_parts,
)
from shardwise.tensor.plain_state import owner_of
from shardwise.unit.full_parameter import mark_expired
from shardwise.unit.param import ShardedParam

_SITE = CollectiveId("gather", "(gathered)", 0)


@contextmanager
def gathered(
    *targets: nn.Module | torch.Tensor, writeback: bool = False, source: int | None = None
) -> Iterator[Any]:
    """Gather a model's parameters, or the named ones, in full, in their master dtype.

    ``gathered(model)`` puts full ordinary parameters into the model. Inside, its forward, its
    ``state_dict()`` and ``generate()`` run as in an unsharded model. ``gathered(p, q)`` yields a
    list of full tensors. With ``writeback`` changes are copied into the shards: every rank must
    make the same change, or ``source`` names the rank (along the shard axis) whose values are
    taken. Gradients and optimizer state need no context: ``p.grad.full_tensor()`` reads,
    ``p.grad.copy_(full)`` writes, and ``optimizer.state[p]["exp_avg"]`` likewise.

    Without ``writeback`` the model's full parameters require gradients as the shards do, so
    gradient penalties (``create_graph=True``) can be computed inside. When the context ends, their
    gradients are reduced and added to the shards' ``p.grad``. A backward pass after the context
    reduces its gradients at once; at stage 3 all ranks must then have used the same units. With
    ``writeback``, and for named parameters, full parameters do not require gradients. Neither do
    those of a class with its own gather, which keep their class in the model.

    **Cost** one all-gather per parameter; the full parameters in memory until the end, or until a
    graph recorded inside is dropped.

    A parameter that is moved inside its unit (a parametrization, `torch.nn.utils.prune`) keeps its
    new place and name. With ``writeback`` a new parameter of the same shape and dtype in the place
    of an old one gives it its values.

    **Raises** StateError on all ranks if a tensor was changed without ``writeback``, or if
    the ranks made different changes, or added, removed or moved a parameter in a way that cannot be
    kept. The modules then have their state of before the context, as after an exception inside it.
    ConfigError at once if ``source`` is not a rank.
    """
    engine, params = _params_of(targets)
    in_model = isinstance(targets[0], nn.Module)
    _check(engine, params, source)
    engine.backward.drop_failed_pass()
    engine.finish_pending_work("gathered()")
    with torch.no_grad():
        device = engine.comm.device
        fulls = [_make_full(param, in_model, device) for param in params]
    versions = [full._version for full in fulls]
    grad_hooks: list[_GradHook] = []
    if in_model and not writeback:
        pairs = zip(params, fulls, strict=True)
        grad_hooks = [_GradHook(param, full) for param, full in pairs if not has_own_gather(full)]
    if in_model:
        _put(params, fulls)
    moves = Moves()
    root = engine.units[0].module
    before = [ModuleBefore(module) for module in root.modules()] if in_model else []
    has_ended = False
    try:
        with engine.status.suspended() if in_model else nullcontext():
            yield targets[0] if in_model else fulls
        has_ended = True
    finally:
        if in_model:
            moves = find_moves(root, params, fulls, may_replace=writeback)
            may_differ = writeback and source is not None
            keeps_moves = False
            try:
                if has_ended:
                    _compare_moves(engine, moves, with_values=not may_differ)
                    keeps_moves = not moves.refused
            finally:
                _leave_model(moves, before, params, fulls, keeps_moves=keeps_moves)
        for grad_hook in grad_hooks:
            grad_hook.is_inside = False
    moves.check()
    fulls = [moves.values.get(param.name, full) for param, full in zip(params, fulls, strict=True)]
    if writeback:
        _write_back(engine, params, fulls, source)
    else:
        _reduce_gradients(engine, params, fulls, versions)


def _reduce_gradients(
    engine: Engine, params: list[ShardedParam], fulls: list[nn.Parameter], versions: list[int]
) -> None:
    """Reduce gradients that full parameters have on any rank; refuse changes, on all ranks."""
    triples = zip(params, fulls, versions, strict=True)
    changed = [
        full._version != version or _differs(param, full) for param, full, version in triples
    ]
    has_grad = [full.grad is not None for full in fulls]
    flags = torch.tensor(changed + has_grad, dtype=torch.uint8, device=engine.comm.device)
    for axis in engine.comm.axes.all:
        flags = engine.comm.max(flags, axis, _SITE)
    on_any_rank = flags.tolist()
    changed_anywhere = on_any_rank[: len(params)]
    has_grad_anywhere = on_any_rank[len(params) :]
    _refuse_changes(params, changed_anywhere)
    if any(has_grad_anywhere):
        _reduce(engine, params, fulls, has_grad_anywhere)


def _compare_moves(engine: Engine, moves: Moves, *, with_values: bool) -> None:
    """Refuse moves that differ between ranks. ``with_values``: compare replaced parameters too."""
    facts = moves.facts(with_values=with_values)
    difference = find_difference(engine.comm.control, facts, "the end of gathered()")
    if difference is not None:
        moves.refused[:] = [f"ranks have changed the model differently: {difference}"]


def _leave_model(
    moves: Moves,
    before: list[ModuleBefore],
    params: list[ShardedParam],
    fulls: list[nn.Parameter],
    *,
    keeps_moves: bool,
) -> None:
    """Put the sharded parameters into the model, at their new places or into restored modules."""
    if keeps_moves:
        moves.keep()
    else:
        for module_before in before:
            module_before.restore()
    _put(params, [param.sharded for param in params])
    for param, full in zip(params, fulls, strict=True):
        mark_expired(full, param.name)


class _GradHook:
    """Passes on gradients after the context; see Note [Gradients of gathered parameters]."""

    def __init__(self, param: ShardedParam, full: nn.Parameter) -> None:
        self.is_inside = True
        self._param = param
        if param.sharded.requires_grad:
            full.requires_grad_(True)
            full.register_post_accumulate_grad_hook(self._pass_on)

    def _pass_on(self, full: torch.Tensor) -> None:
        if self.is_inside:
            return
        grad = full.grad
        full.grad = None
        _engine_of(self._param).passes.note_grad(self._param.unit, full)
        assert grad is not None
        _add_partial(self._param, grad)


def _add_partial(param: ShardedParam, grad: torch.Tensor) -> None:
    """Add a gradient that autograd did not write into the layers' parameter."""
    grad = grad.detach()
    gradient = param.gradient
    if gradient.partial is None:
        gradient.partial = grad.to(gradient.sum_dtype, copy=True)
    else:
        gradient.partial.add_(grad)


def _reduce(
    engine: Engine,
    params: list[ShardedParam],
    fulls: list[nn.Parameter],
    has_grad_anywhere: list[bool],
) -> None:
    """Reduce the gradients of units that have one on any rank, as a backward pass does."""
    engine.finish_reductions()
    for param, full, has_grad in zip(params, fulls, has_grad_anywhere, strict=True):
        if has_grad:
            engine.passes.expect_reduction(param.unit)
        if full.grad is not None:
            _add_partial(param, full.grad)
            full.grad = None
        elif has_grad and param.gradient.partial is None:  # so that all ranks reduce in one dtype
            _add_partial(param, torch.zeros_like(full))
    engine.backward.on_pass_end()


def _differs(param: ShardedParam, full: nn.Parameter) -> bool:
    """Tell whether this rank's elements changed: writes to ``.data`` do not change the version."""
    if full.shape != param.cut.shape or full.dtype != param.sharded.dtype:
        return True
    return not all(has_same_bits(local, value) for local, value in _local_pairs(param, full))


def _local_pairs(
    param: ShardedParam, full: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's elements, each with the same elements of the full parameter.

    A parameter made of several tensors yields several pairs.
    """
    local = param.sharded._local_tensor.detach()
    cut = param.cut
    if isinstance(full, DTensor):
        yield local, cut.slice_of_piece(local_of(full)).to(local.device)
        return
    fulls = plain_parts(full.data).values()
    for part, value in zip(inner_of(local, cut, param.name), fulls, strict=True):
        yield part.local.detach(), part.cut.slice_of(value).to(local.device)


def _params_of(targets: tuple[nn.Module | torch.Tensor, ...]) -> tuple[Engine, list[ShardedParam]]:
    if not targets:
        raise ConfigError("gathered(): name a sharded model, or some of its parameters")
    if isinstance(targets[0], nn.Module):
        if len(targets) > 1:
            raise ConfigError("gathered(): name one model, or parameters, not both")
        engine = engine_of(targets[0])
        return engine, [param for unit in engine.units for param in unit.params]
    params = []
    for number, target in enumerate(targets):
        owner = owner_of(target)
        if not isinstance(owner, ShardedParam):
            raise ConfigError(
                f"gathered(): argument {number} is a {type(target).__name__}, not a parameter of a "
                "sharded model (for gradients and state use .full_tensor())"
            )
        params.append(owner)
    return _engine_of(params[0]), params


def _engine_of(param: ShardedParam) -> Engine:
    engine = param.unit.engine
    if engine is None:
        raise ConfigError(
            f"gathered(): '{param.name}' is of a model of fully_shard() that has not run yet, so "
            "which modules belong to it is not known; run it first, or pass the whole model"
        )
    assert isinstance(engine, Engine)
    return engine


def _make_full(param: ShardedParam, in_model: bool, device: torch.device) -> nn.Parameter:
    """Return the full parameter in separate memory, even on a single rank.

    In the model it has its form from before sharding: a DTensor with tensor parallelism.
    """
    local = param.sharded._local_tensor
    if has_own_gather(local):
        return nn.Parameter(gather_whole(local, param.cut, param.name).to(device), False)
    full: torch.Tensor = param.cut.gather_piece(local) if in_model else param.cut.gather(local)
    if full.data_ptr() == local.data_ptr():
        full = full.clone()
    full = full.to(device)
    return nn.Parameter(param.form.full(full) if in_model else full, requires_grad=False)


def _check(engine: Engine, params: list[ShardedParam], source: int | None) -> None:
    """Raise for an invalid context, before the first gather."""
    size = min((p.unit.comm.axes.shard.size for p in params), default=1)
    if source is not None and source not in range(size):
        raise ConfigError(
            f"gathered(source={source!r}): expected a rank of the shard axis, 0 to {size - 1}"
        )
    if engine.suspended:
        raise StateError(
            "gathered(): the model is gathered already, by an outer `with`: use the full "
            "parameters that it gave, or leave it first"
        )
    engine.status.check_usable("gathered(): ")


def _put(params: list[ShardedParam], tensors: list[nn.Parameter]) -> None:
    """Register each tensor in the modules in the places of its parameter."""
    for param, tensor in zip(params, tensors, strict=True):
        param.put_in_modules(tensor)


@torch.no_grad()
def _write_back(
    engine: Engine, params: list[ShardedParam], fulls: list[nn.Parameter], source: int | None
) -> None:
    for param, full in zip(params, fulls, strict=True):
        if source is not None:
            for part in plain_parts(local_of(full.data)).values():
                param.unit.comm.broadcast(part, _SITE, source)
        for local, value in _local_pairs(param, full):
            local.copy_(value)
        torch.autograd.graph.increment_version(param.sharded._local_tensor)


def _refuse_changes(params: list[ShardedParam], changed: list[bool]) -> None:
    names = [param.name for param, flag in zip(params, changed, strict=True) if flag]
    if names:
        raise StateError(
            f"gathered(): {', '.join(names[:5])} changed inside the context on some rank, which "
            "would be lost; pass writeback=True (and source= when one rank made the change)"
        )
