"""The status of a sharded model: gathered, inside an accumulation window, unusable.

Only the contexts and methods of `ModelStatus` change it. Other code reads it.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import StateError


class SingleMicroBatch:
    """Forward passes of one micro-batch at a time, the default.

    `accumulate(order="breadth_first")` replaces it by one that runs several in turn, unit by unit.
    """

    others_follow = False  # True if other micro-batches still need the unit

    def wait_for_others(self, unit: Any) -> None:
        """Wait until the other micro-batches reach ``unit``; with one micro-batch, do nothing."""

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


class ModelStatus:
    """The status of one model.

    ``num_loads``: loads begun. ``origin``: the checkpoint of the parameters. Both are equal on all
    ranks. ``micro_batches`` runs the forward passes. ``local_steps``: the `LocalSteps` of replicas
    that step separately, or None.
    """

    def __init__(self) -> None:
        self._is_suspended = False
        self._is_last: bool | None = None  # None outside a window
        self._unusable: str | None = None  # the reason
        self._half_loaded: set[str] = set()  # names that a failed load may have written
        self.num_loads = 0
        self.origin: Origin | None = None
        self._checks: list[Callable[[], None]] = []
        self.micro_batches = SingleMicroBatch()
        self._assigned: dict[int, tuple[Any, Any]] = {}  # id of a parameter: it, assigned memory
        self.local_steps: Any = None

    # -- full parameters in the modules
    @property
    def is_suspended(self) -> bool:
        """Tell whether the engine ignores forward passes now."""
        return self._is_suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore forward passes while the modules hold full ordinary parameters."""
        before = self._is_suspended
        self._is_suspended = True
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
        before = self._is_last
        self._is_last = last
        try:
            yield
        finally:
            self._is_last = before

    # -- several micro-batches, unit by unit
    @contextmanager
    def running_together(self, micro_batches: SingleMicroBatch) -> Iterator[None]:
        """Let ``micro_batches`` run the forward passes of several micro-batches unit by unit."""
        before = self.micro_batches
        self.micro_batches = micro_batches
        try:
            yield
        finally:
            self.micro_batches = before

    # -- parameters that must not be used
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
    def add_pass_check(self, check: Callable[[], None]) -> Callable[[], None]:
        """Call ``check``, which may raise, before each recorded pass; return its removal."""

        def end() -> None:
            if check in self._checks:
                self._checks.remove(check)

        self._checks.append(check)
        return end

    def check_before_pass(self) -> None:
        """Call the checks of `add_pass_check`."""
        for check in list(self._checks):
            check()
