"""A callback of transformers' `Trainer` by which its runs are observed.

Note [What Trainer tells]
Calls come when a step, an evaluation or a save is over; what comes next is in the flags of its
control, which it follows in the order of evaluation, save, next batch. So between two calls the
loop is in the first of these that is asked for. Trainer tells no callback that training has raised;
our own Trainer does, and the stock one is put inside ``with callback:``.
"""

from pathlib import Path
from typing import Any, Self

import transformers

from shardwise.interop.observed_loop import PAUSE, ObservedLoop
from shardwise.monitor.observer import Observation

_NO_FIGURES = ("_runtime", "_per_second", "epoch")


class ObserveCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Observe the steps of a Trainer as `shardwise.observe` does; ``options`` are its own.

    For ``Trainer(..., callbacks=[ObserveCallback("runs/a")])`` on every rank, with our `Trainer` or
    the stock one. Waiting for batches, saves, tokens and what Trainer logs are told; evaluations
    are left out. With the stock Trainer put ``with callback:`` around ``train()``, so that a run
    that raises says how it ended.

    **Raises** ConfigError, as training begins, where the model is not sharded.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        self._loop = ObservedLoop(output, options)

    @property
    def run(self) -> Observation | None:
        """What is observed; None before training begins and after it ends."""
        return self._loop.run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        self._loop.end(error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begin."""
        self._loop.begin(objects["model"], objects["optimizer"], state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """The first batch of an epoch is waited for."""
        self._loop.go_into("data")

    def on_step_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """All batches of a step are there."""
        self._loop.go_into("")

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """A step is over."""
        self._go_on(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An epoch is over."""
        self._go_on(control)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An evaluation goes on, of which the flags may have said nothing."""
        self._loop.go_into(PAUSE)

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """An evaluation is over."""
        self._go_on(control)

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """A checkpoint is written."""
        self._go_on(control)

    def on_log(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Keep what Trainer logs, but for what it says of its own speed."""
        logs = objects.get("logs") or {}
        if "train_runtime" not in logs:
            self._loop.log({k: v for k, v in logs.items() if not k.endswith(_NO_FIGURES)})

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """End."""
        self._loop.end()

    def _go_on(self, control: Any) -> None:
        """See Note [What Trainer tells]."""
        is_saved = "save" if control.should_save else "data"
        self._loop.go_into(PAUSE if control.should_evaluate else is_saved)
