"""Interface of optimizer steps that run on another thread; `step.background` makes them."""

from typing import Protocol


class RunningStep(Protocol):
    """One unit's step, or its write to files."""

    @property
    def is_over(self) -> bool:
        """Tell whether the step has ended, with or without an error."""

    def give_up(self) -> None:
        """Wait until the step has ended; ignore its error, as a load replaces the results."""

    def wait(self) -> None:
        """Wait until the step is done. **Raises** ShardError in every call if it has failed."""


def finish_all(steps: list[RunningStep]) -> None:
    """Wait for the steps and empty the list.

    **Raises** ShardError if a step has failed; the list then keeps all steps.
    """
    for step in steps:
        step.wait()
    steps.clear()
