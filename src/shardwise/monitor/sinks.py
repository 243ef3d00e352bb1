"""Figures of an observed run for other people's trackers: TensorBoard, Weights & Biases, MLflow.

``observe(model, optimizer, output, sinks=[TensorBoard("runs/a")])``. Each library is imported when
its sink is made, on the rank that makes it; rank 0 alone writes to them.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from shardwise.errors import ConfigError
from shardwise.monitor.record import StepLine

# MLflow allows alphanumerics, "_-./: " and spaces (its documentation of `log_metric`).
_FOR_MLFLOW = str.maketrans({"%": "percent", "(": " ", ")": ""})


def flat_figures(line: StepLine) -> dict[str, float]:
    """Return a line as names and numbers: each figure's median, its extremes, the logged values.

    The median has the figure's own name, the extremes ``<name>/min`` and ``<name>/max`` where ranks
    differ. A logged value is the last one, beside ``<name>/min``, ``<name>/mean`` and
    ``<name>/max`` where the steps of the line differ.
    """
    found: dict[str, float] = {}
    for name, over in line.metrics.items():
        found[name] = over.median
        if over.min != over.max:
            found[f"{name}/min"], found[f"{name}/max"] = over.min, over.max
    for name, steps in line.values_over_steps.items():
        if steps.min != steps.max:
            found |= {f"{name}/{key}": getattr(steps, key) for key in ("min", "mean", "max")}
    return found | {name: value for name, value in line.values.items() if value is not None}


class TensorBoard:
    """Writes event files into ``folder``, with torch's writer."""

    def __init__(self, folder: str | Path) -> None:
        writer = _import("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._writer = writer.SummaryWriter(str(folder))

    def write(self, line: StepLine) -> None:
        """Write each figure as a scalar."""
        for name, value in flat_figures(line).items():
            self._writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        """Write buffered figures."""
        self._writer.close()


class WandBRun(Protocol):
    """A run of Weights & Biases."""

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        """Log figures of a step."""

    def finish(self) -> None:
        """End the run."""


class WandB:
    """Logs to ``run``, of ``wandb.init()``; None begins one with ``options`` and ends it."""

    def __init__(self, run: WandBRun | None = None, **options: object) -> None:
        self._is_own = run is None
        self._run = _import("wandb", "wandb", "wandb").init(**options) if run is None else run

    def write(self, line: StepLine) -> None:
        """Log all figures of a step at once."""
        self._run.log(flat_figures(line), step=line.step)

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_own:
            self._run.finish()


class MLflow:
    """Logs to the active run of MLflow, or to one that begins with ``options`` and ends here."""

    def __init__(self, **options: object) -> None:
        self._mlflow = _import("mlflow", "mlflow", "mlflow")
        self._is_own = self._mlflow.active_run() is None
        if self._is_own:
            self._mlflow.start_run(**options)

    def write(self, line: StepLine) -> None:
        """Log all figures of a step at once; MLflow's names have no per cent signs."""
        named = {name.translate(_FOR_MLFLOW): v for name, v in flat_figures(line).items()}
        self._mlflow.log_metrics(named, step=line.step)

    def close(self) -> None:
        """End the run, if it was begun here."""
        if self._is_own:
            self._mlflow.end_run()


def _import(module: str, package: str, extra: str) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{package} is not installed ({error}): pip install 'shardwise[{extra}]'"
        ) from error
