"""Tapes of deep models from shallow ones.

Note [Two depths]
Layers of one kind do the same, so a model of 80 layers is traced with a few of them. A period is
the shortest run of layers after which kinds repeat (1 when all are alike, 2 where two kinds of
attention alternate). The first depth is the first period, one in the middle and the last layers,
up to a period of them; the second has one period more. The first tape, extended by a period, must
equal the second event by event; then it is extended to the full depth by repeating the middle's
events. Where it is not equal, or nothing would be saved, the whole model is traced.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.plan.model.tape import Tape, UnitFacts, Visit, Work
from shardwise.plan.model.tracing import trace


@dataclass(frozen=True)
class DeepTape:
    """A tape at full depth, and how it was made, for people."""

    tape: Tape
    note: str


def trace_deep(model: nn.Module, *args: Any, **options: Any) -> DeepTape:
    """Trace a model of like layers with two shallow depths and extend; else trace it whole.

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
    first = _trace_at(layers, shallow, model, *args, **options)
    second = _trace_at(layers, deeper, model, *args, **options)
    if extend_depth(first, name, period, deeper) != second:
        tape = trace(model, *args, **options)
        return DeepTape(tape, f"traced whole: {shallow} and {deeper} layers do not agree")
    tape = extend_depth(first, name, period, depth)
    return DeepTape(tape, f"traced with {shallow} and {deeper} of {depth} layers, which agree")


def _trace_at(layers: nn.ModuleList, depth: int, *args: Any, **options: Any) -> Tape:
    with _truncated(layers, depth):
        return trace(*args, **options)


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

    ``layers`` is the name of the list of layers; the tape has more than two periods of them, and
    ``depth`` more by whole periods.
    """
    numbering = _Numbering(tape.units, layers, period, depth)
    events, added = tape.events, numbering.added
    forward = numbering.first_of("before_forward", 2 * period, events)
    middle = numbering.first_of("before_forward", period, events)
    backward = numbering.first_of("before_backward", 2 * period - 1, events)
    ending = numbering.first_of("before_backward", period - 1, events)
    out = list(numbering.renumber(events[:forward], 0))
    for shift in range(period, added + 1, period):
        out += numbering.renumber(events[middle:forward], shift)
    out += numbering.renumber(events[forward:backward], added)
    for shift in range(added, 0, -period):
        out += numbering.renumber(events[backward:ending], shift)
    out += numbering.renumber(events[backward:], 0)
    return replace(tape, units=numbering.units, events=tuple(out))


class _Numbering:
    """The units of a deeper model, and where those of the shallow one are among them."""

    def __init__(
        self, shallow: tuple[UnitFacts, ...], layers: str, period: int, depth: int
    ) -> None:
        self._layers = layers
        self._places = [self._split(unit.name) for unit in shallow]
        num_shallow = 1 + max(layer for layer, _ in self._places)
        self.added = depth - num_shallow
        by_layer: list[list[UnitFacts]] = [[] for _ in range(num_shallow)]
        before: list[UnitFacts] = []
        after: list[UnitFacts] = []
        for unit, (layer, _) in zip(shallow, self._places, strict=True):
            if layer >= 0:
                by_layer[layer].append(unit)
            else:
                (after if by_layer[0] else before).append(unit)
        body: list[UnitFacts] = []
        for layer in range(depth):
            template = layer
            if layer >= 2 * period:
                is_copy = layer < 2 * period + self.added
                template = period + layer % period if is_copy else layer - self.added
            body += [self._renamed(unit, template, layer) for unit in by_layer[template]]
        self.units = (*before, *body, *after)
        self._index = {self._split(u.name): i for i, u in enumerate(self.units)}

    def _split(self, name: str) -> tuple[int, str]:
        """Return a unit's layer and its name inside the layer; -1 and its name outside them."""
        if not name.startswith(f"{self._layers}."):
            return -1, name
        layer, _, rest = name.removeprefix(f"{self._layers}.").partition(".")
        return int(layer), rest

    def _renamed(self, unit: UnitFacts, layer: int, to: int) -> UnitFacts:
        old, new = f"{self._layers}.{layer}", f"{self._layers}.{to}"

        def rename(name: str) -> str:
            inside = name == old or name.startswith(f"{old}.")
            return new + name.removeprefix(old) if inside else name

        params = tuple(replace(p, name=rename(p.name)) for p in unit.params)
        return replace(unit, name=rename(unit.name), params=params)

    def first_of(self, kind: str, layer: int, events: Sequence[Work | Visit]) -> int:
        """Return the place of the first visit of a kind to a unit of a layer."""
        for place, event in enumerate(events):
            if (
                isinstance(event, Visit)
                and event.kind == kind
                and self._places[event.unit][0] == layer
            ):
                return place
        raise ConfigError(f"model: layer {layer} of {self._layers} was never reached ({kind})")

    def renumber(self, events: Sequence[Work | Visit], shift: int) -> Iterator[Work | Visit]:
        """Yield events with the numbers that their units have after a shift by layers."""
        for event in events:
            layer, rest = self._places[event.unit]
            place = (layer, rest) if layer < 0 else (layer + shift, rest)
            yield replace(event, unit=self._index[place])
