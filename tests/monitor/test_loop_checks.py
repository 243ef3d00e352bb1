"""Checks of the loop without ranks: inputs, dropouts, calls of torch, pauses."""

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

from shardwise.monitor import metrics as m
from shardwise.monitor.gatherer import _bad_over_ranks
from shardwise.monitor.loop_checks import LoopChecks, _add_to_digest, _dropouts
from shardwise.monitor.pauses import Collections, CoreWait
from shardwise.monitor.spans import EVALUATION, SpanRecorder, spans_of
from shardwise.monitor.torch_steps import STEP_CALLS, StepFigures, is_stepped, schedulers_of
from shardwise.names import MAIN
from shardwise.parallel.parts import Parts
from test_spans import recorder_of_seconds

PHASES = ("forward", "backward", "wait_reduce", "data", "save", "exchange", "step")


class NoParts(Parts):
    """The parts of no model."""

    def __init__(self):
        self.engines = []


def test_checked_steps_follow_no_period():
    checks = LoopChecks(NoParts(), [])
    assert [n for n in range(1, 100) if checks.is_due(n)] == [3, 5, 8, 13, 21, 34, 55, 89]


def test_a_digest_tells_inputs_apart_by_value_and_shape():
    x = torch.randn(4, 6)
    assert _add_to_digest(0, x) == _add_to_digest(0, x.clone())
    others = (x + 1, x.view(6, 4), x[:3], x.bfloat16())
    assert len({_add_to_digest(0, each) for each in (x, *others)}) == 5
    assert _add_to_digest(1, x) != _add_to_digest(0, x)  # of another micro-batch before


def test_inputs_are_shared_by_ranks_with_equal_new_digests():
    rows = [{"3": 7, "5": 0, "8": 4}, {"3": 7, "5": 0, "8": 5}, {"3": 6, "5": 0, "8": 5}]
    shares = m.shared_inputs(rows)
    assert shares == [pytest.approx(100 / 3), pytest.approx(200 / 3), pytest.approx(100 / 3)]
    assert m.shared_inputs([{"3": 7}, {}]) == [None, None]


def test_dropouts_are_modules_and_probabilities_of_other_modules():
    attention = nn.MultiheadAttention(8, 2, dropout=0.2)
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), attention, nn.Linear(8, 8))
    assert [(type(module), name) for module, name in _dropouts(model)] == [
        (nn.Dropout, "p"),
        (nn.MultiheadAttention, "dropout"),
    ]


@pytest.fixture
def watched():
    """Return a parameter, its optimizer, the figures and the lines of skipped steps."""
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    count, lines = [0], []
    hook = optimizer.register_step_post_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    figures = StepFigures([optimizer], lambda: count[0], lambda: True, lines.append)
    with STEP_CALLS.reporting(figures):
        yield param, optimizer, figures, lines
    hook.remove()


def test_a_norm_is_seen_before_clipping_under_a_name_imported_before(watched):
    param, _, figures, _ = watched
    param.grad = torch.full((3,), 10.0)
    clip_grad_norm_([param], 2.0)
    told = figures.take()
    assert float(told[m.GRAD_NORM]) == pytest.approx(math.sqrt(300)) and told[m.MAX_NORM] == 2
    assert param.grad.norm() == pytest.approx(2, rel=1e-4) and figures.take() == {}


def test_steps_that_a_scaler_skips_are_counted_and_told_at_8_in_a_row(watched):
    param, optimizer, figures, lines = watched
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(10):
        factor = 1.0 if step == 0 else float("inf")
        scaler.scale((param * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step == 0:
            assert figures.take() == {m.LOSS_SCALE: 1024.0, m.SKIPPED_STEPS: 0}
    assert figures.take() == {m.SKIPPED_STEPS: 9}
    assert [(line.num_steps, line.scale) for line in lines] == [(8, 1024.0 / 2**7)]


def test_torchs_calls_are_as_before_once_nothing_watches():
    before = torch.amp.GradScaler.step, clip_grad_norm_.__closure__[0].cell_contents
    figures = StepFigures([torch.optim.SGD([nn.Parameter(torch.ones(1))])], int, bool, print)
    with STEP_CALLS.reporting(figures), STEP_CALLS.reporting(figures):
        assert torch.amp.GradScaler.step is not before[0]
    assert (torch.amp.GradScaler.step, clip_grad_norm_.__closure__[0].cell_contents) == before


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_scheduler_of_an_optimizer_is_found_and_whether_it_was_stepped():
    one, other = (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(2))
    assert schedulers_of([one]) == []
    scheduler = torch.optim.lr_scheduler.StepLR(one, 10)
    assert schedulers_of([other]) == [] and schedulers_of([other, one]) == [scheduler]
    assert not is_stepped(scheduler)
    scheduler.step()
    assert is_stepped(scheduler)


def test_collections_of_all_objects_are_counted_and_waits_for_a_core_never_fall():
    collections, wait = Collections(), CoreWait()
    gc.collect()
    gc.collect(0)
    assert collections.take() >= 1
    assert wait.take_s() >= 0
    wait.close()
    assert wait.take_s() >= 0


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(PHASES)), max_size=20))
def test_steps_without_details_have_the_same_seconds_by_phase(events):
    found = []
    for is_detailed in (True, False):
        recorder, _ = recorder_of_seconds()
        recorder.cut(is_detailed=is_detailed)
        for enters, phase in events:
            (recorder.enter if enters else recorder.leave)(MAIN, phase, "")
        recorded = recorder.cut()
        if recorded.main_s is None:
            spans = spans_of(recorded, {})
            found.append(m.step_metrics(spans, recorded.seconds))
        else:
            found.append(m.main_metrics(recorded.main_s, recorded.seconds))
    detailed, plain = found
    assert plain == pytest.approx({name: detailed[name] for name in m.OF_MAIN})


def test_forward_passes_without_gradients_are_evaluation_and_have_no_tokens():
    records = [True, False]
    recorder = SpanRecorder(records_grads=lambda: records.pop(0))
    recorder.cut(is_detailed=False)
    for _ in range(2):
        recorder.see_inputs((torch.zeros(2, 5, dtype=torch.int64),), {})
        recorder.enter(MAIN, "forward", "")
        recorder.leave(MAIN, "forward", "")
    recorded = recorder.cut()
    assert recorded.num_tokens == 10 and {"forward", EVALUATION} <= set(recorded.main_s)


def test_a_rank_that_logs_seldom_says_nothing_about_a_step_without_its_value():
    bad = {"bad_since": {"eval_loss": 5}, "logged_at": {"eval_loss": [5]}}
    later = {"bad_since": {"eval_loss": 6}, "logged_at": {"eval_loss": [6]}}
    finite = {"bad_since": {"eval_loss": 0}, "logged_at": {"eval_loss": [5]}}
    always = {"bad_since": {"eval_loss": 0}, "logged_at": {}}
    assert _bad_over_ranks([later, bad]) == {"eval_loss": {1: 5}}
    assert _bad_over_ranks([finite, bad, always]) == {"eval_loss": {0: 0, 1: 5, 2: 0}}
