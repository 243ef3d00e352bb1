"""``accumulate(order="breadth_first")``: all micro-batches run a unit before the next one.

Note [Micro-batches in rounds]
Each micro-batch's forward pass runs in a separate thread, and one thread runs at a time. Before a
unit's forward, a micro-batch waits until all others have reached the same unit. Then they run the
unit one after the other: a *round*. The schedule sees a round as one visit: the first micro-batch
gathers the unit and the last one frees it. All calls are recorded as one forward pass, so backward
through the sum of the losses reduces a unit once, after its last micro-batch.

Note [Backward goes by rounds too]
Among ready nodes, autograd runs the one with the highest sequence number. Each thread numbers its
own nodes. Each micro-batch continues the numbering of the one before it. So one backward pass takes
the rounds in reverse order, and the micro-batches of a round one after the other. Only one block's
recomputed activations are in memory at a time. A round runs from the last micro-batch to the first,
so backward runs from the first to the last and sums gradients in an accumulation window's order.
"""

import contextvars
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from shardwise.device import accelerator_generator, set_accelerator_generator, time_of
from shardwise.engine.api import engine_of
from shardwise.engine.calls import Call, ForwardPass
from shardwise.engine.passes import in_backward
from shardwise.engine.runtime import Engine
from shardwise.engine.status import SingleMicroBatch
from shardwise.errors import ConfigError, StateError
from shardwise.unit.unit import Unit


class Generators:
    """The states of torch's random generators, of the CPU and of the model's device.

    Each micro-batch continues from separate states. Activation checkpointing restores, in backward,
    the state from before a block's draws, which other micro-batches' draws must not have changed.
    """

    def __init__(
        self, device: torch.device, of_cpu: torch.Tensor, of_device: torch.Tensor | None
    ) -> None:
        self._device = device
        self._of_cpu = of_cpu
        self._of_device = of_device

    @classmethod
    def of_caller(cls, device: torch.device) -> "Generators":
        """Read the current states."""
        return cls(device, torch.get_rng_state(), accelerator_generator(device))

    def derive(self, number: int) -> "Generators":
        """Return states derived from these and ``number``; equal inputs give equal states."""
        states = [state for state in (self._of_cpu, self._of_device) if state is not None]
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=8)
        for state in states:
            digest.update(state.numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "little") >> 1
        made = [torch.Generator(each).manual_seed(seed) for each in ("cpu", self._device)]
        of_device = None if self._of_device is None else made[1].get_state()
        return Generators(self._device, made[0].get_state(), of_device)

    def put(self) -> None:
        """Set torch's generators to these states."""
        torch.set_rng_state(self._of_cpu)
        if self._of_device is not None:
            set_accelerator_generator(self._device, self._of_device)


class Surroundings:
    """The caller's thread-local state of torch, to enter in other threads."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        kinds = {"cpu", device.type}
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in sorted(kinds)
            if torch.is_autocast_enabled(kind)
        ]
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = _get_current_dispatch_mode_stack()
        self._saved_tensors = _saved_tensors_hooks()
        self._stream = time_of(device).current_stream()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the state in this thread."""
        with ExitStack() as stack:
            if self._device.index is not None:
                torch.accelerator.set_device_index(self._device.index)
            stack.enter_context(self._stream.use())
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for kind, dtype, caches in self._autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            for pack, unpack in self._saved_tensors:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            for mode in self._dispatch_modes:
                _push_mode(mode)
                key = getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None)
                stack.callback(_pop_mode, key)
            for mode in self._function_modes:
                _push_function_mode(mode)
                stack.callback(_pop_function_mode)
            yield


def _saved_tensors_hooks() -> list[tuple[Any, Any]]:
    """Return the caller's `saved_tensors_hooks`, outermost first."""
    found: list[tuple[Any, Any]] = []
    hooks = torch._C._autograd
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        found.insert(0, top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in found:
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return found


_HERE = "accumulate(order='breadth_first')"


def layer_by_layer(
    model: nn.Module, forward: Callable[[Any], torch.Tensor], micro_batches: Sequence[Any]
) -> torch.Tensor:
    """Run all micro-batches through each unit before the next unit; return the sum of the losses.

    ``forward(micro_batch)`` runs the sharded model and returns a scalar loss. Divide inside
    ``forward`` for a mean. ``backward()`` on the result takes the units in the same way. Full
    parameters are gathered, and fetched from the host or from files, once in forward and once in
    backward for all micro-batches. Gradients are reduced once. The literature calls this vertical
    or breadth-first gradient accumulation.

    Every micro-batch must run the same units in the same order. ``forward`` is called from the last
    micro-batch to the first. The first micro-batch draws from the caller's random generators, the
    others from generators derived from these. **State** as after one forward pass of one batch.

    **Cost** the activations of all micro-batches at once (with activation checkpointing, the inputs
    of its blocks). A thread for each micro-batch, of which one runs at a time.

    **Raises** ConfigError for a model that is not sharded, an empty list, or a loss that is not a
    scalar. StateError for micro-batches that run different units, for pipeline stages, for optional
    units, and inside a forward or backward pass or a torch.func transform. An error of ``forward``
    carries the number of its micro-batch.
    """
    engine = engine_of(model)
    batches = list(micro_batches)
    _check(engine, batches)
    alone = len(batches) == 1
    losses: list[Any] = (
        [forward(batches[0])] if alone else _InterleavedMicroBatches(engine, forward, batches).run()
    )
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
    """End a micro-batch's thread after another micro-batch has failed."""


class _Lane:
    """One micro-batch and the state of its thread."""

    def __init__(self, number: int, generators: Generators) -> None:
        self.number = number
        self.generators = generators
        self.turn = threading.Semaphore(0)
        self.stack: list[Call] = []
        self.loss: Any = None


class _InterleavedMicroBatches(SingleMicroBatch):
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
        """Run all micro-batches; return their losses in the order of the micro-batches."""
        passes, stack = self._engine.passes, self._engine.passes.stack
        self._pass = passes.forward.begin() if self._records else None
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_lane, place),
                name=f"shardwise-micro-batch-{lane.number + 1}",
                daemon=True,
            )
            for place, lane in enumerate(self._lanes)
        ]
        with self._engine.status.running_together(self):
            for thread in threads:
                thread.start()
            try:
                self._lanes[0].turn.release()
                self._over.acquire()
            except BaseException:  # an interrupt: the running lane stops at its next unit
                self._stops = True
                self._over.acquire()
                raise
            finally:
                for lane, thread in zip(self._lanes, threads, strict=True):
                    if thread.is_alive() and self._stops:
                        self._running = lane
                        lane.turn.release()
                    thread.join()
                self._go_on(list(stack), None)
                self._leaves.put_back()
                self._lanes[-1].generators.put()  # of the first micro-batch: the caller's
        if self._error is not None:
            raise self._error
        _count_to(self._node)  # the sum of the losses must be the latest node
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

    # -- called by the engine
    @property
    def others_follow(self) -> bool:  # type: ignore[override]
        """Tell whether other micro-batches still have to run this unit."""
        return not self._stops and self._running is not self._lanes[-1]

    def wait_for_others(self, unit: Unit) -> None:
        """Wait until the other micro-batches reach the unit that this one is about to run."""
        lane = self._running
        self._meet(lane, unit)
        self._suspend(lane)
        self._hand_on(self._lanes.index(lane) + 1)
        lane.turn.acquire()
        if self._stops:
            self._go_on(lane.stack, self._pass)
            raise _Ended
        self._resume(lane, unit)

    def gather(self, schedule: Any, call: Call) -> bool:
        """Gather the unit for the round's first micro-batch; tell whether its backward is next."""
        if self._running is self._lanes[0]:
            self._backward_is_next = super().gather(schedule, call)
            self._peers = weakref.WeakSet[Call]()
        else:
            call.unit.finish_unshard()  # gathered already, unless a module returned None
        self._peers.add(call)
        call.peers = self._peers
        return self._backward_is_next

    def check_backward(self) -> None:
        """Raise StateError: a backward pass inside ``forward`` is not supported."""
        raise StateError(
            f"backward() inside of the forward() of {_HERE}: return the loss there, and call "
            "backward() on what layer_by_layer returns"
        )

    # -- switching between micro-batches
    def _meet(self, lane: _Lane, unit: Unit | None) -> None:
        """Raise StateError if the micro-batches do not run the same units."""
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
        if self._pass is not None:  # count a round as one visit
            if lane is self._lanes[0]:
                self._num_recorded = len(self._pass.order)
            del self._pass.order[self._num_recorded :]

    def _go_on(self, stack: list[Call], forward_pass: ForwardPass | None) -> None:
        """Continue inside the calls of ``stack``; record later calls in ``forward_pass``."""
        passes = self._engine.passes
        passes.stack, passes.forward.current = stack, forward_pass

    def _resume(self, lane: _Lane, unit: Unit | None) -> None:
        lane.generators.put()
        torch.clear_autocast_cache()  # of weights that another micro-batch has cast
        _count_to(self._node)
        self._go_on(lane.stack, self._pass)
        if self._records:
            entered = [call.unit for call in lane.stack]
            self._leaves.change(entered if unit is None else [*entered, unit])


def _next_node() -> int:
    """Return the sequence number of this thread's next autograd node."""
    found: int = torch.autograd._get_sequence_nr()
    return found


def _count_to(node: int) -> None:
    """Advance this thread's sequence number to ``node``, or leave it if it is higher."""
    for _ in repeat(None, node - _next_node()):
        torch._C._functions.UndefinedGrad()  # a node outside any graph counts too


class _Leaves:
    """A separate leaf per micro-batch and parameter, if the reduce dtype is not the compute dtype.

    Within one backward pass autograd sums a leaf's gradients in the compute dtype. With separate
    leaves each micro-batch's gradient arrives alone and is summed as in an accumulation window.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._params = {
            unit.index: [
                (param, param.full)
                for param in unit.params
                if param.encoding.is_in_storage
                and param.is_trained
                and param.gradient.reduce_dtype not in (None, param.full.dtype)
            ]
            for unit in units
        }
        for unit in units:
            unit.grads.has_local_sum |= bool(self._params[unit.index])

    def change(self, units: Sequence[Unit]) -> None:
        """Give the units' layers new leaves."""
        for unit in units:
            for param, _ in self._params[unit.index]:
                param.show_leaf(param.new_leaf())

    def put_back(self) -> None:
        """Restore the original leaves in all layers."""
        for params in self._params.values():
            for param, leaf in params:
                if param.full is not leaf:
                    param.show_leaf(leaf)
