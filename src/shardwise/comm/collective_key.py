"""The identity of a collective on all ranks of its group, and its description in messages."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

# Descriptions of small collectives, by the name that stands in place of a unit's.
_DESCRIPTIONS = {
    "(experts)": "tokens and their experts",
    "(gathered)": "what gathered() writes back",
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
_OF_TENSORS = ("broadcast", "exchange")  # kinds whose `unit` is one tensor
_SEPARATOR = "|"
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class CollectiveKey:
    """A kind of collective of one group. The n-th call of a rank meets the n-th of all others.

    A key without an ``axis`` belongs to a small exchange (`control`), or to a call that has only a
    ``kind``. ``members`` are the global ranks of a group that torch's registry does not know, whose
    name is ``unit``. ``about`` describes the content where it differs between calls.
    """

    kind: str
    unit: str
    index: int
    axis: str
    group: dist.ProcessGroup | None
    members: tuple[int, ...] = ()
    about: str = ""
    # Another group that the wait for the collective waits on; it is aborted with this one.
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
        unit = f"{'' if self.kind in _OF_TENSORS else 'unit '}'{self.unit or '(root)'}'"
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
