"""What a rank says as its program ends: how it has ended, and what a call of torch's failed of."""

import logging
import sys
import time
from contextlib import suppress

import torch.distributed as dist

from shardwise.comm import stacks
from shardwise.comm.finding_out import Finder
from shardwise.comm.meeting import Meeting, reason_of
from shardwise.comm.pulse import ENDED_WELL
from shardwise.comm.waits import Wait
from shardwise.errors import CollectiveError

_LOG = logging.getLogger("shardwise")
_LINGER_S = 1.5  # longer than between two looks of the others


def say_last_word(
    finder: Finder, look_every_s: float, *, is_told: bool, has_store: bool = True
) -> None:
    """Say in the store how this rank's program ends, and in the log why a call of torch's failed.

    ``is_told``: that stands in the log already. ``has_store``: the store answers.
    """
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    with suppress(Exception):  # whatever is gone by now: the error itself has been told
        if error is not None:
            _say_why(finder, error, look_every_s, is_told, has_store)
            if has_store and dist.get_rank() == 0:  # which may keep the store that others read
                time.sleep(_LINGER_S)
        elif has_store:
            finder.beat(look_every_s, ENDED_WELL)


def _say_why(
    finder: Finder, error: BaseException, look_every_s: float, is_told: bool, has_store: bool
) -> None:
    call, follows = None, isinstance(error, CollectiveError)
    if isinstance(error, RuntimeError) and not follows:
        call = stacks.wait_of_error(error.__traceback__)
    left = f"{type(error).__name__}: {reason_of(error)}"
    came = ""
    if call is not None:
        left, came = f"{type(error).__name__} in {call.text}", call.text
    if has_store:
        with suppress(RuntimeError, ValueError):  # it may have ended with rank 0
            finder.beat(look_every_s, left, came, follows or call is not None)
    if call is None or is_told:
        return
    meeting = Meeting(call.call, "", 0, "torch", call.group)
    if has_store:
        cause = finder.cause(meeting, reason_of(error), call)
    else:
        wait = Wait(meeting, 0, time.monotonic(), -1, call=call)
        cause = f"{reason_of(error)}; {finder.without_store(wait)}"
    _LOG.error("shardwise: rank %d: %s failed: %s", dist.get_rank(), call.text, cause)
