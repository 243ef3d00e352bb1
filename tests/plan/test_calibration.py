"""Calibration files: what is written is read back, bad files are told, curves and prices behave."""

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from programs import run_program
from shardwise.errors import ConfigError
from shardwise.plan.candidate import Candidate
from shardwise.plan.machine.calibration import (
    VERSION,
    CalibratedPrices,
    Calibration,
    MeasuredHost,
    cluster_of,
    read_calibration,
    write_calibration,
)
from shardwise.plan.machine.pricing import SecondsCurve
from shardwise.plan.model.tape import Cost
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Collective, Compute, LinkTransfer, Op
from shardwise.plan.timing.simulate import simulate
from test_play import EVEN, make_tape

RATE = 1e9
NAMES = (
    *("matmul.forward.float32", "matmul.backward.float32", "attention.forward.float32"),
    *("attention.backward.float32", "memory.forward.float32", "memory.backward.float32"),
    *("optimizer.adamw", "clip", "copy", "cast.bfloat16", "sum", "disk_write", "disk_read"),
    *("all_gather.2", "reduce_scatter.2"),
)


def straight(unit, seconds=1e-6):
    """One operation takes ``seconds`` at least, and from there on its size over RATE."""
    return SecondsCurve(unit, (seconds * RATE, 1e9 * seconds * RATE), (seconds, 1e9 * seconds))


def a_calibration(**changes):
    curves = {
        name: straight("flops" if name.startswith(("matmul", "attention")) else "bytes")
        for name in NAMES
    }
    found = Calibration(
        host=MeasuredHost("processor", 2, 8 << 30, "cpu", 8 << 30, "2.13.0", "0.1.0"),
        measured_at="2026-01-01T00:00:00+00:00",
        backend="gloo",
        num_ranks=2,
        threads_per_rank=1,
        overlap=0.25,
        message_s=1e-4,
        unit_forward_s=1e-3,
        unit_backward_s=2e-3,
        checkpoint_s=4e-3,
        process_bytes=250 << 20,
        context_bytes=0,
        curves=curves,
    )
    return replace(found, **changes)


A_CANDIDATE = Candidate(stage=3, num_shards=2, precision="fp32", transport="point_to_point")


def prices(calibration=None, **changes):
    return CalibratedPrices(calibration or a_calibration(), replace(A_CANDIDATE, **changes))


def memory_op(num_bytes, num_ops, phase="forward", unit=0):
    cost = Cost("memory", "float32", 0, num_bytes, num_ops)
    return Op("compute", Compute((cost,)), unit, phase, 0)


# -- curves
sizes = st.floats(1.0, 1e12)
measured = st.lists(
    st.tuples(st.floats(1.0, 1e12), st.floats(1e-9, 1e3)),
    min_size=1,
    max_size=8,
    unique_by=lambda p: p[0],
)


@given(measured, sizes, sizes)
def test_a_larger_operation_never_takes_less(points, one, other):
    curve = SecondsCurve.through("bytes", points)
    smaller, larger = sorted((one, other))
    assert curve.at(smaller) <= curve.at(larger) * (1 + 1e-12)


@given(measured)
def test_a_curve_passes_through_what_was_measured_but_for_noise_that_made_it_fall(points):
    curve = SecondsCurve.through("bytes", points)
    for size, _ in points:
        later = min(seconds for s, seconds in points if s >= size)
        assert curve.at(size) == pytest.approx(later)


@given(measured, st.floats(1.0, 1e3))
def test_beyond_its_ends_a_curve_is_constant_and_then_of_constant_rate(points, factor):
    curve = SecondsCurve.through("bytes", points)
    assert curve.at(curve.sizes[0] / factor) == curve.seconds[0]
    assert curve.at(curve.sizes[-1] * factor) == pytest.approx(curve.seconds[-1] * factor)


def test_between_two_sizes_a_curve_is_straight_in_logarithms():
    curve = SecondsCurve("bytes", (1e3, 1e5), (1.0, 16.0))
    assert curve.at(1e4) == pytest.approx(4.0)


# -- files
def test_what_is_written_is_read_back(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(a_calibration(), path)
    found = read_calibration(path)
    assert found == a_calibration()
    assert found.where == str(path)


def test_every_number_in_a_file_has_its_unit_in_its_key(tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(a_calibration(), path)
    values = json.loads(path.read_text())
    for key, value in {**values, **values["host"]}.items():
        if isinstance(value, int | float) and key not in ("version", "overlap"):
            assert key.startswith(("num_", "threads_")) or key.endswith(("_s", "_bytes")), key
    for curve in values["curves"].values():
        assert set(curve) in ({"size_bytes", "seconds"}, {"size_flops", "seconds"})


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        (("format",), "other", "expected a calibration"),
        (("version",), VERSION + 1, "measure again with this one"),
        (("version",), 1, "measure again with this one"),
        (("num_ranks",), 0, "num_ranks: expected greater than 0, got 0"),
        (("overlap",), 1.1, "overlap: expected less than or equal to 1, got 1.1"),
        (("message_s",), None, "message_s: expected a valid number, got nothing"),
        (("host", "num_cores"), -1, "host.num_cores: expected greater than or equal to 0, got -1"),
        (("curves", "sum"), {"size_bytes": [1]}, "curves.sum.seconds: expected a valid array"),
        (("curves", "sum"), {}, "curves.sum: expected size_bytes or size_flops"),
        (("curves", "sum", "seconds"), [1.0], "curves.sum: expected as many seconds as sizes, 2"),
        (("curves", "sum", "seconds"), [2.0, 1.0], "expected seconds that do not fall"),
        (("curves", "sum", "seconds"), [0, 1.0], "curves.sum.seconds.0: expected greater than 0"),
        (("curves", "sum", "size_bytes"), [2.0, 1.0], "curves.sum: expected sizes that grow"),
        (("curves", "sum", "size_bytes"), [], "curves.sum.sizes: "),
    ],
)
def test_a_bad_file_is_refused_by_name_and_key(tmp_path, key, value, part):
    path = tmp_path / "calibration.json"
    write_calibration(a_calibration(), path)
    values = json.loads(path.read_text())
    inside = values
    for name in key[:-1]:
        inside = inside[name]
    inside[key[-1]] = value
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError) as caught:
        read_calibration(path)
    assert str(path) in str(caught.value)
    assert part in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_what_is_no_calibration_is_refused(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"calibration\.json"):
        read_calibration(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "missing.json")


# -- prices
@given(st.integers(1, 1 << 40), st.integers(1, 1 << 20))
def test_a_class_takes_its_operations_times_the_curve_at_their_mean_size(num_bytes, num_ops):
    expected = num_ops * straight("bytes").at(num_bytes / num_ops)
    assert prices().seconds(memory_op(num_bytes, num_ops)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        ("forward", "memory.forward.float32"),
        ("loss", "memory.forward.float32"),
        ("recompute", "memory.forward.float32"),
        ("backward", "memory.backward.float32"),
        ("optimizer", "optimizer.adamw"),
        ("clip", "clip"),
        ("unshard", "copy"),
        ("reduce", "sum"),
    ],
)
def test_each_phase_is_priced_by_its_own_curve(phase, name):
    slow = {**a_calibration().curves, name: straight("bytes", 1.0)}
    op = memory_op(1 << 20, 1, phase)
    assert prices(a_calibration(curves=slow)).seconds(op) == 1.0
    assert prices().seconds(op) < 0.1


@pytest.mark.parametrize(
    ("phase", "seconds"),
    [("forward", 1e-3), ("backward", 2e-3), ("recompute", 5e-3), ("loss", 0.0), ("reduce", 0.0)],
)
def test_a_pass_of_a_unit_adds_what_the_host_spends_on_it(phase, seconds):
    of_root, of_unit = (prices().seconds(memory_op(1 << 20, 1, phase, unit)) for unit in (0, 1))
    assert of_unit - of_root == pytest.approx(seconds)


def test_a_dtype_that_was_not_measured_is_priced_as_float32():
    cost = Cost("memory", "int8", 0, 1 << 20, 1)
    op = Op("compute", Compute((cost,)), 0, "forward", 0)
    assert prices().seconds(op) == prices().seconds(memory_op(1 << 20, 1))


def test_each_message_beyond_one_per_peer_costs_its_share():
    one, five = (
        Op("shard", Collective("all_gather", "shard", 1 << 20, 1 << 19, n), 0, "unshard", 0)
        for n in (1, 5)
    )
    assert prices().seconds(five) - prices().seconds(one) == pytest.approx(4 * 1e-4)


def test_an_all_reduce_takes_both_of_its_halves():
    def op(kind, num_messages):
        return Op("shard", Collective(kind, "shard", 1 << 20, 1 << 19, num_messages), 0, "clip", 0)

    halves = prices().seconds(op("all_gather", 1)) + prices().seconds(op("reduce_scatter", 1))
    assert prices().seconds(op("all_reduce", 2)) == pytest.approx(halves)


def test_what_was_not_measured_is_told_with_the_nearest_name():
    op = Op("disk", LinkTransfer("to_host", 1), 0, "offload", 0)
    with pytest.raises(ConfigError, match=r"'to_host' was not measured.*bench --calibrate"):
        prices().seconds(op)


def test_the_measured_machine_is_a_cluster_whose_ranks_share_its_memory():
    cluster = cluster_of(a_calibration())
    assert cluster.num_ranks == 2
    assert cluster.node.accelerator.memory_bytes == (4 << 30) - (250 << 20)
    assert cluster.node.accelerator.flops_per_s("float32") == pytest.approx(RATE)


# -- the whole way
def test_a_quick_calibration_of_two_ranks_prices_a_step(tmp_path):
    path = tmp_path / "calibration.json"
    arguments = ("bench", "--calibrate", "--quick", "--ranks", 2, "--output", path)
    done = run_program("shardwise", *arguments, launches=True)
    assert done.returncode == 0, done.stderr
    assert "all_gather.2" in done.stdout
    found = read_calibration(path)
    assert (found.num_ranks, found.backend, found.host.device) == (2, "gloo", "cpu")
    assert set(NAMES) <= set(found.curves)
    assert found.process_bytes > 50 << 20
    for stage in range(4):
        candidate = replace(A_CANDIDATE, stage=stage)
        pricer = CalibratedPrices(found, candidate)
        played = play(make_tape(EVEN), candidate)
        simulated = simulate(played.program, pricer.seconds, overlap=pricer.overlap)
        assert 0 < simulated.step_s < math.inf
    assert cluster_of(found).num_ranks == 2
