"""Shallow tapes extended to full depth, and scaled in the micro-batch, against whole traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.models import ModelSource, shape_source
from shardwise.plan.model.shapes import gpt_shape, llama_shape
from shardwise.plan.model.traced import TracedModel, extend_depth, trace_deep
from shardwise.plan.model.tracing import trace

SHAPES = {
    "llama": llama_shape(8, 64, 4, 2, 96, 300),
    "tied llama": llama_shape(8, 64, 4, 4, 96, 300, tied=True),
    "gpt": gpt_shape(8, 64, 4, 300, positions=64),
}


def options(source: ModelSource, micro_batch: int = 2) -> dict[str, Any]:
    return {
        "make_batch": lambda: source.make_batch(micro_batch, 32),
        "loss": source.loss,
        "name": source.name,
        "micro_batch": micro_batch,
        "seq": 32,
        "compute_dtype": "bfloat16",
    }


@pytest.mark.parametrize(
    ("kind", "checkpointed"),
    [("llama", True), ("tied llama", False), ("gpt", True), ("gpt", False)],
)
def test_two_shallow_depths_give_the_whole_tape_event_by_event(
    kind: str, checkpointed: bool
) -> None:
    source = shape_source(kind, SHAPES[kind], 32)
    model = source.build(checkpointed)
    deep = trace_deep(model, **options(source))
    assert deep.note == f"traced with 3 and 4 of {SHAPES[kind].layers} layers, which agree"
    assert deep.tape == trace(model, **options(source))


class Half(nn.Module):
    """Layers of two kinds in turn: wide and narrow inside."""

    def __init__(self, number: int, width: int) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Alternating(nn.Module):
    def __init__(self, widths: list[int], skips: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Half(i, w) for i, w in enumerate(widths))
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.skips and number == 3:
                x = x * first.exp()
        return x.sum()


def alternating_options() -> dict[str, Any]:
    return {
        "make_batch": lambda: torch.ones(16, 8),
        "loss": lambda model, batch: model(batch),
        "name": "it",
        "micro_batch": 16,
        "seq": 1,
    }


@pytest.mark.parametrize("num_layers", [15, 16])
def test_layers_of_two_kinds_in_turn_are_repeated_by_periods(num_layers: int) -> None:
    model = Alternating([(16, 40)[i % 2] for i in range(num_layers)])
    deep = trace_deep(model, **alternating_options())
    rest = 2 - num_layers % 2
    assert deep.note == f"traced with {4 + rest} and {6 + rest} of {num_layers} layers, which agree"
    assert deep.tape == trace(model, **alternating_options())


@pytest.mark.parametrize(
    ("model", "note"),
    [
        (Alternating([16] * 12, skips=True), "traced whole: 3 and 4 layers do not agree"),
        (Alternating([16] * 5), "traced whole: 5 layers"),
        (Alternating([16, 40, 8, 24, 48, 32, 56, 64]), "traced whole: 8 layers"),
        (nn.Linear(8, 1), "traced whole: no single list of layers"),
    ],
)
def test_what_does_not_repeat_is_traced_whole_and_said_so(model: nn.Module, note: str) -> None:
    settings = {**alternating_options(), "loss": lambda model, batch: model(batch).sum()}
    deep = trace_deep(model, **settings)
    assert deep.note == note
    assert deep.tape == trace(model, **settings)


def test_a_list_of_layers_is_whole_again_after_a_trace() -> None:
    model = Alternating([16] * 12)
    trace_deep(model, **alternating_options())
    assert len(model.layers) == 12
    assert sum(p.numel() for p in model.parameters()) == 12 * (2 * 16 * 8 + 24)


def test_depth_is_extended_from_a_shallow_tape_alone() -> None:
    shallow, deep = Alternating([16] * 3), Alternating([16] * 6)
    tape = trace(shallow, **alternating_options())
    assert extend_depth(tape, "layers", 1, 6) == trace(deep, **alternating_options())


def test_a_model_is_traced_once_for_all_that_does_not_change_its_tape() -> None:
    model = TracedModel(shape_source("llama", SHAPES["llama"], 32))
    first = model.tape(Candidate(micro_batch=2))
    assert model.tape(Candidate(micro_batch=2, stage=1, num_shards=8)) is first
    assert model.tape(Candidate(micro_batch=2, precision="fp32")) is not first
    assert model.num_params == SHAPES["llama"].num_params == first.num_params
    assert model.notes == ("traced with 3 and 4 of 8 layers, which agree",)
    with pytest.raises(ConfigError, match="tp=2: a traced module"):
        model.tape(Candidate(tp=2))
    with pytest.raises(ConfigError, match="'selective'"):
        model.tape(Candidate(activation_checkpointing="selective"))
    with pytest.raises(ConfigError, match="takes windows of 1 to 64 tokens"):
        TracedModel(shape_source("gpt", SHAPES["gpt"], 32), 65)
