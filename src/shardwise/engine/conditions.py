"""Temporary conditions of a sharded model: gathered, inside a window, unusable.

A condition begins and ends in a context or by a method here. Other code only reads it.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import StateError


class Alone:
    """One micro-batch at a time, the default. `layer_by_layer` replaces it."""

    others_follow = False  # other micro-batches still have to run this unit

    def arrive(self, unit: Any) -> None:
        """Wait until the other micro-batches reach ``unit``; do nothing here."""

    def gather(self, schedule: Any, call: Any) -> bool:
        """Gather the unit of a call; tell whether its backward comes next."""
        is_next: bool = schedule.before_forward(call.unit, in_backward=call.in_backward)
        return is_next

    def check_backward(self) -> None:
        """Raise StateError if a backward pass would be wrong now."""


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a model was last loaded from, or last saved as (``is_saved``).

    ``has_skipped``: the load skipped newer, damaged checkpoints in its folder.
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
        self.num_loads = 0  # loads begun; equal on all ranks
        self.origin: Origin | None = None  # equal on all ranks
        self._checks: list[Callable[[], None]] = []
        self.rounds = Alone()
        self._assigned: dict[int, tuple[Any, Any]] = {}
        self.local_steps: Any = None  # of replicas that step apart (`parallel.local_steps`)

    # -- full parameters in the modules
    @property
    def is_suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self._is_suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore forward passes while the modules hold full ordinary parameters."""
        before, self._is_suspended = self._is_suspended, True
        try:
            yield
        finally:
            self._is_suspended = before

    # -- the accumulation window
    @property
    def is_last_micro_batch(self) -> bool | None:
        """Tell whether the step follows the current micro-batch; None outside a window."""
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
        """The reason why the parameters must not be used, or None."""
        return self._unusable

    def check_usable(self, what: str) -> None:
        """Raise StateError for ``what`` if the parameters must not be used."""
        if self._unusable is not None:
            raise StateError(f"{what}the model's parameters are not to be used: {self._unusable}")

    def refuse(self, why: str) -> None:
        """Mark the parameters unusable until a load of all of them succeeds."""
        self._unusable = why

    @contextmanager
    def writing(self, why: str) -> Iterator[None]:
        """Replace all parameters; they stay unusable, for the reason ``why``, if that raises."""
        self._unusable = why
        yield
        self._unusable = None

    def begin_load(self, names: Collection[str], why: str) -> None:
        """Begin to write parameters and state of these names."""
        self.num_loads += 1
        self._half_loaded.update(names)
        self._unusable = why

    def end_load(self, names: Collection[str]) -> str | None:
        """End a successful load; return a name that an earlier load has left half loaded."""
        self._half_loaded.difference_update(names)
        if not self._half_loaded:
            self._unusable = None
        return min(self._half_loaded, default=None)

    # -- assignments to p.data
    def note_assigned(self, param: Any, shared: Any) -> None:
        """Note what was assigned to a parameter's data, in place of an earlier assignment."""
        self._assigned.pop(id(param), None)
        if shared is not None:
            self._assigned[id(param)] = (param, shared)

    def check_assigned(self) -> None:
        """Raise ShardError for memory that cannot be shared; forget the assignments otherwise."""
        if self._assigned:
            for param, shared in self._assigned.values():
                shared.check(param.name)
            self._assigned.clear()

    # -- errors from the background
    def before_each_pass(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call ``check``, which may raise, before each recorded pass; return its removal."""

        def end() -> None:
            if check in self._checks:
                self._checks.remove(check)

        self._checks.append(check)
        return end

    def check_before_pass(self) -> None:
        """Call the checks that `before_each_pass` has registered."""
        for check in list(self._checks):
            check()
