"""The tracer of modules: one micro-batch on fake tensors becomes a `Tape`, without an accelerator.

Note [Bytes alive]
The tape books the bytes that the module's operations allocate. Parameters are left out (the engine
owns them); inputs and buffers are booked separately. A full gradient is booked from the moment
autograd writes it. At the unit's ``after_backward`` the engine takes it, which the tape does not
book: summed over a tape, ``net.grad_full`` is the gradients of one micro-batch, and all other sums
are zero.

A player frees a unit's gradients at its ``after_backward``: all that was booked for its parameters,
also in works of other units that use them. A tied weight's gradient is booked from its first part
on, which autograd holds until the last part is computed.

Note [Which bytes are logits]
Logits are tensors as wide as the vocabulary, which is the largest embedding of the model. In a
model without embeddings nothing counts as logits; its outputs count as activations.
"""

import copy
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.config import UnitChoice
from shardwise.engine.hooks import register_hooks
from shardwise.engine.passes import Passes
from shardwise.engine.tree import map_tensors, tensors_in
from shardwise.errors import ConfigError
from shardwise.layout.units import UnitSpec, partition_into_units
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    Phase,
    Tape,
    TapeParam,
    TapeUnit,
    UnitWork,
    Visit,
    VisitKind,
)
from shardwise.plan.model.tracking import StorageChange, Tracker, dtype_name
from shardwise.plan.sizes import DtypeName

Batch = TypeVar("Batch")

_COMPUTE_DTYPES: dict[DtypeName, torch.dtype | None] = {
    "float32": None,  # precision fp32 keeps each parameter's own dtype and casts nothing
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def trace(
    model: nn.Module,
    make_batch: Callable[[], Batch],
    loss: Callable[[nn.Module, Batch], Tensor],
    *,
    name: str,
    compute_dtype: DtypeName = "float32",
    units: tuple[UnitChoice, ...] | None = None,
) -> Tape:
    """Run forward, loss and backward of a plain module on fake tensors, and write the tape.

    The model may be on meta or on the CPU; a copy of fake tensors is run, and its values are not
    read. ``make_batch`` is called where every new tensor is fake; ``loss(model, batch)`` calls the
    model and returns a scalar. ``name`` is in errors.

    Events are visits with one `UnitWork` after each, even if it is zero. There are several if a
    checkpoint inside a unit recomputes, which no hook sees (transformers does so): works of phases
    recompute and backward then alternate. The last work is after backward, when the loss is freed:
    summed over the tape, only ``net.grad_full`` is not zero. A `UnitWork` belongs to the innermost
    unit whose forward runs, or to the last unit whose backward has begun and not ended.

    **Cost** no memory of the model's size; about 0.1 ms per operation.

    **Raises** ConfigError when the model reads values (which fake tensors have not), gives no
    scalar loss, cannot be copied, or fails; the message is the model's own.
    """
    if compute_dtype not in _COMPUTE_DTYPES:
        names = ", ".join(_COMPUTE_DTYPES)
        raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {names}")
    cast_to = _COMPUTE_DTYPES[compute_dtype]
    specs = partition_into_units(model, units)
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {
            id(param): nn.Parameter(
                _fake(param, (param.is_floating_point() and cast_to) or param.dtype),
                requires_grad=param.requires_grad,
            )
            for param in model.parameters()
        }
        units_run = _copied_units(specs, params, name)
        recorder = _Recorder(units_run, cast_to)
        batch = make_batch()
        recorder.exclude_inputs(batch)
        _step(recorder, lambda: loss(units_run[0].module, batch), name)
        written = {i: recorder.got_grad(p) for i, p in params.items()}
        return Tape(
            units=_unit_facts(specs, written),
            events=recorder.events(),
            compute_dtype=compute_dtype,
            input_bytes=recorder.input_bytes,
            buffer_bytes=recorder.buffer_bytes,
        )


def _step(recorder: "_Recorder", compute_loss: Callable[[], object], name: str) -> None:
    # torch logs the stack of an operation that fails; the error describes it.
    log = logging.getLogger(fake_tensor.__name__)
    was, log.disabled = log.disabled, True
    try:
        recorder.step(compute_loss)
    except ConfigError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"model {name}: tracing it on fake tensors failed: {type(error).__name__}: "
            f"{first_line.rstrip('.')}. A forward that reads values (.item(), branches on data) "
            "cannot be traced; nor can a batch that does not fit it"
        ) from error
    finally:
        log.disabled = was


def _unit_facts(specs: Sequence[UnitSpec], written: Mapping[int, bool]) -> tuple[TapeUnit, ...]:
    """Describe all units, the root first.

    ``written`` has the parameters by id, in the model's order: True if it got a gradient.
    """
    places = {param: place for place, (param, wrote) in enumerate(written.items()) if wrote}
    units: list[TapeUnit] = []
    first_places: list[int] = []
    for spec in specs:
        params = tuple(
            TapeParam(
                p.name,
                tuple(p.param.shape),
                dtype_name(p.param.dtype),
                p.param.requires_grad,
                gets_grad=not p.param.requires_grad or written[id(p.param)],
            )
            for p in spec.params
        )
        reads = type(spec.module).forward is not nn.Embedding.forward
        units.append(TapeUnit(spec.name, params, reads))
        owned = [places[id(p.param)] for p in spec.params if id(p.param) in places]
        first_places.append(min(owned, default=-1))
    units[0] = replace(units[0], comes_last=first_places[0] > max(first_places[1:], default=0))
    return tuple(units)


# -- a copy of fake tensors
@dataclass(frozen=True)
class _Unit:
    """A unit with the attributes that `engine.passes` reads."""

    index: int
    name: str
    module: nn.Module
    params: tuple[nn.Parameter, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return (self.module,)

    def read_versions(self) -> tuple[int, ...]:
        return ()


def _fake(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")


def _copied_units(
    specs: Sequence[UnitSpec], params: Mapping[int, nn.Parameter], name: str
) -> list[_Unit]:
    """Copy a model with all tensors that it holds fake; return its units, the whole model first.

    A tensor that several modules share stays one tensor.
    """
    model = specs[0].module
    copies: dict[int, object] = {**params}
    for module in model.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in copies:
                copies[id(value)] = _fake(value, value.dtype)
    try:
        copied = copy.deepcopy(model, copies).train()
    except Exception as error:
        raise ConfigError(f"model {name}: it cannot be copied to be traced: {error}") from error
    modules = dict(zip(map(id, model.modules()), copied.modules(), strict=True))
    return [
        _Unit(n, s.name, modules[id(s.module)], tuple(params[id(p.param)] for p in s.params))
        for n, s in enumerate(specs)
    ]


# -- recording
@dataclass
class _LogSegment:
    """The log of one `UnitWork`, whose bytes have no kinds yet: entries ``lo`` to ``hi``."""

    unit: int
    phase: Phase
    lo: int
    hi: int
    costs: tuple[Cost, ...]


class _Recorder:
    """Receives the calls of a model's units, as the engine does, and cuts the log into works.

    `engine.passes` makes the calls. Nothing is gathered, reduced or refused.
    """

    suspended = False

    def __init__(self, units: list[_Unit], cast_to: torch.dtype | None) -> None:
        self.units = units
        self._cast_to = cast_to
        self.tracker = Tracker(self._switch)
        self.input_bytes = self.buffer_bytes = 0
        self._items: list[_LogSegment | Visit] = []
        self._begin = 0  # of the current span
        self._grads: set[int] = set()  # serials
        self._with_grad: set[int] = set()  # parameters by id
        self._written: list[
            tuple[int, StorageChange]
        ] = []  # place in the log, the release if summed
        self._first_in_checkpoint: set[int] = set()  # units by index
        self._region: Callable[[], object] = lambda: None  # the checkpoint seen last
        self._backward: list[int] = []  # units whose backward has begun and is not over
        self._begun = False  # the backward pass
        tables = (m for m in units[0].module.modules() if isinstance(m, nn.Embedding))
        self._vocab = max((table.num_embeddings for table in tables), default=-1)
        self._passes = Passes(self)
        self._passes.take_units(units)
        for unit in units:
            register_hooks(self, unit)
            for param in unit.params:
                if param.requires_grad:
                    self._passes.watch_grad(unit, param)

    def exclude_inputs(self, batch: object) -> None:
        """Leave parameters, buffers and inputs out of the log; count the latter two."""
        for param in self.units[0].module.parameters():
            self.tracker.exclude(param)
        for module in self.units[0].module.modules():
            for tensor in (*module._buffers.values(), *vars(module).values()):
                if isinstance(tensor, Tensor):
                    self.buffer_bytes += self.tracker.exclude(tensor)
        self.input_bytes = sum(self.tracker.exclude(t) for t in tensors_in(batch))

    def step(self, compute_loss: Callable[[], object]) -> None:
        """Run forward, loss and backward."""
        with self.tracker:
            value = compute_loss()
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = type(value).__name__
                if isinstance(value, Tensor):
                    what = f"a tensor of shape {tuple(value.shape)}"
                raise ConfigError(f"loss: expected a scalar tensor, got {what}")
            value.backward()
            del value
        self._end_span()

    def got_grad(self, param: Tensor) -> bool:
        """True if autograd wrote a gradient of this parameter."""
        return id(param) in self._with_grad

    # -- visits and spans
    def _visit(
        self, kind: VisitKind, unit: _Unit, recomputes: bool = False, input_bytes: int = 0
    ) -> None:
        if self._items:
            self._end_span()
        self._items.append(Visit(kind, unit.index, recomputes, input_bytes))
        self._begin = len(self.tracker.log)
        self.tracker.recomputes = False

    def _switch(self) -> None:
        if self.tracker.has_costs:
            self._end_span()
            self._begin = len(self.tracker.log)

    def _end_span(self) -> None:
        unit, phase = self._place()
        if phase == "backward" and self.tracker.recomputes:
            phase = "recompute"
        costs = self.tracker.take_costs()
        self._items.append(_LogSegment(unit, phase, self._begin, len(self.tracker.log), costs))

    def _place(self) -> tuple[int, Phase]:
        """Return the innermost unit that runs now, and the phase."""
        if self._passes.stack:
            index: int = self._passes.stack[-1].unit.index
            return index, "recompute" if self._begun else "forward"
        if self._begun:
            return (self._backward[-1] if self._backward else 0), "backward"
        return 0, "loss"

    # -- forward (hooks.Watcher)
    def before_forward(self, unit: _Unit, args: object, kwargs: object) -> object:
        """Record the visit, cast the inputs, watch them for backward."""
        call = self._passes.enter(unit)
        input_bytes = 0
        if not call.in_backward and unit.index:  # masks and tables are not computed
            input_bytes = sum(t.nbytes for t in tensors_in(args) if t.grad_fn is not None)
        self._visit("before_forward", unit, call.recomputes, input_bytes)
        if not call.in_backward:
            self._note_checkpoint(unit)
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        if torch.is_grad_enabled() and not call.recomputes:
            self._passes.record(call)
            self._passes.watch_inputs(call, (args, kwargs))
        return args, kwargs

    def _note_checkpoint(self, unit: _Unit) -> None:
        """Record a unit that is the first one inside a checkpoint.

        A checkpoint is recognised by its hooks on saved tensors, which live as long as its graph.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks and hooks[0] is not self._region():  # type: ignore[redundant-expr]  # None, too
            self._region = weakref.ref(hooks[0])
            self._first_in_checkpoint.add(unit.index)

    def _cast(self, tensor: Tensor) -> Tensor:
        if self._cast_to is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._cast_to)

    def after_forward(self, unit: _Unit, output: object) -> None:
        """Record the visit, watch the outputs for backward."""
        stack = self._passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        self._visit("after_forward", unit, stack[-1].recomputes)
        call = self._passes.leave()
        if call.is_recorded:
            self._passes.watch_outputs(call, output)

    # -- backward (passes.Listener)
    def _ignore(self, *_: object) -> None:
        """Do nothing: these calls change no bytes."""

    on_pass_begin = on_call_reached = on_call_end = on_pass_raised = on_double_backward = _ignore

    def on_grad(self, unit: _Unit, leaf: Tensor) -> None:
        """Record which gradient exists, and from which place in the log on."""
        self._with_grad.add(id(leaf))
        serial = None if leaf.grad is None else self.tracker.serial_of(leaf.grad)
        if serial is not None:
            release = StorageChange(serial, -self.tracker.lives[serial].num_bytes)
            self._written.append((len(self.tracker.log), release))

    def on_backward(self, unit: _Unit, is_first: bool) -> None:
        """Record the visit."""
        self._visit("before_backward", unit)
        self._begun = True
        self._backward.append(unit.index)

    def on_unit_end(self, unit: _Unit) -> None:
        """Record the visit; the engine owns the gradients from now on."""
        self._visit("after_backward", unit)
        self._backward = [index for index in self._backward if index != unit.index]
        for param in unit.params:
            if param.grad is not None:
                serial = self.tracker.serial_of(param.grad)
                if serial is not None:
                    self._grads.add(serial)
                self.tracker.release(param.grad)
                param.grad = None

    def on_pass_end(self) -> None:
        """Close the units that are still open; there is one pass only."""
        for unit in reversed(self.units):
            if self._passes.is_open(unit):
                self._passes.close(unit)

    # -- the tape
    def events(self) -> tuple[UnitWork | Visit, ...]:
        """Return visits and works in order, each byte under its kind.

        The root's work after the last unit's forward is the loss. Only blocks that are recomputed
        have bytes of inputs, which a checkpoint saves. The checkpoint is around the block; if no
        forward of the unit was seen again, it is inside.
        """
        visits = [(n, item) for n, item in enumerate(self._items) if isinstance(item, Visit)]
        ends = [n for n, v in visits if v.kind == "after_forward" and v.unit and not v.recomputes]
        last = max(ends, default=-1)
        seen = {v.unit for _, v in visits if v.recomputes}
        segments = [item for item in self._items if isinstance(item, _LogSegment)]
        recomputed = {segment.unit for segment in segments if segment.phase == "recompute"}
        saved = (recomputed - seen) | self._first_in_checkpoint
        events: list[UnitWork | Visit] = []
        for place, item in enumerate(self._items):
            if isinstance(item, Visit):
                events.append(item if item.unit in saved else replace(item, input_bytes=0))
                continue
            if place > last and item.unit == 0 and item.phase == "forward":
                item.phase = "loss"
            events.append(self._work(item))
        return tuple(events)

    def _work(self, segment: _LogSegment) -> UnitWork:
        changes = self.tracker.log[segment.lo : segment.hi]
        peak, net = self._peak_and_net(changes, segment)
        inside = [(p, c) for p, c in self._written if segment.lo < p <= segment.hi]
        if not inside and not net.grad_full and not peak.grad_full:
            return UnitWork(segment.unit, segment.phase, segment.costs, peak, net, peak, net)
        for place, change in reversed(inside):
            changes.insert(place - segment.lo, change)
        return UnitWork(
            segment.unit,
            segment.phase,
            segment.costs,
            peak,
            net,
            *self._peak_and_net(changes, segment),
        )

    def _peak_and_net(
        self, changes: list[StorageChange], segment: _LogSegment
    ) -> tuple[LiveBytes, LiveBytes]:
        total = best = num_at_peak = 0
        for place, change in enumerate(changes, 1):
            total += change.num_bytes
            if total > best:
                best, num_at_peak = total, place
        return self._sum(changes[:num_at_peak], segment), self._sum(changes, segment)

    def _sum(self, changes: list[StorageChange], segment: _LogSegment) -> LiveBytes:
        kinds = Counter[str]()
        for serial, num_bytes in changes:
            life = self.tracker.lives[serial]
            if serial in self._grads:
                kind = "grad_full"
            elif life.width == self._vocab:
                kind = "logits"
            elif life.born >= segment.lo and life.died is not None and life.died < segment.hi:
                kind = "temporary"
            else:
                kind = "activations"
            kinds[kind] += num_bytes
        return LiveBytes(**kinds)
