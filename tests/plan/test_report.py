"""Plans as JSON facts."""

import re
from dataclasses import asdict, replace

import pytest

from decoders import SHAPE, cluster_of_ranks, make_model, make_plan
from shardwise.homes import Offload
from shardwise.plan.candidate import Candidate
from shardwise.plan.facts import plan_facts, scaling_facts, search_facts
from shardwise.plan.searching import Limits, Space, search
from shardwise.plan.timing.goodput import expected_goodput

UNIT = re.compile(r"^num_|(_bytes|_s|_per_s|_fraction)$")
NO_FIGURES = {"candidate", "micro_batch"}  # settings, and which micro-batch it was


def figures(value, key="", has_unit=False):
    """Yield every number with its key and whether the key, or one above it, has a unit."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in NO_FIGURES:
                yield from figures(inner, name, has_unit or bool(UNIT.search(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from figures(inner, key, has_unit)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value, has_unit


@pytest.fixture(scope="module")
def made():
    return make_plan(
        stage=3,
        num_shards=4,
        num_replicas=2,
        micro_batch=2,
        accumulation=6,
        offload=Offload(optimizer="cpu", fraction=0.5),
    )


@pytest.fixture(scope="module")
def searched():
    space = Space(Candidate(num_shards=4), micro_batches=(1, 2), prefetch_units=(1,))
    return search(make_model(), cluster_of_ranks(4), space, Limits(max_memory_bytes=3 << 30))


def test_efficiency_is_throughput_per_rank_beside_the_smallest(made):
    slower = replace(made, step_s=1.25 * made.step_s)
    rows = scaling_facts([made, slower])
    assert [row["efficiency_fraction"] for row in rows] == [1, pytest.approx(0.8)]


def test_every_figure_has_its_unit_in_a_key_and_bytes_are_whole(made, searched):
    goodput = expected_goodput(0.5, mtbf_s=450e3, back_s=420, interval_s=600, stall_s=1)
    scaling = scaling_facts([made, made])
    for facts in (plan_facts(made), search_facts(searched), scaling, asdict(goodput)):
        found = list(figures(facts))
        assert len(found) >= 8
        assert [key for key, _, has_unit in found if not has_unit] == []
        for key, value, _ in found:
            if key.endswith("_bytes") or key.startswith("num_"):
                assert isinstance(value, int) or key == "num_lost_steps_per_failure", key
            if key.endswith("_fraction"):
                assert 0 <= value <= 1, key


def test_facts_say_what_the_plan_says(made, searched):
    facts = plan_facts(made)
    assert facts["memory"]["peak"]["total_bytes"] == sum(
        facts["memory"]["peak"]["lines_bytes"].values()
    )
    assert facts["time"]["step_s"] == made.step_s
    assert facts["time"]["num_tokens_per_step"] == made.tokens_per_step
    assert facts["candidate"]["accumulation"] == 6
    assert facts["candidate"]["offload"]["optimizer"] == "cpu"
    assert facts["num_params"] == SHAPE.num_params
    found = search_facts(searched)
    assert len(found["pareto"]) + len(found["rejected"]) == found["num_candidates"]
    assert found["winner"]["label"] == found["pareto"][0]["label"]
