"""The two state tables of a unit; a transition outside its table raises."""

from enum import Enum
from typing import TypeVar

import torch.distributed as dist

from shardwise.errors import IllegalTransition


class State(Enum):
    """A state of a table."""

    __hash__ = object.__hash__  # states are looked up several times per unit and pass


class ParamState(State):
    """The state of a unit's full parameters; it says which code may use their memory.

    - SHARDED: no code. The memory is freed, or kept with values that may be stale.
    - GATHERING: the transport writes it.
    - FULL: the layers and autograd read it.
    """

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


class GradState(State):
    """The state of a unit's gradients.

    - EMPTY: there are none, or autograd has written full gradients that are not sent yet.
    - PARTIAL: this rank keeps sums of full gradients for a later reduction.
    - REDUCING: the transport reads the full gradients.
    - REDUCED: this rank's slices of the mean are in ``p.grad``.
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
        (GradState.PARTIAL, GradState.REDUCED),  # p.grad = t, or an interrupted pass
        (GradState.PARTIAL, GradState.REDUCING),
        (GradState.REDUCING, GradState.REDUCED),
        (GradState.REDUCING, GradState.PARTIAL),  # a late gradient, or a deferred sum over replicas
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
