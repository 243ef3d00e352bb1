"""Spans made of what a recorder was told, lengths of intervals, and lines of offloaded state."""

from collections import Counter
from itertools import count, pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models import Checkpointed
from ranks import run_ranks
from shardwise import observe, shard
from shardwise.monitor.describe import describe
from shardwise.monitor.metrics import (
    ALL_GATHER_MS,
    EXPOSED_MS,
    IDLE_SHARE,
    OFFLOAD_EXPOSED_MS,
    OFFLOAD_MS,
    OVERLAP_SHARE,
    TRANSFER_MS,
    TRANSFERS,
    step_metrics,
)
from shardwise.monitor.record import Timeline, read_run
from shardwise.monitor.spans import (
    OUTSIDE,
    SpanRecorder,
    device_spans_of,
    length,
    length_outside,
    num_tokens,
    spans_of,
)
from shardwise.trace import MAIN, Tracer

intervals = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda t: (t[0], t[0] + t[1])), max_size=8
)


def moments(of):
    return {moment for begin, end in of for moment in range(begin, end)}


@given(intervals, intervals)
def test_lengths_count_each_moment_once(some, others):
    assert length(some) == len(moments(some))
    assert length_outside(some, others) == len(moments(some) - moments(others))


def recorder_of_seconds():
    """Return a recorder each of whose readings of the clock is a second later."""
    ticks = count()
    return SpanRecorder(clock=lambda: float(next(ticks))), ticks


names = st.tuples(st.booleans(), st.sampled_from(["forward", "backward"]), st.sampled_from("abc"))


@given(st.lists(names, max_size=20), st.integers(0, 20))
def test_the_main_line_has_no_gap_whatever_begins_and_ends(events, cut_at):
    recorder, _ = recorder_of_seconds()
    ends = []
    for number, (enters, phase, unit) in enumerate(events):
        (recorder.enter if enters else recorder.leave)(MAIN, phase, unit)
        if number == cut_at:
            ends.append(recorder.cut())
    ends.append(recorder.cut())
    left_open = {}
    for recorded in ends:
        spans = spans_of(recorded, left_open)
        assert spans[0].begin_s == 0 and spans[-1].end_s == recorded.seconds
        assert all(one.end_s == other.begin_s for one, other in pairwise(spans))
    assert not left_open  # what is open on the main line at a cut was cut short


def test_phases_are_the_innermost_and_may_end_in_another_order():
    recorder, _ = recorder_of_seconds()  # 0
    recorder.enter(MAIN, "backward", "b")  # 1
    recorder.enter(MAIN, "backward", "a")  # 2
    recorder.leave(MAIN, "backward", "b")  # 3
    recorder.enter(MAIN, "wait_reduce", "b")  # 4
    recorder.leave(MAIN, "wait_reduce", "b")  # 5
    recorder.leave(MAIN, "backward", "a")  # 6
    spans = spans_of(recorder.cut(), {})  # 7
    assert [(s.phase, s.unit, s.begin_s, s.end_s) for s in spans] == [
        (OUTSIDE, "", 0, 1),
        ("backward", "b", 1, 2),
        ("backward", "a", 2, 3),
        ("backward", "a", 3, 4),
        ("wait_reduce", "b", 4, 5),
        ("backward", "a", 5, 6),
        (OUTSIDE, "", 6, 7),
    ]


def test_collectives_of_one_line_follow_each_other_and_lines_of_threads_go_on():
    recorder, _ = recorder_of_seconds()  # 0
    first = recorder.begin("shard.all_gather", "a", 8, ())  # 1
    second = recorder.begin("shard.all_gather", "b", 8, ())  # 2
    recorder.enter("step", "step", "a")  # 3
    first()  # 4
    second()  # 5
    left_open = {}
    spans = spans_of(recorder.cut(), left_open)  # 6
    found = [(s.line, s.unit, s.begin_s, s.end_s) for s in spans if s.line != MAIN]
    assert found == [
        ("step", "a", 3, 6),
        ("shard.all_gather", "a", 1, 4),
        ("shard.all_gather", "b", 4, 5),
    ]
    recorder.leave("step", "step", "a")  # 7
    spans = spans_of(recorder.cut(), left_open)
    assert [(s.begin_s, s.end_s) for s in spans if s.line == "step"] == [(0, 1)]
    assert not left_open


def test_paused_time_does_not_pass_and_what_other_threads_end_in_it_is_over():
    recorder, ticks = recorder_of_seconds()  # 0
    recorder.enter("checkpoint", "save", "")  # 1
    gather = recorder.begin("shard.all_gather", "a", 8, ())  # 2
    recorder.enter(MAIN, "forward", "a")  # 3
    with recorder.paused():  # 4
        recorder.enter(MAIN, "forward", "b")
        recorder.begin("shard.all_gather", "b", 8, ())()
        recorder.leave("checkpoint", "save", "")
        gather()
        for _ in range(10):
            next(ticks)
    recorder.leave(MAIN, "forward", "a")
    recorded = recorder.cut()
    left_open = {}
    spans = spans_of(recorded, left_open)
    main = {(s.phase, s.unit) for s in spans if s.line == MAIN}
    assert main == {(OUTSIDE, ""), ("forward", "a")} and not left_open
    ends = {s.line: (s.begin_s, s.end_s) for s in spans if s.line != MAIN}
    assert ends == {"checkpoint": (1, 4), "shard.all_gather": (2, 4)}
    assert recorded.end_s < 8


def test_exposed_communication_is_what_nothing_is_computed_beside():
    recorder, _ = recorder_of_seconds()  # 0
    recorder.enter(MAIN, "forward", "a")  # 1
    gather = recorder.begin("shard.all_gather", "b", 8, ())  # 2
    recorder.enter(MAIN, "wait_unshard", "b")  # 3
    gather()  # 4
    recorder.leave(MAIN, "wait_unshard", "b")  # 5
    recorder.leave(MAIN, "forward", "a")  # 6
    spans = spans_of(recorder.cut(), {})  # 7
    figures = step_metrics(spans, 7.0)
    assert figures[ALL_GATHER_MS] == 2000 and figures[EXPOSED_MS] == 1000
    assert figures[OVERLAP_SHARE] == 50
    # Outside of all (0 to 1, 6 to 7) and waiting for nothing (4 to 5).
    assert abs(figures[IDLE_SHARE] - 100 * 3 / 7) < 1e-9


def test_offload_is_what_it_takes_beside_the_step_and_what_nothing_is_computed_beside():
    recorder, _ = recorder_of_seconds()  # 0
    recorder.enter("step behind", "step", "a")  # 1
    recorder.enter(MAIN, "forward", "a")  # 2
    copy = recorder.begin("to_device", "b", 8, ())  # 3
    recorder.leave("step behind", "step", "a")  # 4
    recorder.leave(MAIN, "forward", "a")  # 5
    copy()  # 6
    recorder.enter(MAIN, "step", "")  # 7
    read = recorder.begin("disk_read", "a", 8, None)  # 8
    recorder.leave(MAIN, "step", "")  # 9
    recorder.enter("save behind", "save", "")  # 10
    read()  # 11
    figures = step_metrics(spans_of(recorder.cut(), {}), 12.0)  # 12
    assert figures[OFFLOAD_MS] == 7000  # 1 to 6, 9 to 11
    assert figures[OFFLOAD_EXPOSED_MS] == 4000  # 1 to 2, 5 to 6, 9 to 11
    recorder.enter("save behind", "save", "")
    assert OFFLOAD_MS not in step_metrics(spans_of(recorder.cut(), {}), 2.0)


class DeviceOfSeconds:
    """A device's clock that ticks by itself; collectives are over at second 100."""

    def __init__(self):
        self._ticks = count()

    def now(self):
        return Moment(next(self._ticks))

    def when_over(self, works):
        assert list(works)
        return Moment(100)


class Moment(NamedTuple):
    at_s: int

    def seconds_since(self, other):
        return self.at_s - other.at_s


def test_copies_are_timed_by_their_stream_collectives_by_torch_and_files_by_the_host():
    recorder = SpanRecorder(DeviceOfSeconds())
    recorder.cut(times_device=True)  # 0
    copy = recorder.begin("to_device", "a", 8, ())  # 1
    gather = recorder.begin("shard.all_gather", "a", 8, ["work"])  # 2
    read = recorder.begin("disk_read", "a", 8, None)
    for over in (copy, gather, read):  # the copy at 3
        over()
    recorded = recorder.cut()  # 4
    on_device = device_spans_of(recorded)
    found = {s.line: (s.begin_s, s.end_s) for s in on_device}
    assert found == {"device": (0, 4), "to_device": (1, 3), "shard.all_gather": (2, 100)}
    by_host = spans_of(recorded, {}, on_device)
    assert {s.line for s in by_host} == {MAIN, "disk_read"}


def test_a_tracer_without_a_recorder_makes_nothing_and_with_one_tells_it():
    tracer = Tracer()
    assert tracer.span("reduce", "a") is tracer.span("unshard", "b")
    recorder, _ = recorder_of_seconds()
    with tracer.telling(recorder):
        with tracer.span("reduce", "a", ""):
            pass
        tracer.mark_begin("forward", "a")
        tracer.mark_end("forward", "a")
    tracer.mark_begin("forward", "unheard")
    told = [(enters, *what) for _, enters, _, *what, _ in recorder.cut().events]
    assert told == [
        (True, "reduce", "a, (root)"),
        (False, "reduce", "a, (root)"),
        (True, "forward", "a"),
        (False, "forward", "a"),
    ]


def test_tokens_are_the_elements_of_the_first_integers_of_two_dims():
    ids, mask = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 5, dtype=torch.bool)
    assert num_tokens((torch.zeros(3, 4), ids), {}) == 10
    assert num_tokens((), {"labels": torch.zeros(7, dtype=torch.int64), "input_ids": ids}) == 10
    assert num_tokens((torch.zeros(3, 4),), {}) == 0
    assert num_tokens((mask.repeat(3, 1), ids), {"attention_mask": mask}) == 10
    assert num_tokens((torch.zeros(4, 4, dtype=torch.int64),), {"input_ids": ids}) == 10


def observe_steps(rank, world_size, output):
    torch.manual_seed(0)
    model = shard(Checkpointed(), stage=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with observe(model, optimizer, output, detail_every=1):
        for _ in range(8):
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_comparison_of_ranks_is_a_wait_in_passes_2_4_8(tmp_path):
    """A rank that is late there was named as one that is waited for: the others were "outside"."""
    run_ranks(observe_steps, 2, str(tmp_path))
    waits = {
        timeline.step
        for _, timeline in read_run(tmp_path).lines(Timeline, 0)
        if any(tuple(row[:2]) == (MAIN, "exchange") for row in timeline.spans)
    }
    assert {2, 4, 8} <= waits


STEPS = 5
_IN_FILES = ("disk_read", "disk_write")


def offloaded(rank, world_size, output, offload):
    torch.manual_seed(0)
    model = shard(Checkpointed(), stage=3, offload=offload)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    with observe(model, optimizer, output, detail_every=1):
        for _ in range(STEPS):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [unit.rank_bytes for unit in describe(model).units]


@pytest.mark.parametrize(("place", "world_size"), [("cpu", 3), ("nvme", 1), ("nvme", 3)])
def test_every_copy_of_offloaded_state_is_told_with_its_bytes(place, world_size, tmp_path):
    (tmp_path / "files").mkdir()
    offload = place if place == "cpu" else f"nvme:{tmp_path / 'files'}"
    resting = run_ranks(offloaded, world_size, str(tmp_path), offload)
    record = read_run(tmp_path)
    for rank, (root, *blocks) in enumerate(resting):
        shards = root + sum(blocks)
        in_files = []
        for _, timeline in record.lines(Timeline, rank):
            lines = {}
            for row in timeline.spans:
                lines.setdefault(row[0], []).append(row)
            for rows in lines.values():
                assert all(b[3] >= a[3] + a[4] - 1e-3 for a, b in pairwise(rows))
            moved = {kind: sum(row[5] for row in lines.get(kind, ())) for kind in TRANSFERS}
            # The root and the last block stay gathered between the passes; gradients go once.
            assert moved["to_device"] == shards + sum(blocks[:-1])
            assert moved["to_host"] == shards
            both = moved["disk_read"], moved["disk_write"]
            if place == "cpu":
                assert both == (0, 0)
            elif timeline.step == 1:  # both moments are made, of elements and no padding
                assert both[0] == 0 < both[1] <= 2 * shards
            else:
                in_files += [
                    (kind, row[2], row[5]) for kind in _IN_FILES for row in lines.get(kind, ())
                ]
                _check_turns(in_files, timeline.step - 2, resting[rank])
    last = record.steps[-1].metrics
    for kind in TRANSFERS:
        if kind.startswith("to_") or place == "nvme":
            assert last[TRANSFER_MS.format(kind)].min >= 0
        else:
            assert TRANSFER_MS.format(kind) not in last


def _check_turns(in_files, num_steps, resting):
    """Check what was told of files through a step: each unit is read and written once a step.

    A step may go on in the background of the forward pass after it, and what is read and written
    is told in the step in which it ends. So of the last step some units are read, and some of
    these written.
    """
    sizes = {}
    for _, unit, num_bytes in in_files:
        sizes.setdefault(unit, set()).add(num_bytes)
    told = Counter((kind, unit) for kind, unit, _ in in_files)
    for unit in sizes:
        num_reads, num_writes = (told[kind, unit] for kind in _IN_FILES)
        assert num_reads - num_steps in (0, 1)
        assert num_reads - num_writes in (0, 1)
    if num_steps > 1:
        assert len(sizes) == len(resting)
        for (whole,) in sizes.values():  # whole blocks of the file
            assert whole >= 2 * max(resting) and whole % 4096 == 0
