"""A collective by a name that is the same on all ranks, and how people are told of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

# What small collectives are of, by the name in the place of a unit's.
_OTHERS = {
    "(experts)": "tokens and their experts",
    "(gathered)": "what gathered() writes back",
    "(generator)": "a random generator's state",
    "(norm)": "a norm",
    "(number)": "the model's number",
    "(ranks)": "which ranks have a part of the model",
    "(seed)": "the seed of the parameters",
    "(sequence)": "parts of sequences",
    "(stream)": "streamed weights",
    "(tensor)": "a whole tensor",
    "(tokens)": "how many tokens each rank has",
}
_SEPARATOR = "|"
_MAX_RANKS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective of one group. The n-th that a rank begins meets the n-th of all other ranks.

    ``members`` are the global ranks of a group that torch's registry does not know; ``unit`` is its
    name then. ``about``: what is exchanged, where that may differ between calls.
    """

    kind: str
    unit: str
    index: int
    axis: str
    group: Any
    members: tuple[int, ...] = ()
    about: str = ""

    @property
    def key(self) -> str:
        """Return what is the same on all ranks."""
        parts = (self.group_name, self.axis, self.kind, str(self.index), self.unit, self.about)
        return _SEPARATOR.join(parts)

    @property
    def group_name(self) -> str:
        """Return the group's name, the same on its ranks and no other group's."""
        return self.unit if self.members else str(getattr(self.group, "group_name", ""))

    @property
    def text(self) -> str:
        """Return the collective's name for people."""
        about = f" ({self.about})" if self.about else ""
        if not self.axis:
            return self.kind + about
        unit = f"{'' if self.kind == 'broadcast' else 'unit '}'{self.unit or '(root)'}'"
        return f"{self.kind} of {_OTHERS.get(self.unit, unit)}{about} over axis '{self.axis}'"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the global ranks that must begin it."""
        return self.members or ranks_of(self.group)


def text_of(key: str) -> str:
    """Return the name for people of a collective of this key."""
    _, axis, kind, index, rest = key.split(_SEPARATOR, 4)
    unit, _, about = rest.rpartition(_SEPARATOR)
    return Meeting(kind, unit, int(index), axis, None, about=about).text


def ranks_of(group: Any) -> tuple[int, ...]:
    """Return the global ranks of a group. **Raises** KeyError where there is no such group now."""
    return tuple(dist.get_process_group_ranks(group))


def name_ranks(ranks: Sequence[int]) -> str:
    """Return e.g. ``rank 1``, ``ranks 1, 2`` or ``ranks 1, 2, ... (30 in all)``."""
    shown = ", ".join(map(str, ranks[:_MAX_RANKS_SHOWN]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > _MAX_RANKS_SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def reason_of(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
