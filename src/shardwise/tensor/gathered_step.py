"""Steps of optimizers for which operations gather whole tensors instead of being refused.

Note [Gathering for an optimizer]
An optimizer that needs whole tensors now and then (`optim.gathering`) steps sharded tensors as any
other does. Elementwise operations run on this rank's elements. An operation that would be refused
gathers its sharded arguments, so every rank computes the same whole result from the same values. A
whole tensor that is added or copied to a sharded one is cut there. A sharded tensor that the
operation writes takes over this rank's slice of the result. Each operation gathers for itself, so
the memory is that of its arguments.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class GatheredStep:
    """The gathers of one optimizer's step: the first operation, and the largest bytes of one."""

    def __init__(self) -> None:
        self.first = ""
        self.largest_bytes = 0

    def note(self, operation: str, num_bytes: int) -> None:
        """Note whole tensors of ``num_bytes`` for one operation."""
        self.first = self.first or operation
        self.largest_bytes = max(self.largest_bytes, num_bytes)


_RUNNING: list[GatheredStep | None] = []


def running_step() -> GatheredStep | None:
    """Return the step under way if its operations gather."""
    return _RUNNING[-1] if _RUNNING else None


@contextmanager
def running(step: GatheredStep | None) -> Iterator[None]:
    """Let operations gather for a step; with None, as in a closure, they do not."""
    _RUNNING.append(step)
    try:
        yield
    finally:
        _RUNNING.pop()
