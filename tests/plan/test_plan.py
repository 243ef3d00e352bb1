"""A plan as a whole: what it adds to playing, pricing and simulating, and which way it moves."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise.plan.planning
from decoders import (
    SEQ,
    SHAPE,
    cluster_of_ranks,
    faster,
    flops_per_token,
    make_model,
    make_plan,
    settings_of_engine,
    shapes,
)
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.margins import MemoryInterval
from shardwise.plan.planning import plan

FEW = settings(max_examples=25)
STAGES = st.integers(0, 3)


# -- which way figures move
@FEW
@given(shapes(), settings_of_engine(), st.sampled_from([1, 2, 3, 8]))
def test_a_higher_stage_never_holds_more_between_steps(shape, others, num_shards):
    held = [
        make_plan(shape, stage=stage, num_shards=num_shards, **others).played.device.total
        for stage in range(4)
    ]
    assert held == sorted(held, reverse=True)


@FEW
@given(shapes(), settings_of_engine(), st.integers(1, 3), st.sampled_from([1, 2, 3, 4, 6]))
def test_twice_the_ranks_never_hold_larger_shards_each(shape, others, stage, num_shards):
    """Full copies may be larger: they are padded to a multiple of the ranks."""
    few = make_plan(shape, stage=stage, num_shards=num_shards, **others).played.device
    many = make_plan(shape, stage=stage, num_shards=2 * num_shards, **others).played.device
    assert many.optimizer_state <= few.optimizer_state
    assert many.grad_shards <= few.grad_shards
    if stage == 3:
        assert many.param_shards + many.param_full <= few.param_shards + few.param_full


@FEW
@given(shapes(), settings_of_engine(), STAGES, st.sampled_from([1, 2, 3]), st.integers(1, 3))
def test_twice_the_batch_never_needs_less_memory_nor_more_time_per_token(
    shape, others, stage, num_shards, accumulation
):
    sizes = {"num_shards": num_shards, "accumulation": accumulation}
    small = make_plan(shape, stage=stage, micro_batch=2, **sizes, **others)
    large = make_plan(shape, stage=stage, micro_batch=4, **sizes, **others)
    assert large.played.peak.ledger.total >= small.played.peak.ledger.total
    assert large.memory.high_bytes >= small.memory.high_bytes
    assert large.step_s >= small.step_s
    assert large.tokens_per_s >= small.tokens_per_s * (1 - 1e-9)


@FEW
@given(shapes(), settings_of_engine(), STAGES, st.sampled_from([2, 3, 16]))
def test_twice_the_bandwidth_or_speed_is_never_slower_and_needs_the_same_memory(
    shape, others, stage, num_shards
):
    cluster = cluster_of_ranks(num_shards * others["num_replicas"])
    plans = [
        make_plan(shape, each, stage=stage, num_shards=num_shards, accumulation=2, **others)
        for each in (cluster, faster(cluster, links=2), faster(cluster, device=2))
    ]
    assert all(p.step_s <= plans[0].step_s * (1 + 1e-9) for p in plans)
    assert len({p.played.peak.ledger.total for p in plans}) == 1
    slow = [{"straggler": 9.0}, {"slow_link": 9.0}]
    slower = [plan(make_model(shape), cluster, plans[0].candidate, **each) for each in slow]
    assert all(p.step_s > plans[0].step_s for p in slower)


# -- windows
@FEW
@given(
    shapes(),
    settings_of_engine(),
    STAGES,
    st.sampled_from([1, 3]),
    st.integers(5, 9),
    st.sampled_from([Offload(), Offload(optimizer="cpu"), Offload("cpu", None, "nvme")]),
)
def test_a_long_window_is_the_same_as_one_played_in_full(
    shape, others, stage, num_shards, accumulation, offload
):
    sizes = {"num_shards": num_shards, "accumulation": accumulation, "offload": offload}
    short = make_plan(shape, stage=stage, **sizes, **others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shardwise.plan.planning, "_LONGEST_PLAYED", 100)
        full = make_plan(shape, stage=stage, **sizes, **others)
    assert short.played.peak.ledger == full.played.peak.ledger
    assert short.played.device == full.played.device
    assert short.memory == full.memory
    assert short.played.program.sent_bytes == full.played.program.sent_bytes
    assert short.played.program.num_collectives == full.played.program.num_collectives
    assert short.played.program.copied_bytes == full.played.program.copied_bytes
    assert (short.played.host, short.played.files) == (full.played.host, full.played.files)
    assert short.step_s == pytest.approx(full.step_s, rel=1e-6)


# -- figures of a plan
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_model_flops_are_those_of_the_shape_whatever_is_recomputed(checkpointing):
    made = make_plan(
        num_shards=2, accumulation=3, micro_batch=2, activation_checkpointing=checkpointing
    )
    tokens = 2 * 3 * 2 * SEQ
    assert made.tokens_per_step == tokens
    assert made.flops_per_step in (
        tokens * flops_per_token(SHAPE, SEQ),
        tokens * flops_per_token(SHAPE, SEQ, causal=True),
    )


def test_utilisation_is_flops_over_the_peak_of_the_compute_dtype():
    for precision in ("bf16", "pure_bf16"):
        made = make_plan(num_shards=4, precision=precision)
        peak = made.cluster.node.accelerator.peak["bfloat16"]
        assert made.mfu == pytest.approx(made.flops_per_step / made.step_s / 4 / peak)


def test_the_verdict_compares_the_interval_with_the_device():
    made = make_plan()
    most = made.capacity_bytes
    for low, high, verdict in ((-50, 0, "fits"), (0, 1, "tight"), (1, 50, "will not fit")):
        memory = replace(made.memory, low_bytes=most + low, high_bytes=most + high)
        assert isinstance(memory, MemoryInterval)
        assert replace(made, memory=memory).verdict == verdict


def test_a_plan_has_a_name_for_every_unit_and_an_assumption_with_its_source():
    made = make_plan(num_shards=2)
    assert made.unit_name(0) == "(root)"
    names = made.played.program.unit_names
    assert len({made.unit_name(u) for u in range(len(names))}) == len(names)
    assert all("(" in line and ": " in line for line in made.assumptions)
    assert made.notes


# -- refusals
def test_ranks_that_are_not_the_clusters_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"3 ranks \(3 shards x 1 replicas.*the cluster 2"):
        plan(make_model(), cluster_of_ranks(2), Candidate(num_shards=3))
