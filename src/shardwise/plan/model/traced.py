"""Models to plan for by tracing: deep ones from shallow traces, each tape once.

Note [Two depths]
Layers of one kind do the same, so a model of 80 layers is traced with a few of them. A period is
the shortest run of layers after which kinds repeat (1 if all have one kind, 2 if two kinds of
attention alternate). The first depth is the first period, one in the middle and the last layers,
up to a period of them; the second has one period more. The first tape, extended by a period, must
equal the second event by event; then it is extended to the full depth by repeating the middle's
events. If it is not equal, or nothing would be saved, the whole model is traced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.candidate import ALL_DEGREES, Candidate
from shardwise.plan.model.models import ModelSource
from shardwise.plan.model.tape import Tape, TapeUnit, Visit, VisitKind, Work, numel
from shardwise.plan.model.tracing import trace
from shardwise.plan.sizes import PRECISIONS, DtypeName, row_of
from shardwise.quantities import format_count


class TracedModel:
    """The tapes of a source's module for windows of ``seq`` tokens.

    A tape depends on a candidate's micro-batch, precision, checkpointing and units alone, so a
    search over stages, ranks and buffers traces once per combination of those.

    **Raises** ConfigError for a window that the model does not take.
    """

    def __init__(self, source: ModelSource, seq: int | None = None) -> None:
        self.name = source.name
        self.seq = source.window(seq)
        self._source = source
        self._tapes: dict[object, Tape] = {}
        self._notes = dict.fromkeys(source.notes)
        self._modules = {False: source.build(False)}

    @property
    def num_params(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(p.numel() for p in self._modules[False].parameters())

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks for the user on how the tapes so far were made."""
        return tuple(self._notes)

    def check_degrees(self, candidate: Candidate) -> None:
        """Refuse degrees that split the model itself. **Raises** ConfigError, naming one."""
        for name in ALL_DEGREES:
            degree = getattr(candidate, name)
            if degree != 1:
                raise ConfigError(
                    f"{name}={degree}: a traced module is whole on each rank; plan a preset or a "
                    "config by its shape instead"
                )

    def tape(self, candidate: Candidate) -> Tape:
        """Return one rank's micro-batch. It is traced at the first call.

        **Raises** ConfigError if the candidate splits the model itself, or checkpoints in part.
        """
        self.check_degrees(candidate)
        checkpointing = candidate.activation_checkpointing
        if checkpointing not in ("none", "full"):
            raise ConfigError(
                f"activation_checkpointing={checkpointing!r}: a traced module knows 'none' and "
                "'full'"
            )
        dtype = row_of(PRECISIONS, candidate.precision, "precision").compute
        key = (candidate.micro_batch, dtype, checkpointing, candidate.units)
        if key not in self._tapes:
            self._tapes[key] = self._trace(*key)
        return self._tapes[key]

    def _trace(
        self,
        micro_batch: int,
        dtype: DtypeName,
        checkpointing: str,
        units: tuple[str, ...] | None,
    ) -> Tape:
        checkpointed = checkpointing == "full"
        if checkpointed not in self._modules:
            self._modules[checkpointed] = self._source.build(checkpointed)
        try:
            tape, note = trace_deep(
                self._modules[checkpointed],
                lambda: self._source.make_batch(micro_batch, self.seq),
                self._source.loss,
                name=self.name,
                micro_batch=micro_batch,
                seq=self.seq,
                compute_dtype=dtype,
                activation_checkpointing=checkpointing,
                units=units,
            )
        except ConfigError as error:
            raise ConfigError(f"{error}{self._source.fed}") from error
        self._notes[note] = None
        params = [p for u in tape.units for p in u.params if not p.gets_grad]
        if params:
            count = format_count(sum(numel(p.shape) for p in params))
            self._notes[
                f"{count} trained parameters ({params[0].name}, ...) get no gradient, and so no "
                "optimizer state; if they are experts that the data chooses, their work is not "
                "counted"
            ] = None
        return tape


class DeepTape(NamedTuple):
    """A tape at full depth, and a note on how it was made."""

    tape: Tape
    note: str


def trace_deep(model: nn.Module, *args: Any, **options: Any) -> DeepTape:
    """Trace a model of like layers at two shallow depths and extend; else trace it whole.

    Arguments are those of `tracing.trace`. See Note [Two depths].

    **Cost** that of 2p + r and 3p + r layers, p the period, r between 1 and p.
    """
    body = _find_body(model)
    if body is None:
        return DeepTape(trace(model, *args, **options), "traced whole: no single list of layers")
    name, layers = body
    depth, period = len(layers), _period(layers)
    rest = (depth - 1) % period + 1
    shallow, deeper = 2 * period + rest, 3 * period + rest
    if depth <= shallow + deeper:
        return DeepTape(trace(model, *args, **options), f"traced whole: {depth} layers")
    with _truncated(layers, shallow):
        first = trace(model, *args, **options)
    with _truncated(layers, deeper):
        second = trace(model, *args, **options)
    if extend_depth(first, name, period, deeper) != second:
        tape = trace(model, *args, **options)
        return DeepTape(tape, f"traced whole: {shallow} and {deeper} layers do not agree")
    tape = extend_depth(first, name, period, depth)
    return DeepTape(tape, f"traced with {shallow} and {deeper} of {depth} layers, which agree")


@contextmanager
def _truncated(layers: nn.ModuleList, depth: int) -> Iterator[None]:
    everything = layers._modules
    layers._modules = dict(list(everything.items())[:depth])
    try:
        yield
    finally:
        layers._modules = everything


def _find_body(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """Return the only outermost ModuleList of several children of one class that hold state."""
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if inside or not isinstance(module, nn.ModuleList) or len(module) < 2:
            continue
        stateful = all(next(c.parameters(), None) is not None for c in module)
        if stateful and len({type(c) for c in module}) == 1:
            found.append((name, module))
    return found[0] if len(found) == 1 else None


def _period(layers: nn.ModuleList) -> int:
    kinds = [_kind(layer) for layer in layers]
    numbers = {  # settings that are the layer's own number
        key
        for key in kinds[0]
        if all(type(k.get(key)) is int and k[key] == place for place, k in enumerate(kinds))
    }
    kinds = [{key: v for key, v in kind.items() if key not in numbers} for kind in kinds]
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return period
    return len(kinds)


def _kind(layer: nn.Module) -> dict[tuple[str, str], object]:
    """Return what tells kinds of layers apart: classes, shapes, and plain settings."""
    facts: dict[tuple[str, str], object] = {}
    for name, module in layer.named_modules():
        facts[name, ""] = type(module)
        for key, param in module._parameters.items():
            if param is not None:
                facts[name, key] = (tuple(param.shape), param.dtype, param.requires_grad)
        for key, value in vars(module).items():
            if isinstance(value, str | int | float | bool):
                facts[name, key] = value
    return facts


def extend_depth(tape: Tape, layers: str, period: int, depth: int) -> Tape:
    """Return the tape of the same model with more layers: the second period's are repeated.

    ``layers`` is the name of the list of layers. The tape has more than two periods of them, and
    ``depth`` more by whole periods.

    **Raises** ConfigError if a layer's unit never runs.
    """
    layer_of = [_layer_of(unit.name, layers) for unit in tape.units]
    middle = [n for n, layer in enumerate(layer_of) if period <= layer < 2 * period]
    repeats, begin = (depth - 1 - max(layer_of)) // period, 1 + max(middle, default=-1)

    def renamed(unit: TapeUnit, periods: int) -> TapeUnit:
        layer = _layer_of(unit.name, layers)
        old, new = f"{layers}.{layer}", f"{layers}.{layer + periods * period}"

        def rename(name: str) -> str:
            inside = layer >= 0 and (name == old or name.startswith(f"{old}."))
            return new + name.removeprefix(old) if inside else name

        params = tuple(replace(p, name=rename(p.name)) for p in unit.params)
        return replace(unit, name=rename(unit.name), params=params)

    def renumbered(events: Sequence[Work | Visit], periods: int) -> Iterator[Work | Visit]:
        for event in events:
            layer = layer_of[event.unit]
            shift = periods if layer >= 0 else repeats * (event.unit >= begin)
            yield replace(event, unit=event.unit + shift * len(middle))

    def first_of(kind: VisitKind, layer: int) -> int:
        for place, event in enumerate(tape.events):
            if isinstance(event, Visit) and event.kind == kind and layer_of[event.unit] == layer:
                return place
        raise ConfigError(f"model: layer {layer} of {layers} was never reached ({kind})")

    again, forward = (first_of("before_forward", n * period) for n in (1, 2))
    backward, ending = (first_of("before_backward", n * period - 1) for n in (2, 1))
    events = [*renumbered(tape.events[:forward], 0)]
    for periods in range(1, repeats + 1):
        events += renumbered(tape.events[again:forward], periods)
    events += renumbered(tape.events[forward:backward], repeats)
    for periods in range(repeats, 0, -1):
        events += renumbered(tape.events[backward:ending], periods)
    events += renumbered(tape.events[backward:], 0)
    units = [*tape.units[:begin]]
    for periods in range(1, repeats + 1):
        units += [renamed(tape.units[n], periods) for n in middle]
    units += [renamed(unit, repeats) for unit in tape.units[begin:]]
    return replace(tape, units=tuple(units), events=tuple(events))


def _layer_of(name: str, layers: str) -> int:
    """Return the number of the layer that a unit is in; -1 outside of them."""
    if not name.startswith(f"{layers}."):
        return -1
    return int(name.removeprefix(f"{layers}.").partition(".")[0])
