"""Routers and the decoder's mixtures in one process: against formulas, transformers and counts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundings import assert_rounded_alike
from shardwise.errors import ConfigError
from shardwise.parallel.experts import MixtureOfExperts
from shardwise.parallel.routing import Router, Routing, balance_experts
from shardwise.plan.model.decoder import PlainDecoder
from shardwise.plan.model.models import shape_source
from shardwise.plan.model.shapes import DecoderShape, Experts

DIM, WIDTH, NUM, TOP, TOKENS = 6, 5, 7, 3, 20


def layer(routing, shared=None):
    torch.manual_seed(0)
    return MixtureOfExperts(DIM, WIDTH, routing, shared, std=1.0, out_std=1.0)


def each_token_alone(moe, x, weights, chosen):
    """The sum over a token's experts, one token and one expert after the other."""
    e = moe.experts
    rows = []
    for token, numbers, shares in zip(x, chosen.tolist(), weights, strict=True):
        found = torch.zeros(DIM)
        for number, share in zip(numbers, shares, strict=True):
            hidden = F.silu(e.gate[number] @ token) * (e.up[number] @ token)
            found = found + share * (e.down[number] @ hidden)
        rows.append(found)
    return torch.stack(rows)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_layer_is_the_weighed_sum_over_each_tokens_experts(scoring, shared):
    moe = layer(Routing(NUM, TOP, scoring, scale=2.0), nn.Linear(DIM, DIM) if shared else None)
    x = torch.randn(2, TOKENS // 2, DIM, requires_grad=True)
    y, balance = moe(x)
    assert y.shape == x.shape and balance == 0
    tokens = x.detach().flatten(0, 1).requires_grad_()
    logits = tokens @ moe.router.weight.T
    scores = logits.softmax(1) if scoring == "softmax" else logits.sigmoid()
    best, chosen = scores.sort(descending=True)
    weights = 2.0 * best[:, :TOP] / best[:, :TOP].sum(1, keepdim=True)
    wanted = each_token_alone(moe, tokens, weights, chosen[:, :TOP])
    if moe.shared is not None:
        wanted = wanted + moe.shared(tokens)
    roundings = 4 * (DIM + DIM + WIDTH + TOP + NUM)
    assert_rounded_alike(y.flatten(0, 1), wanted.detach(), roundings)
    found = torch.autograd.grad(y.square().sum(), [x, *moe.parameters()])
    right = torch.autograd.grad(wanted.square().sum(), [tokens, *moe.parameters()])
    assert_rounded_alike(found[0].flatten(0, 1), right[0], 2 * roundings + TOKENS)
    for a, b in zip(found[1:], right[1:], strict=True):
        assert_rounded_alike(a, b, 2 * roundings + TOKENS)


def test_scores_that_are_not_normalised_are_taken_as_they_are():
    router = Router(DIM, Routing(NUM, TOP, normalized=False), std=1.0)
    weights, chosen, _ = router(torch.randn(TOKENS, DIM))
    assert (weights.sum(1) < 1).all() and (weights[:, 0] >= weights[:, -1]).all()
    assert chosen.shape == (TOKENS, TOP)


def test_the_auxiliary_loss_is_that_of_mixtral():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    router = Router(DIM, Routing(NUM, TOP, balanced=True), std=1.0)
    x = torch.randn(TOKENS, DIM)
    found = router(x)[2]
    logits = x @ router.weight.T
    wanted = mixtral.load_balancing_loss_func((logits,), num_experts=NUM, top_k=TOP)
    assert_rounded_alike(found.detach(), wanted.detach(), 2 * DIM + 2 * NUM + TOKENS)
    ours = torch.autograd.grad(found, router.weight)[0]
    theirs = torch.autograd.grad(wanted, router.weight)[0]
    assert_rounded_alike(ours, theirs, 4 * (DIM + NUM) + TOKENS)
    assert router.eval()(x)[2] == 0  # in evaluation there is none


def test_scores_of_a_sigmoid_are_balanced_as_shares():
    router = Router(DIM, Routing(NUM, TOP, "sigmoid", balanced=True), std=1.0)
    x = torch.randn(TOKENS, DIM)
    _, chosen, found = router(x)
    scores = (x @ router.weight.T).sigmoid()
    sent = F.one_hot(chosen, NUM).sum((0, 1)) / TOKENS
    wanted = NUM * (sent * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    assert_rounded_alike(found.detach(), wanted.detach(), 2 * DIM + 2 * NUM + TOKENS)


def test_a_bias_moves_by_the_sign_of_what_its_expert_lacks_and_changes_the_choice_alone():
    router = Router(DIM, Routing(NUM, TOP, "sigmoid", biased=True), std=1.0)
    model = nn.ModuleDict({"router": router})
    x = torch.randn(2, TOKENS, DIM)
    load = torch.zeros(NUM)
    for part in x:  # an accumulation window
        _, chosen, _ = router(part)
        load += F.one_hot(chosen, NUM).sum((0, 1))
    router.eval()(x[0])  # counts nothing
    balance_experts(model, rate=0.25)
    assert torch.equal(router.bias, 0.25 * (load.mean() - load).sign())
    assert not router.load.any()
    before = router.bias.clone()
    balance_experts(model)  # nothing was routed since
    assert torch.equal(router.bias, before)
    with torch.no_grad():
        router.bias[4] = 100.0
    weights, chosen, _ = router.train()(x[0])
    assert (chosen == 4).any(1).all()
    scores = (x[0] @ router.weight.T).sigmoid().gather(1, chosen)
    assert_rounded_alike(weights.detach(), (scores / scores.sum(1, True)).detach(), 2 * DIM + TOP)
    assert list(router.state_dict()) == ["weight", "bias"]
    balance_experts(nn.Linear(2, 2))  # a model without experts


def test_routings_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="top_k=8 of 7: expected 1 to 7"):
        Routing(7, 8)
    with pytest.raises(ConfigError, match="scoring='tanh'"):
        Routing(7, 2, "tanh")


# -- the decoder
TINY = DecoderShape(3, 8, 2, 1, 4, 10, 13, experts=Experts(6, 2, 5, shared=2, dense_layers=1))
MIXTRAL = DecoderShape(32, 4096, 32, 8, 128, 14336, 32000, experts=Experts(8, 2, 14336))
# DeepSeek-V3's experts (arXiv:2412.19437, section 4.2), on plain attention.
DEEPSEEK = DecoderShape(
    61, 7168, 128, 128, 128, 18432, 129280, experts=Experts(256, 8, 2048, 1, 3, "sigmoid")
)


@pytest.mark.parametrize("shape", [TINY, replace(TINY, tied=True), MIXTRAL, DEEPSEEK])
def test_a_decoder_has_the_parameters_that_its_shape_says(shape):
    with torch.device("meta"):
        model = PlainDecoder(shape, biased=True)
    assert sum(p.numel() for p in model.parameters()) == shape.num_params
    experts = shape.experts
    assert experts is not None
    for number, block in enumerate(model.blocks):
        found = sum(p.numel() for p in block.parameters())
        assert found == shape.of_layer(number).layer_params()
        assert isinstance(block.feed_forward, MixtureOfExperts) == (number >= experts.dense_layers)
    for module in model.modules():
        owns = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not owns or callable(getattr(module, "reset_parameters", None)), module


def test_the_auxiliary_loss_is_added_in_training_and_handed_out_when_asked_for():
    torch.manual_seed(0)
    model = PlainDecoder(TINY, balance=0.5, biased=True)
    ids, targets = torch.randint(13, (2, 2, 7))
    alone, balance = model(ids, targets, with_balance=True)
    assert balance > 0
    assert torch.equal(model(ids, targets), alone + 0.5 * balance)
    logits, again = model(ids, with_balance=True)
    assert torch.equal(logits, model(ids)) and torch.equal(again, balance)
    (grad,) = torch.autograd.grad(balance, model.blocks[2].feed_forward.router.weight)
    assert grad.any()
    assert torch.equal(model.eval()(ids, targets), alone)
    checkpointed = PlainDecoder(TINY, checkpointed=True, balance=0.5, biased=True)
    checkpointed.load_state_dict(model.state_dict())
    for each in (model.train(), checkpointed):
        for router in (m for m in each.modules() if isinstance(m, Router)):
            router.load.zero_()
        each(ids, targets).backward()
    for (name, a), b in zip(model.named_parameters(), checkpointed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad), name
    for (name, a), b in zip(model.named_buffers(), checkpointed.buffers(), strict=True):
        assert torch.equal(a, b), name  # what is computed again is not counted again
    _, none = PlainDecoder(replace(TINY, experts=None))(ids, with_balance=True)
    assert none == 0


def test_experts_of_another_kind_are_refused_and_no_trace_pretends_to_know_the_routing():
    for change in ({"gated": False}, {"bias": True}):
        with pytest.raises(ConfigError, match="experts are SwiGLU without biases"):
            PlainDecoder(replace(TINY, **change))
    with pytest.raises(ConfigError, match=r"cannot be traced.*by the formulas of its shape"):
        shape_source("tiny", TINY, 8).build(False)
