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
    Visit,
    Work,
)
from shardwise.plan.sizes import DTYPE_BYTES
from shardwise.plan.step.play import play
from shardwise.plan.step.program import Collective, Compute, Recorder, Transfer

BLOCK = [(5, 6), (5,), (6, 5)]
MODEL = [[(), (6,)], [(7, 6)], BLOCK, BLOCK, BLOCK, [(9, 6)]]
EVEN = [[(24,)], [(48, 24)], [(24, 24), (24,)], [(24, 24), (24,)], [(48, 24)]]
SMALL = Candidate(precision="fp32", optimizer="sgd_momentum", num_shards=3)


def make_unit(name, shapes, reads=True):
    params = tuple(TapeParam(f"{name}.{i}", s, "float32") for i, s in enumerate(shapes))
    return TapeUnit(name, params, reads)


def make_work(unit, phase, activations=0, grads=0):
    net = LiveBytes(activations=activations, grads=grads)
    peak = LiveBytes(activations=max(activations, 0), temporary=100, grads=grads)
    cost = Cost("matmul", "float32", 1000, 100, 1)
    return Work(unit, phase, (cost,), peak, net)


def make_tape(model, dtype="float32", recomputes=False):
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
        if recomputes and i > 1:
            events += [Visit("before_forward", i, True), make_work(i, "recompute", 50)]
            events += [Visit("after_forward", i, True), make_work(i, "backward", -50)]
        events += [make_work(i, "backward", -1000, grads[i])]
        events += [Visit("after_backward", i), make_work(0, "backward")]
    events += [Visit("after_backward", 0), make_work(0, "backward")]
    return Tape(units, tuple(events), dtype, 64, 32)


def owned(shapes, layout, num_ranks):
    """Return how many elements of a unit rank 0 owns, padding left out."""
    if layout == "flat":
        total = sum(map(prod, shapes))
        return min(-(-total // num_ranks), total)
    return sum(-(-(s[0] if s else 1) // num_ranks) * prod(s[1:]) for s in shapes)


def counts_of(units):
    """Return the bytes that tell a rank who had which gradient."""
    return sum(len(u) for u in units) * 4


@pytest.mark.parametrize("transport", ["coalesced", "point_to_point"])
@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_the_rank_with_most_matrices_sends_them_whole_and_gets_their_gradients(
    transport, num_ranks
):
    candidate = replace(
        SMALL, stage=1, layout="matrices", num_shards=num_ranks, transport=transport
    )
    sent = play(make_tape(MODEL), candidate, clips=False).program.sent_bytes
    loads = [0] * num_ranks
    for numel in sorted((prod(s) for u in MODEL for s in u if len(s) == 2), reverse=True):
        loads[loads.index(min(loads))] += numel
    spread = [sum(prod(s) for s in u if len(s) != 2) for u in MODEL]
    shares = [-(-numel // num_ranks) for numel in spread]
    assert sent["shard.all_gather"] == (max(loads) + sum(shares)) * (num_ranks - 1) * 4
    reduced = sum(loads) - max(loads) + counts_of(MODEL) // 4 * (num_ranks - 1)
    if transport == "coalesced":
        reduced += sum(shares) * (num_ranks - 1)
    else:
        reduced += sum(spread) - sum(shares)
    assert sent["shard.reduce_scatter"] == reduced * 4


def test_padded_shares_are_sent_where_collectives_are_even():
    played = play(make_tape(MODEL), replace(SMALL, stage=1), clips=False)
    shares = sum(owned(u, "rows", 3) for u in MODEL)
    assert played.program.sent_bytes["shard.all_gather"] == shares * 2 * 4
    reduced = shares * 2 * 4 + counts_of(MODEL) * 2
    assert played.program.sent_bytes["shard.reduce_scatter"] == reduced


def test_only_clipping_sends_a_norm():
    with_clip, without = (play(make_tape(EVEN), SMALL, clips=c) for c in (True, False))
    assert with_clip.program.sent_bytes["shard.scalars"] == 8 * 2
    assert "shard.scalars" not in without.program.sent_bytes


# Memory.


HOMES = [
    Offload(),
    Offload(optimizer="cpu"),
    Offload(optimizer="cpu", fraction=0.5),
    Offload(params="cpu", optimizer="cpu"),
    Offload(params="nvme", grads="nvme", optimizer="cpu"),
    Offload(params="cpu", optimizer="nvme"),
    Offload(optimizer="cpu", step_on="device"),
    Offload(params="cpu", optimizer="cpu", fraction=0.5, step_on="device"),
    Offload(optimizer="nvme", step_on="device"),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16", "zero_paper"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_rests_is_what_the_accounting_says(stage, precision):
    played = play(make_tape(EVEN), replace(SMALL, stage=stage, precision=precision))
    count = sum(prod(s) for u in EVEN for s in u)
    sums = account(count, 3, stage, precision, "sgd_momentum")
    assert played.resting.total - played.resting.buffers == sums.between_steps
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
    held = played.resting.total - played.resting.buffers, on_host, played.files.total
    assert held == (device * count, host * count, files * count)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_offloaded_parameters_of_one_rank_are_not_on_the_device_either(precision):
    offload = Offload(params="cpu", optimizer="cpu")
    candidate = replace(SMALL, num_shards=1, precision=precision, offload=offload)
    played = play(make_tape(EVEN), candidate)
    assert played.resting.param_shards == played.resting.param_full == 0
    fetched = [
        (number, op)
        for number, op in enumerate(played.program.ops)
        if isinstance(op.work, Transfer) and op.phase == "offload" and op.work.link == "to_device"
    ]
    assert len(fetched) >= len(EVEN)
    waited = {after for op in played.program.ops for after in op.after}
    assert {number for number, op in fetched} <= waited
    assert max(m.ledger.param_full for m in played.peaks) > 0


def without_grads(tape, index):
    """Return the tape of a model that trains a unit which no backward pass reaches."""
    unit = tape.units[index]
    params = tuple(replace(p, gets_grad=False) for p in unit.params)
    units = [replace(u, params=params) if u is unit else u for u in tape.units]
    events = [e for e in tape.events if e.unit != index]
    return replace(tape, units=tuple(units), events=tuple(events))


@pytest.mark.parametrize("offload", HOMES)
def test_a_unit_that_never_runs_has_no_state_anywhere(offload):
    candidate = replace(SMALL, optimizer="adamw", offload=offload)
    whole, less = make_tape(EVEN), without_grads(make_tape(EVEN), 2)
    played, full = play(less, candidate), play(whole, candidate)
    sent = [p.program.sent_bytes["shard.reduce_scatter"] for p in (played, full)]
    assert sent[0] < sent[1]
    without = replace(
        less, units=tuple(replace(u, params=()) if u is less.units[2] else u for u in less.units)
    )
    rest = play(without, candidate).resting
    assert played.resting.optimizer_state == rest.optimizer_state
    assert played.resting.grad_shards == rest.grad_shards


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
    resting = played.resting
    transient = ("grad_full", "gather_staging", "reduce_staging", "activations", "temporary")
    assert all(getattr(resting, line) == 0 for line in (*transient, "logits", "inputs"))
    for moment in played.peaks:
        assert min(vars(moment.ledger).values()) >= 0
        assert resting.total <= moment.ledger.total <= played.peak.ledger.total


def most_full(model, candidate):
    """Play a step; return the most bytes of full parameters at any moment, and the step."""
    most, touch = [0], Recorder.touch

    def look(recorder, more):
        most.append(recorder.ledger().param_full + more.get("param_full", 0))
        touch(recorder, more)

    with mock.patch.object(Recorder, "touch", look):
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


def test_the_largest_unit_is_gathered_ahead_unless_asked():
    sizes = [4 * u.numel for u in make_tape(EVEN).units]
    asked, default = (
        play(make_tape(EVEN), replace(SMALL, prefetch_bytes=b)).program.ops
        for b in (max(sizes[1:]), None)
    )
    assert asked == default


def test_temporaries_of_the_optimizer_are_none_two_tensors_or_all_of_a_moment():
    adam = replace(SMALL, optimizer="adamw")
    fused, loop, foreach = (
        max(
            m.ledger.optimizer_temporary
            for m in play(make_tape(EVEN), replace(adam, optimizer_kernel=k)).peaks
        )
        for k in ("fused", "loop", "foreach")
    )
    numel = sum(prod(s) for u in EVEN for s in u) // 3
    assert (fused, loop, foreach) == (0, 2 * 16 * 24 * 4, numel * 4)


# Order.


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


def test_a_unit_computes_after_its_gather_which_follows_what_was_issued_before():
    ops = play(make_tape(EVEN), replace(SMALL, prefetch_bytes=0)).program.ops
    gathers = [
        i
        for i, op in enumerate(ops)
        if isinstance(op.work, Collective) and op.work.kind == "all_gather"
    ]
    for number in gathers:
        computed = [i for i in range(number) if ops[i].stream == "compute"]
        assert not computed or computed[-1] in ops[number].after
        following = next(op for op in ops[number:] if op.stream == "compute")
        assert following.unit == ops[number].unit
        assert number in following.after


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
