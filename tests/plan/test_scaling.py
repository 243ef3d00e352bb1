"""The scaling table against numbers worked out by hand."""

from shardwise.plan.timing.scaling import ScalingRow, scaling_rows


def test_efficiency_is_throughput_per_rank_beside_the_smallest():
    rows = scaling_rows([ScalingRow(32, 2.5, 32_000, 0.5, 7), ScalingRow(8, 2.0, 8_000)])
    assert rows == (
        ScalingRow(8, 2.0, 8_000, efficiency=1.0),
        ScalingRow(32, 2.5, 32_000, 0.5, 7, efficiency=0.8),
    )
    assert [(row.tokens_per_s, row.exposed) for row in rows] == [(4000.0, 0.0), (12800.0, 0.2)]
