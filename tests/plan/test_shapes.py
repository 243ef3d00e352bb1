"""A decoder's numbers against published ones: parameters, FLOPs, activations, logits, tapes."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoders import flops_per_token
from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.margins import memory_interval
from shardwise.plan.model.layers import (
    Execution,
    kept_layer_bytes,
    layer_bytes,
    logit_bytes,
)
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import (
    DecoderShape,
    Experts,
    Latent,
    gpt_shape,
    llama_shape,
    shape_from_config,
)
from shardwise.plan.model.tape import LiveBytes, UnitWork
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Ledger

LLAMA_8B = llama_shape(32, 4096, 32, 8, 14336, 128256)
GPT3 = gpt_shape(96, 12288, 96, 51200, positions=2048)
LLAMA_3B = llama_shape(28, 3072, 24, 8, 8192, 128256, tied=True)
CONFIG = {
    **{"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "vocab_size": 128256},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336},
}
GIB = 2**30


def tape_of(shape, seq, stage=0, **settings):
    return ShapedModel("decoder", shape, seq).tape(Candidate(**settings), stage)


# -- parameters
def test_a_mixture_has_more_parameters_than_a_token_meets():
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = {**CONFIG, **experts, "model_type": "mixtral", "vocab_size": 32000}
    shape = shape_from_config(config)
    assert shape.num_params == 46_702_792_704  # Mixtral-8x7B
    idle = shape.layers * (shape.ffn_params() - shape.active_ffn_params())
    assert shape.num_params - idle == pytest.approx(12.88e9, rel=1e-3)
    mixed = replace(shape, experts=replace(shape.experts, shared=2, dense_layers=3))
    one = 3 * shape.dim * shape.experts.ffn  # an expert's three matrices
    router = shape.dim * shape.experts.num
    changed = 2 * one * (shape.layers - 3) + 3 * (3 * shape.dim * shape.ffn - 8 * one - router)
    assert mixed.num_params - shape.num_params == changed
    with pytest.raises(ConfigError, match=r"num_experts_per_tok must be at most .* 8, got 9"):
        shape_from_config({**config, "num_experts_per_tok": 9})


# -- FLOPs
def test_flops_per_token_are_the_papers_formula():
    """Korthikanti et al., equation 6: 72 B L s h^2 (1 + s / 6h + V / 12 h L)."""
    shape, seq = GPT3, 2048
    layers, dim, vocab = shape.layers, shape.dim, shape.vocab
    wanted = 72 * layers * dim**2 * (1 + seq / (6 * dim) + vocab / (12 * dim * layers))
    assert flops_per_token(shape, seq) == pytest.approx(wanted, rel=2e-4)  # biases
    recomputed = 96 * layers * dim**2 * (1 + seq / (6 * dim) + vocab / (16 * dim * layers))
    assert flops_per_token(shape, seq, recomputed=True) == pytest.approx(recomputed, rel=2e-4)


@given(
    st.sampled_from(["none", "full", "selective", "per_op"]),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 4),
)
def test_a_tapes_flops_are_the_shapes(mode, tp, batch):
    tape = tape_of(LLAMA_8B, 256, micro_batch=batch, tp=tp, activation_checkpointing=mode)
    forward = [e for e in tape.events if isinstance(e, UnitWork) and e.phase != "recompute"]
    flops = sum(c.flops for e in forward for c in e.costs)
    whole = flops_per_token(LLAMA_8B, 256, causal=True) * batch * 256
    assert flops == pytest.approx(whole / tp, rel=1e-6)


# -- activations
def test_a_compiled_layer_keeps_what_the_papers_table_says():
    """34 s b h without the 2 of dropout's masks, and a log-sum-exp per head in place of scores.

    Of Korthikanti et al., table 2: tensor and sequence parallelism divide all of it.
    """

    def kept(**settings):
        run = Execution(2, 2048, implementation="compiled", **settings)
        return kept_layer_bytes(GPT3, run) / run.tokens

    plain = (34 - 2) * GPT3.dim + 4 * GPT3.heads
    assert kept() == kept(activation_checkpointing="selective") == plain
    assert kept(tp=8) == plain / 8
    assert kept(activation_checkpointing="full") == 2 * GPT3.dim


def test_a_modern_fused_block_keeps_what_its_formula_says():
    """12 h + 4 h kv / a + 6 f bytes per token, and a log-sum-exp per head."""
    run = Execution(2, 8192, implementation="compiled")
    assert sum(layer_bytes(LLAMA_8B, run).values()) == run.tokens * (139_264 + 4 * 32)


# -- published differences, in GiB
def test_torchtunes_ladder():
    """A chunked loss needs 51.0 - 42.9 GiB less with compiled layers (figures of its README)."""

    def ladder(loss):
        settings = {"micro_batch": 2, "kernels": "compiled", "loss": loss, "precision": "bf16"}
        candidate = Candidate(num_shards=1, **settings)
        played = play(ShapedModel("llama", LLAMA_3B, 4096).tape(candidate), candidate)
        ledgers = (moment.ledger for moment in played.peaks)
        return max(ledger.activations + ledger.logits for ledger in ledgers) / GIB

    assert ladder("held") - ladder("chunked") == pytest.approx(51.0 - 42.9, abs=0.5)


def test_logits_of_llama_3():
    """7.64 GiB per float32 copy at 16,000 tokens (ALST, arXiv:2506.13996)."""
    copies = logit_bytes(LLAMA_8B, Execution(1, 16_000), "backward") - logit_bytes(
        LLAMA_8B, Execution(1, 16_000, loss="compiled"), "kept"
    )
    assert copies / 3 / GIB == pytest.approx(7.64, abs=0.01)


# -- the tape as a whole
@given(
    st.sampled_from(["none", "full", "selective", "per_op"]),
    st.sampled_from(["eager", "chunked", "compiled", "vocab_parallel", "fused", "transformers"]),
    st.sampled_from(["eager", "compiled"]),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_what_a_tape_allocates_it_frees(mode, loss, kernels, stages, stage, tied):
    shape = replace(LLAMA_8B, layers=4, tied=tied)
    settings = {"activation_checkpointing": mode, "loss": loss, "kernels": kernels}
    tape = tape_of(shape, 64, stage % stages, pp=stages, accumulation=8, **settings)
    live = LiveBytes()
    for work in (e for e in tape.events if isinstance(e, UnitWork)):
        assert work.net.temporary == 0
        assert work.peak.total >= 0
        live = LiveBytes(live.activations + work.net.activations, 0, live.logits + work.net.logits)
        assert live.activations >= 0
        assert live.logits >= 0
    assert live.total == 0


# -- reading
def test_a_config_json_makes_the_shape():
    assert shape_from_config(CONFIG) == LLAMA_8B
    with pytest.raises(ConfigError, match="hidden_size must be a positive integer, got 0"):
        shape_from_config({**CONFIG, "hidden_size": 0})
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        shape_from_config({**CONFIG, "model_type": "lama"})


# -- margins
@given(st.integers(0, 1 << 45), st.integers(0, 5))
def test_margins_widen_a_ledger(size, groups):
    found = memory_interval(Ledger(activations=size), num_groups=groups)
    assert size < found.low_bytes < found.expected_bytes < found.high_bytes
    assert found.expected_bytes == pytest.approx(size + sum(found.margins.values()), abs=2)
    found = memory_interval(Ledger(activations=size), groups, on_accelerator=False)
    assert (found.low_bytes, found.high_bytes, found.margins) == (size, size, {})


def test_a_latent_attention_has_the_published_number_of_parameters():
    """DeepSeek-V3 (arXiv:2412.19437) has 671 billion, DeepSeek-V2-Lite 15.7, Moonlight 16."""
    large, small = Experts(256, 8, 2048, 1, 3), Experts(64, 6, 1408, 2, 1)
    v3 = _latent(61, 7168, 128, 18432, 129280, large, Latent(512, 1536, 128, 64, 128))
    lite = _latent(27, 2048, 16, 10944, 102400, small, Latent(512, 0, 128, 64, 128))
    moonlight = replace(lite, ffn=11264, vocab=163840)
    assert [round(s.num_params / 1e9, 1) for s in (v3, lite, moonlight)] == [671.0, 15.7, 16.0]


def _latent(layers, dim, heads, ffn, vocab, experts, latent):
    return DecoderShape(layers, dim, heads, heads, 128, ffn, vocab, experts=experts, latent=latent)
