"""Trackers of other people get every figure of a run, by stand-ins for what is not installed."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from shardwise.errors import ConfigError
from shardwise.monitor.metrics import OverRanks, summarize_steps
from shardwise.monitor.record import StepLine
from shardwise.monitor.sinks import MLflow, TensorBoard, WandB, flat_figures

LINE = StepLine(
    7,
    1,
    0.5,
    {"mfu(%)": OverRanks(1.0, 2.0, 3.0, 0, 1), "a/b": OverRanks(4, 4, 4, 0, 0)},
    {"loss": 5},
)
FLAT = {"mfu(%)": 2.0, "mfu(%)/min": 1.0, "mfu(%)/max": 3.0, "a/b": 4, "loss": 5}


class Told:
    """Stands for a library: keeps every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            return self

        return call


def stand_in(monkeypatch, name, **members):
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def test_every_figure_has_a_name_and_extremes_where_ranks_differ():
    assert flat_figures(LINE) == FLAT
    values = {"loss": None, "lr": 1.0}
    assert flat_figures(StepLine(1, 1, 0.0, {}, values)) == {"lr": 1.0}
    steps = summarize_steps([(n, {"loss": loss, "lr": 1.0}) for n, loss in ((1, 2.0), (2, 6.0))])
    told = flat_figures(StepLine(2, 2, 0.0, {}, {"loss": 6.0, "lr": 1.0}, values_over_steps=steps))
    assert told == {"loss": 6.0, "loss/min": 2.0, "loss/mean": 4.0, "loss/max": 6.0, "lr": 1.0}


def test_tensorboard_gets_a_scalar_of_each(monkeypatch):
    told = Told()
    stand_in(monkeypatch, "torch.utils.tensorboard", SummaryWriter=lambda folder: told)
    write_and_close(TensorBoard("runs/a"))
    *scalars, end = told.calls
    assert {args[0]: args[1] for _, args, _ in scalars} == FLAT
    assert {args[2] for _, args, _ in scalars} == {7} and end[0] == "close"


def write_and_close(sink):
    sink.write(LINE)
    sink.close()


@pytest.mark.parametrize("is_given", [True, False])
def test_wandb_ends_only_a_run_that_it_began(is_given, monkeypatch):
    told = Told()
    stand_in(monkeypatch, "wandb", init=lambda **options: told.begin(**options))
    write_and_close(WandB(told) if is_given else WandB(project="p"))
    log = ("log", (FLAT,), {"step": 7})
    begun, ended = ("begin", (), {"project": "p"}), ("finish", (), {})
    assert told.calls == ([log] if is_given else [begun, log, ended])


@pytest.mark.parametrize("is_active", [True, False])
def test_mlflow_takes_the_active_run_and_names_that_it_allows(is_active, monkeypatch):
    told = Told()
    members = {name: getattr(told, name) for name in ("start_run", "log_metrics", "end_run")}
    active = SimpleNamespace() if is_active else None
    stand_in(monkeypatch, "mlflow", active_run=lambda: active, **members)
    write_and_close(MLflow(run_name="a"))
    names = [name for name, _, _ in told.calls]
    assert names == (["log_metrics"] if is_active else ["start_run", "log_metrics", "end_run"])
    ((named,), options) = next(c[1:] for c in told.calls if c[0] == "log_metrics")
    assert named["mfu percent"] == 2.0 and options == {"step": 7}
    allowed = set("_-./: ")
    assert all(letter.isalnum() or letter in allowed for name in named for letter in name)


@pytest.mark.parametrize("make", [lambda: TensorBoard("a"), WandB, MLflow])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(make, monkeypatch):
    for name in ("torch.utils.tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'shardwise\[\w+\]'"):
        make()
