"""Optimizers whose steps gather the tensors that they need whole.

See Note [Gathering for an optimizer]. Under `fully_shard` the optimizer steps ShardTensors, see
`step.stand_ins`.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from shardwise.comm.collectives import Comm
from shardwise.errors import ConfigError
from shardwise.step.local_step import Args, Kwargs
from shardwise.step.probe import refuse_collectives, traits_of
from shardwise.tensor.draws import same_draws
from shardwise.tensor.gathered_step import GatheredStep, running
from shardwise.tensor.plain_state import GATHERS, cut_plain_state, owner_of
from shardwise.tensor.replaced import params_of

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
    wrapped = _Gathering(optimizer.step)

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        return wrapped.step(self, args, kwargs)

    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


class _Gathering:
    """The step of one optimizer, and whether its cost was logged."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._is_logged = False

    def step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> Any:
        """Step with gathers; draws are equal on all ranks."""
        params = params_of(optimizer)
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
