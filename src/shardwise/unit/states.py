"""The two state tables of a unit; a transition outside its table raises."""

from enum import Enum
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import IllegalTransition


class State(Enum):
    """A state of a table."""

    __hash__ = object.__hash__  # states are looked up several times per unit and pass


class ParamState(State):
    """The owner of the memory of a unit's full parameters.

    SHARDED: not readable (freed, or kept and perhaps stale). GATHERING: the transport writes them.
    FULL: the layers and autograd read them.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class GradState(State):
    """The state of a unit's gradients.

    EMPTY: none, or what autograd has written and no reduction has begun to send. PARTIAL: full
    gradients of this rank's micro-batches, kept for a later reduction. REDUCING: the transport
    reads them. REDUCED: this rank's slices of the mean are in ``p.grad``.
    """

    EMPTY = "empty"
    PARTIAL = "partial"
    REDUCING = "reducing"
    REDUCED = "reduced"


PARAM_TRANSITIONS = frozenset(
    {
        (ParamState.SHARDED, ParamState.GATHERING),
        (ParamState.GATHERING, ParamState.FULL),
        (ParamState.FULL, ParamState.SHARDED),
    }
)

GRAD_TRANSITIONS = frozenset(
    {
        (GradState.EMPTY, GradState.PARTIAL),
        (GradState.EMPTY, GradState.REDUCED),  # p.grad = t
        (GradState.REDUCED, GradState.PARTIAL),
        (GradState.PARTIAL, GradState.EMPTY),
        (GradState.PARTIAL, GradState.REDUCED),  # p.grad = t, or a pass that was cut short
        (GradState.PARTIAL, GradState.REDUCING),
        (GradState.REDUCING, GradState.REDUCED),
        (GradState.REDUCING, GradState.PARTIAL),  # a gradient that came after its unit closed
        (GradState.REDUCED, GradState.EMPTY),
    }
)


S = TypeVar("S", bound=State)


def check_transition(table: frozenset[tuple[S, S]], unit: str, before: S, after: S) -> S:
    """Return ``after`` if the table allows it.

    **Raises** IllegalTransition with unit, rank, from, to and the allowed states.
    """
    if (before, after) not in table:
        allowed = ", ".join(sorted(to.value for frm, to in table if frm is before)) or "nothing"
        raise IllegalTransition(
            f"rank {dist.get_rank() if dist.is_initialized() else 0}, unit '{unit or '(root)'}': "
            f"{before.value} -> {after.value} is not allowed (allowed: {allowed})"
        )
    return after
