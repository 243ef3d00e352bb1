"""Every schedule of torch, at stages 0 to 3: the steps of one process, and what it sends for them.

The failures that others had are tests here by what they hold: gathers at the wrong time
(pytorch#164756), accumulation over schedules (pytorch#196641). A race with the last reductions
(pytorch#144535) is looked for in test_stream_order.py, a scale of micro-batches in
engine/test_pipelines.py.
"""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

import shardwise
from pipelines import (
    BY,
    BY_AUTOGRAD_GRAD,
    LENGTH,
    NUM_BLOCKS,
    ROWS,
    SINGLE,
    THERE,
    WIDTH,
    WORDS,
    Net,
    Pipeline,
    batch_of,
    by_torch,
    collectives_of,
    full,
    loss_of,
    micro_batches_of,
    pipeline_of,
    whole_batch,
)
from ranks import on_ranks, run_ranks
from roundings import apart, assert_rounded_alike, of_gradient
from shardwise.engine.api import engine_of
from shardwise.errors import StateError
from shardwise.unit.states import GradState, ParamState

STEPS = 3
LR = 0.5
KINDS = ("shard.all_gather", "shard.reduce_scatter")


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    schedule: str
    by: str = "shard"
    stage: int = 3
    precision: str = "fp32"
    micro_batches: int = 3


def every_case():
    """Return the whole matrix; `fully_shard` knows no stage but 3."""
    return [
        Case(schedule, by, stage, precision, num)
        for schedule in THERE
        for by in BY
        for stage in ((0, 1, 2, 3) if by == "shard" else (3,))
        for precision in ("fp32", "bf16")
        for num in (1, 3)
    ]


def some_cases():
    """Return two cells of each schedule: stage 3 one way or the other, and another stage."""
    precisions, numbers = ("fp32", "bf16"), (1, 3)
    found = []
    for number, schedule in enumerate(THERE):
        here = number // 2 % 2
        by = ("shard", "fully_shard")[number % 2]
        found.append(Case(schedule, by, 3, precisions[here], numbers[number % 2]))
        other = precisions[1 - here], numbers[1 - number % 2]
        found.append(Case(schedule, "shard", number % 3, *other))
    return found


class OneProcess:
    """The whole batch in one process; in bf16, in the micro-batches of the pipeline."""

    def __init__(self, case):
        self.is_low = case.precision == "bf16"
        self.num = micro_batches_of(case.schedule, case.micro_batches)
        self.whole = Net()
        self.start = copy.deepcopy(self.whole)
        self.optimizer = torch.optim.SGD(self.whole.parameters(), lr=LR)
        sums = self.num if case.schedule in BY_AUTOGRAD_GRAD else 1  # in the parameter's dtype
        in_low = STEPS * (1 + sums)
        in_full = STEPS * of_gradient(*(8, 11) * NUM_BLOCKS, 8, over=2 * ROWS)
        self.roundings = in_low if self.is_low else in_full

    def step(self, number, num_ranks):
        if self.is_low:
            parts = [
                part
                for rank in range(num_ranks)
                for part in zip(*(t.chunk(self.num) for t in batch_of(number, rank)), strict=True)
            ]
            low = copy.deepcopy(self.whole).bfloat16()
            for x, y in parts:
                low.zero_grad()
                loss_of(low(x), y).backward()
                for mine, theirs in zip(self.whole.parameters(), low.parameters(), strict=True):
                    grad = theirs.grad.float() / len(parts)
                    mine.grad = grad if mine.grad is None else mine.grad + grad
        else:
            x, y = whole_batch(number, num_ranks)
            loss_of(self.whole(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, pipeline):
        """Compare what the steps have changed, which is far more than roundings."""
        start = dict(self.start.named_parameters())
        expected = dict(self.whole.named_parameters())
        for name, param in pipeline.named().items():
            wanted = (expected[name] - start[name]).detach()
            found = (full(param) - start[name]).detach()
            size = expected[name].abs().max().item()
            assert wanted.abs().max() > size / 300, f"{name}: the steps have changed nothing"
            if self.is_low:
                limit = apart(self.roundings, torch.bfloat16) * wanted.abs().max().item()
                assert (found - wanted).abs().max() <= limit, name
            else:
                assert_rounded_alike(found, wanted, self.roundings, name, scale=size)


def num_units(parts):
    """Count the units that have parameters; a root has the embedding, or the head, or nothing."""
    own = sum((part.embed is not None) + (part.head is not None) > 0 for part in parts)
    return sum(len(part.blocks) for part in parts) + own


def counts_of(parts):
    return [collectives_of(parts, kind) for kind in KINDS]


def is_at_rest(part):
    """Nothing of a pass is left: no gradients, no full parameters, shards in the modules."""
    engine = engine_of(part)
    for unit in engine.units:
        assert unit.grads.state is GradState.EMPTY
        assert not unit.slots.is_pinned
        frees = unit.settings.stage.frees_after_backward and unit.comm.axes.shard.size > 1
        assert not frees or unit.gather.state is ParamState.SHARDED
        assert not any(param.gradient.exists for param in unit.params)
        assert all(param.full is None or param.full.grad is None for param in unit.params)
    assert all(p.grad is None for p in part.parameters())
    assert all(hasattr(p, "full_tensor") for p in part.parameters())
    assert not engine.is_in_window
    assert not engine.is_running()
    assert not engine.reductions.nbytes


def matrix(rank, num_ranks, cases):
    axes = shardwise.Axes(pp=1 if num_ranks == 3 else 2)  # of one stage, no mesh says that it is
    dp = axes["dp_shard"]
    for case in cases:
        num = micro_batches_of(case.schedule, case.micro_batches)
        how = {"by": case.by, "stage": case.stage, "precision": case.precision}
        made = pipeline_of(case.schedule, axes, num, **how)
        optimizer = torch.optim.SGD(made.params, lr=LR)
        reference = OneProcess(case)
        for step in range(STEPS):
            before = counts_of(made.parts)
            made.step(*batch_of(step, dp.get_local_rank()))
            if axes.pp > 1 and dp.size() > 1 and case.stage in (2, 3) and step:
                gathers, reductions = (
                    b - a for a, b in zip(before, counts_of(made.parts), strict=True)
                )
                # Each unit once, whatever the number of micro-batches; `shard` joins small units.
                assert gathers == num_units(made.parts), case
                joined = len(made.parts) if case.by == "shard" else num_units(made.parts)
                assert reductions == joined, case
            optimizer.step()
            optimizer.zero_grad()
            for part in made.parts:
                is_at_rest(part)
            reference.step(step, dp.size())
        reference.check(made)


@pytest.mark.parametrize(("num_ranks", "every"), [(4, 1), (2, 3), (6, 6), (3, 1)])
def test_every_schedule_takes_the_steps_of_one_process_and_gathers_and_reduces_once(
    num_ranks, every
):
    cases = [case for case in some_cases() if num_ranks != 3 or case.schedule in SINGLE]
    run_ranks(matrix, num_ranks, cases[::every])


@on_ranks(4)
def test_every_schedule_has_the_bits_of_fsdp2():
    axes = shardwise.Axes(pp=2)
    dp = axes["dp_shard"]
    for number, schedule in enumerate(THERE):
        num = micro_batches_of(schedule, 2)
        how = ({"stage": 2}, {"by": "fully_shard"}, {"stage": 3})[number % 3]
        ours = pipeline_of(schedule, axes, num, **how)
        theirs = Pipeline(schedule, axes, num, partial(by_torch, mesh=dp))
        for made in (ours, theirs):
            made.step(*batch_of(0, dp.get_local_rank()))
        for mine, torchs in zip(ours.params, theirs.params, strict=True):
            assert torch.equal(full(mine.grad), full(torchs.grad)), schedule


# -- what runs before the first step


class Static(PipelineStage):
    """A stage that is told its shapes, so that nothing runs before the first step."""

    def __init__(self, part, index, num, *args, rows, **how):
        words = torch.zeros(rows, LENGTH, dtype=torch.long)
        inner = torch.zeros(rows, LENGTH, WIDTH)
        takes = words if index == 0 else inner.requires_grad_()
        gives = torch.zeros(rows, LENGTH, WORDS) if index == num - 1 else inner.clone()
        gives = gives.detach().requires_grad_()
        super().__init__(part, index, num, *args, input_args=takes, output_args=gives, **how)


class Looks(PipelineStage):
    """A stage that looks at what the pass which finds its shapes leaves behind."""

    num_looks = 0

    def _post_metadata_inference_cleanup(self):
        super()._post_metadata_inference_cleanup()
        is_at_rest(self.submod)
        type(self).num_looks += 1


@on_ranks(4)
def test_the_pass_that_infers_shapes_before_the_first_step_leaves_nothing_behind():
    axes = shardwise.Axes(pp=2)
    x, y = batch_of(0, axes["dp_shard"].get_local_rank())
    for number, schedule in enumerate(THERE[::2]):
        num = micro_batches_of(schedule, 3)
        by = ("shard", "fully_shard")[number % 2]
        how = {"by": by, "stage": 3 - number // 2 % 2 if by == "shard" else 3}
        dynamic = pipeline_of(schedule, axes, num, stage_class=Looks, **how)
        static = pipeline_of(
            schedule, axes, num, stage_class=partial(Static, rows=ROWS // num), **how
        )
        for made in (dynamic, static):
            made.step(x, y)
        for mine, theirs in zip(dynamic.params, static.params, strict=True):
            assert torch.equal(full(mine.grad), full(theirs.grad))
    if hasattr(PipelineStage, "_post_metadata_inference_cleanup"):  # torch 2.11 lacks it
        assert Looks.num_looks >= len(THERE[::2])


# -- the failures of others, by name


def states_of(part):
    """Return the states of the units."""
    names = "SHARDED", "UNSHARDED"
    units = [unit for unit in engine_of(part).units if unit.params]
    return {names[unit.gather.state is ParamState.FULL] for unit in units}


@on_ranks(4)
def test_stages_are_gathered_when_an_interleaved_schedule_opens_them_and_at_no_other_time():
    """With four stages on a rank the schedule opens and closes them several times in a step.

    See pytorch#164756.
    """
    axes = shardwise.Axes(pp=2)
    place = axes["pp"].get_local_rank()
    looping = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
    for by, schedules in (("shard", looping), ("fully_shard", looping[:1])):
        for schedule in schedules:
            made = pipeline_of(schedule, axes, 4, by=by, stages_per_rank=4)
            actions = [a for a in made.schedule.pipeline_order_with_comms[place] if a is not None]
            opened = [a.stage_index for a in actions if a.computation_type.name == "UNSHARD"]
            assert len(opened) > len(made.parts)  # windows, not one gather for the whole step
            for step in range(2):
                before = [counts_of([part])[0] for part in made.parts]
                made.step(*batch_of(step, axes["dp_shard"].get_local_rank()))
                if step:
                    for part, index, had in zip(made.parts, made.indices, before, strict=True):
                        wanted = num_units([part]) * opened.count(index)
                        assert counts_of([part])[0] - had == wanted, (by, schedule, index)
                for param in made.params:
                    param.grad = None
            for part in made.parts:  # and torch's name of the state says so
                assert states_of(part) == {"SHARDED"}
                for module in (m for m in part.modules() if isinstance(m, FSDPModule)):
                    module.unshard()
                assert states_of(part) == {"UNSHARDED"}
                for module in (m for m in part.modules() if isinstance(m, FSDPModule)):
                    module.reshard()
                assert states_of(part) == {"SHARDED"}


@on_ranks(4)
def test_gradients_of_several_schedules_are_reduced_once_and_divided_once():
    """Several schedules before one optimizer step, reduced once, with the last.

    See pytorch#196641.
    """
    axes = shardwise.Axes(pp=2)
    dp = axes["dp_shard"]
    for number, schedule in enumerate(THERE[1::2]):
        by = ("shard", "fully_shard")[number % 2]
        case = Case(schedule, by, 3 - number // 2 % 2 if by == "shard" else 3)
        num = micro_batches_of(schedule, 3)
        made = pipeline_of(schedule, axes, num, by=by, stage=case.stage)
        optimizer = torch.optim.SGD(made.params, lr=LR)
        reference = OneProcess(case)
        for step in range(2):
            for turn in range(3):
                batch = 3 * step + turn
                before = counts_of(made.parts)
                with shardwise.accumulate(made.parts, last=turn == 2):
                    made.step(*batch_of(batch, dp.get_local_rank()))
                found = counts_of(made.parts)[1] - before[1]
                if batch:  # before that a pass found shapes
                    joined = len(made.parts) if by == "shard" else num_units(made.parts)
                    assert found == (joined if turn == 2 else 0), (case, turn)
                x, y = whole_batch(batch, dp.size())
                loss_of(reference.whole(x), y).backward()
                if batch == 0:
                    with pytest.raises(StateError, match="accumulation window"):
                        shardwise.save("/nowhere", made.parts)
            for each in (optimizer, reference.optimizer):
                each.step()
                each.zero_grad()
        reference.roundings *= 2  # each step is of three batches
        reference.check(made)


@on_ranks(2)
def test_passes_that_are_ended_by_hand_are_reduced_once_at_the_end_of_a_window(rank, num_ranks):
    """What torch 2.15's schedules call in the place of private names."""
    for by in BY:
        part = BY[by](Net(), mesh=shardwise.Axes(), stage=3, precision="fp32")
        part.set_manual_backward_finalization(True)
        whole = Net()
        for turn in range(2):
            before = counts_of([part])[1]
            with shardwise.accumulate([part], last=turn == 1):
                for number in range(2):
                    part.set_requires_gradient_sync(False)
                    x, y = batch_of(2 * turn + number, rank)
                    loss_of(part(x), y).backward()
                    x, y = whole_batch(2 * turn + number, num_ranks)
                    loss_of(whole(x), y).backward()
                part.set_requires_gradient_sync(True)
                part.finalize_backward()
            joined = 1 if by == "shard" else num_units([part])
            assert counts_of([part])[1] - before == turn * joined
        roundings = of_gradient(*(8, 11) * NUM_BLOCKS, 8, over=8 * ROWS)
        expected = {name: param.grad for name, param in whole.named_parameters()}
        for name, param in part.named_parameters():
            wanted = expected[name]
            assert_rounded_alike(full(param.grad), wanted, roundings, name)


@on_ranks(2)
def test_a_schedule_whose_division_would_hit_earlier_gradients_is_refused():
    axes = shardwise.Axes(pp=2)
    for by in BY:
        made = pipeline_of("1F1B", axes, 2, by=by)
        made.step(*batch_of(0, 0))
        for param in made.params:  # as zero_grad(set_to_none=False) does, which is no mistake
            param.grad.zero_()
        made.step(*batch_of(1, 0))
        wanted = [full(param.grad).clone() for param in made.params]
        with pytest.raises(
            StateError, match=r"divide by its number of micro-batches again.*last=F"
        ):
            made.step(*batch_of(0, 0))
        fresh = pipeline_of("1F1B", axes, 2, by=by)
        fresh.step(*batch_of(1, 0))
        found = [full(param.grad) for param in fresh.params]
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@on_ranks(4)
def test_where_the_mesh_names_no_pipeline_one_setting_makes_it_one_gather():
    """A mesh that names no pipeline: the user says that parameters stay after forward."""
    axes = shardwise.Axes(pp=2)
    for schedule in SINGLE:
        made = Pipeline(
            schedule, axes, 3, partial(shardwise.shard, mesh=axes["dp_shard"], units="Block")
        )
        for stays in (False, True):
            for part in made.parts:
                part.set_reshard_after_forward(not stays)
            for step in range(2):
                before = counts_of(made.parts)[0]
                made.step(*batch_of(step, axes["dp_shard"].get_local_rank()))
                gathers = counts_of(made.parts)[0] - before
                for param in made.params:
                    param.grad = None
            assert gathers == num_units(made.parts) if stays else gathers > num_units(made.parts)
