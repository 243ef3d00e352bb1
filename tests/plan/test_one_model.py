"""Formulas and traces are one model; what is computed again costs time and saves memory."""

import json
import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest

from decoders import cluster_of_ranks
from shardwise.cli.plan_setup import limits_of, set_up, space_of
from shardwise.errors import ConfigError
from shardwise.keys import check_keys
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.model.models import TracedModel, huggingface_source, shape_source
from shardwise.plan.model.presets import find_preset
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.model.shapes import Experts, gpt_shape, llama_shape
from shardwise.plan.planning import plan
from shardwise.plan.request import PlanRequest
from shardwise.plan.searching import search

LEVELS = ("none", "selective", "per_op", "full")
# One of each family of presets.
TRACED = {
    "llama": llama_shape(4, 1024, 8, 2, 2816, 32_000),
    "multi-head, tied": llama_shape(4, 1024, 8, 8, 2816, 32_000, tied=True),
    "qwen3": replace(llama_shape(4, 1024, 16, 8, 3072, 50_000), qk_norm=True),
    "qwen2": replace(llama_shape(4, 896, 14, 2, 4864, 50_000), qkv_bias=True),
    "gpt": gpt_shape(4, 1024, 16, 50_257, positions=2048),
}


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_trace_and_the_formulas_agree_in_time_and_memory(name, precision):
    """The peak of tensors, and the step. Presets, at any size, differ by 0.4 % at most."""
    shape = TRACED[name]
    traced = TracedModel(shape_source(name, shape, 2048))
    formulas = ShapedModel(name, shape, 2048)
    for checkpointing in ("none", "full"):
        candidate = Candidate(
            num_shards=8, micro_batch=2, precision=precision, activation_checkpointing=checkpointing
        )
        one, two = (plan(m, cluster_of_ranks(8), candidate) for m in (traced, formulas))
        assert two.step_s == pytest.approx(one.step_s, rel=0.01)
        assert two.played.peak.ledger.total == pytest.approx(one.played.peak.ledger.total, rel=0.01)


CONFIG = {
    **{"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2816},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128},
    **{"vocab_size": 32_000, "max_position_embeddings": 8192},
}


def config_file(folder, family):
    (folder / "config.json").write_text(json.dumps({"model_type": family, **CONFIG}))
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_formulas_of_a_config_agree_with_a_trace_of_transformers_class(family, tmp_path):
    path = config_file(tmp_path, family)
    traced = TracedModel(huggingface_source(tmp_path / "config.json"), 2048)
    for precision, checkpointing in product(("bf16", "fp32"), ("none", "full")):
        flags = {"activation_checkpointing": checkpointing, "precision": precision}
        setup = set_up(path, PlanRequest(seq=2048, micro_batch=2, **flags))
        assert isinstance(setup.model, ShapedModel)
        one, two = (plan(m, setup.cluster, setup.candidate) for m in (traced, setup.model))
        assert two.num_params == one.num_params
        assert two.step_s == pytest.approx(one.step_s, rel=0.01)
        assert two.played.peak.ledger.total == pytest.approx(one.played.peak.ledger.total, rel=0.01)


# A preset of each family.
FAMILIES = ("llama-3.2-1b", "gpt2-xl", "qwen2.5-7b", "qwen3-8b", "gemma-2b", "mpt-7b")


@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_computed_again_takes_longer_and_needs_less(name, kernels):
    preset = find_preset(name)
    model = ShapedModel(preset.name, preset.shape, preset.seq)
    for tp, pp, cp, precision in ((1, 1, 1, "bf16"), (2, 1, 2, "bf16"), (1, 2, 1, "fp32")):
        base = Candidate(num_shards=8 // (tp * pp * cp), tp=tp, pp=pp, cp=cp, accumulation=pp)
        # By a loss that leaves the peak to layers.
        base = replace(base, kernels=kernels, precision=precision, loss="fused")
        ways = [replace(base, activation_checkpointing=level) for level in LEVELS]
        try:
            made = [plan(model, cluster_of_ranks(8), each) for each in ways]
        except ConfigError as error:  # a head, or a layer, that does not divide
            assert "tp=2" in str(error) or "pp=2" in str(error)
            continue
        assert all(a.step_s <= b.step_s for a, b in pairwise(made))
        peaks = [each.played.peak.ledger.total for each in made]
        assert all(a >= b for a, b in pairwise(peaks))
        assert made[0].step_s < made[3].step_s


@pytest.mark.parametrize("gpu", ["V100-32GB", "A100-80GB", "h100", "cpu"])
def test_compiled_kernels_are_no_slower_on_any_device(gpu):
    """Products and attention are the same calls: what is computed again, and the loss, too."""
    experts = Experts(8, 2, 2816)
    mixture = replace(llama_shape(4, 1024, 8, 2, 2816, 32_000), experts=experts)
    shapes = {name: find_preset(name).shape for name in ("gpt2-xl", "llama-3.2-1b", "qwen3-8b")}
    for name, shape in {"mixture": mixture, **shapes}.items():
        models = [ShapedModel(name, shape, 1024, eager=e) for e in ("decoder", "transformers")]
        losses = zip(LEVELS, ("held", "chunked", "fused", "eager"), strict=True)
        for model, precision, (level, loss) in product(models, ("bf16", "fp32"), [*losses]):
            base = Candidate(num_shards=8, micro_batch=4, precision=precision, loss=loss)
            base = replace(base, activation_checkpointing=level)
            eager, compiled = eager_and_compiled(model, base, gpu)
            assert compiled.step_s <= eager.step_s, (name, precision, level, loss)
            if loss in ("fused", "eager"):
                peaks = [each.played.peak.ledger.total for each in (compiled, eager)]
                assert peaks[0] <= peaks[1], (name, precision, level, loss)


def eager_and_compiled(model, base, gpu):
    cluster = make_cluster(gpu, 8)
    return [plan(model, cluster, replace(base, kernels=k)) for k in ("eager", "compiled")]


# -- the search over all of it
DEGREES = ((1, 1, 1), (8, 1, 1), (1, 2, 1), (1, 1, 2))


@cache
def searched():
    request = check_keys(PlanRequest, {}, {"ranks": 64, "search": True}, None, "plan")
    setup = set_up("llama-3.2-1b", request)
    assert isinstance(setup.model, ShapedModel)
    space = replace(space_of(setup), degrees=DEGREES)
    limits = limits_of(setup)
    return setup.model, space, search(setup.model, setup.cluster, space, limits, setup.prices_of)


WINDOWS = 8  # of a rank and step: 4 Mi tokens over 64 ranks


def by_hand(space, draw):
    tp, pp, cp = draw.choice(space.degrees)
    ranks = 64 // (tp * pp * cp)
    kernels = draw.choice(space.kernels)
    num_shards = draw.choice([n for n in (8, ranks) if not ranks % n])
    return replace(
        space.base,
        stage=draw.choice(space.stages),
        layout=draw.choice(space.layouts),
        num_shards=num_shards,
        num_replicas=ranks // num_shards,
        **{"tp": tp, "pp": pp, "cp": cp},
        **{"kernels": kernels[0], "loss": kernels[1]},
        activation_checkpointing=draw.choice(space.activation_checkpointing),
        offload=draw.choice(space.offloads),
        **dict(zip(("micro_batch", "accumulation"), batches(tp * pp * cp, draw), strict=True)),
    )


def batches(degrees, draw):
    """Draw a micro-batch and the accumulation that make as many tokens as the search's steps."""
    micro_batch = draw.choice([n for n in (1, 1, 2, 4) if n <= WINDOWS * degrees])
    return micro_batch, WINDOWS * degrees // micro_batch


def test_no_plan_made_by_hand_fits_and_beats_the_winner_or_has_less_than_its_bounds():
    model, space, found = searched()
    winner = found.winner
    assert winner is not None
    draw = random.Random(16)
    made = []
    for _ in range(60):
        candidate = by_hand(space, draw)
        made.append(plan(model, winner.cluster, candidate))
        (_, alive_bytes, input_bytes), played = model.lower_bounds(candidate), made[-1].played
        assert alive_bytes - input_bytes <= played.peak.ledger.total - played.device.total
    fitting = [each for each in made if each.verdict == "fits"]
    assert len(fitting) > 10
    tokens = {each.tokens_per_step for each in (*made, *found.pareto)}
    assert tokens == {WINDOWS * 64 * model.seq}
    assert max(each.tokens_per_s for each in fitting) <= winner.tokens_per_s


def test_the_search_plays_few_of_all_candidates_and_tells_of_all_settings():
    _, space, found = searched()
    assert found.num_played < 1000 < found.num_candidates
    assert {"per_op", "none", "full"} == set(space.activation_checkpointing)
    met = [p.candidate for p in found.pareto] + [r.candidate for r in found.rejected]
    assert {c.kernels for c in met} == {"eager", "compiled"}
    assert {c.loss for c in met} == {"eager", "compiled", "fused"}
    assert all(max(getattr(c, axis) for c in met) > 1 for axis in ("tp", "pp", "cp"))
