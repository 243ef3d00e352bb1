"""Traces one micro-batch of a torch module on fake tensors: a `Tape`. Needs no accelerator.

Note [Bytes alive]
The tape books what the module's operations allocate. Parameters are not in it (the engine owns
them), inputs and buffers are apart. A full gradient is booked from the moment autograd writes it;
at the unit's ``after_backward`` it is the engine's and leaves the books without a negative entry:
summed over a tape, ``net.grads`` is the gradients of one micro-batch and the other kinds are zero.

A player takes a unit's gradients away at its ``after_backward``: they are all that works booked
for its parameters, those of other units that use them included. A tied weight's gradient is booked
from the first of its parts on, which autograd holds until the last has come.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.config import UnitChoice
from shardwise.engine.calls import Call
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
    Visit,
    VisitKind,
    Work,
)
from shardwise.plan.model.tracking import Change, Head, Tracker, dtype_name
from shardwise.plan.sizes import DtypeName

BatchBuilder = Callable[[], Any]
Loss = Callable[[nn.Module, Any], torch.Tensor]

_COMPUTE_DTYPES: dict[DtypeName, torch.dtype | None] = {
    "float32": None,  # precision fp32 keeps each parameter's own dtype and casts nothing
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def trace(
    model: nn.Module,
    make_batch: BatchBuilder,
    loss: Loss,
    *,
    name: str,
    micro_batch: int,
    seq: int,
    compute_dtype: DtypeName = "float32",
    activation_checkpointing: str = "none",
    units: tuple[UnitChoice, ...] | None = None,
) -> Tape:
    """Run forward, loss and backward of a plain module on fake tensors, and write the tape.

    The model may be on meta or on the CPU; its values are not read and it is as before afterwards.
    ``make_batch`` is called where every new tensor is fake; ``loss(model, batch)`` calls the model
    and returns a scalar. ``activation_checkpointing`` is what the model does already, for the
    record.

    Events: visits with one `Work` after each, zero ones included; several where a checkpoint inside
    a unit recomputes, which no hook sees (transformers does so): there work of phase recompute and
    backward takes turns. The last one is after backward, when the loss has been dropped: summed
    over the tape, only ``net.grads`` is not zero.
    A `Work` belongs to the innermost unit whose forward runs, or whose backward was begun last and
    is not over.

    **Cost** no memory of the model's size; about 0.1 ms per operation.

    **Raises** ConfigError when the model reads values (which fake tensors have not), gives no
    scalar loss, or fails; the message is the model's own.
    """
    if compute_dtype not in _COMPUTE_DTYPES:
        names = ", ".join(_COMPUTE_DTYPES)
        raise ConfigError(f"compute_dtype={compute_dtype!r}: expected one of {names}")
    cast_to = _COMPUTE_DTYPES[compute_dtype]
    specs = partition_into_units(model, units)
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        fakes = stack.enter_context(_as_fake(model, cast_to))
        batch = make_batch()
        run = _Run(model, specs, fakes, cast_to)
        stack.callback(run.close)
        run.own(model, batch)
        _step(run, batch, loss, name)
        written = {i: run.wrote(p) for i, p in fakes.items()}
        return Tape(
            model=name,
            units=_all_unit_facts(specs, written),
            events=run.events(),
            micro_batch=micro_batch,
            seq=seq,
            compute_dtype=compute_dtype,
            activation_checkpointing=activation_checkpointing,
            input_bytes=run.input_bytes,
            buffer_bytes=run.buffer_bytes,
        )


def _step(run: "_Run", batch: Any, loss: Loss, name: str) -> None:
    try:
        with _quiet():
            run.step(batch, loss)
    except ConfigError:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"model {name}: tracing it on fake tensors failed: {type(error).__name__}: "
            f"{first_line.rstrip('.')}. A forward that reads values (.item(), branches on data) "
            "cannot be traced; nor can a batch that does not fit it"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch from logging the stack of an operation that fails: the error describes it."""
    log = logging.getLogger(fake_tensor.__name__)
    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def _all_unit_facts(specs: Sequence[UnitSpec], written: Mapping[int, bool]) -> tuple[TapeUnit, ...]:
    """Describe all units, the root first; ``written`` are parameters by id, in the model's order.

    It tells which of them got a gradient.
    """
    places = {param: place for place, (param, wrote) in enumerate(written.items()) if wrote}
    owned = [[places[id(p.param)] for p in s.params if id(p.param) in places] for s in specs]
    firsts = [min(each, default=-1) for each in owned]
    root, *others = (_unit_facts(spec, written) for spec in specs)
    return (replace(root, comes_last=firsts[0] > max(firsts[1:], default=0)), *others)


def _unit_facts(spec: UnitSpec, written: Mapping[int, bool]) -> TapeUnit:
    """Describe a unit; ``written`` tells by id which parameters got a gradient."""
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
    return TapeUnit(spec.name, type(spec.module).__name__, params, reads)


@contextmanager
def _as_fake(model: nn.Module, cast_to: torch.dtype | None) -> Iterator[dict[int, nn.Parameter]]:
    """Put fake tensors in the place of all that the model holds; yield parameters by id.

    Called under a fake mode. A tensor that stands in several places stays one tensor.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    params: dict[int, nn.Parameter] = {}
    others: dict[int, torch.Tensor] = {}
    was_training = [(m, m.training) for m in model.modules()]

    def fake(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device="cpu")

    def fake_param(param: nn.Parameter) -> nn.Parameter:
        if id(param) not in params:
            casts = cast_to is not None and param.is_floating_point()
            made = fake(param, cast_to if casts and cast_to else param.dtype)
            params[id(param)] = nn.Parameter(made, requires_grad=param.requires_grad)
        return params[id(param)]

    def fake_other(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in others:
            others[id(tensor)] = fake(tensor, tensor.dtype)
        return others[id(tensor)]

    for module in model.modules():
        module.training = True
        tables: tuple[tuple[dict[str, Any], Callable[[Any], Any]], ...] = (
            (module._parameters, fake_param),
            (module._buffers, fake_other),
            (vars(module), fake_other),
        )
        for table, make in tables:
            for key, value in list(table.items()):
                if isinstance(value, torch.Tensor):
                    replaced.append((table, key, value))
                    table[key] = make(value)
    try:
        yield params
    finally:
        for table, key, value in replaced:
            table[key] = value
        for module, training in was_training:
            module.training = training


@dataclass
class _Span:
    """One `Work` before its bytes have kinds: a stretch of the log."""

    unit: int
    phase: Phase
    lo: int
    hi: int
    costs: tuple[Cost, ...]


class _Run:
    """One traced micro-batch."""

    def __init__(
        self,
        model: nn.Module,
        specs: tuple[UnitSpec, ...],
        fakes: dict[int, nn.Parameter],
        cast_to: torch.dtype | None,
    ) -> None:
        self.model = model
        self.tracker = Tracker(self._switch)
        self.input_bytes = self.buffer_bytes = 0
        self._items: list[_Span | Visit] = []
        self._begin = 0
        self._grads: set[int] = set()
        self._with_grad: set[int] = set()
        self._written: list[tuple[int, Change]] = []  # place in the log, the release if summed
        self._visitor = _Visitor(
            specs, fakes, cast_to, self._visit, self._take_grads, self._note_grad
        )
        self._head = Head(model, self.tracker)

    def close(self) -> None:
        """Take all hooks off the model."""
        self._visitor.remove()
        self._head.remove()

    def own(self, model: nn.Module, batch: Any) -> None:
        """Leave parameters, buffers and inputs out of the log; count the latter two."""
        for param in model.parameters():
            self.tracker.own(param)
        for module in model.modules():
            for tensor in (*module._buffers.values(), *vars(module).values()):
                if isinstance(tensor, torch.Tensor):
                    self.buffer_bytes += self.tracker.own(tensor)
        self.input_bytes = sum(self.tracker.own(t) for t in tensors_in(batch))

    def step(self, batch: Any, loss: Loss) -> None:
        """Run forward, loss and backward."""
        with self.tracker:
            value: Any = loss(self.model, batch)
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                what = type(value).__name__
                if isinstance(value, torch.Tensor):
                    what = f"a tensor of shape {tuple(value.shape)}"
                raise ConfigError(f"loss: expected a scalar tensor, got {what}")
            value.backward()
            del value
        self._end_span()

    def _visit(self, visit: Visit) -> None:
        if self._items:
            self._end_span()
        self._items.append(visit)
        self._begin = len(self.tracker.log)
        self.tracker.recomputes = False

    def _switch(self) -> None:
        if self.tracker.has_costs:
            self._end_span()
            self._begin = len(self.tracker.log)

    def _end_span(self) -> None:
        unit, phase = self._visitor.place()
        if phase == "backward" and self.tracker.recomputes:
            phase = "recompute"
        costs = self.tracker.take_costs()
        self._items.append(_Span(unit, phase, self._begin, len(self.tracker.log), costs))

    def wrote(self, param: torch.Tensor) -> bool:
        """Tell whether autograd wrote a gradient of this parameter."""
        return id(param) in self._with_grad

    def _note_grad(self, param: torch.Tensor) -> None:
        self._with_grad.add(id(param))
        serial = None if param.grad is None else self.tracker.serial_of(param.grad)
        if serial is not None:
            num_bytes = self.tracker.lives[serial].num_bytes
            self._written.append((len(self.tracker.log), Change(serial, -num_bytes)))

    def _take_grads(self, params: list[nn.Parameter]) -> None:
        for param in params:
            if param.grad is not None:
                serial = self.tracker.serial_of(param.grad)
                if serial is not None:
                    self._grads.add(serial)
                self.tracker.take(param.grad)
                param.grad = None

    def events(self) -> tuple[Work | Visit, ...]:
        """Return visits and works in order, each byte under its kind."""
        self._keep_inputs_of_checkpoints()
        root_end = self._place_of(lambda v: v == Visit("after_forward", 0))
        body = self._place_of(lambda v: v.kind == "before_backward" and v.unit != 0)
        begin, end, input_grad = self._head.stretch(root_end, body)
        logits = {
            serial
            for serial, life in enumerate(self.tracker.lives)
            if begin <= life.born < end and serial != input_grad
        }
        for item in self._items:
            if isinstance(item, _Span) and item.unit == 0 and item.phase == "forward":
                item.phase = "loss" if item.hi > begin else "forward"
        return tuple(i if isinstance(i, Visit) else self._work(i, logits) for i in self._items)

    def _keep_inputs_of_checkpoints(self) -> None:
        """Let blocks alone that run again have bytes of inputs: a checkpoint saves theirs.

        One is around them or, where no unit's forward was seen again, inside.
        """
        seen = {v.unit for v in self._items if isinstance(v, Visit) and v.recomputes}
        again = {s.unit for s in self._items if isinstance(s, _Span) and s.phase == "recompute"}
        saved = (again - seen) | self._visitor.first_in_checkpoint
        for place, item in enumerate(self._items):
            if isinstance(item, Visit) and item.input_bytes and item.unit not in saved:
                self._items[place] = replace(item, input_bytes=0)

    def _place_of(self, is_it: Callable[[Visit], bool]) -> int:
        """Return the place in the log of the first such visit, or of the end."""
        spans = zip(self._items, self._items[1:], strict=False)
        for item, after in spans:
            if isinstance(item, Visit) and isinstance(after, _Span) and is_it(item):
                return after.lo
        return len(self.tracker.log)

    def _work(self, span: _Span, logits: set[int]) -> Work:
        changes = self.tracker.log[span.lo : span.hi]
        peak, net = self._peak_and_net(changes, span, logits)
        inside = [(p, c) for p, c in self._written if span.lo < p <= span.hi]
        if not inside and not net.grads and not peak.grads:
            return Work(span.unit, span.phase, span.costs, peak, net, peak, net)
        for place, change in reversed(inside):
            changes.insert(place - span.lo, change)
        summed = self._peak_and_net(changes, span, logits)
        return Work(span.unit, span.phase, span.costs, peak, net, *summed)

    def _peak_and_net(
        self, changes: list[Change], span: _Span, logits: set[int]
    ) -> tuple[LiveBytes, LiveBytes]:
        total = best = num_at_peak = 0
        for place, change in enumerate(changes, 1):
            total += change.num_bytes
            if total > best:
                best, num_at_peak = total, place
        peak = self._sum(changes[:num_at_peak], span, logits)
        return peak, self._sum(changes, span, logits)

    def _sum(self, changes: list[Change], span: _Span, logits: set[int]) -> LiveBytes:
        kinds = {"activations": 0, "temporary": 0, "logits": 0, "grads": 0}
        for serial, num_bytes in changes:
            life = self.tracker.lives[serial]
            if serial in self._grads:
                kind = "grads"
            elif serial in logits:
                kind = "logits"
            elif life.born >= span.lo and life.died is not None and life.died < span.hi:
                kind = "temporary"
            else:
                kind = "activations"
            kinds[kind] += num_bytes
        return LiveBytes(**kinds)


# -- visits
class _Unit:
    """A unit with the attributes that `engine.passes` reads."""

    def __init__(self, index: int, spec: UnitSpec, params: list[nn.Parameter]) -> None:
        self.index = index
        self.name = spec.name
        self.module = spec.module
        self.modules = (spec.module,)
        self.params = params

    def read_versions(self) -> tuple[int, ...]:
        return ()


class _Visitor:
    """Hooks a module's units; calls ``visit`` and, when a unit is closed, ``take_grads``.

    `engine.passes` finds the moments, as for the engine. Nothing is gathered or reduced.

    ``written`` is called with a parameter when autograd has written its gradient.

    ``place`` tells inside which unit, and in which phase, what runs now runs.
    """

    suspended = False

    def __init__(
        self,
        specs: tuple[UnitSpec, ...],
        params: dict[int, nn.Parameter],
        cast_to: torch.dtype | None,
        visit: Callable[[Visit], None],
        take_grads: Callable[[list[nn.Parameter]], None],
        written: Callable[[torch.Tensor], None],
    ) -> None:
        self.units = [
            _Unit(i, s, [params[id(p.param)] for p in s.params]) for i, s in enumerate(specs)
        ]
        self._cast_to = cast_to
        self._visit = visit
        self._take_grads = take_grads
        self._written = written
        self.first_in_checkpoint: set[int] = set()  # units by index
        self._region: Callable[[], Any] = lambda: None
        self._backward: list[_Unit] = []
        self._begun = False
        self._passes = Passes(self)
        self._passes.take_units(self.units)
        self._handles: list[Any] = []
        for unit in self.units:
            self._handles += register_hooks(self, unit)
            for param in unit.params:
                if param.requires_grad:
                    self._handles.append(self._passes.watch_grad(unit, param))

    def remove(self) -> None:
        """Take all hooks off the modules."""
        for handle in self._handles:
            handle.remove()

    def place(self) -> tuple[int, Phase]:
        """Return the innermost unit that runs now, and the phase."""
        if self._passes.stack:
            unit: _Unit = self._passes.stack[-1].unit
            return unit.index, "recompute" if self._begun else "forward"
        if self._begun:
            return (self._backward[-1].index if self._backward else 0), "backward"
        return 0, "loss"

    def _say(
        self, kind: VisitKind, unit: _Unit, recomputes: bool = False, input_bytes: int = 0
    ) -> None:
        self._visit(Visit(kind, unit.index, recomputes, input_bytes))

    # -- forward (hooks.Watcher)
    def before_forward(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        """Record the visit, cast the inputs, watch them for backward."""
        call = self._passes.enter(unit)
        taken = 0
        if not call.in_backward and unit is not self.units[0]:  # masks and tables are not computed
            taken = sum(t.nbytes for t in tensors_in(args) if t.grad_fn is not None)
        self._say("before_forward", unit, call.recomputes, taken)
        if not call.in_backward:
            self._note_checkpoint(unit)
        args, kwargs = map_tensors(args, self._cast), map_tensors(kwargs, self._cast)
        if torch.is_grad_enabled() and not call.recomputes:
            self._passes.record(call)
            self._passes.watch_inputs(call, (args, kwargs))
        return args, kwargs

    def _note_checkpoint(self, unit: _Unit) -> None:
        """Note that a checkpoint is around a unit, and no unit before it was inside the same one.

        It is known by its hooks on saved tensors, which live as long as its graph.
        """
        hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0] is not self._region():
            self._region = weakref.ref(hooks[0])
            self.first_in_checkpoint.add(unit.index)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._cast_to is None or not tensor.is_floating_point():
            return tensor
        return tensor.to(self._cast_to)

    def after_forward(self, unit: _Unit, output: Any) -> None:
        """Record the visit, watch the outputs for backward."""
        stack = self._passes.stack
        if not stack or stack[-1].unit is not unit:
            return
        self._say("after_forward", unit, stack[-1].recomputes)
        call = self._passes.leave()
        if call.is_recorded:
            self._passes.watch_outputs(call, output)

    # -- backward (passes.Listener)
    def on_pass(self, order: list[int]) -> None:
        """Do nothing: the first visit says that backward has begun."""

    def on_grad(self, unit: _Unit, leaf: torch.Tensor) -> None:
        """Say which gradient is there."""
        self._written(leaf)

    def on_reached(self, call: Call) -> None:
        """Do nothing: nothing is refused here."""

    def on_backward(self, unit: _Unit, is_first: bool) -> None:
        """Record the visit."""
        self._say("before_backward", unit)
        self._begun = True
        self._backward.append(unit)

    def on_call_over(self, call: Call) -> None:
        """Do nothing: what counts is the unit."""

    def on_unit_over(self, unit: _Unit) -> None:
        """Record the visit; the gradients are not this unit's any more."""
        self._say("after_backward", unit)
        self._backward = [u for u in self._backward if u is not unit]
        self._take_grads(unit.params)

    def on_pass_end(self) -> None:
        """Close the units that are still open; there is one pass only."""
        for unit in reversed(self.units):
            if self._passes.is_open(unit):
                self._passes.close(unit)

    def on_cut(self) -> None:
        """Do nothing: what raises ends the trace."""

    def on_double(self) -> None:
        """Do nothing: a pass with create_graph=True is not traced."""
