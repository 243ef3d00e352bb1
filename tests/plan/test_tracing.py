"""Tapes of plain modules against the allocator's own trace and torch's FLOP counter."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from allocator import traced
from decoders import flops_of, num_params_of
from memory_cells import CONFIGS, LLAMA_LIKE
from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.models import (
    TracedModel,
    huggingface_source,
    module_source,
    shape_source,
)
from shardwise.plan.model.shapes import gpt_shape, llama_shape
from shardwise.plan.model.tape import UnitWork, Visit
from shardwise.plan.model.tracing import trace
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder

MIB = 1 << 20
FAMILIES = ["llama", "qwen3", "gemma", "gpt2", "mistral"]


def decoder_source(**keys):
    def build(checkpointed):
        sizes = {"dim": 128, "layers": 3, "heads": 4, "kv_heads": 2}
        return Decoder(TrainConfig(**sizes, activation_checkpointing=checkpointed, **keys), 2048)

    return module_source("decoder", build, 256)


def family_source(family, folder):
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": family, **CONFIGS[family]}))
    return huggingface_source(path)


def tape_of(source, checkpointed, micro_batch=4, seq=256, **options):
    return trace(
        source.build(checkpointed),
        lambda: source.make_batch(micro_batch, seq),
        source.loss,
        name=source.name,
        **options,
    )


MIXTRAL = {**LLAMA_LIKE, "num_local_experts": 8, "num_experts_per_tok": 3}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_cost_the_products_of_the_rows_that_they_are_given(tmp_path, dtype):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "mixtral", **MIXTRAL}))
    tape = tape_of(huggingface_source(path), False, 2, 64, compute_dtype=dtype)
    works = works_of(tape)
    found = sum(c.flops for w in works for c in w.costs if c.kind == "matmul")
    tokens, dim, ffn = 2 * 64, LLAMA_LIKE["hidden_size"], LLAMA_LIKE["intermediate_size"]
    attention = 2 * dim * dim + 2 * dim * 2 * 64
    expected = 3 * (attention + 8 * dim + 3 * 3 * dim * ffn) + dim * LLAMA_LIKE["vocab_size"]
    assert found == 3 * 2 * tokens * expected
    assert tape.matmul_dtype == dtype


def test_most_products_have_the_dtype_of_the_parameters_where_nothing_is_cast():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 64).to(torch.bfloat16))

    def loss(module, x):
        layers = list(module.children())
        return layers[1](layers[0](x).to(torch.bfloat16)).sum()

    tape = trace(model, lambda: torch.ones(4, 8), loss, name="two")
    assert (tape.compute_dtype, tape.matmul_dtype) == ("float32", "bfloat16")


def works_of(tape):
    return [e for e in tape.events if isinstance(e, UnitWork)]


def peak_of(works):
    """Replay works of the plain module: all gradients stay."""
    total = peak = 0
    for work in works:
        peak = max(peak, total + work.peak.total)
        total += work.net.total
    return peak


def real_twin(source, checkpointed):
    """Return the module with zeros on the CPU; `to_empty` unties what is tied."""
    model = source.build(checkpointed)
    names = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    model = model.to_empty(device="cpu").train()
    for first, *others in names.values():
        for other in others:
            module, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(module), attribute, model.get_parameter(first))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.detach().zero_()
    return model


def allocator_peak(source, model, micro_batch, seq):
    """Return the largest sum of the CPU allocator's own trace over one forward and backward."""
    batch = source.make_batch(micro_batch, seq)
    with traced() as allocator, allocator.window("step"):
        source.loss(model, batch).backward()
    return allocator.peak("step") - allocator.before("step")


@pytest.mark.parametrize(
    ("model", "checkpointed"),
    [
        *(({}, True), ({"tied_head": True}, False)),
        *(({"dropout": 0.1}, True), ({"dropout": 0.1}, False)),
        *((family, place % 2 == 1) for place, family in enumerate(FAMILIES)),
    ],
    ids=str,
)
def test_the_peak_is_that_of_the_allocators_trace(model, checkpointed, tmp_path):
    is_ours = isinstance(model, dict)
    source = decoder_source(**model) if is_ours else family_source(model, tmp_path)
    tape = tape_of(source, checkpointed)
    real = allocator_peak(source, real_twin(source, checkpointed), 4, 256)
    assert real > 20 * MIB
    assert abs(peak_of(works_of(tape)) / real - 1) < 0.01


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_that_join_a_sum_are_alive_one_by_one(checkpointed):
    source = decoder_source(tied_head=True)
    model = real_twin(source, checkpointed)
    source.loss(model, source.make_batch(1, 64)).backward()
    real = allocator_peak(source, model, 1, 64)
    works = works_of(tape_of(source, checkpointed, 1, 64))
    summed = [replace(w, peak=w.summed_peak, net=w.summed_net) for w in works]
    assert abs(peak_of(summed) / real - 1) < 0.01 < peak_of(works) / real - 1
    assert sum(w.net.total for w in summed) == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_tape_ends_with_the_gradients_and_nothing_else(checkpointed):
    tape = tape_of(decoder_source(tied_head=True), checkpointed, compute_dtype="bfloat16")
    works = works_of(tape)
    assert sum(w.net.grad_full for w in works) == 2 * num_params_of(tape)
    assert sum(w.net.activations for w in works) == sum(w.net.logits for w in works) == 0
    assert all(w.net.temporary == 0 for w in works)
    assert all(w.peak.total >= max(0, w.net.total) for w in works)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_every_visit_is_followed_by_one_work(checkpointed):
    events = tape_of(decoder_source(), checkpointed).events
    assert [isinstance(e, Visit) for e in events] == [i % 2 == 0 for i in range(len(events))]
    works = {e.phase for e in events if isinstance(e, UnitWork)}
    assert works == {"forward", "loss", "backward"} | ({"recompute"} if checkpointed else set())


def test_what_a_checkpoint_inside_a_unit_recomputes_is_told_apart(tmp_path):
    source = family_source("llama", tmp_path)
    plain, checkpointed = tape_of(source, False, 2, 32), tape_of(source, True, 2, 32)
    works = works_of(checkpointed)
    recomputed = sum(c.flops for w in works if w.phase == "recompute" for c in w.costs)
    assert recomputed == flops_of(checkpointed) - flops_of(plain) > 0
    assert not any(e.recomputes for e in checkpointed.events if isinstance(e, Visit))


def test_the_logits_are_those_of_the_head_and_the_loss():
    tape = tape_of(decoder_source(), False, compute_dtype="bfloat16")
    logits = 4 * 256 * 2048
    head = next(u for u, unit in enumerate(tape.units) if unit.name == "head")
    made = [w for w in tape.events if isinstance(w, UnitWork) and w.net.logits > 0]
    assert (made[0].unit, made[0].net.logits) == (head, 2 * logits)
    assert (made[1].unit, made[1].phase) == (0, "loss")
    scalars = 64  # the loss, and the sum of its weights
    assert 0 <= made[1].net.logits - 2 * logits < scalars  # log-softmax for the bfloat16 logits
    assert 0 <= made[1].peak.logits - 8 * logits < scalars  # and the float32 copy between them


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_flops_are_those_that_torch_counts(checkpointed):
    source = decoder_source()
    tape = tape_of(source, checkpointed)
    model, counter = real_twin(source, checkpointed), FlopCounterMode(display=False)
    with counter:
        source.loss(model, source.make_batch(4, 256)).backward()
    products = sum(c.flops for w in works_of(tape) for c in w.costs if c.kind == "matmul")
    attention = flops_of(tape) - products
    counted = counter.get_total_flops()
    forward = 4 * 4 * 4 * 256 * 256 * 32 * 3 / 2  # two causal products per head, B, H and layer
    assert attention == pytest.approx(forward * (4 if checkpointed else 3))  # backward twice
    assert counted in (products, products + 2 * attention)  # torch counts the square, or nothing


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        return self.lin(x) if x.sum().item() > 0 else x


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (Reads(), lambda m, b: m(b).sum(), "reads values"),
        (nn.Linear(4, 4), lambda m, b: m(b), "expected a scalar tensor, got a tensor of shape"),
        (nn.Linear(3, 4), lambda m, b: m(b).sum(), "RuntimeError"),
    ],
)
def test_what_cannot_be_traced_is_refused_and_the_model_left_as_it_was(model, loss, words):
    before = dict(model.named_parameters())
    with pytest.raises(ConfigError, match=words):
        trace(model, lambda: torch.ones(2, 4), loss, name="it")
    assert all(p is before[n] for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Interleaved(nn.Module):
    """A layer used twice, a frozen one, and a parameter that no forward uses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[1].requires_grad_(False)
        self.unused = nn.Parameter(torch.zeros(5))

    def forward(self, x):
        for layer in (*self.layers, self.layers[0]):
            x = layer(x).relu()
        return x


def test_units_open_and_close_in_backward_as_often_as_they_should():
    tape = trace(
        Interleaved(),
        lambda: torch.ones(2, 8),
        lambda m, b: m(b).sum(),
        name="x",
    )
    visits = [e for e in tape.events if isinstance(e, Visit)]
    names = [(v.kind, tape.units[v.unit].name) for v in visits]
    backward = [n for n in names if n[0].endswith("backward")]
    assert backward == [
        ("before_backward", ""),
        ("before_backward", "layers.0"),
        ("before_backward", "layers.2"),
        ("after_backward", "layers.2"),
        ("before_backward", "layers.1"),
        ("after_backward", "layers.1"),
        ("before_backward", "layers.0"),
        ("after_backward", "layers.0"),
        ("after_backward", ""),
    ]
    grads = sum(e.net.grad_full for e in tape.events if isinstance(e, UnitWork))
    assert grads == 4 * 2 * 72
    assert all(isinstance(b, UnitWork) for a, b in pairwise(tape.events) if isinstance(a, Visit))


def test_a_model_is_traced_once_for_all_that_does_not_change_its_tape():
    llama = llama_shape(8, 64, 4, 2, 96, 300)
    model = TracedModel(shape_source("llama", llama, 32))
    first = model.tape(Candidate(micro_batch=2))
    assert model.tape(Candidate(micro_batch=2, stage=1, num_shards=8)) is first
    assert model.tape(Candidate(micro_batch=2, precision="fp32")) is not first
    assert model.num_params == llama.num_params == num_params_of(first)
    assert model.notes == ()
    with pytest.raises(ConfigError, match="tp=2: a traced module"):
        model.tape(Candidate(tp=2))
    with pytest.raises(ConfigError, match="'selective'"):
        model.tape(Candidate(activation_checkpointing="selective"))
    with pytest.raises(ConfigError, match="takes windows of 1 to 64 tokens"):
        TracedModel(shape_source("gpt", gpt_shape(8, 64, 4, 300, positions=64), 32), 65)
