"""The simulator against times worked out by hand, and against a plain event simulation."""

import heapq
from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Compute, LinkTransfer, Op, Program
from shardwise.plan.timing.simulate import simulate

COMPUTE = Compute(())
GATHER = Collective("all_gather", "shard", 8, 4)
REDUCE = Collective("all_reduce", "replicate", 8, 4)
COPY = LinkTransfer("to_device", 8)
WORK = {"compute": COMPUTE, "shard": GATHER, "replicate": REDUCE, "to_device": COPY, "cpu": COMPUTE}


def op(stream, unit=0, phase="forward", after=()):
    return Op(stream, WORK[stream], unit, phase, 0, after)


def timed(ops, seconds, **kwargs):
    """Simulate ops whose times are given one by one."""
    program = Program(("", "a", "b"), tuple(ops))
    queue = iter(seconds)
    return simulate(program, lambda _: next(queue), **kwargs)


@st.composite
def programs(draw, streams=tuple(WORK)):
    ops = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        ops.append(op(draw(st.sampled_from(streams)), after=tuple(sorted(after))))
    return ops


@st.composite
def programs_with_times(draw):
    ops = draw(programs())
    times = draw(st.lists(st.integers(0, 9), min_size=len(ops), max_size=len(ops)))
    return ops, [float(t) for t in times]


def event_simulation(ops, took, replicas, shards):
    """Play every rank by itself, event by event: (op, replica, shard) -> begin and end."""
    ranks = [(r, s) for r in range(replicas) for s in range(shards)]
    queues = defaultdict(list)
    for index, one in enumerate(ops):
        for rank in ranks:
            queues[rank, one.stream].append(index)
    times = {}
    arrived = defaultdict(list)
    busy = set()
    heap = []

    def begin(now, index, members):
        for rank in members:
            heapq.heappush(heap, (now + took(index, *rank), now, index, rank))

    def dispatch(now, rank):
        for stream in WORK:
            queue = queues[rank, stream]
            if (rank, stream) in busy or not queue:
                continue
            index = queue[0]
            if any((j, *rank) not in times for j in ops[index].after):
                continue
            queue.pop(0)
            busy.add((rank, stream))
            work = ops[index].work
            if not isinstance(work, Collective):
                begin(now, index, [rank])
                continue
            place = rank[0] if work.axis == "shard" else rank[1]
            arrived[index, place].append(rank)
            if len(arrived[index, place]) == (shards if work.axis == "shard" else replicas):
                begin(now, index, arrived[index, place])

    for rank in ranks:
        dispatch(0.0, rank)
    while heap:
        now, began, index, rank = heapq.heappop(heap)
        times[(index, *rank)] = (began, now)
        busy.remove((rank, ops[index].stream))
        dispatch(now, rank)
    assert len(times) == len(ops) * len(ranks)
    return times


def test_gathers_run_ahead_of_the_compute_that_needs_them():
    ops = [
        op("shard", 1, "unshard"),  # 0 to 2
        op("compute", 1, "forward", (0,)),  # 2 to 5
        op("shard", 2, "unshard"),  # 2 to 6: hidden until 5
        op("compute", 2, "forward", (2,)),  # 6 to 7
        op("to_device", 2, "offload", (3,)),  # 7 to 7.5
    ]
    made = timed(ops, [2, 3, 4, 1, 0.5])
    assert made.step_s == 7.5
    assert [s.start_s for s in made.spans] == [0, 2, 2, 6, 7]
    assert made.communication_s == 6
    assert made.exposed_s == 3
    assert made.overlap == 0.5
    assert made.bubble_s == 3.5
    assert made.exposed_offload_s == 0.5
    assert made.busy_s == {"shard": 6, "compute": 4, "to_device": 0.5}
    assert made.phase_s == {"unshard": 6, "forward": 4, "offload": 0.5}
    # Computing, communicating, and compute's stand before it.
    assert [(*unit.values(),) for unit in made.unit_seconds] == [(0, 0, 0), (3, 2, 2), (1, 4, 1)]
    assert [*made.critical_path] == [0, 2, 3, 4]
    assert made.critical_s == {"all_gather": 6, "compute": 1, "to_device": 0.5}


def test_two_collectives_at_once_are_exposed_once():
    made = timed([op("shard"), op("replicate"), op("compute", after=(0, 1))], [2, 3, 1])
    assert made.exposed_s == made.communication_s == 3
    assert made.step_s == 4


def test_a_program_without_operations_takes_no_time():
    made = timed([], [])
    assert (made.step_s, made.exposed_s, made.overlap, made.critical_path) == (0, 0, 1, ())


@settings(max_examples=150, deadline=None)
@given(
    programs_with_times(),
    st.sampled_from(((1, 1), (1, 3), (3, 1), (2, 3))),
    st.sampled_from((1.0, 1.5, 4.0)),
    st.sampled_from((1.0, 2.0)),
    st.data(),
)
def test_one_slow_rank_makes_the_step_as_long_as_if_all_were_slow(made, shape, device, link, data):
    """Its device and the links of its groups are slow; every rank is played by itself."""
    ops, times = made
    slow = tuple(data.draw(st.integers(0, n - 1)) for n in shape)

    def took(index, replica, shard):
        work, factor = ops[index].work, 1.0
        if isinstance(work, Compute) and (replica, shard) == slow:
            factor = device
        if isinstance(work, Collective):
            is_slow = replica == slow[0] if work.axis == "shard" else shard == slow[1]
            factor = link if is_slow else 1.0
        return times[index] * factor

    expected = event_simulation(ops, took, *shape)
    factors = {Compute: device, Collective: link}
    slowed = [s * factors.get(type(op.work), 1.0) for op, s in zip(ops, times, strict=True)]
    one = timed(ops, slowed)
    assert one.step_s == max(end for _, end in expected.values())
    assert [(span.start_s, span.end_s) for span in one.spans] == [
        expected[index, *slow] for index in range(len(ops))
    ]


@settings(max_examples=100, deadline=None)
@given(programs_with_times())
def test_the_critical_path_accounts_for_the_whole_step(made):
    one = timed(*made)
    path = [one.spans[index] for index in one.critical_path]
    assert sum(one.critical_s.values()) == pytest.approx(one.step_s)
    assert all(a.end_s == b.start_s for a, b in pairwise(path))
    assert not path or (path[0].start_s, path[-1].end_s) == (0, one.step_s)


@settings(max_examples=100, deadline=None)
@given(programs_with_times())
def test_the_parts_of_a_step_add_up(made):
    one = timed(*made)
    assert 0 <= one.overlap <= 1
    parts = one.exposed_s + one.exposed_offload_s
    assert parts == pytest.approx(one.bubble_s)  # in these programs something always runs
    assert one.communication_s <= one.step_s + 1e-9
    assert sum(one.phase_s.values()) == pytest.approx(sum(one.busy_s.values()))


@settings(max_examples=100, deadline=None)
@given(programs_with_times(), st.data())
def test_a_longer_operation_never_makes_the_step_shorter(made, data):
    ops, times = made
    longer = list(times)
    longer[data.draw(st.integers(0, len(ops) - 1))] *= 2
    assert timed(ops, longer).step_s >= timed(ops, times).step_s


@pytest.mark.parametrize(
    ("streams", "overlap", "expected"),
    [
        (("compute", "shard"), 1.0, 4),
        (("compute", "shard"), 0.5, 5),  # both run for 3 s at 2/3 of their rate
        (("compute", "shard"), 0.0, 6),
        (("cpu", "replicate"), 0.0, 6),
        (("compute", "to_device"), 0.0, 4),  # copies share no cores
        (("shard", "replicate"), 0.0, 4),
    ],
)
def test_what_shares_cores_slows_each_other_down(streams, overlap, expected):
    ops = [op(streams[0]), op(streams[1])]
    assert timed(ops, [2, 4], overlap=overlap).step_s == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(programs(("compute", "shard")), st.data())
def test_with_no_overlap_nothing_is_hidden(ops, data):
    count = len(ops)
    times = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    assert timed(ops, times, overlap=0.0).step_s == pytest.approx(sum(times))
    half, full = timed(ops, times, overlap=0.5).step_s, timed(ops, times).step_s
    assert full - 1e-9 <= half <= sum(times) + 1e-9


def test_times_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"operation 1 \(forward, all_gather\)"):
        timed([op("compute"), op("shard")], [1, float("nan")])
    with pytest.raises(ConfigError, match="overlap=2"):
        timed([], [], overlap=2)
