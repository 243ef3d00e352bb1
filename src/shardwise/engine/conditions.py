"""What holds for a sharded model for a while: gathered, inside a window, not to be used.

Each begins and ends in a context or by a call here; everybody else only asks.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import StateError


class Alone:
    """One micro-batch at a time, by default; `layer_by_layer` replaces it."""

    others_follow = False  # other micro-batches are yet to run what this one runs

    def arrive(self, unit: Any) -> None:
        """Let others come to the unit that this micro-batch is about to run."""

    def visit(self, schedule: Any, call: Any) -> bool:
        """Gather the unit of a call; tell whether its backward comes next."""
        is_next: bool = schedule.before_forward(call.unit, in_backward=call.in_backward)
        return is_next

    def check_backward(self) -> None:
        """Refuse a backward pass where it would be wrong. **Raises** StateError."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was last loaded from, or last saved as (``is_saved``).

    ``has_skipped``: newer ones in its folder were passed over as damaged.
    """

    path: Path
    step: int | None
    run: str
    has_skipped: bool = False
    is_saved: bool = False


class Conditions:
    """The conditions of one model."""

    def __init__(self) -> None:
        self._is_suspended = False
        self._is_last: bool | None = None
        self._unusable: str | None = None
        self._half_loaded: set[str] = set()
        self.num_loads = 0  # begun, on all ranks alike
        self.origin: Origin | None = None  # on all ranks alike
        self._checks: list[Callable[[], None]] = []
        self.rounds = Alone()

    # -- full parameters in the modules
    @property
    def is_suspended(self) -> bool:
        """Tell whether forward passes go unnoticed now."""
        return self._is_suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let forward passes go unnoticed: full ordinary parameters stand in the modules."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    # -- the accumulation window
    @property
    def is_last_micro_batch(self) -> bool | None:
        """Tell whether the step comes after the micro-batch under way; None where nobody says."""
        return self._is_last

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Run one micro-batch of an accumulation window."""
        before, self._is_last = self._is_last, last
        try:
            yield
        finally:
            self._is_last = before

    # -- micro-batches in rounds
    @contextmanager
    def in_rounds(self, rounds: Alone) -> Iterator[None]:
        """Run the forward passes of several micro-batches unit by unit."""
        before, self.rounds = self.rounds, rounds
        try:
            yield
        finally:
            self.rounds = before

    # -- parameters of two origins
    @property
    def unusable(self) -> str | None:
        """Why the parameters are not to be used, if they are not."""
        return self._unusable

    def check_usable(self, what: str) -> None:
        """Refuse ``what`` while the parameters are not to be used. **Raises** StateError."""
        if self._unusable is not None:
            raise StateError(f"{what}the model's parameters are not to be used: {self._unusable}")

    def refuse(self, why: str) -> None:
        """Let nobody use the parameters, until a load of all of them ends well."""
        self._unusable = why

    @contextmanager
    def writing(self, why: str) -> Iterator[None]:
        """Replace all parameters; ``why`` they are not to be used, if that does not end well."""
        self._unusable = why
        yield
        self._unusable = None

    def begin_load(self, names: Collection[str], why: str) -> None:
        """Begin to write parameters and state of these names."""
        self.num_loads += 1
        self._half_loaded.update(names)
        self._unusable = why

    def end_load(self, names: Collection[str]) -> str | None:
        """End a load that went well; return a name that an earlier one has left half loaded."""
        self._half_loaded.difference_update(names)
        if not self._half_loaded:
            self._unusable = None
        return min(self._half_loaded, default=None)

    # -- news from the background
    def before_each_pass(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call ``check``, which may raise, before each recorded pass; return what ends that."""

        def end() -> None:
            if check in self._checks:
                self._checks.remove(check)

        self._checks.append(check)
        return end

    def check_before_pass(self) -> None:
        """Call what has asked to be called."""
        for check in list(self._checks):
            check()
