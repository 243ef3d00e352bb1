"""Observed runs: figures of every step over all ranks, in files, for any sharded model."""

import gc
import math
import resource
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from faults import Normed, NormedIn16Bits
from models import Checkpointed, Stack
from ranks import RankError, on_ranks, run_ranks
from shardwise import Checkpoints, Precision, accumulate, fully_shard, observe, shard
from shardwise.checkpoint.save_load import Loaded
from shardwise.debug import stats
from shardwise.errors import ConfigError, ShardwiseError
from shardwise.monitor.metrics import (
    DATA_S,
    EXPOSED_SHARE,
    LOST_SHARE,
    MAX_ACTIVE_GIB,
    MAX_ACTIVE_SHARE,
    NUM_COLLECTIVES,
    OVERLAP_SHARE,
    PADDING_SHARE,
    SENT_MIB,
    SKIPPED_STEPS,
    STEP_S,
    OverSteps,
)
from shardwise.monitor.record import End, Restart, Timeline, read_run
from trainer import logged, sharded_by_block

STEPS = 13


def train(model, optimizer, run, rank, steps=STEPS):
    random = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=random) for _ in range(steps)]
    for x in run.data(batches):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss=loss.item(), step=run.step)


def observed(rank, world_size, output, way):
    torch.manual_seed(0)
    made = Checkpointed()
    model = sharded_by_block(made) if way == "fully_shard" else shard(made, stage=int(way))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = stats(model)
    with observe(model, optimizer, output, detail_every=6) as run:
        train(model, optimizer, run, rank)
    after = stats(model)
    assert run.step == STEPS
    sent = sum(after.sent_bytes.values()) - sum(before.sent_bytes.values())
    return {"sent": sent, "last": run.latest.step if run.latest else 0}


@pytest.fixture(scope="module", params=[("0", 3), ("3", 1), ("3", 3), ("fully_shard", 3)], ids=str)
def ran(request, tmp_path_factory):
    """Return a way to shard, its ranks, the record of its run, and what the ranks returned."""
    (way, world_size), folder = request.param, tmp_path_factory.mktemp("run")
    told = run_ranks(observed, world_size, str(folder), way)
    return way, world_size, read_run(folder), told


def test_figures_of_all_steps_and_ranks_are_kept(ran):
    way, world_size, record, told = ran
    assert record.facts.num_ranks == world_size == len(record.facts.hosts)
    assert [unit.name for unit in record.facts.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
    steps = [line.step for line in record.steps]
    assert steps == [*range(1, 11), STEPS] and record.steps[-1].num_steps == 3
    for line in record.steps:
        assert line.metrics[STEP_S].min > 0
        for share in (EXPOSED_SHARE, OVERLAP_SHARE):
            assert 0 <= line.metrics[share].min <= line.metrics[share].max <= 100
        assert line.metrics[DATA_S].max < line.metrics[STEP_S].max
        assert 0 <= line.metrics[STEP_S].min_rank < world_size
    sums = [line.num_steps * line.metrics[SENT_MIB].max for line in record.steps]
    if way == "fully_shard" or world_size == 1:  # where each rank sends as much as any
        assert sum(sums) * 2**20 == pytest.approx(max(each["sent"] for each in told))
    else:
        assert sum(sums) * 2**20 >= max(each["sent"] for each in told) * (1 - 1e-9)
        assert sum(sums) * 2**20 <= sum(each["sent"] for each in told)
    units = record.facts.units
    padding = 100 * sum(unit.padding_bytes for unit in units) / sum(u.full_bytes for u in units)
    for line in record.steps:
        assert line.metrics[SKIPPED_STEPS].max == 0
        assert line.metrics[PADDING_SHARE].min == line.metrics[PADDING_SHARE].max == padding
        assert 0.01 < line.metrics[MAX_ACTIVE_GIB].min < 1000
        assert 0 < line.metrics[MAX_ACTIVE_SHARE].max < 100
    assert (record.steps[0].metrics[NUM_COLLECTIVES].min > 0) is (world_size > 1)
    for line in record.steps:  # what was logged after a step is the step's
        assert line.values["step"] == line.step and math.isfinite(line.values["loss"])
        first = line.step - line.num_steps + 1
        every = OverSteps(first, (first + line.step) / 2, line.step, first, line.step)
        assert line.values_over_steps["step"] == every  # each step, not the last of the line
        took = line.metrics_over_steps[STEP_S]
        assert took.min <= took.mean <= took.max
        assert line.metrics[STEP_S].min <= took.mean <= line.metrics[STEP_S].max
    assert {each["last"] for each in told} == {STEPS}
    assert set(record.by_rank) == set(range(world_size))


def test_timelines_have_no_gaps_and_no_overlaps(ran):
    way, world_size, record, _ = ran
    timelines = [*record.lines(Timeline)]
    assert {(rank, line.step) for rank, line in timelines} == {
        (rank, step) for rank in range(world_size) for step in (2, 6, 12)
    }
    for _, timeline in timelines:
        by_line = {}
        for row in timeline.spans:
            by_line.setdefault(row[0], []).append(row)
        for rows in by_line.values():
            for one, other in pairwise(rows):
                assert one[4] >= 0 and other[3] >= one[3] + one[4] - 1e-3
        main = by_line["main"]
        assert sum(row[4] for row in main) >= 0.97 * 1e3 * timeline.seconds
        phases = {row[1] for row in main}
        assert {"forward", "backward", "recompute", "step", "data"} <= phases
        if way == "3":
            assert ("shard.all_gather" in by_line) is (world_size > 1)


@on_ranks(3)
def test_a_step_is_told_as_skipped_where_gradients_went_without_it(tmp_path):
    model = shard(Stack(), stage=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    with observe(model, optimizer, tmp_path) as run:
        for way in ("window", "plain", "pause", "overflow", "last"):
            for number in range(3 if way in ("window", "plain") else 1):
                with accumulate(model, last=number == 2 or way != "window"):
                    model(x).square().mean().backward()
            if way == "pause":
                with run.paused():
                    model(x).square().mean().backward()
            if way == "overflow":  # as a scaler does: gradients go, and no step is taken
                optimizer.zero_grad()
                model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    told = [line.metrics[SKIPPED_STEPS] for line in read_run(tmp_path).steps]
    assert [(each.min, each.max) for each in told] == [(0, 0), (0, 0), (0, 0), (1, 1), (0, 0)]


def lose_updates(rank, world_size, output, way):
    """Step parameters in 16 bits; return the share of this rank's updates that each step lost."""
    torch.manual_seed(0)
    model = (Normed if way == "masters" else NormedIn16Bits)()
    if way == "fully_shard":
        fully_shard(model)
    else:
        precision = "bf16" if way == "masters" else Precision(torch.bfloat16)
        offload = {"cpu": "cpu", "files": f"nvme:{output}"}.get(way)
        model = shard(model, stage=2, precision=precision, offload=offload)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-4)
    shares = []
    with observe(model, optimizer, output, every=1) as run:
        for _ in range(5):
            model(torch.randn(4, 8)).square().mean().backward()
            if way == "files":  # slices are not in memory between steps
                optimizer.step()
                continue
            before = [p.to_local().clone() for p in params]
            wanted = [p.grad.to_local() != 0 for p in params]
            optimizer.step()
            lost = [(p.to_local() == b) & w for p, b, w in zip(params, before, wanted, strict=True)]
            count = sum(int(each.sum()) for each in wanted)
            shares.append(100 * sum(int(each.sum()) for each in lost) / count)
            optimizer.zero_grad()
    assert run.latest is not None and (LOST_SHARE in run.latest.metrics) == (way != "masters")
    return shares


@pytest.mark.parametrize(
    ("world_size", "way"), [(1, "files"), (1, "masters"), (2, "cpu"), (3, "fully_shard")]
)
def test_updates_that_round_away_are_counted_where_there_are_no_masters(world_size, way, tmp_path):
    told = run_ranks(lose_updates, world_size, str(tmp_path), way)
    lines = read_run(tmp_path).steps
    if way in ("masters", "files"):
        return
    assert LOST_SHARE not in lines[0].metrics
    for number, line in enumerate(lines[1:]):  # a step is compared as the next one begins
        shares = [each[number] for each in told]
        found = line.metrics[LOST_SHARE]
        assert (found.min, found.max) == (min(shares), max(shares)) and found.min > 0


class LostTracker:
    """A tracker whose server goes away."""

    def __init__(self):
        self.calls = []

    def write(self, line):
        self.calls.append("write")
        raise OSError("no route to the tracker")

    def close(self):
        self.calls.append("close")


def write_too_much(rank, world_size, output):
    """Train while nothing can be written; return what was logged, and the calls of a tracker."""
    model, sink = shard(Stack(), stage=3), LostTracker()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with (
            logged() as heard,
            observe(model, optimizer, output, sinks=[] if output else [sink]) as run,
        ):
            if rank == 0 and output:
                resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
            train(model, optimizer, run, rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.step == STEPS and run.latest is not None and run.latest.step == STEPS
    return heard, sink.calls


def test_outputs_that_fail_are_told_of_once_closed_and_end_no_training(tmp_path):
    (first, _), *others = run_ranks(write_too_much, 3, str(tmp_path))
    assert len(first) == 1
    assert "rank 0: observe() could not write" in first[0] and "too large" in first[0]
    assert others == [([], [])] * 2
    (first, calls), (other, unused) = run_ranks(write_too_much, 2, None)
    assert len(first) == 1 and "no route to the tracker" in first[0]
    assert calls == ["write", "close"] and not other and not unused


@on_ranks(1)
def test_a_run_that_raises_keeps_what_each_rank_saw_of_steps_whose_line_was_not_due(rank, tmp_path):
    model = shard(Checkpointed(), stage=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        pytest.raises(ZeroDivisionError),
        observe(model, optimizer, tmp_path, detail_every=STEPS) as run,
    ):
        train(model, optimizer, run, rank)
        while run.latest is None or run.latest.step < 10:  # the thread writes it when it comes to
            time.sleep(0.01)
        run.log(loss=1 / 0)
    record = read_run(tmp_path)
    assert record.steps[-1].step == 10
    (*_, (_, last)) = record.lines(Timeline)
    assert last.step == STEPS
    assert [line.error for _, line in record.lines(End)] == ["ZeroDivisionError"]


def goes_on(rank, world_size, output, steps, breaks_at=None):
    """Take steps from the last copy on; rank 1 breaks in one. Return what was logged."""
    model = shard(Stack(), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with logged() as heard, Checkpoints(f"{output}/checkpoints", model, optimizer) as kept:
        loaded = kept.load()
        first = loaded.step + 1 if loaded else 1
        with observe(model, optimizer, output, every=1, resumed=loaded) as run:
            for step in range(first, steps + 1):
                if step == breaks_at and rank == 1:
                    raise ZeroDivisionError("on purpose")
                train(model, optimizer, run, rank, steps=1)
                if step % 2 == 0:
                    kept.save(step)
    return heard


def test_a_run_that_goes_on_says_who_ended_the_one_before_and_what_the_restart_cost(tmp_path):
    with pytest.raises(RankError, match="on purpose"):
        run_ranks(goes_on, 2, str(tmp_path), 9, breaks_at=6, fresh=True)
    (first, second), others = run_ranks(goes_on, 2, str(tmp_path), 7)
    assert first.startswith("the run before: rank 1") and "ZeroDivisionError" in first
    assert first.endswith("1 of its steps are taken again") and not others
    ((_, restart),) = read_run(tmp_path).lines(Restart)
    assert (restart.step, restart.lost_steps, restart.from_memory) == (4, 1, False)
    assert list(restart.parts_s) == ["detect", "abort", "rendezvous", "start", "first step"]
    assert min(restart.parts_s.values()) >= 0 and all(part in second for part in restart.parts_s)


def test_a_load_and_the_number_of_a_step_cannot_both_say_where_a_run_goes_on(tmp_path):
    loaded = Loaded(tmp_path, 4, "", {}, 0, 1)
    for given, first in ((loaded, 5), (replace(loaded, step=None), 1)):
        with pytest.raises(ConfigError, match="resumed="):
            observe(None, None, resumed=given, first_step=first)


@on_ranks(3)
def test_a_run_that_is_over_keeps_no_model_alive_and_ends_in_any_order(rank):
    for breaks in (False, True):
        model = shard(Stack(), stage=3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run, other = observe(model, optimizer), observe(model, optimizer)
        run.start()
        with pytest.raises(ConfigError, match="observed already"):
            observe(model, optimizer)
        with suppress(ZeroDivisionError), other:
            train(model, optimizer, other, rank)
            run.close()  # the older one ends first
            if breaks:
                raise ZeroDivisionError
        with observe(model, optimizer) as last:  # nobody listens any more
            train(model, optimizer, last, rank)
        assert last.latest is not None and last.latest.metrics["time_metrics/forward(s)"].min > 0
        alive = [weakref.ref(each) for each in (model, optimizer)]
        del model, optimizer
        gc.collect()
        assert [each() for each in alive] == [None, None]
        assert run.step == other.step == last.step == STEPS
        closure = dist.all_reduce.__closure__
        assert any(cell.cell_contents is dist.all_reduce.__wrapped__ for cell in closure)


@on_ranks(3)
def test_an_output_that_one_rank_cannot_write_is_refused_on_all(rank, tmp_path):
    (tmp_path / "file").write_text("")
    model = shard(Stack(), stage=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ShardwiseError, match=r"rank 1.*file"):
        observe(model, optimizer, tmp_path / ("file" if rank == 1 else "run"))
