"""One forward call of a unit that autograd recorded."""

import weakref
from typing import Any


class Use:
    """One forward call of a unit that autograd recorded; dies with its graph.

    ``begun`` and ``done`` are of the backward pass under way. A ``spent`` use has seen one end: its
    graph may be run again (``retain_graph``), but nothing waits for that. Where units may be
    skipped, ``inside`` are the calls of this one, in order, and a call of them may be none:
    ``was_skipped``.
    """

    __slots__ = (
        "__weakref__",
        "begun",
        "done",
        "enclosing",
        "has_input_hook",
        "inside",
        "parent",
        "spent",
        "versions",
        "was_skipped",
    )

    def __init__(self, versions: tuple[int, ...], enclosing: tuple[Any, ...]) -> None:
        self.enclosing = enclosing
        self.inside: list[tuple[Any, Use]] = []
        self.parent: weakref.ref[Use] | None = None
        self.was_skipped = False
        self.begun = False
        self.done = False
        self.spent = False
        self.has_input_hook = False
        self.versions = versions

    def enter(self, unit: Any, parent: "Use") -> None:
        """Note that this call of ``unit`` was made inside another one."""
        self.parent = weakref.ref(parent)
        parent.inside.append((unit, self))

    @property
    def is_open(self) -> bool:
        """Tell whether its part of the backward pass is expected, or has begun and goes on."""
        return not self.done and (self.begun or not self.spent)

    def end_pass(self) -> None:
        """Note that a backward pass has ended, with or without this use."""
        self.begun = self.done = False
        self.spent = True
