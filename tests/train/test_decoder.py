"""The decoder against loops over heads and complex numbers."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundings import assert_rounded_alike, of_gradient
from shardwise.plan.model.decoder import Attention, apply_rotary, rotary_tables
from shardwise.plan.model.shapes import llama_shape
from shardwise.train.config import TrainConfig
from shardwise.train.decoder import Decoder, generate

SMALL = TrainConfig(dim=32, layers=2, heads=4, kv_heads=2, seq=16)


def naive_attention(layer, x, cos, sin):
    """Attend head by head with an explicit mask."""
    length, size = x.shape[1], layer.head_dim
    outputs = []
    for head in range(layer.heads):
        shared = head // (layer.heads // layer.kv_heads)
        rows, kv_rows = (slice(h * size, (h + 1) * size) for h in (head, shared))
        query = apply_rotary(x @ layer.query.weight[rows].T, cos, sin)
        key = apply_rotary(x @ layer.key.weight[kv_rows].T, cos, sin)
        value = x @ layer.value.weight[kv_rows].T
        scores = query @ key.transpose(1, 2) / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
    return torch.cat(outputs, dim=-1) @ layer.out.weight.T


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_a_loop_over_heads(kv_heads):
    torch.manual_seed(0)
    layer = Attention(llama_shape(1, 32, 4, kv_heads, 96, 11), out_std=0.02)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.3)
    x, (cos, sin) = torch.randn(2, 9, 32), rotary_tables(torch.arange(9), 8)
    expected = naive_attention(layer, x, cos, sin)
    assert_rounded_alike(layer(x, cos, sin), expected, of_gradient(32, 8, 9, 32, over=0))


def test_rotary_turns_complex_numbers():
    x = torch.randn(3, 7, 8)
    cos, sin = rotary_tables(torch.arange(7), 8)
    angles = torch.outer(torch.arange(7.0), 10_000.0 ** -(torch.arange(0, 8, 2) / 8))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    # An angle of n radians is rounded to n u of a radian; then a cosine and two products.
    assert_rounded_alike(apply_rotary(x, cos, sin), expected, 2 * 7 + 4)
    assert apply_rotary(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_the_loss_is_the_cross_entropy_of_the_logits_in_fp32():
    model = Decoder(SMALL, vocab=11).bfloat16()
    ids, targets = torch.randint(11, (2, 2, 10))
    loss = model(ids, targets)
    assert loss.dtype == torch.float32
    expected = F.cross_entropy(model(ids).float().flatten(0, 1), targets.flatten())
    assert_rounded_alike(loss, expected, 11 + 20)  # a sum over the vocabulary, one over the rows


def test_a_new_model_is_as_unsure_as_a_uniform_one():
    torch.manual_seed(0)
    ids, targets = torch.randint(50, (2, 4, 16))
    assert Decoder(SMALL, vocab=50)(ids, targets).item() == pytest.approx(math.log(50), abs=0.1)


def test_a_tied_head_is_the_embedding_and_gets_both_gradients():
    model = Decoder(SMALL.model_copy(update={"tied_head": True}), vocab=11)
    assert model.head.weight is model.embedding.weight
    untied = Decoder(SMALL, vocab=11)
    untied.load_state_dict(model.state_dict())
    ids, targets = torch.randint(11, (2, 2, 10))
    model(ids, targets).backward()
    untied(ids, targets).backward()
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    assert torch.equal(model.embedding.weight.grad, expected)
    names = {name for name, _ in model.named_parameters()}
    assert {name for name, _ in untied.named_parameters()} - names == {"head.weight"}


def dropping(**keys):
    return SMALL.model_copy(update={"dropout": 0.25, **keys})


def test_dropout_draws_anew_in_training_passes_alone_and_changes_no_parameter():
    plain, model = Decoder(SMALL, vocab=11), Decoder(dropping(), vocab=11)
    model.load_state_dict(plain.state_dict())
    ids, targets = torch.randint(11, (2, 2, 10))
    state = torch.get_rng_state()
    loss = plain.train()(ids, targets)
    loss.backward()
    assert torch.equal(plain.eval()(ids, targets), loss)
    assert torch.equal(model.eval()(ids, targets), loss)
    drawn = (generate(each, ids[0], num_tokens=9, seq=16) for each in (model, plain))
    assert torch.equal(*drawn) and torch.equal(torch.get_rng_state(), state)
    first, second = model.train()(ids, targets), model(ids, targets)
    torch.set_rng_state(state)
    assert torch.equal(model(ids, targets), first)
    assert first != second


def test_a_block_drops_probabilities_and_both_updates(monkeypatch):
    dropped = []
    plain_dropout, plain_attention = F.dropout, F.scaled_dot_product_attention

    def dropout(x, p, training):
        dropped.append(("dropout", tuple(x.shape), p if training else 0.0))
        return plain_dropout(x, p, training)

    def attention(query, *args, dropout_p, **keys):
        dropped.append(("attention", tuple(query.shape), dropout_p))
        return plain_attention(query, *args, dropout_p=dropout_p, **keys)

    monkeypatch.setattr(F, "dropout", dropout)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    model = Decoder(dropping(), vocab=11)
    ids = torch.randint(11, (2, 10))
    model(ids)
    block = [("attention", (2, 4, 10, 8)), ("dropout", (2, 10, 32)), ("dropout", (2, 10, 32))]
    places = [("dropout", (2, 10, 32)), *block, *block]
    assert dropped == [(*place, 0.25) for place in places]
    dropped.clear()
    model.eval()(ids)
    assert dropped == [(*place, 0.0) for place in places]


def test_an_update_that_is_dropped_leaves_the_stream_and_the_rest_is_scaled_up():
    block = Decoder(dropping(layers=1, dropout=0.5), vocab=11).blocks[0]
    nn.init.zeros_(block.attention.out.weight)  # leaves the feed-forward's update alone
    x, (cos, sin) = torch.randn(2, 9, 32), rotary_tables(torch.arange(9), 8)
    update = block.eval()(x, cos, sin) - x
    dropped = block.train()(x, cos, sin) - x
    kept = dropped != 0
    assert 0.4 < kept.float().mean() < 0.6
    # Each update was added to x and x taken away: measured against x, a rounding each and one more.
    expected = torch.where(kept, 2 * update, 0.0)
    assert_rounded_alike(dropped, expected, 4, scale=x.abs().max().item())


def test_activation_checkpointing_draws_the_same_dropout_again():
    plain = Decoder(dropping(), vocab=11)
    recomputing = Decoder(dropping(activation_checkpointing=True), vocab=11)
    recomputing.load_state_dict(plain.state_dict())
    ids, targets = torch.randint(11, (2, 2, 10))
    states = []
    for model in (plain, recomputing):
        torch.manual_seed(3)
        model(ids, targets).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    for one, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_generation_takes_the_likeliest_token_each_time_or_draws_by_its_seed():
    torch.manual_seed(0)
    model = Decoder(SMALL, vocab=11)
    ids = generate(model, torch.tensor([1, 2, 3]), num_tokens=20, seq=16)
    assert ids[:3].tolist() == [1, 2, 3]
    assert len(ids) == 23
    for end in range(3, 23):
        logits = model(ids[max(0, end - 16) : end].unsqueeze(0))[0, -1]
        assert ids[end] == logits.argmax()
    first, again, other = (
        generate(model, ids[:1], 30, 16, temperature=1.0, seed=seed).tolist() for seed in (0, 0, 1)
    )
    assert first == again != other
