"""A played step of tapes made by hand: traffic, memory and order, against formulas written here."""

from dataclasses import replace
from math import prod
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.homes import Offload
from shardwise.plan.accounting import account
from shardwise.plan.candidate import Candidate
from shardwise.plan.model.tape import (
    Cost,
    LiveBytes,
    Tape,
    TapeParam,
    TapeUnit,
    UnitWork,
    Visit,
)
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Collective, Compute, StepRecorder

EVEN = [[(24,)], [(48, 24)], [(24, 24), (24,)], [(24, 24), (24,)], [(48, 24)]]
SMALL = Candidate(precision="fp32", optimizer="sgd_momentum", num_shards=3)


def make_unit(name, shapes, reads=True):
    params = tuple(TapeParam(f"{name}.{i}", s, "float32") for i, s in enumerate(shapes))
    return TapeUnit(name, params, reads)


def make_work(unit, phase, activations=0, grads=0):
    net = LiveBytes(activations=activations, grad_full=grads)
    peak = LiveBytes(activations=max(activations, 0), temporary=100, grad_full=grads)
    cost = Cost("matmul", "float32", 1000, 100, 1)
    return UnitWork(unit, phase, (cost,), peak, net)


def make_tape(model, dtype="float32"):
    """Unit 0 is the root, unit 1 an embedding; the others follow one another."""
    units = tuple(make_unit(f"u{i}" if i else "", s, reads=i != 1) for i, s in enumerate(model))
    grads = [u.numel * DTYPE_BYTES[dtype] for u in units]
    last = len(units)
    events = [Visit("before_forward", 0), make_work(0, "forward")]
    for i in range(1, last):
        events += [Visit("before_forward", i), make_work(i, "forward", 1000)]
        events += [Visit("after_forward", i), make_work(0, "forward")]
    events += [Visit("after_forward", 0), make_work(0, "loss", 500)]
    events += [Visit("before_backward", 0), make_work(0, "backward", -500, grads[0])]
    for i in reversed(range(1, last)):
        events.append(Visit("before_backward", i))
        events += [make_work(i, "backward", -1000, grads[i])]
        events += [Visit("after_backward", i), make_work(0, "backward")]
    events += [Visit("after_backward", 0), make_work(0, "backward")]
    return Tape(units, tuple(events), dtype, 64, 32)


# -- memory
@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16", "zero_paper"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_rests_is_what_the_accounting_says(stage, precision):
    played = play(make_tape(EVEN), replace(SMALL, stage=stage, precision=precision))
    count = sum(prod(s) for u in EVEN for s in u)
    sums = account(count, 3, stage, precision, "sgd_momentum")
    assert played.device.total - played.device.buffers == sums.between_steps
    assert played.host.total == played.files.total == 0


@pytest.mark.parametrize(
    ("params", "state", "device", "host", "files"),
    [("device", "cpu", 2, 10, 0), ("cpu", "cpu", 0, 12, 0), ("nvme", "nvme", 0, 2, 10)],
)
def test_state_of_the_papers_rests_where_they_have_it(params, state, device, host, files):
    """ZeRO-Offload and ZeRO-Infinity, bytes per parameter of a slice; momentum has 4 of them."""
    offload = Offload(params=params, grads="cpu", optimizer=state)
    candidate = replace(SMALL, precision="zero_paper", offload=offload, optimizer="sgd_momentum")
    played = play(make_tape(EVEN), candidate)
    count = sum(prod(s) for u in EVEN for s in u) // 3
    on_host = played.host.total - played.host.disk_buffers
    held = played.device.total - played.device.buffers, on_host, played.files.total
    assert held == (device * count, host * count, files * count)


def test_padding_is_what_rows_leave_empty_on_average():
    model = [[], [(7, 6)], [(9, 5), (2, 3)]]
    for ranks in (1, 2, 3, 4):
        candidate = replace(SMALL, num_shards=ranks)
        real = sum(prod(s) for u in model for s in u)
        shares = sum(-(-s[0] // ranks) * prod(s[1:]) for u in model for s in u)
        padding = play(make_tape(model), candidate).padding_bytes
        assert shares * 4 - real * 4 / ranks <= padding < shares * 4 - real * 4 / ranks + 4 * 3
    assert play(make_tape(EVEN), replace(SMALL, stage=0)).padding_bytes == 0


shapes = st.lists(
    st.lists(st.integers(1, 40), min_size=0, max_size=2).map(tuple), min_size=1, max_size=4
)
models = st.lists(shapes, min_size=2, max_size=5)
candidates = st.builds(
    Candidate,
    num_shards=st.integers(1, 5),
    num_replicas=st.integers(1, 2),
    precision=st.sampled_from(["fp32", "bf16"]),
    layout=st.sampled_from(["rows", "flat"]),
    accumulation=st.integers(1, 3),
    bucket_bytes=st.sampled_from([0, 500, 1 << 20]),
    reduces_in_flight=st.integers(0, 3),
    transport=st.sampled_from(["coalesced", "point_to_point"]),
)


def play_model(model, candidate):
    dtype = "float32" if candidate.precision == "fp32" else "bfloat16"
    return play(make_tape(model, dtype), candidate)


@given(models, candidates, st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=60)
def test_a_step_ends_as_the_next_begins_and_no_line_is_negative(model, candidate, stage):
    played = play_model(model, replace(candidate, stage=stage))
    resting = played.device
    transient = ("grad_full", "gather_staging", "reduce_staging", "activations", "temporary")
    assert all(getattr(resting, line) == 0 for line in (*transient, "logits", "inputs"))
    for moment in played.peaks:
        assert min(vars(moment.ledger).values()) >= 0
        assert resting.total <= moment.ledger.total <= played.peak.ledger.total


def most_full(model, candidate):
    """Play a step; return the most bytes of full parameters at any moment, and the step."""
    most, record_temporary = [0], StepRecorder.record_temporary

    def look(recorder, more):
        most.append(recorder.ledger().param_full + more.get("param_full", 0))
        record_temporary(recorder, more)

    with mock.patch.object(StepRecorder, "record_temporary", look):
        played = play_model(model, candidate)
    return max(most), played


@given(models, candidates, st.lists(st.integers(0, 5000), min_size=2, max_size=4).map(sorted))
@settings(max_examples=40)
def test_more_prefetching_holds_no_less_and_never_more_than_its_budget(model, candidate, budgets):
    held, sent = [], []
    for budget in budgets:
        full, played = most_full(model, replace(candidate, prefetch_bytes=budget))
        held.append(full)
        sent.append(played.program.sent_bytes)
        assert full <= most_full(model, replace(candidate, prefetch_bytes=0))[0] + budget
    assert held == sorted(held)
    assert all(s == sent[0] for s in sent)


# -- order
@given(models, candidates, st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=40)
def test_operations_wait_for_earlier_ones_and_the_optimizer_comes_last(model, candidate, stage):
    ops = play_model(model, replace(candidate, stage=stage)).program.ops
    assert all(earlier < number for number, op in enumerate(ops) for earlier in op.after)
    phases = [op.phase for op in ops]
    assert phases[-1] == "optimizer"
    assert phases.count("optimizer") == 1
    reached = set()
    work = [len(ops) - 1]
    last = {}
    before = []
    for number, op in enumerate(ops):  # an operation also follows the last one of its stream
        before.append({*op.after, *([last[op.stream]] if op.stream in last else [])})
        last[op.stream] = number
    while work:
        number = work.pop()
        if number not in reached:
            reached.add(number)
            work += before[number]
    assert reached == set(range(len(ops)))


@pytest.mark.parametrize("in_flight", [0, 1, 2])
def test_compute_waits_for_the_oldest_reduction_when_too_many_are_in_flight(in_flight):
    candidate = replace(SMALL, bucket_bytes=0, reduces_in_flight=in_flight)
    ops = play(make_tape(EVEN), candidate).program.ops
    flying = []
    most = 0
    for number, op in enumerate(ops):
        flying = [i for i in flying if i not in op.after]
        if isinstance(op.work, Collective) and op.work.kind == "reduce_scatter":
            flying.append(number)
        if isinstance(op.work, Compute) and op.phase == "backward":
            most = max(most, len(flying))
    assert most == in_flight
