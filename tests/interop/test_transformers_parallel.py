"""Models of transformers over tensor, expert and data parallelism, by their own plans."""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is in the test extra")

import transformers
from safetensors.torch import load_file

import shardwise
from ranks import on_ranks, run_ranks
from roundings import assert_rounded_alike, of_gradient
from shardwise.config import Units
from shardwise.errors import ConfigError
from shardwise.interop.fsdp2 import fully_shard
from shardwise.interop.transformers import parallelize, save_pretrained

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

WIDTH, HIDDEN, HEADS, VOCAB, LENGTH = 24, 36, 6, 48, 8
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "max_position_embeddings": 16,
    "bos_token_id": None,
    "eos_token_id": None,
}
# Two blocks of attention (projections, scores, mixtures, output) and mlp, then the head's logits;
# norms, softmax and rotary embedding round a few more times.
ROUNDINGS = of_gradient(
    *(WIDTH, WIDTH // HEADS, LENGTH, WIDTH, WIDTH, HIDDEN, 40) * 2, WIDTH, VOCAB, over=LENGTH * 8
)


def make(kind):
    torch.manual_seed(0)
    if kind == "qwen3":  # norms of heads, whose gradients each rank has for its own heads
        config = transformers.Qwen3Config(**SHAPE, head_dim=4)
        return transformers.Qwen3ForCausalLM(config)
    config = transformers.MixtralConfig(**SHAPE, num_local_experts=6, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def composed(kind, axes, by):
    model = parallelize(make(kind), axes)
    if by == "shard":
        return shardwise.shard(
            model, mesh=axes, units=Units(experts="*.experts" if kind == "mixtral" else ())
        )
    for layer in model.model.layers:
        fully_shard(layer, mesh=axes)
    return fully_shard(model, mesh=axes)


def two_steps(model, batches):
    """Take two steps of two micro-batches each; return the norms and the last gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for parts in batches:
        optimizer.zero_grad()
        for part in parts:
            if len(parts) == 1:
                model(input_ids=part, labels=part).loss.backward()
                continue
            with shardwise.accumulate(model, last=part is parts[-1]):
                (model(input_ids=part, labels=part).loss / len(parts)).backward()
        norms.append(shardwise.parallel.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    return norms


def trains_as_one_process_does(rank, num_ranks, cells, folder):
    for number, (kind, degrees, by) in enumerate(cells):
        axes = shardwise.Axes(**degrees)
        model, plain = composed(kind, axes, by), make(kind)
        if kind == "qwen3" or degrees.get("ep", 1) > 1:
            own = [p for p in model.parameters() if len(p.placements) > axes.data.ndim]
            assert bool(own) == (axes.tp * axes.ep > 1)
        size, place = axes["loss"].size(), axes["loss"].get_local_rank()
        generator = torch.Generator().manual_seed(number)
        whole = [torch.randint(VOCAB, (2 * size, LENGTH), generator=generator) for _ in range(2)]
        mine = [[x[2 * place : 2 * place + 1], x[2 * place + 1 : 2 * place + 2]] for x in whole]
        ours, theirs = two_steps(model, mine), two_steps(plain, [[x] for x in whole])
        for a, b in zip(ours, theirs, strict=True):
            assert_rounded_alike(a, b, ROUNDINGS, f"norm, {kind} {axes} {by}")
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            what = f"{name}, {kind} {axes} {by}"
            assert_rounded_alike(p.grad.full_tensor(), q.grad, 2 * ROUNDINGS, what)
            assert_rounded_alike(p.full_tensor(), q, 2 * ROUNDINGS, what)
        if by == "shard":
            checkpoints_go_anywhere(rank, kind, model, folder / f"{num_ranks}-{number}")


def checkpoints_go_anywhere(rank, kind, model, folder):
    """One process reads what several axes have saved, and weights in transformers' own file."""
    shardwise.save(folder / "ours", model)
    plain = make(kind)
    nn.init.zeros_(plain.lm_head.weight)
    shardwise.load(folder / "ours", plain)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.full_tensor(), q), name
    save_pretrained(model, folder / "hf")
    if rank == 0:
        plain.save_pretrained(folder / "plain")
        ours = load_file(folder / "hf" / "model.safetensors")
        theirs = load_file(folder / "plain" / "model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


CELLS = {
    1: [("qwen3", {}, "shard")],
    3: [("qwen3", {"tp": 3}, "shard"), ("mixtral", {"ep": 3}, "shard")],
    4: [
        ("qwen3", {"tp": 2}, "shard"),
        ("qwen3", {"tp": 2, "dp_replicate": 2}, "fully_shard"),
        ("mixtral", {"ep": 2, "dp_replicate": 2}, "shard"),
        ("mixtral", {"tp": 2, "ep": 2}, "shard"),
        ("mixtral", {"tp": 2, "ep": 2}, "fully_shard"),
        ("mixtral", {"ep": 2}, "fully_shard"),
    ],
}


@pytest.mark.parametrize("num_ranks", CELLS)
def test_models_over_any_axes_train_as_one_process_does(num_ranks, tmp_path):
    run_ranks(trains_as_one_process_does, num_ranks, CELLS[num_ranks], tmp_path)


@pytest.mark.parametrize(
    ("num_ranks", "cells"),
    [
        (2, [("gather", {"cp": 2}, (8,)), ("heads", {"cp": 2}, (3, 7))]),
        (3, [("heads", {"cp": 3}, (9,))]),
        # Tensor parallelism leaves a rank some of the heads (torchtitan#2446).
        (4, [("gather", {"cp": 2, "tp": 2}, (8,)), ("gather", {"cp": 2, "tp": 2}, (5, 6))]),
    ],
)
@on_ranks()
def test_cut_sequences_have_the_gradients_of_whole_ones(num_ranks, cells):
    for number, (method, degrees, documents) in enumerate(cells):
        axes, whole = shardwise.Axes(**degrees), sum(documents)
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(VOCAB, (1, whole), generator=generator)
        labels = torch.randint(VOCAB, (1, whole), generator=generator)
        plain = make("qwen3")
        losses = [
            nn.functional.cross_entropy(plain(input_ids=x).logits[0], y[0], reduction="sum")
            for x, y in zip(ids.split(documents, 1), labels.split(documents, 1), strict=True)
        ]
        (sum(losses) / whole).backward()
        model = composed("qwen3", axes, "shard")
        context = shardwise.parallel.ContextParallel(model, axes, method)
        packed = None if len(documents) == 1 else documents
        with context.cut(ids, labels, documents=packed) as (part, wanted, positions):
            logits = model(input_ids=part, position_ids=positions).logits[0]
            total = nn.functional.cross_entropy(logits, wanted[0], reduction="sum")
            shardwise.parallel.mean_loss(model, total, wanted.numel()).backward()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert_rounded_alike(p.grad.full_tensor(), q[1].grad, ROUNDINGS, f"{name}, {axes}")
        # A whole sequence is computed as ever afterwards, padding included.
        seen = torch.ones_like(ids)
        seen[:, 0] = 0
        with torch.no_grad():
            mine = model(input_ids=ids, attention_mask=seen).logits[:, 1:]
            assert_rounded_alike(
                mine, plain(input_ids=ids, attention_mask=seen).logits[:, 1:], ROUNDINGS
            )
        with (
            pytest.raises(ConfigError, match="masks tokens of a sequence that is cut"),
            context.cut(ids, seen) as (part, mask, _),
        ):
            model(input_ids=part, attention_mask=torch.zeros_like(mask))


@on_ranks(2)
def test_tied_embeddings_stay_tied_and_nothing_is_cut_twice():
    axes = shardwise.Axes(tp=2)

    def tied():
        config = transformers.Qwen3Config(**SHAPE, head_dim=4, tie_word_embeddings=True)
        return transformers.Qwen3ForCausalLM(config)

    ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ConfigError, match=r"Packed weights of experts.* go over ep: call para"):
        shardwise.shard(parallelize(make("mixtral"), axes), mesh=axes)
    model = parallelize(tied(), axes)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ConfigError, match=r"is a DTensor already; call parallelize\(\) once"):
        parallelize(model, axes)
    shardwise.check.gradients(
        tied,
        {"input_ids": ids, "labels": ids},
        axes,
        compose=lambda model: shardwise.shard(parallelize(model, axes), mesh=axes),
    )


def test_what_has_no_plan_is_refused():
    with pytest.raises(ConfigError, match="Linear has no plan"):
        parallelize(nn.Linear(2, 2), shardwise.Axes(tp=2))
    with pytest.raises(ConfigError, match="which ranks share an expert"):
        shardwise.layout.placements.place_experts((), None, "*.experts", None)
