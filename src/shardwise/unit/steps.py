"""Steps of a unit's slices that another thread runs; `step.background` makes them."""

from typing import Protocol


class RunningStep(Protocol):
    """One unit's step, or its write to a file."""

    @property
    def is_over(self) -> bool:
        """Tell whether the step has ended, with or without an error."""

    def give_up(self) -> None:
        """Wait until the step has ended, also with an error, so that a load may follow."""

    def wait(self) -> None:
        """Wait until the step is done. **Raises** ShardError in every call if it has failed."""


def finish_all(steps: list[RunningStep]) -> None:
    """Wait for the steps and empty the list.

    **Raises** ShardError if a step has failed; the list then keeps all steps.
    """
    for step in steps:
        step.wait()
    steps.clear()
