"""Moments of AdamW between the form that a checkpoint has them in and the form of an optimizer.

Note [Moments in a checkpoint]
A checkpoint has ``exp_avg`` and ``exp_avg_sq`` as values: those of `shardwise.optim.AdamW` that are
codes of 8 bits as float32, those in bfloat16 as they are. So any AdamW takes them, ours in whatever
form its groups ask for: codes are made anew, which gives the codes that there were where blocks are
the same, and torch's in the dtype of its parameters.
"""

from collections.abc import Mapping
from typing import Any

from shardwise.checkpoint.places import Place
from shardwise.engine.adoption import innermost
from shardwise.engine.parts import Joined
from shardwise.errors import CheckpointError, ConfigError
from shardwise.optim.adamw import AdamW, Moment
from shardwise.optim.kinds import ARGUMENTS
from shardwise.optim.moments import MOMENTS, kind_of


def settings_for(
    where: str, optimizer: Joined, saved: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return what the optimizer takes of saved settings.

    **Raises** CheckpointError where its steps would be others.
    """
    first = innermost(optimizer.optimizers[0])
    try:
        return [first.loaded_settings(s) for s in saved] if isinstance(first, AdamW) else saved
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from None


def moment_of(
    optimizer: Joined, place: Place, key: str, group: Mapping[str, Any], before: Mapping[str, Any]
) -> Moment | None:
    """Return a moment to be filled, where it is one of our AdamW's; ``before`` is used if it fits.

    ``group`` are the settings of the parameter's.
    """
    if key not in MOMENTS or not isinstance(innermost(optimizer.optimizers[0]), AdamW):
        return None
    kind = kind_of(group["moments"], group["block"])
    return Moment(place.held, kind, MOMENTS.index(key), before)


def is_reduced(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether a state is a moment of our AdamW, which another one has in its own dtype."""
    return key in MOMENTS and ARGUMENTS[0] in group


def is_foreign(key: str, group: Mapping[str, Any]) -> bool:
    """Tell whether a saved setting says how our AdamW keeps moments, to a group of another."""
    return key in ARGUMENTS and key not in group
