"""Accumulation of gradients: micro-batch by micro-batch, or unit by unit.

Note [Micro-batches in rounds]
The forward pass of each micro-batch is the caller's own code, in a thread of its own, and one of
them runs at a time. Before a unit's forward it waits until all others have come to the same unit.
So they go through a unit one after the other, a *round*, and the schedule sees one visit of it: the
first gathers it, the last one frees it. All their calls are recorded as one forward pass, so a
backward pass through the sum of the losses reduces a unit when the last micro-batch is through it.

Note [Backward goes by rounds too]
Of the nodes that are ready autograd takes the one with the highest number, and a thread counts the
nodes that it makes. Each micro-batch goes on counting where the one before it has stopped, so a
single backward pass takes the rounds in the reverse order, and in a round one micro-batch after the
other: the recomputed activations of one block are there at a time. A round goes from the last
micro-batch to the first, so that backward goes from the first to the last and sums gradients in the
order in which an accumulation window does.
"""

import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import repeat
from typing import Any, Literal, overload

import torch
from torch import nn

from shardwise.engine.api import engine_of
from shardwise.engine.calls import Call
from shardwise.engine.conditions import Alone
from shardwise.engine.parts import Model, modules_of
from shardwise.engine.passes import in_backward
from shardwise.engine.runtime import Engine
from shardwise.engine.surroundings import Generators, Surroundings
from shardwise.errors import ConfigError, StateError
from shardwise.unit.unit import Unit

_HERE = "accumulate(order='breadth_first')"


@overload
def accumulate(model: Model, *, last: bool) -> AbstractContextManager[None]: ...


@overload
def accumulate(
    model: nn.Module,
    forward: Callable[[Any], torch.Tensor],
    micro_batches: Sequence[Any],
    *,
    order: Literal["breadth_first"],
) -> torch.Tensor: ...


def accumulate(
    model: Model,
    forward: Callable[[Any], torch.Tensor] | None = None,
    micro_batches: Sequence[Any] = (),
    *,
    last: bool | None = None,
    order: Literal["depth_first", "breadth_first"] = "depth_first",
) -> AbstractContextManager[None] | torch.Tensor:
    """Accumulate gradients over micro-batches, one after the other or unit by unit.

    ``with accumulate(model, last=...):`` runs one micro-batch of an accumulation window; ``last``
    says that the step comes next. ``accumulate(model, forward, micro_batches,
    order="breadth_first")`` runs all of them through each unit in turn and returns the sum of their
    losses: see `layer_by_layer`.

    For a pipeline, one step of its schedule, with the stages of this rank: gradients of all but the
    last then stay on the rank at any stage of ZeRO.

    Where the stage (or ``reduce_every="step"``) reduces once per step, gradients of the other
    micro-batches stay on this rank, unreduced, summed in the reduce dtype; ``p.grad`` cannot be
    read until the last one is through. Where every micro-batch is reduced, ``p.grad`` grows by
    the mean of each; over replicas (HSDP) `shard`'s gradients are summed once, with the last one,
    and cannot be read before. As without Shardwise, dividing the loss is up to you.
    """
    if order == "breadth_first":
        if forward is None or not isinstance(model, nn.Module):
            raise ConfigError(f"{_HERE}: expected a model, its forward function and micro-batches")
        return layer_by_layer(model, forward, micro_batches)
    if forward is not None or last is None:
        raise TypeError(
            "accumulate(): expected accumulate(model, last=True or False), or accumulate(model, "
            f"forward, micro_batches, order='breadth_first'); got last={last!r}, order={order!r}"
        )
    return _window(model, last)


@contextmanager
def _window(model: Model, last: bool) -> Iterator[None]:
    with ExitStack() as windows:
        for each in modules_of(model):
            windows.enter_context(engine_of(each).conditions.micro_batch(last=bool(last)))
        yield


def layer_by_layer(
    model: nn.Module, forward: Callable[[Any], torch.Tensor], micro_batches: Sequence[Any]
) -> torch.Tensor:
    """Run all micro-batches through each unit of the model before the next; return their loss.

    ``forward(micro_batch)`` is the forward pass of one micro-batch, the sharded model inside it,
    and returns its loss, a scalar. The result is the sum of the losses, so divide inside of
    ``forward`` where the mean is wanted; its ``backward()`` goes through the units in the same way.
    Full parameters are gathered, and fetched from the host or from files, once in forward and once
    in backward for all micro-batches, and gradients are reduced once. The literature calls this
    vertical or breadth-first gradient accumulation.

    Every micro-batch must run the same units in the same order. They are called from the last to
    the first. The first draws from the caller's random generators, the others from generators of
    their own that follow from these. **State** as after one forward pass of one batch.

    **Cost** the activations of all micro-batches at a time, with activation checkpointing the
    inputs of its blocks; a thread for each micro-batch, of which one runs at a time.

    **Raises** ConfigError for a model that is not sharded, for no micro-batch, and for a loss that
    is no scalar; StateError where micro-batches run different units, inside of a forward or
    backward pass or of a transform of torch.func, for stages of a pipeline and for optional units.
    What ``forward`` raises comes with the number of its micro-batch.
    """
    engine = engine_of(model)
    batches = list(micro_batches)
    _check(engine, batches)
    alone = len(batches) == 1
    losses: list[Any] = [forward(batches[0])] if alone else _Rounds(engine, forward, batches).run()
    for number, loss in enumerate(losses, 1):
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            kind = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"{_HERE}: forward() returned {kind} for micro-batch {number} of {len(batches)}; "
                "expected its loss, a tensor with one element"
            )
    return sum(losses[1:], losses[0])


def _check(engine: Engine, batches: list[Any]) -> None:
    if not batches:
        raise ConfigError(f"{_HERE}: expected one micro-batch or more, got none")
    if engine.is_running() or in_backward():
        raise StateError(f"{_HERE} inside of a forward or backward pass: call it between passes")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise StateError(f"{_HERE} inside of a transform of torch.func: call it outside")
    if engine.comm.axes.stages is not None:
        raise StateError(
            f"{_HERE}: the model is a stage of a pipeline, whose schedule says when each "
            "micro-batch runs; it gathers each unit once for all of them already"
        )
    optional = [u.name for u in engine.units if u.settings.optional]
    if optional and any(u.settings.stage.frees_after_forward for u in engine.units):
        raise StateError(
            f"{_HERE}: some ranks may skip unit '{optional[0]}', and all micro-batches must run "
            "the same units; accumulate them one by one, or shard without optional units"
        )


class _Ended(BaseException):
    """Ends a micro-batch's thread, as another one has failed."""


class _Lane:
    """One micro-batch on its way, in a thread of its own."""

    def __init__(self, number: int, generators: Generators) -> None:
        self.number = number
        self.generators = generators
        self.turn = threading.Semaphore(0)
        self.stack: list[Call] = []
        self.loss: Any = None


class _Rounds(Alone):
    """The forward passes of several micro-batches; see Note [Micro-batches in rounds]."""

    def __init__(
        self, engine: Engine, forward: Callable[[Any], torch.Tensor], batches: list[Any]
    ) -> None:
        self._engine = engine
        self._forward = forward
        self._batches = batches
        device = engine.comm.device
        generators = Generators.of_caller(device)
        own = [generators, *map(generators.derive, range(1, len(batches)))]
        self._lanes = [_Lane(n, g) for n, g in enumerate(own)][::-1]  # in the order of a round
        self._running = self._lanes[0]
        self._over = threading.Semaphore(0)  # the caller's turn
        self._stops = False
        self._error: BaseException | None = None
        self._visited: str | None = None  # by the first of this round; None after its end
        self._backward_is_next = False
        self._num_recorded = 0
        self._node = 0
        self._leaves = _Leaves(engine.units)
        self._records = torch.is_grad_enabled()
        self._surroundings = Surroundings(device)

    def run(self) -> list[Any]:
        """Run all of them; return their losses, that of the first one first."""
        passes, stack = self._engine.passes, self._engine.passes.stack
        self._pass = passes.begin_forward() if self._records else None
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_lane, place),
                name=f"shardwise-micro-batch-{lane.number + 1}",
                daemon=True,
            )
            for place, lane in enumerate(self._lanes)
        ]
        with self._engine.conditions.in_rounds(self):
            for thread in threads:
                thread.start()
            try:
                self._lanes[0].turn.release()
                self._over.acquire()
            except BaseException:  # an interrupt: the one that runs stops at its next unit
                self._stops = True
                self._over.acquire()
                raise
            finally:
                for lane, thread in zip(self._lanes, threads, strict=True):
                    if thread.is_alive() and self._stops:
                        self._running = lane
                        lane.turn.release()
                    thread.join()
                passes.go_on(list(stack), None)
                self._leaves.put_back()
                self._lanes[-1].generators.put()  # of the first micro-batch: the caller's
        if self._error is not None:
            raise self._error
        _count_to(self._node)  # the sum of the losses comes after all of them
        return [lane.loss for lane in reversed(self._lanes)]

    def _run_lane(self, place: int) -> None:
        lane = self._lanes[place]
        lane.turn.acquire()
        try:
            if not self._stops:
                with self._surroundings.entered():
                    self._resume(lane, None)
                    lane.loss = self._forward(self._batches[lane.number])
                    self._meet(lane, None)
                    self._suspend(lane)
        except _Ended:
            pass
        except BaseException as error:
            error.add_note(
                f"raised in micro-batch {lane.number + 1} of {len(self._batches)} of {_HERE}"
            )
            self._error, self._stops = error, True
        if self._stops or place == len(self._lanes) - 1:
            self._over.release()
        else:
            self._hand_on(place + 1)

    def _hand_on(self, place: int) -> None:
        self._running = self._lanes[place % len(self._lanes)]
        self._running.turn.release()

    # -- what the engine asks
    @property
    def others_follow(self) -> bool:  # type: ignore[override]
        """Tell whether other micro-batches are yet to run what this one runs."""
        return not self._stops and self._running is not self._lanes[-1]

    def arrive(self, unit: Unit) -> None:
        """Let the others come to the unit that this micro-batch is about to run."""
        lane = self._running
        self._meet(lane, unit)
        self._suspend(lane)
        self._hand_on(self._lanes.index(lane) + 1)
        lane.turn.acquire()
        if self._stops:
            self._engine.passes.go_on(lane.stack, self._pass)
            raise _Ended
        self._resume(lane, unit)

    def visit(self, schedule: Any, call: Call) -> bool:
        """Gather the unit, if this is the first to run it; tell whether its backward is next."""
        if self._running is self._lanes[0]:
            self._backward_is_next = super().visit(schedule, call)
            self._mates = weakref.WeakSet[Call]()
        else:
            call.unit.finish_unshard()  # it is there, but where a module's output is None
        self._mates.add(call)
        call.mates = self._mates
        return self._backward_is_next

    def check_backward(self) -> None:
        """Refuse a backward pass, as no micro-batch is through yet."""
        raise StateError(
            f"backward() inside of the forward() of {_HERE}: return the loss there, and call "
            "backward() on what layer_by_layer returns"
        )

    # -- from one to the next
    def _meet(self, lane: _Lane, unit: Unit | None) -> None:
        """Refuse micro-batches that do not run the same units."""
        name = None if unit is None else unit.name or "(root)"
        if lane is self._lanes[0]:
            self._visited = name
        elif self._visited != name:

            def told(found: str | None) -> str:
                return "is through" if found is None else f"runs unit '{found}'"

            raise StateError(
                f"{_HERE}: micro-batch {lane.number + 1} {told(name)} where micro-batch "
                f"{self._lanes[0].number + 1} {told(self._visited)}; all must run the same units "
                "in the same order. Accumulate such micro-batches one by one"
            )

    def _suspend(self, lane: _Lane) -> None:
        lane.generators = Generators.of_caller(self._engine.comm.device)
        self._node = max(self._node, _next_node())
        if self._pass is not None:  # a round is one visit of a unit
            if lane is self._lanes[0]:
                self._num_recorded = len(self._pass.order)
            del self._pass.order[self._num_recorded :]

    def _resume(self, lane: _Lane, unit: Unit | None) -> None:
        lane.generators.put()
        torch.clear_autocast_cache()  # of weights that another micro-batch has cast
        _count_to(self._node)
        self._engine.passes.go_on(lane.stack, self._pass)
        if self._records:
            entered = [call.unit for call in lane.stack]
            self._leaves.change(entered if unit is None else [*entered, unit])


def _next_node() -> int:
    """Return the number of the next node of a graph that this thread makes."""
    found: int = torch.autograd._get_sequence_nr()
    return found


def _count_to(node: int) -> None:
    """Let this thread number the next node of a graph so, or higher."""
    for _ in repeat(None, node - _next_node()):
        torch._C._functions.UndefinedGrad()  # a node of no graph counts too


class _Leaves:
    """A leaf of its own for each micro-batch in each unit, where gradients are summed in fp32.

    Autograd adds up what comes to one leaf in one backward pass in the dtype that the layers
    compute in. Gradients of a leaf of its own arrive alone, and are summed as those of the
    micro-batches of an accumulation window are.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._params = {
            unit.index: [
                (param, param.full)
                for param in unit.params
                if param.encoding.in_storage
                and param.is_trained
                and param.reduce_dtype not in (None, param.full.dtype)
            ]
            for unit in units
        }
        for unit in units:
            unit.has_local_sum |= bool(self._params[unit.index])

    def change(self, units: Sequence[Unit]) -> None:
        """Let the units' layers read other leaves."""
        for unit in units:
            for param, _ in self._params[unit.index]:
                param.read_through(param.another_leaf())

    def put_back(self) -> None:
        """Let all layers read the leaves that they have read before."""
        for params in self._params.values():
            for param, leaf in params:
                if param.full is not leaf:
                    param.read_through(leaf)
