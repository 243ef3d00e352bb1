"""A callback of Lightning's Trainer by which ``fit`` is observed."""

from pathlib import Path
from typing import Any

from shardwise.interop.observed_loop import PAUSE, ObservedLoop, is_number
from shardwise.monitor.observer import Observation
from shardwise.versions import load_neighbour

_Callback: Any = load_neighbour("lightning", "shardwise.interop.lightning").pytorch.Callback


class ObserveCallback(_Callback):
    """Observe the steps of ``fit`` as `shardwise.observe` does; ``options`` are its own.

    For ``Trainer(strategy="shardwise", callbacks=[ObserveCallback("runs/a")])``. Waiting for
    batches, saves and the tokens of a batch are told; the loss and what the module logs too, every
    ``log_every_n_steps``, as the device is waited for to read them. Validation is left out.

    **Raises** ConfigError, as training begins, where the module is not sharded.
    """

    def __init__(self, output: str | Path | None = None, **options: Any) -> None:
        super().__init__()
        self._loop = ObservedLoop(output, options)
        self._num_logged = 0

    @property
    def run(self) -> Observation | None:
        """What is observed; None before ``fit`` begins and after it ends."""
        return self._loop.run

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        self._num_logged = trainer.global_step
        self._loop.begin(pl_module, trainer.optimizers, trainer.global_step)
        self._loop.go_into("data")

    def on_train_batch_start(self, *_: Any) -> None:
        """A batch is there."""
        self._loop.go_into("")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        """A micro-batch is over, and its step if it was the last one of it."""
        step = trainer.global_step
        if step != self._num_logged and step % trainer.log_every_n_steps == 0:
            self._num_logged = step
            loss: Any = outputs.get("loss") if isinstance(outputs, dict) else outputs
            if is_number(loss):  # Lightning gives each micro-batch's as its part of the window's
                self._loop.log({"loss": float(loss) * trainer.accumulate_grad_batches})
            self._loop.log(trainer.callback_metrics)
        self._loop.go_into("data")

    def on_validation_start(self, *_: Any) -> None:
        """A validation begins."""
        self._loop.go_into(PAUSE)

    def on_validation_end(self, *_: Any) -> None:
        """It is over."""
        self._loop.go_into("data")

    def on_train_end(self, *_: Any) -> None:
        """End."""
        self._loop.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End without the other ranks, which may never come."""
        self._loop.end(exception)
