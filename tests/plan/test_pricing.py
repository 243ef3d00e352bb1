"""Prices: against the arithmetic by hand, and moving the right way."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.hardware import make_cluster
from shardwise.plan.machine.pricing import Prices, RankGroup, collective_seconds, efficiencies_of
from shardwise.plan.model.tape import Cost
from shardwise.plan.sizes import read_table
from shardwise.plan.step.program import Collective, Compute, Op

H100 = make_cluster("H100", 8)
LAUNCH_S = efficiencies_of("H100")["host_launch_s"].value
EIGHT = Candidate(num_shards=8)


def op(work, stream="compute"):
    return Op(stream, work, unit=0, phase="forward", micro_batch=0)


def compute(kind, flops, moved, num_ops=1, dtype="bfloat16"):
    return op(Compute((Cost(kind, dtype, flops, moved, num_ops),)))


def test_a_large_matmul_runs_at_the_achievable_rate():
    prices = Prices(H100, EIGHT)
    rate = 794.5e12 * efficiencies_of("H100")["matmul_sustained"].value
    assert prices.matmul_flops_per_s("bfloat16") == pytest.approx(rate)
    assert prices.seconds(compute("matmul", 10**15, 10**9)) == pytest.approx(1e15 / rate, rel=1e-5)


def test_a_matmul_of_1024_cubed_on_a_b200_takes_what_was_measured():
    """5.08, 15.2 and 97.4 us, of which the first two set the ramp and the last the rate."""
    prices = Prices(make_cluster("B200", 1), Candidate())
    for side, measured in ((1024, 5.08e-6), (2048, 15.2e-6), (4096, 97.4e-6)):
        one = compute("matmul", 2 * side**3, 3 * 2 * side**2)
        assert prices.seconds(one) == pytest.approx(measured, rel=0.12)


def test_attention_computes_its_scores_once_more_in_backward_and_nothing_else_does():
    prices = Prices(H100, EIGHT)
    ramp = efficiencies_of("")["kernel_ramp_s"].value
    for kind, times in (("attention", 1.25), ("matmul", 1.0), ("memory", 1.0)):
        forward = compute(kind, 10**15, 10**9)
        backward = replace(forward, phase="backward")
        work_s = prices.seconds(forward) - ramp
        assert prices.seconds(backward) - ramp == pytest.approx(times * work_s)


def test_many_small_operations_take_the_hosts_time():
    prices = Prices(H100, EIGHT)
    assert prices.seconds(compute("memory", 0, 1000, num_ops=1000)) == pytest.approx(
        1000 * LAUNCH_S
    )
    cpu = Prices(make_cluster("cpu", 2), Candidate(num_shards=2, precision="fp32"))
    one = compute("memory", 0, 10**9, num_ops=100, dtype="float32")
    assert cpu.seconds(one) == pytest.approx(1e9 / (10e9 * 0.84) + 100 * (3e-6 + 5e-6))


def test_an_axis_of_one_rank_costs_nothing():
    prices = Prices(make_cluster("H100", 1), Candidate())
    assert prices.seconds(op(Collective("all_gather", "shard", 1 << 30, 0, 5), "shard")) == 0
    for kind in ("tensor_parallel", "context_ring"):  # but for the host's call
        assert prices.seconds(compute(kind, 0, 1 << 20)) == LAUNCH_S


def test_tensor_parallelism_costs_more_across_nodes_than_inside():
    sent = 1 << 30
    took = []
    for per_node in (8, 4):
        cluster = make_cluster("H100", 8, gpus_per_node=per_node)
        prices = Prices(cluster, Candidate(tp=8))
        took.append(prices.seconds(compute("tensor_parallel", 0, sent, num_ops=4)))
    inside = 4 * collective_seconds(
        "all_reduce", sent / 4 * 8 / 14, RankGroup(8, 8, 1), make_cluster("H100", 8).node
    )
    assert took[0] == pytest.approx(inside)
    assert took[1] > took[0]


def test_adam_on_the_host_takes_its_bytes_over_the_ranks_share_of_dram():
    """30 bytes for each of 1.54e9 parameters take 113 ms at 2 x 204.8 GB/s."""
    two = make_cluster("A100", 2, host="dgx-a100")
    prices = Prices(two, Candidate(num_shards=2))
    work = Compute((Cost("memory", "float32", 0, int(30 * 1.54e9 / 2), 1),))
    share = prices.efficiencies["host_memory"].value
    assert share * prices.seconds(op(work, "cpu")) == pytest.approx(0.113, abs=0.001)


def test_fitted_entries_of_the_table_can_be_left_out():
    prices = [Prices(H100, EIGHT, is_fitted=fits).efficiencies for fits in (True, False)]
    fitted = {name for name in prices[0] if prices[0][name] != prices[1][name]}
    assert fitted == {*read_table("efficiencies")["fitted"]["H100"]}


def test_every_assumption_is_told_with_its_source():
    told = Prices(H100, EIGHT).assumptions()
    parts = [re.fullmatch(r"([\w ]+): ([^\s,]+).*, .+ \(.+\)", line) for line in told]
    assert all(part and float(part[2]) > 0 for part in parts)
    names = {part[1] for part in parts if part}
    assert names >= {*efficiencies_of("H100"), "peak", "memory", "link", "disk read"}


@given(
    st.sampled_from(["matmul", "attention", "memory"]),
    st.integers(1, 10**15),
    st.integers(1, 10**12),
    st.integers(1, 10**4),
    st.sampled_from(["H100", "A100", "V100", "RTX4090", "cpu"]),
)
def test_more_work_is_never_faster(kind, flops, moved, num_ops, gpu):
    prices = Prices(make_cluster(gpu, 1), Candidate())
    took = prices.seconds(compute(kind, flops, moved, num_ops))
    assert took > 0
    assert prices.seconds(compute(kind, 2 * flops, moved, num_ops)) >= took
    assert prices.seconds(compute(kind, flops, 2 * moved, num_ops)) >= took
    assert prices.seconds(compute(kind, flops, moved, 2 * num_ops)) >= took
