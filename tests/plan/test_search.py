"""A search against an enumeration of the same space by hand."""

from dataclasses import replace
from itertools import product

import pytest

from decoders import SEQ, SHAPE, cluster_of_ranks, make_model
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.planning import plan
from shardwise.plan.searching import Limits, Space, search
from shardwise.quantities import format_bytes

RANKS = 4
CLUSTER = cluster_of_ranks(RANKS)
MODEL = make_model()
BASE = Candidate(num_shards=RANKS)
BATCHES = (1, 2, 4, 8)
SPACE = Space(BASE, prefetch_units=(1, 0), micro_batches=BATCHES)
STATE_HEAVY = replace(SHAPE, vocab=40_000)


def enumerate_by_hand(shape, tokens=None):
    """Plan every candidate of SPACE that makes the tokens of a step exactly."""
    model = make_model(shape)
    found = {}
    for stage, checkpointing, ahead, micro_batch in product(
        range(4), ("none", "full"), (None, 0), BATCHES
    ):
        accumulation = 1 if tokens is None else tokens // (micro_batch * RANKS * SEQ)
        candidate = replace(
            BASE,
            stage=stage,
            activation_checkpointing=checkpointing,
            prefetch_bytes=ahead,
            micro_batch=micro_batch,
            accumulation=accumulation,
        )
        if accumulation and (stage or ahead is None):
            found[candidate] = plan(model, CLUSTER, candidate)
    return found


def met_in(found):
    return [p.candidate for p in found.pareto] + [r.candidate for r in found.rejected]


@pytest.fixture(scope="module")
def by_hand():
    return enumerate_by_hand(SHAPE)


@pytest.fixture(scope="module")
def whole():
    return search(MODEL, CLUSTER, SPACE)


def test_every_candidate_is_looked_at_once_and_those_that_lost_have_a_reason(whole, by_hand):
    met = met_in(whole)
    assert len(met) == len(set(met)) == whole.num_candidates > whole.num_played
    assert set(met) == set(by_hand)
    assert all(r.reason.strip() for r in whole.rejected)
    assert whole.num_played == sum(r.was_played for r in whole.rejected) + len(whole.pareto)


def test_the_winner_is_the_fastest_of_all(whole, by_hand):
    assert whole.winner is whole.pareto[0]
    assert whole.winner.tokens_per_s == max(p.tokens_per_s for p in by_hand.values())


def test_no_plan_beats_one_of_the_front_and_one_of_the_front_beats_each_other(whole, by_hand):
    def beats(one, other):
        return one.step_s <= other.step_s and one.memory.high_bytes <= other.memory.high_bytes

    def per_token(made):
        return replace(made, step_s=made.step_s / made.tokens_per_step)

    front = [per_token(p) for p in whole.pareto]
    others = [per_token(by_hand[r.candidate]) for r in whole.rejected]
    assert not any(beats(a, b) for a in front for b in front if a is not b)
    assert all(any(beats(a, b) for a in front) for b in others)
    assert [p.step_s for p in front] == sorted(p.step_s for p in front)


def test_formats_are_kept_where_they_can_be(whole):
    assert not any(p.candidate.gather or p.candidate.reduce for p in whole.pareto)
    offloads = (Offload(), Offload(optimizer="cpu"))
    base = replace(SPACE.base, gather="int8", reduce="int8-a2a")
    found = search(MODEL, CLUSTER, replace(SPACE, base=base, offloads=offloads))
    met = met_in(found)
    assert {(c.gather, c.reduce) for c in met} == {("int8", "int8-a2a")}
    assert {c.stage for c in met} == {1, 2, 3}
    assert not any(c.stage == 3 and c.offload.moves_state for c in met)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
def test_with_less_memory_the_winner_is_the_fastest_of_those_that_fit(share, by_hand):
    sizes = sorted(p.memory.high_bytes for p in by_hand.values())
    most = sizes[int(share * (len(sizes) - 1))]
    found = search(MODEL, CLUSTER, SPACE, Limits(max_memory_bytes=most))
    fitting = [p for p in by_hand.values() if p.memory.high_bytes <= most]
    assert found.winner is not None
    assert found.winner.tokens_per_s == max(p.tokens_per_s for p in fitting)
    assert all(p.memory.high_bytes <= most for p in found.pareto)
    missing = set(by_hand) - {*met_in(found)}
    assert all(by_hand[c].memory.high_bytes > most for c in missing)


@pytest.mark.parametrize("shape", [SHAPE, STATE_HEAVY], ids=["activations", "state"])
def test_tokens_per_step_are_kept_and_no_window_that_fits_is_missed(shape):
    tokens = 8 * RANKS * SEQ
    plans = enumerate_by_hand(shape, tokens)
    sizes = sorted({p.memory.high_bytes for p in plans.values()})
    model = make_model(shape)
    for most in (sizes[0] - 1, sizes[1], sizes[len(sizes) // 2], sizes[-1]):
        found = search(model, CLUSTER, SPACE, Limits(max_memory_bytes=most, tokens_per_step=tokens))
        fitting = [p for p in plans.values() if p.memory.high_bytes <= most]
        if not fitting:
            assert found.winner is None
            assert all(r.reason for r in found.rejected)
            continue
        assert found.winner is not None
        assert found.winner.tokens_per_s == max(p.tokens_per_s for p in fitting)
        assert all(p.tokens_per_step == tokens for p in found.pareto)
        assert all(p == plans[p.candidate] for p in found.pareto)
        for lost in found.rejected:  # without a simulation, and told as by a plan in full
            if lost.was_played and lost.reason.startswith("needs up to"):
                made = plans[lost.candidate]
                peak, high = made.played.peak, format_bytes(made.memory.high_bytes)
                where = f"in {peak.phase} of {made.unit_name(peak.unit)}: "
                assert lost.reason.startswith(
                    f"needs up to {high} of {format_bytes(most)}, {where}"
                )


def test_tokens_per_step_may_be_missed_by_one_per_cent():
    space = replace(SPACE, stages=(3,), micro_batches=(1, 64))
    per_pass = RANKS * SEQ
    for tokens, is_met in ((100 * per_pass + 250, True), (4 * per_pass + 25, False)):
        found = search(MODEL, CLUSTER, space, Limits(tokens_per_step=tokens))
        assert (found.winner is not None) == is_met
        for made in found.pareto:
            assert abs(made.tokens_per_step - tokens) <= tokens / 100
        lost = [r for r in found.rejected if not r.was_played]
        assert lost
        assert all(f"{tokens:,}" in r.reason for r in lost)


def test_a_target_is_kept_and_what_misses_it_says_by_how_much(by_hand):
    speeds = sorted(p.tokens_per_s for p in by_hand.values())
    target = speeds[len(speeds) // 2]
    found = search(MODEL, CLUSTER, SPACE, Limits(target_tokens_per_s=target))
    assert all(p.tokens_per_s >= target for p in found.pareto)
    too_slow = [r.candidate for r in found.rejected if "asked for" in r.reason]
    assert too_slow and all(by_hand[c].tokens_per_s < target for c in too_slow)
    nothing = search(MODEL, CLUSTER, SPACE, Limits(target_tokens_per_s=2 * speeds[-1]))
    assert nothing.winner is None
    assert len(nothing.rejected) == len(by_hand)


def test_state_that_does_not_fit_is_told_without_playing():
    found = search(MODEL, CLUSTER, SPACE, Limits(max_memory_bytes=1000))
    assert found.winner is None
    assert found.num_played == 0
    assert all("optimizer state alone" in r.reason for r in found.rejected)


def test_each_micro_batch_that_was_asked_for_has_a_reason():
    sizes = sorted(p.memory.high_bytes for p in enumerate_by_hand(SHAPE).values())
    space = replace(SPACE, micro_batches=(1, 3, 1 << 14, 1 << 15), prefetch_units=(1,))
    for tokens in (None, RANKS * SEQ * 3 << 15):
        limits = Limits(max_memory_bytes=sizes[-1], tokens_per_step=tokens)
        found = search(MODEL, CLUSTER, space, limits)
        assert {p.candidate.micro_batch for p in found.pareto} <= {1, 3}
        per_family = {}
        for lost in met_in(found):
            family = replace(lost, micro_batch=1, accumulation=1)
            per_family.setdefault(family, set()).add(lost.micro_batch)
        assert all(met == {1, 3, 1 << 14, 1 << 15} for met in per_family.values())
        assert any("by its formulas" in r.reason for r in found.rejected)


def test_more_memory_than_the_device_has_is_not_used():
    small = replace(
        CLUSTER,
        node=replace(
            CLUSTER.node, accelerator=replace(CLUSTER.node.accelerator, memory_bytes=10_000)
        ),
    )
    assert search(MODEL, small, SPACE, Limits(max_memory_bytes=1 << 50)).winner is None


def test_without_batches_micro_batches_double_until_they_do_not_fit():
    space = replace(SPACE, stages=(3,), micro_batches=(), prefetch_units=(1,))
    found = search(MODEL, CLUSTER, space, Limits(max_memory_bytes=3 << 30))
    met = {candidate.micro_batch for candidate in met_in(found)}
    assert met == {1 << i for i in range(len(met))}
    assert any("by its formulas" in r.reason for r in found.rejected)


def test_nodes_and_degrees_are_placed_and_offloaded_parameters_differ_at_stage_3():
    cluster = cluster_of_ranks(16)
    space = Space(
        BASE,
        stages=(2, 3),
        activation_checkpointing=("none",),
        prefetch_units=(None,),
        micro_batches=(1,),
        offloads=(Offload(optimizer="cpu"), Offload("cpu", None, "cpu")),
        degrees=((1, 1, 1), (2, 1, 1), (3, 1, 1)),
    )
    found = search(MODEL, cluster, space)
    met = met_in(found)
    placed = {(c.num_shards, c.num_replicas, c.tp) for c in met}
    assert placed == {(16, 1, 1), (8, 2, 1), (8, 1, 2)}
    assert {c.stage for c in met if c.offload.params == "cpu"} == {3}
    assert len(met) == 3 * 3


def test_progress_is_told_after_every_way():
    told = []
    space = replace(SPACE, stages=(3,), micro_batches=(1,))
    search(MODEL, CLUSTER, space, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 2), (2, 2)]  # with and without checkpointing


@pytest.mark.parametrize(
    ("change", "limits", "word"),
    [
        ({"stages": ()}, {}, "stages"),
        ({"offloads": ()}, {}, "offloads"),
        ({"prefetch_units": ()}, {}, "prefetch_units"),
        ({"bucket_bytes": ()}, {}, "bucket_bytes"),
        ({"num_shards": (3,)}, {}, "num_shards"),
        ({"degrees": ((3, 1, 1),)}, {}, "degrees"),
        ({}, {"max_memory_bytes": 0}, "max_memory_bytes"),
        ({}, {"tokens_per_step": -1}, "tokens_per_step"),
        ({}, {"target_tokens_per_s": float("nan")}, "target_tokens_per_s"),
    ],
)
def test_an_empty_space_and_a_limit_that_is_none_are_refused_by_name(change, limits, word):
    with pytest.raises(ConfigError, match=word):
        search(MODEL, CLUSTER, replace(SPACE, **change), Limits(**limits))


def test_full_bytes_of_the_largest_unit_decide_what_is_prefetched():
    space = replace(
        SPACE,
        stages=(3,),
        micro_batches=(1,),
        prefetch_units=(2,),
        activation_checkpointing=("none",),
    )
    found = search(MODEL, CLUSTER, space)
    assert found.winner is not None
    tape = MODEL.tape(found.winner.candidate)
    largest = max(2 * unit.numel for unit in tape.units[1:])
    assert found.winner.candidate.prefetch_bytes == 2 * largest


def test_degrees_that_the_model_cannot_have_are_rejected_with_the_reason():
    space = replace(SPACE, stages=(3,), prefetch_units=(1,), degrees=((1, 1, 1), (1, 1, 4)))
    impossible = replace(space, degrees=((1, 1, 1), (1, 4, 1)))  # fewer layers than stages
    assert SHAPE.layers < 4
    for asked in (space, impossible):
        result = search(MODEL, CLUSTER, asked)
        assert result.winner is not None
        assert result.num_candidates == len(result.pareto) + len(result.rejected)
    reasons = [r.reason for r in result.rejected if r.candidate.pp == 4]
    assert reasons and all("pp=4: expected at most one stage" in reason for reason in reasons)
