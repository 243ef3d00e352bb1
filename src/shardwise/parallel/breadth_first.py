"""``accumulate(order="breadth_first")``: all micro-batches run a unit before the next one.

Note [Micro-batches in rounds]
Each micro-batch's forward pass runs in a separate thread, and one thread runs at a time. Before a
unit's forward, a micro-batch waits until all others have reached the same unit. Then they run the
unit one after the other: a *round*. The schedule sees a round as one visit: the first micro-batch
gathers the unit and the last one frees it. All calls are recorded as one forward pass, so backward
through the sum of the losses reduces a unit once, after its last micro-batch.

Note [Rounds in backward]
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
        of_cpu = torch.Generator("cpu").manual_seed(seed).get_state()
        of_device = None
        if self._of_device is not None:
            of_device = torch.Generator(self._device).manual_seed(seed).get_state()
        return Generators(self._device, of_cpu, of_device)

    def restore(self) -> None:
        """Set torch's generators to these states."""
        torch.set_rng_state(self._of_cpu)
        if self._of_device is not None:
            set_accelerator_generator(self._device, self._of_device)


class ThreadState:
    """The caller's thread-local state of torch, to apply in other threads."""

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
    pairs: list[tuple[Any, Any]] = []
    hooks = torch._C._autograd
    while (top := hooks._top_saved_tensors_default_hooks(False)) is not None:
        pairs.insert(0, top)
        hooks._pop_saved_tensors_default_hooks()
    for pack, unpack in pairs:
        hooks._push_saved_tensors_default_hooks(pack, unpack)
    return pairs


_CALL = "accumulate(order='breadth_first')"


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
                f"{_CALL}: forward() returned {kind} for micro-batch {number} of {len(batches)}; "
                "expected its loss, a tensor with one element"
            )
    return sum(losses[1:], losses[0])


def _check(engine: Engine, batches: list[Any]) -> None:
    if not batches:
        raise ConfigError(f"{_CALL}: expected one micro-batch or more, got none")
    if engine.is_running() or in_backward():
        raise StateError(f"{_CALL} inside of a forward or backward pass: call it between passes")
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise StateError(f"{_CALL} inside of a transform of torch.func: call it outside")
    if engine.comm.axes.stages is not None:
        raise StateError(
            f"{_CALL}: the model is a stage of a pipeline, whose schedule says when each "
            "micro-batch runs; it gathers each unit once for all of them already"
        )
    optional = [u.name for u in engine.units if u.settings.optional]
    if optional and any(u.settings.stage.frees_after_forward for u in engine.units):
        raise StateError(
            f"{_CALL}: some ranks may skip unit '{optional[0]}', and all micro-batches must run "
            "the same units; accumulate them one by one, or shard without optional units"
        )


class _Ended(BaseException):
    """End a micro-batch's thread after another micro-batch has failed."""


class _MicroBatch:
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
        derived = [generators.derive(number) for number in range(1, len(batches))]
        # In the order of a round: from the last micro-batch to the first.
        self._micro_batches = [
            _MicroBatch(number, states) for number, states in enumerate([generators, *derived])
        ][::-1]
        self._running = self._micro_batches[0]
        self._over = threading.Semaphore(0)  # the caller's turn
        self._stops = False  # after an error or an interrupt: all threads end at their next unit
        self._error: BaseException | None = None
        self._visited: str | None = None  # unit of this round; None after the first one's end
        self._backward_is_next = False
        self._num_recorded = 0
        self._node = 0  # the highest sequence number of autograd nodes so far
        self._leaves = _Leaves(engine.units)
        self._records = torch.is_grad_enabled()
        self._thread_state = ThreadState(device)

    def run(self) -> list[Any]:
        """Run all micro-batches; return their losses in the order of the micro-batches."""
        passes = self._engine.passes
        stack = passes.stack
        self._pass = passes.forward.begin() if self._records else None
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_thread, place),
                name=f"shardwise-micro-batch-{micro_batch.number + 1}",
                daemon=True,
            )
            for place, micro_batch in enumerate(self._micro_batches)
        ]
        with self._engine.status.running_together(self):
            for thread in threads:
                thread.start()
            try:
                self._micro_batches[0].turn.release()
                self._over.acquire()
            except BaseException:  # an interrupt: the running micro-batch stops at its next unit
                self._stops = True
                self._over.acquire()
                raise
            finally:
                for micro_batch, thread in zip(self._micro_batches, threads, strict=True):
                    if thread.is_alive() and self._stops:
                        self._running = micro_batch
                        micro_batch.turn.release()
                    thread.join()
                self._set_calls(list(stack), None)
                self._leaves.restore()
                first = self._micro_batches[-1]
                first.generators.restore()  # it has drawn from the caller's generators
        if self._error is not None:
            raise self._error
        _count_to(self._node)  # the sum of the losses must be the latest node
        return [micro_batch.loss for micro_batch in reversed(self._micro_batches)]

    def _run_thread(self, place: int) -> None:
        micro_batch = self._micro_batches[place]
        micro_batch.turn.acquire()
        try:
            if not self._stops:
                with self._thread_state.entered():
                    self._resume(micro_batch, None)
                    micro_batch.loss = self._forward(self._batches[micro_batch.number])
                    self._check_same_unit(micro_batch, None)
                    self._suspend(micro_batch)
        except _Ended:
            pass
        except BaseException as error:
            error.add_note(
                f"raised in micro-batch {micro_batch.number + 1} of {len(self._batches)} of {_CALL}"
            )
            self._error = error
            self._stops = True
        if self._stops or place == len(self._micro_batches) - 1:
            self._over.release()
        else:
            self._pass_turn(place + 1)

    def _pass_turn(self, place: int) -> None:
        self._running = self._micro_batches[place % len(self._micro_batches)]
        self._running.turn.release()

    # -- called by the engine
    @property
    def others_follow(self) -> bool:  # type: ignore[override]
        """Tell whether other micro-batches still have to run this unit."""
        return not self._stops and self._running is not self._micro_batches[-1]

    def wait_for_others(self, unit: Unit) -> None:
        """Wait until the other micro-batches reach the unit that this one is about to run."""
        micro_batch = self._running
        self._check_same_unit(micro_batch, unit)
        self._suspend(micro_batch)
        self._pass_turn(self._micro_batches.index(micro_batch) + 1)
        micro_batch.turn.acquire()
        if self._stops:
            self._set_calls(micro_batch.stack, self._pass)
            raise _Ended
        self._resume(micro_batch, unit)

    def gather(self, schedule: Any, call: Call) -> bool:
        """Gather the unit for the round's first micro-batch; tell whether its backward is next."""
        if self._running is self._micro_batches[0]:
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
            f"backward() inside of the forward() of {_CALL}: return the loss there, and call "
            "backward() on what layer_by_layer returns"
        )

    # -- switching between micro-batches
    def _check_same_unit(self, micro_batch: _MicroBatch, unit: Unit | None) -> None:
        """Raise StateError if the micro-batches do not run the same units."""
        name = None if unit is None else unit.name or "(root)"
        if micro_batch is self._micro_batches[0]:
            self._visited = name
        elif self._visited != name:
            first = self._micro_batches[0]
            raise StateError(
                f"{_CALL}: micro-batch {micro_batch.number + 1} {_describe_place(name)} where "
                f"micro-batch {first.number + 1} {_describe_place(self._visited)}; all must run "
                "the same units in the same order. Accumulate such micro-batches one by one"
            )

    def _suspend(self, micro_batch: _MicroBatch) -> None:
        micro_batch.generators = Generators.of_caller(self._engine.comm.device)
        self._node = max(self._node, _next_node())
        if self._pass is not None:  # count a round as one visit
            if micro_batch is self._micro_batches[0]:
                self._num_recorded = len(self._pass.order)
            del self._pass.order[self._num_recorded :]

    def _set_calls(self, stack: list[Call], forward_pass: ForwardPass | None) -> None:
        """Set the running calls to ``stack``; record later calls in ``forward_pass``."""
        passes = self._engine.passes
        passes.stack = stack
        passes.forward.current = forward_pass

    def _resume(self, micro_batch: _MicroBatch, unit: Unit | None) -> None:
        micro_batch.generators.restore()
        torch.clear_autocast_cache()  # of weights that another micro-batch has cast
        _count_to(self._node)
        self._set_calls(micro_batch.stack, self._pass)
        if self._records:
            entered = [call.unit for call in micro_batch.stack]
            self._leaves.change(entered if unit is None else [*entered, unit])


def _describe_place(unit: str | None) -> str:
    return "is through" if unit is None else f"runs unit '{unit}'"


def _next_node() -> int:
    """Return the sequence number of this thread's next autograd node."""
    number: int = torch.autograd._get_sequence_nr()
    return number


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

    def restore(self) -> None:
        """Restore the original leaves in all layers."""
        for params in self._params.values():
            for param, leaf in params:
                if param.full is not leaf:
                    param.show_leaf(leaf)
