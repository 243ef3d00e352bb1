"""The identity of a collective on all ranks of its group, and its description in messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

# Descriptions of small collectives, by the name that they have instead of a unit's.
_DESCRIPTIONS = {
    "(experts)": "tokens and their experts",
    "(gathered)": "values that gathered() writes back",
    "(generator)": "a random generator's state",
    "(generators)": "the states of random generators",
    "(norm)": "a norm",
    "(number)": "the model's number",
    "(ranks)": "which ranks have a part of the model",
    "(seed)": "the seed of the parameters",
    "(sequence)": "parts of sequences",
    "(stream)": "streamed weights",
    "(tensor)": "a whole tensor",
    "(tokens)": "how many tokens each rank has",
}
_KINDS_OF_TENSORS = ("broadcast", "exchange")  # ``unit`` is the name of a tensor
_SEPARATOR = "|"
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """A kind of collective of one group. The n-th call on a rank belongs to the n-th on all others.

    - ``kind``: the kind of collective, or its whole description if there is no ``axis``.
    - ``unit``: the name of the unit or tensor, or a name in parentheses, see `_DESCRIPTIONS`.
    - ``index``: of the unit, or a number that separates calls of one kind.
    - ``axis``: "" for a small exchange (`control`) and for calls that have only a ``kind``.
    - ``members``: the global ranks of a group that torch does not know, whose name is ``unit``.
    - ``about``: the content, if it differs between calls.
    - ``companion``: another group that the wait for the collective waits on; it is aborted with
      this one.
    """

    kind: str
    unit: str
    index: int
    axis: str
    group: dist.ProcessGroup | None
    members: tuple[int, ...] = ()
    about: str = ""
    companion: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def key(self) -> str:
        """Text that is the same on all ranks, and different for another collective."""
        parts = (self.group_name, self.axis, self.kind, str(self.index), self.unit, self.about)
        return _SEPARATOR.join(parts)

    @property
    def group_name(self) -> str:
        """The group's name: the same on its ranks, and different for another group."""
        return self.unit if self.members else str(getattr(self.group, "group_name", ""))

    @property
    def text(self) -> str:
        """The description for messages."""
        about = f" ({self.about})" if self.about else ""
        if not self.axis:
            return self.kind + about
        unit = f"{'' if self.kind in _KINDS_OF_TENSORS else 'unit '}'{self.unit or '(root)'}'"
        return f"{self.kind} of {_DESCRIPTIONS.get(self.unit, unit)}{about} over axis '{self.axis}'"

    def __str__(self) -> str:
        return self.text

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group. **Raises** KeyError if torch has no such group."""
        return self.members or ranks_of(self.group)


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the global ranks of a group. **Raises** KeyError if torch has no such group."""
    return tuple(dist.get_process_group_ranks(group))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0 to 7``, ``ranks 1, 3`` or ``ranks 1, 3, ... (12 in all)``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def reason_of(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if there is no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
