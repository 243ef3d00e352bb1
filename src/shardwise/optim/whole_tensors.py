"""Optimizers whose steps gather the tensors that they need whole.

See Note [Gathering for an optimizer]. Under `fully_shard` the optimizer's code gets a copy of the
optimizer in which the same elements are ShardTensors: torch's DTensors would answer some operations
with this rank's part.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise.comm.collectives import Comm
from shardwise.errors import ConfigError
from shardwise.layout.placements import local_of
from shardwise.step.local_step import Args, Kwargs, optimizer_like, run_last, take_settings
from shardwise.step.probe import refuse_collectives, traits_of
from shardwise.tensor.draws import same_draws
from shardwise.tensor.gathered_step import GatheredStep, running
from shardwise.tensor.plain_state import GATHERS, cut_plain_state, owner_of
from shardwise.tensor.shard_tensor import ShardTensor

_LOG = logging.getLogger("shardwise")
O = TypeVar("O", bound=Optimizer)  # noqa: E741 - a type


def gathering(optimizer: O) -> O:
    """Let an optimizer gather the tensors that it needs whole, and return it.

    For optimizers that read whole vectors or matrices now and then (Prodigy, D-Adaptation,
    adam-mini, SOAP, Shampoo, AdamP, GaLore), at every stage and in every layout. Operations that
    need no whole tensor stay as they are. All ranks draw equal random numbers in a step.

    **State** what the optimizer makes with a parameter's shape is sharded; other state that it
    makes from whole tensors (factors, flattened copies) is whole on every rank.

    **Cost** an all-gather and the memory of the whole arguments for each such operation; rank 0
    logs the sum of the first step that gathers. The step is not compiled.

    **Raises** ConfigError for an optimizer that was made gathering before, and, at the first step,
    for one that calls collectives itself.
    """
    if vars(optimizer).get(GATHERS):
        raise ConfigError(f"gathering: this {type(optimizer).__name__} gathers already")
    vars(optimizer)[GATHERS] = True
    for each in getattr(optimizer, "optimizers", ()):  # of `Mixed`, each steps by itself
        gathering(each)
    if hasattr(optimizer, "optimizers"):
        return optimizer
    wrapped = _Gathering(optimizer.step)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return wrapped.step(self, args, kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    run_last(optimizer, _as_shards)
    optimizer.register_step_post_hook(_take_back)
    return optimizer


class _Gathering:
    """The step of one optimizer, and whether its cost was logged."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._is_logged = False

    def step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
        """Step with gathers; draws are equal on all ranks."""
        params = [param for group in optimizer.param_groups for param in group["params"]]
        owned = [(param, owner) for param in params if (owner := owner_of(param)) is not None]
        if not owned:
            return self._step(*args, **kwargs)
        refuse_collectives(optimizer, traits_of(optimizer, (optimizer, *args), kwargs))
        cuts = {id(owner.cut.comm): (owner.cut, param.device) for param, owner in owned}
        comms = [cut.comm for cut, _ in cuts.values()]
        # Without a closure every optimizer draws so, see Note [Draws of an optimizer].
        has_closure = any(callable(value) for value in (*args, *kwargs.values()))
        record, before = GatheredStep(), _sent(comms)
        with ExitStack() as stack:

            @contextmanager
            def paused() -> Iterator[None]:
                stack.close()
                with running(None), torch.enable_grad():
                    yield
                begin()

            def begin() -> None:
                stack.enter_context(running(record))
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                for cut, device in cuts.values() if has_closure else ():
                    stack.enter_context(same_draws(cut, device, None))

            begin()
            args = tuple(_around(value, paused) for value in args)
            kwargs = {key: _around(value, paused) for key, value in kwargs.items()}
            result = self._step(*args, **kwargs)
        cut_plain_state(optimizer)
        if record.first and not self._is_logged:
            self._is_logged = True
            self._log(type(optimizer).__name__, record, before, _sent(comms))
        return result

    def _log(
        self, name: str, record: GatheredStep, before: tuple[int, int], after: tuple[int, int]
    ) -> None:
        if dist.get_rank() == 0:
            num_bytes, num_collectives = (b - a for a, b in zip(before, after, strict=True))
            _LOG.warning(
                "shardwise: %s needs whole tensors, first for %s: this step gathered them with %d "
                "collectives, rank 0 sent %.1f MiB, and one operation's whole arguments took up "
                "to %.1f MiB. Every step that does so costs the same",
                *(name, record.first, num_collectives),
                *(num_bytes / 2**20, record.largest_bytes / 2**20),
            )


def _around(value: Any, paused: Callable[[], Any]) -> Any:
    """Return a closure that runs as outside the step; return other values unchanged."""
    if not callable(value):
        return value

    def closure(*args: Any, **kwargs: Any) -> Any:
        with paused():
            return value(*args, **kwargs)

    return closure


def _sent(comms: list[Comm]) -> tuple[int, int]:
    """Return the bytes that this rank has sent for single tensors, and the collectives."""
    kinds = [(comm.traffic, f"{axis.name}.scalars") for comm in comms for axis in comm.axes.all]
    num_bytes = sum(traffic.sent_bytes[kind] for traffic, kind in kinds)
    return num_bytes, sum(traffic.num_collectives[kind] for traffic, kind in kinds)


_STEP = "_shardwise_gathered_step"  # on the copy that steps


def _as_shards(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    """Let a copy step, if parameters are torch's DTensors."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(isinstance(p, ShardTensor) or owner_of(p) is None for p in params):
        return None
    inner = next((v for v in vars(optimizer).values() if isinstance(v, Optimizer)), None)
    if inner is not None:
        kind, other = type(optimizer).__name__, type(inner).__name__
        raise ConfigError(
            f"gathering({kind}) under fully_shard: {kind} lets another optimizer ({other}) step "
            "the DTensors. Make that gathering instead, or use shardwise.shard(model)"
        )
    step = _AsShards(optimizer)
    change = step.around
    return (step.copy, *map(change, args[1:])), {k: change(v) for k, v in kwargs.items()}


def _take_back(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    step: _AsShards | None = vars(args[0]).pop(_STEP, None) if args else None
    if step is not None:
        step.hand_on(optimizer)


class _AsShards:
    """One step by a copy of an optimizer, with ShardTensors in place of torch's DTensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        groups = [{**group, "params": []} for group in optimizer.param_groups]
        state: dict[torch.Tensor, Any] = defaultdict(dict, optimizer.state)
        for group, made in zip(optimizer.param_groups, groups, strict=True):
            for param in group["params"]:
                stand_in = param
                if owner_of(param) is not None and not isinstance(param, ShardTensor):
                    stand_in = _shard(param, param)
                    stand_in.requires_grad_(param.requires_grad)
                    self._pairs.append((param, stand_in))
                    if param in state:
                        state[stand_in] = _changed(state.pop(param), partial(_shard, param=param))
                made["params"].append(stand_in)
        self._bring_grads()
        self.copy = optimizer_like(optimizer, groups, state)
        self._replaced = self._replace_attributes()
        vars(self.copy)[_STEP] = self

    def _bring_grads(self) -> None:
        for param, stand_in in self._pairs:
            stand_in.grad = None if param.grad is None else _shard(param.grad, param)

    def _replace_attributes(self) -> list[str]:
        """Replace parameters in the copy's lists and dicts; return the attributes' names."""
        known = {id(param): stand_in for param, stand_in in self._pairs}
        found = set[str]()

        def change(value: torch.Tensor) -> torch.Tensor:
            found.add(name)
            return known.get(id(value), value)

        for name, value in list(vars(self.copy).items()):
            if type(value) in (list, tuple, dict) and name != "param_groups":
                made = _changed(value, change)
                if name in found:
                    vars(self.copy)[name] = made
        return sorted(found)

    def around(self, value: Any) -> Any:
        """Return a closure that also brings the gradients it leaves; return other values."""
        if not callable(value):
            return value

        def closure(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            self._bring_grads()
            return result

        return closure

    def hand_on(self, optimizer: Optimizer) -> None:
        """Write the copy's state, options and attributes back to the optimizer."""
        state = self.copy.state
        for param, stand_in in self._pairs:
            if stand_in in state:
                kept = _changed(state.pop(stand_in), partial(_like, param=param))
                optimizer.state[param] = kept
        for key, value in state.items():
            optimizer.state[key] = value
        for name in self._replaced:
            del vars(self.copy)[name]
        take_settings(optimizer, self.copy)


def _shard(value: Any, param: torch.Tensor) -> Any:
    """Return a ShardTensor over the memory of a DTensor that is cut as the parameter is."""
    owner = owner_of(param)
    if not isinstance(value, DTensor) or not (value is param or owner.form.is_alike(value)):
        return value
    return ShardTensor.wrap(local_of(value).detach(), owner.cut)


def _like(value: Any, param: torch.Tensor) -> Any:
    """Return a DTensor of the parameter's kind over the memory of a ShardTensor."""
    is_cut = isinstance(value, ShardTensor)
    return owner_of(param).form.like(value._local_tensor) if is_cut else value


def _changed(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Change the tensors in a state, also in lists and dicts."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) is dict:
        return {key: _changed(each, change) for key, each in value.items()}
    is_list = type(value) in (list, tuple)
    return type(value)(_changed(each, change) for each in value) if is_list else value
