"""What all ranks of a node hold on its host and in its files, against what the node has."""

from dataclasses import replace

import pytest

from shardwise.cli.plan_setup import set_up
from shardwise.errors import ConfigError
from shardwise.homes import Offload
from shardwise.keys import check_keys
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.margins import node_room
from shardwise.plan.model.presets import find_model
from shardwise.plan.model.shaped import ShapedModel
from shardwise.plan.planning import plan
from shardwise.plan.request import PlanRequest
from shardwise.plan.searching import Space, search

GIB = 1 << 30


def model():
    source = find_model("llama-3.2-1b")
    assert source.shape is not None
    return ShapedModel(source.name, source.shape, 1024)


def cluster(num_ranks=8, **host):
    made = make_cluster("h100-sxm", num_ranks)
    return replace(made, node=replace(made.node, host=replace(made.node.host, **host)))


@pytest.mark.parametrize(
    ("num_ranks", "pp", "by_stage", "host"),
    [
        (8, 1, {0: (5, 1)}, 8 * 5),
        (16, 2, {0: (5, 1), 1: (7, 0)}, 8 * 7),  # a stage on each node
        (16, 4, {0: (5, 1), 1: (7, 0), 2: (1, 0), 3: (9, 0)}, 4 * (5 + 7)),
        (16, 8, {0: (5, 1), 7: (1, 0)}, 2 * (5 + 5 + 5 + 5)),  # those between are as the largest
    ],
)
def test_the_node_with_the_most_counts_with_the_stages_that_it_has(num_ranks, pp, by_stage, host):
    candidate = Candidate(num_shards=num_ranks // pp, pp=pp)
    found = node_room(cluster(num_ranks), candidate, by_stage)
    assert (found.num_ranks, found.host_bytes, found.missing) == (8, host, None)
    assert found.file_bytes == {1: 8, 2: 8, 4: 4, 8: 8}[pp]


def test_a_plan_does_not_fit_where_its_host_or_its_files_do_not():
    offload = Offload("cpu", None, "nvme")
    candidate = Candidate(num_shards=8, offload=offload)
    made = plan(model(), cluster(), candidate)
    assert made.verdict == "fits" and made.room.host_bytes == 8 * made.played.host.total
    assert made.room.file_bytes == 8 * made.played.files.total > 0
    exact = cluster(memory_bytes=made.room.host_bytes, nvme_bytes=made.room.file_bytes)
    assert plan(model(), exact, candidate).verdict == "fits"
    for name, tier in (("memory_bytes", "host memory"), ("nvme_bytes", "space for files")):
        less = getattr(exact.node.host, name) - 1
        tight = replace(exact.node, host=replace(exact.node.host, **{name: less}))
        found = plan(model(), replace(exact, node=tight), candidate)
        assert found.verdict == "will not fit"
        missing = str(found.room.missing)
        assert (
            missing.startswith("the 8 ranks of a node need ") and f" of {tier}, and it" in missing
        )


def test_a_search_rejects_what_a_node_has_no_room_for_and_says_so():
    space = Space(
        Candidate(num_shards=8),
        stages=(3,),
        activation_checkpointing=("none",),
        prefetch_units=(1,),
        micro_batches=(1,),
        offloads=(Offload(optimizer="cpu"), Offload(optimizer="cpu", fraction=0.25), Offload()),
    )
    whole = search(model(), cluster(), space)
    assert not [r for r in whole.rejected if "of host memory" in r.reason]
    tight = search(model(), cluster(memory_bytes=8 * GIB), space)
    lost = {r.candidate.offload.fraction for r in tight.rejected if "host memory" in r.reason}
    assert lost == {1.0}
    assert "the 8 ranks of a node need" in tight.rejected[0].reason


def test_flags_say_what_a_node_has():
    def found(**flags):
        request = check_keys(PlanRequest, {}, flags, None, "plan")
        return set_up("llama-3.2-1b", request).cluster.node.host

    usual = found(pp=2)
    given = found(pp=2, host_memory="64GiB", disk_space="2TB")
    assert (given.memory_bytes, given.nvme_bytes) == (64 * GIB, 2 * 10**12)
    assert replace(given, memory_bytes=usual.memory_bytes, nvme_bytes=usual.nvme_bytes) == usual
    with pytest.raises(ConfigError, match="--disk-space"):
        found(disk_space="0")
