"""The simulator against times worked out by hand, and against a plain event simulation."""

import heapq
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.plan.step.program import Collective, Compute, Op, Program, Transfer
from shardwise.plan.timing.scenario import (
    Checkpoints,
    Failures,
    Scenario,
    SlowLink,
    Straggler,
)
from shardwise.plan.timing.simulate import Simulated, grid_of, run_step, simulate

COMPUTE = Compute(())
GATHER = Collective("all_gather", "shard", 8, 4)
REDUCE = Collective("all_reduce", "replicate", 8, 4)
COPY = Transfer("to_device", 8)
WORK = {"compute": COMPUTE, "shard": GATHER, "replicate": REDUCE, "to_device": COPY, "cpu": COMPUTE}


def op(stream: str, unit: int = 0, phase: str = "forward", after: tuple[int, ...] = ()) -> Op:
    return Op(stream, WORK[stream], unit, phase, 0, after)  # type: ignore[arg-type]


def timed(ops: Sequence[Op], seconds: Sequence[float], **kwargs: Any) -> Simulated:
    """Simulate ops whose times are given one by one."""
    program = Program(("", "a", "b"), tuple(ops))
    queue = iter(seconds)
    return simulate(program, lambda _: next(queue), **kwargs)


@st.composite
def programs(draw: st.DrawFn, streams: tuple[str, ...] = tuple(WORK)) -> list[Op]:
    ops: list[Op] = []
    for index in range(draw(st.integers(1, 14))):
        after = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        ops.append(op(draw(st.sampled_from(streams)), after=tuple(sorted(after))))
    return ops


@st.composite
def programs_with_times(draw: st.DrawFn) -> tuple[list[Op], list[float]]:
    ops = draw(programs())
    times = draw(st.lists(st.integers(0, 9), min_size=len(ops), max_size=len(ops)))
    return ops, [float(t) for t in times]


SHAPES = ((1, 1), (1, 3), (3, 1), (2, 3))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    replicas, shards = draw(st.sampled_from(SHAPES))
    ranks = st.integers(0, replicas * shards - 1)
    factors = st.sampled_from((1.0, 1.5, 2.0, 4.0))
    links = st.one_of(
        st.builds(SlowLink, factors, ranks),
        st.builds(SlowLink, factors, st.none(), st.just("shard"), st.integers(0, replicas - 1)),
        st.builds(SlowLink, factors, st.none(), st.just("replicate"), st.integers(0, shards - 1)),
    )
    return Scenario(
        num_shards=shards,
        num_replicas=replicas,
        num_steps=draw(st.integers(1, 3)),
        stragglers=tuple(draw(st.lists(st.builds(Straggler, factors, ranks), max_size=3))),
        slow_links=tuple(draw(st.lists(links, max_size=2))),
    )


def event_simulation(
    ops: Sequence[Op], took: Callable[[int, int, int], float], replicas: int, shards: int
) -> dict[tuple[int, int, int], tuple[float, float]]:
    """Play every rank by itself, event by event: (op, replica, shard) -> begin and end."""
    ranks = [(r, s) for r in range(replicas) for s in range(shards)]
    queues: dict[Any, list[int]] = defaultdict(list)
    for index, one in enumerate(ops):
        for rank in ranks:
            queues[rank, one.stream].append(index)
    times: dict[tuple[int, int, int], tuple[float, float]] = {}
    arrived: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    busy: set[Any] = set()
    heap: list[tuple[float, float, int, tuple[int, int]]] = []

    def begin(now: float, index: int, members: list[tuple[int, int]]) -> None:
        for rank in members:
            heapq.heappush(heap, (now + took(index, *rank), now, index, rank))

    def dispatch(now: float, rank: tuple[int, int]) -> None:
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


def test_gathers_run_ahead_of_the_compute_that_needs_them() -> None:
    ops = [
        op("shard", 1, "unshard"),  # 0 to 2
        op("compute", 1, "forward", (0,)),  # 2 to 5
        op("shard", 2, "unshard"),  # 2 to 6: hidden until 5
        op("compute", 2, "forward", (2,)),  # 6 to 7
        op("to_device", 2, "offload", (3,)),  # 7 to 7.5
    ]
    made = timed(ops, [2, 3, 4, 1, 0.5])
    assert made.step_s == 7.5
    assert [s.start_s for s in made.slowest.spans] == [0, 2, 2, 6, 7]
    assert made.slowest.communication_s == 6
    assert made.slowest.exposed_s == 3
    assert made.slowest.overlap == 0.5
    assert made.slowest.bubble_s == 3.5
    assert made.slowest.exposed_offload_s == 0.5
    assert made.slowest.busy_s == {"shard": 6, "compute": 4, "to_device": 0.5}
    assert made.slowest.phase_s == {"unshard": 6, "forward": 4, "offload": 0.5}
    assert [
        (u.name, u.compute_s, u.communication_s, u.waited_s) for u in made.slowest.unit_times
    ] == [
        ("", 0, 0, 0),
        ("a", 3, 2, 2),
        ("b", 1, 4, 1),
    ]
    assert [c.op for c in made.critical_path] == [0, 2, 3, 4]
    assert made.critical_s == {"all_gather": 6, "compute": 1, "to_device": 0.5}


def test_two_collectives_at_once_are_exposed_once() -> None:
    made = timed([op("shard"), op("replicate"), op("compute", after=(0, 1))], [2, 3, 1])
    assert made.slowest.exposed_s == made.slowest.communication_s == 3
    assert made.step_s == 4


def test_a_program_without_operations_takes_no_time() -> None:
    made = timed([], [])
    assert (made.step_s, made.slowest.exposed_s, made.slowest.overlap, made.critical_path) == (
        0,
        0,
        1,
        (),
    )


def test_a_straggler_makes_all_ranks_wait_and_is_on_the_critical_path() -> None:
    ops = [op("compute"), op("shard", after=(0,)), op("compute", after=(1,))]
    scenario = Scenario(num_shards=4, stragglers=(Straggler(2.0, rank=2),))
    made = timed(ops, [3, 1, 1], scenario=scenario, ranks=[0])
    assert made.step_s == 6 + 1 + 2
    assert made.slowest.rank == 2
    quick = made.ranks[1]
    assert (quick.rank, quick.step_s, quick.skew_s, quick.exposed_s) == (0, 8, 3, 4)
    assert [(c.op, c.rank) for c in made.critical_path] == [(0, 2), (1, 2), (2, 2)]
    assert made.rank_s.minimum_s == 8
    assert made.rank_s.mean_s == 8.25


def test_a_slow_link_slows_the_group_of_its_rank_alone() -> None:
    scenario = Scenario(num_shards=2, num_replicas=3, slow_links=(SlowLink(5.0, rank=3),))
    made = timed([op("shard")], [1], scenario=scenario, ranks=range(6))
    assert {run.rank: run.step_s for run in made.ranks} == {0: 1, 1: 1, 2: 5, 3: 5, 4: 1, 5: 1}
    made = timed([op("replicate")], [1], scenario=scenario, ranks=range(6))
    assert {run.rank: run.step_s for run in made.ranks} == {0: 1, 1: 5, 2: 1, 3: 5, 4: 1, 5: 5}


def test_the_critical_path_goes_from_rank_to_rank() -> None:
    """Rank 1 is late for the gather, the slow replicate group of rank 0 decides the end."""
    scenario = Scenario(
        num_shards=2,
        num_replicas=2,
        stragglers=(Straggler(4.0, rank=1),),
        slow_links=(SlowLink(3.0, axis="replicate", group=0),),
    )
    ops = [op("compute"), op("shard", after=(0,)), op("replicate", after=(1,))]
    made = timed(ops, [1, 1, 1], scenario=scenario)
    assert made.step_s == 4 + 1 + 3
    assert [(c.op, c.rank) for c in made.critical_path] == [(0, 1), (1, 1), (2, 0)]


@settings(max_examples=150, deadline=None)
@given(programs(), st.sampled_from(SHAPES), st.integers(0, 2**32))
def test_arrays_of_ranks_equal_an_event_simulation_of_each(
    ops: list[Op], shape: tuple[int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    drawn: list[np.ndarray] = []

    def noise(shape: tuple[int, ...]) -> np.ndarray:
        drawn.append(rng.integers(0, 9, shape).astype(float))
        return drawn[-1]

    grid = grid_of(Scenario(num_shards=shape[1], num_replicas=shape[0], jitter_sigma=0.1))
    made = run_step(ops, [1.0] * len(ops), grid, np.zeros(shape), noise)
    expected = event_simulation(
        ops, lambda i, r, s: float(np.broadcast_to(drawn[i], shape)[r, s]), *shape
    )
    spans = {(span.op, *place): span for place in np.ndindex(shape) for span in made.spans(place)}
    assert {place: (span.start_s, span.end_s) for place, span in spans.items()} == expected
    assert all(span.ready_s <= span.start_s for span in spans.values())
    for r, s in np.ndindex(shape):
        assert np.broadcast_to(made.end, shape)[r, s] == max(
            expected[i, r, s][1] for i in range(len(ops))
        )


@settings(max_examples=100, deadline=None)
@given(programs_with_times(), scenarios())
def test_the_critical_path_accounts_for_the_whole_step(
    made: tuple[list[Op], list[float]], scenario: Scenario
) -> None:
    one = timed(*made, scenario=replace(scenario, num_steps=1))
    path = one.critical_path
    assert sum(one.critical_s.values()) == pytest.approx(one.step_s)
    assert all(a.end_s == b.start_s for a, b in pairwise(path))
    assert not path or (path[0].start_s, path[-1].end_s) == (0, one.step_s)


@settings(max_examples=100, deadline=None)
@given(programs_with_times(), scenarios())
def test_the_parts_of_a_step_add_up(made: tuple[list[Op], list[float]], scenario: Scenario) -> None:
    for run in timed(*made, scenario=scenario).ranks:
        assert 0 <= run.overlap <= 1
        parts = run.exposed_s + run.exposed_offload_s
        assert parts == pytest.approx(run.bubble_s)  # in these programs something always runs
        assert run.communication_s <= run.step_s + 1e-9
        assert sum(run.phase_s.values()) == pytest.approx(sum(run.busy_s.values()))


@settings(max_examples=100, deadline=None)
@given(programs_with_times(), scenarios(), st.data())
def test_a_longer_operation_never_makes_the_step_shorter(
    made: tuple[list[Op], list[float]], scenario: Scenario, data: st.DataObject
) -> None:
    ops, times = made
    longer = list(times)
    longer[data.draw(st.integers(0, len(ops) - 1))] *= 2
    one = replace(scenario, num_steps=1)
    assert timed(ops, longer, scenario=one).step_s >= timed(ops, times, scenario=one).step_s


def test_without_jitter_all_steps_are_equal() -> None:
    ops = [op("compute"), op("shard", after=(0,))]
    made = timed(ops, [1, 2], scenario=Scenario(num_shards=8, num_steps=5))
    assert made.steps_s == (3,) * 5
    assert made.step_spread.minimum_s == made.step_spread.maximum_s == made.step_s == 3


def test_jitter_is_one_on_average_and_repeats_with_its_seed() -> None:
    scenario = Scenario(num_shards=5000, jitter_sigma=0.2, seed=3)
    made = timed([op("compute")], [1], scenario=scenario)
    assert made.rank_s.mean_s == pytest.approx(1, abs=0.02)
    assert made.rank_s.p95_s == pytest.approx(1.35, abs=0.05)
    assert timed([op("compute")], [1], scenario=scenario) == made
    assert timed([op("compute")], [1], scenario=replace(scenario, seed=4)) != made


def test_jitter_makes_a_synchronous_step_longer_and_its_steps_differ() -> None:
    ops = [op("compute"), op("shard", after=(0,)), op("compute", after=(1,))]
    scenario = Scenario(num_shards=32, jitter_sigma=0.1, num_steps=4)
    made = timed(ops, [1, 0.1, 1], scenario=scenario)
    assert len(set(made.steps_s)) == 4
    assert made.step_s > 2.1
    assert made.step_spread.minimum_s <= made.step_s <= made.step_spread.maximum_s
    assert sum(made.critical_s.values()) <= made.slowest.end_s


def test_ranks_that_never_meet_catch_up_between_steps() -> None:
    """The step is what the last rank adds, so over many steps noise averages out."""
    scenario = Scenario(num_shards=16, jitter_sigma=0.3, num_steps=50)
    alone = timed([op("compute")], [1], scenario=scenario)
    met = timed([op("compute"), op("shard", after=(0,))], [1, 0], scenario=scenario)
    assert alone.step_s < met.step_s


def test_of_many_ranks_one_time_is_kept_per_operation_and_of_a_collective_one_per_group() -> None:
    ops: list[Op] = []
    for index in range(100):
        ops.append(op("shard", after=(index * 2 - 1,) if index else ()))
        ops.append(op("compute", after=(index * 2,)))
    scenario = Scenario(num_shards=64, num_replicas=64, jitter_sigma=0.1)
    tracemalloc.start()
    made = timed(ops, [1.0] * len(ops), scenario=scenario)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(ops) / 2 * scenario.num_ranks * 8 * 1.25
    assert [len(run.spans) for run in made.ranks] == [200] * 3


def test_sixteen_thousand_ranks_and_more_are_simulated() -> None:
    ops = [op("compute"), op("shard", after=(0,)), op("replicate", after=(1,))]
    scenario = Scenario(num_shards=128, num_replicas=256, jitter_sigma=0.05)
    made = timed(ops, [1, 1, 1], scenario=scenario)
    assert 3 < made.step_s < 4
    assert timed(ops, [1, 1, 1], scenario=replace(scenario, jitter_sigma=0.0)).step_s == 3


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
def test_what_shares_cores_slows_each_other_down(
    streams: tuple[str, str], overlap: float, expected: float
) -> None:
    ops = [op(streams[0]), op(streams[1])]
    assert timed(ops, [2, 4], overlap=overlap).step_s == pytest.approx(expected)


@settings(max_examples=100, deadline=None)
@given(programs(("compute", "shard")), st.data())
def test_with_no_overlap_nothing_is_hidden(ops: list[Op], data: st.DataObject) -> None:
    count = len(ops)
    times = data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    assert timed(ops, times, overlap=0.0).step_s == pytest.approx(sum(times))
    half, full = timed(ops, times, overlap=0.5).step_s, timed(ops, times).step_s
    assert full - 1e-9 <= half <= sum(times) + 1e-9


BAD_SCENARIOS = [
    ({"num_shards": 0}, "num_shards=0"),
    ({"num_replicas": -2}, "num_replicas=-2"),
    ({"num_steps": 1.5}, "num_steps=1.5"),
    ({"stragglers": (Straggler(0.5, rank=0),)}, r"stragglers\[0\].slowdown=0.5"),
    ({"stragglers": (Straggler(2.0, rank=0), Straggler(2.0))}, r"stragglers\[1\].*either rank="),
    ({"stragglers": (Straggler(2.0, rank=8),)}, r"stragglers\[0\].rank=8: .* 0 to 7"),
    ({"stragglers": (Straggler(2.0, fraction=1.5),)}, r"stragglers\[0\].fraction=1.5"),
    ({"slow_links": (SlowLink(2.0),)}, r"slow_links\[0\]: expected either"),
    ({"slow_links": (SlowLink(2.0, axis="shard"),)}, r"slow_links\[0\]: expected either"),
    ({"slow_links": (SlowLink(2.0, axis="shards", group=0),)}, "did you mean 'shard'"),
    ({"slow_links": (SlowLink(2.0, axis="shard", group=2),)}, r"group=2: .* 0 to 1"),
    ({"jitter_sigma": float("nan")}, "jitter_sigma=nan"),
    ({"failures": Failures(0)}, "failures.mtbf_hours=0"),
    ({"checkpoints": Checkpoints(60, stall_s=5, cost_s=2)}, "cost_s=2.*stall_s=5"),
    ({"checkpoints": Checkpoints(60, cost_s=90)}, "interval_s=60.*save less often"),
    ({"seed": -1}, "seed=-1"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_SCENARIOS)
def test_a_scenario_that_cannot_be_is_refused_by_its_field(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Scenario(**{"num_shards": 4, "num_replicas": 2, **fields})


def test_times_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"operation 1 \(forward, all_gather\)"):
        timed([op("compute"), op("shard")], [1, float("nan")])
    with pytest.raises(ConfigError, match="overlap=2"):
        timed([], [], overlap=2)
    with pytest.raises(ConfigError, match="ranks: got 4"):
        timed([], [], ranks=[4])
